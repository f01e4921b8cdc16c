"""TOML files of kohya's sd-scripts and of diffusion-pipe: what their names mean here.

A name maps to a setting, has no effect, or is lost: what decides there and has no place here. `config import` uses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from simpletuner.importing.original import Effect
from simpletuner.settings.foreign.recognition import flat
from simpletuner.settings.values.spelling import normalize_name


@dataclass
class TranslatedFile:
    """The meaning of a file here: (setting, name there, value there, value), and (name, value, reason) of the rest."""

    datasets: str = ""
    """The dataset file that it names."""
    settings: list[tuple[str, str, Any, Any]] = field(default_factory=list)
    optimizer: str = ""
    their_defaults: dict[str, Any] = field(default_factory=dict)
    """Values that the other trainer has by itself."""
    no_effect: list[tuple[str, Any, str]] = field(default_factory=list)
    unsupported: list[tuple[str, Any, str, Effect]] = field(default_factory=list)
    """Values without a place here, with what that changes."""


UNKNOWN = "it has no place here"
FASTER = "it changes time, memory or the names of files"
OPTIMIZERS = {
    "adamw": "adamw",
    "adamw8bit": "adamw",
    "pagedadamw8bit": "adamw",
    "adamw8bitkahan": "adamw",
    "adamw_optimi": "adamw",
    "lion": "lion",
    "lion8bit": "lion",
    "pagedlion8bit": "lion",
    "prodigy": "prodigy",
}
"""Optimizers of both trainers that differ from those here in the precision of their moments at most;
Prodigy's package also uses each estimate one step earlier than its paper."""


def optimizer_here(value: object) -> str:
    """Return the optimizer of the same method. Raises ValueError where there is none."""
    if (name := normalize_name(value)) not in OPTIMIZERS:
        raise ValueError("this version does not have this optimizer")
    return OPTIMIZERS[name]


def warmup_here(value: object) -> Any:
    """Count of steps, or a share. Raises ValueError for a share above all steps, as sd-scripts takes 5.0."""
    if isinstance(value, float) and value >= 1:
        raise ValueError(f"a number with a point is a share of all steps there, {value:.0%} of them: write {value:.0f}")
    return value


def nonzero(value: object) -> Any:
    """Return a value, or None for 0, with which a name is off there."""
    return value or None


def schedule_here(value: object) -> str:
    """Return a schedule that is the same in both. Raises ValueError for one that is not."""
    if (name := normalize_name(value)) not in ("constant", "constant_with_warmup", "linear", "cosine"):
        raise ValueError("this version does not have this schedule")
    return name


def only(*meant: object) -> Callable[[Any], None]:
    """Accept the values with which a name asks for what happens here anyway. Raises ValueError for others."""

    def check(value: object) -> None:
        if value not in meant:
            raise ValueError(UNKNOWN)

    return check


