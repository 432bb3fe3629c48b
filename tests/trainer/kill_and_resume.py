# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two ranks, one of them killed at random moments, and what became of the run.

A rank drawn by lot gets SIGKILL at a moment drawn by lot: while its Python starts, while it resumes, while it evaluates or
saves, or whenever it happens to be. Then the other rank must end by itself with one sentence that names the killed one, both are
started again, and they must go on from the newest step that is whole on either. In the end weights and optimizer must be those of
a run that nobody disturbed, to the bit, and every file in the checkpoint folders must belong to a whole checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ranks
import torch
import trainings

from nanochat.run import checkpoint_manager as checkpoints

STEPS_BEFORE = 6  # maximum steps of an attempt before it is disturbed; the minimum is 1
STEPS_A_KILL = 12  # more than an attempt can make, so that none reaches the end
LIMIT_SECONDS = 300.0  # for busy machines
DELAYS = {"import": 3.0, "resume": 0.02, "eval": 0.05, "save": 0.03, "any": 0.1}
# Of ten kills these come in some order; fewer kills are drawn from them.
MOMENTS = ("import", "resume", "eval", "eval", "save", "save", "save", "any", "any", "any")
FLAGS = (
    "--save-every", "3", "--eval-every", "4", "--eval-tokens", "2000", "--timeout-seconds", "5", "--resume",
)  # fmt: skip


class Trial:
    """A job of two ranks, each with folders of its own."""

    def __init__(self, folder: Path, steps: int, flags: Sequence[str]) -> None:
        self.job = trainings.Job(folder, 2)
        self.flags = ["--num-iterations", str(steps), *FLAGS, *flags]
        self.processes: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        port = ranks.free_port()
        self.processes = [self._process(rank, port) for rank in (0, 1)]

    def _process(self, rank: int, port: int) -> subprocess.Popen[str]:
        self.told(rank).unlink(missing_ok=True)
        # A resumed run must keep the library that it began with, although this machine now prefers another.
        route = "mkl" if self.newest_whole() is None else "onednn"
        told = {"TOLD_PHASE": str(self.told(rank)), "TEST_ROUTE": route}
        environ = ranks.environment(rank, 2, port, self.job.environment(rank) | told)
        argv = [sys.executable, "-m", "told_phases", *self.job.argv(self.flags)[2:]]
        with (self.job.base(rank) / "log").open("w") as log:
            return subprocess.Popen(argv, cwd=ranks.TRAINER, env=environ, stdout=log, stderr=log, text=True)

    def told(self, rank: int) -> Path:
        return self.job.base(rank) / "told-phase"

    def at(self, rank: int) -> tuple[int, str]:
        """Process and phase of a rank; no process yet: 0."""
        try:
            pid, phase, dummy = self.told(rank).read_text(encoding="ascii").split()
        except (FileNotFoundError, ValueError):
            return 0, ""
        return int(pid), phase

    def wait_for(self, rank: int, moment: str, steps: int) -> None:
        """Wait until a rank is in this phase and, if that comes after the first step, has made this many steps."""
        made, until = len(self.job.events("step", rank)), time.monotonic() + LIMIT_SECONDS
        early = moment in ("import", "resume")
        while True:
            phase = self.at(rank)[1]
            far = early or len(self.job.events("step", rank)) >= made + steps
            if far and moment in (phase, "any"):
                return
            over = time.monotonic() > until or any(process.poll() is not None for process in self.processes)
            assert not over, f"rank {rank} never came to {moment}: {self.log(0)[-300:]} {self.log(1)[-300:]}"
            time.sleep(0.0005)

    def kill(self, rank: int) -> str:
        """Kill a rank and return its phase. It is stopped first, so that this is current."""
        pid = self.at(rank)[0]
        os.kill(pid, signal.SIGSTOP)
        phase = self.at(rank)[1]
        os.kill(pid, signal.SIGKILL)
        return phase

    def finish(self) -> list[int]:
        """Wait until both have ended by themselves; returns their exit codes."""
        return [process.wait(LIMIT_SECONDS) for process in self.processes]

    def clear(self) -> None:
        """Kill the remaining processes."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def log(self, rank: int) -> str:
        return (self.job.base(rank) / "log").read_text(encoding="utf-8", errors="replace")

    def newest_whole(self) -> int | None:
        """The newest step that is complete on either host."""
        folders = [folder for folder in map(self.job.checkpoints, (0, 1)) if folder.exists()]
        return max((step for folder in folders for step in checkpoints.whole_steps(folder)), default=None)


def disturb(trial: Trial, number: int, moment: str, chance: random.Random) -> None:
    """Start, kill one rank, and wait for the other's end; the next start checks which step it resumes from."""
    expected = trial.newest_whole()
    trial.start()
    victim = chance.randrange(2)
    trial.wait_for(victim, moment, chance.randint(1, STEPS_BEFORE))
    time.sleep(chance.random() * DELAYS[moment])
    phase = trial.kill(victim)
    trial.finish()
    check_start(trial, expected)
    said = last_word(trial, 1 - victim)
    print(f"kill {number}: rank {victim} in {phase}; the other said: {said}")
    assert f"rank {victim}" in said


