# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rank that freezes in any phase, also the one that serves the store, is named by the other, which ends by itself.

The ranks meet without torchrun, so that rank 0 serves the store: frozen, it does not answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import forked
import pytest
import ranks
from trainings import Told

AT_ONCE = 4
# Longer than any wait may take, and shorter than a test would like to wait.
LATE = 300
FLAGS = (
    "--num-iterations", "4", "--save-every", "2", "--eval-every", "2", "--eval-tokens", "400",
    "--timeout-seconds", "10", "--resume",
)  # fmt: skip
# By the phase in a case's name: the trainer's phase, and the first step in which it freezes.
PHASES = {
    "rendezvous": ("rendezvous", 0), "agree": ("agree", 0), "data": ("data", 1), "sync": ("sync", 1), "eval": ("eval", 1),
    "save": ("save", 1), "end": ("end", 0),
}  # fmt: skip
# Each phase with one rank frozen, alternately 0 and 1; the other rank's case is marked `long`.
CASES = [
    pytest.param(f"{phase}:{rank}", marks=[] if number % 2 == rank else pytest.mark.long)
    for number, phase in enumerate(PHASES)
    for rank in (0, 1)
]


class Freezing(Told):
    """A run of two ranks of which one is frozen (SIGSTOP)."""

    def __init__(self, folder: Path, case: str) -> None:
        super().__init__(folder / case.replace(":", "-"), 2)
        phase, rank = case.split(":")
        self.frozen = int(rank)
        self.more[self.frozen] = {"FREEZE_IN": " ".join(map(str, PHASES[phase]))}


class Ended(NamedTuple):
    """How the other rank ended, and whether the frozen one was."""

    job: Freezing
    other: ranks.Result
    froze: bool


def stopped(process: forked.Python) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"


def freeze(folder: Path, cases: Sequence[str]) -> dict[str, Ended]:
    jobs = {case: Freezing(folder, case) for case in cases}
    started = {case: job.start(*FLAGS) for case, job in jobs.items()}
    ended = {}
    for case, job in jobs.items():
        (other,), frozen = ranks.finish([started[case][1 - job.frozen]], LATE), started[case][job.frozen]
        ended[case] = Ended(job, other, frozen.poll() is None and stopped(frozen))
        frozen.kill()
    return ended


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """The ends of all selected cases, some at once because they mostly wait."""
    items = [one for one in request.session.items if isinstance(one, pytest.Function) and one.path == request.path]
    names, ended = [str(one.callspec.params["case"]) for one in items], {}
    for begun in range(0, len(names), AT_ONCE):
        ended |= freeze(tmp_path_factory.mktemp("frozen"), names[begun : begun + AT_ONCE])
    return ended


@pytest.mark.parametrize("case", CASES)
def test_field_19_a_rank_frozen_in_any_phase_blocks_no_other(case: str, told: dict[str, Ended], tmp_path: Path) -> None:
    # A repeated attempt freezes ranks again.
    one = told.pop(case, None) or freeze(tmp_path, [case])[case]
    frozen = one.job.frozen
    assert one.froze, one
    assert one.other.code == 2, one
    assert len([line for line in one.other.err.splitlines() if line.startswith("error: ")]) == 1, one
    assert "Traceback" not in one.other.out + one.other.err
    end = one.job.events("end", 1 - frozen)[-1]
    assert (end["reason"], end["cause"]) == ("error", "peer-lost" if frozen else "store-lost"), one
    assert end["blames"] == [frozen], one
