# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two ranks, one of them killed at ten random moments, and what became of the run.

    python tests/trainer/kill_and_resume.py
    python tests/trainer/kill_and_resume.py --kills 3 --seed 7 -- --sync bf16

A rank drawn by lot gets SIGKILL at a moment drawn by lot: while its Python starts, while it resumes, while it evaluates or
saves, or whenever it happens to be. Then the other rank must end by itself with one sentence that names the killed one, both are
started again, and they must go on from the newest step that is whole on either. In the end weights and optimizer must be those of
a run that nobody disturbed, to the bit, and every file in the checkpoint folders must belong to a whole checkpoint. Exit code 1 if
any of this is not so.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ranks
import torch
import trainings

sys.path.insert(0, str(ranks.TRAINER))

from nanochat.run import checkpoint_manager as checkpoints
from nanochat.run import resume

SAVE_EVERY, EVAL_EVERY = 3, 4
STEPS_BEFORE = 6  # maximum steps of an attempt before it is disturbed; the minimum is 1
STEPS_A_KILL = 12  # more than an attempt can make, so that none reaches the end
LIMIT_SECONDS = 300.0  # for busy machines
TIMEOUT_SECONDS = 15
DELAYS = {"import": 3.0, "resume": 0.02, "eval": 0.05, "save": 0.03, "any": 0.1}
# Of ten kills these come in some order; fewer kills are drawn from them.
MOMENTS = ("import", "resume", "eval", "eval", "save", "save", "save", "any", "any", "any")


class Failed(Exception):
    """The run did not survive a kill."""


class Kill(NamedTuple):
    """One kill and its outcome; went_on_from is None if the run had to start over."""

    number: int
    rank: int
    phase: str
    step: int
    seconds: float
    went_on_from: int | None


