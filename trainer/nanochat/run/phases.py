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

from nanochat.parallel.local import LocalSync, settle
from nanochat.parallel.sync import Sync
from nanochat.rules.schedule import steps_apart
from nanochat.run.reshare import make_again
from nanochat.run.state import Run


def begin_apart(sync: Sync, step: int, steps: int) -> None:
    """Tell what is to make steps apart where it begins, and before which step it must have met at the latest."""
    if isinstance(sync, LocalSync):
        sync.begin(step, steps_apart(steps).stop)


def enter_phase(run: Run) -> None:
    """Before a step: go over to the part of the run that it belongs to, if it is the first of it."""
    step, begun = run.progress.step, time.perf_counter()
    apart = run.apart_at(step)
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
    begin_apart(run.sync, step, run.plan.num_iterations)
    seconds, sent = time.perf_counter() - begun, run.comm.take_counters()[1]
    how = f"alone, meeting every {run.settings.local_steps} steps" if apart else "together"
    run.journal.say(f"From step {step} on, the ranks train {how}; switching took {seconds:.1f} s")
    run.journal.record("phase", step, apart=apart, seconds=seconds, bytes_sent=sent)
