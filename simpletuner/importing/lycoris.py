"""LyCORIS' own file: algorithm, sizes and classes of layers become settings of a LoRA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

from simpletuner.importing.trainers.sd_scripts_networks import OF_ALGORITHMS, UNETS
from simpletuner.settings.files.formats import read_entries
from simpletuner.settings.files.raw_values import RawValue
from simpletuner.settings.foreign.original_names import is_off
from simpletuner.settings.values.spelling import normalize_name

CLASSES: dict[str, dict[str, str]] = {
    "Attention": dict.fromkeys(
        (*UNETS, "flux", "sd3", "pixart_sigma", "auraflow", "wan", "qwen_image", "sana", "lumina2"), "*.attn*.*"
    ),
    "FeedForward": {
        **dict.fromkeys((*UNETS, "flux", "sd3", "pixart_sigma", "wan"), "*.ff*.*"),
        "qwen_image": "*_mlp.*",
    },
    "FluxAttention": {"chroma": "*.attn.*"},
    "LTXAttention": {"ltxvideo": "*.attn*.*"},
    "Flux2Attention": {"flux2": "transformer_blocks.*.attn.*"},
    "Flux2ParallelSelfAttention": {"flux2": "single_transformer_blocks.*.attn.*"},
    "Flux2FeedForward": {"flux2": "transformer_blocks.*.ff*.*"},
}
"""Layers in a class of modules of the original's denoisers, by our family."""
# Ends of the names of denoisers' own classes: all layers.
WHOLE_MODEL = ("Transformer2DModel", "Transformer3DModel", "UNet2DConditionModel")
# Above any layer's rank: LyCORIS, ai-toolkit and peft then keep LoKr's second factor whole, at scale 1.
FULL_RANK = 65_536
HALF = 10_000
"""Sizes from this on are written to have whole matrices."""
SIZES = ("factor", "linear_dim", "linear_alpha")
READ = (*SIZES, "algo", "multiplier", "full_matrix", "apply_preset")
# Arguments that change how a product is computed, and not which.
SAME = ("bypass_mode",)


def lycoris_values(given: RawValue, path: Path, family: str) -> list[RawValue]:
    """Return what a file of LyCORIS says as values of a LoRA's settings.

    Raises ValueError with the reason where no setting has its meaning, and SettingsError for a file that
    cannot be read.
    """
    own = {entry.key: entry.value for entry in read_entries(path)}
    if (kind := OF_ALGORITHMS.get(normalize_name(own.get("algo", "lora")))) is None:
        raise ValueError(f"algo={own['algo']} of {path} is not in this version, which has lora, loha and lokr")
    if more := next((name for name, value in own.items() if name not in (*READ, *SAME) and not is_off(value)), ""):
        raise ValueError(f"{more}={own[more]} of {path} has no place here")
    if own.get("multiplier", 1) != 1:
        raise ValueError(f"multiplier={own['multiplier']} of {path} has no place here")
    layers = dict(layers_of(own.get("apply_preset"), path, family))
    sizes = [tuple({**own, **each}.get(name) for name in SIZES) for each in layers.values()]
    if any(type(size) not in (int, float, NoneType) for each in sizes for size in each):
        raise ValueError(f"{', '.join(SIZES)} of {path} are numbers")
    if len(set(sizes)) > 1:
        raise ValueError(
            f"module_algo_map of {path} gives classes of layers different sizes, and one holds for all here"
        )
    factor, rank, alpha = sizes[0]
    if kind == "lokr" and (own.get("full_matrix") or (isinstance(rank, int) and rank >= HALF)):
        rank = alpha = FULL_RANK
    values = {"lora_type": kind, "lora_rank": 4 if rank is None else rank, "lora_alpha": 1 if alpha is None else alpha}
    values |= {"lokr_factor": -1 if factor is None else factor} if kind == "lokr" else {}
    values |= {"lora_target_modules": ",".join(layers), "lora_dropout": 0.0}
    return [replace(given, name=name, value=value, written=str(path)) for name, value in values.items()]


def layers_of(preset: object, path: Path, family: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield patterns of layers with their own sizes, by the classes that apply_preset names."""
    own = preset if isinstance(preset, Mapping) else {}
    if more := next((name for name in own if name not in ("target_module", "module_algo_map") and own[name]), ""):
        raise ValueError(f"{more} of {path} has no place here: write names of layers as lora_target_modules")
    sizes, classes = own.get("module_algo_map"), own.get("target_module")
    if not isinstance(classes, list) or not classes:
        raise ValueError(f"apply_preset of {path} names no target_module, whose layers are adapted")
    for name in map(str, classes):
        pattern = "*" if name.endswith(WHOLE_MODEL) else CLASSES.get(name, {}).get(family)
        if pattern is None:
            raise ValueError(f"layers of {name} in {path} are not known here for {family}: set lora_target_modules")
        inner = sizes.get(name) if isinstance(sizes, Mapping) else None
        if isinstance(inner, Mapping) and set(inner) - set(SIZES):
            raise ValueError(f"module_algo_map of {path} gives {name} more than sizes")
        yield pattern, inner if isinstance(inner, Mapping) else {}
