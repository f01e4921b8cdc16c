"""kohya's sd-scripts (48d368fa): its TOML files of a run and of datasets."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from simpletuner.importing.folders import (
    files_in,
    folder_entry,
    has_several_lines,
    prompts_of_file,
    size_of,
    subfolders,
)
from simpletuner.importing.foreign_trainer import (
    LION,
    ForeignTrainer,
    Translation,
    key_table,
    nonzero,
    one_of,
    optimizer_arguments,
)
from simpletuner.settings.foreign.key_table import Maps
from simpletuner.settings.foreign.recognition import KOHYA

FASTER = "it changes time, memory or the names of files"
OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adamw8bit", "pagedadamw8bit", "adamw8bitkahan", "adamw_optimi"), "adamw"),
    **dict.fromkeys(("lion", "lion8bit", "pagedlion8bit"), "lion"),
    "prodigy": "prodigy",
}
"""Optimizers that differ from those here in the precision of their moments at most; Prodigy's package also uses
each estimate one step earlier than its paper."""
SCHEDULES = {name: name for name in ("constant", "constant_with_warmup", "linear", "cosine")}
OPTIMIZER = Maps("optimizer", one_of(OPTIMIZERS, "optimizer"))
SCHEDULE = Maps("lr_scheduler", one_of(SCHEDULES, "schedule"))
NETWORKS = {
    "networks.lora": "",
    "networks.lora_flux": "flux",
    "networks.lora_sd3": "sd3",
    "networks.lora_lumina": "lumina2",
}
"""Modules that are a LoRA, with the family that they are of."""
ATTENTION_BLOCKS = "to_q,to_k,to_v,to_out.0,proj_in,proj_out,ff.net.0.proj,ff.net.2"
"""U-Net layers that `networks.lora` adapts: linear ones and 1 x 1 convolutions of attention blocks."""
BLOCKS = {
    "flux": "transformer_blocks.*,single_transformer_blocks.*",
    "sd3": "transformer_blocks.*",
    "lumina2": "layers.*,noise_refiner.*,context_refiner.*,norm_out.*",
}
"""Layers that the networks of transformers adapt: all of their blocks, and Lumina's last one."""
FUSED = "q, k and v are one matrix there; here each has a LoRA of its own, of the same rank"
SHIFTS = {"flux": 3.0, "sd3": 1.0, "lumina2": 6.0}
DIMS = re.compile(r"(\w+_)?(dims?|alpha|lrs?|lr_weight|lr_ratio|dropout|blocks?|block_indices|sigma|beta)$")
OF_ALL = ("resolution", "enable_bucket", "min_bucket_reso", "max_bucket_reso", "caption_extension", "num_repeats")
"""Names of a training file that hold for datasets which are silent about them."""

