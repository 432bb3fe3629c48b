# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whole runs of two local ranks beside a load that this test makes: a good run is never called stalled.

Every time one run is made, with so little patience that only the use of CPU shows that it lives, and with the load for half a minute.
BUSY_RUNS=20 makes as many runs with the usual patience, under load from the start to the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from load import Load
from two_nodes import ROOT, command, end_sessions, environment, need_trainer, write_inventory

RUNS = int(os.environ.get("BUSY_RUNS", "0"))
PROCESSES = 24
MODEL = {
    "ddp_depth": 2, "ddp_aspect_ratio": 32, "ddp_head_dim": 32, "ddp_sequence": 64, "ddp_total_batch": 256,
    "ddp_iterations": 30,
}  # fmt: skip
SECONDS = 600.0 if RUNS else 25.0
IMPATIENT = () if RUNS else ("-e", "watch_stall_minimum=6")


class Job:
    """Two nodes on this machine that share the environment of the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results = folder / "results"
        self.inventory = write_inventory(folder, **MODEL)
        self.environment = environment(folder)

    def sessions(self) -> list[str]:
        """An identifier of this start of the run."""
        found = [path.read_text() for path in self.folder.glob("*/runs/*/session.json")]
        return sorted(json.loads(text)["id"] for text in found if text)

    def play(self, *words: str, meanwhile: Callable[[], object] = lambda: None) -> str:
        """The output of train.yml; `meanwhile` is called once when both sessions have started."""
        argv = command(self.inventory, "train.yml", *words)
        before, called = self.sessions(), False
        log = self.folder / "log"
        with (
            log.open("w") as out,
            subprocess.Popen(argv, cwd=ROOT, env=self.environment, stdout=out, stderr=out) as playing,
        ):
            while playing.poll() is None:
                now = self.sessions()
                if not called and len(now) == 2 and not set(now) & set(before):
                    meanwhile()
                    called = True
                time.sleep(0.2)
        assert playing.returncode == 0, log.read_text()
        return log.read_text()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    need_trainer()
    try:
        yield Job(tmp_path)
    finally:
        end_sessions(tmp_path)


@pytest.mark.long
def test_a_good_run_beside_much_other_work_raises_no_alarm(job: Job) -> None:
    job.play("--tags", "data")
    for number in range(RUNS or 1):
        load, begun = Load(PROCESSES, SECONDS), time.monotonic()
        try:
            told = job.play("--tags", "restart", "-e", "ddp_fresh=true", *IMPATIENT, meanwhile=load.begin)
        finally:
            load.end()
        alarms = [json.loads(path.read_text())["verdict"] for path in job.results.glob("*/doctor.json")]
        print(
            f"run {number + 1}: {time.monotonic() - begun:.0f} s, {len(alarms)} alarms", file=sys.__stdout__, flush=True
        )
        assert load.processes, "the load was never made"
        assert not alarms, (alarms, told)
        assert [line.split()[2:4] for line in told.splitlines() if line.split()[2:3] == ["finished"]] == [
            ["finished", "30/30"]
        ] * 2
