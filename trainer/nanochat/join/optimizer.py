# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Makes a checkout's own optimizer train together: its update rules, our exchange of gradients.

The optimizer is a torch.optim.Optimizer whose groups have a kind. AdamW groups are updated completely on every rank, in an
apparent world of one, from averaged gradients; for embedding tables, only rows touched by a
rank's tokens are sent. Muon groups are split by the optimizer itself, through our collectives. An optimizer
without kinds exchanges everything that it asks for.

With int8 the gradients are packed as in our own trainer, for Muon's matrices and other large ones; the optimizer itself
gathers weights, which must arrive unchanged. Rounding errors are not saved: a resumed run starts without them.

What it saves and loads has the layout of optim_file.py, with the parts of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanochat.join.collectives import Collectives, Work, in_blocks
from nanochat.kit.common import UserError
from nanochat.kit.expected import count
from nanochat.rules.ways import BLOCK
from nanochat.run.optim_file import ADAMW, MUON, OptimizerLayout, Unusable

SMALL = 1024
FILES_KEY = "nanochat_ddp_files"
Json = dict[str, Any]


class Touched:
    """Rows of the embedding tables read since the last step."""

    def __init__(self) -> None:
        self.ids: dict[Tensor, list[Tensor]] = {}

    def install(self) -> None:
        """Hook every torch.nn.Embedding."""
        forward, ids = torch.nn.Embedding.forward, self.ids

        def watched(module: torch.nn.Embedding, input: Tensor) -> Tensor:
            if torch.is_grad_enabled() and module.weight.requires_grad:
                # A copy: loaders reuse the memory for the next batch.
                ids.setdefault(module.weight, []).append(input.detach().flatten().to(torch.int32, copy=True))
            return forward(module, input)

        torch.nn.Embedding.forward = watched  # type: ignore[method-assign, assignment]

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Forget what was read: the step is done."""
        for parameter in parameters:
            self.ids.pop(parameter, None)

    def take(self, tables: Sequence[Tensor]) -> Tensor:
        """Token ids read since the last call, from all tables, with repetitions."""
        taken = [self.ids.pop(table) for table in tables if table in self.ids]
        longest = max(taken, key=lambda parts: sum(len(part) for part in parts))
        alike = all(len(parts) == len(longest) and all(map(torch.equal, parts, longest)) for parts in taken)
        chosen = longest if alike else [part for parts in taken for part in parts]
        return torch.cat(chosen)


class Joined:
    """One optimizer of the script."""

    def __init__(self, optimizer: Any, collectives: Collectives, touched: Touched) -> None:
        self.optimizer, self.collectives, self.comm = optimizer, collectives, collectives.comm
        self.touched = touched
        self.kinds = all(group.get("kind") in ("adamw", "muon") for group in optimizer.param_groups)
        self.original: dict[str, Callable[..., Any]] = {
            name: getattr(optimizer, name) for name in ("step", "state_dict", "load_state_dict")
        }
        self._read = 0  # rows that a rank reads per step

    # -- a step

    def step(self, pack: Tensor) -> Tensor:
        """One update; `pack`: numbers to sum over the ranks."""
        groups = self.optimizer.param_groups
        self.collectives.start_step(self)
        if not self.kinds:
            total = self._sum_small([pack])[0]
            self.original["step"]()
            # Nobody asked which rows were touched.
            self.touched.forget(p for group in groups for p in group["params"])
            return total
        adamw = [group for group in groups if group["kind"] == "adamw"]
        total = self._average([p for group in adamw for p in group["params"] if p.grad is not None], pack)
        try:
            self.optimizer.param_groups = [group for group in groups if group["kind"] == "muon"]
            if self.optimizer.param_groups:
                self.original["step"]()
            self.optimizer.param_groups = adamw
            with self.collectives.world_of_one():
                self.original["step"]()
        finally:
            self.optimizer.param_groups = groups
        return total

    @torch.no_grad()
    def _average(self, parameters: Sequence[Any], pack: Tensor) -> Tensor:
        """Average every gradient over the ranks."""
        tables = [p for p in parameters if p in self.touched.ids]
        large = [p for p in parameters if p.numel() >= SMALL and p not in self.touched.ids]
        small = [p for p in parameters if p.numel() < SMALL and p not in self.touched.ids]
        shares = [self._start_large(p.grad) for p in large]
        if tables:
            self._average_rows(tables)
        gathers = [self._start_gather(*share) for share in shares]
        totals = self._sum_small([pack, *(p.grad for p in small)])
        for p, total in zip(small, totals[1:], strict=True):
            p.grad.copy_(total / self.comm.world)
        for p, (work, flat) in zip(large, gathers, strict=True):
            work.wait()
            p.grad.copy_(flat[: p.grad.numel()].view_as(p.grad))
        return totals[0]

    def _sum_small(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """In one piece, and in rank order."""
        flat = torch.cat([tensor.detach().float().flatten() for tensor in tensors])
        total = torch.zeros_like(flat)
        for part in self._from_all(flat):
            total += part
        return [
            one.view(tensor.shape)
            for one, tensor in zip(total.split([tensor.numel() for tensor in tensors]), tensors, strict=True)
        ]

    def _start_large(self, gradient: Tensor) -> tuple[Work, Tensor]:
        """Send every rank its share of a gradient."""
        unit = BLOCK * self.comm.world
        flat = torch.zeros(-(-gradient.numel() // unit) * unit)
        flat[: gradient.numel()] = gradient.detach().flatten()
        shares = in_blocks(flat, self.comm.world)
        share = torch.empty_like(shares[0])
        return self.collectives.sum_shares(shares, share, mean=True), share

    def _start_gather(self, work: Work, share: Tensor) -> tuple[Work, Tensor]:
        """Send our summed share to all; rounding is the same everywhere."""
        work.wait()
        flat = torch.empty(share.numel() * self.comm.world)
        return self.collectives.share_out(share, in_blocks(flat, self.comm.world)), flat

    def _average_rows(self, tables: Sequence[Any]) -> None:
        """The rows touched by any rank; all others are zero everywhere."""
        comm, wire = self.comm, self.collectives.row_wire.dtype
        mine = self.touched.take(tables)
        self._read = self._read or self._agreed(len(mine))
        if len(mine) != self._read:
            raise UserError(
                f"{comm.name} read {len(mine)} tokens in this step, and {self._read} in the first one; "
                "rows cannot be exchanged in steps of different size."
            )
        rows = [torch.unique(ids).long() for ids in self._from_all(mine)]
        union = torch.unique(torch.cat(rows))
        places = [torch.searchsorted(union, one) for one in rows]
        under_way = []
        for table in tables:
            parts = [torch.empty(len(one), table.size(1), dtype=wire) for one in rows]
            parts[comm.rank] = table.grad[rows[comm.rank]].to(wire)
            under_way.append((table, parts, self.collectives.gather(parts, parts[comm.rank])))
        for table, parts, work in under_way:
            work.wait()
            total = torch.zeros(len(union), table.size(1))
            for place, part in zip(places, parts, strict=True):
                total.index_add_(0, place, part.float())
            table.grad.index_copy_(0, union, total.div_(comm.world).to(table.grad.dtype))

    def _from_all(self, mine: Tensor) -> list[Tensor]:
        """Each rank's tensor of this shape."""
        parts = [torch.empty_like(mine) for dummy in range(self.comm.world)]
        parts[self.comm.rank] = mine
        self.collectives.gather(parts, mine).wait()
        return parts

    def _agreed(self, tokens: int) -> int:
        counts = self.comm.exchange("the tokens of a step", tokens, fits=count())
        if len(set(counts)) > 1:
            listed = ", ".join(f"rank {rank} {one}" for rank, one in enumerate(counts))
            raise UserError(
                f"the ranks read different numbers of tokens in a step ({listed}); start every rank with the same "
                "--device-batch-size."
            )
        return tokens

    # -- saving and loading

    def _layout(self) -> tuple[OptimizerLayout, list[Any]]:
        groups: list[dict[str, Any]] = []
        parameters: list[Any] = []
        for group in self.optimizer.param_groups:
            names = [str(len(parameters) + n) for n in range(len(group["params"]))]
            parameters += group["params"]
            groups.append({**group, "params": names})
        shapes = {str(n): p.shape for n, p in enumerate(parameters)}
        return OptimizerLayout(groups, shapes, self.comm.world), parameters

    def state_dict(self) -> Json:
        """torch's state dict for this rank, with the other ranks' parts; all ranks call it together."""
        if not self.kinds:
            found: Json = self.original["state_dict"]()
            return found
        layout, parameters = self._layout()
        states = self.optimizer.state
        adamw, muon, steps = {}, {}, 0
        for name in layout.adamw:
            p = parameters[int(name)]
            adamw[name] = {key: states[p][key] for key in ADAMW}
            steps = int(states[p]["step"])
        for names in layout.muon:
            # Each rank has a part of the matrices.
            state = states[parameters[int(names[0])]]
            stacked = {key: torch.cat(self._from_all(state[key])) for key in MUON}
            for n, name in enumerate(names):
                muon[name] = {key: value[n] for key, value in stacked.items()}
        return layout.file({"steps": steps, "adamw": adamw, "muon": muon}, self.comm.rank)

    def load_state_dict(self, found: Json) -> None:
        """From this rank's file, or from all files of a checkpoint ({FILES_KEY: {rank: file}})."""
        files = found.get(FILES_KEY, {self.comm.rank: found})
        if not self.kinds:
            self.original["load_state_dict"](files[self.comm.rank])
            return
        layout, _parameters = self._layout()
        try:
            state = layout.state(files)
        except Unusable as why:
            raise UserError(f"the checkpoint's optimizer state cannot be loaded: {why}.") from None
        shards: list[dict[int, dict[str, Any]]] = [{} for dummy in range(self.comm.world)]
        for names in layout.muon:
            layout.split_muon(names, state["muon"], shards)
        mine = shards[self.comm.rank]
        for name, moments in state["adamw"].items():
            mine[int(name)] = {"step": state["steps"], **moments}
        groups = next(iter(files.values()))["param_groups"]
        self.original["load_state_dict"]({"state": mine, "param_groups": groups})
