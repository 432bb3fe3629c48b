# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Local steps, for links so slow that a step is mostly waiting: the ranks train separately and meet every H steps.

--local-steps H: each rank makes H steps on its own rows with its own optimizer, without communication; then all take a step
along the mean of the ranks' changes since the last meeting, weighted by their rows: with
Nesterov momentum for the matrices (meeting.py), without for scalars and embedding tables, where a row's mean covers
only the ranks that touched it. This is a different method from lockstep and gives a different model; see
lab/performance.md. The first and last steps of a run (schedule.steps_apart) are in lockstep: in the first
the weights move too far for a mean to make sense, and the last remove the remaining differences between ranks.

--local-overlap K: the means are sent during the next K steps and applied after them: the weights move by the difference
between the mean and the rank's own change. A meeting before a checkpoint, evaluation or sample is blocking.

After a blocking meeting all hold bit-identical weights. Of the embedding tables, only rows touched by a rank are sent.
A row that no rank touched must change alike everywhere, by its decay alone, so before a meeting each rank
applies all remaining momentum updates of its rows at once and resets their momentum. All other optimizer state
stays separate and is saved by each rank, until the final lockstep part starts with its mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanochat.kit.expected import count, flag, number, row
from nanochat.kit.settings import Settings, refuse
from nanochat.model.fused import TrainingPass, unique_ids
from nanochat.model.gradients import is_table
from nanochat.model.optim import Optimizer
from nanochat.parallel.comm import Comm, Pending
from nanochat.parallel.meeting import FIRST_TAG, PIECE, DenseMeeting
from nanochat.parallel.sync import NO_NOTICE, Notice, Sync, check_ids
from nanochat.parallel.wire import WIRES
from nanochat.rules.schedule import StepSchedule, outer_rates, steps_apart

IDS_TAG = 3
MEANS = "the means of all ranks"
STOP_KEY = "stop"
# Checkpoint key of the meetings' momentum.
MOMENTUM_KEY = "meetings"
# Events that need the same weights on all ranks, and so wait for a meeting.
MEETINGS = ("eval_every", "sample_every", "save_every")