RUN = key_table(
    maps={
        "lora_rank": "network_dim",
        "lora_init": "network_weights",
        "lora_dropout": "network_dropout",
        "lr_warmup_steps": "lr_warmup_steps",
        "pretrained_model_name_or_path": "pretrained_model_name_or_path",
        "max_train_steps": "max_train_steps",
        "num_train_epochs": "max_train_epochs",
        "train_batch_size": "train_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "gradient_checkpointing": "gradient_checkpointing",
        "mixed_precision": "mixed_precision",
        "max_grad_norm": "max_grad_norm",
        "seed": "seed",
        "output_dir": "output_dir",
        "logging_dir": "logging_dir",
        "checkpoint_step_interval": "save_every_n_steps",
        "vae_batch_size": "vae_batch_size",
        "caption_dropout_probability": "caption_dropout_rate",
        "validation_step_interval": "sample_every_n_steps",
        "flux_guidance_value": "guidance_scale",
        "tokenizer_max_length": "t5xxl_max_token_length",
        "tracker_run_name": "wandb_run_name",
    },
    converted={
        "optimizer_type": OPTIMIZER,
        "lr_scheduler": SCHEDULE,
        "min_snr_gamma": Maps("snr_gamma", nonzero),
        "network_alpha": Maps("lora_alpha", nonzero),
        "log_with": Maps("report_to", one_of({"tensorboard": "tensorboard", "wandb": "wandb"}, "tracker")),
    },
    idle={
        FASTER: (
            "output_name save_model_as save_precision save_every_n_epochs save_last_n_steps save_last_n_epochs "
            "cache_latents cache_latents_to_disk cache_text_encoder_outputs cache_text_encoder_outputs_to_disk "
            "xformers sdpa mem_eff_attn lowram highvram max_data_loader_n_workers no_half_vae "
            "persistent_data_loader_workers sample_every_n_epochs sample_sampler sample_at_first save_state "
            "save_state_on_train_end log_prefix training_comment network_train_unet_only network_module "
            "prior_loss_weight console_log_level console_log_file console_log_simple metadata_title metadata_author "
            "metadata_description metadata_license metadata_tags save_last_n_steps_state save_last_n_epochs_state "
            "save_n_epoch_ratio tokenizer_cache_dir disable_mmap_load_safetensors skip_cache_check "
            "text_encoder_batch_size ddp_timeout ddp_gradient_as_bucket_view ddp_static_graph "
            "cpu_offload_checkpointing blocks_to_swap fused_backward_pass torch_compile dynamo_backend no_metadata "
            "log_config log_tracker_name log_tracker_config debug_dataset config_file output_config use_safetensors "
            "deepspeed zero_stage split_mode skip_until_initial_step resize_interpolation async_upload "
            "huggingface_repo_type huggingface_path_in_repo huggingface_repo_visibility save_state_to_huggingface "
            "resume_from_huggingface t5xxl_device t5xxl_dtype clip_l_dropout_rate cache_info attn_mode mem_eff_save "
            "diffusers_xformers support_dreambooth network_multiplier offload_optimizer_device "
            "offload_optimizer_nvme_path offload_param_device offload_param_nvme_path zero3_init_flag "
            "zero3_save_16bit_model fp16_master_weights_and_gradients"
        ),
        "used only with another schedule": (
            "lr_scheduler_num_cycles lr_scheduler_power lr_decay_steps lr_scheduler_timescale "
            "lr_scheduler_min_lr_ratio lr_scheduler_args"
        ),
        "used only with another loss_type": "huber_schedule huber_c huber_scale",
        "used only with what is refused": "multires_noise_discount adaptive_noise_scale noise_offset_random_strength",
    },
    look={
        "a secret is not copied: set it in the environment": "wandb_api_key huggingface_token",
        "uploading is set by push_to_hub and hub_model_id": "huggingface_repo_id",
        "its own state is not read: a LoRA that it has saved goes on as lora_init": "resume initial_epoch initial_step",
        "images are held out by eval_split": (
            "validation_split validation_seed validate_every_n_steps validate_every_n_epochs max_validation_steps"
        ),
        "text encoders and VAE come from the base's pipeline folder, or from single_file_config": (
            "clip_l clip_g t5xxl ae vae gemma2"
        ),
    },
    lost={
        "it has no place here": (
            "noise_offset multires_noise_iterations ip_noise_gamma ip_noise_gamma_random_strength zero_terminal_snr "
            "min_timestep=0 max_timestep=1000 loss_type=l2 masked_loss full_bf16 full_fp16 fp8_base fp8_base_unet "
            "fp16_base max_token_length=75 scale_weight_norms base_weights base_weights_multiplier dim_from_weights "
            "scale_v_pred_loss_like_noise_pred v_pred_like_loss debiased_estimation_loss weighted_captions block_lr "
            "lr_scheduler_type use_lion_optimizer fused_optimizer_groups optimizer_accumulation_steps "
            "train_text_encoder network_train_text_encoder_only text_encoder_lr learning_rate_te learning_rate_te1 "
            "learning_rate_te2 learning_rate_te3 stop_text_encoder_training in_json dataset_class dataset_repeats "
            "apply_t5_attn_mask apply_lg_attn_mask pos_emb_random_crop_rate enable_scaled_pos_embed training_shift=1 "
            "model_type=flux|chroma mode_scale=1.29 logit_mean logit_std=1"
        ),
        "it is a key of a dataset: write it into the file of dataset_config": (
            "shuffle_caption keep_tokens keep_tokens_separator secondary_separator caption_separator=, "
            "enable_wildcard caption_prefix caption_suffix caption_dropout_every_n_epochs caption_tag_dropout_rate "
            "token_warmup_min=1 token_warmup_step color_aug flip_aug face_crop_aug_range random_crop alpha_mask "
            "bucket_no_upscale caption_extention class_tokens conditioning_data_dir resolution enable_bucket "
            "min_bucket_reso max_bucket_reso bucket_reso_steps=64 caption_extension num_repeats"
        ),
    },
)


