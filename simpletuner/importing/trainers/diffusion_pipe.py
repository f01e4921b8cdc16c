"""diffusion-pipe (8f83dbf): its TOML files of a run and of datasets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.importing.folders import (
    VIDEOS,
    blanks,
    closest,
    condition,
    files_in,
    folder_entry,
    put_around,
    size_of,
    stills_and_clips,
    subfolders,
)
from simpletuner.importing.foreign_trainer import (
    CACHES,
    FASTER,
    LION,
    ForeignTrainer,
    Translation,
    key_table,
    two_betas,
)
from simpletuner.importing.trainers.sd_scripts import OPTIMIZER, SCHEDULE
from simpletuner.importing.trainers.sd_scripts_networks import FUSED
from simpletuner.settings.foreign.recognition import PIPE

FAMILIES = {
    **{name: name for name in ("sdxl", "flux", "flux2", "sd3", "chroma", "wan", "qwen_image", "z_image", "auraflow")},
    **{name: name for name in ("krea2", "hidream")},
    "lumina_2": "lumina2",
    "ltx_video": "ltxvideo",
    "ltx2": "ltxvideo2",
    "hunyuan_image": "hunyuanimage",
    "hunyuan_video_15": "hunyuanvideo",
    "ernie_image": "ernie",
    "cosmos_predict2": "cosmos",
}
OF_FLUX, REFINED = "transformer_blocks.*,single_transformer_blocks.*", "layers.*,noise_refiner.*,context_refiner.*"
BLOCKS = {
    **dict.fromkeys(("flux", "flux2", "chroma", "hunyuanimage"), OF_FLUX),
    **dict.fromkeys(("z_image", "lumina2"), REFINED),
    **dict.fromkeys(("sd3", "qwen_image", "ltxvideo", "ltxvideo2", "hunyuanvideo", "cosmos"), "transformer_blocks.*"),
    "auraflow": "joint_transformer_blocks.*,single_transformer_blocks.*",
    "wan": "blocks.*",
    "ernie": "layers.*",
    "hidream": "double_stream_blocks.*,single_stream_blocks.*",
    "krea2": "transformer_blocks.*,text_fusion.*,txt_in.*",
    "sdxl": "*.attentions.*,*.time_emb_proj",
}
"""Linear layers of the block classes that an adapter has there (adapter_target_modules of pipelines)."""
FUSED_THERE = ("flux2", "chroma", "hunyuanimage", "z_image", "lumina2")
"""Families whose q, k and v are one matrix in the files that it loads."""
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
        "assistant_lora": "model.merge_adapters adapter.fuse_adapters",
        "caption_dropout_probability": "uncond_fraction",
        "tokenizer_max_length": "model.max_sequence_length",
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
            "map_num_proc reentrant_activation_checkpointing logging_steps optimizer.stabilize "
            "eval_image_micro_batch_size_per_gpu model.text_encoder_nf4 model.text_encoder_fp8 model.llama3_4bit"
        ),
        CACHES: "regenerate_cache model.cache_text_embeddings",
    },
    look={
        "a secret is not copied: set it in the environment": "monitoring.wandb_api_key",
        "parts of a model come from one pipeline folder: name it as pretrained_model_name_or_path": (
            "model.transformer_path model.vae_path model.llm_path model.clip_path model.text_encoder_path "
            "model.ckpt_path model.text_encoders model.vae model.t5_path model.diffusion_model model.byt5_path "
            "model.single_file_path model.llm_adapter_path model.llama3_path model.audio_vae model.text_encoder"
        ),
        "its own state is not read: a LoRA that it has saved goes on as lora_init": "resume_from_checkpoint",
    },
    lost={
        "it has no place here": (
            "pipeline_stages=1 force_constant_lr huber_delta smooth_l1_beta model.v_pred adapter.exclude_modules "
            "model.timestep_sample_method=logit_normal model.debiased_estimation_loss model.multiscale_loss_weight "
            "model.text_encoder_1_lr model.text_encoder_2_lr model.max_t model.min_t=0 model.llm_adapter_lr=0 "
            "model.bypass_guidance_embedding model.lumina_shift model.image_shift model.cfg=1 model.self_attn_lr "
            "model.cross_attn_lr model.mlp_lr model.mod_lr model.first_frame_conditioning_p=0 adapter.rank_dropout "
            "model.max_llama3_sequence_length=128 optimizer.beta2_half_life model.use_llm_adapter"
        ),
        "an alpha raises an error there: the scale is 1": "adapter.alpha",
    },
)


def model(run: Translation) -> None:
    """Family, kind and layers."""
    kind, has_adapter = run.word("model.type"), "adapter.type" in run.written or bool(run.below("adapter"))
    if kind not in FAMILIES:
        message = f"{run.file} trains {run.get('model.type')}, a model that this version does not have"
        raise SettingsError(message, f"model.type is one of {', '.join(sorted(FAMILIES))} here")
    family = FAMILIES[kind]
    run.defaults |= {
        "model_family": family,
        "model_type": "lora" if has_adapter else "full",
        "caption_dropout_probability": 0.0,
        "max_grad_norm": 1.0,
        # Models whose patches span 32 px.
        "aspect_bucket_alignment": 32 if kind in ("ltx_video", "hunyuan_image", "ltx2") else 16,
    }
    if has_adapter:
        run.defaults["lora_target_modules"] = BLOCKS[family]
        run.defaults["lora_type"] = {"lokr": "lokr"}.get(run.word("adapter.type"), "lora")
    precision(run, has_adapter)
    if has_adapter and family in FUSED_THERE:
        run.remark("adapter.type", FUSED)
    text_encoders(run, family)


WITH_ENCODERS = "both text encoders are trained there, too, with an adapter or whole, which this version does not do"


def text_encoders(run: Translation, family: str) -> None:
    """Lose SDXL's text encoders, trained unless their rates are 0 (lines 407 and 615 of its sdxl.py)."""
    rates = [key for key in ("model.text_encoder_1_lr", "model.text_encoder_2_lr") if run.get(key) == 0]
    if family == "sdxl" and len(rates) < 2:
        run.remark("model.type", WITH_ENCODERS, effect="lost")
    if family == "sdxl":
        run.defaults["prediction_type"] = "epsilon"
        if run.get("model.unet_lr") is not None:
            run.rename("learning_rate", "model.unet_lr")
            run.drop(["optimizer.lr"], "the rate of the U-Net goes before it")
    run.refuse(["model.unet_lr"], "it is of SDXL alone")


