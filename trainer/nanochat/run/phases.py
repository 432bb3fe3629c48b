# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The parts of a run with local steps: lockstep at its start, then separate steps, then lockstep again.

Changing from one part to the next works like saving and resuming, but in memory: the old part's optimizer state is put
together on every rank, and the machinery is rebuilt with it. A checkpoint between two parts belongs to the
earlier one, so a run that is resumed there makes the same transition as an uninterrupted one.
"""

from __future__ import annotations

import time

from nanochat.parallel.local import LocalSync, settle
from nanochat.parallel.sync import Sync
from nanochat.rules.schedule import steps_apart
from nanochat.run.reshare import make_again
from nanochat.run.state import Run


def begin_apart(sync: Sync, step: int, steps: int) -> None:
    """Tell the sync where separate steps start, and the step before which it must have met at the latest."""
    if isinstance(sync, LocalSync):
        sync.begin(step, steps_apart(steps).stop)


def enter_phase(run: Run) -> None:
    """Before a step: change to the part of the run that it belongs to, if it is the first of it."""
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
