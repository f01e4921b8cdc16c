"""OneTrainer (23df3832): configurations of all versions and presets, with their samples."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.importing.folders import caches
from simpletuner.importing.foreign_trainer import (
    CACHES,
    FASTER,
    INNER_DROPOUT,
    ForeignTrainer,
    Translation,
    first_existing,
    key_table,
)
from simpletuner.importing.original import FLOAT16
from simpletuner.importing.trainers.onetrainer_concepts import entries, list_of_file
from simpletuner.settings.foreign.recognition import ONETRAINER

PARTS = (
    *("unet", "prior", "transformer", "unconditional_transformer", "text_encoder", "text_encoder_2", "text_encoder_3"),
    *("text_encoder_4", "vae", "effnet_encoder", "decoder", "decoder_text_encoder", "decoder_vqgan"),
)


@dataclass(frozen=True)
class Kind:
    """A `model_type` that is trained here."""

    family: str
    encoders: int = 1
    trains_encoders: bool = True
    """True if text encoders are trained where the file is silent."""
    bucket_px: int = 64
    size_px: int = 1024
    """Defaults of samples: edge, steps, guidance (SampleConfig.py)."""
    steps: int = 30
    guidance: float = 7.5
    predicts_noise: bool = False
    """True for a transformer that is no flow."""

    @property
    def part(self) -> str:
        return "unet" if self.family in ("sd1x", "sd2x", "sdxl") else "transformer"

    @property
    def is_flow(self) -> bool:
        return self.part == "transformer" and not self.predicts_noise


KINDS = {
    "stable_diffusion_15": Kind("sd1x", bucket_px=8, size_px=512),
    **dict.fromkeys(
        ("stable_diffusion_20", "stable_diffusion_20_base", "stable_diffusion_21", "stable_diffusion_21_base"),
        Kind("sd2x", bucket_px=8, size_px=768),
    ),
    "stable_diffusion_xl_10_base": Kind("sdxl", encoders=2),
    **dict.fromkeys(("stable_diffusion_3", "stable_diffusion_35"), Kind("sd3", encoders=3, steps=28, guidance=7.0)),
    "pixart_sigma": Kind("pixart_sigma", bucket_px=16, steps=25, guidance=4.5, predicts_noise=True),
    "pixart_alpha": Kind("auto", bucket_px=16, steps=25, guidance=4.5, predicts_noise=True),
    "flux_dev_1": Kind("flux", encoders=2, guidance=3.5),
    "flux_2": Kind("flux2", trains_encoders=False, guidance=4.0),
    "sana": Kind("sana", bucket_px=32, steps=20, guidance=4.5),
    "chroma_1": Kind("chroma", guidance=3.5),
    "qwen": Kind("qwen_image", steps=25, guidance=3.5),
    "krea_2": Kind("krea2", trains_encoders=False, steps=28, guidance=3.5),
    "z_image": Kind("z_image", trains_encoders=False, steps=28, guidance=4.0),
    "ernie": Kind("ernie", trains_encoders=False, steps=25, guidance=4.0),
    "anima": Kind("anima", trains_encoders=False, steps=25, guidance=4.0),
}
# Families whose q, k and v are one matrix in files of other programs, and then one in training.
FUSED = ("flux", "flux2", "chroma", "sd3", "pixart_sigma")

RUN = key_table(
    maps={
        "pretrained_model_name_or_path": "base_model_name",
        "output_dir": "workspace_dir",
        "num_train_epochs": "epochs",
        "train_batch_size": "batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "lora_init": "lora_model_name",
    },
    converted={},
    idle={
        FASTER: (
            "__version debug_mode debug_dir huggingface_cache_dir offline_mode tensorboard_expose "
            "tensorboard_always_on tensorboard_port continue_last_backup prevent_overwrites include_train_config "
            "gradient_reduce_precision fused_gradient_reduce async_gradient_reduce async_gradient_reduce_buffer "
            "output_dtype output_model_format output_model_destination async_offloading compile dataloader_threads "
            "temp_device fallback_train_dtype enable_autocast_cache attention_mechanism gradient_checkpointing "
            "enable_activation_offloading layer_offload_fraction enable_async_offloading weight_dtype "
            "embedding_weight_dtype lora_weight_dtype bundle_additional_embeddings lokr_vec_trick sample_skip_first "
            "sample_image_format sample_video_format sample_audio_format samples_to_tensorboard rolling_backup "
            "backup_before_save save_skip_first save_filename_prefix"
        ),
        CACHES: "clear_cache_before_training latent_caching only_cache",
        "used only with what is refused": (
            "learning_rate_cycles huber_delta preserve_embedding_norm embedding_learning_rate embeddings "
            "custom_learning_rate_scheduler scheduler_params lora_decompose_norm_epsilon lokr_dora_on_output "
            "noising_bias noising_weight validate_after validate_after_unit generalized_offset_noise frames"
        ),
        "layer_filter alone decides from the command line": "layer_filter_preset",
        "linear layers of the blocks are quantised here": (
            "quantization quantization.layer_filter quantization.layer_filter_preset quantization.layer_filter_regex "
            "quantization.cache_dir quantization.svd_rank"
        ),
    },
    look={
        "set num_processes and gpu_ids": "multi_gpu device_indexes",
        "the frozen base is rounded as torchao does": "quantization.svd_dtype",
    },
    lost={
        "it has no place here": (
            "additional_embeddings custom_conditioning_image force_circular_padding oft_block_share oft_scaled "
            "lokr_decompose_both lokr_use_tucker lokr_weight_decompose offset_noise_weight "
            "perturbation_noise_weight rescale_noise_scheduler_to_zero_terminal_snr min_noising_strength=0 "
            "max_noising_strength=1 mae_strength log_cosh_strength huber_strength text_encoder_layer_skip "
            "text_encoder_2_layer_skip text_encoder_3_layer_skip text_encoder_4_layer_skip"
        ),
    },
)


# Versions of the file: its migrations (TrainConfig.py:612). A preset has no version, and is current.

OLD_PART = re.compile(
    r"(train)_(unet|prior|text_encoder|text_encoder_2)(_epochs)?$"
    r"|(unet|prior|text_encoder|text_encoder_2|vae|effnet_encoder|decoder|decoder_text_encoder|decoder_vqgan)"
    r"_(learning_rate|weight_dtype|model_name)$"
)
RENAMED = {
    "save_after": "save_every",
    "save_after_unit": "save_every_unit",
    "lora_layers": "layer_filter",
    "lora_layer_preset": "layer_filter_preset",
    "lora_layers_regex": "layer_filter_regex",
}


BEFORE = "timestep_distribution before version 4"
"""Key for what a migration overwrites."""


def jobs(values: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield the configuration as the newest version has it."""
    given = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    for move in (move_optimizer, move_parts, move_weight, rename, copy_prior, copy_dtype):
        move(given)  # whatever the version: newer files have none of the old names
    version = given.get("__version")
    if isinstance(version, int) and version < 4:
        is_drawn = given.get("noising_weight", 0) not in (0, None)
        given[BEFORE] = given.get("timestep_distribution")
        given["timestep_distribution"] = "SIGMOID" if is_drawn else "UNIFORM"
    if isinstance(given.get("concepts"), list):
        given.pop("concept_file_name", None)
    yield given


