# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The shared head: each rank has a part of the vocabulary, and neither its weights nor their gradient are sent.

Instead the head's input y and its gradient are sent, both one row per token:

1. each rank sends y of its rows, and meanwhile computes the exponentials of its own rows in its part;
2. it computes those of the others' rows as they arrive, and sends their sums over its part and the
   target's exponential if that is in its part;
3. with the sums of all parts it computes its part of y's gradient, the others' rows first, which are sent at once;
4. and the gradient of its weights, while the parts of its own rows' gradient arrive, which it sums in rank order.

So the work of each step hides the transfer before it. The rows of a pass go through this in rounds of as
many as may have their logits in memory. The weight gradient of a step's last round is left for the time
when the layers' gradients are in transit: `finish()` computes it piece by piece.

The formulas are those of head.py. Logit gradients are stored times the row's sum over all parts, so that no pass over the
logits waits for that sum; products are divided by it instead.

In training, the weights of the other parts are out of date here: `gather()` brings them, for evaluation and saves.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanochat.kit.settings import Settings, refuse
from nanochat.model import kernels
from nanochat.model.gpt import GPT
from nanochat.model.gradients import HEAD, product
from nanochat.model.head import CACHED_BYTES, CHUNK_BYTES, row_slices
from nanochat.model.layers import Buffers
from nanochat.model.ops import IGNORED, SOFTCAP, tanh_product
from nanochat.model.optim import Optimizer
from nanochat.parallel.balance import Shares
from nanochat.parallel.comm import Comm, Pending
from nanochat.parallel.wire import WIRES, Wire
from nanochat.rules.model_size import ModelConfig
from nanochat.rules.shares import part_bounds, passes_of
from nanochat.rules.ways import choose_head

# Above all tags of the gradients.
FIRST_TAG = 2**20


