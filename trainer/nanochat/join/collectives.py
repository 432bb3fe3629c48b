# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""torch.distributed's collectives for a script written for NCCL, implemented with Comm's point-to-point exchanges.

Gloo has no average, incomplete futures, and does not report who is missing; these do. While `alone` is set they
behave like a world of one: an optimizer that would split its work then does all of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.parallel.comm import Comm, Pending
from nanochat.parallel.wire import WIRES, Plain, Wire
from nanochat.rules.ways import BLOCK, LEAST_BLOCK

NAMES = (
    "all_reduce",
    "reduce_scatter_tensor",
    "all_gather_into_tensor",
    "barrier",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "destroy_process_group",
)
FIRST_TAG, TAGS = 1000, 10000


class Work:
    """A pending operation: dist's async_op result and its future."""

    def __init__(self, comm: Comm, pending: list[Pending], finish: Callable[[], None] | None = None) -> None:
        self._comm, self._pending, self._finish = comm, pending, finish
        self._done = False

    def wait(self, timeout: Any = None) -> bool:
        if not self._done:
            self._comm.wait(*self._pending)
            if self._finish is not None:
                self._finish()
            self._done = True
        return True

    def get_future(self) -> Work:
        return self

    def is_completed(self) -> bool:
        return self._done


class Collectives:
    """The replacements on top of one Comm; gradients are sent with a --sync method.

    The rounding error of a gradient is stored by its place among a step's exchanges, which is constant.
    """

    def __init__(self, comm: Comm, sync: str = "exact") -> None:
        # Also works for a single rank: under torchrun, scripts assume that they are one of several.
        self.comm, self.alone = comm, comm.world == 1
        # Between two steps a rank may evaluate much longer than another.
        self.patient = True
        self.wire, self.row_wire = WIRES.get(sync, WIRES["exact"])[:2]
        self._feedback: dict[Any, Tensor] = {}
        self._step: tuple[Any, int] = (None, 0)
        self.others = [rank for rank in range(comm.world) if rank != comm.rank]
        self._tag = 0
        self._originals: dict[str, Any] = {}

    def install(self) -> None:
        """Install them in torch.distributed, where scripts look them up by name."""
        for name in NAMES:
            self._originals[name] = getattr(dist, name)
            setattr(dist, name, getattr(self, name))

    def uninstall(self) -> None:
        """Restore the originals."""
        for name, original in self._originals.items():
            setattr(dist, name, original)

    @contextlib.contextmanager
    def world_of_one(self) -> Iterator[None]:
        """Pretend that this rank is the only one."""
        before, self.alone = self.alone, True
        try:
            yield
        finally:
            self.alone = before

    def start_step(self, optimizer: Any) -> None:
        """The following exchanges belong to a step of this optimizer, in their usual order."""
        self._step, self.patient = (optimizer, 0), False

    def _fed(self, values: Tensor, wire: Wire, rank: int) -> Tensor | None:
        """The rounding error of what was sent to a rank from this place before."""
        if isinstance(wire, Plain):
            return None
        place = (*self._step, rank)
        if place not in self._feedback or self._feedback[place].shape != values.shape:
            self._feedback[place] = torch.zeros_like(values)
        return self._feedback[place]

    def next_tag(self) -> int:
        """Every rank makes its exchanges in the same order, so equal numbers mean the same exchange."""
        self._tag = (self._tag + 1) % TAGS
        return FIRST_TAG + self._tag

    # -- called by scripts, with torch's own parameters

    def get_rank(self, group: Any = None) -> int:
        return 0 if self.alone else self.comm.rank

    def get_world_size(self, group: Any = None) -> int:
        return 1 if self.alone else self.comm.world

    def init_process_group(self, *dummy: Any, **options: Any) -> None:
        """It already exists."""

    def destroy_process_group(self, *dummy: Any) -> None:
        """It is still needed for a joint end."""

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: Any = None) -> Work | None:
        if not self.alone:
            self.comm.barrier("the evaluation on all ranks")
        return self._returned(Work(self.comm, []), async_op)

    def all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Work | None:
        if self.alone:
            return self._returned(Work(self.comm, []), async_op)
        if self.patient:
            self.barrier()
        mean = op == dist.ReduceOp.AVG
        plain = dist.ReduceOp.SUM if mean else op
        start = self._originals["all_reduce"]
        pending = self.comm.launch("a sum over all ranks", lambda: start(tensor, plain, async_op=True))
        self.comm.bytes_sent += 2 * (self.comm.world - 1) * tensor.nbytes // self.comm.world
        finish = (lambda: _divide(tensor, self.comm.world)) if mean else None
        return self._returned(Work(self.comm, [pending], finish), async_op)

    def reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Work | None:
        if self.alone:
            output.copy_(input.view_as(output))
            return self._returned(Work(self.comm, []), async_op)
        columns = input.size(-1) if input.dim() > 1 and not input.size(-1) % LEAST_BLOCK else 1
        shares = list(input.detach().reshape(self.comm.world, -1, columns).unbind(0))
        work = self.sum_shares(shares, output.detach().view(-1, columns), op == dist.ReduceOp.AVG)
        return self._returned(work, async_op)

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Work | None:
        if self.alone:
            output_tensor.copy_(input_tensor.view_as(output_tensor))
            return self._returned(Work(self.comm, []), async_op)
        parts = list(output_tensor.detach().view(self.comm.world, -1).unbind(0))
        mine = input_tensor.detach().reshape(-1)
        parts[self.comm.rank].copy_(mine)
        return self._returned(self.gather(parts, mine), async_op)

    def _returned(self, work: Work, async_op: bool) -> Work | None:
        if async_op:
            return work
        work.wait()
        return None

    # -- building blocks

    def sum_shares(self, shares: list[Tensor], into: Tensor, mean: bool) -> Work:
        """Send every rank its share of a matrix; `into` becomes the sum of ours, in float32 and rank order."""
        comm, tag, what = self.comm, self.next_tag(), "a share of the gradients"
        wire = self.wire_of(shares[comm.rank])
        self._step = (self._step[0], self._step[1] + 1)
        arriving = {rank: self._message(wire, into) for rank in self.others}
        pending = [comm.receive(buffer, rank, tag, what) for rank, buffer in arriving.items()]
        pending += [comm.send(self.written(shares[rank], wire, rank), rank, tag, what) for rank in self.others]
        # Ours is not sent, so there is nothing to pack; but a plain type rounds all shares alike.
        own = shares[comm.rank].to(wire.dtype) if isinstance(wire, Plain) else shares[comm.rank]

        def finish() -> None:
            total = torch.zeros(into.shape, dtype=torch.float32)
            for rank in range(comm.world):
                total = wire.add(arriving[rank], total) if rank in arriving else total.add_(own.view_as(total))
            into.copy_(total.div_(comm.world) if mean else total)

        return Work(comm, pending, finish)

    def share_out(self, mine: Tensor, into: list[Tensor]) -> Work:
        """Send our matrix to every rank and receive theirs; rounding is the same everywhere."""
        comm, wire = self.comm, self.wire_of(mine)
        self._step = (self._step[0], self._step[1] + 1)
        messages = [self._message(wire, mine) for dummy in range(comm.world)]
        messages[comm.rank] = self.written(mine, wire, comm.rank)
        work = self.gather(messages, messages[comm.rank])

        def finish() -> None:
            work.wait()
            for message, place in zip(messages, into, strict=True):
                wire.read(message, place)

        return Work(comm, [], finish)

    def wire_of(self, matrix: Tensor) -> Wire:
        """The method's wire, or the one for rows if too few values would share a scale."""
        return self.wire if isinstance(self.wire, Plain) or not matrix.size(1) % LEAST_BLOCK else self.row_wire

    def written(self, values: Tensor, wire: Wire, rank: int) -> Tensor:
        """The message for a matrix to a rank."""
        values = values.contiguous()
        if wire.dtype == values.dtype:
            return values
        message = self._message(wire, values)
        wire.write(values, message, self._fed(values, wire, rank))
        return message

    @staticmethod
    def _message(wire: Wire, matrix: Tensor) -> Tensor:
        return torch.empty(wire.length(*matrix.shape), dtype=wire.dtype)

    def gather(self, parts: list[Tensor], mine: Tensor) -> Work:
        """Send ours to every rank, and receive theirs into the parts."""
        comm, tag, what = self.comm, self.next_tag(), "the update of each rank"
        mine = mine.contiguous()
        pending = [comm.receive(parts[rank], rank, tag, what) for rank in self.others]
        pending += [comm.send(mine, rank, tag, what) for rank in self.others]
        return Work(comm, pending)


def in_blocks(flat: Tensor, world: int) -> list[Tensor]:
    """One share per rank, of a number of values divisible by BLOCK x world, as matrices that pack well."""
    return list(flat.view(world, -1, BLOCK).unbind(0))


def _divide(tensor: Tensor, count: int) -> None:
    with torch.no_grad():
        tensor.div_(count)
