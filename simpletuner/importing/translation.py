"""Translation of a file as the original reads it: unread names, derived values, features of its own.

`config import` writes these values out, and counts as lost what has no place here. The values that the
original's optimizers and families have whatever its file says are read off its optimizer_param.py and each
family's model.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from simpletuner.importing.original import DEFAULTS, FLOAT16
from simpletuner.settings.files.raw_values import RawValue
from simpletuner.settings.foreign.original_names import is_off
from simpletuner.settings.foreign.original_tables import FAMILY_NAMES
from simpletuner.settings.values.spelling import normalize_name


@dataclass(frozen=True)
class OriginalOptimizer:
    ours: str
    betas: tuple[float, float] | None = None
    epsilon: float | None = None
    weight_decay: float = 0.0
    note: str = ""

    @property
    def settings(self) -> dict[str, float]:
        beta1, beta2 = self.betas or (None, None)
        values = {"adam_beta1": beta1, "adam_beta2": beta2, "adam_epsilon": self.epsilon}
        return {name: value for name, value in values.items() if value is not None} | {
            "adam_weight_decay": self.weight_decay
        }


EIGHT_BITS = "its moments are of 8 bits there; state_layout=split has such, for model_type=full"
PAGED = "its moments are paged out to the machine's memory there; fsdp_offload_params keeps them there"
BETAS = (0.9, 0.999)
FASTER = (0.9, 0.99)
ORIGINAL_OPTIMIZERS: dict[str, OriginalOptimizer] = {
    "adamw_bf16": OriginalOptimizer("adamw", BETAS, 1e-6, 0.01),
    "torch_adam": OriginalOptimizer("adam", BETAS, 1e-8),
    "torch_adamw": OriginalOptimizer("adamw", BETAS, 1e-8, 0.01),
    "torch_adagrad": OriginalOptimizer("adagrad", epsilon=1e-10),
    "torch_adafactor": OriginalOptimizer("adafactor"),
    "adamw_schedulefree": OriginalOptimizer("adamw_schedulefree", BETAS, 1e-8, 0.01),
    "adamw_schedulefree+aggressive": OriginalOptimizer("adamw_schedulefree", BETAS, 1e-6, 1e-3),
    "adamw_schedulefree+no_kahan": OriginalOptimizer("adamw_schedulefree", BETAS, 1e-6, 1e-3),
    "optimi_adam": OriginalOptimizer("adam", FASTER, 1e-6),
    "optimi_adamw": OriginalOptimizer("adamw", FASTER, 1e-6),
    "optimi_lion": OriginalOptimizer("lion", FASTER),
    "ao_adamw8bit": OriginalOptimizer("adamw", BETAS, 1e-6, 0.01, EIGHT_BITS),
    "bnb_adagrad": OriginalOptimizer("adagrad", epsilon=1e-10),
    "bnb_adagrad8bit": OriginalOptimizer("adagrad", None, 1e-10, note="its sums are of 8 bits there"),
    "bnb_adam": OriginalOptimizer("adam", BETAS, 1e-8),
    "bnb_adam8bit": OriginalOptimizer("adam", BETAS, 1e-8, note="its moments are of 8 bits there"),
    "bnb_adamw": OriginalOptimizer("adamw", BETAS, 1e-6, 0.01),
    "bnb_adamw_paged": OriginalOptimizer("adamw", BETAS, 1e-6, 0.01, PAGED),
    "bnb_adamw8bit": OriginalOptimizer("adamw", BETAS, 1e-6, 0.01, EIGHT_BITS),
    "bnb_adamw8bit_paged": OriginalOptimizer("adamw", BETAS, 1e-6, 0.01, EIGHT_BITS),
    "bnb_lion": OriginalOptimizer("lion", FASTER),
    "bnb_lion_paged": OriginalOptimizer("lion", FASTER, note=PAGED),
    "bnb_lion8bit": OriginalOptimizer("lion", FASTER, note="its momentum is of 8 bits there"),
    "bnb_lion8bit_paged": OriginalOptimizer("lion", FASTER, note="its momentum is of 8 bits there"),
}
DEFAULT_OPTIMIZER = "adamw_bf16"
# Optimizers that the original silently replaces by adamw_schedulefree with FSDP2.
NOT_WITH_FSDP2 = ("optimi_", "bnb_", "soap")


@dataclass(frozen=True)
class OriginalFamily:
    forces: Mapping[str, object] = field(default_factory=dict)
    """Settings that have these values whatever the file says."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Settings that are at most this, unless i_know_what_i_am_doing, and this where the file is silent."""
    lost: str = ""
    """A method of its own that this version does not have."""


