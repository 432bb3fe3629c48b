# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A run with keepers as the playbooks start, show, thin out and stop it: real sessions around a stand-in for the trainer."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.nanochat.ddp.plugins.module_utils._contract.document import digest_of
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import processes
from ansible_collections.nanochat.ddp.plugins.module_utils._session import boot, reaper, record
from ansible_collections.nanochat.ddp.tests.integration.local import ROOT, free_port, until
from ansible_collections.nanochat.ddp.tests.integration.role_play import Play, messages
from ansible_collections.nanochat.ddp.tests.unit.plugins.module_utils._keeper.test_keeper import PLAN, write_trainer

PATIENCE = 600
pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Run(Play):
    """Two hosts in folders, and the playbooks that are played on them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ["desktop", "laptop"], {**PLAN, "run": "d4", "data": {"id": "none"}, "model": {}})
        self.variables, trainer = {"ddp_controller": {"fresh": False}}, write_trainer(folder)
        for rank, node in enumerate(self.hosts.values()):
            keeper = ["-B", node["run_dir"] + "/.keeper/keeper.py"]
            node.update(
                rank=rank, rows=4, session=f"nanochat-d4-{folder.name}-rank{rank}", keeper_port=free_port(), checkpoint_bytes=1000,
                flags={"depth": 4}, session_argv=[sys.executable, *keeper],
                env={"PYTHONPATH": str(folder / "fake")}, env_secret=[], peers=[], **trainer,
            )  # fmt: skip
            Path(node["run_dir"]).mkdir(parents=True)
        self.plan["digest"] = digest_of(self.plan)

    def book(self, name: str, *arguments: str) -> str:
        """Play a playbook of the collection; its output."""
        return self.play(f"nanochat.ddp.{name}", *arguments, ANSIBLE_STDOUT_CALLBACK="default")

    def launch(self, roles: str = "launch") -> dict[str, Any]:
        """Play roles, without a failure; what Ansible tells of it."""
        account: dict[str, Any] = self.run(roles)
        assert not any(stats["failures"] for stats in account["stats"].values()), messages(account)
        return account

    def state(self, host: str) -> tuple[str | None, list[str]]:
        with contextlib.suppress(OSError, ValueError):
            told = json.loads((Path(self.hosts[host]["run_dir"]) / "members.json").read_text())
            return told["state"], told["members"]
        return None, []

    def wait_for_training(self, host: str, *members: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.state(host) != ("training", list(members)):
            logs = [path.read_text()[-2000:] for path in self.folder.glob("*/runs/d4/log/*.log")]
            assert time.monotonic() < deadline, (self.state(host), logs)
            time.sleep(0.2)

    def record(self, host: str) -> dict[str, Any]:
        return dict(json.loads((Path(self.hosts[host]["run_dir"]) / "session.json").read_text()))

    def shut_down(self, host: str) -> None:
        """Signal all processes at once, like init."""
        told = self.record(host)
        session = reaper.SessionIdentity(told["id"], os.getuid(), (told["pid"], told["pid_start"]))
        pids = [told["pid"], *reaper.members(session)]
        for number in (signal.SIGTERM, signal.SIGHUP):
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
        until(lambda: not any(processes.alive(pid, None) for pid in pids), PATIENCE)

    def rank_of(self, host: str) -> int:
        """The pid of the stand-in."""
        marker = self.record(host)["id"].encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
                forked = (entry / "task" / entry.name / "children").read_text().split()
                if b"scripts.preloaded" in command and forked and marker in (entry / "environ").read_bytes():
                    return int(forked[0])
        raise AssertionError(f"no rank runs on {host}")


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path)
    yield made
    for node in made.hosts.values():
        subprocess.run(["tmux", "kill-session", "-t", f"={node['session']}"], check=False, capture_output=True)
    # Processes left by a failed test would disturb other tests; the stand-ins' keepers name this test's folder.
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"PYTHONPATH={tmp_path}/fake".encode() in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


def test_a_run_with_keepers_from_its_start_to_its_stop(run):
    account = run.launch()
    run.wait_for_training("laptop", "desktop", "laptop")
    secrets = set()
    for node in run.hosts.values():
        path = Path(node["run_dir"]) / ".keeper/keeper.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        secrets.add(json.loads(path.read_text())["secret"])
    assert len(secrets) == 1
    assert secrets.pop() not in json.dumps(account)

    os.kill(run.rank_of("laptop"), signal.SIGKILL)
    until(lambda: "generation 3" in run.book("status"), PATIENCE)
    run.wait_for_training("desktop", "desktop", "laptop")
    # In words that people search for, as it could not write them itself.
    log = Path(run.hosts["laptop"]["run_dir"]) / "log/rank1.log"
    assert "keeper: rank 1 was killed by signal 9 (SIGKILL, exitcode: -9)" in log.read_text()

    # Taken out by hand, and let in again.
    assert "laptop would leave the run d4" in run.book("leave", "-e", "target=laptop", "--check")
    assert run.state("laptop")[0] == "training"
    assert "laptop has left the run d4" in run.book("leave", "-e", "target=laptop")
    run.wait_for_training("desktop", "desktop")
    run.book("join", "-e", "target=laptop")
    run.wait_for_training("laptop", "desktop", "laptop")

    # A host that is shut down takes part again once it has booted.
    run.shut_down("laptop")
    run.wait_for_training("desktop", "desktop")
    ended = run.record("laptop")
    assert (ended["stopped"], ended["exit_code"]) == (False, record.COME_BACK), ended
    assert ended["terminated_by"] in ("SIGTERM", "SIGHUP")
    # Its tmux does not outlive the machine.
    subprocess.run(["tmux", "kill-session", "-t", f"={run.hosts['laptop']['session']}"], check=True)
    boot.restart(run.hosts["laptop"]["run_dir"])
    run.wait_for_training("laptop", "desktop", "laptop")

    run.book("stop")
    assert [run.state(host)[0] for host in ("desktop", "laptop")] == ["stopped", "stopped"]

    # The docs name every file of the run folder.
    documented = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    names = {
        re.sub(r"rank\d", lambda found: found[0][:-1] + "0", path.name)
        for path in Path(run.hosts["laptop"]["run_dir"]).iterdir()
    }
    assert {name for name in names if name not in documented} == set()


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_a_host_with_a_full_disk_leaves_joins_is_stopped_started_again_and_purged(run):
    disk = Path(run.hosts["laptop"]["base_dir"])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=0755", "tmpfs", disk], check=True)
    try:
        Path(run.hosts["laptop"]["run_dir"]).mkdir(parents=True)
        run.launch()
        run.wait_for_training("laptop", "desktop", "laptop")

        def fill() -> None:
            with contextlib.suppress(OSError), (disk / f"filler-{time.time()}").open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 512)
            assert not os.statvfs(disk).f_bavail

        fill()
        assert "laptop has left the run d4" in run.book("leave", "-e", "target=laptop")
        run.wait_for_training("desktop", "desktop")
        fill()
        run.book("join", "-e", "target=laptop")
        fill()
        run.book("stop")
        assert run.record("laptop")["stopped"] and run.state("desktop")[0] == "stopped"
        fill()
        run.variables["launch_state"] = "restarted"
        run.launch()
        run.wait_for_training("desktop", "desktop")
        run.variables["launch_stop_state"] = "absent"
        for what, run_name in (("run", "d4"), ("all", "")):
            fill()
            run.variables.update(ddp_purge=what, ddp_run=run_name)
            run.launch("launch:stop+launch:purge")
            assert not (disk / "runs").exists()
        assert {path.name.partition("-")[0] for path in disk.iterdir()} <= {"filler"}
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
