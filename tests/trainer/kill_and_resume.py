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

import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import forked
import ranks
import torch
from trainings import Told

from nanochat.run import checkpoint_manager as checkpoints

STEPS_BEFORE = 6  # maximum steps of an attempt before it is disturbed; the minimum is 1
STEPS_A_KILL = 12  # more than an attempt can make, so that none reaches the end
LIMIT_SECONDS = 300.0  # for busy machines
DELAYS = {"import": 1.0, "resume": 0.02, "eval": 0.05, "save": 0.03, "any": 0.1}
# Of ten kills these come in some order; fewer kills are drawn from them.
MOMENTS = ("import", "resume", "eval", "eval", "save", "save", "save", "any", "any", "any")
FLAGS = (
    "--save-every", "3", "--eval-every", "4", "--eval-tokens", "2000", "--timeout-seconds", "5", "--resume",
)  # fmt: skip


class Trial(Told):
    """A job of two ranks, each with folders of its own."""

    def __init__(self, folder: Path, *flags: str) -> None:
        super().__init__(folder, 2)
        self.flags, self.began = flags, 0.0
        self.processes: list[forked.Python] = []

    def begin(self) -> int | None:
        """Start both; returns the step from which they must resume, the newest that is complete on either host."""
        folders = [folder for folder in map(self.checkpoints, (0, 1)) if folder.exists()]
        newest = max((step for folder in folders for step in checkpoints.whole_steps(folder)), default=None)
        # A resumed run must keep the library that it began with, although this machine now prefers another.
        self.more = {rank: {"TEST_ROUTE": "mkl" if newest is None else "onednn"} for rank in (0, 1)}
        for rank in (0, 1):
            self.told(rank).unlink(missing_ok=True)
        self.began = time.time()
        self.processes = self.start(*FLAGS, *self.flags)
        return newest

    def wait_for(self, rank: int, moment: str, steps: int) -> None:
        """Wait until a rank is in this phase and, if that comes after the first step, has made this many steps."""
        made, until = len(self.events("step", rank)), time.monotonic() + LIMIT_SECONDS
        while True:
            phase = self.phase(rank)
            far = moment in ("import", "resume") or len(self.events("step", rank)) >= made + steps
            if phase and far and moment in (phase, "any", "import"):
                return
            over = time.monotonic() > until or any(process.poll() is not None for process in self.processes)
            assert not over, f"rank {rank} never came to {moment}"
            time.sleep(0.0005)

    def kill(self, rank: int) -> str:
        """Kill a rank and return its phase. It is stopped first, so that this is current."""
        self.processes[rank].send_signal(signal.SIGSTOP)
        phase = self.phase(rank)
        self.processes[rank].kill()
        return phase

    def check_start(self, expected: int | None) -> None:
        """Every rank that recorded a start has resumed from the expected step."""
        for rank in (0, 1):
            for begun in self.events("start", rank)[-1:]:
                assert begun["time"] < self.began or begun["resumed_from"] == expected, rank

    def disturb(self, number: int, moment: str, chance: random.Random) -> None:
        """Start, kill one rank, and wait for the other's end, which must say in one sentence who was killed."""
        expected, victim = self.begin(), chance.randrange(2)
        self.wait_for(victim, moment, chance.randint(1, STEPS_BEFORE))
        time.sleep(chance.random() * DELAYS[moment])
        phase = self.kill(victim)
        other = ranks.finish(self.processes, LIMIT_SECONDS)[1 - victim]
        self.check_start(expected)
        said = [line for line in other.err.splitlines() if line.startswith("error: ")]
        print(f"kill {number}: rank {victim} in {phase}; the other said: {said}")
        assert len(said) == 1 and "a bug in nanochat.ddp" not in said[0] and f"rank {victim}" in said[0], other
        assert self.events("end", 1 - victim)[-1]["reason"] == "error"

    def complete(self) -> None:
        """Start and let it end."""
        expected = self.begin()
        ranks.passed(ranks.finish(self.processes, LIMIT_SECONDS))
        self.check_start(expected)


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
            ours, theirs = (torch.load(one.checkpoints(rank) / name, weights_only=True) for one in (trial, whole))
            assert same(ours, theirs), f"{name} on rank {rank} is not that of an undisturbed run"
        folder = trial.checkpoints(rank)
        kept = [f"_{step:06d}" for step in checkpoints.whole_steps(folder)]
        for path in folder.iterdir():
            assert any(step in path.name for step in kept) and not path.name.startswith("."), path


def endure(folder: Path, kills: int, flags: Sequence[str] = ()) -> None:
    """The whole trial; flags: more of the trainer's."""
    seed, steps = time.time_ns() % 10**6, STEPS_A_KILL * (kills + 1)
    print("seed", seed)
    chance = random.Random(seed)
    whole, trial = (Trial(folder / name, "--num-iterations", str(steps), *flags) for name in ("whole", "killed"))
    whole.complete()
    for number, moment in enumerate(chance.sample(MOMENTS, kills), start=1):
        trial.disturb(number, moment, chance)
    trial.complete()
    check_equal_and_tidy(trial, whole, steps)
