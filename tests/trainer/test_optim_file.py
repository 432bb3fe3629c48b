# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The optimizer's file: what torch's own load_state_dict wants, in the parts in which upstream's optimizer keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference import RATES, baseline_of, close, model_of, schedule, tokens, train
from torch import Tensor, nn

from baseline_model import BaselineGPT, BaselineOptimizer  # isort: skip

from nanochat.model.gpt import GPT
from nanochat.model.optim import Optimizer
from nanochat.run.optim_file import OURS_KEY, SPLIT, OptimizerLayout, Unusable


def theirs(model: BaselineGPT) -> BaselineOptimizer:
    """An optimizer with upstream's groups and state."""
    return BaselineOptimizer(model, RATES.embedding, RATES.unembedding, RATES.matrix, RATES.scalar)


def their_step(model: Any, optimizer: Any, number: int) -> None:
    """One step of upstream's optimizer on the same tokens as reference.train with this number."""
    now, (ids, targets) = schedule(number), tokens(model, 1, 8, seed=number)
    model(ids, targets).backward()
    optimizer.follow(now.lr_multiplier, now.muon_momentum, now.muon_weight_decay)
    optimizer.step()
    model.zero_grad()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(steps: int = 5) -> tuple[GPT, Optimizer]:
    model = model_of()
    optimizer = Optimizer(model, RATES)
    train(model, optimizer, steps)
    optimizer.catch_up()
    return model, optimizer


def through_disk(file: dict[str, Any], folder: Path) -> dict[str, Any]:
    torch.save(file, folder / "optim.pt")
    loaded: dict[str, Any] = torch.load(folder / "optim.pt", weights_only=True)
    return loaded


def flat(state: dict[str, Any]) -> dict[str, Tensor]:
    both = {**state["adamw"], **state["muon"]}
    return {f"{name} {key}": value for name, one in both.items() for key, value in one.items()}


def test_field_40_their_optimizer_resumes_from_our_file(tmp_path: Path) -> None:
    """It makes the steps that our optimizer would have made."""
    model, optimizer = trained()
    other = baseline_of(model)
    their = theirs(other)
    their.load_state_dict(through_disk(OptimizerLayout(optimizer).file(optimizer.state_dict()), tmp_path))
    assert their.state[other.lm_head.weight]["step"] == 5
    for number in range(5, 8):
        their_step(other, their, number)
        train(model, optimizer, 1, seed=number)
    optimizer.catch_up()
    close(weights(model), weights(other), 2e-3)


def test_field_40_our_optimizer_resumes_from_their_file(tmp_path: Path) -> None:
    model = model_of()
    other = baseline_of(model)
    their = theirs(other)
    for number in range(5):
        their_step(other, their, number)
    model.load_state_dict(other.state_dict())
    optimizer = Optimizer(model, RATES)
    optimizer.load_state_dict(OptimizerLayout(optimizer).state({0: through_disk(their.state_dict(), tmp_path)}))
    assert optimizer.steps == 5
    for number in range(5, 8):
        their_step(other, their, number)
        train(model, optimizer, 1, seed=number)
    optimizer.catch_up()
    close(weights(model), weights(other), 2e-3)


def as_theirs(file: dict[str, Any], world: int) -> dict[int, dict[str, Any]]:
    """The files that so many ranks of upstream would have written."""

    def part(value: Any, muon: bool, rank: int) -> Any:
        if not isinstance(value, Tensor) or (not muon and value.numel() < SPLIT):
            return value
        each = -(-len(value) // world)
        padded = torch.cat([value, torch.zeros(each * world - len(value), *value.shape[1:])])
        return padded[rank * each : (rank + 1) * each].clone()

    return {
        rank: {
            "state": {
                number: {key: part(value, "exp_avg" not in one, rank) for key, value in one.items()}
                for number, one in file["state"].items()
            },
            "param_groups": file["param_groups"],
        }
        for rank in range(world)
    }


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_files_of_several_ranks_of_theirs_are_read_together(world: int, tmp_path: Path) -> None:
    dummy, optimizer = trained()
    state, layout = {**optimizer.state_dict(), "share": ["a"]}, OptimizerLayout(optimizer)
    file = through_disk(layout.file(state), tmp_path)
    read = layout.state({3: file})
    assert (read["steps"], read["share"]) == (5, ["a"])
    close(flat(read), flat(state), 0.0)
    parts = as_theirs(file, world)
    close(flat(layout.state(parts)), flat(state), 0.0)
    # As earlier versions wrote them.
    others = {rank: part["state"] for rank, part in parts.items() if rank}
    close(flat(layout.state({0: {**parts[0], OURS_KEY: {"others": others}}})), flat(state), 0.0)
    if world > 1:
        with pytest.raises(Unusable, match=rf"files of ranks 1.* \(of {world}\) are missing"):
            layout.state({0: parts[0]})


def test_the_state_of_another_model_is_refused_with_a_reason(tmp_path: Path) -> None:
    dummy, optimizer = trained()
    layout, state = OptimizerLayout(optimizer), optimizer.state_dict()
    file = layout.file(state)
    with pytest.raises(Unusable, match="is not a torch optimizer state"):
        layout.state({0: {}})
    with pytest.raises(Unusable, match="has no state"):
        layout.state({0: {**file, "state": {}, OURS_KEY: {"others": {}}}})
    with pytest.raises(Unusable, match=r"groups have sizes \[10\], not \[1, 1, 2"):
        layout.state({0: {"state": {0: {}}, "param_groups": [{"params": list(range(10))}]}})
    wider = model_of(n_embd=64)
    with pytest.raises(Unusable, match="this model's shapes"):
        OptimizerLayout(Optimizer(wider, RATES)).state({0: file})
