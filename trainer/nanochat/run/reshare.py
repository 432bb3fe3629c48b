# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Changes the shares during a run: like saving and resuming, but in memory.

Weights and optimizer state are put together on every rank, as for a checkpoint; then everything that
depends on the shares is rebuilt from them. So a run that continues and one that is resumed here are the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from nanochat.parallel.balance import Shares
from nanochat.parallel.sync import Sync
from nanochat.run.state import Run


def change_shares(run: Run, shares: Shares) -> None:
    """Give every rank its new share between two steps; all ranks do so at the same step."""
    begun, before, sync = time.perf_counter(), run.shares, run.sync
    speeds = run.balancer.speeds
    run.comm.enter("share", run.progress.step)
    run.make_whole()
    if run.training.shared_head is not None:
        run.training.shared_head.wait_until_sent()
    optimizer, schedule = sync.whole_state(), run.optimizer.schedule
    run.rebuild(shares)
    run.optimizer.load_state_dict(optimizer)
    run.optimizer.schedule = schedule
    # As announced in the last step, after which nothing has been saved yet.
    run.sync.save_asked = sync.save_asked
    keep_feedback(sync, run.sync)
    seconds = time.perf_counter() - begun
    run.journal.say(
        f"Rows per step are now {listing(shares.rows)} (before: {listing(before.rows)}), because the ranks have these speeds: "
        f"{listing(round(100 * speed / sum(speeds)) for speed in speeds)} % of the total; switching took {seconds:.1f} s"
    )
    run.journal.record(
        "shares", run.progress.step, rows=shares.rows, head=shares.head, before=before.rows, before_head=before.head,
        speeds=[speed / sum(speeds) for speed in speeds], seconds=seconds,
    )  # fmt: skip


def listing(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def keep_feedback(old: Sync, new: Sync) -> None:
    """Keep rounding errors of what this rank still sends: a gradient, or the update
    of a matrix that it owns. Those of a matrix that changed owners are dropped."""
    rank = new.comm.rank
    for name, values in new.feedback.items():
        kept = old.feedback.get(name)
        if kept is not None and (old.owners.get(name) == rank) == (new.owners.get(name) == rank):
            values.copy_(kept)
