# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Turns the gradients of all ranks into one update, bit-identical on every rank.

    sync = make_sync("exact", comm, training, optimizer, tokens_of_ranks)
    sync.offer_ids(ids)                                  # this rank's tokens of the coming step
    token_ids, stop = sync.take_ids()                    # the tokens of all ranks
    sync.start_step(token_ids)
    training.forward_backward(..., on_ready=sync.on_ready)
    loss = sync.step(loss, schedule)                     # gradients summed, optimizer stepped on every rank

exact, bf16, int8 and int4 send each gradient (of the head, each block of rows) as soon as the backward pass completes it:
- of the embedding tables, only the rows used by a rank, to every other rank;
- each matrix of the layers to the rank that owns it, which computes its Muon update and sends that back;
- a block of the head to the other rank, or with three or more ranks in shares to ranks that sum them and send the sum back;
- small gradients together with the loss, at the end.
Sums are in float32 and in rank order; bf16, int8 and int4 round only messages (wire.py). With int8 and int4 each rank keeps
the rounding error of each of its gradients and updates, and adds it to the next. Matrix products whose result must be the
same everywhere are made by one rank only, because another CPU would round differently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanochat.kit.common import UserError
from nanochat.model.fused import TrainingPass
from nanochat.model.gradients import HEAD, Bucket, GradientPart, is_table, unique_ids
from nanochat.model.optim import ALL_ROWS, Optimizer, muon_shapes
from nanochat.parallel.comm import Comm, Pending
from nanochat.parallel.shared_head import SharedHead
from nanochat.parallel.wire import WIRES, Wire, Wires
from nanochat.rules.causes import Cause
from nanochat.rules.schedule import StepSchedule

# Smaller gradients are sent together: the lambdas and the smear gate.
SMALL = 1024
# At most so many portions of a rank's Muon matrices, each of at least so many elements: more overlap better, fewer compute better.
PORTIONS, PORTION_ELEMENTS = 4, 2**20
IDS_TAG, SMALL_TAG, FIRST_TAG = 1, 2, 10
UNKNOWN = -1
BUSY_UNIT, MOST_BUSY = 1e-4, 2**31 - 1


class Notice(NamedTuple):
    """What a rank tells the others before its token ids of a step; with * only rank 0's counts."""

    stop: bool = False  # it was asked to stop after the step
    save: bool = False  # a checkpoint is due after it
    last_step: int = UNKNOWN  # * the number of a timed run's last one
    busy: float = 0.0  # seconds in an earlier step; 0: unknown

    def numbers(self) -> Tensor:
        busy = min(round(self.busy / BUSY_UNIT), MOST_BUSY)
        return torch.tensor([self.stop, self.save, self.last_step, busy], dtype=torch.int32)

    @classmethod
    def read(cls, numbers: Tensor) -> Notice:
        stop, save, last_step, busy = numbers.tolist()
        return cls(bool(stop), bool(save), last_step, max(0.0, busy * BUSY_UNIT))


NO_NOTICE = Notice()
NOTICE = len(NO_NOTICE)


def make_sync(
    mode: str,
    comm: Comm,
    training: TrainingPass,
    optimizer: Optimizer,
    tokens_of_ranks: Sequence[int],
    speeds: Sequence[int] = (),
) -> Sync:
    """The --sync method; a single process exchanges nothing.

    speeds: of the ranks, for splitting Muon's work; by default their tokens.
    """
    if comm.world == 1:
        return Sync(comm, training, optimizer, tokens_of_ranks)
    return OverlappedSync(comm, training, optimizer, tokens_of_ranks, WIRES[mode], speeds)


