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
from nanochat.run.optim_file import OURS_KEY, OptimizerLayout, Unusable


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
    their.load_state_dict(through_disk(OptimizerLayout.of(optimizer, 1).file(optimizer.state_dict(), 0), tmp_path))
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
    optimizer.load_state_dict(OptimizerLayout.of(optimizer, 1).state({0: through_disk(their.state_dict(), tmp_path)}))
    assert optimizer.steps == 5
    assert optimizer.history == {5: pytest.approx(schedule(4).lr_multiplier)}
    for number in range(5, 8):
        their_step(other, their, number)
        train(model, optimizer, 1, seed=number)
    optimizer.catch_up()
    close(weights(model), weights(other), 2e-3)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_files_of_several_ranks_are_split_like_theirs(world: int, tmp_path: Path) -> None:
    dummy, optimizer = trained()
    state = optimizer.state_dict()
    files = [through_disk(OptimizerLayout.of(optimizer, world).file(state, rank), tmp_path) for rank in range(world)]
    groups = files[0]["param_groups"]
    head = torch.cat([file["state"][0]["exp_avg"] for file in files])
    assert torch.equal(head, state["adamw"]["lm_head.weight"]["exp_avg"])
    for group in (group for group in groups if group["kind"] == "muon"):
        first, count = group["params"][0], len(group["params"])
        parts = [file["state"][first]["momentum_buffer"] for file in files]
        assert {len(part) for part in parts} == {-(-count // world)}
        assert not torch.cat(parts)[count:].any()
        assert all(number not in file["state"] for file in files for number in group["params"][1:])
    smear = groups[5]["params"][0]
    assert all(torch.equal(f["state"][smear]["exp_avg"], files[0]["state"][smear]["exp_avg"]) for f in files)
    # torch's load_state_dict checks and loads the groups.
    their = theirs(baseline_of(model_of()))
    their.load_state_dict(files[-1])
    assert [group["lr"] for group in their.param_groups] == [group["lr"] for group in groups]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_one_file_of_ours_is_enough_and_theirs_are_read_together(world: int, tmp_path: Path) -> None:
    dummy, optimizer = trained()
    state = {**optimizer.state_dict(), "share": ["a"]}
    layout = OptimizerLayout.of(optimizer, world)
    files = {rank: through_disk(layout.file(state, rank), tmp_path) for rank in range(world)}
    for rank, file in files.items():
        read = layout.state({rank: file})
        assert read["steps"] == 5
        assert read["share"] == ["a"]
        close(flat(read), flat(state), 0.0)
    parts = {r: {"state": file["state"], "param_groups": file["param_groups"]} for r, file in files.items()}
    # These tables cannot be split among three ranks, so each has the file of a single-rank run.
    alone = world == 3
    close(flat(layout.state({0: parts[0]} if alone else parts)), flat(state), 0.0)
    if world in (2, 4):
        with pytest.raises(Unusable, match=rf"files of ranks 1.* \(of {world}\) are missing"):
            layout.state({0: parts[0]})
        incomplete = through_disk(layout.file(state, 1, complete=False), tmp_path)
        assert OURS_KEY not in incomplete
        assert (tmp_path / "optim.pt").stat().st_size < 1.6 / world * whole_size(layout, state, tmp_path)
        close(flat(layout.state({**parts, 1: incomplete})), flat(state), 0.0)


def whole_size(layout: OptimizerLayout, state: dict[str, Any], folder: Path) -> int:
    through_disk(layout.file(state, 0), folder)
    return (folder / "optim.pt").stat().st_size


def test_the_parts_of_all_ranks_are_as_large_as_one_whole(tmp_path: Path) -> None:
    dummy, optimizer = trained()
    state = optimizer.state_dict()
    one, four = (whole_size(OptimizerLayout.of(optimizer, world), state, tmp_path) for world in (1, 4))
    assert four < 1.3 * one, "what is not split may be there again, and matrices are filled up to whole parts"


def test_the_state_of_another_model_is_refused_with_a_reason(tmp_path: Path) -> None:
    dummy, optimizer = trained()
    layout, state = OptimizerLayout.of(optimizer, 1), optimizer.state_dict()
    file = layout.file(state, 0)
    with pytest.raises(Unusable, match="is not a torch optimizer state"):
        layout.state({0: {}})
    with pytest.raises(Unusable, match="has no state"):
        layout.state({0: {**file, "state": {}, OURS_KEY: {"others": {}}}})
    with pytest.raises(Unusable, match=r"groups have sizes \[10\], not \[1, 1, 2"):
        layout.state({0: {"state": {0: {}}, "param_groups": [{"params": list(range(10))}]}})
    wider = model_of(n_embd=64)
    with pytest.raises(Unusable, match="this model's shapes"):
        OptimizerLayout.of(Optimizer(wider, RATES), 1).state({0: file})
