# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Builds base folders with a run in them, from a short description: the public files that trainer, session and keepers write.

Times in a description are seconds before now. A rank that is said to live is a process that renews its heartbeat.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Case = Mapping[str, Any]

# What these are called is a time, whatever file it stands in.
TIMES = ("time", "started", "ended", "died", "since", "phase_since", "ends", "begun")
STEP_SECONDS, BATCH = 0.5, 2048


def at(now: float, document: Any) -> Any:
    """The document with its times as seconds since 1970."""
    if isinstance(document, list):
        return [at(now, one) for one in document]
    if not isinstance(document, dict):
        return document
    timed = (key for key, value in document.items() if key in TIMES and isinstance(value, (int, float)))
    return {**{key: at(now, value) for key, value in document.items()}, **{key: now + document[key] for key in timed}}


def loss_of(step: int) -> float:
    """It falls, a little less each step."""
    return 3 + 5 / (1 + step / 50)


def steps(rank: int, first: int, behind: int, begun: float, more: Case) -> Iterator[dict[str, Any]]:
    """A step as the trainer writes it; ranks wait for rank 0, which is the slowest."""
    for step in range(first, behind):
        seconds = more.get("seconds", STEP_SECONDS)
        shares = {"forward_backward": 0.6, "wait": 0.3 if rank else 0.05, "optimizer": 0.08, "data": 0.01}
        yield {
            "kind": "step", "time": begun + seconds * (step - first + 1), "step": step, "seconds": seconds,
            "loss": loss_of(step), "loss_smooth": loss_of(step) + 0.01, "tokens_per_second": BATCH / seconds,
            **{f"{name}_seconds": share * seconds for name, share in shares.items()},
            "rows": 2, "bytes_sent": 24_000_000, "memory_bytes": 1_200_000_000, "lr_multiplier": 1.0, "epoch": 1, **more,
        }  # fmt: skip


def events(rank: int, world: int, run: str, host: Case) -> Iterator[dict[str, Any]]:
    """The lines of metrics-rankN.jsonl: `steps FIRST BEHIND {...}`, or another kind with its further keys."""
    clock, step = float(host.get("began", -600)), 0
    for kind, *words in host["metrics"]:
        more = words[-1] if words and isinstance(words[-1], dict) else {}
        if kind == "steps":
            for event in steps(rank, words[0], words[1], clock, more):
                yield event
                clock, step = event["time"], event["step"]
            continue
        known = {
            "start": {
                "rank": rank, "world": world, "run": run, "dtype": "float32", "matmul": "fp32", "kernels": ["norm"], "steps": 100,
                "model": {"config": {"n_layer": 4}, "parameters": {"total": 7340162}},
                "settings": {"num_iterations": 100, "total_batch_size": BATCH},
                "total_batch_size": BATCH, "resumed_from": None, "attempt_id": "abc",
            },
            "checkpoint": {"path": f"base_checkpoints/{run}/model_{step + 1:06d}.pt", "bytes": 58_000_000, "seconds": 0.4},
            "end": {"error": None, "steps": step + 1, "identical": True},
        }.get(kind, {})  # fmt: skip
        yield {"kind": kind, "time": clock, "step": step, **known, **more}


def oom_kills() -> int:
    """How often this kernel has killed a process because memory ran out."""
    counts = dict(line.split() for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines())
    return int(counts["oom_kill"])


