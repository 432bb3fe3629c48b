# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Local steps, for links so slow that a step is mostly waiting: the ranks train apart and meet every so many steps.

--local-steps H: each rank makes H steps on its own rows, with an optimizer of its own, and says nothing; then all take a step
along the mean of what the ranks have changed since the last meeting, each rank counting as many times as it has rows: with
Nesterov's momentum for the dense weights, as it is for the embedding tables, where a row's mean is that of the ranks which
touched it. That is another method than one step of all ranks, and another model comes of it; see docs/performance.md.

After a meeting all ranks hold the same weights to the bit: whoever sums does so in float32 and in the order of the ranks,
for a block of its own, and all others take the sum as it was sent. Of the embedding tables only the rows travel that
a rank has touched. A row that no rank has touched must change alike everywhere, by its decay alone, so at a meeting each
rank first makes at once all updates that the momentum of its rows would still make, and begins without momentum there. All
other state of the optimizers stays each rank's own, is saved by each rank and never travels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanochat.comm import Comm, Pending
from nanochat.common import UserError
from nanochat.fused import TrainingPass, unique_ids
from nanochat.gradients import is_table
from nanochat.optim import Optimizer
from nanochat.schedule import StepSchedule
from nanochat.settings import Settings, refuse
from nanochat.sync import Sync

IDS_TAG, FIRST_TAG = 3, 10
STOP_KEY = "stop"
# Rate and momentum of the steps from meeting to meeting, as DiLoCo has them (https://arxiv.org/abs/2311.08105).
OUTER = (0.7, 0.9)
# Of what is summed, so many elements travel together: with each piece that comes, a rank shows that it gets on.
PIECE = 2**20
# What must find all ranks with the same weights, and so waits for a meeting.
MEETINGS = ("eval_every", "sample_every", "save_every")