class Sync:
    """A single rank, and what all methods share: the exchange of token ids."""

    def __init__(
        self, comm: Comm, training: TrainingPass, optimizer: Optimizer, tokens_of_ranks: Sequence[int]
    ) -> None:
        self.comm, self.training, self.optimizer = comm, training, optimizer
        self.others = [rank for rank in range(comm.world) if rank != comm.rank]
        # The ranks with gradients: one without rows has none.
        self.trainers = [rank for rank, tokens in enumerate(tokens_of_ranks) if tokens]
        self.owners: dict[str, int] = {}
        # Rounding errors of this rank's gradients and updates, by parameter.
        self.feedback: dict[str, Tensor] = {}
        # A notice, then the tokens.
        self._ids = [torch.zeros(NOTICE + tokens, dtype=torch.int32) for tokens in tokens_of_ranks]
        self.pending_ids: list[Pending] = []
        self.busy = [0.0] * comm.world  # seconds of each rank in an earlier step; 0: unknown
        # Of the step whose ids were taken last.
        self.save_asked, self.last_step = False, UNKNOWN
        # Whether an update has begun to change weights and is unfinished, so that they belong to no step.
        self.changing = False
        # Whether a step that other ranks interrupt can be taken back: a part of a shared head is lost with its rank.
        self.head = training.head if isinstance(training.head, SharedHead) else None
        self.undoable = comm.world > 1 and self.head is None

    def offer_ids(self, ids: Sequence[Tensor], notice: Notice = NO_NOTICE) -> None:
        """Send the others this rank's token ids of the coming step."""
        mine = self._ids[self.comm.rank]
        torch.cat([notice.numbers(), *(part.flatten().to(torch.int32) for part in ids)], out=mine)
        what = "the token ids"
        self.pending_ids = [self.comm.receive(self._ids[rank], rank, IDS_TAG, what) for rank in self.others]
        self.pending_ids += [self.comm.send(mine, rank, IDS_TAG, what) for rank in self.others]

    def take_ids(self) -> tuple[Tensor, bool]:
        """The sorted unique token ids of all ranks, and whether any rank was asked to stop."""
        self.comm.wait(*self.pending_ids)
        notices = [Notice.read(ids[:NOTICE]) for ids in self._ids]
        self.save_asked = any(one.save for one in notices)
        self.last_step = notices[0].last_step
        self.busy = [one.busy for one in notices]
        for rank, ids in enumerate(self._ids):
            check_ids(ids[NOTICE:], self.training.model.config.padded_vocab_size, rank)
        token_ids = unique_ids([ids[NOTICE:] for ids in self._ids]).long()
        return token_ids, any(one.stop for one in notices)

    def start_step(self, token_ids: Tensor) -> None:
        """Prepare for the gradients of a step over these token ids."""

    def on_ready(self, part: GradientPart, gradient: Tensor) -> None:
        """Called with each part of a gradient that the last micro-batch has completed."""

    @torch.no_grad()
    def join_pass(self, scale: float) -> None:
        """Take part with this rank's part of a shared head in a pass for which it has no rows."""
        if self.head is not None:
            self.head.start_pass()
            self.head.take_part(scale)

    @torch.no_grad()
    def step(self, loss: Tensor, schedule: StepSchedule) -> float:
        """Sum gradients and loss over the ranks and update; returns the loss of the whole step."""
        self.comm.enter("optimizer")
        self.changing = True
        self.optimizer.step(self.training.gradients, self.training.token_ids, schedule)
        self.changing = False
        return float(loss)

    def whole_state(self) -> dict[str, Any]:
        """The optimizer's state with all ranks' parts, so that any rank's checkpoint suffices to resume."""
        state = self.optimizer.state_dict()
        for name, owner in self.owners.items():
            shapes = muon_shapes(self.optimizer.parameters[name].shape)
            empty = {part: torch.empty(shape) for part, shape in shapes.items()}
            mine = state["muon"].get(name, empty) if owner == self.comm.rank else empty
            for part in empty:
                self.comm.broadcast(mine[part], owner, f"the optimizer state of {name}")
            state["muon"][name] = mine
        if self.head is not None:
            del state["adamw"][HEAD]
            state["adamw"][HEAD] = self.head.whole_state(self.optimizer)
        return state


def check_ids(ids: Tensor, rows: int, rank: int) -> None:
    """Reject token ids of a rank that are outside the tables."""
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise UserError(
            f"rank {rank} has token ids between {int(ids.min())} and {int(ids.max())}, but the tables have {rows} rows; "
            "check that host.",
            Cause.BAD_DATA,
            [rank],
        )


