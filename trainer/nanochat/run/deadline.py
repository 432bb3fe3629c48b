# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When a timed run (--timed) ends: before each step rank 0 tells the others the number of the last one, by its clock.

A run's place goes from 0 to schedule.WHOLE: each step takes an equal part of what is left. So the learning rate always reaches its
end: after an hour's stop, with fewer hosts, or on a slower machine. Time for the last evaluation, samples and save is reserved.
"""

from __future__ import annotations

import collections
import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from nanochat.kit.common import UserError
from nanochat.parallel.sync import UNKNOWN
from nanochat.rules.causes import Cause
from nanochat.rules.schedule import EVAL_SHARE, SAVE_RATE, WHOLE
from nanochat.run.resume import run_file

ENDS = "NANOCHAT_ENDS"
RECENT = 9
MOST_STEPS = 2**30


def clock() -> float:
    """A clock that runs during suspend and ignores corrections."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def end_of_run(folder: Path, environ: Mapping[str, str]) -> float:
    """End of the run in seconds since 1970, by this host's clock, from the environment or the run folder."""
    found = environ.get(ENDS, run_file(folder).get("ends"))
    with contextlib.suppress(TypeError, ValueError):
        if 0 < (end := float(str(found))) < 2**40:
            return end
    raise UserError(
        f"--timed: set {ENDS} to the seconds since 1970 at which the run ends, such as $(date -d 07:30 +%s).",
        Cause.BAD_SETTINGS,
    )


def advance(place: int, steps_left: int) -> int:
    """The place after a step; steps_left: it and those to come."""
    return place + (WHOLE - place) // steps_left


class Deadline:
    """The time left for steps, as rank 0 knows it."""

    def __init__(
        self, seconds: float, save_bytes: int = 0, eval_steps: float = 0.0, now: Callable[[], float] = clock
    ) -> None:
        """seconds: until the end; eval_steps: an evaluation's tokens in steps."""
        self.now, self.over_at, self.eval_steps = now, now() + seconds, eval_steps
        self.after = {"save": save_bytes / SAVE_RATE}
        self._recent: collections.deque[float] = collections.deque(maxlen=RECENT)
        self._step_began = self.now()

    @property
    def step_seconds(self) -> float:
        """The usual step time; 0 before the first."""
        return statistics.median(self._recent) if self._recent else 0.0

    def begin_step(self) -> None:
        self._step_began = self.now()

    def end_step(self, seconds: float) -> None:
        self._recent.append(seconds)

    def took(self, what: str, seconds: float) -> None:
        """Record how long an evaluation, samples or a save took, to reserve as much after the last step."""
        self.after[what] = seconds

    @property
    def after_seconds(self) -> float:
        """Time to reserve after the last step."""
        unknown = 0.0 if "eval" in self.after else EVAL_SHARE * self.eval_steps * self.step_seconds
        return sum(self.after.values()) + unknown

    def last_step(self, step: int, ahead: bool = False) -> int:
        """The number of the last step that fits, before this one; UNKNOWN before the first was measured. ahead: while the one before
        is running."""
        begins = max(self.now(), self._step_began + self.step_seconds) if ahead else self.now()
        left = self.over_at - self.after_seconds - begins
        if not self._recent:
            return UNKNOWN if left > 0 else step
        return step + min(max(0, int(left / self.step_seconds) - 1), MOST_STEPS)
