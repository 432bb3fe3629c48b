# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""torch.distributed's collectives for a script that was written for NCCL, over the point-to-point exchanges of Comm.

Gloo has no average, no future in all of its forms, and does not say who is missing; these do. While `alone` is set they
behave as in a world of one: an optimizer that would split its work then makes all of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.comm import Comm, Pending

NAMES = (
    "all_reduce",
    "reduce_scatter_tensor",
    "all_gather_into_tensor",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "destroy_process_group",
)
FIRST_TAG, TAGS = 1000, 10000


class Work:
    """Something under way: what dist returns with async_op, and its future as well."""

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
    """The replacements, over one Comm; `wire` is the type in which gradients travel."""

    def __init__(self, comm: Comm, wire: torch.dtype = torch.float32) -> None:
        self.comm, self.wire, self.alone = comm, wire, False
        self.others = [rank for rank in range(comm.world) if rank != comm.rank]
        self._tag = 0
        self._originals: dict[str, Any] = {}

    def install(self) -> None:
        """Put them into torch.distributed, where scripts look them up by name."""
        for name in NAMES:
            self._originals[name] = getattr(dist, name)
            setattr(dist, name, getattr(self, name))

    def uninstall(self) -> None:
        """Put back what was there."""
        for name, original in self._originals.items():
            setattr(dist, name, original)

    @contextlib.contextmanager
    def world_of_one(self) -> Iterator[None]:
        """Let whoever asks believe that this rank is the only one."""
        self.alone = True
        try:
            yield
        finally:
            self.alone = False

    def next_tag(self) -> int:
        """Every rank makes its exchanges in the same order, so that the same number means the same exchange."""
        self._tag = (self._tag + 1) % TAGS
        return FIRST_TAG + self._tag

    # -- what scripts call, with torch's own parameters

    def get_rank(self, group: Any = None) -> int:
        return 0 if self.alone else self.comm.rank

    def get_world_size(self, group: Any = None) -> int:
        return 1 if self.alone else self.comm.world

    def init_process_group(self, *dummy: Any, **options: Any) -> None:
        """There is one already."""

    def destroy_process_group(self, *dummy: Any) -> None:
        """It is still needed, to end together."""

    def all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Work | None:
        if self.alone:
            return self._returned(Work(self.comm, []), async_op)
        if self.comm.phase == "eval":
            # One host may take much longer for its share of an evaluation than another.
            self.comm.barrier("the evaluation of every rank")
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
        shares = list(input.detach().reshape(self.comm.world, -1).unbind(0))
        work = self.sum_shares(shares, output.detach().view(-1), op == dist.ReduceOp.AVG)
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

    # -- what they are made of

    def sum_shares(self, shares: list[Tensor], into: Tensor, mean: bool) -> Work:
        """Send every rank its share; `into` becomes the sum of what is ours, in float32 and in the order of the ranks."""
        comm, tag, what = self.comm, self.next_tag(), "a share of the gradients"
        mine = shares[comm.rank].to(self.wire)
        arriving = {rank: torch.empty(mine.shape, dtype=self.wire) for rank in self.others}
        pending = [comm.receive(buffer, rank, tag, what) for rank, buffer in arriving.items()]
        pending += [comm.send(shares[rank].to(self.wire).contiguous(), rank, tag, what) for rank in self.others]

        def finish() -> None:
            total = torch.zeros(mine.shape, dtype=torch.float32)
            for rank in range(comm.world):
                total += arriving.get(rank, mine)
            into.copy_(total.div_(comm.world) if mean else total)

        return Work(comm, pending, finish)

    def gather(self, parts: list[Tensor], mine: Tensor) -> Work:
        """Give every rank what is ours, and take what is theirs into the parts."""
        comm, tag, what = self.comm, self.next_tag(), "what each rank has updated"
        mine = mine.contiguous()
        pending = [comm.receive(parts[rank], rank, tag, what) for rank in self.others]
        pending += [comm.send(mine, rank, tag, what) for rank in self.others]
        return Work(comm, pending)


def _divide(tensor: Tensor, count: int) -> None:
    with torch.no_grad():
        tensor.div_(count)
