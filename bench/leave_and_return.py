# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cost in loss when a rank leaves a run and comes back, with the momentum of its matrices or without.

    python bench/leave_and_return.py
    python bench/leave_and_return.py --steps 240 --write leave_and_return.json

Two ranks on this machine train on Python's own library from the same weights. "whole": nothing happens. "asked": after a
third of the steps both save and end, one goes on alone for another third, and both make the last one. "killed": the same,
but the second rank is killed, so that the first one saves alone and Muon's momentum of the matrices that the second one
updated starts from zero.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pieces
from local_steps import TRAINER, environment, prepare

WAYS = ("whole", "asked", "killed")
PATIENCE = 3600.0
TRIES = 10
LENGTH, ROWS = 128, 4
MODEL = ["--depth", "4", "--aspect-ratio", "32", "--head-dim", "32", "--max-seq-len", str(LENGTH)]


class Job:
    """One way, in folders of its own for each rank."""

    def __init__(self, data: Path, folder: Path, steps: int) -> None:
        self.data, self.folder, self.steps = data, folder, steps

    def start(self, world: int) -> list[subprocess.Popen[bytes]]:
        """All ranks; each goes on from what there is."""
        port = pieces.free_port()
        flags = [
            *MODEL, "--device-batch-size", str(ROWS), "--total-batch-size", str(2 * ROWS * LENGTH), "--resume",
            "--num-iterations", str(self.steps), "--eval-every", str(self.steps), "--eval-tokens", "65536",
            "--sample-every", "-1", "--core-metric-every", "-1", "--save-on-loss", "--head", "whole",
        ]  # fmt: skip
        return [
            subprocess.Popen(
                [sys.executable, "-m", "scripts.base_train", *flags, "--run-dir", str(self.folder / f"host{rank}")],
                cwd=TRAINER,
                env=self.environment(rank, world, port),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for rank in range(world)
        ]

    def environment(self, rank: int, world: int, port: int) -> dict[str, str]:
        base = self.folder / f"host{rank}"
        base.mkdir(parents=True, exist_ok=True)
        if not (base / "tokenizer").exists():
            (base / "tokenizer").symlink_to(self.data / "tokenizer")
        place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        more = {"NANOCHAT_BASE_DIR": str(base), "NANOCHAT_DATA_DIR": str(self.data / "data")}
        return environment(self.data, **more, **{name: str(value) for name, value in place.items()})

    def events(self, kind: str) -> list[dict[str, Any]]:
        return pieces.events(self.folder / "host0/metrics-rank0.jsonl", kind)

    def until(self, step: int, world: int, kill: bool) -> None:
        """Train until a step at the least, and lose a rank or have all end then."""
        processes, begun = self.start(world), time.time()
        while not any(event["step"] >= step and event["time"] > begun for event in self.events("step")):
            if processes[0].poll() is not None or time.time() - begun > PATIENCE:
                raise SystemExit(f"the run in {self.folder} ended before step {step}")
            time.sleep(0.02)
        processes[-1].send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        for process in processes:
            process.wait(PATIENCE)

    def finish(self, world: int) -> None:
        """Train to the end."""
        codes = [process.wait(PATIENCE) for process in self.start(world)]
        if any(codes):
            raise SystemExit(f"the run in {self.folder} ended with {codes}")


def train(way: str, data: Path, folder: Path, steps: int) -> dict[str, Any]:
    """One way to its end."""
    for attempt in range(TRIES):
        job = Job(data, folder / f"{way}{attempt}", steps)
        if way != "whole":
            job.until(steps // 3, 2, kill=way == "killed")
            if way == "killed" and not any(event.get("alone") for event in job.events("checkpoint")):
                continue  # it was killed in the moment in which the weights change
            job.until(2 * steps // 3, 1, kill=False)
        job.finish(2)
        return told(way, job)
    raise SystemExit(f"in {TRIES} tries the rank that was left never saved")


def told(way: str, job: Job) -> dict[str, Any]:
    """Its last evaluation and its losses."""
    smooth = {event["step"]: event["loss_smooth"] for event in job.events("step")}
    resumed = [event["resumed_from"] for event in job.events("start")][1:]
    made = len(job.events("step")) - len(smooth)
    return {
        "way": way,
        "resumed_from": resumed,
        "steps_made_again": made,
        "after_leaving": smooth[min(resumed[0] + 20, job.steps - 1)] if resumed else None,
        "loss": smooth[job.steps - 1],
        "val_bpb": job.events("eval")[-1]["val_bpb"],
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| way | went on from | made again | smooth loss at the end | bits per byte | against whole |",
        "|---|---|---|---|---|---|",
    ]
    whole = results[0]["val_bpb"]
    for one in results:
        went_on = ", ".join(map(str, one["resumed_from"])) or "-"
        cells = [one["way"], went_on, one["steps_made_again"], f"{one['loss']:.4f}", f"{one['val_bpb']:.4f}"]
        lines.append("| " + " | ".join(map(str, [*cells, f"{100 * (one['val_bpb'] / whole - 1):+.2f} %"])) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--write", type=Path, help="file for the figures, as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "data"
        data.mkdir()
        prepare(data)
        results = [train(way, data, Path(place), given.steps) for way in WAYS]
    print(table(results))
    if given.write:
        given.write.write_text(
            json.dumps({"steps": given.steps, "cores": os.cpu_count(), "ways": results}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