class RunFolders:
    """Base folders of one case, and the processes in them."""

    def __init__(self, root: Path, plan: Case, case: Case) -> None:
        self.root, self.case, self.now = root, case, time.time()
        self.plan = signed(json.loads(json.dumps(plan).replace("/BASE", str(root))))
        self.processes: list[subprocess.Popen[bytes]] = []
        for node in self.plan["nodes"]:
            self._host(node, {**case.get("every", {}), **case["hosts"].get(node["host"], {})})

    def __enter__(self) -> RunFolders:
        return self

    def __exit__(self, *dummy: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        shutil.rmtree(self.root, ignore_errors=True)

    def _host(self, node: Case, host: Case) -> None:
        folder, rank = Path(node["run_dir"]), node["rank"]
        Path(node["base_dir"]).mkdir(parents=True, exist_ok=True)
        if host.get("nothing"):
            return
        folder.mkdir(parents=True, exist_ok=True)
        run, name = self.plan["run"], f"nanochat-{self.plan['run']}-rank{rank}"
        self._json(folder / "plan.json", self.plan)
        self._lines(
            folder / f"metrics-rank{rank}.jsonl",
            events(rank, self.plan["world"], run, host) if "metrics" in host else [],
        )
        self._lines(folder / "members.jsonl", [{"host": node["host"], **event} for event in host.get("members", [])])
        for file in ("training", "members"):
            if isinstance(content := host.get({"members": "keeper"}.get(file, file)), dict):
                self._json(folder / f"{file}.json", content)
        for path, text in {
            f"log/rank{rank}.log": "\n".join(host.get("log", [])) + "\n",
            **host.get("files", {}),
        }.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        checkpoints = f"{self.plan.get('stage', {}).get('folder', 'base_checkpoints')}/{run}"
        for step in host.get("saved", []):
            for file in (f"model_{step:06d}.pt", f"meta_{step:06d}.json"):
                (folder / checkpoints).mkdir(parents=True, exist_ok=True)
                (folder / checkpoints / file).write_text("{}", encoding="utf-8")
        if "session" in host:
            session = {"id": name, "session": name, "argv": node["argv"], "boot_id": boot_id(), "started": -600, "log_begin": 0,
                       "pid": None, "pid_start": None, "child_pid": None, "ended": None, "exit_code": None, "signal": None}  # fmt: skip
            self._json(folder / "session.json", {**session, **self._alive(host, node, name), **host["session"]})
        if "heartbeat" in host and not host.get("alive"):
            self._json(folder / f"heartbeat-rank{rank}.json", {"pid": None, **self._beat(host, rank)})

    def _beat(self, host: Case, rank: int) -> dict[str, Any]:
        return {
            "rank": rank,
            "world": self.plan["world"],
            "steps": 100,
            "collective": None,
            **host.get("heartbeat", {}),
            # The kernel killed nothing since, whatever it has killed on this machine before.
            "oom_kills": oom_kills(),
        }

    def _alive(self, host: Case, node: Case, name: str) -> dict[str, Any]:
        """Start the process of a rank that lives, and wait for its first heartbeat."""
        if not host.get("alive"):
            return {}
        folder, rank = Path(node["run_dir"]), node["rank"]
        environment = {**os.environ, "NANOCHAT_DDP_SESSION": name, "NANOCHAT_BASE_DIR": str(folder), "RANK": str(rank)}
        argv = [
            sys.executable,
            "-S",
            __file__,
            str(folder),
            json.dumps(at(self.now, self._beat(host, rank))),
            host["alive"],
        ]
        process = subprocess.Popen(argv, env=environment)
        self.processes.append(process)
        deadline = time.monotonic() + 30
        while not (folder / f"heartbeat-rank{rank}.json").exists():
            assert time.monotonic() < deadline, f"no heartbeat in {folder}"
            time.sleep(0.02)
        if host["alive"] == "frozen":
            process.send_signal(signal.SIGSTOP)
        start = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        return {"pid": process.pid, "pid_start": int(start), "child_pid": process.pid}

    def _json(self, path: Path, content: Any) -> None:
        path.write_text(json.dumps(content if content is self.plan else at(self.now, content)), encoding="utf-8")

    def _lines(self, path: Path, found: Any) -> None:
        if lines := [json.dumps(at(self.now, one)) + "\n" for one in found]:
            path.write_text("".join(lines), encoding="utf-8")


def signed(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan with its digest."""
    rest = {name: value for name, value in plan.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {**rest, "digest": hashlib.sha256(text.encode()).hexdigest()[:16]}


def boot_id() -> str:
    """This boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def live(folder: Path, beat: dict[str, Any], how: str) -> None:
    """A rank's process: it renews its heartbeat and says where it is; one that works makes progress all the time, and one that will be
    frozen renews nothing any more."""
    rank = beat["rank"]
    request, answer = folder / f"dump-request-rank{rank}", folder / f"dump-rank{rank}.json"
    while True:
        now = time.time()
        if how != "frozen" or not (folder / f"heartbeat-rank{rank}.json").exists():
            written = folder / f"heartbeat-rank{rank}.new"
            now -= 120 if how == "frozen" else 0
            moving = {"phase_since": now} if how == "works" else {}
            written.write_text(json.dumps({**beat, "pid": os.getpid(), "time": now, **moving}), encoding="utf-8")
            written.replace(folder / f"heartbeat-rank{rank}.json")
        if request.exists():
            answer.write_text(
                json.dumps({"time": now, "pid": os.getpid(), "stacks": {"MainThread": ["train.py:1 wait"]}}),
                encoding="utf-8",
            )
            request.unlink()
        time.sleep(0.5)


if __name__ == "__main__":
    live(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