def model(run: Translation) -> None:
    """Family and kind of the run, which sd-scripts knows by its script."""
    module, name = str(run.get("network_module", "")), str(run.get("pretrained_model_name_or_path", ""))
    family = NETWORKS.get(module, "") or ("flux" if "ae" in run.written and "t5xxl" in run.written else "")
    run.defaults |= {
        "model_family": family or ("sd2x" if run.is_on("v2") else "sdxl" if "xl" in name.lower() else "sd1x"),
        "model_type": "lora" if module in NETWORKS else "full",
    }
    if run.defaults["model_family"] == "sd1x" and not SD1.search(name.lower()):
        reason = "taken for Stable Diffusion 1, since its name has no `xl`: otherwise set model_family"
        run.remark("pretrained_model_name_or_path", reason)
    run.drop(["v2"], "asks for nothing special")
    skipped = run.values.pop("clip_skip", None)
    if skipped not in (1, None) and run.defaults["model_family"] != "sdxl":
        run.lose("clip_skip", "it has no place here")


SD1 = re.compile(r"v1|1[._-][45]|sd-?1|sd_?1")
"""Part of the names of Stable Diffusion 1."""


def network(run: Translation) -> None:
    """Layers, rank and scale: rank 4 and alpha 1 where the file is silent, and an alpha of 0 is the rank."""
    module = run.get("network_module")
    if module not in NETWORKS:
        is_whole = module is None
        reason = (
            "a whole model: text encoders are trained there as its script says, and here never: check its script"
            if is_whole
            else "only networks.lora and those of FLUX, SD3 and Lumina have the same layers here"
        )
        run.lose("network_module", reason, module)
        return
    family = run.defaults["model_family"]
    run.defaults |= {
        "lora_rank": 4,
        "lora_alpha": None if run.get("network_alpha") == 0 else 1.0,
        "lora_target_modules": BLOCKS.get(family, ATTENTION_BLOCKS),
    }
    if family in BLOCKS:
        run.remark("network_module", FUSED)
    for argument in run.values.pop("network_args", None) or []:
        name, _, value = str(argument).partition("=")
        if DIMS.match(name.strip()) or name.strip() in ("algo", "preset", "split_qkv", "train_t5xxl"):
            run.remark("network_args", "it has no place here", f"{name}={value}", "lost")
    if not run.is_on("network_train_unet_only") and not (run.get("text_encoder_lr") == 0 and run.number("unet_lr", 0)):
        run.lose("network_train_unet_only", "text encoders are not trained by this version", False)
    run.drop(["text_encoder_lr"], "text encoders are not trained") if run.is_on("network_train_unet_only") else None


def length(run: Translation) -> None:
    """1,600 steps where the file is silent; epochs go before steps, where both are there."""
    if run.number("max_train_epochs", 0):
        run.drop(["max_train_steps"], "max_train_epochs goes before it")
    else:
        run.drop(["max_train_epochs"], "not set")
        run.defaults |= {"max_train_steps": 1600, "num_train_epochs": 0}