def move_optimizer(given: dict[str, object]) -> None:
    moved = {}
    for name in [each for each in given if each.startswith("optimizer") and not isinstance(given[each], dict)]:
        moved["optimizer" if name == "optimizer" else name.removeprefix("optimizer_")] = given.pop(name)
    if moved:
        given["optimizer"] = moved


def move_parts(given: dict[str, Any]) -> None:
    for name in list(given):
        if found := OLD_PART.match(name):
            trained, part, epochs, other, key = found.groups()
            value, section = given.pop(name), part or other
            own = given[section] = given[section] if isinstance(given.get(section), dict) else {}
            if epochs:
                own |= {"stop_training_after": value, "stop_training_after_unit": "EPOCH"}
            else:
                own[key or trained] = value


def move_weight(given: dict[str, object]) -> None:
    if gamma := given.pop("min_snr_gamma", 0):
        given |= {"loss_weight_fn": "MIN_SNR_GAMMA", "loss_weight_strength": gamma}


def rename(given: dict[str, Any]) -> None:
    for old, new in RENAMED.items():
        if old in given:
            given[new] = given.pop(old)


def copy_prior(given: dict[str, Any]) -> None:
    if isinstance(given.get("prior"), dict) and "transformer" not in given:
        given["transformer"] = dict(given["prior"])


