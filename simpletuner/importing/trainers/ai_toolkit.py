"""ai-toolkit (27a03a91): jobs in YAML or JSON, whose processes are runs with their datasets and samples."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.importing.folders import FLAGS, prompt_of_line
from simpletuner.importing.foreign_trainer import (
    CACHES,
    FASTER,
    INNER_DROPOUT,
    LION,
    ForeignTrainer,
    Translation,
    first_existing,
    key_table,
    nonzero,
    two_betas,
)
from simpletuner.importing.lycoris import FULL_RANK
from simpletuner.importing.original import FLOAT16
from simpletuner.importing.trainers.ai_toolkit_datasets import entries
from simpletuner.importing.trainers.ai_toolkit_models import ARCHS, BY_SIZE, PLACES, UNET, Arch, arch_of, name_of_arch
from simpletuner.settings.foreign.key_table import Maps
from simpletuner.settings.foreign.original_names import is_off
from simpletuner.settings.foreign.recognition import AITOOLKIT
from simpletuner.settings.values.spelling import normalize_name

# Types of a process that trains a model; the others make sliders, captions, images or embeddings.
TRAINERS = ("sd_trainer", "ui_trainer", "diffusion_trainer")
STAGES = ("train_high_noise", "train_low_noise")
SAMPLED = "its validation is another one here"

RUN = key_table(
    maps={
        "seed": "training_seed",
        "pretrained_model_name_or_path": "model.name_or_path",
        "lora_init": "network.pretrained_lora_path",
        "train_batch_size": "train.batch_size",
        "checkpoint_step_interval": "save.save_every",
        "checkpoints_total_limit": "save.max_step_saves_to_keep",
        "push_to_hub": "save.push_to_hub",
        "hub_model_id": "save.hf_repo_id",
        "model_card_private": "save.hf_private",
        "tracker_project_name": "logging.project_name",
        "tracker_run_name": "logging.run_name",
        "gradient_checkpointing": "train.gradient_checkpointing",
    },
    converted={"train.min_snr_gamma": Maps("snr_gamma", nonzero)},
    idle={
        FASTER: (
            "type device name performance_log_every sqlite_db_path torch_profiler save.dtype save.save_format "
            "train.xformers train.sdp train.attention_backend train.unload_text_encoder train.show_turbo_outputs "
            "train.max_loss_debug logging.log_every logging.verbose logging.use_ui_logger model.dtype model.low_vram "
            "model.vae_device model.vae_dtype model.te_device model.te_dtype model.auto_memory model.layer_offloading "
            "model.layer_offloading_transformer_percent model.layer_offloading_text_encoder_percent "
            "model.split_model_over_gpus model.split_model_other_module_param_count_scale model.compile "
            "model.block_compile model.compile_mode model.compile_fullgraph model.compile_dynamic "
            "model.cache_size_limit model.latent_space_version network.old_lokr_format network.split_multistage_loras "
            "network.layer_offloading train.skip_first_sample train.force_first_sample train.disable_sampling "
            "train.switch_boundary_every"
        ),
        CACHES: "train.cache_text_embeddings",
        "it is said by model_family": (
            "model.arch model.is_v2 model.is_v3 model.is_xl model.is_flux model.is_lumina2 model.is_pixart_sigma "
            "model.is_auraflow model.is_pixart model.is_ssd model.is_vega model.is_v_pred"
        ),
        "text embeddings are computed once here, without rounding the encoder's weights": (
            "model.quantize_te model.qtype_te model.text_encoder_bits"
        ),
        "the rate is train.lr there, too": "train.unet_lr train.refiner_lr train.embedding_lr train.adapter_lr",
        "used only with what is refused": (
            "train.text_encoder_lr train.train_refiner model.refiner_start_at train.reg_weight "
            "train.diff_output_preservation_multiplier train.diff_output_preservation_class "
            "train.blank_prompt_preservation_multiplier train.inverted_mask_prior_multiplier train.cfg_rescale "
            "train.max_cfg_scale train.guidance_loss_target train.guidance_loss_schedule train.unconditional_prompt "
            "train.differential_guidance_scale train.batch_noise_correction_scale train.match_adapter_chance "
            "train.signal_amplification_strength train.signal_correction_noise_scale train.next_sample_timesteps "
            "train.correct_pred_norm_multiplier train.target_norm_std_value train.paramiter_swapping_factor "
            "train.latent_feature_loss_weight train.diffusion_feature_extractor_weight train.adapter_assist_type "
            "train.max_negative_prompts train.merge_network_on_save_strength lorm_extract_mode "
            "lorm_extract_mode_param train.do_guidance_loss_cfg_zero train.t0_velocity_equiv_weight "
            "train.do_fft_velocity_equiv_weight train.short_and_long_captions_encoder_split "
            "train.audio_loss_multiplier network.lorm"
        ),
        SAMPLED: (
            "sample.sampler sample.sample_start_step sample.format sample.ext sample.guidance_rescale "
            "sample.adapter_conditioning_scale sample.refiner_start_at sample.extra_values sample.do_cfg_norm "
            "sample.network_multiplier sample.fps"
        ),
    },
    look={
        "the parts of a model come from one pipeline folder: put this one there": (
            "model.vae_path model.te_name_or_path model.extras_name_or_path"
        ),
        "validation samples with what is trained": "model.inference_lora_path",
        "the LoRA is exported by itself: merge it later": "train.merge_network_on_save",
        "its own state is not read: a LoRA that it has saved goes on as lora_init": "train.start_step",
        "images are held out by eval_split": "train.validation_config",
    },
    lost={
        "it has no place here": (
            "do_lorm model.unet_path model.refiner_name_or_path "
            "model.unconditional_lora_path model.experimental_xl model.attn_masking model.in_context "
            "model.unet_sample_size model.only_if_contains model.ignore_if_contains "
            "model.accuracy_recovery_adapter network.all_layers train.adaptive_scaling_factor "
            "train.min_denoising_steps=0 train.max_denoising_steps=999 train.num_train_timesteps=1000 "
            "train.train_turbo train.learnable_snr_gos train.noise_offset train.weight_jitter train.free_u "
            "train.adapter_assist_name_or_path train.noise_multiplier=1 train.target_noise_multiplier=1 "
            "train.random_noise_multiplier train.do_signal_correction_noise train.do_batch_noise_correction "
            "train.do_signal_amplification train.random_noise_shift train.img_multiplier=1 "
            "train.noisy_latent_multiplier=1 train.latent_multiplier=1 train.negative_prompt "
            "train.prompt_dropout_prob train.match_noise_norm train.short_and_long_captions "
            "train.single_item_batching train.match_adapter_assist train.loss_target=noise train.inverted_mask_prior "
            "train.diff_output_preservation train.blank_prompt_preservation train.standardize_images "
            "train.standardize_latents train.dynamic_noise_offset train.do_cfg train.do_random_cfg train.cfg_scale=1 "
            "train.correct_pred_norm train.loss_type=mse train.t0_loss_target train.do_fft_loss train.pred_scaler=1 "
            "train.prompt_saturation_chance train.do_prior_divergence train.target_norm_std "
            "train.do_paramiter_swapping train.latent_feature_extractor_path train.diffusion_feature_extractor_path "
            "train.optimal_noise_pairing_samples=1 train.force_consistent_noise train.blended_blur_noise "
            "train.do_guidance_loss train.do_differential_guidance train.do_blank_stabilization train.max_loss"
        ),
        "text encoders are not trained by this version": "train.train_text_encoder",
        "it weighs by gamma/SNR there, without the minimum: min_snr_gamma is Min-SNR": "train.snr_gamma",
    },
)


def jobs(values: Mapping[str, Any]) -> Iterator[Mapping[str, object]]:
    """Yield the processes of a job; one of Wan 2.2 that trains both denoisers is a run of each.

    Raises SettingsError for a job that trains no model.
    """
    name = normalize_name(values.get("job") or "extension")
    if name not in ("extension", "train"):
        raise SettingsError(f"a job of type `{name}` trains no model", TRAINED)
    config = values.get("config")
    if not isinstance(config, Mapping):
        raise SettingsError("config: use a table with name and process", TRAINED)
    listed = config.get("process")
    if not isinstance(listed, list) or not listed:
        raise SettingsError("process: use a list of processes", TRAINED)
    for process in listed:
        if not isinstance(process, Mapping):
            raise SettingsError(f"process: {process!r:.40} is no table of settings", TRAINED)
        if (kind := normalize_name(process.get("type"))) not in TRAINERS:
            raise SettingsError(f"a process of type `{kind}` is not translated", TRAINED)
        given = {"name": config.get("name"), **process}
        yield from stages(with_name(given, str(config.get("name") or "output")))


TRAINED = f"those of type {', '.join(TRAINERS)} are"


VARIABLE = re.compile(r"\$\{(\w+)\}")


def with_name(value: Any, name: str) -> Any:
    """Return a value with the job's name in place of `[name]`, and variables of the environment as here."""
    if isinstance(value, Mapping):
        return {key: with_name(each, name) for key, each in value.items()}
    if isinstance(value, list):
        return [with_name(each, name) for each in value]
    return VARIABLE.sub(r"{env:\1}", value.replace("[name]", name)) if isinstance(value, str) else value