def aligned(pixels: int, **forces: object) -> dict[str, object]:
    return {"aspect_bucket_alignment": pixels, **forces}


BY_PIPELINE = OriginalFamily(
    lost="there code of its own trains it, which was not compared with diffusers' pipeline, by which it trains here"
)
# Of a family whose code there is that of diffusers' pipeline (bc8e6ab7): texts, positions, times and target.
BY_CODE_LIKE_IT = OriginalFamily()

ORIGINAL_FAMILIES: dict[str, OriginalFamily] = {
    "anima": BY_PIPELINE,
    "auraflow": OriginalFamily(aligned(64), {"tokenizer_max_length": 120}),
    "chroma": OriginalFamily(
        aligned(64),
        lost="there noise levels are pushed towards 0 and 1 after they are drawn, which this version does not do",
    ),
    "cosmos": OriginalFamily(aligned(16)),
    "ernie": BY_CODE_LIKE_IT,
    "flux": OriginalFamily(aligned(64)),
    "flux2": OriginalFamily(aligned(16, tokenizer_max_length=512, flux_guidance_value=1.0)),
    "hunyuanvideo": BY_PIPELINE,
    "ideogram4": BY_PIPELINE,
    "kandinsky5_video": BY_PIPELINE,
    "kolors": BY_PIPELINE,
    "krea2": BY_CODE_LIKE_IT,
    "longcat_image": BY_PIPELINE,
    "ltxvideo": OriginalFamily(aligned(64, tokenizer_max_length=226)),
    "ltxvideo2": OriginalFamily(
        lost="there the video attends to its audio, or to noised zeros where there is none, and here to no audio, "
        "unless sound_loss_weight is set and a clip has sound",
    ),
    "lumina2": OriginalFamily(aligned(64)),
    "pixart_sigma": OriginalFamily(aligned(64, tokenizer_max_length=300), {"max_grad_norm": 0.01}),
    "qwen_image": OriginalFamily(limits={"aspect_bucket_alignment": 32}),
    "sana": OriginalFamily(
        aligned(64, vae_dtype="fp32"),
        lost="there latents are halved, and noise levels are drawn evenly from the scheduler's own",
    ),
    "sanavideo": BY_PIPELINE,
    "sd3": OriginalFamily(aligned(64), {"tokenizer_max_length": 154}),
    "wan": OriginalFamily(aligned(32, tokenizer_max_length=512)),
}

# Flavours (`""`: the default one) whose LoRA the original trains on top of an assistant LoRA.
ASSISTED = {"z_image": ("", "turbo", "turbo_ostris_v2"), "flux": ("schnell",)}