def copy_dtype(given: dict[str, object]) -> None:
    for part in PARTS:
        if isinstance(own := given.get(part), dict) and own.get("weight_dtype") == "NONE":
            own["weight_dtype"] = given.get("weight_dtype", "FLOAT_32")


def kind_of(run: Translation) -> Kind:
    """Raises SettingsError for a model, or a kind of training, that is not here."""
    name, method = run.word("model_type", "stable_diffusion_15"), run.word("training_method", "fine_tune")
    if name not in KINDS:
        raise SettingsError(
            f"{run.file} trains {name.upper()}, which this version has not", "`simpletuner models` lists all"
        )
    if method not in ("lora", "fine_tune"):
        raise SettingsError(f"{run.file} trains by {method.upper()}", "a LoRA or a whole model is trained here")
    return KINDS[name]


def model(run: Translation) -> None:
    """Family and precision; parts of the model that is trained, and those that it does not have."""
    kind, is_lora = kind_of(run), run.word("training_method") == "lora"
    run.defaults |= {
        "model_family": kind.family,
        "model_type": "lora" if is_lora else "full",
        "pretrained_model_name_or_path": "stable-diffusion-v1-5/stable-diffusion-v1-5" if kind.size_px == 512 else None,
        "output_dir": "workspace/run",
        "num_train_epochs": 100,
        "train_batch_size": 1,
        "aspect_bucket_alignment": kind.bucket_px,
    }
    run.drop(["model_type", "training_method"], "they are model_family and model_type here")
    dtype = run.word("train_dtype", "float_16")
    run.put("mixed_precision", "train_dtype", "no" if dtype in ("float_32", "tfloat_32") else "bf16")
    run.defaults |= {"allow_tf32": True} if dtype == "tfloat_32" else {}
    if dtype == "float_16":
        run.remark("train_dtype", FLOAT16, "FLOAT_16")
    elif dtype not in ("float_32", "tfloat_32", "bfloat_16"):
        run.remark("train_dtype", "it is not offered: it would be bf16", effect="lost")
    denoiser(run, kind, is_lora)
    encoders(run, kind)
    if run.get("vae.model_name"):
        run.look("vae.model_name", "the VAE comes from the base's folder")
    for part in PARTS:
        run.drop([part, *run.below(part)], "it is as here, or this model does not have this part")
    for section in ("cloud", "secrets", "embedding"):
        run.drop([section, *run.below(section)], "it is no part of this training")


PRECISIONS = {
    "float_8": ("float8", "no_change"),
    "float_w8a8": ("float8", "no_change"),
    "int_8": ("int8", "no_change"),
    "int_w8a8": ("int8", "int8"),
    "nfloat_4": ("nf4", "no_change"),
}


def denoiser(run: Translation, kind: Kind, is_lora: bool) -> None:
    part = kind.part
    if not run.is_on(f"{part}.train", True):
        run.lose(f"{part}.train", "the denoiser is always trained here")
    stop_after(run, part)
    if run.get(f"{part}.model_name"):
        run.lose(f"{part}.model_name", "parts of a model come from one pipeline folder: put this one into a copy of it")
    if kind.family == "flux":
        run.rename("flux_guidance_value", f"{part}.guidance_scale", 1.0)
        if run.is_on(f"{part}.attention_mask"):
            run.lose(f"{part}.attention_mask", "padded text is not masked here")
    run.rename("gradient_checkpointing", f"{part}.gradient_checkpointing")
    key, dtype = f"{part}.weight_dtype", run.word(f"{part}.weight_dtype", "float_32").removesuffix("_compressed")
    if not is_lora and dtype in ("bfloat_16", "float_16"):
        run.look(key, "the weights are of 16 bits there, and their updates are rounded; float32 here")
    elif dtype in PRECISIONS and is_lora:
        precision, compute = PRECISIONS[dtype]
        run.put("base_model_precision", key, precision)
        run.defaults |= {"base_model_compute": compute} if compute != "no_change" else {}
        if dtype == "float_w8a8":
            run.remark(key, "products of the frozen base are float8 there, and as mixed_precision here")
    elif dtype not in ("float_32", "tfloat_32", "bfloat_16", "float_16", "none"):
        run.lose(key, "weights of this format are not read or trained here")


