# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Makes a checkout's own optimizer train together: its update rules, our exchanges.

It takes itself for the only rank. Every rank updates AdamW's groups from the averaged gradients. Of each Muon group it is shown only
the matrices that this rank updates; the updated ones are then sent to all. What is saved is the file of a single rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nanochat.join.exchange import Exchange
from nanochat.join.world import World
from nanochat.kit.common import UserError
from nanochat.model.optim import muon_shapes
from nanochat.run.optim_file import OURS_KEY, OptimizerLayout, Unusable

SMALL = 1024
FILES_KEY = "nanochat_ddp_files"
Json = dict[str, Any]


class JoinedOptimizer:
    """The script's optimizer: a torch.optim.Optimizer whose groups have a kind, "muon" or another."""

    def __init__(self, optimizer: Any, world: World, sync: str) -> None:
        self.optimizer, self.world = optimizer, world
        self.exchange, self.rank, self.ranks = Exchange(world.comm, sync), world.comm.rank, world.comm.world
        self._step, self._state_dict = optimizer.step, optimizer.state_dict
        self._load_state_dict = optimizer.load_state_dict

    @property
    def groups(self) -> list[Json]:
        found: list[Json] = self.optimizer.param_groups
        return found

    @property
    def muon(self) -> list[Json]:
        return [group for group in self.groups if group.get("kind") == "muon"]

    def owned(self, group: Json) -> list[list[Any]]:
        """A Muon group's matrices, by the rank that updates them."""
        return [group["params"][rank :: self.ranks] for rank in range(self.ranks)]

    # -- a step

    @torch.no_grad()
    def step(self, pack: Tensor, tables: Sequence[Tensor]) -> Tensor:
        """One update; pack: numbers to sum over the ranks; tables: the embeddings' weights."""
        shared = [group for group in self.groups if group.get("kind") != "muon"]
        gradients = [(p, p.grad) for group in shared for p in group["params"] if p.grad is not None]
        by_rows = set(map(id, tables))
        rows = [grad for p, grad in gradients if id(p) in by_rows]
        others = [grad for p, grad in gradients if id(p) not in by_rows]
        small = [grad for grad in others if grad.numel() < SMALL]
        means = [self.exchange.scatter([_stacked(group, own) for own in self.owned(group)]) for group in self.muon]
        finish = self.exchange.average([grad for grad in others if grad.numel() >= SMALL])
        if rows:
            self.exchange.average_rows(rows)
        for group, mean in zip(self.muon, means, strict=True):
            for p, grad in zip(self.owned(group)[self.rank], mean(), strict=True):
                p.grad = grad.to(p.dtype)
        finish()
        totals = self.exchange.sum_small([pack, *small])
        for grad, total in zip(small, totals[1:], strict=True):
            grad.copy_(total / self.ranks)
        mine = [{**group, "params": self.owned(group)[self.rank]} for group in self.muon]
        self._update([*(group for group in mine if group["params"]), *shared])
        return totals[0]

    def _update(self, visible: list[Json]) -> None:
        """The optimizer's own step with these groups; then every rank gets all matrices."""
        groups = self.groups
        try:
            self.optimizer.param_groups = visible
            with self.world.of_one():
                self._step()
        finally:
            self.optimizer.param_groups = groups
        arriving = []
        for group in self.muon:
            owned, shape = self.owned(group), group["params"][0].shape
            parts = [torch.empty(len(own), *shape) for own in owned]
            parts[self.rank] = _stacked(group, owned[self.rank], weights=True)
            arriving.append((group, parts, self.exchange.gather(parts[self.rank], parts)))
        for group, parts, receive in arriving:
            receive()
            for own, part in zip(self.owned(group), parts, strict=True):
                for p, weights in zip(own, part, strict=True):
                    p.copy_(weights)

    # -- saving and loading

    def state_dict(self) -> Json:
        """torch's state dict of a single rank; all ranks call it together."""
        state, before = self.optimizer.state, dict(self.optimizer.state)
        for group in self.muon:
            whole = self._whole(group)
            for own in self.owned(group)[self.rank][:1]:
                state.pop(own)
            state[group["params"][0]] = whole
        try:
            return {**self._state_dict(), OURS_KEY: {"others": {}}}
        finally:
            state.clear()
            state.update(before)

    def _whole(self, group: Json) -> dict[str, Tensor]:
        """A Muon group's state from all ranks, in the group's order."""
        owned, whole = self.owned(group), {}
        for key, shape in muon_shapes(group["params"][0].shape).items():
            mine = self.optimizer.state[owned[self.rank][0]][key] if owned[self.rank] else torch.empty(0)
            sizes = [len(own) * shape.numel() for own in owned]
            whole[key] = torch.empty(len(group["params"]), *shape)
            for rank, part in enumerate(self.exchange.from_all(mine.float(), sizes)):
                whole[key][rank :: self.ranks] = part.view(-1, *shape)
        return whole

    def load_state_dict(self, found: Json) -> None:
        """From all files of a checkpoint, of any number of ranks ({FILES_KEY: {rank: file}}), or from one of a single rank."""
        files = found.get(FILES_KEY, {0: found})
        numbers = {p: n for n, p in enumerate(p for group in self.groups for p in group["params"])}
        named = [{**group, "params": [str(numbers[p]) for p in group["params"]]} for group in self.groups]
        layout = OptimizerLayout(named, {str(n): p.shape for p, n in numbers.items()})
        try:
            loaded = layout.file(layout.state(files))["state"]
        except Unusable as why:
            raise UserError(f"the checkpoint's optimizer state cannot be loaded: {why}.") from None
        for group in self.muon:
            whole = loaded.pop(numbers[group["params"][0]])
            for own in self.owned(group)[self.rank][:1]:
                loaded[numbers[own]] = {key: value[self.rank :: self.ranks].clone() for key, value in whole.items()}
        self._load_state_dict({"state": loaded, "param_groups": next(iter(files.values()))["param_groups"]})


def _stacked(group: Mapping[str, Any], own: Sequence[Any], weights: bool = False) -> Tensor:
    """Some of a group's matrices, or their gradients."""
    parts = [(p.detach() if weights else p.grad).float() for p in own]
    return torch.stack(parts) if parts else torch.empty(0, *group["params"][0].shape)
