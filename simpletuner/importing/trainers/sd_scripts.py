"""kohya's sd-scripts (48d368fa): its TOML files of a run and of datasets."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.importing.folders import (
    IMAGES,
    NEAREST,
    choices_in,
    closest,
    condition,
    elsewhere,
    files_in,
    folder_entry,
    has_several_lines,
    prompts_of_file,
    put_around,
    size_of,
    sizes_of_area,
    subfolders,
)
from simpletuner.importing.foreign_trainer import (
    CACHES,
    FASTER,
    LION,
    ForeignTrainer,
    Translation,
    key_table,
    nonzero,
    one_of,
    optimizer_arguments,
)
from simpletuner.importing.original import FLOAT16
from simpletuner.importing.trainers.sd_scripts_networks import NETWORKS, network
from simpletuner.settings.foreign.key_table import Maps
from simpletuner.settings.foreign.original_names import is_off
from simpletuner.settings.foreign.recognition import KOHYA

# Optimizers that differ from those here in the precision of their moments at most; Prodigy's package also
# uses each estimate one step earlier than its paper.
OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adamw8bit", "pagedadamw8bit", "adamw8bitkahan", "adamw_optimi"), "adamw"),
    **dict.fromkeys(("lion", "lion8bit", "pagedlion8bit"), "lion"),
    "prodigy": "prodigy",
    "adamwschedulefree": "adamw_schedulefree",
}
SCHEDULES = {name: name for name in ("constant", "constant_with_warmup", "linear", "cosine", "polynomial")}
OPTIMIZER = Maps("optimizer", one_of(OPTIMIZERS, "optimizer"))
SCHEDULE = Maps("lr_scheduler", one_of(SCHEDULES, "schedule"))
SHIFTS = {"flux": 3.0, "chroma": 3.0, "sd3": 1.0, "lumina2": 6.0, "hunyuanimage": 5.0}
"""Shift of the families that match flows, where the file is silent."""
# Names of a training file that hold for datasets without them (config_util.py, argparse_config).
OF_ALL = (
    *("resolution", "enable_bucket", "min_bucket_reso", "max_bucket_reso", "bucket_no_upscale", "caption_extension"),
    *("shuffle_caption", "keep_tokens", "keep_tokens_separator", "secondary_separator", "caption_separator"),
    *("enable_wildcard", "caption_prefix", "caption_suffix", "caption_dropout_every_n_epochs", "dataset_repeats"),
    *("caption_tag_dropout_rate", "token_warmup_min", "token_warmup_step", "color_aug", "flip_aug", "alpha_mask"),
    *("face_crop_aug_range", "random_crop", "conditioning_data_dir", "masked_loss", "resize_interpolation"),
    "bucket_reso_steps",
)

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
            "xformers sdpa mem_eff_attn lowram highvram max_data_loader_n_workers no_half_vae "
            "persistent_data_loader_workers sample_every_n_epochs sample_sampler sample_at_first save_state "
            "save_state_on_train_end log_prefix training_comment network_train_unet_only network_module "
            "prior_loss_weight console_log_level console_log_file console_log_simple metadata_title metadata_author "
            "metadata_description metadata_license metadata_tags save_last_n_steps_state save_last_n_epochs_state "
            "save_n_epoch_ratio tokenizer_cache_dir disable_mmap_load_safetensors text_encoder_batch_size ddp_timeout "
            "ddp_gradient_as_bucket_view ddp_static_graph cpu_offload_checkpointing blocks_to_swap "
            "fused_backward_pass torch_compile dynamo_backend no_metadata log_config log_tracker_name "
            "log_tracker_config debug_dataset config_file output_config use_safetensors deepspeed zero_stage "
            "split_mode skip_until_initial_step resize_interpolation async_upload huggingface_repo_type "
            "huggingface_path_in_repo huggingface_repo_visibility save_state_to_huggingface resume_from_huggingface "
            "t5xxl_device t5xxl_dtype attn_mode mem_eff_save diffusers_xformers offload_optimizer_device "
            "offload_optimizer_nvme_path offload_param_device offload_param_nvme_path zero3_init_flag "
            "zero3_save_16bit_model fp16_master_weights_and_gradients save_clip save_t5xxl blockwise_fused_optimizers "
            "double_blocks_to_swap single_blocks_to_swap split_attn text_encoder_cpu vae_chunk_size vae_disable_cache "
            "fp8_scaled fp8_vl use_flash_attn use_sage_attn unsloth_offload_checkpointing sample_batch_size "
            "t5_tokenizer_path fused_optimizer_groups"
        ),
        CACHES: (
            "cache_latents cache_latents_to_disk cache_text_encoder_outputs cache_text_encoder_outputs_to_disk "
            "skip_cache_check skip_latents_validity_check cache_info use_t5xxl_cache_only"
        ),
        "used only with another schedule": "lr_decay_steps lr_scheduler_timescale lr_scheduler_min_lr_ratio",
        "used only with another model": (
            "clip_g_dropout_rate=0 clip_l_dropout_rate=0 t5_dropout_rate=0 gemma2_max_token_length system_prompt "
            "llm_adapter_path llm_adapter_lr self_attn_lr cross_attn_lr mlp_lr mod_lr qwen3_max_token_length "
            "t5_max_token_length"
        ),
        "used only with another loss_type": "huber_schedule huber_c huber_scale",
        "used only with what is refused": "multires_noise_discount adaptive_noise_scale noise_offset_random_strength",
    },
    look={
        "uploading is set by push_to_hub and hub_model_id": "huggingface_repo_id",
        "its own state is not read: a LoRA that it has saved goes on as lora_init": "resume initial_epoch initial_step",
        "images are held out by eval_split": (
            "validation_split validation_seed validate_every_n_steps validate_every_n_epochs max_validation_steps"
        ),
        "text encoders and VAE come from the base's pipeline folder, or from single_file_config": (
            "clip_l clip_g t5xxl ae vae gemma2 byt5 text_encoder qwen3"
        ),
    },
    lost={
        "it has no place here": (
            "noise_offset multires_noise_iterations ip_noise_gamma ip_noise_gamma_random_strength zero_terminal_snr "
            "min_timestep=0 max_timestep=1000 loss_type=l2 full_bf16 full_fp16 fp8_base fp8_base_unet "
            "max_token_length=75 scale_weight_norms base_weights base_weights_multiplier dim_from_weights "
            "scale_v_pred_loss_like_noise_pred v_pred_like_loss debiased_estimation_loss weighted_captions block_lr "
            "lr_scheduler_type lr_scheduler_args use_lion_optimizer "
            "train_text_encoder network_train_text_encoder_only text_encoder_lr learning_rate_te learning_rate_te1 "
            "learning_rate_te2 learning_rate_te3 stop_text_encoder_training in_json dataset_class "
            "apply_t5_attn_mask apply_lg_attn_mask pos_emb_random_crop_rate enable_scaled_pos_embed training_shift=1 "
            "mode_scale=1.29 logit_mean logit_std=1 controlnet_model_name_or_path train_t5xxl num_last_block_to_freeze "
            "no_token_padding caption_extention"
        ),
    },
)


def model(run: Translation) -> None:
    module, name = str(run.get("network_module", "")), str(run.get("pretrained_model_name_or_path", ""))
    family = run.defaults.get("model_family") or NETWORKS.get(module) or of_encoders(run)
    if family == "flux" and run.word("model_type") == "chroma":
        family = "chroma"
    run.drop(["model_type"], "it is model_family here")
    if family == "anima":
        message = f"{run.file} trains Anima from files of its parts, which this version does not read"
        raise SettingsError(message, "model_family=auto takes a folder of diffusers' pipeline")
    run.defaults |= {
        "model_family": family or ("sd2x" if run.is_on("v2") else "sdxl" if "xl" in name.lower() else "sd1x"),
        "model_type": "lora" if module else "full",
    }
    if not family and run.defaults["model_family"] == "sd1x" and not SD1.search(name.lower()):
        reason = "taken for Stable Diffusion 1, since its name has no `xl`: otherwise set model_family"
        run.remark("pretrained_model_name_or_path", reason)
    run.drop(["v2"], "asks for nothing special")
    elsewhere(run, "pretrained_model_name_or_path", "the published base of the family is taken")
    elsewhere(run, "network_weights", "a new LoRA is trained")
    if run.number("clip_skip", 1) != 1 and run.defaults["model_family"] in ("sd1x", "sd2x"):
        run.lose("clip_skip", "it has no place here")
    run.drop(["clip_skip"], "it is not used, or 1")


# Part of the names of Stable Diffusion 1.
SD1 = re.compile(r"v1|1[._-][45]|sd-?1|sd_?1")


def of_encoders(run: Translation) -> str:
    """Return the family by the text encoders that a file names, or nothing."""
    names = {name for name in run.written if run.get(name)}
    ways = {"anima": {"qwen3"}, "lumina2": {"gemma2"}, "hunyuanimage": {"byt5"}, "sd3": {"clip_g"}}
    found = next((family for family, keys in ways.items() if keys & names), "")
    return found or ("flux" if {"ae", "t5xxl"} <= names else "")


def length(run: Translation) -> None:
    """1,600 steps where the file is silent; epochs go before steps, where both are there."""
    if run.number("max_train_epochs", 0):
        run.drop(["max_train_steps"], "max_train_epochs goes before it")
        reason = "images that fill no batch of their bucket are trained there: here an epoch leaves them out"
        run.remark("max_train_epochs", reason)
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
    own_values(run, name)
    if run.defaults["model_type"] == "lora" and (key := next((key for key in FP8 if run.is_on(key)), "")):
        run.put("base_model_precision", key, "float8")
    optimizer_arguments(run, "optimizer_args", run.get("optimizer_args") or [])


def own_values(run: Translation, name: str) -> None:
    """Give an optimizer the values that its package has where the file is silent."""
    run.defaults |= LION if OPTIMIZERS.get(name) == "lion" else {}
    run.defaults |= {"adam_weight_decay": 0.0} if name in ("prodigy", "adamwschedulefree") else {}


# Options that store the base of a network in 8 bits (e4m3).
FP8 = ("fp8_base", "fp8_base_unet")


def precision(run: Translation) -> None:
    if run.word("mixed_precision") in ("fp16", "float16"):
        run.put("mixed_precision", "mixed_precision", "bf16")
        run.remark("mixed_precision", FLOAT16)


def schedule(run: Translation) -> None:
    """Schedules named otherwise here: cosine_with_restarts of one cycle, and the ends of two others."""
    name, cycles = run.word("lr_scheduler", "constant"), run.number("lr_scheduler_num_cycles", 1)
    if run.word("optimizer_type").endswith("schedulefree"):
        run.drop(["lr_scheduler", "lr_warmup_steps"], "optimizers without a schedule leave it out there, too")
        run.defaults["lr_scheduler"] = "constant"
    elif name == "cosine_with_restarts" and cycles <= 1:
        run.put("lr_scheduler", "lr_scheduler", "cosine")
    elif name == "cosine_with_min_lr" and cycles == 1:
        run.put("lr_scheduler", "lr_scheduler", "cosine")
        rate = run.number("unet_lr", 0) or run.number("learning_rate", 2e-6)
        run.put("lr_end", "lr_scheduler_min_lr_ratio", rate * run.number("lr_scheduler_min_lr_ratio", 0))
    elif name == "polynomial":
        run.defaults["lr_end"] = 1e-7
        run.rename("lr_power", "lr_scheduler_power", 1.0)
    run.drop(["lr_scheduler_num_cycles", "lr_scheduler_power"], f"lr_scheduler={name} has none")


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
        run.drop(OF_FLOWS, "used only with another model")
        return
    run.drop(["v_parameterization"], "used only with another model")
    sampling, shift = run.word("timestep_sampling", "sigma"), run.number("discrete_flow_shift", SHIFTS[family])
    if family == "sd3":  # which has no other names (sd3_train_utils.py:894)
        sampling, shift = "sigma", run.number("training_shift", 1.0)
        run.drop(["discrete_flow_shift", "timestep_sampling", "sigmoid_scale"], "used only with another model")
    predicted = run.word("model_prediction_type", "sigma_scaled" if family in ("flux", "chroma") else "raw")
    if predicted != "raw":
        reason = (
            "there the loss compares a denoised image with noise less image (flux_train_utils.py); with raw, as its "
            "documentation has it, the velocity, as here"
        )
        run.lose("model_prediction_type", reason, predicted)
    noise_levels(run, sampling, shift, run.word("weighting_scheme", "uniform"))
    run.defaults |= {"flux_guidance_value": 3.5} if family == "flux" else {}
    run.drop(["model_prediction_type"], "the velocity is predicted here, too")
    run.drop(["training_shift"], "it is flow_schedule_shift here")


def noise_levels(run: Translation, sampling: str, shift: float, weighting: str) -> None:
    """Settings of the distribution of noise levels of sd-scripts and musubi-tuner, silent values included.

    `weighting` says how levels are drawn, with `sigma` alone.
    """
    if sampling == "sigma" and weighting == "logit_normal" and run.number("logit_mean", 0) == 0:
        sampling, scale = "shift", run.number("logit_std", 1.0)
    else:
        scale = run.number("sigmoid_scale", 1.0)
    even = {"flow_use_uniform_schedule": True, "flow_schedule_shift": 1.0}
    curves = {
        "uniform": even,
        "sigma": even | {"flow_schedule_shift": shift},
        "sigmoid": {"flow_schedule_shift": 1.0, "flow_sigmoid_scale": scale},
        "shift": {"flow_schedule_shift": shift, "flow_sigmoid_scale": scale},
        "flux_shift": {"flow_schedule_auto_shift": True, "flow_sigmoid_scale": scale},
    }
    has_no_line = sampling == "flux_shift" and run.defaults["model_family"] not in OF_AUTO_SHIFT
    if sampling not in curves or has_no_line:
        run.lose("timestep_sampling", "this version does not draw noise levels so", sampling)
    elif sampling == "sigma" and weighting not in ("uniform", "none"):
        run.lose("weighting_scheme", "this version does not draw or weigh noise levels so")
    for name, value in curves.get(sampling, {}).items():
        key = OF_CURVES.get(name, "")
        key = key if key in run.written else "timestep_sampling"
        run.put(name, key, value) if key in run.written else run.defaults.update({name: value})
    names = ["timestep_sampling", "discrete_flow_shift", "sigmoid_scale", "logit_mean", "logit_std", "mode_scale"]
    run.drop(names, f"timestep_sampling={sampling} decides")
    run.drop(["weighting_scheme"], "it weighs nothing there")


OF_FLOWS = (
    *("timestep_sampling", "discrete_flow_shift", "sigmoid_scale", "model_prediction_type", "weighting_scheme"),
    *("logit_mean", "logit_std", "mode_scale", "training_shift", "guidance_scale"),
)
OF_AUTO_SHIFT = ("flux", "qwen_image")
"""Families whose scheduler has the line by which levels are shifted with the size of an image there."""
OF_CURVES = {"flow_schedule_shift": "discrete_flow_shift", "flow_sigmoid_scale": "sigmoid_scale"}


def datasets_and_prompts(run: Translation) -> None:
    """Silent datasets take sizes and extensions of the training file; a file of prompts is read."""
    run.defaults |= {"train_batch_size": 1, "caption_dropout_probability": 0.0}
    run.values.pop("dataset_config", None)
    if "dataset_config" in run.written:
        run.drop(["train_data_dir"], "dataset_config goes before it")
    elif path := run.get("train_data_dir"):
        run.values.pop("train_data_dir", None)
        if not folders(run):
            reason = "its folders named REPEATS_PHRASE, which say what is trained, are not here: run it where they are"
            run.remark("train_data_dir", reason, effect="lost")
            run.defaults["instance_data_dir"] = path
    run.drop(OF_ALL, "it holds for datasets that are silent about it")
    run.refuse(["reg_data_dir"], "images of the class are a dataset with is_regularisation_data here, and another loss")
    prompts_of_file(run, "sample_prompts")


def folders(run: Translation) -> dict[str, Any] | None:
    """Return datasets for the folders of train_data_dir that are named REPEATS_PHRASE; None without any.

    As config_util.py:612 reads them.
    """
    if run.get("dataset_config") or not isinstance(path := run.get("train_data_dir"), str):
        return None
    found = []
    for base in [Path(path), run.file.parent / path]:
        with suppress(OSError, ValueError):
            found = found or [each for each in sorted(base.iterdir()) if each.is_dir()]
    subsets = []
    for folder in found:
        repeats, _, phrase = folder.name.partition("_")
        with suppress(ValueError):
            if int(repeats) > 0:
                subsets.append({"image_dir": str(folder), "num_repeats": int(repeats), "class_tokens": phrase})
    return {"datasets": [{"subsets": subsets}]} if subsets else None


DATASET = key_table(
    maps={"caption_dropout_probability": "caption_dropout_rate"},
    converted={},
    idle={
        FASTER: (
            "batch_size enable_bucket bucket_reso_steps validation_seed resize_interpolation debug_dataset masked_loss"
        ),
        CACHES: "cache_info",
        "nothing is shuffled": "token_warmup_min caption_separator",
        "used only with is_reg": "prior_loss_weight",
        "lengths of prompts are the model's": "max_token_length",
    },
    look={"images are held out by eval_split": "validation_split"},
    lost={
        "it has no place here": (
            "keep_tokens flip_aug color_aug random_crop bucket_no_upscale alpha_mask caption_prefix "
            "caption_tag_dropout_rate caption_dropout_every_n_epochs token_warmup_step caption_suffix "
            "keep_tokens_separator secondary_separator face_crop_aug_range custom_attributes network_multiplier=1"
        ),
        "images of the class weigh in the loss there; here a dataset with is_regularisation_data is held to the base": (
            "is_reg"
        ),
        "without masked_loss they are not masks: controls are not trained from files of sd-scripts": (
            "conditioning_data_dir"
        ),
        "captions are read from .txt files": "caption_extension=.txt metadata_file",
    },
)


LISTS = ("resolution", "face_crop_aug_range", "custom_attributes")
"""Keys of a dataset that take lists or tables."""


def entries(run: Translation, values: Mapping[str, object] | Sequence[object]) -> Iterator[Translation]:
    """Yield a translation for each subset; the training file's values hold where the dataset's are silent."""
    listed = values if isinstance(values, Mapping) else {}
    own = {name: run.written[name] for name in OF_ALL if name in run.written}
    if "dataset_repeats" in own:
        own["num_repeats"] = own.pop("dataset_repeats")
    general = own | {name: value for each in run.tables(listed, "general", LISTS) for name, value in each.items()}
    datasets = run.tables(listed, "datasets", ("subsets", *LISTS))
    of_run(run, datasets, general)
    if any(not is_off({**general, **each}.get("enable_bucket")) for each in datasets):
        run.remark("enable_bucket", NEAREST, True)
    for dataset in datasets:
        seen = set()
        for subset in run.tables(dataset, "subsets", LISTS) or [{}]:
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
    if found.get("resolution") is None:
        found.remark("resolution", "sd-scripts ends in an error without it; here images are of 512 px", 512)
    resolution = found.values.pop("resolution", None) or 512
    if isinstance(resolution, str):
        resolution = [int(side) if side.strip().isdigit() else side for side in resolution.split(",")]
        resolution = resolution[0] if len(resolution) == 1 else resolution
    found.defaults |= size_of(resolution, is_bucketed)
    if is_bucketed:
        buckets(found, found.defaults["resolution"])
    found.drop(["min_bucket_reso", "max_bucket_reso"], "buckets have the area of resolution")
    captions(found, path)
    around(found, path)
    subfolders(found, "image_dir")
    tags(found)
    if found.is_on("masked_loss") and found.get("conditioning_data_dir"):
        reason = "the loss is over the mask alone here, and there over the whole image, of which the rest is 0"
        found.look("conditioning_data_dir", reason)
        condition(found, found.get("conditioning_data_dir"), "mask")
    found.answer(DATASET)
    return found


def around(found: Translation, path: object) -> None:
    """Put caption_prefix and caption_suffix around captions, between blanks (train_util.py:821).

    There they are put around the text of the whole file, of which a line is taken afterwards.
    """
    before, behind = (str(found.get(name) or "") for name in ("caption_prefix", "caption_suffix"))
    several = has_several_lines([file for file in files_in(path) if file.suffix == ".txt"])
    if not before + behind or (several and (behind or found.defaults.get("caption_lines") != "first")):
        return
    key = "caption_prefix" if before else "caption_suffix"
    put_around(found, key, f"{before} " if before else "", f" {behind}" if behind else "")
    found.drop(["caption_prefix", "caption_suffix"], "it is of caption_filter_list or instance_prompt here")


ORDERS = 10
"""Orders of the tags of a caption, which are encoded before the training here."""


def tags(found: Translation) -> None:
    """Shuffle tags as there, between commas, but in so many orders."""
    kept, joined = int(found.number("keep_tokens", 0)), found.get("caption_separator", ",")
    if not found.is_on("shuffle_caption"):
        found.drop(["keep_tokens", "keep_tokens_separator", "secondary_separator"], "nothing is shuffled")
    elif joined == "," and not found.get("keep_tokens_separator") and not found.get("secondary_separator"):
        orders = {"enable": True, "count": ORDERS, "position_start": kept, "include_original": False}
        found.remark("shuffle_caption", f"there in another order each time, and here in one of {ORDERS}")
        found.put("caption_shuffle", "shuffle_caption", orders)
        found.drop(["keep_tokens", "caption_separator"], "it is caption_shuffle here")


def captions(found: Translation, path: object) -> None:
    """Sources of captions: the first line of a file, or the class's phrase for images without one."""
    extension = str(found.get("caption_extension", ""))
    # sd-scripts adds the dot, and has .caption by itself.
    suffix = f".{extension.lstrip('.')}" if extension else ".caption"
    tokens = found.get("class_tokens")
    files = [file for file in files_in(path) if file.suffix == suffix]
    stems = {file.stem for file in files}
    images = [file for file in files_in(path) if file.suffix.lower() in IMAGES]
    if tokens is not None and images and all(image.stem in stems for image in images):
        found.drop(["class_tokens"], f"all images have a {suffix} file, which goes before it")
    elif tokens is not None and (files or (suffix == ".txt" and not files_in(path))):
        found.lose("class_tokens", f"images with a {suffix} file have that caption there, and the others this phrase")
    elif tokens is not None:
        if not files_in(path):
            found.look("class_tokens", f"the caption of all images here; there {suffix} files go before it")
        found.drop(["class_tokens", "caption_extension"], "it is instance_prompt here")
        found.defaults |= {"caption_strategy": "instanceprompt", "instance_prompt": tokens}
        return
    if suffix != ".txt":
        found.values.pop("caption_extension", None)
        found.remark("caption_extension", "captions are read from .txt files", suffix, "lost")
    is_drawn = found.values.pop("enable_wildcard", False)
    if is_drawn and (file := choices_in(files)):
        found.lose("enable_wildcard", f"one of {{a|b}} in {file} is drawn there, and here the text is the caption")
    found.values.pop("caption_extension", None)
    found.defaults["caption_lines"] = "alternatives" if is_drawn else "first"


