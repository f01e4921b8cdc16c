"""What Triton says of our kernels without a GPU, as JSON: `python triton_checks.py interpreted|compiled`."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from itertools import product
from typing import Any

import torch
from torch import Tensor

from simpletuner.parallel.precision.split_adamw import (
    BLOCK,
    QuantizedMoment,
    factors_of,
    join_float32,
    update_in_chunks,
    write_float32,
)

SIZES = (16 * BLOCK, 9 * BLOCK + 5, 7)
SEED = 123_456_789
FACTORS = factors_of(3, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01})


def state_of(count: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the tensors of a weight, with a gradient of a dtype and its scale, as `split_kernel.launch` takes them."""
    noise = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=noise)
    weight, remainder = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    write_float32(values, weight, remainder)
    mean, square = (QuantizedMoment.zeros(count, signed, values.device) for signed in (True, False))
    mean.write(0, torch.randn(count, generator=noise) * 0.1)
    square.write(0, torch.rand(count, generator=noise) * 0.01)
    gradient = torch.randn(count, generator=noise).to(dtype)
    moments = (mean.codes, mean.scales, square.codes, square.scales)
    return [weight.view(torch.int16), remainder, gradient, *moments, torch.tensor(0.7)]


def interpreted() -> list[dict[str, float]]:
    """Step by Triton's interpreter and by torch's operators; return how far apart the results are."""
    from simpletuner.parallel.precision.split_kernel import launch

    found = []
    for count in SIZES:
        for dtype, keeps_remainder in product((torch.bfloat16, torch.float32), (True, False)):
            ours, before = state_of(count, dtype), state_of(count, dtype)
            theirs = [each.clone() for each in ours]
            for step, each in ((launch, ours), (update_in_chunks, theirs)):
                low, moments = (
                    each[1] if keeps_remainder else None,
                    (QuantizedMoment(*each[3:5]), QuantizedMoment(*each[5:7])),
                )
                step(each[0], low, each[2], *moments, each[7], SEED, FACTORS)
            one, other, first = (join_float32(*each[:2]) for each in (ours, theirs, before))
            pairs = [(ours[place], theirs[place]) for place in (4, 6)]
            codes = [(ours[place] != theirs[place]).float().mean().item() for place in (3, 5)]
            found.append({
                "weights": ((one - other).abs() / (other - first).abs().max()).max().item() if keeps_remainder else 0,
                "rounded": (ours[0] != theirs[0]).float().mean().item(),
                "scales": max(((mine - their) / their).abs().max().item() for mine, their in pairs),
                "codes": max(codes),
                "changed": (ours[3] != before[3]).float().mean().item(),
            })  # fmt: skip
    return found


def compiled() -> dict[str, dict[str, int]]:
    """Compile the kernel for GPUs; return its accesses of memory by kind and width in bytes, and its local memory."""
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    from simpletuner.parallel.precision.split_kernel import CONSTANTS, adamw_kernel

    tensors = ("*i16", "*i16", "*bf16", "*i8", "*fp32", "*u8", "*fp32", "*fp32")
    names: list[str] = adamw_kernel.arg_names
    kinds: dict[str, str] = {**dict.fromkeys(names, "fp32"), **dict(zip(names, tensors, strict=False))}
    kinds |= {"count": "i32", "seed": "i32", **dict.fromkeys((*CONSTANTS, "keeps_remainder"), "constexpr")}
    aligned: Any = {(place,): [["tt.divisibility", 16]] for place in (*range(len(tensors)), names.index("count"))}
    found = {}
    for capability, keeps_remainder in product((80, 89, 90), (True, False)):
        constants = CONSTANTS | {"keeps_remainder": keeps_remainder}
        source = ASTSource(adamw_kernel, signature=kinds, constexprs=constants, attrs=aligned)
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
        accesses = re.findall(r"(ld|st)\.global(?:\.v(\d))?\.b(\d+)", kernel.asm["ptx"])
        counted = Counter(f"{kind} {int(many or 1) * int(bits) // 8}" for kind, many, bits in accesses)
        found[f"sm_{capability}{' with remainders' * keeps_remainder}"] = {
            **counted,
            "local": kernel.asm["ptx"].count(".local"),
            "code": len(kernel.asm["cubin"]),
        }
    return found


if __name__ == "__main__":
    print(json.dumps({"interpreted": interpreted, "compiled": compiled}[sys.argv[1]]()))
