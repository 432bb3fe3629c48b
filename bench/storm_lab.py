# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hosts of a storm: network namespaces, each with its own disk, session, keeper and rank of the real trainer (d2 model)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / ".ansible/collections"), str(ROOT / "tests/integration")]

import pieces  # noqa: E402
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import keeper  # noqa: E402
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import host_code  # noqa: E402
from ansible_collections.nanochat.ddp.plugins.module_utils._run.folder import KeeperSetup, write_keeper, write_plan  # noqa: E402
from ansible_collections.nanochat.ddp.plugins.module_utils._session import runner  # noqa: E402
from ansible_collections.nanochat.ddp.plugins.module_utils._session.session import Session  # noqa: E402
from ansible_collections.nanochat.ddp.plugins.module_utils._session.tmux import Tmux  # noqa: E402
from lan import Lan  # noqa: E402
from pieces import TRAINER, environment, prepare  # noqa: E402

HOSTS = ("desktop", "laptop", "attic")
LENGTH, ROWS, SAVE_EVERY, PATIENCE = 128, 4, 100, 300.0
DISK = "400m"
Json = dict[str, Any]


class Lab:
    """The hosts, with methods to observe and disturb them."""

    def __init__(self, folder: Path, min_hosts: int, grace: int) -> None:
        self.folder, self.min_hosts, self.grace = folder, min_hosts, grace
        prepare(folder)
        self.lan = Lan(folder / "lan", len(HOSTS))
        self.sessions: dict[str, subprocess.Popen[bytes]] = {}
        for host in HOSTS:
            (folder / host).mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=0755", "tmpfs", folder / host], check=True)
            (folder / host / "tokenizer").symlink_to(folder / "tokenizer")
            self.broken(host).parent.mkdir()

    def close(self) -> None:
        self.lan.close()
        for session in self.sessions.values():
            session.wait()
        for host in HOSTS:
            subprocess.run(["umount", "-l", self.folder / host], check=False)

    # -- the run

    def plan(self) -> Json:
        same = {
            "rows": ROWS,
            "keeper_port": 29400,
            "checkpoint_bytes": 10**7,
            "venv_dir": sys.prefix,
            "trainer_dir": str(TRAINER),
        }
        return {
            "timeout_seconds": 60,
            "world": len(HOSTS),
            "master": {"host": HOSTS[0], "address": self.address(HOSTS[0]), "port": 29500},
            "trainer": {"script": "scripts.base_train"},
            "training": {"rows": [ROWS] * len(HOSTS), "device_batch": ROWS},
            "keeper": {"min_hosts": self.min_hosts, "grace_seconds": self.grace, "restarts": 1000},
            "nodes": [{**same, "host": host, "rank": rank, "address": self.address(host), "flags": self.flags(host)}
                      for rank, host in enumerate(HOSTS)],
        }  # fmt: skip

    def flags(self, host: str) -> Json:
        return {
            "depth": 2, "aspect-ratio": 64, "head-dim": 32, "max-seq-len": LENGTH, "device-batch-size": ROWS,
            "total-batch-size": len(HOSTS) * ROWS * LENGTH, "num-iterations": 1000000, "eval-every": -1, "sample-every": -1,
            "core-metric-every": -1, "save-every": SAVE_EVERY, "timeout-seconds": 60, "run-dir": str(self.folder / host),
            "head": "whole", "save-on-loss": True, "resume": True,
        }  # fmt: skip

    def launch(self) -> None:
        """Start the run as a user does: a new secret, and a session on every host."""
        secret = os.urandom(20).hex()
        for host in HOSTS:
            run_dir = str(self.folder / host)
            write_plan(run_dir, self.plan())  # type: ignore[arg-type]
            write_keeper(run_dir, KeeperSetup(host, secret, host_code.program(keeper.__name__, "main", run_dir)))
            self.boot(host)

    def boot(self, host: str) -> None:
        """Start a host's session from its disk."""
        folder, number = self.folder / host / ".session", HOSTS.index(host)
        folder.mkdir(exist_ok=True)
        (folder / "stop").unlink(missing_ok=True)
        (folder / "runner.py").write_text(host_code.program(runner.__name__, "main"))
        words = environment(
            self.folder,
            NANOCHAT_BASE_DIR=str(self.folder / host),
            PYTHONPATH=f"{self.broken(host).parent}:{TRAINER}",
            GLOO_SOCKET_IFNAME="eth0",
        )
        known = ("NANOCHAT", "OMP_", "PYTHONPATH", "GLOO", "TORCH")
        exports = "".join(f"export {name}='{value}'\n" for name, value in words.items() if name.startswith(known))
        keeper_program = self.folder / host / ".keeper/keeper.py"
        script = f"{exports}cd {TRAINER}\nexec {sys.executable} -B {keeper_program}\n"
        (folder.parent / "run.sh").write_text(script)
        log = str(self.folder / f"{host}.log")
        given = {"argv": [str(keeper_program)], "chdir": str(TRAINER), "env_file": None, "log": log, "env": {}}
        launch = {"id": f"{self.folder.name}-{host}", "session": host, "stop_timeout": 60, "revive": True}
        (folder / "launch.json").write_text(json.dumps({**launch, "given": given}))
        argv = self.lan.inside(number, sys.executable, "-B", str(folder / "runner.py"), str(folder))
        self.sessions[host] = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def stop(self) -> None:
        """Stop as the playbook does."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.stop_host, HOSTS))
        for host in HOSTS:
            if not self.read(host, "session.json").get("stopped"):
                raise SystemExit(f"the stop of {host} was not recorded")

    def stop_host(self, host: str) -> None:
        Session(host, str(self.folder / host), Tmux()).stop(60)
        self.sessions[host].wait()

    def broken(self, host: str) -> Path:
        """Where a file keeps a host's ranks from starting."""
        return self.folder / host / "broken" / "sitecustomize.py"

    def beside(self, host: str, program: str) -> subprocess.Popen[bytes]:
        """Run a program on a host, with its run folder and all hosts' addresses as arguments."""
        places = [f"{one}={self.address(one)}" for one in HOSTS]
        argv = self.lan.inside(HOSTS.index(host), sys.executable, "-c", program, str(self.folder / host), *places)
        return subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(ROOT / ".ansible/collections")})

    # -- observing

    def address(self, host: str) -> str:
        return f"10.9.0.{HOSTS.index(host) + 1}"

    def read(self, host: str, file: str) -> Json:
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((self.folder / host / file).read_text()))
        return {}

    def events(self, host: str, kind: str = "") -> list[Json]:
        return pieces.events(self.folder / host / f"metrics-rank{HOSTS.index(host)}.jsonl", kind)

    def together(self, *members: str) -> bool:
        """Whether exactly these hosts train together."""
        told = [self.read(host, "members.json") for host in members]
        return all((one.get("state"), one.get("members")) == ("training", list(members)) for one in told)

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > until:
                logs = "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))
                raise SystemExit(f"waited {PATIENCE:.0f} s for {what}\n{logs}")
            time.sleep(0.1)

    def first_step(self, begun: float, *members: str) -> float:
        """When these hosts made the first step of a generation that began after a given time."""
        found: list[float] = []

        def stepped() -> bool:
            starts = [event["time"] for event in self.events(members[0], "start") if event["time"] > begun]
            steps = [
                event["time"] for event in self.events(members[0], "step") if starts and event["time"] > starts[-1]
            ]
            found[:] = steps[:1] if self.together(*members) else []
            return bool(found)

        self.wait(f"{' and '.join(members)} to go on", stepped)
        return found[0]

    # -- disturbing

    def processes(self, host: str) -> list[int]:
        done = subprocess.run(
            ["ip", "netns", "pids", self.lan.names[HOSTS.index(host)]], capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in done.stdout.split()]

    def send(self, number: signal.Signals, *pids: int | None) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, number)

    def rank(self, host: str) -> int | None:
        """The rank's process, if alive."""
        pid = self.read(host, f"heartbeat-rank{HOSTS.index(host)}.json").get("pid")
        return pid if pid in self.processes(host) else None

    def keeper(self, host: str) -> int | None:
        pid = self.read(host, "session.json").get("child_pid")
        return pid if pid in self.processes(host) else None

    def on(self, host: str, *argv: str) -> None:
        subprocess.run(self.lan.inside(HOSTS.index(host), *argv), check=False, capture_output=True)

    def cable(self, host: str, state: str) -> None:
        """Pull the network cable (down) or plug it in (up)."""
        self.on(host, "ip", "link", "set", "eth0", state)

    def power(self, host: str, on: bool) -> None:
        """Cut the power: the link dies before the processes."""
        self.cable(host, "up" if on else "down")
        if on:
            self.boot(host)
        else:
            self.send(signal.SIGKILL, *self.processes(host))
            self.sessions[host].wait()

    def cut(self, host: str, *sources: str) -> None:
        """Cut a host's incoming traffic; what it sends still arrives."""
        rules = " ".join(f"ip saddr {self.address(source)} drop;" for source in sources)
        self.on(host, "nft", f"table inet cut {{ chain i {{ type filter hook input priority -10; {rules} }}; }}")

    def mend(self, *hosts: str) -> None:
        for host in hosts:
            self.on(host, "nft", "delete", "table", "inet", "cut")
