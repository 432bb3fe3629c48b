# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Packed gradients arrive with the right values and size, and rounding errors are fed back."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nanochat.parallel import wire
from nanochat.parallel.wire import Float8, Packed

SHAPES = [(1, 128), (64, 256), (600, 128), (7, 96), (4, 12), (5, 2), (0, 256)]


def matrix(rows: int, columns: int, seed: int = 1) -> Tensor:
    """Rows of very different sizes, like gradients of rare and frequent tokens."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (-6 * torch.rand(rows, 1, generator=generator))
    return size * torch.randn(rows, columns, generator=generator)


def carried(packed: Packed, values: Tensor, feedback: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The message, and the values read from it."""
    message = torch.empty(packed.length(*values.shape), dtype=packed.dtype)
    packed.write(values, message, feedback)
    return message, packed.read(message, torch.full_like(values, math.nan))


def sent(packed: Packed, values: Tensor, feedback: Tensor | None = None) -> Tensor:
    message, arrived = carried(packed, values, feedback)
    assert torch.equal(packed.add(message, torch.ones_like(values)), arrived + 1)
    return arrived


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_each_value_arrives_to_half_a_step_of_its_block(bits: int, shape: tuple[int, int]) -> None:
    values = matrix(*shape)
    before = values.clone()
    error = (sent(Packed(bits), values) - values).abs().view(-1, wire.block(shape[1]))
    largest = values.abs().view(error.shape).amax(1, keepdim=True) if len(values) else error
    assert torch.equal(values, before)
    # bf16 rounds a scale by up to a 256th.
    assert bool((error <= (0.5 + 1 / 2) * largest / packed_range(bits)).all())
    assert float((error / largest.clamp_min(1e-30)).sum()) <= 0.3 * error.numel() / packed_range(bits)


def packed_range(bits: int) -> int:
    return 2 ** (bits - 1) - 1


@pytest.mark.parametrize(("bits", "length"), [(8, 64 * 256 + 2 * 64 * 2), (4, 64 * 128 + 2 * 64 * 2)])
def test_a_byte_or_half_of_one_a_value_and_two_a_block(bits: int, length: int) -> None:
    assert Packed(bits).length(64, 256) == length


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_what_was_sent_and_what_is_left_are_what_was_to_be_sent(bits: int, shape: tuple[int, int]) -> None:
    packed, feedback = Packed(bits), torch.zeros(shape)
    given, arrived = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for step in range(20):
        values = matrix(*shape, seed=step)
        given += values
        arrived += sent(packed, values, feedback)
    assert torch.allclose(arrived + feedback, given, rtol=0, atol=1e-5)
    # Without feedback, errors add up: a value that is always too small for its block never arrives.
    assert float(feedback.abs().sum()) <= 20 / packed_range(bits) * max(1, feedback.numel())


def test_a_float_of_8_bits_rounds_small_values_as_little_as_large_ones() -> None:
    values = torch.randn(64, 256) * 10 ** (-4 * torch.rand(64, 256))
    arrived = sent(Float8(), values)
    largest = values.abs().view(-1, 128).amax(1, keepdim=True).repeat(1, 128).view_as(values)
    # A 16th for three bits of mantissa, a 256th for the scale, and the smallest number there is.
    assert bool(((arrived - values).abs() <= values.abs() * (1 / 16 + 1 / 256) + largest * 2**-18).all())
    assert Float8().length(64, 256) == Packed(8).length(64, 256)


ALL = pytest.mark.parametrize("packed", [Packed(4), Packed(8), Float8()], ids=["4 bits", "8 bits", "float8"])


@ALL
def test_the_bits_do_not_depend_on_threads_or_pieces(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    values = matrix(3000, 128)
    whole = sent(packed, values)
    monkeypatch.setattr(wire, "CHUNK", 2**9)
    assert torch.equal(sent(packed, values), whole)


@ALL
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_hidden(packed: Packed, bad: float) -> None:
    values = torch.ones(2, 128)
    values[1, 3] = bad
    arrived = carried(packed, values)[1]
    assert bool(arrived[0].isfinite().all())
    assert bool(arrived[1].isnan().any())