# Longer side of a bucket of 2:1 by the edge of its square; few pictures are longer.
LONG = math.sqrt(2)


def buckets(found: Translation, edge: object) -> None:
    """Take the bucket sizes, and name the limits that one of 2:1 passes: others within have another area."""
    reason = "there no side of a bucket passes it; here buckets have the area of resolution, whatever their sides"
    most, least = found.get("max_bucket_reso", 1024), found.get("min_bucket_reso", 256)
    step = found.get("bucket_reso_steps", 64)
    if not all(type(each) is int and 0 < each < LARGEST for each in (edge, most, least, step)):
        return
    assert isinstance(edge, int)
    if edge * LONG > most:
        found.look("max_bucket_reso", reason, most)
    if edge / LONG < least:
        found.look("min_bucket_reso", reason, least)
    if least <= edge / LONG and edge * LONG <= most and step >= LATENT_PX:
        found.defaults |= closest(sizes_of_area(edge**2, step, range(least, most + 1, step)))


LARGEST = 1 << 16


# Settings of a run that are keys of datasets there: key, name in the training file, default.
PER_DATASET = (
    ("train_batch_size", "batch_size", "train_batch_size", 1),
    ("aspect_bucket_alignment", "bucket_reso_steps", "bucket_reso_steps", 64),
)


