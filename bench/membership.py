# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How soon a run goes on after a rank or a host is lost or comes back, how many steps are made again, and what keepers cost.

    python bench/membership.py
    python bench/membership.py --write membership.json

Two keepers on this machine, each with a folder of its own for a host, around the real trainer with a d4 model. A host is
"off" when its keeper and its rank are killed, and frozen when all of its processes are stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / ".ansible/collections"))

import pieces  # noqa: E402
from ansible_collections.nanochat.ddp.plugins.module_utils._keeper import keeper  # noqa: E402
from ansible_collections.nanochat.ddp.plugins.module_utils._kit import host_code  # noqa: E402
from ansible_collections.nanochat.ddp.plugins.module_utils._kit.processes import marked, processes  # noqa: E402
from ansible_collections.nanochat.ddp.plugins.module_utils._run.folder import Keeper, write_keeper, write_plan  # noqa: E402
from local_steps import TRAINER, environment, prepare  # noqa: E402

HOSTS = ("desktop", "laptop")
SECRET = os.urandom(20).hex()
LENGTH, ROWS, SAVE_EVERY, PATIENCE = 256, 2, 20, 300.0


class Lab:
    """Both hosts and what happens to them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.keepers = folder, {}
        self.table: list[dict[str, Any]] = []
        self.keeper_percent = 0.0
        self.first = HOSTS[0]  # of those that train
        port, ports = pieces.free_port(), [pieces.free_port() for dummy in HOSTS]
        self.plan = {
            "timeout_seconds": 60,
            "world": len(HOSTS),
            "master": {"host": HOSTS[0], "address": "127.0.0.1", "port": port},
            "trainer": {"source": "ours", "script": "scripts.base_train"},
            "training": {"rows": [ROWS, ROWS], "device_batch": ROWS},
            "keeper": {"min_hosts": 1, "grace_seconds": 3, "restarts": 20},
            "nodes": [
                {"host": host, "rank": rank, "address": "127.0.0.1", "rows": ROWS, "keeper_port": ports[rank],
                 "checkpoint_bytes": 10**8, "venv_dir": sys.prefix, "tools_dir": str(TRAINER), "flags": self.flags(rank)}
                for rank, host in enumerate(HOSTS)
            ],
        }  # fmt: skip
        for host in HOSTS:
            run_dir = str(folder / host)
            Path(run_dir).mkdir()
            (folder / host / "tokenizer").symlink_to(folder / "tokenizer")
            write_plan(run_dir, self.plan)
            write_keeper(run_dir, Keeper(host, SECRET, host_code.program(keeper.__name__, "main", run_dir)))

    def flags(self, rank: int) -> dict[str, object]:
        return {
            "depth": 4, "max-seq-len": LENGTH, "head-dim": 64, "device-batch-size": ROWS, "total-batch-size": 2 * ROWS * LENGTH,
            "num-iterations": 100000, "eval-every": -1, "sample-every": -1, "core-metric-every": -1, "save-every": SAVE_EVERY,
            "timeout-seconds": 60, "run-dir": str(self.folder / HOSTS[rank]), "head": "whole", "save-on-loss": True, "resume": True,
        }  # fmt: skip

    def mark(self, host: str) -> str:
        return f"{self.folder}-{host}"

    def start(self, host: str) -> None:
        run_dir = self.folder / host
        more = {"NANOCHAT_BASE_DIR": str(run_dir), "NANOCHAT_DDP_SESSION": self.mark(host), "PYTHONPATH": str(TRAINER)}
        with (self.folder / f"{host}.log").open("ab") as log:
            self.keepers[host] = subprocess.Popen(
                [sys.executable, "-B", str(run_dir / ".keeper/keeper.py")],
                cwd=TRAINER,
                env=environment(self.folder, **more),
                stdout=log,
                stderr=log,
            )

    def processes(self, host: str) -> list[int]:
        """Everything of a host, the keeper too."""
        return sorted(marked(processes(), self.mark(host)))

    def signal_all(self, host: str, number: signal.Signals) -> None:
        for pid in self.processes(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGKILL and host in self.keepers:
            self.keepers[host].wait()

    def rank_pid(self, host: str) -> int:
        return int(json.loads((self.folder / host / f"heartbeat-rank{HOSTS.index(host)}.json").read_text())["pid"])

    def events(self, host: str, kind: str) -> list[dict[str, Any]]:
        return pieces.events(self.folder / host / f"metrics-rank{HOSTS.index(host)}.jsonl", kind)

    def members(self, host: str) -> list[str]:
        with contextlib.suppress(OSError, ValueError):
            told = json.loads((self.folder / host / "members.json").read_text())
            return told["members"] if told["state"] == "training" else []
        return []

    def goes_on(self, begun: float, *members: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The start of a generation of these after a moment, and its first step, as its first host saw them."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            starts = [event for event in self.events(members[0], "start") if event["time"] > begun]
            steps = [
                event for event in self.events(members[0], "step") if starts and event["time"] > starts[-1]["time"]
            ]
            if steps and all(self.members(host) == list(members) for host in members):
                return starts[-1], steps[0]
            time.sleep(0.1)
        logs = "\n".join(path.read_text()[-3000:] for path in self.folder.glob("*.log"))
        raise SystemExit(f"{' and '.join(members)} did not go on within {PATIENCE:.0f} s\n{logs}")

    def happen(self, what: str, do: Callable[[], None], *members: str) -> None:
        """Do something between two saves, and note when those that are left went on."""
        since = len(self.events(self.first, "step"))
        while len(self.events(self.first, "step")) < since + SAVE_EVERY // 2:
            time.sleep(0.1)
        self.first = members[0]
        begun = time.time()
        do()
        start, first = self.goes_on(begun, *members)
        made = [event["step"] for event in self.events(members[0], "step") if event["time"] < start["time"]]
        row = {
            "what": what,
            "seconds": round(first["time"] - begun, 1),
            "lost": max(0, made[-1] + 1 - start["resumed_from"]),
        }
        print(f"| {what} | {row['seconds']} s | {row['lost']} |", flush=True)
        self.table.append(row)

    def uneventful(self, seconds: float) -> float:
        """The share of a core that keepers use while nothing happens, in percent; the highest of them."""
        before = [processor_seconds(one.pid) for one in self.keepers.values()]
        begun = time.monotonic()
        time.sleep(seconds)
        used = [processor_seconds(one.pid) - was for one, was in zip(self.keepers.values(), before, strict=True)]
        return 100 * max(used) / (time.monotonic() - begun)

    def close(self) -> None:
        for host in self.keepers:
            self.signal_all(host, signal.SIGKILL)


def processor_seconds(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def story(lab: Lab) -> None:
    """Each event begins where the one before has ended."""
    for host in HOSTS:
        lab.start(host)
    lab.goes_on(0.0, *HOSTS)
    lab.keeper_percent = lab.uneventful(30.0)
    print(f"while nothing happens a keeper takes {lab.keeper_percent:.2f} % of a core\n")
    print("| what | until the next step | steps made again |\n|---|---|---|")
    lab.happen("kill -9 of a rank", lambda: os.kill(lab.rank_pid("laptop"), signal.SIGKILL), *HOSTS)
    lab.happen("a host freezes", lambda: lab.signal_all("laptop", signal.SIGSTOP), "desktop")
    lab.happen("it wakes up", lambda: lab.signal_all("laptop", signal.SIGCONT), *HOSTS)
    lab.happen("the master is switched off", lambda: lab.signal_all("desktop", signal.SIGKILL), "laptop")
    lab.happen("it is back", lambda: lab.start("desktop"), *HOSTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="file for the figures, as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        prepare(Path(place))
        lab = Lab(Path(place))
        try:
            story(lab)
        finally:
            lab.close()
        digests = {lab.events(host, "digest")[-1]["digest"] for host in HOSTS}
        print(f"weights at the last save: {'identical' if len(digests) == 1 else 'DIFFERENT'}")
    if given.write:
        given.write.write_text(
            json.dumps({"cores": os.cpu_count(), "keeper_percent": lab.keeper_percent, "events": lab.table}, indent=2)
            + "\n"
        )


if __name__ == "__main__":
    main()
