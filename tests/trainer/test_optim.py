# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""AdamW with postponed rows; test_parity.py and test_optim_file.py compare steps of all parameters."""

from __future__ import annotations

import pytest
import torch
from reference import RATES, model_of, train

from nanochat.model.kernels import AdamWConstants
from nanochat.model.optim import REFRESH_STEPS, DenseAdamW, Optimizer, RowAdamW


@pytest.mark.parametrize("columns", [32, 40])
def test_rows_left_alone_end_with_the_bits_of_a_dense_optimizer(columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(200, columns, generator=generator)
    group = AdamWConstants(0.3, 0.8, 0.995, 0.01)
    lazy, dense = RowAdamW(start.clone(), group), DenseAdamW(start.clone(), group)
    history: dict[int, float] = {}
    for step in range(1, 3 * REFRESH_STEPS):
        touched = torch.unique(torch.randint(0, 60, (5,), generator=generator))
        gradient = 1e-3 * torch.randn(len(touched), columns, generator=generator)
        lazy.advance(touched, history, step - 1)
        lazy.advance(lazy.rows_in_turn(step - 1), history, step - 1)
        history[step] = 1 / step
        lazy.update_rows(touched, gradient, history[step], step)
        dense.update(torch.zeros_like(start).index_copy_(0, touched, gradient), history[step], step)
        assert torch.equal(lazy.parameter[touched], dense.parameter[touched])
    lazy.advance(torch.arange(200), history, step)
    for name in ("parameter", "m", "v"):
        assert torch.equal(getattr(lazy, name), getattr(dense, name)), name


def test_rows_lag_behind_no_longer_than_their_turn() -> None:
    model = model_of(vocab_size=400)
    optimizer = Optimizer(model, RATES)
    train(model, optimizer, REFRESH_STEPS + 3)
    for table in optimizer.tables.values():
        assert int(table.current.min()) >= optimizer.steps - REFRESH_STEPS
        assert int(table.current.min()) < optimizer.steps, "nothing was left for later"
    assert set(optimizer.history) >= set(range(optimizer.steps - REFRESH_STEPS + 1, optimizer.steps + 1))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit_of_adamw(threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    p, g = torch.randn(3, 34567, generator=generator), torch.randn(3, 34567, generator=generator)
    state = DenseAdamW(p.clone(), AdamWConstants(0.3, 0.8, 0.995, 0.01))
    wanted = DenseAdamW(p.clone(), AdamWConstants(0.3, 0.8, 0.995, 0.01))
    wanted.update(g, 1.0, 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        state.update(g, 1.0, 1)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(state.parameter, wanted.parameter)
