# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan names every obstacle to a run in a sentence with host and path, before anything is changed."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.nanochat.ddp.tests.integration.lan import ROOT, Lan, able

needs_namespaces = pytest.mark.skipif(not able(), reason="needs the right to make network namespaces")


@pytest.fixture
def lan(tmp_path):
    made = Lan(tmp_path, count=3)
    yield made
    made.close()


def sentences(output: str) -> str:
    """The output as one line."""
    return " ".join(output.replace("\\n", " ").split())


@needs_namespaces
def test_hosts_and_folders_that_cannot_be_used_are_told_before_anything_is_changed(lan, tmp_path):
    for number in (0, 1, 2):
        (tmp_path / f"h{number}").mkdir()
    (tmp_path / "empty").mkdir()
    tmux = shutil.which("tmux")
    assert tmux
    lan.preludes[0] += f"mount -t tmpfs -o size=30m full {tmp_path}/h0;"
    lan.preludes[1] += f"mount -t tmpfs -o ro still {tmp_path}/h1; mount --bind /dev/null {os.path.realpath(tmux)};"
    before = sorted(str(path) for path in tmp_path.rglob("*"))

    done = lan.playbook(
        "nanochat.ddp.train",
        ddp_data_source="text",
        ddp_data_host="h2",
        ddp_data_paths=[f"{tmp_path}/nothing", f"{tmp_path}/empty"],
        ddp_results_dir="/dev/null/runs",
        ddp_trainer_source=f"{tmp_path}/empty",
        ddp_total_batch=3072,
    )

    told = sentences(done.stdout)
    print(done.stdout)
    assert done.returncode != 0
    assert "7 problems; nothing was changed" in told
    assert f" MB free below {tmp_path}/h0, but checkpoints, data and software need about" in told
    assert f"ddp_base_dir is {tmp_path}/h1 on h1, but {getpass.getuser()} cannot write to {tmp_path}/h1 there" in told
    assert "h1 has no tmux, which training needs" in told
    assert f"ddp_data_paths names {tmp_path}/nothing, which does not exist on h2" in told
    assert f"ddp_data_paths names {tmp_path}/empty, which has no files on h2" in told
    assert f"{tmp_path}/empty on the controller has no scripts/base_train.py" in told
    assert "ddp_results_dir is /dev/null/runs, which is not writable on the controller" in told
    assert "Traceback" not in done.stdout + done.stderr
    own = ("hosts.json", "python-")
    after = sorted(str(path) for path in tmp_path.rglob("*") if not path.name.startswith(own))
    assert after == before


def play(inventory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "ANSIBLE_STDOUT_CALLBACK": "default", "ANSIBLE_NOCOLOR": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["ansible-playbook", "nanochat.ddp.train", "-i", str(inventory), *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def sshd(tmp_path):
    """A server without key; its port."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "host"], check=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = [f"HostKey={tmp_path}/host", "AuthorizedKeysFile=/dev/null", "UsePAM=no", f"PidFile={tmp_path}/pid"]
    words = [word for option in options for word in ("-o", option)]
    Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen(
        ["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", "-p", str(port), "-o", "ListenAddress=127.0.0.1", *words],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert "listening" in (server.stderr.readline() if server.stderr else "")
    yield port
    server.terminate()
    server.wait()


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("sshd", path="/usr/sbin"), reason="needs sshd and root")
def test_host_that_does_not_let_us_in_is_named_and_the_other_is_left_alone(sshd, tmp_path):
    way = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o IdentitiesOnly=yes -o ControlPath=none -F /dev/null"
    here = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    away = {"ansible_host": "127.0.0.1", "ansible_port": sshd, "ansible_ssh_private_key_file": f"{tmp_path}/key"}
    hosts = {
        "here": {**here, "ddp_base_dir": f"{tmp_path}/here"},
        "away": {**away, "ansible_ssh_common_args": way, "ddp_base_dir": f"{tmp_path}/away"},
    }
    inventory = tmp_path / "hosts.json"
    inventory.write_text(json.dumps({"trainers": {"hosts": hosts}}))

    done = play(inventory, "-e", json.dumps({"ddp_data_paths": [f"{tmp_path}/nothing"]}))

    told = sentences(done.stdout)
    assert done.returncode != 0
    assert "away cannot be examined (" in told and "Permission denied (publickey" in told
    assert f"ddp_data_paths names {tmp_path}/nothing, which does not exist on here" in told
    assert not (tmp_path / "here").exists() and not (tmp_path / "away").exists()