def precision(run: Translation, has_adapter: bool) -> None:
    """Weights of a base in 8 bits, where an adapter is trained."""
    keys = ("model.transformer_dtype", "model.diffusion_model_dtype")
    for key in keys:
        if has_adapter and run.word(key).startswith("float8"):
            run.put("base_model_precision", key, "float8")
    run.drop(keys, FASTER)


def monitoring(run: Translation) -> None:
    """Its tracker, wandb."""
    names = ("monitoring.wandb_tracker_name", "monitoring.wandb_run_name")
    if run.is_on("monitoring.enable_wandb"):
        run.put("report_to", "monitoring.enable_wandb", "wandb")
        for setting, key in zip(("tracker_project_name", "tracker_run_name"), names, strict=True):
            if run.get(key):
                run.rename(setting, key)
    run.drop(["monitoring.enable_wandb", *names], "nothing is tracked")


def levels(run: Translation) -> None:
    """Noise levels: logit-normal, unshifted where silent; flux_shift is FLUX's line for all models."""
    family, is_uniform = run.defaults["model_family"], run.word("model.timestep_sample_method") == "uniform"
    if family == "sdxl":
        run.drop(["model.flux_shift", "model.shift", "model.sigmoid_scale"], "used only with another model")
        return
    if is_uniform:
        run.put("flow_use_uniform_schedule", "model.timestep_sample_method", True)
        run.drop(["model.sigmoid_scale"], "it has no effect with timestep_sample_method=uniform")
    if run.get("model.shift"):
        run.drop(["model.flux_shift"], "shift goes before it")
    elif run.is_on("model.flux_shift") and family == "flux":
        run.put("flow_schedule_auto_shift", "model.flux_shift", True)
    else:
        run.refuse(["model.flux_shift"], "the scheduler of this model shifts by another line than FLUX's")
        run.defaults["flow_schedule_shift"] = 1.0
    run.drop(["model.flux_shift"], "off")