def stop_after(run: Translation, part: str) -> None:
    unit, count = run.word(f"{part}.stop_training_after_unit", "never"), run.number(f"{part}.stop_training_after", 0)
    if count and unit != "never" and not (unit == "epoch" and count >= run.number("epochs", 100)):
        run.lose(f"{part}.stop_training_after", f"it is trained for {count:.0f} {unit}s there, here to the end")


def encoders(run: Translation, kind: Kind) -> None:
    """Text encoders, which are trained there where the file is silent (TrainConfig.py:1146)."""
    names = [f"text_encoder{'' if number == 1 else f'_{number}'}" for number in range(1, kind.encoders + 1)]
    for name in names:
        if kind.trains_encoders and run.is_on(f"{name}.train", True):
            run.lose(f"{name}.train", "text encoders are not trained by this version: it has `train: false` then", True)
        if run.get(f"{name}.model_name"):
            run.look(f"{name}.model_name", "text encoders come from the base's folder")
        if not run.is_on(f"{name}.include", True):
            run.lose(f"{name}.include", "all text encoders are used here")
    dropped = {name: run.number(f"{name}.dropout_probability", 0) for name in names}
    run.defaults["caption_dropout_probability"] = 0.0
    if len(names) == 1:
        run.rename("caption_dropout_probability", f"{names[0]}.dropout_probability")
    elif any(dropped.values()):
        key = next(f"{name}.dropout_probability" for name, share in dropped.items() if share)
        run.lose(key, "each text encoder drops captions by itself there, here all of them together")
    if kind.family == "flux":  # 77 tokens of T5 where the file is silent
        run.rename("tokenizer_max_length", "text_encoder_2_sequence_length", 77)
    run.drop(
        ["text_encoder_sequence_length", "text_encoder_2_sequence_length"], "lengths of prompts are the model's here"
    )


def network(run: Translation) -> None:
    """Kind, rank and layers of an adapter. Where the file is silent: rank 16, alpha 1, all layers."""
    keys = [
        *("peft_type", "lora_rank", "lora_alpha", "lora_decompose", "lora_decompose_output_axis", "oft_block_size"),
        *("lokr_dim", "lokr_decompose_factor", "lokr_full_matrix", "dropout_probability"),
    ]
    if run.defaults["model_type"] == "full":
        run.refuse(["layer_filter"], "all weights are trained here")
        run.drop([*keys, "layer_filter_regex"], "used only with an adapter")
        return
    adapter(run)
    is_fused = run.word("output_model_format").split("_")[0] in ("kohya", "comfy", "original")
    if is_fused and run.defaults["model_family"] in FUSED:
        run.remark("output_model_format", "q, k and v have one adapter there; here each has one of its own")
    layers(run)
    run.drop(keys, "used only with another kind of adapter")


def adapter(run: Translation) -> None:
    kind = run.word("peft_type", "lora")
    rank = {"oft_2": "oft_block_size", "lokr": "lokr_dim"}.get(kind, "lora_rank")
    run.rename("lora_rank", rank, 32 if kind == "oft_2" else 16)
    if kind != "oft_2":
        run.rename("lora_alpha", "lora_alpha", 1.0)
    if run.number("dropout_probability", 0):
        run.remark("dropout_probability", INNER_DROPOUT)
    run.rename("lora_dropout", "dropout_probability")
    if kind == "lora" and run.is_on("lora_decompose"):
        run.put("lora_type", "lora_decompose", "dora")
        if not run.is_on("lora_decompose_output_axis"):
            reason = "the lengths of columns are trained there unless lora_decompose_output_axis is on; here of rows"
            run.lose("lora_decompose_output_axis", reason, False)
    elif kind in ADAPTERS:
        run.put("lora_type", "peft_type", ADAPTERS[kind])
    else:
        run.lose("peft_type", "this version does not have this kind of adapter")
    if kind == "lokr":
        run.rename("lokr_factor", "lokr_decompose_factor")
        if run.is_on("lokr_full_matrix"):
            for setting in ("lora_rank", "lora_alpha"):
                run.put(setting, "lokr_full_matrix", 65_536)  # above any layer's, so that the factor is one matrix