def optimizer(run: Translation) -> None:
    run.defaults |= {"max_grad_norm": 1.0, "lr_scheduler": "constant", "learning_rate": 2e-6, "mixed_precision": "no"}
    # unet_lr is the U-Net's, and learning_rate its default.
    rate = "unet_lr" if run.number("unet_lr", 0) else "learning_rate"
    run.rename("learning_rate", rate)
    run.drop(["unet_lr", "learning_rate"], "the rate of the U-Net goes before it")
    name = run.word("optimizer_type")
    run.refuse(["use_lion_optimizer"], "set optimizer_type")
    if run.values.pop("use_8bit_adam", None) and not name:
        run.defaults["optimizer"] = "adamw"
    if not name:
        run.values.pop("optimizer_type", None)
    run.defaults |= LION if OPTIMIZERS.get(name) == "lion" else {}
    run.defaults |= {"adam_weight_decay": 0.0} if name == "prodigy" else {}
    optimizer_arguments(run, "optimizer_args", run.get("optimizer_args") or [])


def warmup(run: Translation) -> None:
    """A whole number counts steps; one with a point is a share of all steps, 5.0 five times as many."""
    steps = run.get("lr_warmup_steps")
    if isinstance(steps, float) and steps >= 1:
        reason = f"a number with a point is a share of all steps there, {steps:.0%} of them: write {steps:.0f}"
        run.lose("lr_warmup_steps", reason)
    elif steps and run.word("lr_scheduler", "constant") == "constant":
        run.remark("lr_warmup_steps", "with lr_scheduler=constant sd-scripts ends in an error; here it warms up")


def objective(run: Translation) -> None:
    """Target and noise levels; a flow's are those of flux_train_utils.py."""
    family = run.defaults["model_family"]
    if family not in SHIFTS:
        # Whatever the base's scheduler says (train_network.py:275).
        run.defaults["prediction_type"] = "v_prediction" if run.is_on("v_parameterization") else "epsilon"
        run.drop(["v_parameterization"], "it is prediction_type here")
        return
    sampling, shift = run.word("timestep_sampling", "sigma"), run.number("discrete_flow_shift", SHIFTS[family])
    predicted = run.word("model_prediction_type", "sigma_scaled" if family == "flux" else "raw")
    if predicted != "raw":
        reason = (
            "there the loss compares a denoised image with noise less image (flux_train_utils.py); with raw, as its "
            "documentation has it, the velocity, as here"
        )
        run.lose("model_prediction_type", reason, predicted)
    noise_levels(run, sampling, shift, run.word("weighting_scheme", "uniform"))
    run.defaults |= {"flux_guidance_value": 3.5} if family == "flux" else {}
    run.drop(["model_prediction_type"], "the velocity is predicted here, too")


def noise_levels(run: Translation, sampling: str, shift: float, weighting: str) -> None:
    """Settings of the distribution of noise levels of sd-scripts and musubi-tuner, silent values included."""
    even = {"flow_use_uniform_schedule": True, "flow_schedule_shift": 1.0}
    curves = {
        "uniform": even,
        "sigma": even | {"flow_schedule_shift": shift},
        "sigmoid": {"flow_schedule_shift": 1.0, "flow_sigmoid_scale": run.number("sigmoid_scale", 1.0)},
        "shift": {"flow_schedule_shift": shift, "flow_sigmoid_scale": run.number("sigmoid_scale", 1.0)},
        "flux_shift": {"flow_schedule_auto_shift": True, "flow_sigmoid_scale": run.number("sigmoid_scale", 1.0)},
    }
    if sampling not in curves:
        run.lose("timestep_sampling", "this version does not draw noise levels so", sampling)
    elif sampling == "sigma" and weighting not in ("uniform", "none"):
        run.lose("weighting_scheme", "this version does not draw or weigh noise levels so")
    for name, value in curves.get(sampling, {}).items():
        key = {"flow_schedule_shift": "discrete_flow_shift", "flow_sigmoid_scale": "sigmoid_scale"}.get(name, "")
        run.put(name, key if key in run.written else "timestep_sampling", value) if (
            key in run.written or "timestep_sampling" in run.written
        ) else run.defaults.update({name: value})
    run.drop(["timestep_sampling", "discrete_flow_shift", "sigmoid_scale"], f"timestep_sampling={sampling} decides")
    run.drop(["weighting_scheme"], "it weighs nothing there")


