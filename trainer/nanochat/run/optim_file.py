# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The optimizer state in optim_NNNNNN_rankR.pt, readable and writable by upstream's optimizer.

Upstream's is a torch.optim.Optimizer: {"state": {parameter number: {...}}, "param_groups": [...]}, with parameters numbered
through the groups of `Optimizer.param_groups`:
- AdamW: exp_avg and exp_avg_sq of each parameter;
- Muon: the matrices of a group stacked under the number of the first.

    layout = OptimizerLayout(optimizer)
    torch.save(layout.file(state), path)                # state: by parameter name, from Optimizer.state_dict()
    state = layout.state({rank: torch.load(path)})      # from any file of ours, or from the files of all upstream ranks

Ours are those of a single rank, so that any one of them is enough to resume with any number of ranks. Several ranks of upstream split
the state, one file each: parameters with SPLIT elements or more by rows, and stacks by matrices, padded with zeros to a multiple of
the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nanochat.model.optim import ADAMW, MUON, Optimizer, muon_shapes

# Keys that upstream's loader skips: the first one marks our files, each of which has all parts ("others" in it has other ranks' parts,
# in files of earlier versions); SHARE names the matrices of a rank that saved alone.
OURS_KEY, SHARE = "nanochat_ddp_state", "share"
SPLIT = 1024
Json = dict[str, Any]
Shard = dict[int, dict[str, Any]]


class Unusable(Exception):
    """Files that do not form a state of this optimizer; the text says why."""


class OptimizerLayout:
    """Where the parts of an optimizer are in its file."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.groups = groups = optimizer.param_groups()
        self.shapes = {name: parameter.shape for name, parameter in optimizer.parameters.items()}
        self.numbers = {name: n for n, name in enumerate(name for group in self.groups for name in group["params"])}
        self.adamw = [name for group in groups if group["kind"] != "muon" for name in group["params"]]
        self.muon = [group["params"] for group in groups if group["kind"] == "muon"]

    def file(self, state: Mapping[str, Any]) -> Json:
        """The content of a file."""
        kept: dict[int, dict[str, Any]] = {}
        for name in self.adamw:
            kept[self.numbers[name]] = {"step": state["steps"], **{key: state["adamw"][name][key] for key in ADAMW}}
        for names in self.muon:
            stacks = {key: torch.zeros(len(names), *shape) for key, shape in muon_shapes(self.shapes[names[0]]).items()}
            for place, name in enumerate(names):
                for key, value in state["muon"].get(name, {}).items():
                    stacks[key][place] = value
            kept[self.numbers[names[0]]] = stacks
        groups = [{**group, "params": [self.numbers[name] for name in group["params"]]} for group in self.groups]
        ours = {key: value for key, value in state.items() if key not in ("steps", "adamw", "muon")}
        return {"state": kept, "param_groups": groups, OURS_KEY: {**ours, "others": {}}}

    # -- reading

    def state(self, files: Mapping[int, Mapping[str, Any]]) -> Json:
        """The state by parameter name: from any rank's file of ours, or from all ranks' files of upstream."""
        complete = next((file for file in files.values() if OURS_KEY in file), None)
        first = complete or files.get(0) or next(iter(files.values()))
        self._check_groups(first)
        ours = dict(complete[OURS_KEY]) if complete else {}
        shards = {rank: file["state"] for rank, file in files.items()}
        if complete:
            # The part where upstream reads is that of the rank that is not among the others.
            others = ours.pop("others")
            first_rank = next(rank for rank in range(len(others) + 1) if rank not in others)
            shards = {**others, first_rank: complete["state"]}
        try:
            return {**ours, **self._joined(shards)}
        except (KeyError, TypeError, RuntimeError, AttributeError):
            raise Unusable("its tensors do not have this model's shapes") from None

    def _check_groups(self, file: Mapping[str, Any]) -> None:
        if not isinstance(file.get("state"), dict) or not isinstance(file.get("param_groups"), list):
            raise Unusable("its file is not a torch optimizer state")
        sizes = [len(group.get("params", ())) for group in file["param_groups"]]
        expected = [len(group["params"]) for group in self.groups]
        if sizes != expected:
            raise Unusable(f"its parameter groups have sizes {sizes}, not {expected}")
        if not file["state"]:
            raise Unusable("its file has no state")

    def _joined(self, shards: Mapping[int, Shard]) -> Json:
        largest = max(self.numbers, key=lambda name: self.shapes[name].numel())
        known = next(iter(shards.values()))[self.numbers[largest]]
        world = self.shapes[largest][0] // len(known["exp_avg"])
        missing = [rank for rank in range(world) if rank not in shards]
        if missing:
            listed = ", ".join(map(str, missing))
            raise Unusable(f"the files of ranks {listed} (of {world}) are missing")
        parts = [shards[rank] for rank in range(world)]
        return {
            "steps": int(known["step"]),
            "adamw": {name: self._join_adamw(name, parts) for name in self.adamw},
            "muon": {name: one for names in self.muon for name, one in self._join_muon(names, parts).items()},
        }

    def _join_adamw(self, name: str, parts: Sequence[Shard]) -> dict[str, Tensor]:
        is_split = self.shapes[name].numel() >= SPLIT
        taken = [part[self.numbers[name]] for part in (parts if is_split else parts[:1])]
        return {key: torch.cat([one[key] for one in taken]).view(self.shapes[name]).float() for key in ADAMW}

    def _join_muon(self, names: Sequence[str], parts: Sequence[Shard]) -> dict[str, dict[str, Tensor]]:
        stacked = {key: torch.cat([part[self.numbers[names[0]]][key] for part in parts]).float() for key in MUON}
        for name, momentum in zip(names, stacked[MUON[0]], strict=False):
            if momentum.shape != self.shapes[name]:
                raise TypeError(name)
        return {name: {key: stacked[key][place] for key in MUON} for place, name in enumerate(names)}