ADAPTERS = {"lora": "lora", "loha": "loha", "lokr": "lokr", "oft_2": "oft"}
REGEXES = {
    "^(?=.*attention)(?!.*refiner).*": "layers.*attention*",
    "^(?=.*feed_forward)(?!.*refiner).*": "layers.*feed_forward*",
}
"""Filters of Z-Image's presets by our patterns."""
LINEAR = "to_q,to_k,to_v,to_out.0,ff.net.0.proj,ff.net.2,time_emb_proj,linear_1,linear_2"
"""Linear layers of U-Nets, of which DoRA and OFT here are."""


def layers(run: Translation) -> None:
    """Layers whose names hold a text of `layer_filter`; without it, a preset's name has no effect."""
    words = [word.strip() for word in str(run.get("layer_filter", "")).split(",")]
    is_linear_only = run.of("lora_type") in ("dora", "oft") and run.defaults["model_family"] in ("sd1x", "sd2x", "sdxl")
    if run.is_on("layer_filter_regex") and not all(word in REGEXES for word in words):
        run.lose("layer_filter", "regular expressions of layers are not read: write names as lora_target_modules")
    elif any(words):
        run.put("lora_target_modules", "layer_filter", ",".join(REGEXES.get(word, f"*{word}*") for word in words))
    elif is_linear_only:
        run.defaults["lora_target_modules"] = LINEAR
        run.lose("layer_filter", "convolutions are adapted, too, there; here this kind adapts linear layers", "")
    else:
        run.defaults["lora_target_modules"] = "*"
        if run.word("layer_filter_preset", "full") not in ("full", "custom", ""):
            run.look("layer_filter_preset", "it fills layer_filter in the window alone; all layers are adapted")
    run.drop(["layer_filter", "layer_filter_regex"], "all layers")


# Optimizers with betas, epsilon and weight decay (create.py:190).
OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adamw_8bit"), ("adamw", 0.9, 0.999, 1e-8, 0.01)),
    **dict.fromkeys(("adam", "adam_8bit"), ("adam", 0.9, 0.999, 1e-8, 0.0)),
    **dict.fromkeys(("adagrad", "adagrad_8bit"), ("adagrad", 0.9, 0.999, 1e-10, 0.0)),
    "lion": ("lion", 0.9, 0.99, 1e-8, 0.0),
    "lion_8bit": ("lion", 0.9, 0.999, 1e-8, 0.0),
    "prodigy": ("prodigy", 0.9, 0.999, 1e-8, 0.0),
    "schedule_free_adamw": ("adamw_schedulefree", 0.9, 0.999, 1e-8, 0.01),
}
NUMBERS = (
    *(("d_coef", 1, "prodigy"), ("d0", 1e-6, "prodigy"), ("slice_p", 1, "prodigy")),
    *(
        ("weight_lr_power", 2, "schedule_free_adamw"),
        ("r", 0, "schedule_free_adamw"),
        ("percentile_clipping", 100, "8bit"),
    ),
)
"""Numbers of an optimizer with their defaults, and the ends of the names of those that read them."""
# Keys of an optimizer that change its speed, or that these optimizers do not read.
HARMLESS = (
    "fused fused_back_pass foreach capturable differentiable adam_w_mode is_paged optim_bits min_8bit_size block_wise "
    "stochastic_rounding bias_correction use_triton log_every fsdp_in_use quant_block_size compile"
    " __version weight_decay_by_lr split_groups split_groups_mean factored factored_fp32 d_limiter rms_rescaling"
    " use_stableadamw use_schedulefree decouple"
)


def optimizer(run: Translation) -> None:
    name = run.word("optimizer.optimizer", "adamw")
    if found := OPTIMIZERS.get(name):
        ours, beta1, beta2, epsilon, decay = found
        run.put("optimizer", "optimizer.optimizer", ours)
        for setting, key, value in (
            ("adam_beta1", "beta1", beta1),
            ("adam_beta2", "beta2", beta2),
            ("adam_epsilon", "eps", epsilon),
            ("adam_weight_decay", "weight_decay", decay),
        ):
            run.rename(setting, f"optimizer.{key}", value)
        for key, neutral, reader in NUMBERS:
            if not name.endswith(reader) or run.number(f"optimizer.{key}", neutral) == neutral:
                run.drop([f"optimizer.{key}"], "asks for nothing special, or this optimizer does not read it")
        if name == "prodigy" and run.number("optimizer.weight_decay", 0) and not run.is_on("optimizer.decouple", True):
            run.lose("optimizer.decouple", "weight decay is a part of the gradient then")
    else:
        why = "steps scale with the weights here, and not there" if name == "adafactor" else "it is not in this version"
        run.lose("optimizer.optimizer", why)
        run.drop(run.below("optimizer"), "of this optimizer")
    if run.is_on("optimizer.fused_back_pass"):
        run.remark("optimizer.fused_back_pass", "each weight's gradient is clipped by itself there")
    run.drop([f"optimizer.{key}" for key in HARMLESS.split()], FASTER)
    run.refuse(run.below("optimizer"), "it has no place here")
    run.drop(["optimizer", "optimizer_defaults", *run.below("optimizer_defaults")], "of the window")
    rate(run)