def batches(run: Translation) -> None:
    """Take a batch that is the same for all sizes, images and clips."""
    for key in ("micro_batch_size_per_gpu", "image_micro_batch_size_per_gpu"):
        written = run.get(key)
        pairs = written if isinstance(written, list) else [] if written is None else [written]
        sizes = [each[1] if isinstance(each, list) and len(each) == 2 else each for each in pairs]
        value = sizes[0] if sizes and all(size == sizes[0] for size in sizes) else None
        if sizes and (value is None or value != run.of("train_batch_size", value)):
            run.lose(key, "here one batch holds for all sizes, of images and of clips")
        elif sizes and "train_batch_size" not in run.taken:
            run.put("train_batch_size", key, value)
        else:
            run.drop([key], "it is that of the others")
    run.defaults |= {} if "train_batch_size" in run.taken else {"train_batch_size": 1}
    if run.is_on("optimizer.gradient_release"):
        if run.number("gradient_accumulation_steps", 1) > 1:
            run.lose("optimizer.gradient_release", "there each of the accumulated batches is a step of the optimizer")
        else:
            run.put("optimizer_release_gradients", "optimizer.gradient_release", True)
    run.drop(["optimizer.gradient_release"], "off")


def optimizer(run: Translation) -> None:
    name = run.word("optimizer.type")
    if name == "prodigy":  # of pytorch_optimizer there, with other defaults than prodigyopt's
        run.remark("optimizer.type", "there it is pytorch_optimizer's: compare its defaults, such as d0 and decay")
    run.defaults |= LION if name in ("lion", "lion8bit", "pagedlion8bit") else {}
    if name == "adamw_optimi":  # torch-optimi 0.3.3
        run.defaults |= {"adam_beta1": 0.9, "adam_beta2": 0.99, "adam_epsilon": 1e-6, "adam_weight_decay": 0.01}
    two_betas(run, "optimizer.betas")


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
    idle={
        FASTER: (
            "enable_ar_bucket resolutions frame_buckets min_ar max_ar num_ar_buckets ar_buckets shuffle_metadata "
            "cache_shuffle_delimiter"
        ),
    },
    look={},
    lost={
        "it has no place here": (
            "shuffle_tags caption_prefix size_buckets subsample_ratio=1 online_captions default_mask_file "
            "skip_empty_caption=true"
        ),
        "masks and references of videos are not trained by this version": "mask_path control_path",
    },
)


LISTS = ("resolutions", "frame_buckets", "ar_buckets", "size_buckets")
"""Keys of a dataset that take lists."""


def entries(run: Translation, values: Mapping[str, object] | Sequence[object]) -> Iterator[Translation]:
    """Yield translations for each folder and resolution, which are datasets of their own here."""
    listed = values if isinstance(values, Mapping) else {}
    general = {name: value for name, value in listed.items() if name != "directory"}
    if run.only_datasets:
        run.remark("resolutions", "set aspect_bucket_alignment=16, as there", listed.get("resolutions"))
    for directory in run.tables(listed, "directory", LISTS):
        given = {**general, **directory}
        if given.get("num_repeats", 1) == 0:
            reason = "with 0 repeats nothing of it is trained there, and it is left out here"
            run.remark("path", reason, given.get("path"))
            continue
        yield from of_folder(run, given)


def of_folder(run: Translation, given: Mapping[str, object]) -> Iterator[Translation]:
    """Yield a dataset for each resolution, and for stills and clips. Remarks on the folder are made once."""
    written = given.get("resolutions") or [512]
    resolutions = written if isinstance(written, list) else [written]
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
            found.defaults |= size_of(edge_of(resolution), found.is_on("enable_ar_bucket")) | kind
            if found.is_on("enable_ar_bucket"):
                found.defaults |= nearest(run, given, edge_of(resolution))
            passes(found)
            if "dataset_type" not in kind:
                beside(found, edge_of(resolution))
            remarks(found, given)
            blanks(run, found, "path")
            found.answer(DATASET)
            if not is_first:
                found.left_out.clear()
            is_first = False
            yield found


def edge_of(resolution: object) -> object:
    # Without buckets images are squares there, whatever its sides.
    if isinstance(resolution, list) and len(resolution) == 2 and all(type(side) is int for side in resolution):
        return math.isqrt(abs(math.prod(resolution)))
    return resolution


