"""What `gpu.py` measures: settings by part, with the figures that a roofline model of an H200 expects.

The model takes products at 650 to 745 TFLOP/s, attention at 600 forward and 490 backward, memory at 3.5 to 4.1 TB/s;
its MFU is given for low, nominal and high rates. Memory is counted from shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from simpletuner.settings import Settings, load
from simpletuner.settings.values.shape import Shape

MIB = 2**20

Flags = dict[str, Any]
Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """`flags` are settings, or sizes where no model runs. `expected` are the figures of the roofline model, by the
    names of what is measured. A case with `limit_mib` runs within so much memory of the GPU, context included."""

    part: str
    name: str
    flags: Flags
    expected: Mapping[str, str] = field(default_factory=dict)
    limit_mib: int = 0

    def is_of(self, record: Record) -> bool:
        return (self.part, self.name, self.flags) == (record["part"], record["name"], record["flags"])

    @property
    def settings(self) -> Settings:
        return load(self.flags, complete=False, environment={}).settings

    @property
    def shape(self) -> Shape:
        return Shape(1, self.flags["resolution"], self.flags["resolution"])


TINY: Flags = {"model_flavour": "tiny", "resolution": 64, "resolution_type": "pixel", "tokenizer_max_length": 16}
FLUX: Flags = {"model_family": "flux", "model_flavour": "dev", "resolution": 1024, "resolution_type": "pixel"}
SPLIT: Flags = FLUX | {"state_layout": "split", "gradient_checkpointing": False, "dynamo_backend": "inductor"}
SDXL: Flags = FLUX | {"model_family": "sdxl", "model_flavour": "base-1.0", "train_batch_size": 8}
STREAMED: Flags = SDXL | {"fsdp_enable": True, "fsdp_offload_params": True}
COMPILED: Flags = {"dynamo_backend": "inductor"}
RECOMPUTED: Flags = {"gradient_checkpointing": True}


def batch(samples: int, passes: int, budget: float | None = None) -> Flags:
    kept = {} if budget is None else {"activation_memory_budget": budget}
    return {"train_batch_size": samples, "gradient_accumulation_steps": passes, **kept}


MACHINE = {
    "bf16 product, TFLOP/s": "769 to 798",
    "for 25 s, TFLOP/s": "750 allow 60 % MFU",
    "copy, TB/s": "4.3",
    "pinned to device, GB/s": "50",
    "context, MiB": "550",
}
ATTENTION: dict[str, dict[str, str]] = {
    "cudnn": {"forward, TFLOP/s": "600", "backward, TFLOP/s": "490"},
    "flash": {"forward, TFLOP/s": "370", "backward, TFLOP/s": "310"},
}
ENGINES: dict[str, Flags] = {
    "CPU, fp32": {"use_cpu": True, "mixed_precision": "no"},
    "fp32": {"mixed_precision": "no"},
    "bf16": {},
    "offloaded activations": {"offload_activations": True},
    "split": {"state_layout": "split"},
    "compiled": COMPILED,
    "FSDP2": {"fsdp_enable": True},
    "FSDP2, compiled": {"fsdp_enable": True, **COMPILED},
    "FSDP2, split": {"fsdp_enable": True, "state_layout": "split"},
    "FSDP2, offloaded": {"fsdp_enable": True, "fsdp_offload_params": True},
}

OFFLOADED: Flags = {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}
RUNS: dict[str, Flags] = {
    "CPU, fp32": {"use_cpu": True, "mixed_precision": "no"},
    "fp32": {"mixed_precision": "no"},
    "bf16, EMA on the CPU": {"use_ema": True},
    "EMA on the GPU": {"mixed_precision": "no", "use_ema": True, "ema_device": "accelerator"},
    "split": {"state_layout": "split"},
    "images encoded on demand": {"mixed_precision": "no", "vae_cache_disable": True, "text_cache_disable": True},
    "FSDP2": {"mixed_precision": "no", "fsdp_enable": True},
    "FSDP2, offloaded": {"mixed_precision": "no", "fsdp_enable": True, "fsdp_offload_params": True},
    "ZeRO-1": {"mixed_precision": "no", "zero_stage": 1},
    "ZeRO-2": {"mixed_precision": "no", "zero_stage": 2},
    "ZeRO-3": {"mixed_precision": "no", "zero_stage": 3},
    "ZeRO-3, offloaded": {"mixed_precision": "no", **OFFLOADED},
}
"""Whole runs of the command line: caches, ten steps in two starts, a checkpoint, validation images, the pipeline."""


def step_cases() -> Iterator[Case]:
    """Yield FLUX at its true size, one setting after the other, and SDXL in the memory that it shall fit in."""
    eager = SPLIT | RECOMPUTED | {"dynamo_backend": "no"} | batch(8, 1)
    few = SPLIT | batch(2, 4, 0.6)
    # Of weights in bf16 alone, with 8-bit moments: 24 GB less than these.
    yield Case("levers", "split, eager, recomputed", eager, {"GB": "91 + 24", "MFU": "35 38 41 %"})
    yield Case("levers", "+ compiled", SPLIT | RECOMPUTED | batch(8, 1), {"GB": "91 + 24", "MFU": "40 44 47 %"})
    yield Case("levers", "+ 2x4, budget 0.6", few, {"GB": "135", "MFU": "50 54 58 %"})
    yield Case("levers", "+ fused projections", few | {"fuse_qkv_projections": True})
    yield Case("levers", "2x4, flash attention", few | {"attention_backend": "flash"})
    offloaded = SPLIT | batch(4, 2, 0.6) | {"offload_activations": True}
    yield Case("levers", "4x2, budget 0.6, offloaded", offloaded)
    for samples, passes, budget in ((8, 1, 0.1), (4, 2, 0.3), (2, 4, 0.4), (1, 8, 1.0)):
        yield Case("batches", f"{samples}x{passes}, budget {budget:g}", SPLIT | batch(samples, passes, budget))
    for resolution, limit_mib, held, with_inputs in ((1024, 6551, "6,930", "3,630"), (128, 4618, "1,980", "1,480")):
        sized = STREAMED | {"resolution": resolution}
        yield Case("sdxl", f"{resolution} px, streamed", sized, {"MiB": held}, limit_mib)
        offloaded = sized | {"offload_activations": True}
        yield Case("sdxl", f"{resolution} px, activations too", offloaded, {"MiB": with_inputs}, limit_mib)


def all_cases(tiny: bool) -> Iterator[Case]:
    families = ("flux",) if tiny else ("flux", "sdxl")
    for family in families:
        yield Case("syncs", f"a step of {family}", TINY | {"model_family": family, "use_cpu": tiny})
    sizes = {"edge": 128, "bytes": MIB, "seconds": 0.1} if tiny else {"edge": 8192, "bytes": 2**32, "seconds": 25.0}
    yield Case("ceilings", "machine", sizes, MACHINE)
    shape = {"shape": [1, 2, 64, 32] if tiny else [4, 24, 4608, 128], "use_cpu": tiny}
    for backend in ("auto", "cudnn", "flash", "flash3", "efficient"):
        yield Case("attention", backend, {"attention_backend": backend, **shape}, ATTENTION.get(backend, {}))
    for family in families:
        for name, flags in ENGINES.items():
            cpu = {"use_cpu": tiny} | flags
            yield Case(
                "engines",
                f"{family}, {name}",
                TINY | {"model_family": family, "learning_rate": 1e-3} | smaller(cpu, tiny),
            )
        for name, flags in RUNS.items():
            own = TINY | {"model_family": family, "use_cpu": tiny} | flags
            yield Case("runs", f"{family}, {name}", own)
    for case in step_cases():
        flags = smaller(case.flags | TINY | {"use_cpu": True}, True) if tiny else case.flags
        yield Case(case.part, case.name, flags, case.expected, case.limit_mib)


def smaller(flags: Flags, tiny: bool) -> Flags:
    """Compile nothing, which takes a CPU 15 seconds per case, but what is named so among the engines."""
    if not tiny or flags.get("dynamo_backend") != "inductor":
        return flags
    kept = {name: value for name, value in flags.items() if name != "activation_memory_budget"}
    return kept | {"dynamo_backend": "no" if "state_layout" in flags else "eager"}
