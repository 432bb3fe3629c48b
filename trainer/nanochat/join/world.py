# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a script written for NCCL calls in torch.distributed, on top of our connection: it is made once, and says who is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from nanochat.parallel.comm import Comm


class World:
    """The replacements; while `alone`, they are those of a single rank."""

    def __init__(self, comm: Comm) -> None:
        # Also for a single rank: scripts below torchrun assume that they are one of several.
        self.comm, self.alone = comm, comm.world == 1

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Put them where scripts look them up by name."""
        replacements = {
            "get_rank": lambda *dummy, **options: 0 if self.alone else self.comm.rank,
            "get_world_size": lambda *dummy, **options: 1 if self.alone else self.comm.world,
            # The group already exists, and is still needed for a joint end.
            "init_process_group": lambda *dummy, **options: None,
            "destroy_process_group": lambda *dummy, **options: None,
            "barrier": self.barrier,
            "all_reduce": self.all_reduce,
        }
        originals = {name: getattr(dist, name) for name in replacements}
        vars(dist).update(replacements)
        try:
            yield
        finally:
            vars(dist).update(originals)

    def barrier(self, *dummy: Any, **options: Any) -> None:
        self.comm.barrier("the evaluation on all ranks")

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, *dummy: Any, **options: Any) -> None:
        """One rank may evaluate for much longer than a step takes."""
        self.barrier()
        reduce = dist.distributed_c10d.all_reduce
        self.comm.wait(self.comm.launch("a sum over all ranks", lambda: reduce(tensor, op, async_op=True)))