IMAGE_STREAM = "to_k,to_q,to_v,to_out.0"
# Layers that a LoRA adapts where the file names none; those of IMAGE_STREAM in all other families.
LORA_TARGETS = {
    "flux": f"{IMAGE_STREAM},add_k_proj,add_q_proj,add_v_proj,to_add_out",
    "kandinsky5_video": "to_key,to_query,to_value",
    "flux2": "attn.to_q,attn.to_k,attn.to_v,attn.to_out.0,attn.to_qkv_mlp_proj",
}
CONTEXT = "add_k_proj,add_q_proj,add_v_proj,to_add_out"
FEED_FORWARD = "ff.net.0.proj,ff.net.2,ff_context.net.0.proj,ff_context.net.2,proj_mlp,proj_out"
# Layers by the original's flux_lora_target, those that diffusers' FLUX.1 has.
FLUX_LORA_TARGETS = {
    "all": LORA_TARGETS["flux"],
    "context": CONTEXT,
    "context+ffs": f"{CONTEXT},ff_context.net.0.proj,ff_context.net.2",
    "all+ffs": f"{LORA_TARGETS['flux']},{FEED_FORWARD}",
    "all+ffs+embedder": f"x_embedder,{LORA_TARGETS['flux']},{FEED_FORWARD}",
    "ai_toolkit": f"{LORA_TARGETS['flux']},{FEED_FORWARD},norm.linear,norm1.linear,norm1_context.linear",
    "tiny": "single_transformer_blocks.7.proj_out,single_transformer_blocks.20.proj_out",
    "nano": "single_transformer_blocks.7.proj_out",
}


ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon", "adam_weight_decay")
OVERRIDES = ("optimizer_beta1", "optimizer_beta2", "optimizer_config")
CONFIG_KEYS = {"eps": "adam_epsilon", "weight_decay": "adam_weight_decay"}
# base_model_precision there: a kind of number, its bits, and the library that quantizes.
QUANTIZED = re.compile(r"(u?int|fp|nf)([1-8]|16)(?:uz)?_(?:quanto|sdnq|torchao|bnb)")
# Optimizers there that are not those of the same name here.
OTHER_METHODS = {
    "muon": "the original's Muon also clips queries and keys, and decays by 0.1",
    "prodigy": "the original's Prodigy has options of its own, such as an end of its search; here it is the paper's",
}
PRECISIONS = {"int8": (1, 0.9), "float8": (1, 2.6), "nf4": (0.52, 9.2)}
"""Bytes per weight here, and the error of normal weights in percent (docs/lora.md)."""
LIMITS = {"max_grad_norm": 2.0, "aspect_bucket_alignment": 64.0}
"""Defaults of the original's that a family limits."""


@dataclass(frozen=True)
class OriginalConfig:
    """A file of the original as its program reads it. `given` has values by our names of settings."""

    given: Mapping[str, Any]
    has_fsdp: bool = False
    has_deepspeed: bool = False
    deepspeed_optimizes: bool = False
    """True if DeepSpeed's JSON has an optimizer, which replaces the file's."""

    def word(self, name: str) -> str:
        """Return a value as spellings are compared; that of a default here where the file has none."""
        value = self.given.get(name)
        return normalize_name(DEFAULTS.get(name, "") if value is None else value)

    def number(self, name: str, default: float) -> float:
        value = self.given.get(name)
        try:
            return default if value is None else float(value)
        except (TypeError, ValueError):
            return default  # whoever checks the value has the sentence

    def has(self, name: str, value: object) -> bool:
        # value + 1: a number that is not there counts as another one.
        return self.number(name, value + 1) == value if isinstance(value, float | int) else self.word(name) == value

    def asks_for(self, name: str) -> bool:
        return not is_off(self.given.get(name, ""))

    @property
    def family_name(self) -> str:
        name = self.word("model_family")
        return FAMILY_NAMES.get(name, name)

    @property
    def family(self) -> OriginalFamily:
        found = ORIGINAL_FAMILIES.get(self.family_name, OriginalFamily())
        if self.family_name == "auraflow" and self.word("model_flavour") == "pony":
            found = replace(found, limits={"tokenizer_max_length": 768})
        return replace(found, limits={}) if self.asks_for("i_know_what_i_am_doing") else found

    @property
    def optimizer(self) -> str:
        return self.word("optimizer") or DEFAULT_OPTIMIZER

    @property
    def scheduler(self) -> str:
        return self.word("lr_scheduler") or "constant_with_warmup"