def rate(run: Translation) -> None:
    """Rate with its scale: the root of the batch there (NamedParameterGroup.py:41); schedule and clipping."""
    key = f"{kind_of(run).part}.learning_rate"
    given = "learning_rate" if run.get(key) is None else key
    scale = math.sqrt(scale_of(run, "learning_rate_scaler"))
    value = run.number(given, 3e-6) * scale
    written = run.get(given, 3e-6) if scale == 1 else value
    run.put("learning_rate", given, written)
    run.drop(["learning_rate"], "the part's own rate goes before it")
    weight, norm = scale_of(run, "loss_scaler"), run.get("clip_grad_norm", 1.0)
    if "clip_grad_norm" in run.written and run.written["clip_grad_norm"] is None:
        norm = 0
    elif weight != 1:
        norm = run.number("clip_grad_norm", 1.0) / weight
    run.put("max_grad_norm", "clip_grad_norm", norm)
    if weight != 1:
        run.remark("loss_scaler", f"the loss is multiplied by {weight}, which counts for clipping and epsilon alone")
        run.put("adam_epsilon", "optimizer.eps", run.number("optimizer.eps", 1e-8) / weight)
    run.drop(["loss_scaler", "learning_rate_scaler"], "it scales nothing")
    accumulated = max(1.0, run.number("gradient_accumulation_steps", 1))
    steps = run.number("learning_rate_warmup_steps", 200)
    warmup = int(steps / accumulated) if steps > 1 else min(max(steps, 0.0), 0.999999)
    run.put("lr_warmup_steps", "learning_rate_warmup_steps", warmup)
    if steps > 1 and accumulated > 1:
        run.remark("learning_rate_warmup_steps", "it counts batches there, and steps here")
    is_free = run.of("optimizer") == "adamw_schedulefree"  # which has a constant rate, whatever is written
    name = "constant" if is_free else run.word("learning_rate_scheduler", "constant")
    if name == "cosine_with_hard_restarts" and run.number("learning_rate_cycles", 1) == 1:
        name = "cosine"
    if name in ("constant", "linear", "cosine"):
        run.put("lr_scheduler", "learning_rate_scheduler", "constant_with_warmup" if name == "constant" else name)
        if name != "constant":
            run.put("lr_end", "learning_rate_min_factor", value * run.number("learning_rate_min_factor", 0))
    else:
        ends = name == "cosine_with_restarts"
        why = "it ends at the full rate there" if ends else "this version does not have this schedule"
        run.lose("learning_rate_scheduler", why)
    run.drop(["learning_rate_min_factor"], "used only with linear and cosine")


def scale_of(run: Translation, key: str) -> int:
    """Batches that a scaler multiplies by."""
    batch, accumulated = (int(run.number(name, 1)) for name in ("batch_size", "gradient_accumulation_steps"))
    name = run.word(key, "none").removeprefix("global_")
    return {"batch": batch, "gradient_accumulation": accumulated, "both": batch * accumulated}.get(name, 1)


