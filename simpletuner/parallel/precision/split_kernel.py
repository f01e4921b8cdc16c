"""Triton kernel of SplitAdamW: weights, gradients and state are read once and written once, 14 bytes per
value with remainders and 10 without.

One launch steps all weights: SDXL has 1,680, most of them so small that launching a kernel takes the host
longer than the GPU needs for it. Imported where a GPU steps: torch's CUDA builds bring Triton with them. It
computes what `update_in_chunks` does.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# Triton's language has types of its own.
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from simpletuner.parallel.precision.split_adamw import BLOCK, NUM_FACTORS, SMALLEST_SCALE, Update

# Blocks that a program steps at once, 1,024 values: 8 for each of 128 threads.
ROWS = 8
# How often a program does so, so that finding its weight is a small part of its work.
TILES = 8
# A weight in the table: seven addresses, number of values, seed and the first program that steps it.
COLUMNS = 10

CONSTANTS = {
    "num_rows": ROWS, "block": BLOCK, "smallest": SMALLEST_SCALE, "tiles": TILES,
    "columns": COLUMNS, "num_factors": NUM_FACTORS,
}  # fmt: skip


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


@triton.jit
def read_address(row, place: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr):
    address = tl.load(row + place).to(tl.pointer_type(kind))
    # Without the hint each value would be read by itself.
    return tl.multiple_of(address, [16]) if aligned else address


@triton.jit(do_not_specialize=["num_weights"])
def adamw_kernel(
    table, factors, gradient_scale, num_weights, gradient_kind: tl.constexpr,
    keeps_remainder: tl.constexpr, aligned: tl.constexpr, num_rows: tl.constexpr, block: tl.constexpr,
    smallest: tl.constexpr, tiles: tl.constexpr, columns: tl.constexpr, num_factors: tl.constexpr,
):  # fmt: skip
    """Step `tiles` times `num_rows` blocks of the weight in whose range of programs this one is."""
    program = tl.program_id(0)
    low, high = 0, num_weights
    while high - low > 1:
        middle = (low + high) // 2
        is_after = tl.load(table + middle * columns + 9) <= program
        low, high = tl.where(is_after, middle, low), tl.where(is_after, high, middle)
    row = table + low * columns
    weight = read_address(row, 0, tl.int16, aligned)
    remainder = read_address(row, 1, tl.int16, aligned)
    gradient = read_address(row, 2, gradient_kind, aligned)
    mean_codes, mean_scales = read_address(row, 3, tl.int8, aligned), read_address(row, 4, tl.float32, aligned)
    square_codes, square_scales = read_address(row, 5, tl.uint8, aligned), read_address(row, 6, tl.float32, aligned)
    count, seed = tl.load(row + 7), tl.load(row + 8).to(tl.uint32)
    if aligned:
        count = tl.multiple_of(count, [16])
    own = factors + low * num_factors
    mean_share, square_kept, square_share = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    square_bias, epsilon, weight_kept, rate = tl.load(own + 3), tl.load(own + 4), tl.load(own + 5), tl.load(own + 6)
    factor = tl.load(gradient_scale)
    first = (program - tl.load(row + 9)) * (tiles * num_rows)

    for tile in range(tiles):
        rows = first + tile * num_rows + tl.arange(0, num_rows)
        at = rows[:, None] * block + tl.arange(0, block)[None, :]
        inside, rows_inside = at < count, rows * block < count

        change = tl.load(gradient + at, mask=inside, other=0).to(tl.float32) * factor
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
        noise = mixed(at.to(tl.uint32) ^ seed)
        if keeps_remainder:
            upper = (bits + 0x8000) >> 16
            tl.store(remainder + at, (bits - (upper << 16)).to(tl.int16), mask=inside)
        else:
            upper = (bits + (mixed(noise) & 0xFFFF).to(tl.int32)) >> 16
        tl.store(weight + at, upper.to(tl.int16), mask=inside)

        low_bits = ((noise & 0xFFFF).to(tl.float32) + 0.5) * (1 / 65536)
        high_bits = ((noise >> 16).to(tl.float32) + 0.5) * (1 / 65536)
        write_codes(mean_codes, mean_scales, mean, low_bits, at, inside, rows, rows_inside, 127, smallest)
        write_codes(square_codes, square_scales, square, high_bits, at, inside, rows, rows_inside, 255, smallest)


def launch(updates: Sequence[Update], gradient_scale: Tensor) -> None:
    """Step weights by one launch for each kind that there is: all have bf16 gradients at multiples of 16
    bytes but for FSDP2's, which lie one behind the other in what was reduced."""
    rows = [[*map(Tensor.data_ptr, tensors_of(each)), each.weight.numel(), each.seed, 0] for each in updates]
    table = torch.tensor(rows)
    factors = torch.tensor([each.factors for each in updates], dtype=torch.float32)
    aligned = (table[:, : COLUMNS - 2] % 16 == 0).all(1).tolist()
    kinds = [
        (each.gradient.dtype == torch.bfloat16, each.remainder is not None, is_aligned)
        for each, is_aligned in zip(updates, aligned, strict=True)
    ]
    for kind in set(kinds):
        alike = torch.tensor([each == kind for each in kinds])
        launch_alike(table[alike], factors[alike], gradient_scale, *kind)


def tensors_of(update: Update) -> tuple[Tensor, ...]:
    """Return a weight's tensors in the table's order; it stands in, unread, for a missing remainder."""
    low = update.weight if update.remainder is None else update.remainder
    moments = (update.mean.codes, update.mean.scales, update.square.codes, update.square.scales)
    return (update.weight, low, update.gradient, *moments)


def launch_alike(
    table: Tensor, factors: Tensor, gradient_scale: Tensor, in_bf16: bool, keeps_remainder: bool, aligned: bool
) -> None:
    """Step weights that one compiled kernel fits: bf16 gradients, remainders, multiples of 16 bytes."""
    programs = -(-table[:, 7] // (TILES * ROWS * BLOCK))
    table[:, 9] = programs.cumsum(0) - programs
    device = gradient_scale.device
    kind = {"gradient_kind": tl.bfloat16 if in_bf16 else tl.float32, "keeps_remainder": keeps_remainder}
    adamw_kernel[(int(programs.sum()),)](
        to_device(table, device), to_device(factors, device), gradient_scale, len(table),
        aligned=aligned, **kind, **CONSTANTS, num_warps=4,
    )  # fmt: skip


def to_device(values: Tensor, device: torch.device) -> Tensor:
    # From pinned memory: a copy of other memory would wait for the GPU.
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