def fit(settings: Settings, steps: int, world: int) -> Settings:
    """These settings with everything that needs equal weights moved to the next meeting; refuses what makes no sense."""
    every = settings.local_steps if world > 1 else 0
    if every > steps:
        refuse(settings, "local_steps", f"the run has {steps} step(s), so the ranks would meet at its end only")
    moved = {}
    for name in MEETINGS:
        value = getattr(settings, name)
        moved[name] = -(-value // every) * every if every and value > 0 else value
    return dataclasses.replace(settings, local_steps=every, **moved)


def first_meeting(begun: int, every: int, steps: int) -> int:
    """The step before which all ranks of a run that begins at a step are alike again."""
    return min((begun // max(1, every) + 1) * max(1, every), steps)


class Touched(NamedTuple):
    """Rows of the tables that a step was the first to touch since the last meeting, as they were before it."""

    ids: Tensor
    values: dict[str, Tensor]
    step: int


class Rows(NamedTuple):
    """What a rank has changed in the tables: the rows, the change of each table there, and what must have arrived."""

    ids: Tensor
    changes: dict[str, Tensor]
    pending: list[Pending]


class LocalSync(Sync):
    """Steps of one's own, and every so many of them a meeting."""

    def __init__(
        self,
        comm: Comm,
        training: TrainingPass,
        optimizer: Optimizer,
        tokens_of_ranks: Sequence[int],
        every: int,
        wire: torch.dtype,
        outer: tuple[float, float] = OUTER,
    ) -> None:
        super().__init__(comm, training, optimizer, tokens_of_ranks)
        self.every, self.wire = every, wire
        self.weights = [tokens / sum(tokens_of_ranks) for tokens in tokens_of_ranks]
        self.parameters = {name: p.detach() for name, p in training.model.named_parameters()}
        self.whole = [name for name in training.ready_order if not is_table(name)]
        self.made, self.last = 0, 0
        self._mine, self._stop = torch.empty(0, dtype=torch.int64), False
        # The count of steps at which all ranks have agreed to meet, and whether the run ends there.
        self._agreed: tuple[int, bool] | None = None
        self._seen = torch.zeros(len(self.parameters["transformer.wte.weight"]), dtype=torch.bool)
        self._touched: list[Touched] = []
        self._multipliers: dict[int, float] = {}  # of the learning rate, by step since the last meeting
        size = sum(self.parameters[name].numel() for name in self.whole)
        self._anchor, self._change = torch.empty(size), torch.empty(size)
        self.outer, self.momentum = outer, torch.zeros(size)
        self.pieces = -(-size // (PIECE * comm.world))  # of the block that a rank sums
        parts = self.pieces * comm.world
        self.bounds = [size * part // parts for part in range(parts + 1)]

    @torch.no_grad()
    def begin(self, step: int, last: int) -> None:
        """Go on from this step, and meet before the last in any case; what other ways left of momentum is settled."""
        self.made, self.last = step, last
        optimizer = self.optimizer
        optimizer.catch_up()
        for table in optimizer.tables.values() if optimizer.steps else ():
            table.pay_out(torch.arange(len(table.parameter)), optimizer.history[optimizer.steps], optimizer.steps)

    # -- a step of one's own

    def offer_ids(self, ids: Sequence[Tensor], stop: bool = False, save: bool = False, busy: float = 0.0) -> None:
        """Nobody else needs to know them; that this rank is to stop, all must see."""
        self._mine = unique_ids(list(ids)).long()
        if stop and not self._stop:
            self.comm.post(STOP_KEY)
        self._stop = stop

    def take_ids(self) -> tuple[Tensor, bool]:
        """This rank's own token ids, and whether the run ends after this step, in which all ranks meet.

        Whoever sees that a rank is asked to stop, or is about to make the step of a regular meeting, tells the others
        how many steps it has made; then all meet after the next step of the foremost.
        """
        if self._agreed is None and (self.meeting_in() == 1 or self._stop or self.comm.posted(STOP_KEY)):
            told = self.comm.exchange("the step before a meeting", [self.made, self._stop], patient=True)
            self._agreed = max(made for made, dummy in told) + 1, any(stop for dummy, stop in told)
        return self._mine, self._meets() and self._agreed is not None and self._agreed[1]

    def _meets(self) -> bool:
        return self._agreed is not None and self.made + 1 == self._agreed[0]

    def meeting_in(self) -> int:
        regular = self.every - self.made % self.every
        return min(regular, self.last - self.made) if self.last > self.made else regular

    def start_step(self, token_ids: Tensor) -> None:
        if not self._touched:
            self._gather(self._anchor)
        fresh = token_ids[~self._seen[token_ids]]
        self._seen[fresh] = True
        values = {name: table.parameter[fresh] for name, table in self.optimizer.tables.items()}
        self._touched.append(Touched(fresh, values, self.optimizer.steps))

    @torch.no_grad()
    def step(self, loss: Tensor, schedule: StepSchedule) -> float:
        """Returns this rank's loss, and in the step of a meeting that of all."""
        meets = self._meets()
        own = super().step(loss, schedule)
        self.made += 1
        self._multipliers[self.optimizer.steps] = schedule.lr_multiplier
        self._agreed = None if meets else self._agreed
        # A rank whose loss is spoilt says so before the others take its weights.
        return self._meet(own) if meets and math.isfinite(own) else own

    # -- a meeting

    def _meet(self, loss: float) -> float:
        self.comm.enter("sync")
        ids = torch.cat([touched.ids for touched in self._touched])
        told = self.comm.exchange("the meeting of all ranks", [len(ids), loss], patient=True)
        parts, leaving = self._send_parts()
        # What is sent arrives in this order: rows before the mean would make all ranks wait for them at the mean.
        self._take_mean(parts)
        self.comm.wait(*leaving)
        self._take_rows(self._swap_rows(ids, [count for count, dummy in told]))
        self._touched.clear()
        self._multipliers.clear()
        self._seen.zero_()
        return float(sum(weight * one for weight, (dummy, one) in zip(self.weights, told, strict=True)))

    def _await(self, *pending: Pending) -> None:
        self.comm.enter("sync")
        self.comm.wait(*pending)

    def _gather(self, into: Tensor) -> None:
        torch.cat([self.parameters[name].flatten() for name in self.whole], out=into)

    def _piece(self, flat: Tensor, rank: int, number: int) -> Tensor:
        """One piece of the block that a rank sums."""
        part = rank * self.pieces + number
        return flat[self.bounds[part] : self.bounds[part + 1]]

    def _send_parts(self) -> tuple[list[dict[int, tuple[Pending, Tensor]]], list[Pending]]:
        """Send each rank what it is to sum of our change, and await what it is ours to sum, piece by piece."""
        self._gather(self._change)
        travelling = self._change.sub_(self._anchor).to(self.wire)
        what, me = "the changes of the weights", self.comm.rank
        arriving: list[dict[int, tuple[Pending, Tensor]]] = []
        leaving = []
        for number in range(self.pieces):
            tag = FIRST_TAG + 2 * number
            parts = {
                rank: torch.empty(len(self._piece(self._change, me, number)), dtype=self.wire) for rank in self.others
            }
            arriving.append({rank: (self.comm.receive(part, rank, tag, what), part) for rank, part in parts.items()})
            leaving += [self.comm.send(self._piece(travelling, rank, number), rank, tag, what) for rank in self.others]
        return arriving, leaving

    def _take_mean(self, arriving: Sequence[Mapping[int, tuple[Pending, Tensor]]]) -> None:
        """Sum our block, swap the sums, and go on from there."""
        mean = torch.empty(len(self._change), dtype=self.wire)
        what, me = "the mean change of the weights", self.comm.rank
        coming: list[list[Pending]] = []
        leaving: list[Pending] = []
        for number, parts in enumerate(arriving):
            tag = FIRST_TAG + 2 * number + 1
            coming.append([self.comm.receive(self._piece(mean, r, number), r, tag, what) for r in self.others])
            self._await(*(pending for pending, dummy in parts.values()))
            mine = self._piece(mean, me, number)
            mine.copy_(
                self._mean({me: self._piece(self._change, me, number), **{r: p for r, (dummy, p) in parts.items()}})
            )
            leaving += [self.comm.send(mine, rank, tag, what) for rank in self.others]
        for pieces in coming:
            self._await(*pieces)
        self.comm.wait(*leaving)
        rate, momentum = self.outer
        self.momentum.mul_(momentum).add_(mean)
        self._anchor += (self.momentum * momentum).add_(mean).mul_(rate)
        sizes = [self.parameters[name].numel() for name in self.whole]
        for name, values in zip(self.whole, self._anchor.split(sizes), strict=True):
            self.parameters[name].copy_(values.view_as(self.parameters[name]))

    def _mean(self, parts: Mapping[int, Tensor]) -> Tensor:
        """By the ranks' rows, in float32 and in the order of the ranks; our own part counts as it would have travelled."""
        total = torch.zeros(len(parts[self.comm.rank]))
        for rank, weight in enumerate(self.weights):
            total += parts[rank].to(self.wire).float() * weight
        return total

    def _swap_rows(self, ids: Tensor, counts: Sequence[int]) -> list[Rows]:
        """Every rank's touched rows: their ids, and how each table changed there."""
        comm, tables = self.comm, self.optimizer.tables
        own = Rows(ids.int(), {name: change.to(self.wire) for name, change in self._row_changes(ids).items()}, [])
        swapped = []
        start: Callable[[Tensor, int, int, str], Pending]
        for rank, count in enumerate(counts):
            if rank == comm.rank:
                rows, sources, start = own, self.others, comm.send
            else:
                places = {n: torch.empty(count, t.parameter.size(1), dtype=self.wire) for n, t in tables.items()}
                rows, sources, start = Rows(torch.empty(count, dtype=torch.int32), places, []), [rank], comm.receive
            for other in sources:
                rows.pending.append(start(rows.ids, other, IDS_TAG, "the ids of rows"))
                tag = FIRST_TAG + 2 * self.pieces
                for name, change in rows.changes.items():
                    for piece in change.split(max(1, PIECE // change.size(1))):
                        rows.pending.append(start(piece, other, tag, f"the changes of {name}"))
                        tag += 1
            swapped.append(rows)
        return swapped

    def _row_changes(self, ids: Tensor) -> dict[str, Tensor]:
        """How the rows changed beyond their decay, momentum to come included; they are left as if never touched."""
        optimizer, changes = self.optimizer, {}
        for name, table in optimizer.tables.items():
            table.advance(ids, optimizer.history, optimizer.steps)
            table.pay_out(ids, optimizer.schedule.lr_multiplier, optimizer.steps)
            values = torch.cat([touched.values[name] for touched in self._touched])
            since = torch.cat([torch.full_like(t.ids, t.step, dtype=torch.int32) for t in self._touched])
            left_alone = table.decayed(values, since, self._multipliers, optimizer.steps)
            changes[name] = table.parameter[ids] - left_alone
            table.parameter.index_copy_(0, ids, left_alone)
        return changes

    def _take_rows(self, swapped: Sequence[Rows]) -> None:
        """Add the mean of the changes, over those ranks alone that touched a row, to rows that are current."""
        optimizer, touching = self.optimizer, torch.zeros(len(self._seen))
        for rows, weight in zip(swapped, self.weights, strict=True):
            for one in rows.pending:
                self._await(one)
            touching[rows.ids.long()] += weight
        for rows, weight in zip(swapped, self.weights, strict=True):
            ids = rows.ids.long()
            share = (weight / touching[ids]).unsqueeze(1)
            for name, change in rows.changes.items():
                table = optimizer.tables[name]
                table.advance(ids, optimizer.history, optimizer.steps)
                table.parameter.index_add_(0, ids, change.float() * share)

    def whole_state(self) -> dict[str, Any]:
        """This rank's own, and what is common to all."""
        return {**self.optimizer.state_dict(), "outer": self.momentum}


def make_local(
    settings: Settings, comm: Comm, training: TrainingPass, optimizer: Optimizer, tokens_of_ranks: Sequence[int]
) -> LocalSync:
    """The way of --local-steps; --sync says what travels."""
    if next(training.model.parameters()).is_cuda:
        raise UserError(f"--local-steps {settings.local_steps}: is for CPUs on slow links; leave it out with a GPU.")
    wire = torch.bfloat16 if settings.sync == "bf16" else torch.float32
    return LocalSync(comm, training, optimizer, tokens_of_ranks, settings.local_steps, wire)


def spread(comm: Comm, state: Mapping[str, Any]) -> None:
    """Give every rank the optimizer's state of rank 0, for ways that need it alike."""
    for kind in ("adamw", "muon"):
        for name, tensors in state[kind].items():
            for tensor in tensors.values():
                comm.broadcast(tensor, 0, f"the optimizer state of {name}")