def even_slices(tokens: Sequence[int], row_bytes: int, limit: int) -> list[list[slice]]:
    """Groups of all ranks' tokens below the limit, with nearly equal parts of each rank."""
    count = min(max(tokens), len(row_slices(sum(tokens), row_bytes, limit)))
    return [[slice(t * n // count, t * (n + 1) // count) for t in tokens] for n in range(count)]


def decide_head(settings: Settings, config: ModelConfig, tokens_of_ranks: Sequence[int]) -> Settings:
    """These settings with --head auto decided; rejects parts that do not fit the job or the vocabulary."""
    shares, world = settings.head_shares, len(tokens_of_ranks)
    if shares and len(shares) != world:
        refuse(settings, "head_shares", f"names {len(shares)} rank(s), but this job has {world}")
    head = choose_head(settings.head, config.padded_vocab_size, config.n_embd, tokens_of_ranks, settings.sync)
    if head == "shared":
        try:
            part_bounds(config.vocab_size, config.padded_vocab_size, shares or [1] * world)
        except ValueError as error:
            if shares or settings.head == "shared":
                refuse(settings, "head_shares" if shares else "head", str(error))
            head = "whole"
    return dataclasses.replace(settings, head=head)


def make_head(settings: Settings, comm: Comm, model: GPT, shares: Shares, dtype: torch.dtype) -> SharedHead | None:
    """This rank's part, if these settings (from decide_head) share the head."""
    if settings.head != "shared":
        return None
    config = model.config
    bounds = part_bounds(config.vocab_size, config.padded_vocab_size, shares.head)
    by_rank = passes_of(shares.rows, settings.device_batch_size, together=True)
    passes = [[rows * settings.max_seq_len for rows in one] for one in zip(*by_rank, strict=True)]
    return SharedHead(comm, model, bounds, passes, WIRES[settings.sync].hidden, dtype)


class Target(NamedTuple):
    """The targets of some rows in this rank's part, and their values."""

    rows: Tensor  # indices of the rows whose target is in this part
    columns: Tensor
    t: Tensor
    exponential: Tensor


class Round:
    """Rows that go through the head together, by rank."""

    def __init__(self, head: SharedHead, number: int, slices: Sequence[slice]) -> None:
        """slices: of each rank's rows in this pass."""
        self.rows = slices[head.comm.rank]
        self.sizes = [one.stop - one.start for one in slices]
        self.active = [rank for rank, size in enumerate(self.sizes) if size]
        ends = list(itertools.accumulate(self.sizes))
        self.places = [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]
        self.all = ends[-1]
        world, width, get = head.comm.world, head.part.size(1), head.buffers.get

        def messages(what: str, sizes: Sequence[int]) -> list[Tensor]:
            lengths = [head.wire.length(size, width) for size in sizes]
            return [get(f"{name} {what} {rank}", one, dtype=head.wire.dtype) for rank, one in enumerate(lengths)]

        name = f"round {number} of {self.sizes}"
        # The head's input and targets.
        self.y = get(f"{name} y", self.all, width)
        self.sent_y = messages("y of", self.sizes)
        self.targets = get(f"{name} targets", self.all, dtype=torch.int32)
        self._sums = get(f"{name} sums", world, 2 * self.all)
        # By the rank of the part: the gradients of this rank's rows, as sent.
        self.sent_dy = messages("dy from", [self.sizes[head.comm.rank]] * world)
        self.arriving: dict[tuple[str, int, int], Pending] = {}
        self.found: dict[int, Target] = {}

    def sums(self, part: int, rank: int) -> Tensor:
        """The rows of a rank in another's part: sums of exponentials, and the targets' exponentials."""
        place = self.places[rank]
        return self._sums[part, 2 * place.start : 2 * place.stop].view(2, self.sizes[rank])


class SharedHead:
    """One rank's part, and its exchanges with the others."""

    def __init__(
        self,
        comm: Comm,
        model: GPT,
        bounds: Sequence[int],
        passes: Sequence[Sequence[int]],
        wire: Wire,
        dtype: torch.dtype = torch.float32,
        limit: int = CHUNK_BYTES,
    ) -> None:
        """bounds: of the parts, as part_bounds gives them; passes: tokens by pass and rank; dtype: of operands;
        limit: bytes of logits in memory at a time."""
        self.comm, self.bounds, self.passes = comm, list(bounds), [list(one) for one in passes]
        self.wire, self.dtype, self.limit = wire, dtype, limit
        self.weight = model.lm_head.weight.detach()
        self.rows = slice(self.bounds[comm.rank], self.bounds[comm.rank + 1])
        self.part = self.weight[self.rows]
        self.real = min(self.rows.stop, model.config.vocab_size) - self.rows.start
        self.sizes = [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]
        self.row_bytes = max(self.sizes) * dtype.itemsize
        # The padding rows are never written.
        self.gradient = torch.zeros_like(self.part)
        self.buffers = Buffers()
        self.others = [(comm.rank + distance) % comm.world for distance in range(1, comm.world)]
        self.operand = self.logits = self.scaled = torch.empty(0)
        self.number = 0  # of the pass
        self.rounds: list[Round] = []
        self.current = True  # whether the other parts' weights are current
        self._written = False
        self._leaving: list[Pending] = []

    # -- a pass

    def start_step(self) -> None:
        self.operand = self.buffers.operand(self.part[: self.real], "operand", self.dtype)
        self.number, self._written = 0, False

    def start_pass(self) -> None:
        """Prepare for the others' rows, which may arrive while ours are still in the layers."""
        # Sent data stays in the last pass's buffers until it has left.
        self.wait_until_sent()
        tokens = self.passes[self.number]
        slices = even_slices(tokens, self.row_bytes, self.limit)
        self.rounds = [Round(self, number, one) for number, one in enumerate(slices)]
        for number, one in enumerate(self.rounds):
            self._expect(one, number)

    def _tag(self, number: int, kind: int) -> int:
        """kind: 0 y, 1 targets, 2 gradients of y, from 3 on the sums of a rank's rows."""
        return FIRST_TAG + number * (3 + self.comm.world) + kind

    def _expect(self, one: Round, number: int) -> None:
        def receive(what: str, about: int, source: int, into: Tensor, kind: int, name: str) -> None:
            one.arriving[what, about, source] = self.comm.receive(into, source, self._tag(number, kind), name)

        for rank in self.others:
            if rank in one.active:
                receive("y", rank, rank, one.sent_y[rank], 0, "the hidden states")
                receive("targets", rank, rank, one.targets[one.places[rank]], 1, "the targets")
            for about in one.active:
                receive("sums", about, rank, one.sums(rank, about), 3 + about, "the sums of logits")
            if self.comm.rank in one.active:
                receive("dy", self.comm.rank, rank, one.sent_dy[rank], 2, "the gradient of the hidden states")

    def _send(self, tensor: Tensor, number: int, kind: int, what: str, ranks: Sequence[int]) -> None:
        self._leaving += [self.comm.send(tensor, rank, self._tag(number, kind), what) for rank in ranks]

    def loss_and_gradient(self, y: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Like a whole head; y is this rank's rows of this pass."""
        for number, one in enumerate(self.rounds):
            if self.comm.rank not in one.active:
                continue
            mine, message = one.places[self.comm.rank], one.sent_y[self.comm.rank]
            self.wire.write(y[one.rows], message)
            # Rounded for ourselves as for the others.
            self.wire.read(message, one.y[mine])
            one.targets[mine].copy_(targets[one.rows])
            self._send(one.targets[mine], number, 1, "the targets", self.others)
            self._send(message, number, 0, "the hidden states", self.others)
        loss = self.take_part(scale)
        d = self.buffers.get("d", *y.shape)
        for one in self.rounds:
            if self.comm.rank in one.active:
                self._sum_gradients(one, d[one.rows])
        return loss, d.mul_(scale)

    def take_part(self, scale: float) -> Tensor:
        """Do this rank's work of a pass; returns the loss of its rows, if any."""
        self.comm.enter("head")
        loss = torch.zeros(())
        most = max(one.all for one in self.rounds)
        for number, one in enumerate(self.rounds):
            order = [rank for rank in (self.comm.rank, *self.others) if rank in one.active]
            self.logits = self.buffers.get("logits", most, self.real, dtype=self.dtype)[: one.all]
            self.scaled = self.buffers.get("scaled", most, self.part.size(1), dtype=self.dtype)[: one.all]
            for rank in order:
                self._exponentials(one, number, rank)
            for rank in sorted(order, key=lambda rank: (rank == self.comm.rank, order.index(rank))):
                loss += self._gradient(one, number, rank, scale)
            last = number == len(self.rounds) - 1 and self.number == len(self.passes) - 1
            if not last:
                self._weight_gradient(slice(0, self.real))
                self._written = True
        self.number += 1
        self.comm.enter("forward_backward")
        return loss * scale

    # -- the two halves of a round

    def _exponentials(self, one: Round, number: int, rank: int) -> None:
        """Compute the exponentials of a rank's rows in this part; sends their sums to all."""
        place, size = one.places[rank], one.sizes[rank]
        logits = self.logits[place]
        if rank != self.comm.rank:
            self.comm.wait(one.arriving.pop(("targets", rank, rank)), one.arriving.pop(("y", rank, rank)))
            self.wire.read(one.sent_y[rank], one.y[place])
        capped = self.buffers.get(f"capped {size}", size, self.part.size(1), dtype=self.dtype)
        x = torch.mul(one.y[place], 1 / SOFTCAP, out=capped)
        wanted = one.targets[place].long() - self.rows.start
        inside = (wanted >= 0) & (wanted < self.real)
        columns = wanted.clamp(0, self.real - 1)
        sums, at_target = one.sums(self.comm.rank, rank), torch.empty(2, size)
        for rows in row_slices(size, self.real * self.dtype.itemsize, CACHED_BYTES):
            t = tanh_product(x[rows], self.operand)
            kernels.exponentials(t, logits[rows], columns[rows], sums[0, rows], at_target[:, rows])
        torch.mul(at_target[0], inside, out=sums[1])
        self._send(sums, number, 3 + rank, "the sums of logits", self.others)
        found = inside.nonzero().squeeze(1)
        one.found[rank] = Target(found, columns[found], at_target[1, found], sums[1, found])

    def _gradient(self, one: Round, number: int, rank: int, scale: float) -> Tensor:
        """Compute the gradient of a rank's rows in this part and send it to that rank; returns the loss of our own rows."""
        place, size, own = one.places[rank], one.sizes[rank], rank == self.comm.rank
        self.comm.wait(*(one.arriving.pop(("sums", rank, other)) for other in self.others))
        total, at_target = torch.zeros(size), torch.zeros(size)
        for part in range(self.comm.world):
            total += one.sums(part, rank)[0]
            at_target += one.sums(part, rank)[1]
        target = one.found.pop(rank)
        missing = (target.exponential - total[target.rows]) * (1 - target.t.square())
        self.logits[place].index_put_((target.rows, target.columns), missing.to(self.dtype))
        counted = one.targets[place] != IGNORED
        factor = (counted / total).unsqueeze(1)
        # As a product of transposes, which is faster if the inner dimension is by far the longest.
        dy = torch.mm(self.operand.t(), self.logits[place].t()).t()
        if own:
            self._own_dy(one).copy_(dy).mul_(factor)
        else:
            name = f"dy for {rank} of round {number}"
            sent = self.buffers.get(f"{name} as sent", self.wire.length(*dy.shape), dtype=self.wire.dtype)
            self.wire.write(torch.mul(dy, factor, out=self.buffers.get(name, *dy.shape)), sent)
            self._send(sent, number, 2, "the gradient of the hidden states", [rank])
        torch.mul(one.y[place], factor * scale, out=self.scaled[place])
        return (total.log() - at_target.log())[counted].sum() if own else torch.zeros(())

    def _own_dy(self, one: Round) -> Tensor:
        return self.buffers.get(f"own dy from {one.rows.start}", one.sizes[self.comm.rank], self.part.size(1))

    def _sum_gradients(self, one: Round, out: Tensor) -> None:
        """The gradient of this rank's rows: the parts in rank order, in float32."""
        out.zero_()
        for rank in range(self.comm.world):
            if rank == self.comm.rank:
                out += self._own_dy(one)
            else:
                self.comm.wait(one.arriving.pop(("dy", self.comm.rank, rank)))
                self.wire.add(one.sent_dy[rank], out)

    def _weight_gradient(self, rows: slice) -> None:
        """The weight gradient of some rows of this part, from the last round."""
        product(self.logits[:, rows].t(), self.scaled, self.gradient[rows], add=self._written)

    # -- the end of a step

    def finish(self, optimizer: Optimizer, piece: int, pieces: int) -> None:
        """One of several pieces of the postponed work: the weight gradient, and AdamW with it."""
        rows = slice(self.real * piece // pieces, self.real * (piece + 1) // pieces)
        self._weight_gradient(rows)
        if piece == pieces - 1:
            rows = slice(rows.start, len(self.part))
        optimizer.dense[HEAD].update(self.gradient[rows], optimizer.schedule.lr_multiplier, optimizer.steps, rows)
        self.current = False

    def gather(self) -> None:
        """Update the weights of all parts on every rank."""
        if self.current:
            return
        self._broadcast_parts(self.weight, "the parts of lm_head.weight")
        self.current = True

    def wait_until_sent(self) -> None:
        """Wait until everything was sent."""
        self.comm.wait(*self._leaving)
        self._leaving.clear()

    def whole_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """AdamW's state of all parts."""
        moments = {}
        for name, mine in optimizer.dense[HEAD].state_dict().items():
            whole = moments[name] = torch.empty_like(self.weight)
            whole[self.rows] = mine
            self._broadcast_parts(whole, "the optimizer state of lm_head.weight")
        return moments

    def _broadcast_parts(self, whole: Tensor, what: str) -> None:
        for rank in range(self.comm.world):
            self.comm.broadcast(whole[self.bounds[rank] : self.bounds[rank + 1]], rank, what)
