"""Values and defaults of the original that mean something else here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from simpletuner.settings.values.spelling import normalize_name


@dataclass(frozen=True)
class Meaning:
    """A setting's meaning here that differs from the original, shown where it is set and `holds` is true of the
    file."""

    setting: str
    text: str
    holds: Callable[[Mapping[str, Any]], bool]


def says(name: str, *words: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda values: normalize_name(values.get(name)) in words


MEANINGS = (
    Meaning(
        "lr_warmup_steps",
        "lr_scheduler=constant warms up, too; in the original it does not",
        says("lr_scheduler", "constant"),
    ),
    Meaning(
        "lr_scheduler",
        "half a cosine from the peak to lr_end over the whole run; in the original lr_warmup_steps is its period",
        says("lr_scheduler", "cosine"),
    ),
)
DIFFUSION = ("sd1x", "sd2x", "sdxl", "kolors", "pixart_sigma")
"""Families whose noise levels are no flow's."""
DEFAULTS: dict[str, str] = {
    "learning_rate": "4e-07",
    "grad_clip_method": "value",
    "aspect_bucket_sizes": "nearest",
    "lr_end": "4e-07",
    "lr_power": "0.8",
    "flow_schedule_shift": "3.0",
    "lora_dropout": "0.1",
    "seed": "none",
    "caption_strategy": "filename",
    "crop_style": "random",
    "vae_dtype": "bf16",
    "compress_disk_cache": "true",
    "eval_timesteps": "28",
    "validation_negative_prompt": "blurry, cropped, ugly",
    "validation_resolution": "256",
}
"""The original's defaults where ours differ and the result depends on them."""
SAME_RESULT: dict[str, str] = {
    **dict.fromkeys(("output_dir", "logging_dir", "tracker_run_name", "tracker_project_name"), "names of results"),
    **dict.fromkeys(("cache_dir_text", "main_process_ip"), "an address or a folder of this run"),
    **dict.fromkeys(
        ("dataloader_prefetch_qlen", "text_encoder_batch_size", "max_workers", "gradient_checkpointing"),
        "time and memory alone",
    ),
    **dict.fromkeys(("dynamo_backend", "dynamo_use_regional_compilation"), "time alone"),
    "fsdp_cpu_ram_efficient_loading": "memory alone",
    "lr_scheduler": "constant and constant_with_warmup are the same here",
    "sana_complex_human_instruction": "the pipeline's own text",
}
"""Names whose defaults differ without changing what is trained, and why."""
COUNT_WITH = {
    "lr_end": says("lr_scheduler", "polynomial"),
    "lr_power": says("lr_scheduler", "polynomial"),
    "flow_schedule_shift": lambda values: not says("model_family", *DIFFUSION)(values),
    # Datasets of a file crop by themselves.
    "crop_style": lambda values: says("crop", "true")(values) or bool(values.get("data_backend_config")),
    "lora_dropout": says("model_type", "lora"),
    # DeepSpeed clips by the norm there, too.
    "grad_clip_method": lambda values: values.get("zero_stage") is None,
}
"""The settings with which some of these defaults count."""


def remark_on(setting: str, values: Mapping[str, Any]) -> str:
    """Return what a setting of the original's file means here and not there; empty where it is the same."""
    return next((each.text for each in MEANINGS if each.setting == setting and each.holds(values)), "")


def defaults_there(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the original's defaults that are others here and count with these values, which take their place."""
    return {
        name: theirs
        for name, theirs in DEFAULTS.items()
        if name not in values and COUNT_WITH.get(name, lambda _: True)(values)
    }
