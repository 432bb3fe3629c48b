# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Shared by tests on this machine: Ansible's programs, free ports, an sshd, and waiting for a condition."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
HAS_SSHD = os.geteuid() == 0 and Path(SSHD).exists()
LOCAL = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
OFF = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_timeout": 5}


def until(condition: Callable[[], T], seconds: float = 60.0) -> T:
    """Poll until the condition holds and return what it gave."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} seconds: {condition}"
        time.sleep(0.02)
    return found


def free_port() -> int:
    """A free port, of those that no outgoing connection is given: from the others a test at the same time would take it."""
    while True:
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", random.SystemRandom().randrange(10000, 29000))) as listener,
        ):
            return int(listener.getsockname()[1])


def ansible(program: str, *words: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one of Ansible's programs, by default in the checkout and so with its ansible.cfg."""
    tools = Path(sys.executable).parent
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    surroundings = {**kept, "PATH": f"{tools}:{os.environ['PATH']}", "NO_COLOR": "1"}
    return subprocess.run(
        [str(tools / program), *map(str, words)], cwd=cwd, env=surroundings | environment, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip


def one_line(output: str) -> str:
    """Ansible breaks its lines where it likes."""
    return " ".join(output.replace("\\n", " ").split())


@contextlib.contextmanager
def listening_sshd(folder: Path, **settings: str) -> Iterator[dict[str, object]]:
    """A real sshd on a port of its own; gives the variables by which Ansible reaches this machine through it."""
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    port = free_port()
    settings = {"HostKey": f"{folder}/host", "AuthorizedKeysFile": f"{folder}/user.pub", "StrictModes": "no", "PidFile": "none",
                "UsePAM": "no", "PermitRootLogin": "yes", "ListenAddress": "127.0.0.1", **settings}  # fmt: skip
    words = [f"-o{name}={value}" for name, value in settings.items()]
    with subprocess.Popen([SSHD, "-D", "-f", "/dev/null", "-p", str(port), *words]) as daemon:
        until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        try:
            yield {
                "ansible_host": "127.0.0.1", "ansible_port": port, "ansible_ssh_private_key_file": f"{folder}/user",
                "ansible_ssh_common_args": "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR",
            }  # fmt: skip
        finally:
            daemon.terminate()