SAME = Callable[[Any], Any]
KOHYA_NAMES: dict[str, tuple[str, SAME | None]] = {
    "network_dim": ("lora_rank", None),
    "network_alpha": ("lora_alpha", None),
    "network_weights": ("lora_init", None),
    "pretrained_model_name_or_path": ("pretrained_model_name_or_path", None),
    "learning_rate": ("learning_rate", None),
    "unet_lr": ("learning_rate", None),
    "optimizer_type": ("optimizer", optimizer_here),
    "lr_scheduler": ("lr_scheduler", schedule_here),
    "lr_warmup_steps": ("lr_warmup_steps", warmup_here),
    "max_train_steps": ("max_train_steps", None),
    "max_train_epochs": ("num_train_epochs", None),
    "train_batch_size": ("train_batch_size", None),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", None),
    "gradient_checkpointing": ("gradient_checkpointing", None),
    "mixed_precision": ("mixed_precision", None),
    "max_grad_norm": ("max_grad_norm", None),
    "min_snr_gamma": ("snr_gamma", nonzero),
    "v_parameterization": ("prediction_type", lambda value: "v_prediction" if value else "epsilon"),
    "seed": ("seed", None),
    "output_dir": ("output_dir", None),
    "logging_dir": ("logging_dir", None),
    "save_every_n_steps": ("checkpoint_step_interval", None),
    "vae_batch_size": ("vae_batch_size", None),
    "caption_dropout_rate": ("caption_dropout_probability", None),
}
KOHYA_IDLE = (
    *("output_name", "save_model_as", "save_precision", "save_every_n_epochs", "save_last_n_steps", "log_with"),
    *("cache_latents", "cache_latents_to_disk", "cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk"),
    *("xformers", "sdpa", "mem_eff_attn", "lowram", "highvram", "max_data_loader_n_workers", "no_half_vae"),
    *("persistent_data_loader_workers", "sample_prompts", "sample_every_n_steps", "sample_every_n_epochs"),
    *("sample_sampler", "save_state", "log_prefix", "training_comment", "network_train_unet_only", "network_module"),
    *("prior_loss_weight", "console_log_level", "save_last_n_epochs", "metadata_title", "metadata_author"),
)
KOHYA_CHECKED: dict[str, Callable[[object], None]] = {
    "noise_offset": only(0, 0.0, None),
    "lr_scheduler_type": only("", None),
    "use_8bit_adam": only(True, False),
    "max_token_length": only(75, None),
    "loss_type": only("l2"),
    "text_encoder_lr": only(0, 0.0, [], None),
    "v2": only(True, False),
    "full_bf16": only(False),
    "full_fp16": only(False),
    "fp8_base": only(False),
    "network_dropout": only(0, 0.0, None),
    "network_args": only([], None),
    "multires_noise_iterations": only(0, None),
}
KOHYA_OWN = {
    "train_batch_size": 1,
    "max_grad_norm": 1.0,
    "caption_dropout_probability": 0.0,
    "lr_scheduler": "constant",
    "learning_rate": 2e-6,
    "mixed_precision": "no",
    # Whatever the base's scheduler says (train_network.py:275).
    "prediction_type": "epsilon",
}
"""Defaults of sd-scripts that are others here."""
ATTENTION_BLOCKS = "to_q,to_k,to_v,to_out.0,proj_in,proj_out,ff.net.0.proj,ff.net.2"
"""U-Net layers that `networks.lora` adapts: linear ones and 1 x 1 convolutions of attention blocks."""


def translate_kohya(values: Mapping[str, object]) -> TranslatedFile:
    given, found = flat(values), TranslatedFile()
    found.datasets = str(given.pop("dataset_config", ""))
    is_lora = given.get("network_module") == "networks.lora"
    name = str(given.get("pretrained_model_name_or_path", ""))
    found.their_defaults = {
        **KOHYA_OWN,
        # SDXL has a script of its own in sd-scripts, so a file does not say whether it is meant.
        "model_family": "sd2x" if given.get("v2") else "sdxl" if "xl" in name.lower() else "sd1x",
        "model_type": "lora" if is_lora else "full",
        # Defaults of sd-scripts: network_alpha of 1, and here max_train_steps of 1600.
        **({"lora_rank": 4, "lora_alpha": 1.0, "lora_target_modules": ATTENTION_BLOCKS} if is_lora else {}),
        **({} if "max_train_epochs" in given else {"max_train_steps": 1600, "num_train_epochs": 0}),
    }
    if found.their_defaults["model_family"] == "sd1x" and not SD1.search(name.lower()):
        reason = "taken for Stable Diffusion 1, since its name has no `xl`: otherwise set model_family"
        found.unsupported.append(("pretrained_model_name_or_path", name, reason, "look"))
    drop_silent(given, found)
    if "max_train_epochs" in given:
        given.pop("max_train_steps", None)  # which it outranks
    # sd-scripts takes it for the U-Net, where learning_rate is only a default.
    if "unet_lr" in given:
        given.pop("learning_rate", None)
    if not is_lora:
        module = given.get("network_module")
        found.unsupported.append(
            ("network_module", module, "only networks.lora, a LoRA of a U-Net, has the same layers here", "lost")
        )
    elif not given.get("network_train_unet_only"):
        found.unsupported.append(
            ("network_train_unet_only", False, "text encoders are not trained by this version", "lost")
        )
    if "train_data_dir" in given:
        reason = (
            "folders named N_PHRASE are not read: list them as [[datasets.subsets]] in a file that dataset_config names"
        )
        found.unsupported.append(("train_data_dir", given.pop("train_data_dir"), reason, "lost"))
    found.optimizer = normalize_name(given.get("optimizer_type", ""))
    for argument in given.pop("optimizer_args", None) or []:
        add_argument(str(argument), found)
    add_lion(given.get("optimizer_type"), found)
    sort_names(given, found, KOHYA_NAMES, KOHYA_IDLE, KOHYA_CHECKED)
    return found