def datasets_and_prompts(run: Translation) -> None:
    """Silent datasets take sizes and extensions of the training file; a file of prompts is read."""
    run.defaults |= {"train_batch_size": 1, "caption_dropout_probability": 0.0}
    if "train_data_dir" in run.values and "dataset_config" in run.written:
        run.drop(["train_data_dir"], "dataset_config goes before it")
    elif "train_data_dir" in run.values:
        reason = (
            "folders named N_PHRASE are not read: list them as [[datasets.subsets]] in a file that dataset_config names"
        )
        run.lose("train_data_dir", reason)
    if "dataset_config" in run.written:
        run.drop([*OF_ALL, "bucket_reso_steps"], "it holds for datasets that are silent about it")
    run.refuse(["reg_data_dir"], "images of the class are a dataset with is_regularisation_data here, and another loss")
    prompts_of_file(run, "sample_prompts")


DATASET = key_table(
    maps={"caption_dropout_probability": "caption_dropout_rate"},
    converted={},
    idle={
        FASTER: (
            "batch_size enable_bucket cache_info bucket_reso_steps validation_seed resize_interpolation debug_dataset"
        ),
        "nothing is shuffled": "token_warmup_min caption_separator",
        "used only with is_reg": "prior_loss_weight",
        "lengths of prompts are the model's": "max_token_length",
    },
    look={"images are held out by eval_split": "validation_split"},
    lost={
        "it has no place here": (
            "keep_tokens shuffle_caption flip_aug color_aug random_crop bucket_no_upscale alpha_mask caption_prefix "
            "caption_tag_dropout_rate caption_dropout_every_n_epochs token_warmup_step caption_suffix "
            "keep_tokens_separator secondary_separator face_crop_aug_range custom_attributes network_multiplier=1"
        ),
        "images of the class weigh in the loss there; here a dataset with is_regularisation_data is held to the base": (
            "is_reg"
        ),
        "controls are not trained from files of sd-scripts": "conditioning_data_dir",
        "captions are read from .txt files": "caption_extension=.txt metadata_file",
    },
)


def entries(run: Translation, values: Mapping[str, Any] | Sequence[Any]) -> Iterator[Translation]:
    """Yield a translation for each subset. Values of the training file hold where the dataset file has none."""
    listed = values if isinstance(values, Mapping) else {}
    general = {name: run.written[name] for name in OF_ALL if name in run.written} | (listed.get("general") or {})
    of_run(run, listed, general)
    for dataset in listed.get("datasets") or []:
        seen = set()
        for subset in dataset.get("subsets") or [{}]:
            merged = {**general, **dataset, **subset}
            merged.pop("subsets", None)
            path, repeats = merged.get("image_dir"), merged.get("num_repeats", 1)
            if path is not None and (path in seen or not repeats):
                why = "with 0 repeats" if not repeats else "that is there twice in a dataset"
                reason = f"sd-scripts leaves out a folder {why}, and so is it here"
                run.remark("image_dir", reason, path)
                continue
            seen.add(path)
            yield entry(run.within(merged))


