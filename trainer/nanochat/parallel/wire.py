# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How float32 values travel: as they are, rounded to bf16, or packed into 8 or 4 bits.

    wire = Packed(8)
    message = torch.empty(wire.length(*values.shape), dtype=wire.dtype)
    wire.write(values, message, feedback)       # the sender
    wire.read(message, into)                    # into = the values as they arrive, on every rank the same bits
    wire.add(message, into)                     # into += those

Packed: values that follow one another in a row share a scale, their largest by the largest whole number of so many bits.
What rounding left of a value is kept by the sender in `feedback` and added to the next that is sent in its place, so that
over the steps nothing is lost: the sum of all that was sent, and the feedback, is the sum of all that was to be sent.
A block that holds a NaN or an infinity arrives as NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nanochat.rules.ways import BLOCK

# Values that are packed at a time by one thread, so that they stay in its cache from one operation to the next.
CHUNK = 2**17
# Of a block of zeros; far below any gradient that counts, and far above where bf16 ends.
LEAST_SCALE = 1e-30


class Plain:
    """Values of one floating type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # What is written could as well travel itself.
        self.exact = dtype == torch.float32

    def length(self, rows: int, columns: int) -> int:
        """Elements of the message that carries a matrix."""
        return rows * columns

    def write(self, values: Tensor, message: Tensor, feedback: Tensor | None = None) -> None:
        message.view_as(values).copy_(values)

    def read(self, message: Tensor, into: Tensor) -> Tensor:
        return into.copy_(message.view_as(into))

    def add(self, message: Tensor, into: Tensor) -> Tensor:
        return into.add_(message.view_as(into))


class Packed:
    """Whole numbers of 8 bits, or of 4 with two in a byte, and a bf16 scale for each block."""

    dtype = torch.int8
    exact = False

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.largest = 2.0 ** (bits - 1) - 1
        self._scratch = torch.empty(0)

    def length(self, rows: int, columns: int) -> int:
        """Bytes of the message that carries a matrix."""
        return rows * (columns * self.bits // 8 + columns // block(columns) * 2)

    def write(self, values: Tensor, message: Tensor, feedback: Tensor | None = None) -> None:
        """Pack a matrix, and what `feedback` of its shape has kept of those before it; both lie in one piece."""
        for rows, numbers, scales in self._chunks(message, *values.shape):
            part = _blocks(values)[rows]
            x = part if feedback is None else _blocks(feedback)[rows].add_(part)
            sent = self._pack(x, numbers, scales)
            if feedback is not None:
                x.sub_(sent)

    def _pack(self, x: Tensor, numbers: Tensor, scales: Tensor) -> Tensor:
        """The values of some blocks into their places in the message; what will be read from there."""
        work, half = self._work(x.shape), x.size(1) // 2
        scale = torch.abs(x, out=work).amax(1).div_(self.largest).clamp_min_(LEAST_SCALE)
        scale = scales.copy_(scale).float().unsqueeze(1)
        # bf16 rounds a scale by less than would make the largest value round to one more.
        torch.mul(x, scale.reciprocal(), out=work).round_()
        numbers.copy_(work if self.bits == 8 else work[:, half:].mul(16).add_(work[:, :half]))
        return work.mul_(scale)

    def read(self, message: Tensor, into: Tensor) -> Tensor:
        for rows, numbers, scales in self._chunks(message, *into.shape):
            self._unpack(numbers, scales, _blocks(into)[rows])
        return into

    def add(self, message: Tensor, into: Tensor) -> Tensor:
        for rows, numbers, scales in self._chunks(message, *into.shape):
            place = _blocks(into)[rows]
            place.add_(self._unpack(numbers, scales, self._work(place.shape)))
        return into

    def _unpack(self, numbers: Tensor, scales: Tensor, work: Tensor) -> Tensor:
        """Into `work`; one rounding a value, of the product: every CPU makes the same of it."""
        if self.bits == 8:
            work.copy_(numbers)
        else:
            both, half = numbers.float(), work.size(1) // 2
            high = torch.div(both, 16, out=work[:, half:]).round_()
            torch.sub(both, high, alpha=16, out=work[:, :half])
        return work.mul_(scales.float().unsqueeze(1))

    def _work(self, shape: torch.Size) -> Tensor:
        if self._scratch.numel() < shape.numel():
            self._scratch = torch.empty(shape.numel())
        return self._scratch[: shape.numel()].view(shape)

    def _chunks(self, message: Tensor, rows: int, columns: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Some blocks at a time, and the places of their numbers and scales in the message: all scales come first."""
        width = block(columns)
        blocks, size = rows * columns // width, CHUNK // width * torch.get_num_threads()
        scales = message[: 2 * blocks].view(torch.bfloat16)
        numbers = message[2 * blocks :].view(blocks, width * self.bits // 8)
        for start in range(0, blocks, size):
            some = slice(start, min(start + size, blocks))
            yield some, numbers[some], scales[some]


def block(columns: int) -> int:
    """Values that share a scale in a matrix of so many columns: never those of two rows, which can be of very unlike size."""
    return math.gcd(columns, BLOCK)


def _blocks(matrix: Tensor) -> Tensor:
    return matrix.view(-1, block(matrix.size(1)))


Wire = Plain | Packed


class Wires(NamedTuple):
    """What travels with a way of --sync."""

    matrices: Wire
    # Rows of the embedding tables go without feedback, since a row comes back too seldom, and to keep what was left of it would
    # take another table. So they keep 16 bits: AdamW divides each element by its own size, and would miss the small ones that 8
    # bits in a row round to nothing.
    rows: Plain
    # What a row has changed by over some local steps has been divided by its size already: 8 bits lose little of it.
    meetings: Wire


# Of each way that sends to those who sum; rules/ways.py has the bytes.
WIRES = {
    "exact": Wires(Plain(torch.float32), Plain(torch.float32), Plain(torch.float32)),
    "bf16": Wires(Plain(torch.bfloat16), Plain(torch.bfloat16), Plain(torch.bfloat16)),
    "int8": Wires(Packed(8), Plain(torch.bfloat16), Packed(8)),
    "int4": Wires(Packed(4), Plain(torch.bfloat16), Packed(8)),
}