SD1 = re.compile(r"v1|1[._-][45]|sd-?1|sd_?1")
"""Part of the names of Stable Diffusion 1."""


def drop_silent(given: dict[str, Any], found: TranslatedFile) -> None:
    """Take names out that ask for nothing: an alpha of 0 is the rank, SDXL skips those layers anyway, and
    silent datasets take the sizes of the training file."""
    if given.get("network_alpha") == 0:
        del given["network_alpha"]
        found.their_defaults["lora_alpha"] = None
    if given.get("use_8bit_adam") and "optimizer_type" not in given:
        found.their_defaults["optimizer"] = "adamw"
    skipped = given.pop("clip_skip", None)
    if skipped not in (1, None) and found.their_defaults["model_family"] != "sdxl":
        found.unsupported.append(("clip_skip", skipped, UNKNOWN, "lost"))
    if found.datasets:
        for name in ("resolution", "enable_bucket", "min_bucket_reso", "max_bucket_reso", "caption_extension"):
            given.pop(name, None)
        given.pop("bucket_reso_steps", None)


def add_argument(argument: str, found: TranslatedFile) -> None:
    """Add an argument of an optimizer: `weight_decay=0.1`, `eps=1e-8` or `betas=0.9,0.99`."""
    name, _, text = argument.partition("=")
    settings = {"weight_decay": ("adam_weight_decay",), "eps": ("adam_epsilon",), "betas": ("adam_beta1", "adam_beta2")}
    values = text.strip("()[] ").split(",")
    if argument.replace(" ", "") == "decouple=True" and "prodigy" in found.optimizer:  # as it is by default
        return
    if len(values) != len(settings.get(name, ())):
        found.unsupported.append(("optimizer_args", argument, UNKNOWN, "lost"))
        return
    for setting, value in zip(settings[name], values, strict=True):
        found.settings.append((setting, "optimizer_args", argument, value.strip()))


def add_lion(optimizer: object, found: TranslatedFile) -> None:
    if OPTIMIZERS.get(normalize_name(optimizer)) == "lion":
        found.their_defaults |= {"adam_beta1": 0.9, "adam_beta2": 0.99, "adam_weight_decay": 0.0}


PIPE_NAMES: dict[str, tuple[str, SAME | None]] = {
    "output_dir": ("output_dir", None),
    "epochs": ("num_train_epochs", None),
    "max_steps": ("max_train_steps", None),
    "micro_batch_size_per_gpu": ("train_batch_size", None),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", None),
    "gradient_clipping": ("max_grad_norm", None),
    "warmup_steps": ("lr_warmup_steps", None),
    "lr_scheduler": ("lr_scheduler", schedule_here),
    "activation_checkpointing": ("gradient_checkpointing", None),
    "save_every_n_steps": ("checkpoint_step_interval", None),
    "caching_batch_size": ("vae_batch_size", None),
    "model.diffusers_path": ("pretrained_model_name_or_path", None),
    "model.checkpoint_path": ("pretrained_model_name_or_path", None),
    "model.shift": ("flow_schedule_shift", None),
    "model.sigmoid_scale": ("flow_sigmoid_scale", None),
    "model.min_snr_gamma": ("snr_gamma", None),
    "adapter.rank": ("lora_rank", None),
    "adapter.alpha": ("lora_alpha", None),
    "adapter.dropout": ("lora_dropout", None),
    "adapter.init_from_existing": ("lora_init", None),
    "optimizer.type": ("optimizer", optimizer_here),
    "optimizer.lr": ("learning_rate", None),
    "optimizer.eps": ("adam_epsilon", None),
    "optimizer.weight_decay": ("adam_weight_decay", None),
}
PIPE_IDLE = (
    *("model.type", "adapter.type", "save_every_n_epochs", "checkpoint_every_n_minutes", "checkpoint_every_n_epochs"),
    *("save_dtype", "steps_per_print", "partition_method", "model.dtype", "adapter.dtype", "eval_every_n_epochs"),
    *("eval_before_first_step", "eval_micro_batch_size_per_gpu", "eval_gradient_accumulation_steps", "compile"),
    *("blocks_to_swap", "eval_every_n_steps", "eval_datasets", "video_clip_mode", "monitoring", "x_axis_examples"),
)
PIPE_CHECKED: dict[str, Callable[[object], None]] = {
    "pipeline_stages": only(1),
    "model.timestep_sample_method": only("logit_normal"),
    "model.v_pred": only(False),
    "model.flux_shift": only(False),
    "model.guidance": only(1, 1.0),
}
PIPE_FAMILIES = {
    **{name: name for name in ("sdxl", "flux", "flux2", "sd3", "chroma", "wan", "qwen_image", "z_image", "auraflow")},
    "lumina_2": "lumina2",
    "ltx_video": "ltxvideo",
}


