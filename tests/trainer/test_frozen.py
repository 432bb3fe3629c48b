# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rank that freezes in any phase, also the one that serves the store, is named by the other, which ends by itself.

The ranks meet without torchrun, so that rank 0 serves the store: frozen, it does not answer.
"""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
import ranks
from trainings import Told

# Longer than any wait may take, and shorter than a test would like to wait.
LATE = 300
FLAGS = (
    "--num-iterations", "4", "--save-every", "2", "--eval-every", "2", "--eval-tokens", "400",
    "--timeout-seconds", "10", "--resume",
)  # fmt: skip
# A phase, and the first step in which a rank freezes in it. Some at once, because they mostly wait.
PHASES = ("rendezvous", 0), ("agree", 0), ("data", 1), ("sync", 1), ("eval", 1), ("save", 1), ("end", 0)
AT_ONCE = {"early": PHASES[:4], "late": PHASES[4:]}


class Freezing(Told):
    """A run of two ranks of which one is frozen (SIGSTOP)."""

    def __init__(self, folder: Path, frozen: int, phase: str, step: int) -> None:
        super().__init__(folder / f"{phase}-{frozen}", 2)
        self.frozen, self.more = frozen, {frozen: {"FREEZE_IN": f"{phase} {step}"}}


def stopped(process: forked.Python) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("phases", AT_ONCE.values(), ids=AT_ONCE)
@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.long)])
def test_field_19_a_rank_frozen_in_any_phase_blocks_no_other(
    first: int, phases: tuple[tuple[str, int], ...], tmp_path: Path
) -> None:
    """Rank `first` in the first phase, and then alternately the other one."""
    jobs = [Freezing(tmp_path, (first + number) % 2, *phase) for number, phase in enumerate(phases)]
    started = [job.start(*FLAGS) for job in jobs]
    try:
        for job, processes in zip(jobs, started, strict=True):
            (other,), frozen = ranks.finish([processes[1 - job.frozen]], LATE), processes[job.frozen]
            assert frozen.poll() is None and stopped(frozen), (job.folder, other)
            assert other.code == 2, (job.folder, other)
            assert len([line for line in other.err.splitlines() if line.startswith("error: ")]) == 1, other
            assert "Traceback" not in other.out + other.err
            end = job.events("end", 1 - job.frozen)[-1]
            assert (end["reason"], end["cause"]) == ("error", "peer-lost" if job.frozen else "store-lost"), other
            assert end["blames"] == [job.frozen], other
    finally:
        for process in [process for processes in started for process in processes]:
            process.kill()