def objective(run: Translation) -> None:
    """Noise levels, weights of the loss, and the average of the weights."""
    kind, name = kind_of(run), run.word("timestep_distribution", "uniform")
    weight = run.number("noising_weight", 0)
    if run.word(BEFORE, name) != name:
        run.remark(BEFORE, f"files before version 4 are migrated to {name.upper()} there, and so it is here")
    run.values.pop(BEFORE, None)
    if name in ("sigmoid", "inverted_parabola", "heavy_tail") and weight == 0:
        name = "uniform"
    if kind.is_flow and name in ("uniform", "logit_normal"):
        is_even = name == "uniform"
        run.defaults |= {"flow_use_uniform_schedule": True} if is_even else {"flow_sigmoid_scale": weight + 1}
        if run.number("noising_bias", 0) and not is_even:
            run.lose("noising_bias", "the distribution of noise levels has its mean at one half here")
        shift_levels(run, kind)
    elif kind.is_flow or name != "uniform" or run.number("timestep_shift", 1) != 1:
        run.lose("timestep_distribution", "this version does not draw noise levels so", name.upper())
    if not kind.is_flow:
        forced = {"v_prediction": "force_v_prediction", "epsilon": "force_epsilon_prediction"}
        run.defaults["prediction_type"] = next((ours for ours, key in forced.items() if run.is_on(key)), None)
    if kind.part == "transformer" and kind.predicts_noise and run.number("vb_loss_strength", 1):
        run.lose("vb_loss_strength", "the variance is trained, too, there", 1)
    keys = ("force_v_prediction", "force_epsilon_prediction", "timestep_distribution", "timestep_shift")
    run.drop([*keys, "dynamic_timestep_shifting", "vb_loss_strength"], "it is what is trained here, too")
    weigh(run)
    average(run)


# Tokens of 16 x 16 px at which the shift's exponent is 1.15; it is 0.5 at 256 (the models' schedulers).
TOKENS = {"flux2": 4096, "z_image": 4096, "krea2": 6400}


def shift_levels(run: Translation, kind: Kind) -> None:
    """Shift of noise levels, of which that by size takes the place (BaseFluxSetup.py:220)."""
    edge = run.number("resolution", 512)
    if not run.is_on("dynamic_timestep_shifting"):
        run.defaults["flow_schedule_shift"] = run.number("timestep_shift", 1)
    elif kind.family in ("flux", "qwen_image"):
        run.defaults["flow_schedule_auto_shift"] = True
    elif kind.family in TOKENS and (edge > 0 and "," not in str(run.get("resolution", 512))):
        tokens = (edge / 16) ** 2
        exponent = 0.5 + 0.65 * (tokens - 256) / (TOKENS[kind.family] - 256)
        run.put("flow_schedule_shift", "dynamic_timestep_shifting", round(math.exp(min(exponent, 3)), 4))
        run.remark("dynamic_timestep_shifting", f"by the size of each image there; here that of {edge:.0f} px")
    elif kind.family in ("anima", "ernie", "auto", *TOKENS):
        run.lose("dynamic_timestep_shifting", "the shift by size of this model is not computed here")


def weigh(run: Translation) -> None:
    if run.is_on("masked_training"):
        if (rest := run.number("unmasked_weight", 0.1)) != 0:
            run.lose("unmasked_weight", f"what is outside of a mask counts {rest:g} there, and nothing here", rest)
        elif not run.is_on("normalize_masked_area_loss"):
            run.remark("masked_training", "the loss is over the mask alone here, and over the whole image there")
        if run.number("masked_prior_preservation_weight", 0):
            run.lose("masked_prior_preservation_weight", "it has no place here")
    run.drop(["masked_training", *OF_MASKS], "masks are a dataset of their own here, or there are none")
    if run.word("loss_weight_fn", "constant") == "min_snr_gamma":
        run.rename("snr_gamma", "loss_weight_strength", 5.0)
    elif run.word("loss_weight_fn", "constant") != "constant":
        run.lose("loss_weight_fn", "the loss is weighed by Min-SNR or not at all here")
    if run.number("mse_strength", 1) != 1:
        run.lose("mse_strength", "the loss is the mean squared error here")
    run.drop(["loss_weight_fn", "loss_weight_strength", "mse_strength"], "the loss is the mean squared error")


OF_MASKS = ("unmasked_weight", "unmasked_probability", "normalize_masked_area_loss", "masked_prior_preservation_weight")


def average(run: Translation) -> None:
    mode = run.word("ema", "off")
    if mode in ("gpu", "cpu"):
        run.put("use_ema", "ema", True)
        run.defaults["ema_device"] = "accelerator" if mode == "gpu" else "cpu"
        run.rename("ema_decay", "ema_decay", 0.999)
        run.rename("ema_update_interval", "ema_update_step_interval", 5)
        run.defaults["ema_validation"] = "comparison" if run.is_on("non_ema_sampling", True) else "ema_only"
        run.remark("ema", "the decay of a young average counts steps there, and updates here")
    elif mode != "off":
        run.lose("ema", "it is OFF, CPU or GPU")
    run.drop(["ema", "ema_decay", "ema_update_step_interval", "non_ema_sampling"], "no average")