class Trial:
    """A job of two ranks, each with folders of its own."""

    def __init__(self, folder: Path, steps: int, timeout: int, flags: Sequence[str]) -> None:
        self.job = trainings.Job(folder, 2)
        self.flags = [
            "--num-iterations", str(steps), "--save-every", str(SAVE_EVERY), "--eval-every", str(EVAL_EVERY),
            "--eval-tokens", "2000", "--timeout-seconds", str(timeout), "--resume", *flags,
        ]  # fmt: skip
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

    def at(self, rank: int) -> tuple[int, str, int]:
        """Process, phase and step of a rank; no process yet: 0."""
        try:
            pid, phase, step = self.told(rank).read_text(encoding="ascii").split()
        except (FileNotFoundError, ValueError):
            return 0, "", 0
        return int(pid), phase, int(step)

    def wait_for(self, rank: int, moment: str, steps: int) -> None:
        """Wait until a rank is in this phase and, if that comes after the first step, has made this many steps."""
        made, until = len(self.job.events("step", rank)), time.monotonic() + LIMIT_SECONDS
        early = moment in ("import", "resume")
        while True:
            phase = self.at(rank)[1]
            far = early or len(self.job.events("step", rank)) >= made + steps
            if far and moment in (phase, "any"):
                return
            if time.monotonic() > until or any(process.poll() is not None for process in self.processes):
                raise Failed(f"rank {rank} never came to {moment}: {self.log(0)[-300:]} {self.log(1)[-300:]}")
            time.sleep(0.0005)

    def kill(self, rank: int) -> tuple[str, int]:
        """Kill a rank and return its phase and step. It is stopped first, so that these are current."""
        pid = self.at(rank)[0]
        os.kill(pid, signal.SIGSTOP)
        dummy, phase, step = self.at(rank)
        os.kill(pid, signal.SIGKILL)
        return phase, step

    def finish(self) -> list[int]:
        """Wait until both have ended by themselves; returns their exit codes."""
        try:
            return [process.wait(LIMIT_SECONDS) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise Failed("a rank did not end by itself") from None

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
        whole = [s for f in folders for s in checkpoints.steps_in(f) if resume.writer_of(f, s) is not None]
        return max(whole, default=None)


# -- one kill


def disturb(trial: Trial, number: int, moment: str, chance: random.Random) -> Kill:
    """Start, kill one rank, and wait for the other's end; the next start checks which step it resumes from."""
    expected = trial.newest_whole()
    trial.start()
    victim = chance.randrange(2)
    trial.wait_for(victim, moment, chance.randint(1, STEPS_BEFORE))
    time.sleep(chance.random() * DELAYS[moment])
    phase, step = trial.kill(victim)
    killed = time.time()
    trial.finish()
    check_start(trial, expected)
    said, ended = last_word(trial, 1 - victim)
    if f"rank {victim}" not in said:
        raise Failed(f"kill {number}: rank {1 - victim} did not name rank {victim}, but said: {said!r}")
    return Kill(number, victim, phase, step, ended - killed, trial.newest_whole())


def check_start(trial: Trial, expected: int | None) -> None:
    """Every rank that recorded a start has resumed from the expected step."""
    for rank in (0, 1):
        starts = trial.job.events("start", rank)
        begun = starts[len(starts) - 1 :]
        if begun and begun[0]["time"] > trial.told(rank).stat().st_ctime and begun[0]["resumed_from"] != expected:
            raise Failed(f"rank {rank} went on from step {begun[0]['resumed_from']}, not from {expected}")


def last_word(trial: Trial, rank: int) -> tuple[str, float]:
    """The remaining rank's error sentence, and when it ended."""
    sentences = [line for line in trial.log(rank).splitlines() if line.startswith("error: ")]
    ends = trial.job.events("end", rank)
    if len(sentences) != 1 or "a bug in nanochat.ddp" in sentences[0]:
        raise Failed(f"rank {rank} did not end with one sentence: {sentences or trial.log(rank)[-2000:]}")
    if not ends or ends[-1]["reason"] != "error":
        raise Failed(f"rank {rank} recorded no end")
    return sentences[0].removeprefix("error: "), ends[-1]["time"]


# -- the result


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal bit for bit, in all containers."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def check_equal(trial: Trial, whole: Trial, steps: int) -> None:
    """Weights and optimizer of both ranks must be those of the undisturbed run."""
    for rank in (0, 1):
        for name in (checkpoints.model_name(steps), checkpoints.optimizer_name(steps, rank)):
            ours, theirs = (torch.load(one.job.checkpoints(rank) / name, weights_only=True) for one in (trial, whole))
            if not same(ours, theirs):
                raise Failed(f"{name} on rank {rank} is not that of an undisturbed run")


def check_tidy(trial: Trial) -> None:
    """Every file must belong to a complete checkpoint."""
    for rank in (0, 1):
        folder = trial.job.checkpoints(rank)
        whole = checkpoints.whole_steps(folder, rank)
        for path in folder.iterdir():
            if not any(f"_{step:06d}" in path.name for step in whole) or path.name.startswith("."):
                raise Failed(f"{path} belongs to no whole checkpoint")


# -- the whole trial


def moments(kills: int, chance: random.Random) -> list[str]:
    drawn: list[str] = []
    while len(drawn) < kills:
        drawn += chance.sample(MOMENTS, len(MOMENTS))
    return drawn[:kills]


@contextlib.contextmanager
def trial_in(folder: Path, steps: int, timeout: int, flags: Sequence[str]) -> Iterator[Trial]:
    trial = Trial(folder, steps, timeout, flags)
    try:
        yield trial
    finally:
        trial.clear()


def endure(
    folder: Path, kills: int, seed: int, flags: Sequence[str] = (), timeout: int = TIMEOUT_SECONDS, tell: Any = print
) -> list[Kill]:
    """The whole trial; raises Failed if the run did not survive a kill."""
    chance = random.Random(seed)
    steps = STEPS_A_KILL * (kills + 1)
    found: list[Kill] = []
    with (
        trial_in(folder / "whole", steps, timeout, flags) as whole,
        trial_in(folder / "killed", steps, timeout, flags) as trial,
    ):
        whole.start()
        if whole.finish() != [0, 0]:
            raise Failed(f"the undisturbed run failed: {whole.log(0)[-1000:]}")
        for number, moment in enumerate(moments(kills, chance), start=1):
            found.append(disturb(trial, number, moment, chance))
            tell(row(found[-1]))
        expected = trial.newest_whole()
        trial.start()
        if trial.finish() != [0, 0]:
            raise Failed(f"the last start failed: {trial.log(0)[-1000:]} {trial.log(1)[-1000:]}")
        check_start(trial, expected)
        check_equal(trial, whole, steps)
        check_tidy(trial)
    return found


HEADS = ("kill", "rank", "phase", "in step", "the other ended after", "resumed from")


def row(kill: Kill) -> str:
    origin = "the beginning" if kill.went_on_from is None else f"step {kill.went_on_from}"
    return f"| {kill.number} | {kill.rank} | {kill.phase} | {kill.step} | {kill.seconds:.1f} s | {origin} |"


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill one of two ranks at random moments, and resume each time.")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("flags", nargs="*", help="further flags of the trainer, after --")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}\n\n| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="kill-and-resume-"))
    try:
        tell = functools.partial(print, flush=True)
        endure(folder, arguments.kills, seed, arguments.flags, tell=tell)
    except Failed as failure:
        print(f"\nfailed: {failure}\nwhat is left is in {folder}", file=sys.stderr)
        return 1
    print("\nWeights and optimizer are those of a run that nobody disturbed, to the bit; nothing torn is left.")
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