def check_start(trial: Trial, expected: int | None) -> None:
    """Every rank that recorded a start has resumed from the expected step."""
    for rank in (0, 1):
        begun = trial.job.events("start", rank)[-1:]
        if begun and begun[0]["time"] > trial.told(rank).stat().st_ctime:
            assert begun[0]["resumed_from"] == expected, rank


def last_word(trial: Trial, rank: int) -> str:
    """The remaining rank's error sentence."""
    sentences = [line for line in trial.log(rank).splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1 and "a bug in nanochat.ddp" not in sentences[0], trial.log(rank)[-2000:]
    assert trial.job.events("end", rank)[-1]["reason"] == "error"
    return sentences[0]


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal bit for bit, in all containers."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def check_equal_and_tidy(trial: Trial, whole: Trial, steps: int) -> None:
    """Weights and optimizer of both ranks must be those of the undisturbed run, and every file belong to a complete checkpoint."""
    for rank in (0, 1):
        for name in (checkpoints.model_name(steps), checkpoints.optimizer_name(steps, rank)):
            ours, theirs = (torch.load(one.job.checkpoints(rank) / name, weights_only=True) for one in (trial, whole))
            assert same(ours, theirs), f"{name} on rank {rank} is not that of an undisturbed run"
        folder = trial.job.checkpoints(rank)
        kept = [f"_{step:06d}" for step in checkpoints.whole_steps(folder)]
        for path in folder.iterdir():
            assert any(step in path.name for step in kept) and not path.name.startswith("."), path


@contextlib.contextmanager
def trial_in(folder: Path, steps: int, flags: Sequence[str]) -> Iterator[Trial]:
    trial = Trial(folder, steps, flags)
    try:
        yield trial
    finally:
        trial.clear()


def endure(folder: Path, kills: int, flags: Sequence[str] = ()) -> None:
    """The whole trial; flags: more of the trainer's."""
    seed, steps = time.time_ns() % 10**6, STEPS_A_KILL * (kills + 1)
    print("seed", seed)
    chance = random.Random(seed)
    with trial_in(folder / "whole", steps, flags) as whole, trial_in(folder / "killed", steps, flags) as trial:
        whole.start()
        assert whole.finish() == [0, 0], whole.log(0)[-1000:]
        for number, moment in enumerate(chance.sample(MOMENTS, kills), start=1):
            disturb(trial, number, moment, chance)
        expected = trial.newest_whole()
        trial.start()
        assert trial.finish() == [0, 0], trial.log(0)[-1000:] + trial.log(1)[-1000:]
        check_start(trial, expected)
        check_equal_and_tidy(trial, whole, steps)