def translate_pipe(values: Mapping[str, object]) -> TranslatedFile:
    given, found = dict(dotted(values)), TranslatedFile()
    found.datasets = str(given.pop("dataset", ""))
    kind, has_adapter = normalize_name(given.get("model.type", "")), "adapter" in values
    found.their_defaults = {
        "model_family": PIPE_FAMILIES.get(kind, kind),
        "model_type": "lora" if has_adapter else "full",
        "caption_dropout_probability": 0.0,
        "max_grad_norm": 1.0,
        "train_batch_size": 1,
        # Models whose patches span 32 px.
        "aspect_bucket_alignment": 32 if kind in ("ltx_video", "hunyuan_image", "ltx2") else 16,
        **({} if kind == "sdxl" else {"flow_schedule_shift": 1.0}),
    }
    add_lion(given.get("optimizer.type"), found)
    if normalize_name(given.get("optimizer.type")) == "adamw_optimi":  # torch-optimi 0.3.3
        found.their_defaults |= {"adam_beta1": 0.9, "adam_beta2": 0.99, "adam_epsilon": 1e-6, "adam_weight_decay": 0.01}
    add_length(given, found)
    if kind == "sdxl" and not has_adapter:
        reason = "without an adapter both text encoders are trained there, too, which this version does not do"
        found.unsupported.append(("model.type", "sdxl", reason, "lost"))
    betas = given.pop("optimizer.betas", None)
    if isinstance(betas, list) and len(betas) == 2:
        names = zip(("adam_beta1", "adam_beta2"), betas, strict=True)
        found.settings += [(name, "optimizer.betas", betas, beta) for name, beta in names]
    if has_adapter:
        found.unsupported.append(
            ("adapter", "lora", "it adapts all linear layers of the blocks: set lora_target_modules", "lost")
        )
    sort_names(given, found, PIPE_NAMES, PIPE_IDLE, PIPE_CHECKED)
    return found


def add_length(given: dict[str, Any], found: TranslatedFile) -> None:
    """Add how long a run of diffusion-pipe is, and what its cosine spans (train.py:851-862)."""
    steps, schedule = given.get("max_steps"), normalize_name(given.get("lr_scheduler", ""))
    if schedule == "cosine":
        found.their_defaults["lr_end"] = 1e-6
    if schedule == "cosine" and steps:
        reason = "there it spans all epochs, and max_steps ends the run before; here it would span max_train_steps"
        found.unsupported.append(("lr_scheduler", "cosine", reason, "lost"))
    elif schedule == "cosine" and given.get("warmup_steps"):
        reason = "it begins after the warm-up there, and ends as many steps short of its end"
        found.unsupported.append(("lr_scheduler", "cosine", reason, "look"))
    if steps and (epochs := given.pop("epochs", None)) is not None:
        reason = (
            f"there the run ends after {epochs} epochs if these are fewer than max_steps; here max_train_steps counts"
        )
        found.unsupported.append(("epochs", epochs, reason, "look"))


def dotted(values: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items())
        else:
            yield name, value


def sort_names(
    given: Mapping[str, object],
    found: TranslatedFile,
    names: Mapping[str, tuple[str, SAME | None]],
    idle: Iterable[str],
    checked: Mapping[str, Callable[[object], None]],
) -> None:
    """Add each value to `settings`, `no_effect` or `unsupported`."""
    for name, value in given.items():
        setting, convert = names.get(name, ("", checked.get(name)))
        try:
            value_here = convert(value) if convert else value
        except ValueError as error:
            found.unsupported.append((name, value, str(error), "lost"))
            continue
        if setting:
            found.settings.append((setting, name, value, value_here))
        elif name in idle or name in checked or name.partition(".")[0] in ("monitoring", "x_axis_examples"):
            found.no_effect.append((name, value, FASTER if name in idle else "asks for nothing special"))
        else:
            found.unsupported.append((name, value, UNKNOWN, "lost"))