def unread(config: OriginalConfig) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of what the original does not read, or replaces by a value of its own."""
    yield from unread_by_parts(config)
    if config.scheduler == "constant":
        yield "lr_warmup_steps", "lr_scheduler=constant does not warm up there"
    if config.scheduler == "linear":
        yield "lr_end", "lr_scheduler=linear ends at 0 there"
    if config.number("flow_schedule_shift", 3.0) > 0:
        yield "flow_schedule_auto_shift", "flow_schedule_shift takes precedence there"
    if clips_nothing(config):
        yield "max_grad_norm", "the original does not clip values with FSDP"
    if config.has_deepspeed:
        yield "grad_clip_method", "DeepSpeed clips by the norm"
    family = config.family
    for name, value in family.forces.items():
        if not config.has(name, value):
            yield name, f"the original always has {value} for {config.family_name}"
    for name, most in family.limits.items():
        if config.number(name, LIMITS.get(name, 0)) > most:
            yield name, f"the original has at most {most} for {config.family_name}"


def unread_by_parts(config: OriginalConfig) -> Iterator[tuple[str, str]]:
    if config.word("lora_type") == "lycoris":
        yield from ((name, "lycoris_config has it") for name in OF_LYCORIS)
    if config.deepspeed_optimizes:
        yield from ((name, "DeepSpeed has adam_beta1 and the like there") for name in OVERRIDES)
        return
    yield from ((name, "the original reads it with DeepSpeed's optimizers alone") for name in ADAM)
    betas = [name for name in OVERRIDES[:2] if config.asks_for(name)]
    if config.asks_for("optimizer_config"):
        yield from ((name, "the original reads optimizer_config in its place") for name in betas)
    elif len(betas) == 1:
        yield betas[0], "the original reads both optimizer_beta1 and optimizer_beta2, or none"


def own_values(config: OriginalConfig) -> Iterator[RawValue]:
    """Yield the values that the original trains with where its file says nothing, or is not read."""
    optimizer = ORIGINAL_OPTIMIZERS.get(config.optimizer)
    if optimizer and not config.deepspeed_optimizes:
        values = optimizer.settings
        yield from (RawValue(name, value, f"{config.optimizer} has it there") for name, value in values.items())
    family = {**config.family.limits, **config.family.forces}
    yield from (RawValue(name, value, f"{config.family_name} has it there") for name, value in family.items())
    if config.scheduler == "linear":
        yield RawValue("lr_end", 0.0, "lr_scheduler=linear ends there")
    if clips_nothing(config):
        yield RawValue("max_grad_norm", 0.0, "the original does not clip values with FSDP")
    if config.word("model_type") == "lora":
        targets = LORA_TARGETS.get(config.family_name, IMAGE_STREAM)
        yield RawValue("lora_target_modules", targets, "the layers that the original adapts")


def only_there(config: OriginalConfig) -> Iterator[tuple[str, object, str]]:
    """Yield (name, value, reason) of what the original would do with this file and this version does not."""
    is_own = config.family_name == "chroma" and config.asks_for("flow_use_uniform_schedule")  # the way of both programs
    if (reason := config.family.lost) and not is_own:
        yield "model_family", config.given.get("model_family"), reason
    if config.number("aspect_bucket_rounding", 2) != 2:
        reason = "buckets have the sizes of aspects with two decimals"
        yield "aspect_bucket_rounding", config.given["aspect_bucket_rounding"], reason
    if config.scheduler == "cosine":
        reason = "there lr_warmup_steps is its period; here it is half a cosine over the whole run, to lr_end"
        yield "lr_scheduler", config.given["lr_scheduler"], reason
    if reason := OTHER_METHODS.get(config.optimizer):
        yield "optimizer", config.given["optimizer"], reason
    if config.has_fsdp and config.optimizer.startswith(NOT_WITH_FSDP2):
        reason = "with FSDP2 the original trains with adamw_schedulefree in its place: name the one that you mean"
        yield "optimizer", config.given["optimizer"], reason
    is_distilled = config.word("model_flavour") in ASSISTED.get(config.family_name, ())
    is_named = any(map(config.asks_for, ("disable_assistant_lora", "assistant_lora_path")))
    if is_distilled and config.word("model_type") == "lora" and not is_named:
        reason = (
            "the original trains a LoRA of a distilled model on top of an assistant LoRA: name its file as "
            "assistant_lora_path"
        )
        yield "disable_assistant_lora", False, reason


def clips_nothing(config: OriginalConfig) -> bool:
    return config.has_fsdp and config.word("grad_clip_method") != "norm"


def translate(given: RawValue, config: OriginalConfig) -> tuple[RawValue, str]:
    """Return a value in the words of this version, and a note on the difference."""
    name, word = normalize_name(given.name.lstrip("-")), normalize_name(given.value)
    if name == "optimizer" and (found := ORIGINAL_OPTIMIZERS.get(word)):
        return replace(given, value=found.ours), found.note
    if name == "mixed_precision" and word in ("fp16", "float16"):
        return replace(given, value="bf16"), FLOAT16
    if name == "base_model_precision" and (found := QUANTIZED.fullmatch(word)):
        ours, note = nearest_precision(found[1], int(found[2]))
        return replace(given, value=ours), note
    if name == "model_family" and word in FAMILY_NAMES:
        return replace(given, value=FAMILY_NAMES[word]), ""
    if name == "flux_lora_target" and config.family_name == "flux" and word in FLUX_LORA_TARGETS:
        return replace(given, name="lora_target_modules", value=FLUX_LORA_TARGETS[word]), ""
    return given, ""


def nearest_precision(kind: str, bits: int) -> tuple[str, str]:
    """Return base_model_precision here for a kind of number there, and what differs."""
    if bits > 8:
        return "no_change", f"{bits} bits there; here in the precision of mixed_precision"
    ours = "nf4" if bits <= 4 else "float8" if kind == "fp" else "int8"
    held, error = PRECISIONS[ours]
    how = "NormalFloat4 with a scale for 64 weights" if ours == "nf4" else "a scale for each row"
    return ours, f"by torchao, {how}: bytes per weight {held}, there {bits / 8:g}; weights are {error} % off"


OF_LYCORIS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "flux_lora_target", "lokr_factor")
"""Settings that have no effect there beside lora_type=lycoris."""


def is_lycoris(given: RawValue, config: OriginalConfig) -> bool:
    return normalize_name(given.name.lstrip("-")) == "lora_type" and config.word("lora_type") == "lycoris"


def split_sequences(given: RawValue, config: OriginalConfig) -> Iterator[RawValue]:
    """Yield what splitting a sequence takes here: sharded weights, and as many processes as there are parts.

    The original splits without sharding, too, and its examples count their processes on the command line.
    """
    parts = config.number("context_parallel_size", 1)
    needed = {"fsdp_enable": True, "num_processes": int(parts) if 1 < parts < MOST_PARTS else 1}
    if needed["num_processes"] > 1 and not config.has_deepspeed:
        yield from (replace(given, name=name, value=each) for name, each in needed.items() if name not in config.given)


MOST_PARTS = 1024


def split_optimizer_config(given: RawValue) -> list[RawValue]:
    """Values of optimizer_config, `eps=1e-6,weight_decay=0`; those without a setting keep its name."""
    if normalize_name(given.name.lstrip("-")) != "optimizer_config" or not isinstance(given.value, str):
        return [given]
    pairs = [pair.strip().partition("=") for pair in given.value.split(",") if pair.strip()]
    return [
        replace(
            given, name=CONFIG_KEYS[key], value=value, written=f"{key}={value}", place=f"{given.place} optimizer_config"
        )
        if key in CONFIG_KEYS
        else replace(given, value=f"{key}={value}")
        for key, _, value in pairs
    ]