def fit(settings: Settings, steps: int, world: int, device: str = "cpu") -> Settings:
    """These settings with such events moved to the next meeting; rejects invalid combinations."""
    every = settings.local_steps if world > 1 else 0
    if every and device != "cpu":
        refuse(settings, "local_steps", "is for CPUs on slow links; omit it with a GPU")
    if every > steps:
        refuse(settings, "local_steps", f"the run has {steps} step(s), so the ranks would meet only at the end")
    moved = {}
    for name in MEETINGS:
        value = getattr(settings, name)
        moved[name] = -(-value // every) * every if every and value > 0 else value
    return dataclasses.replace(settings, local_steps=every, **moved)


def is_apart(every: int, steps: int, step: int) -> bool:
    """Whether the ranks make this step separately."""
    return every > 0 and step in steps_apart(steps)


def kinds_of_meetings(settings: Settings) -> tuple[int, list[int]]:
    """The steps that overlap with a meeting's transfer, and the intervals that need all ranks in sync."""
    return settings.local_overlap, [count for count in (getattr(settings, name) for name in MEETINGS) if count > 0]


def is_whole(meeting: int, overlap: int, whole: Sequence[int]) -> bool:
    """Whether the regular meeting after this many steps is blocking."""
    return not overlap or any(meeting % count == 0 for count in whole)


def first_meeting(begun: int, every: int, steps: int, overlap: int = 0, whole: Sequence[int] = ()) -> int:
    """The first step before which all ranks are in sync again, in a run that begins at a step."""
    if not is_apart(every, steps, begun):
        return begun + 1
    last = steps_apart(steps).stop
    meetings = range((begun // every + 1) * every, last, every)
    return next((meeting for meeting in meetings if is_whole(meeting, overlap, whole)), last)


def first_meetings(begun: int, every: int, steps: int, overlap: int = 0, whole: Sequence[int] = ()) -> set[int]:
    """The same in each part of a run."""
    apart = steps_apart(steps)
    begins = [begun, max(begun, apart.start), max(begun, apart.stop)] if every else [begun]
    return {first_meeting(one, every, steps, overlap, whole) for one in begins}


class Touched(NamedTuple):
    """Table rows first touched in a step since the last meeting, with their previous values."""

    ids: Tensor
    values: dict[str, Tensor]
    step: int


class Rows(NamedTuple):
    """A rank's changes to the tables: the rows, each table's changes as sent, and pending transfers.
    arrived."""

    ids: Tensor
    messages: dict[str, Tensor]
    pending: list[Pending]


class Flight(NamedTuple):
    """A meeting whose means are in transit: the sorted rows touched by any rank, their values by decay alone,
    and their values on this rank at the meeting."""

    ids: Tensor
    alone: dict[str, Tensor]
    own: dict[str, Tensor]
    swapped: list[Rows]
    step: int  # of the optimizer
    reduced_at: int
    lands_at: int


def means_of(step: int) -> str:
    """A rank's message that its mean of the meeting after this many steps is on its way."""
    return f"means/{step}"


class LocalSync(Sync):
    """Separate steps with a regular meeting."""

    def __init__(
        self,
        comm: Comm,
        training: TrainingPass,
        optimizer: Optimizer,
        tokens_of_ranks: Sequence[int],
        every: int,
        mode: str = "exact",
        outer: tuple[float, float] | None = None,
        overlap: int = 0,
        whole: Sequence[int] = (),
    ) -> None:
        """mode: --sync; outer: rate and momentum of the meetings, by default by the number of ranks;
        overlap, whole: from kinds_of_meetings."""
        super().__init__(comm, training, optimizer, tokens_of_ranks)
        self.every, self.row_wire = every, WIRES[mode].meetings
        self.overlap, self.whole = overlap, whole
        self.weights = [tokens / sum(tokens_of_ranks) for tokens in tokens_of_ranks]
        parameters = {name: p.detach() for name, p in training.model.named_parameters()}
        dense = {name: parameters[name] for name in training.ready_order if not is_table(name)}
        self.dense = DenseMeeting(comm, dense, self.weights, WIRES[mode].matrices, outer or outer_rates(comm.world))
        self.feedback = self.dense.feedback
        self._widths = {name: p.size(1) for name, p in parameters.items() if is_table(name)}
        self.made, self.last, self.met = 0, 0, False
        self._anchored = False
        self._flight: Flight | None = None
        self._sent: str | None = None  # message under which the others learn that our last mean is on its way
        self._mine, self._stop = torch.empty(0, dtype=torch.int64), False
        # The step count at which all ranks agreed to meet, and whether the run ends there.
        self._agreed: tuple[int, bool] | None = None
        self._seen = torch.zeros(training.model.config.padded_vocab_size, dtype=torch.bool)
        self._touched: list[Touched] = []
        self._multipliers: dict[int, float] = {}  # of the learning rate, by step since the last meeting

    @torch.no_grad()
    def begin(self, step: int, last: int) -> None:
        """Continue from this step, and meet before the last one in any case; settles momentum left by other methods."""
        self.made, self.last = step, last
        optimizer = self.optimizer
        optimizer.catch_up()
        for table in optimizer.tables.values() if optimizer.steps else ():
            table.pay_out(torch.arange(len(table.parameter)), optimizer.history[optimizer.steps], optimizer.steps)

    # -- a separate step

    def offer_ids(self, ids: Sequence[Tensor], notice: Notice = NO_NOTICE) -> None:
        """Nobody else needs them, but all must see a stop request."""
        self._mine = unique_ids(list(ids)).long()
        if notice.stop and not self._stop:
            self.comm.post(STOP_KEY)
        self._stop = notice.stop

    def take_ids(self) -> tuple[Tensor, bool]:
        """This rank's own token ids, and whether the run ends after this step, in which all ranks meet.

        A rank that sees a stop request, or is about to make the step of a regular meeting, reports
        its step count; then all meet after the next step of the rank furthest ahead.
        """
        if self._agreed is None and (self.meeting_in() == 1 or self._stop or self.comm.posted(STOP_KEY)):
            # A rank further ahead may be waiting for our mean, and reach this exchange only then.
            self._reduce()
            what, fits = "the step before a meeting", row(count(), flag)
            told = self.comm.exchange(what, [self.made, self._stop], patient=True, fits=fits)
            self._agreed = max(made for made, dummy in told) + 1, any(stop for dummy, stop in told)
        return self._mine, self._meets() and self._agreed is not None and self._agreed[1]

    def _meets(self) -> bool:
        return self._agreed is not None and self.made + 1 == self._agreed[0]

    def meeting_in(self) -> int:
        regular = self.every - self.made % self.every
        return min(regular, self.last - self.made) if self.last > self.made else regular

    def start_step(self, token_ids: Tensor) -> None:
        if not self._anchored:
            self.dense.start()
            self._anchored = True
        fresh = token_ids[~self._seen[token_ids]]
        self._seen[fresh] = True
        values = {name: table.parameter[fresh] for name, table in self.optimizer.tables.items()}
        self._touched.append(Touched(fresh, values, self.optimizer.steps))

    @torch.no_grad()
    def step(self, loss: Tensor, schedule: StepSchedule) -> float:
        """Returns this rank's loss, and at a meeting all ranks'."""
        meets, stops = self._meets(), self._agreed is not None and self._agreed[1]
        own = super().step(loss, schedule)
        self.made += 1
        self._multipliers[self.optimizer.steps] = schedule.lr_multiplier
        self._agreed = None if meets else self._agreed
        regular = self.made % self.every == 0 and self.made != self.last and not stops
        self.met = meets and (not regular or is_whole(self.made, self.overlap, self.whole))
        self._get_on(meets)
        # A rank with a non-finite loss reports it before the others take its weights.
        if not meets or not math.isfinite(own):
            return own
        return self._meet(own) if self.met else self._depart(own)

    def _get_on(self, meets: bool) -> None:
        """Progress a meeting in transit."""
        flight = self._flight
        if flight is None:
            return
        if meets or self.made == flight.lands_at:
            self._land(flight)
        elif self.made == flight.reduced_at:
            self._reduce()

    def _reduce(self) -> None:
        """Send our mean, if means are in transit and it was not sent yet, and announce it."""
        if self._flight is None or self._sent == (word := means_of(self._flight.step)):
            return
        self.dense.reduce()
        # Whoever reached this meeting has applied the last one.
        self.comm.leave_word(word, MEANS, instead_of=self._sent)
        self._sent = word

    # -- a meeting

    def _meet(self, loss: float) -> float:
        loss, of_ranks = self._open(loss)
        mine, optimizer = of_ranks[self.comm.rank], self.optimizer
        self.dense.send()
        # This is the order of arrival: rows before the mean would make all ranks wait for them at the mean.
        self.dense.take()
        changes, alone = self._row_changes(mine)
        for name, table in optimizer.tables.items():
            table.parameter.index_copy_(0, mine, alone[name])
        ids = torch.unique(torch.cat(of_ranks))
        for name, mean in self._mean_rows(ids, self._swap_rows(of_ranks, changes)).items():
            table = optimizer.tables[name]
            table.advance(ids, optimizer.history, optimizer.steps)
            table.parameter.index_add_(0, ids, mean)
        self._begin_anew()
        return loss

    def _open(self, loss: float) -> tuple[float, list[Tensor]]:
        """The loss of all ranks, and the ids of the rows that each touched since the last meeting."""
        comm, mine = self.comm, torch.cat([touched.ids for touched in self._touched])
        comm.enter("sync")
        fits = row(count(len(self._seen)), number)
        told = comm.exchange("the meeting of all ranks", [len(mine), loss], patient=True, fits=fits)
        of_ranks = [torch.empty(int(count), dtype=torch.int32) for count, dummy in told]
        of_ranks[comm.rank] = mine.int()
        what = "the ids of rows"
        pending = [comm.receive(of_ranks[rank], rank, IDS_TAG, what) for rank in self.others]
        pending += [comm.send(of_ranks[comm.rank], rank, IDS_TAG, what) for rank in self.others]
        self._await(*pending)
        mean = sum(weight * one for weight, (dummy, one) in zip(self.weights, told, strict=True))
        for rank, ids in enumerate(of_ranks):
            check_ids(ids, len(self._seen), rank)
        return float(mean), [ids.long() for ids in of_ranks]

    def _begin_anew(self) -> None:
        """Start collecting changes for the next meeting."""
        self._touched.clear()
        self._multipliers.clear()
        self._seen.zero_()

    # -- a meeting whose means are in transit

    def _depart(self, loss: float) -> float:
        # All must know whose rows are in transit before they touch them again.
        loss, of_ranks = self._open(loss)
        mine, ids, steps = of_ranks[self.comm.rank], torch.unique(torch.cat(of_ranks)), self.optimizer.steps
        changes, alone = self._row_changes(mine)
        kept, own = {}, {}
        for name, table in self.optimizer.tables.items():
            table.advance(ids, self.optimizer.history, steps)
            own[name] = table.parameter[ids]
            kept[name] = own[name].index_copy(0, torch.searchsorted(ids, mine), alone[name])
        self.dense.send()
        half = self.made + (self.overlap + 1) // 2
        self._flight = Flight(ids, kept, own, self._swap_rows(of_ranks, changes), steps, half, self.made + self.overlap)
        self._begin_anew()
        return loss

    def _land(self, flight: Flight) -> None:
        """Apply a meeting's means, some steps later: untouched rows become the mean, and
        touched ones move by the difference between the mean and this rank's own change."""
        self._reduce()
        # A slow rank may be many steps away from sending its mean.
        self.comm.await_words(means_of(flight.step), MEANS)
        self._flight = None
        self.dense.land()
        optimizer, ids = self.optimizer, flight.ids
        means = self._mean_rows(ids, flight.swapped)
        touched = self._seen[ids]
        since = torch.full((len(ids),), flight.step, dtype=torch.int32)
        for name, table in optimizer.tables.items():
            now = flight.alone[name].add_(means[name])
            table.advance(ids, optimizer.history, optimizer.steps)
            new, old = (table.decayed(v, since, self._multipliers, optimizer.steps) for v in (now, flight.own[name]))
            new[touched] += table.parameter[ids[touched]] - old[touched]
            table.parameter.index_copy_(0, ids, new)
        self._change_records(ids, touched, flight)

    def _change_records(self, ids: Tensor, touched: Tensor, flight: Flight) -> None:
        """Correct the recorded previous values of rows touched since the meeting: now the same on all ranks."""
        records = []
        for one in self._touched:
            other = ~torch.isin(one.ids, ids)
            records.append(Touched(one.ids[other], {n: v[other] for n, v in one.values.items()}, one.step))
        values = {name: alone[touched] for name, alone in flight.alone.items()}
        self._touched = [Touched(ids[touched], values, flight.step), *records]

    # -- table rows

    def _swap_rows(self, of_ranks: Sequence[Tensor], changes: dict[str, Tensor]) -> list[Rows]:
        """Each table's changes in the rows touched by any rank; some are still in transit."""
        comm, wire = self.comm, self.row_wire
        swapped = []
        start: Callable[[Tensor, int, int, str], Pending]
        for rank, ids in enumerate(of_ranks):
            messages = {n: torch.empty(wire.length(len(ids), w), dtype=wire.dtype) for n, w in self._widths.items()}
            if rank == comm.rank:
                for name, change in changes.items():
                    wire.write(change, messages[name])
                sources, start = self.others, comm.send
            else:
                sources, start = [rank], comm.receive
            rows = Rows(ids, messages, [])
            for other in sources:
                pieces = [(name, piece) for name, message in messages.items() for piece in message.split(PIECE)]
                for tag, (name, piece) in enumerate(pieces, start=FIRST_TAG + 2 * self.dense.pieces):
                    rows.pending.append(start(piece, other, tag, f"the changes of {name}"))
            swapped.append(rows)
        return swapped

    def _await(self, *pending: Pending) -> None:
        self.comm.enter("sync")
        self.comm.wait(*pending)

    def _mean_rows(self, ids: Tensor, swapped: Sequence[Rows]) -> dict[str, Tensor]:
        """The mean change of each row over the ranks that touched it."""
        touching = torch.zeros(len(ids))
        places = [torch.searchsorted(ids, rows.ids) for rows in swapped]
        for rows, place, weight in zip(swapped, places, self.weights, strict=True):
            for one in rows.pending:
                self._await(one)
            touching[place] += weight
        means = {name: torch.zeros(len(ids), width) for name, width in self._widths.items()}
        for rows, place, weight in zip(swapped, places, self.weights, strict=True):
            share = (weight / touching[place]).unsqueeze(1)
            for name, message in rows.messages.items():
                change = self.row_wire.read(message, torch.empty(len(place), self._widths[name]))
                means[name].index_add_(0, place, change.mul_(share))
        return means

    def _row_changes(self, ids: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The rows' changes beyond decay, remaining momentum included, and their values if untouched."""
        optimizer = self.optimizer
        changes: dict[str, Tensor] = {}
        alone: dict[str, Tensor] = {}
        for name, table in optimizer.tables.items():
            table.advance(ids, optimizer.history, optimizer.steps)
            table.pay_out(ids, optimizer.schedule.lr_multiplier, optimizer.steps)
            values = torch.cat([touched.values[name] for touched in self._touched])
            since = torch.cat([torch.full_like(t.ids, t.step, dtype=torch.int32) for t in self._touched])
            alone[name] = table.decayed(values, since, self._multipliers, optimizer.steps)
            changes[name] = table.parameter[ids] - alone[name]
        return changes, alone

    def whole_state(self) -> dict[str, Any]:
        """This rank's own state, and the shared one."""
        return {**self.optimizer.state_dict(), MOMENTUM_KEY: self.dense.momentum}


def make_local(
    settings: Settings, comm: Comm, training: TrainingPass, optimizer: Optimizer, tokens_of_ranks: Sequence[int]
) -> LocalSync:
    """The local-steps method; --sync sets the wire format."""
    overlap, whole = kinds_of_meetings(settings)
    every = settings.local_steps
    return LocalSync(comm, training, optimizer, tokens_of_ranks, every, settings.sync, overlap=overlap, whole=whole)


def settle(comm: Comm, state: Mapping[str, Any]) -> None:
    """Replace all optimizer states by their mean, sent as bf16, for the lockstep part."""
    # In the same order everywhere: ranks may have created their matrices in different orders.
    for name, tensors in chain(sorted(state["adamw"].items()), sorted(state["muon"].items())):
        for kind, tensor in tensors.items():
            if is_table(name) and kind == "exp_avg":
                # A meeting applies all of it, so none is left.
                tensor.zero_()
                continue
            for piece in tensor.view(-1).split(PIECE):
                mean = (piece / comm.world).bfloat16()
                piece.copy_(comm.all_reduce(mean, f"the optimizer state of {name}"))
