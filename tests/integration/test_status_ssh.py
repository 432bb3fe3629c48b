# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Status and logs over real ssh connections, asked by a controller that never saw the run before."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.processes import start_ticks
from ansible_collections.nanochat.ddp.tests.integration import fake_run
from ansible_collections.nanochat.ddp.tests.integration.local import HAS_SSHD, ROOT, ansible, listening_sshd
from ansible_collections.nanochat.ddp.tests.integration.role_play import Stage

STEPS, LEFT = 5000, 1000


def play(stage: Stage, name: str, *words: str) -> list[str]:
    """From a controller with nothing but the collection and the inventory: no checkout, no configuration, no run of its own."""
    home = stage.folder / "second-controller"
    home.mkdir(exist_ok=True)
    sockets = Path(tempfile.mkdtemp(prefix="cp"))  # their names must be short
    done = ansible(
        *stage.argv(f"nanochat.ddp.{name}", *words), cwd=home,
        HOME=str(home), ANSIBLE_HOME=str(home / ".ansible"), ANSIBLE_COLLECTIONS_PATH=str(ROOT / ".ansible" / "collections"),
        ANSIBLE_STDOUT_CALLBACK="nanochat.ddp.story", ANSIBLE_PIPELINING="true", ANSIBLE_SSH_CONTROL_PATH_DIR=str(sockets),
    )  # fmt: skip
    shutil.rmtree(sockets, ignore_errors=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(not HAS_SSHD, reason="needs root and openssh-server")
def test_a_second_controller_sees_the_run_and_its_logs(tmp_path: Path) -> None:
    begun = time.time() - (STEPS - LEFT) - 1
    for rank in (0, 1):
        run = tmp_path / f"node{rank + 1}" / "runs" / "d4"
        events = [event for event in fake_run.history(rank, 2, STEPS, begun, 1.0) if event["kind"] != "end"]
        fake_run.write_history(run, events[:-LEFT], rank)
        # The run's process: this one lives as long as the test.
        alive = {"pid": os.getpid(), "pid_start": start_ticks(os.getpid())}
        fake_run.write_json(run / "session.json", fake_run.session_of(rank, begun, **alive))
    with listening_sshd(tmp_path) as reached:
        hosts = Stage(tmp_path, ["node1", "node2"], ansible_connection="ssh", **reached)
        lines = play(hosts, "status")
        assert lines[0].startswith("run d4, began "), lines
        assert lines[1].split()[:5] == ["host", "rank", "state", "step", "rows"]
        assert [line.split()[0] for line in lines[2:4]] == ["node1", "node2"]
        assert any("slow one: node1" in line for line in lines), lines

        *last, follow, one, other = play(hosts, "logs", "-e", "lines=2")
        assert last == [f"node{node} | step 000{step}" for node in (1, 2) for step in (18, 19)]
        assert follow == "To follow them:" and other.strip().startswith("ssh ")
        # With streams of its own: ssh makes those that it inherits non-blocking, in which later playbooks refuse to begin.
        with subprocess.Popen(
            shlex.split(one), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as following:
            assert following.stdout and following.stdout.readline() == "step 00010\n"
            following.kill()