def stages(given: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a process for each denoiser that it trains: of two, the steps take turns."""
    model = given.get("model")
    arch = ARCHS.get(name_of_arch(model.get("arch"))) if isinstance(model, Mapping) else None
    options = model.get("model_kwargs") if isinstance(model, Mapping) else None
    own = dict(options) if isinstance(options, Mapping) else {}
    if arch is None or not arch.flavours or not all(not is_off(own.get(stage, True)) for stage in STAGES):
        yield given
        return
    for stage in STAGES:
        only = {each: each == stage for each in STAGES}
        yield {**given, "model": {**model, "model_kwargs": {**own, **only, "of_two": True}}}  # type: ignore[dict-item]


def model(run: Translation) -> None:
    """Family, denoiser, precision and quantisation of the base."""
    name = arch_of(run)
    if not run.get("model.name_or_path"):
        raise SettingsError(f"{run.file}: model has no name_or_path, which says what is trained", "name the base there")
    if (arch := ARCHS.get(name)) is None:
        raise SettingsError(f"{run.file} trains `{name}`, which this version has not", "`simpletuner models` lists all")
    run.defaults |= {
        "model_family": arch.family,
        "model_type": "lora" if run.below("network") or run.get("network") == {} else "full",
        "aspect_bucket_alignment": arch.bucket_px,
        "caption_dropout_probability": 0.0,
        "allow_dataset_oversubscription": True,  # of small buckets, by their own images (dataloader_mixins.py:199)
        "train_batch_size": 1,
        "checkpoint_step_interval": 1000,
        "checkpoints_total_limit": 5,
        "flux_guidance_value": 1.0 if arch.family == "flux" else None,
    }
    folder, job = run.get("training_folder"), run.get("name") or "output"
    run.put("output_dir", "training_folder", f"{str(folder or 'output').rstrip('/')}/{job}")
    if arch.family == "flux":
        run.rename("flux_guidance_value", "train.cfg_scale")
    if run.get("log_dir"):
        run.rename("logging_dir", "log_dir")
        run.defaults["report_to"] = "tensorboard"
    elif run.is_on("logging.use_wandb"):
        run.put("report_to", "logging.use_wandb", "wandb")
    run.drop(["logging.use_wandb"], "no tracker")
    precision(run)
    denoiser(run, arch)
    guidance(run, name)
    for section in SECTIONS:
        if keys := [key for key in run.below(section) if not is_off(run.values[key])]:
            run.remark(section, "it has no place here", ", ".join(key.rpartition(".")[2] for key in keys), "lost")
        run.drop([section, *run.below(section)], "it has no place here")


SECTIONS = (
    *("adapter", "embedding", "decorator", "slider", "guidance", "first_sample"),
    *("model.model_kwargs", "model.model_paths"),
)


def precision(run: Translation) -> None:
    given = run.word("train.dtype", "fp32")
    is_whole = run.defaults["model_type"] == "full"
    run.put("mixed_precision", "train.dtype", "no" if given in ("fp32", "float32", "float") else "bf16")
    if given in ("fp16", "float16"):
        run.remark("train.dtype", FLOAT16)
    elif given not in ("fp32", "float32", "float", "bf16", "bfloat16"):
        run.remark("train.dtype", f"{given} is not offered: it would be bf16", effect="lost")
    elif is_whole and given.startswith("bf"):
        reason = "the weights are bf16 there, and their updates are rounded; float32 here unless state_layout=bf16"
        run.remark("train.dtype", reason)
    kind = run.word("model.qtype", "qfloat8")
    if run.is_on("model.quantize") and kind and not is_whole:
        quantisation(run, kind)
    keys = ["model.quantize", "model.qtype", "model.quantize_kwargs", *run.below("model.quantize_kwargs")]
    run.drop(keys, "it is base_model_precision here, of the blocks alone")


EIGHT_BITS = {"qfloat8": "float8", "float8": "float8", "fp8": "float8", "qint8": "int8", "int8": "int8"}


def quantisation(run: Translation, kind: str) -> None:
    """Precision of the frozen base: the same format, or the next one that is not coarser by its bits."""
    kind, _, recovery = kind.partition("|")
    bits = re.search(r"\d+", kind)
    is_small = kind.endswith("bitnet") or (bits is not None and int(bits[0]) <= 4) or kind == "nvfp4"
    if kind not in EIGHT_BITS and bits is None and not is_small:
        run.lose("model.qtype", "this version does not have this format")
        return
    value = EIGHT_BITS.get(kind, "nf4" if is_small else "int8")
    key = "model.qtype" if "model.qtype" in run.written else "model.quantize"
    if kind not in EIGHT_BITS:
        also = ", and the adapter that makes up for it is left out" if recovery else ""
        run.remark("model.qtype", f"the frozen base is rounded otherwise there{also}; here {value}")
    run.put("base_model_precision", key, value)


def denoiser(run: Translation, arch: Arch) -> None:
    """Take the stage of Wan 2.2, and the LoRAs that are merged into the base."""
    is_high = run.is_on(f"model.model_kwargs.{STAGES[0]}", True)
    if arch.flavours:
        run.defaults["model_flavour"] = arch.flavours[0 if is_high else 1]
        if run.is_on("model.model_kwargs.of_two"):
            what = "high" if is_high else "low"
            reason = f"both denoisers take turns there: this is the run of {what} noise, of half of the steps"
            run.remark("model.arch", reason)
            run.put("output_dir", "training_folder", f"{run.of('output_dir')}-{what}-noise")
        run.drop([f"model.model_kwargs.{each}" for each in (*STAGES, "of_two")], "it is model_flavour here")
    paths = [path for key in ("model.assistant_lora_path", "model.lora_path") if (path := run.get(key))]
    if all(isinstance(path, str) and first_existing(path, (Path(), run.file.parent)) for path in paths):
        run.defaults["assistant_lora"] = paths or None
        run.drop(["model.assistant_lora_path", "model.lora_path"], "it is assistant_lora here")
    else:
        reason = "it is no file here: download it, and name the file with assistant_lora"
        run.refuse(["model.assistant_lora_path", "model.lora_path"], reason)


def guidance(run: Translation, name: str) -> None:
    """FLUX's embedding of guidance, which may be left out there."""
    keys = ("train.bypass_guidance_embedding", "model.use_flux_cfg")
    has_embedding = name in ("flux", "flux_kontext", "flex1") and "schnell" not in run.word("model.name_or_path")
    if has_embedding and any(map(run.is_on, keys)):
        key = next(key for key in keys if run.is_on(key))
        run.lose(key, "the guidance embedding is left out of the model there; here it is given flux_guidance_value")
    run.drop(keys, "this model has no guidance embedding, or keeps it")
    for key, reason in (
        ("train.train_unet", "the denoiser is always trained here"),
        ("model.use_text_encoder_1", "all text encoders are used"),
        ("model.use_text_encoder_2", "all text encoders are used"),
    ):
        run.drop([key], reason) if run.is_on(key, True) else run.lose(key, reason)


def network(run: Translation) -> None:
    """Kind, layers, rank and scale: transformers always have scale 1, U-Nets alpha 1 where silent."""
    if run.defaults["model_type"] == "full":
        return
    name = arch_of(run)
    arch, kind = ARCHS[name], run.word("network.type", "lora")
    if run.number("network.dropout", 0):
        run.remark("network.dropout", INNER_DROPOUT)
    run.rename("lora_dropout", "network.dropout")
    run.drop(["network"], "an adapter with its defaults")
    rank = "network.rank" if run.get("network.rank") is not None else "network.linear"
    run.rename("lora_rank", rank, 4)
    kinds = {"lora": "lora", "locon": "lora", "dora": "dora", "lokr": "lokr"}
    if kind in kinds:
        run.put("lora_type", "network.type", kinds[kind])
    else:
        run.lose("network.type", "this version does not have this kind of network")
    alpha = "network.linear_alpha" if run.get("network.linear_alpha") is not None else "network.alpha"
    if not arch.is_flow or (kind == "lokr" and run.is_on("network.old_lokr_format")):
        run.rename("lora_alpha", alpha, 1.0)
    run.drop([rank, "network.linear", "network.linear_alpha", "network.alpha"], "the scale of a transformer is 1 there")
    if kind == "lokr" and run.is_on("network.lokr_full_rank", True):
        run.taken.pop("lora_rank", None)
        run.defaults |= {"lora_rank": FULL_RANK, "lora_alpha": FULL_RANK}
        run.look(
            "network.lokr_full_rank", "both factors are whole there, whatever the rank, and so they are here", True
        )
    if kind == "lokr":
        run.rename("lokr_factor", "network.lokr_factor")
    run.drop(["network.lokr_full_rank", "network.lokr_factor"], "used only with lokr")
    layers(run, arch)


SAME_NAMES = "its layers have other names there"


def layers(run: Translation, arch: Arch) -> None:
    """Layers by our names: of the blocks, or all, or those that contain one of several texts."""
    chosen, words = arch.layers, run.get("network.network_kwargs.only_if_contains")
    if arch.own_layout:
        run.remark("network.type", "q, k and v are one matrix there; here each has a LoRA of its own", "lora")
    if not run.is_on("network.transformer_only", True) and arch.is_flow:
        chosen = "*"
        run.remark("network.transformer_only", "all linear layers are adapted, those outside of blocks, too")
    run.values.pop("network.transformer_only", None)
    if isinstance(words, list) and words and all(isinstance(word, str) for word in words) and not arch.own_layout:
        chosen = ",".join(dict.fromkeys(pattern for word in words for pattern in patterns(word, chosen)))
        run.put("lora_target_modules", "network.network_kwargs.only_if_contains", chosen)
    elif words:
        run.lose("network.network_kwargs.only_if_contains", SAME_NAMES)
    else:
        run.defaults["lora_target_modules"] = convolutions(run, chosen) if arch.layers == UNET else chosen
    run.refuse(run.below("network.network_kwargs"), "layers are chosen by lora_target_modules alone")
    run.drop(["network.conv", "network.conv_alpha"], "it is of convolutions, of which this model adapts none")


def patterns(word: str, chosen: str) -> Iterator[str]:
    """Patterns of the layers in blocks whose whole name, after `transformer.`, holds a text."""
    inner = word.removeprefix("transformer.")
    blocks = [block.removesuffix("*") for block in chosen.split(",") if block.endswith(".*")]
    if chosen == UNET or chosen == "*":
        yield f"*{inner}*"
    elif any(inner.startswith(block) for block in blocks):
        yield f"{inner}*"
    else:
        yield from (f"{block}*{inner}*" for block in blocks)


def convolutions(run: Translation, chosen: str) -> str:
    """Layers of a U-Net, its 3 x 3 convolutions among them where `conv` is set."""
    rank, alpha = run.get("network.conv"), run.get("network.conv_alpha", run.get("network.conv"))
    if not rank:
        return chosen
    own, linear = run.of("lora_rank"), run.of("lora_alpha")
    if run.word("network.type", "lora") != "lokr" and (str(rank), str(alpha)) != (str(own), str(linear)):
        run.lose("network.conv", f"one rank and alpha hold for all layers here, and linear has {own} and {linear}")
        return chosen
    return "*"


# Optimizers (toolkit/optimizer.py) with their weight decay; moments of 8 bits are whole here.
OPTIMIZERS = (
    dict.fromkeys(("adamw", "adamw8bit"), ("adamw", 0.01))
    | dict.fromkeys(("adamw8", "adam8"), ("adamw", 0.0))
    | dict.fromkeys(("adam", "adam8bit"), ("adam", 0.0))
    | dict.fromkeys(("lion", "lion8bit"), ("lion", 0.0))
    | dict.fromkeys(("prodigy", "prodigy8bit"), ("prodigy", 0.0))
    | {"adagrad": ("adagrad", 0.0)}
)


def optimizer(run: Translation) -> None:
    name = run.word("train.optimizer", "adamw")
    ours, decay = OPTIMIZERS.get(name, ("", 0.0))
    if ours:
        run.put("optimizer", "train.optimizer", ours)
    elif name == "adafactor":
        run.lose("train.optimizer", "its steps do not scale with the weights there, and gradients are not clipped")
    else:
        run.lose("train.optimizer", "this version does not have this optimizer")
    run.defaults |= {"adam_weight_decay": decay, "adam_epsilon": 1e-10 if ours == "adagrad" else 1e-6}
    run.defaults |= LION if ours == "lion" else {}
    rate = run.number("train.lr", 1e-6)
    if ours == "prodigy" and rate < 0.1:
        run.put("learning_rate", "train.lr", 1.0, "a rate below 0.1 is 1 with Prodigy there")
    else:
        run.rename("learning_rate", "train.lr", 1e-6)
    section = "train.optimizer_params"
    run.rename("adam_weight_decay", f"{section}.weight_decay")
    run.rename("adam_epsilon", f"{section}.eps")
    two_betas(run, f"{section}.betas")
    run.refuse(run.below(section), "it has no place here")


def length(run: Translation) -> None:
    """Steps and batches. A step of `gradient_accumulation_steps` throws away the gradients of those before it
    (SDTrainer.py:2249), and `gradient_accumulation` sums what is a mean here."""
    thrown, summed = (
        run.number(f"train.{name}", 1) for name in ("gradient_accumulation_steps", "gradient_accumulation")
    )
    steps, norm = run.number("train.steps", 1000), run.number("train.max_grad_norm", 1.0)
    share = 2 if run.is_on("model.model_kwargs.of_two") else 1
    if thrown > 1:
        reason = f"of {thrown:.0f} batches only the last one is trained there: every batch is a step here"
        run.look("train.gradient_accumulation_steps", reason)
        share *= int(thrown)
    elif thrown < 0:
        run.lose("train.gradient_accumulation_steps", "an epoch is a step there")
    if summed > 1 and run.defaults.get("model_flavour"):
        run.lose("train.gradient_accumulation", "the batches of a step take turns with the denoisers there")
    elif summed > 1:
        run.rename("gradient_accumulation_steps", "train.gradient_accumulation")
        reason = f"gradients are summed there: max_grad_norm and adam_epsilon are divided by {summed:.0f}"
        run.remark("train.gradient_accumulation", reason)
        norm /= summed
        scale_epsilon(run, summed)
    run.drop(["train.gradient_accumulation_steps", "train.gradient_accumulation"], "a batch is a step")
    run.put("max_grad_norm", "train.max_grad_norm", norm)
    run.put("max_train_steps", "train.steps", int(steps) // share if steps > 0 else run.get("train.steps"))
    run.defaults["num_train_epochs"] = 0
    schedule(run, share)


def scale_epsilon(run: Translation, times: float) -> None:
    key = "train.optimizer_params.eps"
    run.put("adam_epsilon", key, run.number(key, run.defaults["adam_epsilon"]) / times)


def schedule(run: Translation, share: int) -> None:
    """Schedule of the learning rate (toolkit/scheduler.py)."""
    name, section = run.word("train.lr_scheduler", "constant"), "train.lr_scheduler_params"
    if name in ("cosine", "cosine_with_restarts"):  # whose first period is the run
        run.put("lr_scheduler", "train.lr_scheduler", "cosine")
        run.rename("lr_end", f"{section}.eta_min", 0.0)
    elif name == "constant_with_warmup":
        run.put("lr_scheduler", "train.lr_scheduler", name)
        warmup = run.number(f"{section}.num_warmup_steps", 1000)
        run.put("lr_warmup_steps", f"{section}.num_warmup_steps", int(warmup) // share)
        if f"{section}.num_warmup_steps" not in run.written:
            run.remark("train.lr_scheduler", "it warms up for 1000 steps there where num_warmup_steps is silent")
    elif name == "constant":
        run.put("lr_scheduler", "train.lr_scheduler", name)
        if run.number(f"{section}.factor", 1) == 1:
            run.drop([f"{section}.factor"], "asks for nothing special")
    elif name == "linear":
        run.lose("train.lr_scheduler", "it rises from a third of the rate to all of it there: no schedule here does so")
    else:
        run.lose("train.lr_scheduler", "it ends in an error there")
    run.refuse(run.below(section), "it has no place here")


def noise(run: Translation) -> None:
    """Noise levels: of diffusion all alike, of a flow by timestep_type."""
    arch = ARCHS[arch_of(run)]
    scheduler, kind = run.word("train.noise_scheduler", "ddpm"), run.word("train.timestep_type", "sigmoid")
    if scheduler != ("flowmatch" if arch.is_flow else "ddpm"):
        wanted = "flowmatch" if arch.is_flow else "ddpm"
        run.lose("train.noise_scheduler", f"this model is trained with {wanted} here", scheduler)
    if run.word("train.content_or_style", "balanced") != "balanced":
        run.lose("train.content_or_style", "it favours high or low noise there, which is not offered")
    if not arch.is_flow:
        is_v = run.is_on("model.is_v_pred")
        run.defaults["prediction_type"] = "v_prediction" if is_v else "epsilon"
    else:
        flow(run, arch, kind)
    run.refuse(
        ["train.linear_timesteps", "train.linear_timesteps2"] if arch.is_flow else [],
        "the loss is weighed by a bell there, 0 at both ends",
    )
    run.drop(
        [f"train.{name}" for name in ("noise_scheduler", "timestep_type", "content_or_style", "linear_timesteps")],
        "it is what is trained here, too",
    )
    run.drop(["train.linear_timesteps2"], "used only with a flow")
    average(run)


def flow(run: Translation, arch: Arch, kind: str) -> None:
    even = {"flow_use_uniform_schedule": True, "flow_schedule_shift": 1.0}
    shifts = kind in ("shift", "flux_shift", "lumina2_shift")
    if shifts and arch.shift == BY_SIZE:
        even = {"flow_use_uniform_schedule": True, "flow_schedule_auto_shift": True}
    elif shifts and arch.shift is not None:
        even["flow_schedule_shift"] = arch.shift
    elif shifts:
        run.lose("train.timestep_type", "the shift by size of this model is another one there")
    elif kind == "weighted":
        run.lose("train.timestep_type", "levels are drawn evenly and the loss is weighed by a table there, 1.5 to 0.4")
    elif kind not in ("sigmoid", "linear"):
        run.lose("train.timestep_type", "this version does not draw noise levels so")
    if kind == "sigmoid":
        even = {"flow_schedule_shift": 1.0, "flow_sigmoid_scale": 1.0}
    run.defaults |= even
    if arch.family == "qwen_image" and shifts:
        run.remark("train.timestep_type", "levels below 0.02 are left out there")


def average(run: Translation) -> None:
    section = "train.ema_config"
    if run.is_on(f"{section}.use_ema"):
        run.rename("use_ema", f"{section}.use_ema")
        run.rename("ema_decay", f"{section}.ema_decay", 0.999)
        run.remark(f"{section}.use_ema", "it counts from the first step there; a young average forgets faster here")
        if run.number(f"{section}.param_multiplier", 1) == 1:
            run.drop([f"{section}.param_multiplier"], "asks for nothing special")
        run.refuse(run.below(section), "it has no place here")
    run.drop([*run.below(section), section], "no average")


def samples(run: Translation) -> None:
    """Prompts with their sizes, seeds and flags; one of `[trigger]` has the trigger word."""
    listed = run.get("sample.samples") or run.get("sample.prompts") or []
    listed = listed if isinstance(listed, list) else [listed]
    if listed and not run.is_on("train.disable_sampling"):
        run.put("validation_resolution", "sample.width", size_of_sample(run, {}))
        for setting, key, default in (
            ("validation_step_interval", "sample_every", 100),
            ("validation_num_inference_steps", "sample_steps", 20),
            ("validation_guidance", "guidance_scale", 7),
            ("validation_seed", "seed", 0),
            ("validation_negative_prompt", "neg", None),
        ):
            run.rename(setting, f"sample.{key}", default)
        if is_off(run.get("sample.neg")):
            run.taken.pop("validation_negative_prompt", None)
        run.prompts = [prompt for each in listed if (prompt := sample_of(run, each))]
    names = (
        *("prompts", "samples", "width", "height", "neg", "seed", "walk_seed", "guidance_scale", "sample_steps"),
        *("sample_every", "num_frames"),
    )
    run.drop([f"sample.{name}" for name in names], "they are prompts of validation, or there are none")
    run.drop(["trigger_word"], "it is put into the captions")


OWN_FLAGS = {**FLAGS, "seed": "seed", "cfg": "guidance", "steps": "num_inference_steps"}
OF_SAMPLES = {"neg": "negative_prompt", "guidance_scale": "guidance", "sample_steps": "num_inference_steps"}


def sample_of(run: Translation, given: object) -> dict[str, object]:
    """Prompt with keys of validation_prompt_file; empty for what is none."""
    item = given if isinstance(given, Mapping) else {"prompt": given}
    if not isinstance(text := item.get("prompt"), str):
        return {}
    prompt, others = prompt_of_line(PLACES.sub(lambda _: str(run.get("trigger_word") or ""), text), OWN_FLAGS)
    if others:
        run.remark("sample.prompts", f"--{' --'.join(others)} has no place here", item["prompt"])
    own = {ours: item[name] for name, ours in OF_SAMPLES.items() if item.get(name) not in (None, False)}
    if {"width", "height", "num_frames"} & item.keys():
        own["resolution"] = size_of_sample(run, item)
    if images := [item[name] for name in ("ctrl_img", "ctrl_img_1", "ctrl_img_2", "ctrl_img_3") if item.get(name)]:
        own["images"] = images
    seed = item.get("seed", None if run.is_on("sample.walk_seed") else run.get("sample.seed", 0))
    return {**({} if seed is None else {"seed": seed}), **own, **prompt}


def size_of_sample(run: Translation, item: Mapping[str, object]) -> str:
    """Size of a sample, with as many frames as the pipeline makes of those that are asked for."""
    own = run.within(item)
    width, height, frames = (
        own.number(name, run.number(f"sample.{name}", default))
        for name, default in (("width", 512), ("height", 512), ("num_frames", 1))
    )
    step = 8 if run.defaults["model_family"] == "ltxvideo2" else 4
    return f"{width:.0f}x{height:.0f}" + (f"@{int(frames) // step * step + 1}" if frames > 1 else "")


AI_TOOLKIT = ForeignTrainer(
    AITOOLKIT,
    RUN,
    (model, network, optimizer, length, noise, samples),
    entries,
    jobs=jobs,
)
