"""Tensors of state_layout=split and bf16: float32 in two halves of 16 bits, and non-linear 8-bit codes for moments.

Both are read as float32 and written from it, so that checkpoints need not know of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
"""Values that share a scale: 4 / 128 bytes per value, and an outlier costs its neighbours alone precision."""

SMALLEST_SCALE = 1e-28
"""The lowest code of it, scale / 255 ** 4, is still a normal float32 number."""


def write_float32(values: Tensor, rounded: Tensor, remainder: Tensor) -> None:
    """Write the nearest bf16 numbers, and the int16 to add to their bits for those of `values`; all of one shape.

    Ties are rounded away from zero: rounded to even, half of them would differ by 32768, which int16 does not hold.
    """
    bits = values.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    rounded.view(torch.int16).copy_(upper)
    remainder.copy_(bits - (upper << 16))


def join_float32(rounded: Tensor, remainder: Tensor) -> Tensor:
    """Return what `write_float32` was given, bit for bit."""
    return ((rounded.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def write_rounded(values: Tensor, rounded: Tensor, noise: Tensor) -> None:
    """Write one of the two bf16 numbers around each of `values`, so that the expected value is right; `noise` is what
    `random_bits` returns, of which the moments use all bits, so it is hashed again."""
    rounded.view(torch.int16).copy_((values.view(torch.int32) + (mixed(noise) & 0xFFFF)) >> 16)


def random_bits(seed: int, start: int, count: int, device: torch.device) -> Tensor:
    """Return 32 bits for each value from `start`, a hash of its place and a seed below 2 ** 31: a kernel computes it as
    well, and memory holds none."""
    return mixed(torch.arange(count, dtype=torch.int32, device=device).add_(start).bitwise_xor_(seed))


def mixed(bits: Tensor) -> Tensor:
    """Hash int32 to int32: lowbias32 of https://nullprogram.com/blog/2018/07/31/, as int32 multiplies like uint32."""
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return bits ^ (bits >> 16 & 0xFFFF)


def uniform(bits: Tensor) -> Tensor:
    """Return numbers in (0, 1) made of the lower 16 bits."""
    return (bits & 0xFFFF).float().add_(0.5).mul_(2**-16)


@dataclass
class QuantizedMoment:
    """A block-quantized moment of N values: code = round(max_code * (|x| / absmax) ** (1 / p)), 8 bits.

    Signed values (the mean) take the square root and int8, others (the mean of squares) the fourth root and uint8: so
    the mean and the root of the mean square, whose quotient is the update, have codes of equal relative precision.
    Reading and writing again changes no bit.
    """

    codes: Tensor
    """(N,), int8 or uint8."""
    scales: Tensor
    """(ceil(N / BLOCK),), float32."""

    @classmethod
    def zeros(cls, count: int, signed: bool, device: torch.device) -> QuantizedMoment:
        codes = torch.zeros(count, dtype=torch.int8 if signed else torch.uint8, device=device)
        return cls(codes, torch.zeros(-(-count // BLOCK), device=device))

    def read(self, start: int, count: int) -> Tensor:
        """Return so many values from `start`, where a block begins, in float32."""
        signed = self.codes.dtype == torch.int8
        ratios = self.codes[start : start + count].float().div_(127 if signed else 255)
        ratios = ratios * ratios.abs() if signed else ratios.square_().square_()
        return _in_blocks(ratios).mul_(self._scales(start, count)).view(-1)[:count]

    def write(self, start: int, values: Tensor, noise: Tensor | None = None) -> None:
        """Replace the values from `start`, where a block begins; with `noise`, a number from 0 to 1 for each, codes are
        rounded stochastically.

        Nearest codes would hold a mean of squares fast: with a decay of 0.999 it changes by less than half a code.
        """
        signed, count = self.codes.dtype == torch.int8, values.numel()
        power, top = (2, 127) if signed else (4, 255)
        blocks = _in_blocks(values)
        scales = blocks.abs().amax(1, keepdim=True).clamp_(min=SMALLEST_SCALE)
        ratios = blocks / scales
        sizes = ratios.abs()
        levels = sizes.pow(1 / power).mul_(top)
        if noise is None:
            levels.round_()
        else:
            below = levels.floor()
            # Of a mean, so that the expected value is right: with the expected code right it would grow by up to
            # 1 / (2 code) ** 2 at each step. Of a mean of squares, so that the expected code is: updates divide by its
            # root, and over 2,000 steps they are 1.00 times as large as in float32, with the value right 1.01 to 1.05.
            chance = (sizes * top**2 - below.square()) / (2 * below + 1) if signed else levels - below
            levels = below.add_(_in_blocks(noise) < chance)
        levels.clamp_(max=top)
        # A mean of squares that rounds to zero would divide by epsilon alone.
        levels = levels.copysign_(ratios) if signed else levels.maximum(ratios.sign())
        self.codes[start : start + count] = levels.view(-1)[:count].to(self.codes.dtype)
        self._scales(start, count).copy_(scales)

    def _scales(self, start: int, count: int) -> Tensor:
        return self.scales[start // BLOCK : -(-(start + count) // BLOCK)].unsqueeze(1)


def _in_blocks(values: Tensor) -> Tensor:
    """Return values as (blocks, BLOCK), the last one filled with zeros."""
    return F.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