def entry(found: Translation) -> Translation:
    path, is_bucketed = found.get("image_dir"), found.is_on("enable_bucket")
    folder_entry(found, "image_dir", "num_repeats")
    resolution = found.values.pop("resolution", 512)
    if isinstance(resolution, str):
        resolution = [int(side) if side.strip().isdigit() else side for side in resolution.split(",")]
        resolution = resolution[0] if len(resolution) == 1 else resolution
    if isinstance(resolution, list) and len(set(resolution)) > 1 and not is_bucketed:
        found.lose("resolution", "without buckets all images are cropped to squares here")
    found.defaults |= size_of(resolution, is_bucketed)
    if is_bucketed:
        bucket_limits(found, found.defaults["resolution"])
    found.drop(["min_bucket_reso", "max_bucket_reso"], "buckets have the area of resolution")
    captions(found, path)
    subfolders(found, "image_dir")
    if not found.get("shuffle_caption"):
        found.drop(["keep_tokens"], "nothing is shuffled")
    found.answer(DATASET)
    return found


def captions(found: Translation, path: object) -> None:
    """Sources of captions: the first line of a file, or the class's phrase for images without one."""
    extension = str(found.get("caption_extension", ""))
    # sd-scripts adds the dot, and has .caption by itself.
    suffix = f".{extension.lstrip('.')}" if extension else ".caption"
    tokens = found.values.pop("class_tokens", None)
    files = [file for file in files_in(path) if file.suffix == suffix]
    if tokens is not None and (files or (suffix == ".txt" and not files_in(path))):
        found.lose("class_tokens", f"images with a {suffix} file have that caption there, and the others this phrase")
    elif tokens is not None:
        if not files_in(path):
            found.look("class_tokens", f"the caption of all images here; there {suffix} files go before it")
        found.values.pop("caption_extension", None)
        found.defaults |= {"caption_strategy": "instanceprompt", "instance_prompt": tokens}
        return
    if suffix != ".txt":
        found.values.pop("caption_extension", None)
        found.remark("caption_extension", "captions are read from .txt files", suffix, "lost")
    is_drawn = found.values.pop("enable_wildcard", False)
    found.values.pop("caption_extension", None)
    if not is_drawn and has_several_lines(files):
        reason = "of a caption file only the first line is read, as there (caption_lines = first)"
        found.remark("enable_wildcard", reason, False)
    found.defaults["caption_lines"] = "alternatives" if is_drawn else "first"


LONG = math.sqrt(2)
"""Longer side of a bucket of 2:1 by the edge of its square; few pictures are longer."""


def bucket_limits(found: Translation, edge: object) -> None:
    """Name the limits that a bucket of 2:1 passes: sides within them are another set of sizes."""
    reason = "there no side of a bucket passes it; here buckets have the area of resolution, whatever their sides"
    most, least = found.get("max_bucket_reso", 1024), found.get("min_bucket_reso", 256)
    if isinstance(edge, int) and isinstance(most, int) and isinstance(least, int):
        if edge * LONG > most:
            found.look("max_bucket_reso", reason, most)
        if edge / LONG < least:
            found.look("min_bucket_reso", reason, least)


def of_run(run: Translation, listed: Mapping[str, Any], general: Mapping[str, Any]) -> None:
    """Give the run what sd-scripts has per dataset: the size of a batch, and the step of bucket sizes.

    What the dataset file says goes before the training file (config_util.py, `search_value`).
    """
    for setting, key, of_file, default in (
        ("train_batch_size", "batch_size", "train_batch_size", 1),
        ("aspect_bucket_alignment", "bucket_reso_steps", "bucket_reso_steps", 64),
    ):
        silent = general.get(key, run.get(of_file, default))
        found = {each.get(key, silent) for each in listed.get("datasets") or []}
        if len(found) > 1:
            run.remark(key, "here one value holds for all datasets", sorted(found), "lost")
        elif found:
            run.values.pop(of_file, None)
            run.defaults[setting] = found.pop()


SD_SCRIPTS = ForeignTrainer(
    KOHYA,
    RUN,
    (model, network, length, optimizer, warmup, objective, datasets_and_prompts),
    entries,
    dataset_file="dataset_config",
    is_flat=True,
)