def nearest(run: Translation, given: Mapping[str, Any], edge: object) -> dict[str, Any]:
    """Return the keys of a dataset with a folder's aspects; none for what diffusion-pipe could not read."""
    ratios = [ratio(each) for each in given["ar_buckets"]] if isinstance(given.get("ar_buckets"), list) else []
    least, most, count = (positive(given.get(name)) for name in ("min_ar", "max_ar", "num_ar_buckets"))
    if not ratios and least * most * count:
        steps = min(int(count), MOST)
        ratios = [least * (most / least) ** (number / max(steps - 1, 1)) for number in range(steps)]
    area, step = positive(edge), run.of("aspect_bucket_alignment", 16)
    if not all(ratios) or not ratios or not area:
        return {}
    sides = ((area * math.sqrt(each), area / math.sqrt(each)) for each in ratios)
    return closest((max(step, round(w / step) * step), max(step, round(h / step) * step)) for w, h in sides)


MOST = 250
"""Aspects of a folder that a dataset here has at most."""


def positive(value: object) -> float:
    """Return a number above 0; 0 for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if 0 < value < math.inf else 0.0


def ratio(value: object) -> float:
    """Return an aspect, which may be written as width and height; 0 for what is none."""
    width, height = value if isinstance(value, list) and len(value) == 2 else (value, 1)
    return positive(width) / positive(height) if positive(height) else 0.0


def passes(found: Translation) -> None:
    """Take shuffled copies of each caption, which are samples of their own there."""
    copies = int(found.number("cache_shuffle_num", 0))
    if copies > 1 and str(found.get("cache_shuffle_delimiter", ",")).strip() == ",":
        times = int(found.number("num_repeats", 1)) * copies
        found.put("caption_shuffle", "cache_shuffle_num", {"enable": True, "count": copies, "include_original": False})
        found.defaults["repeats"] = times - 1
        found.taken.pop("repeats", None)
        reason = f"an image is {copies} samples there, each with another order of its tags; here it has {times} passes"
        found.remark("cache_shuffle_num", reason)
    elif prefix := str(found.get("caption_prefix") or ""):
        put_around(found, "caption_prefix", prefix)
    found.refuse(["cache_shuffle_num"], "captions are split at commas here")


def beside(found: Translation, resolution: object) -> None:
    """Masks and references, of the names of their images."""
    if found.get("mask_path"):
        condition(found, found.get("mask_path"), "mask")
        reason = "an image without a mask ends the run here, and the loss is over the mask, there over the whole image"
        found.look("mask_path", reason)
    if found.get("control_path"):
        condition(found, found.get("control_path"), "reference_strict", **size_of(resolution, is_bucketed=True))
        found.look("control_path", "an image whose reference has another aspect is left out here, and cropped there")


def kinds(given: Mapping[str, object], is_middle: bool) -> Iterator[dict[str, object]]:
    """Yield the additions to a folder's entry, for its stills and for its clips, which are two datasets here.

    Videos are never of the bucket of 1 frame there (dataset.py, `_find_closest_ar_bucket`).
    """
    place = {"clip_position": "middle"} if is_middle else {}
    lengths = clip_lengths(given)
    yield from stills_and_clips(given.get("path"), {"frame_buckets": lengths, **place} if lengths else {})


def clip_lengths(given: Mapping[str, object]) -> list[object]:
    lengths = given.get("frame_buckets") or []
    if not isinstance(lengths, list) or not all(type(each) in (int, float) for each in lengths):
        return [lengths]  # which the dataset refuses, with what it takes
    return sorted(size for size in lengths if size != 1)


def remarks(found: Translation, given: Mapping[str, object]) -> None:
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
    if given.get("enable_ar_bucket") and "crop_aspect" not in found.defaults:
        names = ("min_ar", "max_ar", "num_ar_buckets", "ar_buckets")
        sizes = {name: given[name] for name in names if name in given}
        reason = (
            "an image takes the nearest of a few aspects there, sides multiples of 16; here any aspect, cropping least"
        )
        found.remark("enable_ar_bucket", reason, sizes or True)


DIFFUSION_PIPE = ForeignTrainer(
    PIPE, RUN, (model, levels, batches, optimizer, length, monitoring), entries, dataset_file="dataset"
)
