# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Makes a checkout's own optimizer train together: its update rules, our exchanges, also for what its scripts call themselves.

The optimizer takes itself for the only rank. Every rank updates AdamW's groups from the averaged gradients. Of each Muon group it is
shown only the matrices that this rank updates; the updated ones are then sent to all. What is saved is the file of a single rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.kit.common import UserError
from nanochat.model.optim import muon_shapes
from nanochat.parallel.comm import Comm
from nanochat.parallel.wire import WIRES
from nanochat.run.optim_file import OURS_KEY, OptimizerLayout, Unusable

FILES_KEY = "nanochat_ddp_files"
Json = dict[str, Any]
Arriving = Callable[[], list[Tensor]]


class Exchange:
    """The exchanges of flat tensors of one rank, which all ranks make in the same order; sync: how gradients are sent."""

    def __init__(self, comm: Comm, sync: str) -> None:
        self.comm, self.dtype = comm, WIRES[sync].matrices.dtype

    def start(self, outgoing: Sequence[Tensor], sizes: Sequence[int]) -> Arriving:
        """Send one tensor to each rank; the result, when called, has those of these sizes that the ranks sent us."""
        comm, counts, sent = self.comm, list(map(len, outgoing)), torch.cat(list(outgoing))
        arriving = sent.new_empty(sum(sizes)) if comm.world > 1 else sent
        pending = comm.launch(
            "the gradients and weights of a step",
            lambda: dist.all_to_all_single(arriving, sent, list(sizes), counts, async_op=True),
        )
        comm.bytes_sent += (len(sent) - counts[comm.rank]) * sent.itemsize

        def finish() -> list[Tensor]:
            comm.wait(pending)
            return list(arriving.split(list(sizes)))

        return finish

    def from_all(self, mine: Tensor, sizes: Sequence[int] = ()) -> Arriving:
        """Send our tensor to every rank; the result, when called, has each rank's. sizes: how long they are, if not as ours."""
        return self.start([mine] * self.comm.world, sizes or [len(mine)] * self.comm.world)

    def mean(self, shares: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Send every rank its share of the gradients; the result, when called, is the mean of ours."""
        mine = len(shares[self.comm.rank])
        arriving = self.start([share.to(self.dtype) for share in shares], [mine] * self.comm.world)

        def finish() -> Tensor:
            total = torch.zeros(mine)
            for part in arriving():
                total += part
            return total.div_(self.comm.world)

        return finish

    def average_rows(self, gradients: Sequence[Tensor]) -> None:
        """Average gradients of embedding tables in place, of which each rank sends the rows that its tokens have touched."""
        touched = [gradient.ne(0).any(1).nonzero().flatten() for gradient in gradients]
        counts = self.from_all(torch.tensor([len(rows) for rows in touched], dtype=torch.int64))()
        arriving = []
        for gradient, rows, each in zip(gradients, touched, torch.stack(counts, 1).tolist(), strict=True):
            values = gradient[rows].to(self.dtype).flatten()
            ids = self.from_all(rows, each)
            arriving.append((ids, self.from_all(values, [count * gradient.size(1) for count in each])))
        for gradient, rows, (ids, sent) in zip(gradients, touched, arriving, strict=True):
            gradient.index_fill_(0, rows, 0)
            for at, part in zip(ids(), sent(), strict=True):
                values = part.view(len(at), gradient.size(1)).to(gradient.dtype)
                gradient.index_add_(0, at, values, alpha=1 / self.comm.world)


class World:
    """torch.distributed as a script written for NCCL calls it, over our connection, which is made once and says who is missing.

    While `alone`, its answers are those of a single rank.
    """

    def __init__(self, comm: Comm) -> None:
        # Also for a single rank: scripts below torchrun assume that they are one of several.
        self.comm, self.alone = comm, comm.world == 1

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Put our functions where scripts look them up by name."""
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


class JoinedOptimizer:
    """The script's optimizer: a torch.optim.Optimizer whose groups have a kind, "muon" or another."""

    def __init__(self, optimizer: torch.optim.Optimizer, world: World, sync: str) -> None:
        self.optimizer, self.world = optimizer, world
        self.exchange, self.rank, self.ranks = Exchange(world.comm, sync), world.comm.rank, world.comm.world
        self._step, self._state_dict = optimizer.step, optimizer.state_dict
        self._load_state_dict = optimizer.load_state_dict

    @property
    def muon(self) -> list[Json]:
        return [group for group in self.optimizer.param_groups if group.get("kind") == "muon"]

    # -- a step

    @torch.no_grad()
    def step(self, pack: Tensor, tables: Sequence[Tensor]) -> Tensor:
        """One update; pack: numbers to sum over the ranks; tables: the embeddings' weights."""
        shared = [group for group in self.optimizer.param_groups if group.get("kind") != "muon"]
        # Muon's matrices, by the rank that updates them.
        owned = [[p for group in self.muon for p in group["params"][rank :: self.ranks]] for rank in range(self.ranks)]
        mine, by_rows = owned[self.rank], set(map(id, tables))
        given = [p for group in shared for p in group["params"] if p.grad is not None]
        dense = [p.grad for p in given if id(p) not in by_rows]
        slices = flat(dense).tensor_split(self.ranks)
        shares = [flat([*(p.grad for p in own), part]) for own, part in zip(owned, slices, strict=True)]
        mean = self.exchange.mean(shares)
        totals = self.exchange.from_all(pack)
        if rows := [p.grad for p in given if id(p) in by_rows]:
            self.exchange.average_rows(rows)
        matrices, part = mean().tensor_split([len(shares[self.rank]) - len(slices[self.rank])])
        averaged = self.exchange.from_all(part.to(self.exchange.dtype), list(map(len, slices)))
        fill([p.grad for p in mine], matrices)
        fill(dense, torch.cat(averaged()))
        self._update(shared)
        weights = self.exchange.from_all(flat(mine), [sum(p.numel() for p in own) for own in owned])
        for own, part in zip(owned, weights(), strict=True):
            fill(own, part)
        return torch.stack(totals()).sum(0)

    def _update(self, shared: list[Json]) -> None:
        """The optimizer's own step, with what this rank updates."""
        groups = self.optimizer.param_groups
        dealt = [{**group, "params": group["params"][self.rank :: self.ranks]} for group in self.muon]
        try:
            self.optimizer.param_groups = [*(group for group in dealt if group["params"]), *shared]
            self.world.alone = True
            self._step()
        finally:
            self.optimizer.param_groups, self.world.alone = groups, self.ranks == 1

    # -- saving and loading

    def state_dict(self) -> Json:
        """torch's state dict of a single rank; all ranks call it together."""
        file = self._state_dict()
        for group, saved in zip(self.optimizer.param_groups, file["param_groups"], strict=True):
            if group.get("kind") == "muon":
                # The optimizer keeps its state with the first matrix that it is shown.
                numbers = saved["params"]
                mine = {} if self.rank >= len(numbers) else file["state"].pop(numbers[self.rank])
                file["state"][numbers[0]] = self._whole(group["params"], mine)
        return {**file, OURS_KEY: {"others": {}}}

    def _whole(self, parameters: Sequence[Tensor], mine: Json) -> dict[str, Tensor]:
        """A Muon group's state from all ranks, in the group's order."""
        whole = {}
        for key, shape in muon_shapes(parameters[0].shape).items():
            sizes = [len(parameters[rank :: self.ranks]) * shape.numel() for rank in range(self.ranks)]
            whole[key] = torch.empty(len(parameters), *shape)
            for rank, part in enumerate(self.exchange.from_all(flat([mine[key]] if mine else []), sizes)()):
                whole[key][rank :: self.ranks] = part.view(-1, *shape)
        return whole

    def load_state_dict(self, found: Json) -> None:
        """From all files of a checkpoint, of any number of ranks ({FILES_KEY: {rank: file}}), or from one of a single rank."""
        files = found.get(FILES_KEY, {0: found})
        numbers = {p: n for n, p in enumerate(p for group in self.optimizer.param_groups for p in group["params"])}
        named = [
            {**group, "params": [str(numbers[p]) for p in group["params"]]} for group in self.optimizer.param_groups
        ]
        layout = OptimizerLayout(named, {str(n): p.shape for p, n in numbers.items()})
        try:
            loaded = layout.file(layout.state(files))["state"]
        except Unusable as why:
            raise UserError(f"the checkpoint's optimizer state cannot be loaded: {why}.") from None
        for group in self.muon:
            whole = loaded.pop(numbers[group["params"][0]])
            for first in group["params"][self.rank : self.rank + 1]:
                loaded[numbers[first]] = {key: value[self.rank :: self.ranks].clone() for key, value in whole.items()}
        self._load_state_dict({"state": loaded, "param_groups": next(iter(files.values()))["param_groups"]})


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All their values in float32, one after the other."""
    return torch.cat([torch.empty(0), *(one.detach().float().flatten() for one in tensors)])


def fill(tensors: Sequence[Tensor], values: Tensor) -> None:
    """Take their values from a flat tensor."""
    for one, part in zip(tensors, values.split([one.numel() for one in tensors]), strict=True):
        one.copy_(part.view_as(one))