class OverlappedSync(Sync):
    """Point to point: each gradient is sent when it is complete, to the ranks that sum it."""

    def __init__(
        self,
        comm: Comm,
        training: TrainingPass,
        optimizer: Optimizer,
        tokens_of_ranks: Sequence[int],
        wires: Wires,
        speeds: Sequence[int],
    ) -> None:
        super().__init__(comm, training, optimizer, tokens_of_ranks)
        self.wire, self.row_wire = wires.matrices, wires.rows
        self.parameters = {name: p.detach() for name, p in training.model.named_parameters()}
        order, parts = training.ready_order, training.step_gradients.parts
        self.tables = [name for name in order if is_table(name)]
        matrices = optimizer.matrix_names
        self.small = [n for n in order if self.parameters[n].numel() < SMALL and n not in {*self.tables, *matrices}]
        self.owners = share_out({n: self.parameters[n].shape for n in matrices}, speeds or tokens_of_ranks)
        self.owned = [n for n in order if self.owners.get(n) == comm.rank]
        elements = sum(self.parameters[name].numel() for name in self.owned)
        size = -(-len(self.owned) // min(PORTIONS, max(1, elements // PORTION_ELEMENTS))) or 1
        self.portions = [self.owned[start : start + size] for start in range(0, len(self.owned), size)]
        apart = {*self.tables, *self.small, *matrices}
        self.blocks = [part for name in order if name not in apart for part in parts[name]]
        labels = [part.label for name in order for part in parts[name]]
        self.tags = {label: FIRST_TAG + 2 * number for number, label in enumerate(labels)}
        self.index: list[Tensor] = []
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._arriving: dict[tuple[str, int], tuple[Pending, Tensor]] = {}
        self._leaving: list[Pending] = []
        self._sent: dict[str, Tensor] = {}
        self._pack = [self._new_pack() for dummy in range(comm.world)]
        if not self.wire.dtype.is_floating_point:
            fed = [*matrices, *dict.fromkeys(block.name for block in self.blocks)]
            self.feedback = {name: torch.zeros_like(self.parameters[name]) for name in fed}

    def _new_pack(self) -> Bucket:
        """The small gradients and the loss of a rank."""
        shapes = {name: self.parameters[name].shape for name in self.small}
        return Bucket({**shapes, "loss": torch.Size([1])})

    # -- messages; identified by a part's label, which is the name if there is only one part

    def _message(self, name: str, rank: int, wire: Wire, rows: int, columns: int) -> Tensor:
        """Buffer for a message from a rank (or, for this rank, to send); grows but is never freed."""
        length, buffer = wire.length(rows, columns), self._buffers.get((name, rank))
        if buffer is None or len(buffer) < length:
            buffer = self._buffers[name, rank] = torch.empty(length, dtype=wire.dtype)
        return buffer[:length]

    def _expect(self, name: str, rank: int, wire: Wire, rows: int, columns: int) -> None:
        message = self._message(name, rank, wire, rows, columns)
        self._receive(name, rank, message, self.tags[name], f"the gradient of {name}")

    def _receive(self, name: str, rank: int, into: Tensor, tag: int, what: str) -> None:
        self._arriving[name, rank] = self.comm.receive(into, rank, tag, what), into

    def _arrived(self, name: str, rank: int) -> Tensor:
        pending, message = self._arriving.pop((name, rank))
        self.comm.wait(pending)
        return message

    def _written(self, name: str, values: Tensor, wire: Wire, feedback: Tensor | None = None) -> Tensor:
        """The values as sent."""
        if wire.exact:
            return values.contiguous()
        message = self._message(name, self.comm.rank, wire, *values.shape)
        wire.write(values, message, feedback)
        return message

    def _fed(self, part: GradientPart | str, rows: slice = ALL_ROWS) -> Tensor | None:
        """The rounding error of some rows of a part."""
        name, whole = (part, ALL_ROWS) if isinstance(part, str) else (part.name, part.rows)
        return self.feedback[name][whole][rows] if self.feedback else None

    def _leave(self, tensor: Tensor, rank: int, tag: int, what: str) -> None:
        self._leaving.append(self.comm.send(tensor, rank, tag, what))

    def _share(self, block: GradientPart, rank: int) -> slice:
        """The rows of a block that a rank sums. Two ranks both sum everything: one round instead of two, with no more bytes."""
        rows, world = block.stop - block.start, self.comm.world
        return slice(rows * rank // world, rows * (rank + 1) // world) if world > 2 else slice(0, rows)

    # -- during the pass

    def start_step(self, token_ids: Tensor) -> None:
        mine = [unique_ids([ids[NOTICE:]]).long() for ids in self._ids]
        self.index = [torch.searchsorted(token_ids, ids) for ids in mine]
        for rank in self.trainers:
            if rank == self.comm.rank:
                continue
            for block in self.blocks:
                rows = self._share(block, self.comm.rank)
                self._expect(block.label, rank, self.wire, rows.stop - rows.start, self.parameters[block.name].size(1))
            for name in self.owned:
                self._expect(name, rank, self.wire, *self.parameters[name].shape)
            for name in self.tables:
                self._expect(name, rank, self.row_wire, len(self.index[rank]), self.parameters[name].size(1))
        for rank in self.others:
            self._receive("small", rank, self._pack[rank].flat, SMALL_TAG, "the loss")

    @torch.no_grad()
    def on_ready(self, part: GradientPart, gradient: Tensor) -> None:
        name, what = part.label, f"the gradient of {part.label}"
        if name in self.small:
            self._pack[self.comm.rank].views[name].copy_(gradient)
        elif name in self.owners:
            if self.owners[name] != self.comm.rank:
                message = self._written(name, gradient, self.wire, self._fed(name))
                self._leave(message, self.owners[name], self.tags[name], what)
        elif is_table(name):
            message = self._sent[name] = self._written(name, gradient[self.index[self.comm.rank]], self.row_wire)
            for rank in self.others:
                self._leave(message, rank, self.tags[name], what)
        else:
            for rank in self.others:
                rows = self._share(part, rank)
                own = f"{name} for rank {rank}"
                message = self._sent[name] = self._written(own, gradient[rows], self.wire, self._fed(part, rows))
                self._leave(message, rank, self.tags[name], what)

    # -- after the pass

    @torch.no_grad()
    def step(self, loss: Tensor, schedule: StepSchedule) -> float:
        self.comm.enter("sync")
        pack = self._pack[self.comm.rank]
        pack.views["loss"].fill_(float(loss))
        for rank in self.others:
            self._leave(pack.flat, rank, SMALL_TAG, "the loss")
        for block in self.blocks:
            self._sum_share(block)
        self._update_owned(schedule)
        for block in self.blocks:
            self.optimizer.update(block.name, self._block_sum(block), self.training.token_ids, block.rows)
        for name in self.tables:
            self.optimizer.update(name, self._row_sum(name), self.training.token_ids)
        total = self._update_small()
        self.comm.enter("sync")
        self._take_others()
        self.comm.wait(*self._leaving)
        self._leaving.clear()
        self.changing = False
        return total

    def _contributions(self, name: str, mine: Tensor) -> Tensor:
        """The sum over all ranks in order, in float32; for two ranks in place of ours, unless it is sent."""
        if self.comm.world == 2 and len(self.trainers) == 2:
            message = self._arrived(name, self.others[0])
            return message.view_as(mine).add_(mine) if self.wire.exact else self.wire.add(message, mine)
        total = torch.empty_like(mine)
        for number, rank in enumerate(self.trainers):
            if rank == self.comm.rank:
                total = total.add_(mine) if number else total.copy_(mine)
            else:
                message = self._arrived(name, rank)
                total = self.wire.add(message, total) if number else self.wire.read(message, total)
        return total

    def _sum_share(self, block: GradientPart) -> None:
        """Three or more ranks: sum this rank's share and send it to all."""
        if self.comm.world == 2:
            return
        name, gradient = block.label, self.training.step_gradients.of(block)
        rows = self._share(block, self.comm.rank)
        total = self._contributions(name, gradient[rows])
        message = self._written(f"sum {name}", total, self.wire, self._fed(block, rows))
        what = f"the summed gradient of {name}"
        for rank in self.others:
            self._leave(message, rank, self.tags[name] + 1, what)
            coming = self._message(f"sum {name}", rank, self.wire, *gradient[self._share(block, rank)].shape)
            self._receive(f"sum {name}", rank, coming, self.tags[name] + 1, what)
        # Rounded for ourselves as for the others; nobody waits for this share.
        self.wire.read(message, gradient[rows])

    def _block_sum(self, block: GradientPart) -> Tensor:
        name, gradient = block.label, self.training.step_gradients.of(block)
        if self.comm.world == 2:
            message = self._sent.pop(name)
            return self._contributions(name, gradient if self.wire.exact else self.wire.read(message, gradient))
        for rank in self.others:
            self.wire.read(self._arrived(f"sum {name}", rank), gradient[self._share(block, rank)])
        return gradient

    def _row_sum(self, name: str) -> Tensor:
        total = self.training.gradients[name].zero_()
        for rank in self.trainers:
            index = self.index[rank]
            message = self._sent.pop(name) if rank == self.comm.rank else self._arrived(name, rank)
            total.index_add_(0, index, self.row_wire.values(message, len(index), total.size(1)))
        return total

    def _begin_update(self, schedule: StepSchedule) -> None:
        """From here on weights change: ours here, and other owners' as they arrive."""
        if not self.changing:
            self.changing = True
            self.optimizer.start_step(schedule)
            for name, owner in self.owners.items():
                if owner != self.comm.rank:
                    new = f"new {name}"
                    into = self._message(new, owner, self.wire, *self.parameters[name].shape)
                    self._receive(new, owner, into, self.tags[name] + 1, f"the update of {name}")

    def _update_owned(self, schedule: StepSchedule) -> None:
        """Muon of this rank's matrices; finished ones are sent while the rest is computed."""
        if self.head is not None:
            # Its part of the head is the first thing that a rank changes.
            self._begin_update(schedule)
        for number, names in enumerate(self.portions):
            self._finish_head(number)
            gradients = {name: self._contributions(name, self.training.gradients[name]) for name in names}
            self._begin_update(schedule)
            for name, direction in self.optimizer.directions(gradients).items():
                message = self._written(f"new {name}", direction, self.wire, self._fed(name))
                # Every rank applies it as sent, with the same bits.
                self.optimizer.apply(name, direction if self.wire.exact else self.wire.read(message, direction))
                for rank in self.others:
                    self._leave(message, rank, self.tags[name] + 1, f"the update of {name}")
        # A rank without matrices begins here.
        self._begin_update(schedule)
        self._finish_head(len(self.portions))

    def _finish_head(self, piece: int) -> None:
        """A piece of the shared head's local work, while gradients arrive and updates are sent."""
        if self.head is not None:
            self.head.finish(self.optimizer, piece, len(self.portions) + 1)

    def _update_small(self) -> float:
        for rank in self.others:
            self._arrived("small", rank)
        total = self._new_pack()
        for pack in self._pack:
            total.flat += pack.flat
        for name in self.small:
            self.optimizer.update(name, total.views[name], self.training.token_ids)
        return float(total.views["loss"])

    def _take_others(self) -> None:
        for name, owner in self.owners.items():
            if owner != self.comm.rank:
                message = self._arrived(f"new {name}", owner)
                self.optimizer.apply(name, self.wire.values(message, *self.parameters[name].shape))


def share_out(shapes: Mapping[str, torch.Size], speeds: Sequence[float]) -> dict[str, int]:
    """The owner of each matrix, so that Muon's work is split by the speeds."""
    able = [rank for rank, speed in enumerate(speeds) if speed]
    cost = {name: math.prod(shape) * min(shape) for name, shape in shapes.items()}
    load, owners = [0.0] * len(speeds), {}
    for name in sorted(cost, key=lambda n: -cost[n]):
        rank = min(able, key=lambda r: ((load[r] + cost[name]) / speeds[r], r))
        load[rank] += cost[name]
        owners[name] = rank
    return {name: owners[name] for name in shapes}
