# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hosts made of network namespaces: each with its own interfaces, routes and firewall, on this machine's files and clock.

Ansible reaches them with a local connection whose Python runs inside the namespace.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from ansible_collections.nanochat.ddp.tests.integration.local import ROOT
from ansible_collections.nanochat.ddp.tests.integration.role_play import Stage

COLLECTIONS = ROOT / ".ansible" / "collections"
SAVED_RULES = Path("/etc/nftables.conf")


@functools.cache
def can_make_namespaces() -> bool:
    """Whether this user may make network namespaces here."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        return False
    name = f"able-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made


class Lan:
    """Hosts h0, h1 ... on one switch; every name is new, so that tests can run side by side."""

    def __init__(self, folder: Path, count: int = 2) -> None:
        self.tag = uuid.uuid4().hex[:6]
        self.folder = folder
        self.switch = f"nd{self.tag}s"
        self.names = [f"nd{self.tag}h{number}" for number in range(count)]
        # Shell commands that give a host its own files where the test wants them, for instance by a bind mount.
        # A tmux server lives in the namespace in which it was started, so each host has its own.
        self.preludes = [f"export TMUX_TMPDIR={folder}/tmux{number};" for number in range(count)]
        for number in range(count):
            (folder / f"tmux{number}").mkdir(parents=True, exist_ok=True)
            if SAVED_RULES.exists():
                # If this machine loads the file at boot, a firewall's rules would be saved there.
                shutil.copy(SAVED_RULES, folder / f"nftables{number}.conf")
                self.preludes[number] += f"mount --bind {folder}/nftables{number}.conf {SAVED_RULES};"
        self._do("ip", "netns", "add", self.switch)
        self._in(self.switch, "ip", "link", "add", "br0", "type", "bridge")
        self._in(self.switch, "ip", "link", "set", "br0", "up")
        for number, name in enumerate(self.names):
            self._do("ip", "netns", "add", name)
            self._in(name, "ip", "link", "set", "lo", "up")
            port = f"p{number}eth0"
            self._in(self.switch, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            self._in(self.switch, "ip", "link", "set", port, "master", "br0", "up")
            self._in(name, "ip", "link", "set", "eth0", "up")
            self._in(name, "ip", "addr", "add", f"10.9.0.{number + 1}/24", "dev", "eth0")

    def close(self) -> None:
        """Kill all processes in the namespaces, which the test started, and remove these."""
        for name in [*self.names, self.switch]:
            done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in done.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def run(self, number: int, *argv: str, text: str | None = None) -> str:
        """A command on one host."""
        return self._do(*self.inside(number, *argv), text=text)

    def start(self, number: int, *argv: str) -> subprocess.Popen[str]:
        """A command on one host that the caller ends."""
        return subprocess.Popen(
            self.inside(number, *argv), text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def module(self, number: int, module: str, /, **options: Any) -> dict[str, Any]:
        """A module of the collection on one host."""
        arguments = {**options, "_ansible_remote_tmp": str(self.folder)}
        done = subprocess.run(
            self.inside(number, sys.executable, "-m", f"ansible_collections.nanochat.ddp.plugins.modules.{module}"),
            input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}), env={**os.environ, "PYTHONPATH": str(COLLECTIONS)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.stdout, done.stderr
        return dict(json.loads(done.stdout))

    def stage(self, **settings: Any) -> Stage:
        """All hosts, for playbooks."""
        stage = Stage(self.folder, [f"h{number}" for number in range(len(self.names))], ddp_nic="eth0", **settings)
        stage.environment["ANSIBLE_STDOUT_CALLBACK"] = "default"
        for number, known in enumerate(stage.hosts.values()):
            python = self.folder / f"python-{self.names[number]}"
            python.write_text(f'#!/bin/sh\nexec {shlex.join(self.inside(number, sys.executable))} "$@"\n')
            python.chmod(0o755)
            known["ansible_python_interpreter"] = str(python)
        return stage

    def inside(self, number: int, *argv: str) -> list[str]:
        """The command line that runs a command on a host."""
        words = ["ip", "netns", "exec", self.names[number]]
        prelude = self.preludes[number]
        return [*words, "sh", "-c", f'{prelude} exec "$@"', "sh", *argv]

    def _in(self, name: str, *argv: str, text: str | None = None) -> str:
        return self._do("ip", "netns", "exec", name, *argv, text=text)

    @staticmethod
    def _do(*argv: str, text: str | None = None) -> str:
        done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
        return done.stdout