def of_run(
    run: Translation,
    datasets: Sequence[Mapping[str, object]],
    general: Mapping[str, object],
    names: Sequence[tuple[str, str, str, int]] = PER_DATASET,
) -> None:
    """Give the run what sd-scripts and musubi-tuner have per dataset: batch size and step of sizes.

    What the dataset file says goes before the training file (config_util.py, `search_value`).
    """
    for setting, key, of_file, default in names:
        silent = general.get(key, run.get(of_file, default))
        values = [each.get(key, silent) for each in datasets]
        found = [value for number, value in enumerate(values) if value not in values[:number]]
        if len(found) > 1:
            run.remark(key, "here one value holds for all datasets", sorted(found, key=str), "lost")
        elif found:
            run.values.pop(of_file, None)
            run.defaults[setting] = found.pop()
    steps = run.defaults.get("aspect_bucket_alignment")
    if isinstance(steps, int) and 0 < steps < LATENT_PX:
        run.remark("bucket_reso_steps", f"sides are multiples of {LATENT_PX}, the size of a latent cell, here", steps)
        run.defaults["aspect_bucket_alignment"] = LATENT_PX


LATENT_PX = 8


SD_SCRIPTS = ForeignTrainer(
    KOHYA,
    RUN,
    (model, network, length, optimizer, precision, schedule, warmup, objective, datasets_and_prompts),
    entries,
    dataset_file="dataset_config",
    folders=folders,
    is_flat=True,
)
