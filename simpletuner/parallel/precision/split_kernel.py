"""Triton kernel of SplitAdamW: weights, gradients and state are read once and written once, 14 bytes per
value with remainders and 10 without.

Imported where a GPU steps: torch's CUDA builds bring Triton with them. It computes what `update_in_chunks`
does.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# Triton's language has types of its own.
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from simpletuner.parallel.precision.split_adamw import BLOCK, SMALLEST_SCALE, QuantizedMoment

# Blocks of one program, 1,024 values: 8 for each of 128 threads.
ROWS = 8

CONSTANTS = {"num_rows": ROWS, "block": BLOCK, "smallest": SMALLEST_SCALE}


@triton.jit
def mixed(bits):
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def write_codes(codes, scales, values, noise, at, inside, rows, rows_inside, top: tl.constexpr, smallest: tl.constexpr):
    """Do what QuantizedMoment.write does: `top` is 127 for signed values, 255 for others."""
    scale = tl.maximum(tl.max(tl.abs(values), axis=1), smallest)
    ratios = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
    sizes = tl.abs(ratios)
    if top == 127:
        levels = tl.sqrt_rn(sizes) * top
        below = tl.floor(levels)
        chance = tl.div_rn(sizes * (top * top) - below * below, 2 * below + 1)
    else:
        levels = tl.sqrt_rn(tl.sqrt_rn(sizes)) * top
        below = tl.floor(levels)
        chance = levels - below
    levels = tl.minimum(below + tl.where(noise < chance, 1.0, 0.0), top)
    if top == 127:
        found = tl.where(ratios < 0, -levels, levels).to(tl.int8)
    else:
        found = tl.maximum(levels, tl.where(sizes > 0, 1.0, 0.0)).to(tl.uint8)
    tl.store(codes + at, found, mask=inside)
    tl.store(scales + rows, scale, mask=rows_inside)


@triton.jit(do_not_specialize=["seed"])
def adamw_kernel(
    weight, remainder, gradient, mean_codes, mean_scales, square_codes, square_scales, gradient_scale, count, seed,
    mean_share, square_kept, square_share, square_bias, epsilon, weight_kept, rate,
    keeps_remainder: tl.constexpr, num_rows: tl.constexpr, block: tl.constexpr, smallest: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * num_rows + tl.arange(0, num_rows)
    at = rows[:, None] * block + tl.arange(0, block)[None, :]
    inside, rows_inside = at < count, rows * block < count

    change = tl.load(gradient + at, mask=inside, other=0).to(tl.float32) * tl.load(gradient_scale)
    scales = tl.load(mean_scales + rows, mask=rows_inside, other=0)[:, None]
    ratios = tl.div_rn(tl.load(mean_codes + at, mask=inside, other=0).to(tl.float32), 127.0)
    mean = ratios * tl.abs(ratios) * scales
    mean += (change - mean) * mean_share
    scales = tl.load(square_scales + rows, mask=rows_inside, other=0)[:, None]
    ratios = tl.div_rn(tl.load(square_codes + at, mask=inside, other=0).to(tl.float32), 255.0)
    square = (ratios * ratios) * (ratios * ratios) * scales * square_kept + change * change * square_share

    bits = tl.load(weight + at, mask=inside, other=0).to(tl.int32) << 16
    if keeps_remainder:
        bits += tl.load(remainder + at, mask=inside, other=0)
    exact = bits.to(tl.float32, bitcast=True) * weight_kept
    exact -= rate * tl.div_rn(mean, tl.sqrt_rn(square / square_bias) + epsilon)
    bits = exact.to(tl.int32, bitcast=True)
    noise = mixed(at.to(tl.uint32) ^ seed.to(tl.uint32))
    if keeps_remainder:
        upper = (bits + 0x8000) >> 16
        tl.store(remainder + at, (bits - (upper << 16)).to(tl.int16), mask=inside)
    else:
        upper = (bits + (mixed(noise) & 0xFFFF).to(tl.int32)) >> 16
    tl.store(weight + at, upper.to(tl.int16), mask=inside)

    low = ((noise & 0xFFFF).to(tl.float32) + 0.5) * (1 / 65536)
    high = ((noise >> 16).to(tl.float32) + 0.5) * (1 / 65536)
    write_codes(mean_codes, mean_scales, mean, low, at, inside, rows, rows_inside, 127, smallest)
    write_codes(square_codes, square_scales, square, high, at, inside, rows, rows_inside, 255, smallest)


def launch(
    weight: Tensor,
    remainder: Tensor | None,
    gradient: Tensor,
    mean: QuantizedMoment,
    square: QuantizedMoment,
    gradient_scale: Tensor,
    seed: int,
    factors: list[float],
) -> None:
    """Step all values of a weight (N,), which is given as the int16 of its bits."""
    low = weight if remainder is None else remainder
    tensors = (weight, low, gradient, mean.codes, mean.scales, square.codes, square.scales, gradient_scale)
    count, constants = weight.numel(), CONSTANTS | {"keeps_remainder": remainder is not None}
    adamw_kernel[(triton.cdiv(count, ROWS * BLOCK),)](*tensors, count, seed, *factors, **constants, num_warps=4)
