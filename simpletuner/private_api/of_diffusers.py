"""Private API of diffusers, each with its reason. Seen in diffusers 0.42.1."""

from __future__ import annotations

from typing import Any


def context_parallel_splits(model: Any) -> Any:
    """Return what of a denoiser's inputs and outputs is split over the sequence, by module, as its class says.

    The values have `split_dim` and `expected_dims`.
    """
    return model._cp_plan


def leave_out_peft() -> None:
    """Keep diffusers' models from importing peft where it is installed: 0.4 CPU s of a start that trains no LoRA."""
    from diffusers import utils

    utils.import_utils._peft_available = False
    modules: Any = (utils, utils.constants, utils.peft_utils)
    for module in modules:
        module.USE_PEFT_BACKEND = False


def blocks_by_name(model: Any) -> list[set[str]]:
    """Return the block classes that a model must not be split within, and those that are compiled one by one."""
    return [set(getattr(model, name, None) or ()) for name in ("_no_split_modules", "_repeated_blocks")]


def modules_in_float32(model: Any) -> tuple[str, ...]:
    """Return parts of the names of modules that diffusers keeps in float32 whatever dtype a model is loaded in."""
    return tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