def saving(run: Translation) -> None:
    """Checkpoints, validation and trackers; what counts in minutes or epochs there is named."""
    for key, setting in (("sample_after", "validation_step_interval"), ("save_every", "checkpoint_step_interval")):
        unit = run.word(f"{key}_unit", "minute" if key == "sample_after" else "never")
        if unit == "step":
            run.rename(setting, key)
        elif unit not in ("never", "none") and key in run.written:
            run.look(key, f"it counts in {unit}s there: set {setting}")
        run.drop([key, f"{key}_unit"], f"it is {setting} here")
    if run.word("backup_after_unit", "minute") == "step" and run.of("checkpoint_step_interval") is None:
        run.rename("checkpoint_step_interval", "backup_after")
    if run.is_on("rolling_backup"):
        run.rename("checkpoints_total_limit", "rolling_backup_count")
    run.drop(["backup_after", "backup_after_unit", "rolling_backup_count"], "checkpoints are written anyway")
    if run.is_on("tensorboard"):
        run.put("report_to", "tensorboard", "tensorboard")
    run.drop(["tensorboard"], "no tracker")
    if run.word("train_device") == "cpu":
        run.put("use_cpu", "train_device", True)
    caches(run, "cache_dir")
    run.drop(["train_device"], "a GPU is used if there is one")


OF_SAMPLES = {"negative_prompt": "negative_prompt", "diffusion_steps": "num_inference_steps", "cfg_scale": "guidance"}


def samples(run: Translation) -> None:
    """Prompts of the configuration, or of the file that it names, in its sizes and seeds."""
    listed, kind = run.get("samples"), kind_of(run)
    if not isinstance(listed, list):
        name = run.get("sample_definition_file_name", "training_samples/samples.json")
        listed = list_of_file(run, name)
        if listed is None and "sample_definition_file_name" in run.written:
            run.look("sample_definition_file_name", "it is not here: write its prompts as validation_prompt")
    for given in listed or []:
        if isinstance(given, Mapping) and given.get("enabled", True) and isinstance(given.get("prompt"), str):
            run.prompts.append(sample_of(run, given, kind))
    run.drop(["samples", "sample_definition_file_name"], "its prompts are those of validation_prompt_file")
    if run.prompts:
        run.defaults |= {"validation_num_inference_steps": kind.steps, "validation_guidance": kind.guidance}
    data(run)


def sample_of(run: Translation, given: Mapping[str, object], kind: Kind) -> dict[str, object]:
    own = run.within(given)
    width, height = (int(own.number(name, kind.size_px)) for name in ("width", "height"))
    prompt = {"prompt": given["prompt"], "resolution": f"{width}x{height}"}
    prompt |= {} if own.is_on("random_seed") else {"seed": int(own.number("seed", 42))}
    return prompt | {ours: given[name] for name, ours in OF_SAMPLES.items() if given.get(name) not in (None, "")}


def data(run: Translation) -> None:
    """Name what holds for all concepts: incomplete batches, held-out images."""
    if run.number("batch_size", 1) > 1:
        run.remark(
            "batch_size", "images that do not fill a batch are left out of an epoch there, and begin the next here"
        )
    silent = "training_concepts/concepts.json"
    if not run.get("concept_file_name") and not run.get("concepts"):
        if first_existing(silent, (Path(), run.file.parent)):
            run.written["concept_file_name"] = silent
        else:
            run.remark("concept_file_name", "it names no concepts: set instance_data_dir to your images", "")
            run.defaults |= {"instance_data_dir": "images", "caption_lines": "alternatives"}
            run.rename("resolution", "resolution", 512)
    run.drop(["validation"], "concepts of type VALIDATION are held out, if it is on")
    run.drop(["resolution", "aspect_ratio_bucketing"], "it is of the datasets")


ONE_TRAINER = ForeignTrainer(
    ONETRAINER,
    RUN,
    (model, network, optimizer, objective, saving, samples),
    entries,
    dataset_file="concept_file_name",
    folders=lambda run: {"concepts": run.get("concepts")} if isinstance(run.get("concepts"), list) else None,
    jobs=jobs,
)
