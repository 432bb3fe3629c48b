# Copyright: The nanochat.ddp contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wire formats of float32 values: as they are, rounded to bf16, or packed into 8 or 4 bits.

    wire = Packed(8)
    message = torch.empty(wire.length(*values.shape), dtype=wire.dtype)
    wire.write(values, message, feedback)       # the sender
    wire.read(message, into)                    # into = the received values, bit-identical on every rank
    wire.add(message, into)                     # into += the received values

Packed: consecutive values of a row share a scale, which maps their largest to the largest integer of that many bits.
The sender keeps each rounding error in `feedback` and adds it to the next value sent in its place, so nothing is lost
over the steps: everything sent plus the feedback equals everything that should be sent.
A block with a NaN or an infinity arrives as NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nanochat.rules.ways import BLOCK

# Values packed at a time by one thread, small enough to stay in its cache.
CHUNK = 2**17
# Scale of an all-zero block; far below any relevant gradient, and far above bf16's minimum.
LEAST_SCALE = 1e-30


class Plain:
    """Values of one floating-point type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # The message could be the values themselves.
        self.exact = dtype == torch.float32

    def length(self, rows: int, columns: int) -> int:
        """Elements of a matrix's message."""
        return rows * columns

    def write(self, values: Tensor, message: Tensor, feedback: Tensor | None = None) -> None:
        message.view_as(values).copy_(values)

    def read(self, message: Tensor, into: Tensor) -> Tensor:
        return into.copy_(message.view_as(into))

    def values(self, message: Tensor, rows: int, columns: int) -> Tensor:
        """The received values: the message itself if that is possible."""
        return message.view(rows, columns).float()

    def add(self, message: Tensor, into: Tensor) -> Tensor:
        return into.add_(message.view_as(into))


class Packed:
    """Integers of 8 bits, or two of 4 in a byte, with a bf16 scale per block."""

    dtype = torch.int8
    exact = False

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.largest = 2.0 ** (bits - 1) - 1
        self._scratch = torch.empty(0)

    def length(self, rows: int, columns: int) -> int:
        """Bytes of a matrix's message."""
        return rows * (columns * self.bits // 8 + columns // block(columns) * 2)

    def write(self, values: Tensor, message: Tensor, feedback: Tensor | None = None) -> None:
        """Pack a matrix plus the `feedback` of its shape; both contiguous."""
        for rows, numbers, scales in self._chunks(message, *values.shape):
            part = _blocks(values)[rows]
            x = part if feedback is None else _blocks(feedback)[rows].add_(part)
            sent = self._pack(x, numbers, scales)
            if feedback is not None:
                x.sub_(sent)

    def _pack(self, x: Tensor, numbers: Tensor, scales: Tensor) -> Tensor:
        """Pack some blocks into the message; returns the values as the receiver will read them."""
        work = self._work(x.shape)
        scale = torch.abs(x, out=work).amax(1).div_(self.largest).clamp_min_(LEAST_SCALE)
        scale = scales.copy_(scale).float().unsqueeze(1)
        # bf16 rounds a scale by less than would make the largest value round up.
        self._round(torch.mul(x, scale.reciprocal(), out=work), numbers)
        return work.mul_(scale)

    def _round(self, work: Tensor, numbers: Tensor) -> None:
        """Round the values in place, and write them into the message."""
        half = work.size(1) // 2
        work.round_()
        numbers.copy_(work if self.bits == 8 else work[:, half:].mul(16).add_(work[:, :half]))

    def read(self, message: Tensor, into: Tensor) -> Tensor:
        for rows, numbers, scales in self._chunks(message, *into.shape):
            self._unpack(numbers, scales, _blocks(into)[rows])
        return into

    def values(self, message: Tensor, rows: int, columns: int) -> Tensor:
        return self.read(message, torch.empty(rows, columns))

    def add(self, message: Tensor, into: Tensor) -> Tensor:
        for rows, numbers, scales in self._chunks(message, *into.shape):
            place = _blocks(into)[rows]
            place.add_(self._unpack(numbers, scales, self._work(place.shape)))
        return into

    def _unpack(self, numbers: Tensor, scales: Tensor, work: Tensor) -> Tensor:
        """Unpack into `work`; one rounding per value, of the product, so every CPU gets the same result."""
        return self._values(numbers, work).mul_(scales.float().unsqueeze(1))

    def _values(self, numbers: Tensor, work: Tensor) -> Tensor:
        if self.bits == 8:
            return work.copy_(numbers)
        both, half = numbers.float(), work.size(1) // 2
        high = torch.div(both, 16, out=work[:, half:]).round_()
        torch.sub(both, high, alpha=16, out=work[:, :half])
        return work

    def _work(self, shape: torch.Size) -> Tensor:
        if self._scratch.numel() < shape.numel():
            self._scratch = torch.empty(shape.numel())
        return self._scratch[: shape.numel()].view(shape)

    def _chunks(self, message: Tensor, rows: int, columns: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Some blocks at a time, with the places of their numbers and scales in the message: all scales come first."""
        width = block(columns)
        blocks, size = rows * columns // width, CHUNK // width * torch.get_num_threads()
        scales = message[: 2 * blocks].view(torch.bfloat16)
        numbers = message[2 * blocks :].view(blocks, width * self.bits // 8)
        for start in range(0, blocks, size):
            some = slice(start, min(start + size, blocks))
            yield some, numbers[some], scales[some]


class Float8(Packed):
    """Floats of 8 bits with the same scales: unlike integers, they round a small value as little as a large one of its block."""

    def __init__(self) -> None:
        super().__init__(8)
        self.largest = torch.finfo(torch.float8_e4m3fn).max

    def _round(self, work: Tensor, numbers: Tensor) -> None:
        work.copy_(numbers.view(torch.float8_e4m3fn).copy_(work))

    def _values(self, numbers: Tensor, work: Tensor) -> Tensor:
        return work.copy_(numbers.view(torch.float8_e4m3fn))


def block(columns: int) -> int:
    """Values per scale in a matrix with this many columns: never across rows, whose sizes can differ a lot."""
    return math.gcd(columns, BLOCK)


def _blocks(matrix: Tensor) -> Tensor:
    return matrix.view(-1, block(matrix.size(1)))


Wire = Plain | Packed  # Float8 is one, too


class Wires(NamedTuple):
    """The wire formats of a --sync method."""

    matrices: Wire
    # Embedding rows have no error feedback: they recur too seldom, and it would need another table. So they are sent as floats:
    # AdamW divides each element by its own size, and integers of 8 bits would round the small ones to zero.
    rows: Wire
    # The shared head's input and its gradient have no error feedback. 8 bits, with a scale per block, cost about 0.002 nats
    # (lab/performance.md): too much for int8, which otherwise costs nothing that can be measured.
    hidden: Wire


# Wire formats of each point-to-point mode; rules/ways.py has the bytes.
FLOAT32, BFLOAT16 = Plain(torch.float32), Plain(torch.bfloat16)
WIRES = {
    "exact": Wires(FLOAT32, FLOAT32, FLOAT32),
    "bf16": Wires(BFLOAT16, BFLOAT16, BFLOAT16),
    "int8": Wires(Packed(8), BFLOAT16, BFLOAT16),
    "int4": Wires(Packed(4), Float8(), Packed(8)),
}
