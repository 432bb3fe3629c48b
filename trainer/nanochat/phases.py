# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The parts of a run with local steps: common steps at its begin, then steps that the ranks make apart, then common steps again.

From one part to the next is as if the run were saved and resumed, but in memory: what the old part has of the optimizer is put
together on every rank, what computes and exchanges is made again, and takes it up. A checkpoint between two parts is one of the
part before it, so that a run which is resumed there goes over as one does that was never interrupted.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nanochat.local import LocalSync, is_apart, settle
from nanochat.reshare import make_again
from nanochat.schedule import steps_apart

if TYPE_CHECKING:
    from nanochat.run import Run


def apart_at(run: Run, step: int) -> bool:
    """Whether the ranks make this step apart."""
    return is_apart(run.settings.local_steps, run.plan.num_iterations, step)


def begin_apart(run: Run) -> None:
    """Tell what is to make steps apart where it begins, and before which step it must have met at the latest."""
    if isinstance(run.sync, LocalSync):
        run.sync.begin(run.progress.step, steps_apart(run.plan.num_iterations).stop)


def enter_phase(run: Run) -> None:
    """Before a step: go over to the part of the run that it belongs to, if it is the first of it."""
    step, begun = run.progress.step, time.perf_counter()
    apart = apart_at(run, step)
    if apart == run.apart:
        return
    run.comm.enter("share", step)
    run.make_whole()
    if run.training.shared_head is not None:
        run.training.shared_head.settle()
    optimizer = run.sync.whole_state()
    if not apart:
        settle(run.comm, optimizer)
    make_again(run, run.shares, optimizer, apart)
    begin_apart(run)
    seconds, sent = time.perf_counter() - begun, run.comm.take_counters()[1]
    how = f"apart, with a meeting every {run.settings.local_steps}" if apart else "together"
    run.journal.say(f"From step {step} on the ranks make their steps {how}; it took {seconds:.1f} s")
    run.journal.record("phase", step, apart=apart, seconds=seconds, bytes_sent=sent)
