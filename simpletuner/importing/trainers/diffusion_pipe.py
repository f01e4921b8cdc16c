"""diffusion-pipe (8f83dbf): its TOML files of a run and of datasets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from simpletuner.importing.folders import VIDEOS, files_in, folder_entry, size_of, stills_and_clips, subfolders
from simpletuner.importing.foreign_trainer import LION, ForeignTrainer, Translation, key_table
from simpletuner.importing.trainers.sd_scripts import FASTER, OPTIMIZER, SCHEDULE
from simpletuner.settings.foreign.recognition import PIPE

FAMILIES = {
    **{name: name for name in ("sdxl", "flux", "flux2", "sd3", "chroma", "wan", "qwen_image", "z_image", "auraflow")},
    "lumina_2": "lumina2",
    "ltx_video": "ltxvideo",
    "ltx2": "ltxvideo2",
}
BLOCKS = {
    "flux": "transformer_blocks.*,single_transformer_blocks.*",
    "flux2": "transformer_blocks.*,single_transformer_blocks.*",
    "chroma": "transformer_blocks.*,single_transformer_blocks.*",
    "auraflow": "joint_transformer_blocks.*,single_transformer_blocks.*",
    "sd3": "transformer_blocks.*",
    "qwen_image": "transformer_blocks.*",
    "wan": "blocks.*",
    "ltxvideo": "transformer_blocks.*",
    "z_image": "layers.*,noise_refiner.*,context_refiner.*",
    "lumina2": "layers.*,noise_refiner.*,context_refiner.*",
}
"""Linear layers of the classes of blocks that an adapter has there (adapter_target_modules of each pipeline)."""
CAPTIONS = "captions.json"

RUN = key_table(
    maps={
        "output_dir": "output_dir",
        "num_train_epochs": "epochs",
        "max_train_steps": "max_steps",
        "train_batch_size": "micro_batch_size_per_gpu",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "max_grad_norm": "gradient_clipping",
        "lr_warmup_steps": "warmup_steps",
        "gradient_checkpointing": "activation_checkpointing",
        "checkpoint_step_interval": "save_every_n_steps",
        "vae_batch_size": "caching_batch_size",
        "pretrained_model_name_or_path": "model.diffusers_path model.checkpoint_path",
        "flow_schedule_shift": "model.shift",
        "flow_schedule_auto_shift": "model.flux_shift",
        "flow_sigmoid_scale": "model.sigmoid_scale",
        "snr_gamma": "model.min_snr_gamma",
        "flux_guidance_value": "model.guidance",
        "lora_rank": "adapter.rank",
        "lora_dropout": "adapter.dropout",
        "lora_init": "adapter.init_from_existing",
        "lokr_factor": "adapter.decompose_factor",
        "learning_rate": "optimizer.lr",
        "adam_epsilon": "optimizer.eps",
        "adam_weight_decay": "optimizer.weight_decay",
    },
    converted={"lr_scheduler": SCHEDULE, "optimizer.type": OPTIMIZER},
    idle={
        FASTER: (
            "model.type adapter.type save_every_n_epochs save_every_n_examples checkpoint_every_n_minutes "
            "checkpoint_every_n_epochs save_dtype steps_per_print partition_method partition_split model.dtype "
            "adapter.dtype eval_every_n_epochs eval_every_n_steps eval_every_n_examples eval_before_first_step "
            "eval_micro_batch_size_per_gpu image_eval_micro_batch_size_per_gpu eval_gradient_accumulation_steps "
            "eval_datasets disable_block_swap_for_eval compile blocks_to_swap video_clip_mode x_axis_examples "
            "map_num_proc reentrant_activation_checkpointing model.transformer_dtype model.vae_dtype logging_steps "
            "optimizer.stabilize optimizer.gradient_release"
        ),
    },
    look={
        "it is report_to and tracker_project_name here": (
            "monitoring.enable_wandb monitoring.wandb_api_key monitoring.wandb_tracker_name monitoring.wandb_run_name "
            "monitoring.log_dir"
        ),
        "parts of a model come from one pipeline folder: name it as pretrained_model_name_or_path": (
            "model.transformer_path model.vae_path model.llm_path model.clip_path model.text_encoder_path "
            "model.ckpt_path model.text_encoders model.vae model.t5_path model.unet_path"
        ),
        "write the number of noise levels as flow settings": "model.timestep_mean model.timestep_std=1",
    },
    lost={
        "it has no place here": (
            "pipeline_stages=1 force_constant_lr pseudo_huber_c image_micro_batch_size_per_gpu model.v_pred "
            "model.timestep_sample_method=logit_normal adapter.fuse_adapters model.debiased_estimation_loss "
            "model.text_encoder_1_lr model.text_encoder_2_lr model.unet_lr model.multiscale_loss_weight model.max_t "
            "model.min_t=0 model.llm_adapter_lr model.bypass_guidance_embedding=true adapter.exclude_linear_modules"
        ),
        "an alpha raises an error there: the scale is 1": "adapter.alpha",
    },
)


def model(run: Translation) -> None:
    """Family, kind and layers; what a whole SDXL also trains there."""
    kind, has_adapter = run.word("model.type"), "adapter.type" in run.written or bool(run.below("adapter"))
    family = FAMILIES.get(kind, kind)
    run.defaults |= {
        "model_family": family,
        "model_type": "lora" if has_adapter else "full",
        "caption_dropout_probability": 0.0,
        "max_grad_norm": 1.0,
        "train_batch_size": 1,
        # Models whose patches span 32 px.
        "aspect_bucket_alignment": 32 if kind in ("ltx_video", "hunyuan_image", "ltx2") else 16,
        **({} if kind == "sdxl" else {"flow_schedule_shift": 1.0}),
    }
    if kind == "sdxl" and not has_adapter:
        run.remark("model.type", WITH_ENCODERS, effect="lost")
    if has_adapter and family in BLOCKS:
        run.defaults["lora_target_modules"] = BLOCKS[family]
        run.defaults["lora_type"] = {"lokr": "lokr"}.get(run.word("adapter.type"), "lora")
    elif has_adapter:
        run.remark("adapter", "it adapts all linear layers of the blocks: set lora_target_modules", "lora", "lost")
    if run.word("model.timestep_sample_method") == "uniform":
        run.put("flow_use_uniform_schedule", "model.timestep_sample_method", True)


WITH_ENCODERS = "without an adapter both text encoders are trained there, too, which this version does not do"


def optimizer(run: Translation) -> None:
    name, betas = run.word("optimizer.type"), run.values.pop("optimizer.betas", None)
    run.defaults |= LION if name in ("lion", "lion8bit", "pagedlion8bit") else {}
    if name == "adamw_optimi":  # torch-optimi 0.3.3
        run.defaults |= {"adam_beta1": 0.9, "adam_beta2": 0.99, "adam_epsilon": 1e-6, "adam_weight_decay": 0.01}
    if isinstance(betas, list) and len(betas) == 2:
        for setting, beta in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
            run.put(setting, "optimizer.betas", beta)


def length(run: Translation) -> None:
    """Length of a run, and the span of its cosine (train.py:851-862)."""
    steps, schedule = run.get("max_steps"), run.word("lr_scheduler")
    if schedule == "cosine":
        run.defaults["lr_end"] = 1e-6
    if schedule == "cosine" and steps:
        reason = "there it spans all epochs, and max_steps ends the run before; here it would span max_train_steps"
        run.lose("lr_scheduler", reason)
    elif schedule == "cosine" and run.get("warmup_steps"):
        run.remark("lr_scheduler", "it begins after the warm-up there, and ends as many steps short of its end")
    if steps and (epochs := run.get("epochs")) is not None:
        reason = (
            f"there the run ends after {epochs} epochs if these are fewer than max_steps; here max_train_steps counts"
        )
        run.look("epochs", reason)


DATASET = key_table(
    maps={},
    converted={},
    idle={FASTER: "enable_ar_bucket resolutions frame_buckets min_ar max_ar num_ar_buckets ar_buckets"},
    look={},
    lost={
        "it has no place here": (
            "cache_shuffle_num cache_shuffle_delimiter shuffle_tags caption_prefix size_buckets "
            "skip_empty_caption=true multi_frame_dataset"
        ),
        "masks are a dataset of their own with conditioning_type=mask here: write it": "mask_path",
        "pairs are a dataset of their own with conditioning_type here: write it": "control_path target_path",
    },
)


def entries(run: Translation, values: Mapping[str, Any] | Sequence[Any]) -> Iterator[Translation]:
    """Yield translations for each folder and resolution, which are datasets of their own here."""
    listed = values if isinstance(values, Mapping) else {}
    general = {name: value for name, value in listed.items() if name != "directory"}
    if run.only_datasets:
        run.remark("resolutions", "set aspect_bucket_alignment=16, as there", listed.get("resolutions"))
    for directory in listed.get("directory") or []:
        given = {**general, **directory}
        if given.get("num_repeats", 1) == 0:
            reason = "with 0 repeats nothing of it is trained there, and it is left out here"
            run.remark("path", reason, given.get("path"))
            continue
        yield from of_folder(run, given)


def of_folder(run: Translation, given: Mapping[str, Any]) -> Iterator[Translation]:
    """Yield a dataset for each resolution, and for stills and clips. What is said of the folder is said once."""
    resolutions = given.get("resolutions") or [512]
    is_first = True
    for resolution in resolutions:
        for kind in kinds(given, is_middle=run.word("video_clip_mode") == "single_middle"):
            found = run.within(given)
            folder_entry(found, "path", "num_repeats")
            if len(resolutions) > 1:
                shown = "x".join(map(str, resolution)) if isinstance(resolution, list) else resolution
                found.defaults["id"] = f"{found.defaults['id']}-{shown}"
            # Images without a caption are left out there (dataset.py:484).
            found.defaults |= {"caption_lines": "one", "skip_uncaptioned": True}
            found.defaults |= size_of(resolution, found.is_on("enable_ar_bucket")) | kind
            remarks(found, given)
            found.answer(DATASET)
            if not is_first:
                found.left_out.clear()
            is_first = False
            yield found


def kinds(given: Mapping[str, object], is_middle: bool) -> Iterator[dict[str, Any]]:
    """Yield the additions to a folder's entry, for its stills and for its clips, which are two datasets here.

    Videos are never of the bucket of 1 frame there (dataset.py, `_find_closest_ar_bucket`).
    """
    place = {"clip_position": "middle"} if is_middle else {}
    lengths = clip_lengths(given)
    yield from stills_and_clips(given.get("path"), {"frame_buckets": lengths, **place} if lengths else {})


def clip_lengths(given: Mapping[str, object]) -> list[Any]:
    lengths = given.get("frame_buckets") or []
    if not isinstance(lengths, list) or not all(type(each) in (int, float) for each in lengths):
        return [lengths]  # which the dataset refuses, with what it takes
    return sorted(size for size in lengths if size != 1)


def remarks(found: Translation, given: Mapping[str, Any]) -> None:
    """Say how a folder is read differently here: buckets, clips, captions, subfolders."""
    subfolders(found, "path")
    path, files = given.get("path"), files_in(given.get("path"))
    if any(file.name == CAPTIONS for file in files):
        reason = f"{path}/{CAPTIONS} goes before .txt files there, and is not read here: the .txt files are"
        found.remark(CAPTIONS, reason, str(path))
    if clip_lengths(given):
        if not files:
            reason = "one dataset is of its stills and one of its clips: remove that of which the folder has none"
            found.remark("frame_buckets", reason)
        if not files or any(file.suffix.lower() in VIDEOS for file in files):
            reason = "clips are brought to the model's frames per second there: set video.fps, or they keep their own"
            found.remark("frame_buckets", reason)
    if given.get("enable_ar_bucket"):
        names = ("min_ar", "max_ar", "num_ar_buckets", "ar_buckets")
        sizes = {name: given[name] for name in names if name in given}
        reason = (
            "an image takes the nearest of a few aspects there, sides multiples of 16; here any aspect, cropping least"
        )
        found.remark("enable_ar_bucket", reason, sizes or True)


DIFFUSION_PIPE = ForeignTrainer(PIPE, RUN, (model, optimizer, length), entries, dataset_file="dataset")
