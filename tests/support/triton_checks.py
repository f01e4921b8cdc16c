"""What Triton says of our kernels without a GPU, as JSON: `python triton_checks.py interpreted|compiled`."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from itertools import product
from typing import Any

import torch

from simpletuner.parallel.precision.split_adamw import (
    BLOCK,
    QuantizedMoment,
    Update,
    factors_of,
    join_float32,
    update_in_chunks,
    write_float32,
)

SIZES = (16 * BLOCK, 9 * BLOCK + 5, 0, 7, 150 * BLOCK + 1, 64 * BLOCK)
"""Of weights that one launch steps: several programs, a part of one, no values on this rank."""
FACTORS = factors_of(3, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01})


def update_of(number: int, count: int, dtype: torch.dtype, keeps_remainder: bool) -> Update:
    """Return a step of a weight; the gradient of every second one begins where no vector can be read."""
    noise = torch.Generator().manual_seed(number)
    values = torch.randn(count, generator=noise)
    weight, remainder = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    write_float32(values, weight, remainder)
    mean, square = (QuantizedMoment.zeros(count, signed, values.device) for signed in (True, False))
    if count:
        mean.write(0, torch.randn(count, generator=noise) * 0.1)
        square.write(0, torch.rand(count, generator=noise) * 0.01)
    gradient = torch.randn(count + 1, generator=noise).to(dtype)[number % 2 :][:count]
    factors = [*FACTORS[:-1], FACTORS[-1] * (1 + number)]
    return Update(
        weight.view(torch.int16),
        remainder if keeps_remainder else None,
        gradient,
        mean,
        square,
        10**8 + number,
        factors,
    )


def interpreted() -> list[dict[str, float]]:
    """Step by Triton's interpreter and by torch's operators; return how far apart the results are."""
    from simpletuner.parallel.precision.split_kernel import launch

    found, scale = [], torch.tensor(0.7)
    for dtype, keeps_remainder in product((torch.bfloat16, torch.float32), (True, False)):
        ours, theirs, before = (
            [update_of(*each, dtype, keeps_remainder) for each in enumerate(SIZES)] for _ in range(3)
        )
        launch(ours, scale)
        for each in theirs:
            update_in_chunks(each, scale)
        found += [differences(*each) for each in zip(ours, theirs, before, strict=True) if len(each[0].weight)]
    return found


def differences(ours: Update, theirs: Update, before: Update) -> dict[str, float]:
    found = {"weights": 0.0}
    exact = [join_float32(each.weight, low) for each in (ours, theirs, before) if (low := each.remainder) is not None]
    if exact:
        one, other, first = exact
        found["weights"] = ((one - other).abs() / (other - first).abs().max()).max().item()
    pairs = [(ours.mean, theirs.mean), (ours.square, theirs.square)]
    return found | {
        "rounded": (ours.weight != theirs.weight).float().mean().item(),
        "scales": max(((mine.scales - their.scales) / their.scales).abs().max().item() for mine, their in pairs),
        "codes": max((mine.codes != their.codes).float().mean().item() for mine, their in pairs),
        "changed": (ours.mean.codes != before.mean.codes).float().mean().item(),
    }


def compiled() -> dict[str, dict[str, int]]:
    """Compile the kernel for GPUs; return its accesses of memory by kind and width in bytes, and its local memory."""
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    from simpletuner.parallel.precision.split_kernel import CONSTANTS, adamw_kernel

    kinds = {"table": "*i64", "factors": "*fp32", "gradient_scale": "*fp32", "num_weights": "i32"}
    kernel: Any = adamw_kernel
    names: list[str] = kernel.arg_names
    signature = dict.fromkeys(names, "constexpr") | kinds
    # torch allocates at multiples of 512 bytes.
    attributes: Any = {(names.index(name),): [["tt.divisibility", 16]] for name in kinds if name != "num_weights"}
    found = {}
    for capability, keeps_remainder in product((80, 89, 90), (True, False)):
        kind = {"gradient_kind": tl.bfloat16, "keeps_remainder": keeps_remainder, "aligned": True}
        source = ASTSource(adamw_kernel, signature=signature, constexprs=CONSTANTS | kind, attrs=attributes)
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
        accesses = re.findall(r"(ld|st)\.global(?:\.v(\d))?\.b(\d+)", built.asm["ptx"])
        counted = Counter(f"{kind} {int(many or 1) * int(bits) // 8}" for kind, many, bits in accesses)
        found[f"sm_{capability}{' with remainders' * keeps_remainder}"] = {
            **counted,
            "local": built.asm["ptx"].count(".local"),
            "code": len(built.asm["cubin"]),
        }
    return found


if __name__ == "__main__":
    print(json.dumps({"interpreted": interpreted, "compiled": compiled}[sys.argv[1]]()))
