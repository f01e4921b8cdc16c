"""musubi-tuner (30c658c): its TOML files of a run and of datasets."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.importing.folders import (
    IMAGES,
    NEAREST,
    blanks,
    caches,
    closest,
    condition,
    files_in,
    folder_entry,
    prompts_of_file,
    size_of,
    sizes_of_area,
    subfolders,
)
from simpletuner.importing.foreign_trainer import (
    FASTER,
    INNER_DROPOUT,
    ForeignTrainer,
    Translation,
    first_existing,
    key_table,
    optimizer_arguments,
)
from simpletuner.importing.trainers.sd_scripts import (
    FP8,
    LARGEST,
    OPTIMIZER,
    SD_SCRIPTS,
    length,
    noise_levels,
    of_run,
    own_values,
    precision,
    schedule,
    warmup,
)
from simpletuner.importing.trainers.sd_scripts_networks import FUSED, arguments_of
from simpletuner.settings.declared.errors import shorten
from simpletuner.settings.foreign.original_names import is_off
from simpletuner.settings.foreign.recognition import MUSUBI
from simpletuner.settings.values.spelling import normalize_name

NETWORKS = {
    "lora_wan": "wan",
    "lora_zimage": "z_image",
    "lora_flux": "flux",
    "lora_flux_2": "flux2",
    "lora_qwen_image": "qwen_image",
    "lora_krea2": "krea2",
    "lora_hv_1_5": "hunyuanvideo",
    "lora_kandinsky": "kandinsky5_video",
}
"""Families by the end of a network's module."""
OTHER_MODELS = {
    "lora": "HunyuanVideo of 2024",
    "lora_framepack": "FramePack",
    "lora_hidream_o1": "HiDream-O1",
    "lora_ideogram4": "Ideogram 4",
}
"""Models without a family here."""
KINDS = {"loha": "loha", "lokr": "lokr"}
BOTH = ("transformer_blocks.*", "single_transformer_blocks.*")
# Layers that its networks adapt, by diffusers' names: the blocks' linear ones, mostly without modulation.
LAYERS: dict[str, tuple[str, ...]] = {
    "wan": ("blocks.*",),
    "z_image": ("layers.*.attention.*", "layers.*.feed_forward.*"),
    "flux": (
        *("transformer_blocks.*.attn.*", "transformer_blocks.*.ff.*", "transformer_blocks.*.ff_context.*"),
        *("single_transformer_blocks.*.attn.*", "single_transformer_blocks.*.proj_*"),
    ),
    "flux2": BOTH,
    # img_mod.1 and txt_mod.1 too: its pattern for modulation is matched with dots (lora_qwen_image.py:37).
    "qwen_image": ("transformer_blocks.*",),
    "krea2": ("*",),
    "hunyuanvideo": ("transformer_blocks.*",),
    "kandinsky5_video": ("*_transformer_blocks.*_attention.*", "*_transformer_blocks.*.feed_forward.*"),
}
SHIFTS = {"flux": "flux_shift", "qwen_image": "qwen_shift"}
"""Samplings that shift by the size of an image on the line that the base's scheduler has."""
FLAVOURS = {
    "t2v-1.3b": "t2v-480p-1.3b-2.1",
    "t2v-14b": "t2v-480p-14b-2.1",
    "t2i-14b": "t2v-480p-14b-2.1",
    "i2v-14b": "i2v-14b-2.1",
    "flf2v-14b": "flf2v-14b-2.1",
    "t2v": "t2v-480p",
    "i2v": "i2v-480p",
    "original": "v1.0",
    "edit": "edit-v1",
    "edit-2509": "edit-v2",
    "edit-2511": "edit-v3",
    "dev": "dev",
    "klein-base-4b": "klein-4b",
    "klein-base-9b": "klein-9b",
}
"""Flavours by task or model_version."""
SILENT = {"wan": "t2v-14b", "hunyuanvideo": "t2v", "qwen_image": "original", "flux2": "dev"}
FPS = {"wan": 16, "hunyuanvideo": 24, "kandinsky5_video": 24}
"""Frames per second to which clips with source_fps are brought."""

OWN = key_table(
    maps={},
    converted={"optimizer_type": OPTIMIZER},
    idle={
        FASTER: (
            "bulk_decode block_swap_h2d_only block_swap_optimizer_patch_params block_swap_ring_size compile "
            "compile_backend compile_cache_size_limit compile_dynamic compile_fullgraph compile_mode cuda_allow_tf32 "
            "cuda_cudnn_benchmark disable_numpy_memmap dynamo_dynamic dynamo_fullgraph dynamo_mode flash3 flash_attn "
            "fp8_llm fp8_t5 fp8_text_encoder fp8_vl gradient_checkpointing_cpu_offload img_in_txt_in_offloading "
            "metadata_arch metadata_reso no_vae_load offload_dit_during_sampling offload_inactive_dit sage_attn "
            "show_timesteps text_encoder_dtype use_32bit_attention use_pinned_memory_for_block_swap vae_cache_cpu "
            "vae_dtype vae_enable_patch_conv vae_sample_size vae_spatial_tile_sample_min_size vae_tiling dit_dtype "
            "validate_caption_structure warn_on_caption_issues log_loss_stats sampler_preset vae_chunk_size task "
            "model_version edit edit_plus timestep_boundary turbo_dit_cache force_nabla_attention nabla_P "
            "nabla_add_sta nabla_method nabla_wH nabla_wT nabla_wW no_nabla_add_sta "
            "use_unconditional_dit_for_lora_sampling guidance_scale"
        ),
        "used only with another model": (
            "dit_in_channels f1 i2v_mode ideogram4_timestep_mu ideogram4_timestep_std initial_sigma "
            "latent_window_size model_type noise_clip_std noise_scale_end noise_scale_start num_layers "
            "skip_t2i_visual_dummy trainable_modules sample_solver turbo_dit unconditional_dit"
        ),
    },
    look={
        "text encoders and VAE come from the base's pipeline folder": (
            "clip image_encoder t5 text_encoder1 text_encoder2 text_encoder_clip text_encoder_qwen text_encoder vae "
            "byt5"
        ),
    },
    lost={
        "it has no place here": (
            "dino_loss_weight force_v2_1_time_embedding num_timestep_buckets one_frame override_dit scheduler_scale "
            "remove_first_image_from_target preserve_distribution_shape"
        ),
        "used only with a loss of DINO's features": (
            "dino_loss_backend=vit dino_loss_every_n_steps=1 dino_loss_feature_mode=patch dino_loss_layer "
            "dino_loss_model_type dino_loss_no_norm dino_loss_resize=224 dino_loss_use_gram"
        ),
    },
)
RUN = replace(SD_SCRIPTS.table, rules={**SD_SCRIPTS.table.rules, **OWN.rules})


def model(run: Translation) -> None:
    """Family and flavour: a file names its network, and for the rest its script, which is not in it."""
    module = normalize_name(run.get("network_module", "")).rpartition(".")[2]
    if module in OTHER_MODELS:
        message = f"{run.file} trains {OTHER_MODELS[module]}, a model that this version does not have"
        raise SettingsError(message, "`simpletuner config init` shows those that it has")
    family = NETWORKS.get(module) or of_keys(run)
    if not family:
        message = f"{run.file}: the name of musubi-tuner's script says what is trained, and the file does not"
        raise SettingsError(message, "write network_module into it, such as networks.lora_wan")
    run.drop(["network_module"], "it is model_family and lora_type here")
    run.defaults |= {"model_family": family, "model_type": "lora" if module else "full"}
    version = run.get("task") if family in ("wan", "hunyuanvideo") else run.get("model_version")
    written = "edit-2509" if run.is_on("edit_plus") else "edit" if run.is_on("edit") else version
    name = str(written or SILENT.get(family, "")).lower()
    if family == "wan" and name.endswith("a14b"):
        of_two_denoisers(run, name)
    elif name in FLAVOURS:
        run.defaults["model_flavour"] = FLAVOURS[name]
    elif name:
        run.lose(
            "task" if "task" in run.written else "model_version", "it is no flavour that this version trains", name
        )
    if family == "flux":
        run.defaults["model_flavour"] = "kontext"
    if family == "z_image":
        run.defaults["model_flavour"] = "turbo" if "turbo" in str(run.get("dit", "")).lower() else "base"
    reason = "weights of the denoiser alone: here the published base of the family is taken, with all of its parts"
    for key in ("dit", "dit_high_noise"):
        if key in run.values:
            run.look(key, reason)


def of_keys(run: Translation) -> str:
    """Return the family of a file without its network, by the task, version or encoders that it names."""
    task, version = str(run.get("task", "")).lower(), str(run.get("model_version", "")).lower()
    if task.startswith(("t2v-", "i2v-", "t2i-", "flf2v-")):
        return "wan"
    if version.startswith(("klein", "dev")):
        return "flux2"
    if version.startswith(("original", "edit", "layered")) or run.is_on("edit") or run.is_on("edit_plus"):
        return "qwen_image"
    return "hunyuanvideo" if run.get("byt5") else ""


def of_two_denoisers(run: Translation, name: str) -> None:
    """Take the denoiser of Wan 2.2 that a file trains, by the name of its weights."""
    noise = "high" if "high" in str(run.get("dit", "")).lower() else "low"
    run.defaults["model_flavour"] = f"{name[:3]}-14b-2.2-{noise}"
    if run.get("dit_high_noise"):
        reason = "one LoRA is trained of both denoisers there: here each has one, and this is a run of one of them"
        run.remark("dit_high_noise", reason, effect="lost")
    levels = {"high": (875, 1000), "low": (0, 875)} if name == "t2v-a14b" else {"high": (900, 1000), "low": (0, 900)}
    own = (run.number("min_timestep", 0), run.number("max_timestep", 1000))
    if own == levels[noise] and run.is_on("preserve_distribution_shape"):
        names = ["min_timestep", "max_timestep", "preserve_distribution_shape"]
        run.drop(names, "they are the range of the denoiser, which is trained in it here, too")


def network(run: Translation) -> None:
    """Kind, layers, rank 4 and alpha 1; patterns of layers are its own names."""
    module = normalize_name(run.written.get("network_module", "")).rpartition(".")[2]
    arguments = dict(arguments_of(run.values.pop("network_args", None)))
    if not module:
        return
    family = run.defaults["model_family"]
    run.defaults |= {
        "lora_type": KINDS.get(module, "lora"),
        "lora_rank": 4,
        "lora_alpha": None if run.get("network_alpha") == 0 else 1.0,
        "lora_target_modules": ",".join(LAYERS[family]),
    }
    if family in ("flux", "flux2"):
        run.remark("network_module", FUSED)
    if run.number("network_dropout", 0):
        run.remark("network_dropout", INNER_DROPOUT)
    if module == "lokr" and (factor := arguments.pop("factor", "")):
        run.defaults["lokr_factor"] = factor
    for name, value in arguments.items():
        if not is_off(value) and name != "verbose":
            run.remark("network_args", "it has no place here", f"{name}={value}", "lost")
    for key in (*FP8, "fp8_scaled"):
        if run.is_on(key):
            run.put("base_model_precision", key, "float8")
    run.drop(["fp8_scaled"], FASTER)


def optimizer(run: Translation) -> None:
    """Its names are AdamW, AdamW8bit, Adafactor, and classes of torch.optim or packages by module."""
    run.defaults |= {"max_grad_norm": 1.0, "lr_scheduler": "constant", "learning_rate": 2e-6, "mixed_precision": "bf16"}
    run.rename("learning_rate", "learning_rate")
    if normalize_name(run.get("mixed_precision", "no")) == "no":
        run.drop(["mixed_precision"], "the denoiser is bf16 there anyway")
    written = str(run.get("optimizer_type", ""))
    name = normalize_name(written.rpartition(".")[2])
    if not written:
        run.lose("optimizer_type", "without it musubi-tuner ends in an error: write adamw", "")
    elif "." not in written and name not in ("adamw", "adamw8bit", "adafactor"):
        run.lose("optimizer_type", "of torch.optim alone there, without the name of a package in front of it")
    elif name == "adamw" or "." in written:
        run.written["optimizer_type"] = run.values["optimizer_type"] = name
    own_values(run, name)
    optimizer_arguments(run, "optimizer_args", run.get("optimizer_args"))


def levels(run: Translation) -> None:
    """Noise levels: with the default, `sigma`, discrete_flow_shift has no effect (trainer_base.py:706)."""
    family, sampling = run.defaults["model_family"], run.word("timestep_sampling", "sigma")
    weighting = run.word("weighting_scheme", "none")
    shift = 1.0 if sampling == "sigma" else run.number("discrete_flow_shift", 1.0)
    if sampling == SHIFTS.get(family):
        sampling = "flux_shift"
    elif sampling.endswith("_shift"):
        sampling = f"{sampling} of {family}"
    if sampling == "sigma" and run.get("discrete_flow_shift") is not None:
        run.drop(["discrete_flow_shift"], "it has no effect there with timestep_sampling=sigma")
        run.written.pop("discrete_flow_shift")
    noise_levels(run, sampling, shift, weighting)
    if family == "flux":
        run.defaults["flux_guidance_value"] = 1.0


def datasets_and_prompts(run: Translation) -> None:
    run.defaults |= {"train_batch_size": 1, "caption_dropout_probability": 0.0, "aspect_bucket_alignment": 16}
    run.values.pop("dataset_config", None)
    prompts_of_file(run, "sample_prompts")


DATASET = key_table(
    maps={},
    converted={},
    idle={
        FASTER: "batch_size debug_dataset enable_bucket max_frames",
        "used only with FramePack": "fp_latent_window_size",
    },
    look={},
    lost={
        "it has no place here": (
            "bucket_no_upscale multiple_target fp_1f_clean_indices fp_1f_target_index fp_1f_no_post no_resize_control "
            "frame_stride=1 frame_sample=1"
        ),
        "captions are read from .txt files": "caption_extension=.txt|txt",
        "musubi-tuner refuses it beside the other keys of the dataset, which are of images or of videos": (
            "image_directory video_directory frame_extraction source_fps target_frames"
        ),
    },
)
# Sides of buckets are multiples of it, whatever the model.
STEP = 16
LISTS = ("resolution", "target_frames", "control_resolution", "fp_1f_clean_indices")


def entries(run: Translation, values: Mapping[str, object] | Sequence[object]) -> Iterator[Translation]:
    """Yield a translation for each folder, and of videos for each length, since each gives a sample there."""
    listed = values if isinstance(values, Mapping) else {}
    general = {name: value for each in run.tables(listed, "general", LISTS) for name, value in each.items()}
    datasets = run.tables(listed, "datasets", LISTS)
    of_run(run, datasets, general, (("train_batch_size", "batch_size", "batch_size", 1),))
    if any(not is_off({**general, **each}.get("enable_bucket")) for each in datasets):
        run.remark("enable_bucket", NEAREST, True)
    for dataset in datasets:
        merged = {**general, **dataset}
        is_video = "video_directory" in merged or "video_jsonl_file" in merged
        for frames in lengths(merged) if is_video else [None]:
            yield entry(run, run.within(merged), frames)


def lengths(merged: Mapping[str, Any]) -> list[Any]:
    # Each is rounded down to 4n + 1 there (image_video_dataset.py:648).
    written = merged.get("target_frames") or [1]
    if not isinstance(written, list) or not all(type(each) is int for each in written):
        return [written]  # which the dataset refuses, with what it takes
    return sorted({(each - 1) // 4 * 4 + 1 for each in written})


def entry(run: Translation, found: Translation, frames: Any) -> Translation:
    path_key = "image_directory" if frames is None else "video_directory"
    table_key = "image_jsonl_file" if frames is None else "video_jsonl_file"
    has_table = table_key in found.values
    if has_table:
        table(found, table_key, path_key)
    path = found.get(path_key)
    folder_entry(found, path_key, "num_repeats")
    caches(found, "cache_directory")
    resolution = found.values.pop("resolution", [960, 544])
    # Videos are always cut to their nearest aspect, whatever enable_bucket says (image_video_dataset.py:698).
    is_bucketed = found.is_on("enable_bucket") or frames is not None
    captions = {} if has_table else {"caption_lines": "one", "skip_uncaptioned": True}
    found.defaults |= size_of(resolution, is_bucketed) | captions
    edge = found.defaults["resolution"]
    if is_bucketed and type(edge) is int and STEP <= edge < LARGEST:
        found.defaults |= closest(sizes_of_area(edge**2, STEP, range(edge // 2 // STEP * STEP, edge + STEP, STEP)))
    if has_table:
        found.drop(["caption_extension"], "captions are those of the table")
    elif not found.get("caption_extension") and path:
        found.remark("caption_extension", "without it musubi-tuner ends in an error; here it is .txt", "")
    if frames is not None:
        clips(run, found, frames)
    controls(found, path, resolution, is_video=frames is not None)
    if path and not has_table:
        subfolders(found, path_key)
        blanks(run, found, "caption_extension")
    found.answer(DATASET)
    return found


def table(found: Translation, key: str, path_key: str) -> None:
    """Let a file of JSON lines be the table of the folder that its images have in common.

    Raises SettingsError if musubi-tuner could not read it, or images have no folder in common.
    """
    column, named = f"{key.partition('_')[0]}_path", found.get(key)
    places = (Path(), found.file.parent, found.file.parent.parent)
    if not isinstance(named, str) or (path := first_existing(named, places)) is None:
        raise SettingsError(f"{found.file}: {key} = {shorten(named)}: there is no such file", "check that path")
    rows = list(json_lines_of(path, (column, "caption")))
    names = [Path(row[column]) for row in rows]
    try:
        folder = os.path.commonpath([name.parent for name in names])
    except ValueError:
        folder = ""
    if folder in ("", os.sep):
        message = f"{path} names files that have no folder in common, and a dataset here is a folder"
        raise SettingsError(message, "move them below one folder")
    if len(set(names)) < len(names):
        found.remark(key, "an image that is there twice has two captions there, and here the first", effect="lost")
    take_references(found, rows, names)
    more = sorted({name for row in rows for name in row} - {column, "caption"})
    if more:
        found.remark(key, f"{', '.join(more)} of its lines have no place here: give each a folder", effect="lost")
    found.written[path_key] = found.values[path_key] = folder
    columns = {"filename_column": column, "caption_column": "caption", "identifier_includes_extension": True}
    found.defaults |= {"caption_strategy": "parquet", "metadata_backend": "parquet"}
    found.put("parquet", key, {"path": str(path), **columns})


CONTROLS = ("control_path", "control_path_0")


def take_references(found: Translation, rows: Sequence[dict[str, Any]], names: Sequence[Path]) -> None:
    """Take the references of lines whose files have the names of their images, in one folder."""
    others = [Path(row[name]) for row in rows for name in CONTROLS if isinstance(row.get(name), str)]
    folders = {each.parent for each in others}
    if len(folders) == 1 and [each.stem for each in others] == [each.stem for each in names]:
        found.written["control_directory"] = found.values["control_directory"] = str(folders.pop())
        for row in rows:
            [row.pop(name, None) for name in CONTROLS]


def json_lines_of(path: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, a line each. Raises SettingsError for one without a text of each name."""
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                row = json.loads(line)
                if not isinstance(row, dict) or any(not isinstance(row.get(name), str) for name in names):
                    raise SettingsError(f"{path}:{number} has no {' and '.join(names)}", "write both as texts")
                yield row
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{path}:{number or 1} cannot be read: {error}", "correct that line") from None
    if not number:
        raise SettingsError(f"{path} is empty", "write a line for each image")


def clips(run: Translation, found: Translation, frames: Any) -> None:
    """The beginning of each video that is long enough."""
    video: dict[str, Any] = {"num_frames": frames}
    how = found.word("frame_extraction", "head")
    if how != "head" and (how != "uniform" or found.number("frame_sample", 1) != 1):
        found.lose("frame_extraction", "one clip is cut out of each video here, from its beginning, middle or anywhere")
    found.drop(["frame_extraction", "target_frames"], "it is the block `video` here")
    if found.get("source_fps"):
        video["fps"] = FPS.get(run.defaults.get("model_family", "wan"), 16)
        found.look("source_fps", "here the rate in the header of each video counts, and frames are left out likewise")
    found.defaults |= {"dataset_type": "video", "video": video, "id": f"{found.defaults['id']}-{frames}"}
    found.drop(["max_frames"], "used only with frame_extraction=full")


def controls(found: Translation, path: object, resolution: object, is_video: bool) -> None:
    """References of editing models; those of videos, and several of an image, are lost."""
    folder = found.get("control_directory")
    if folder is None:
        found.drop(["control_resolution"], "used only with control_directory")
        return
    stems = {file.stem for file in files_in(path)}
    several = [file for file in files_in(folder) if file.suffix.lower() in IMAGES and file.stem not in stems]
    if is_video:
        found.lose("control_directory", "controls of videos are not trained by this version")
    elif several:
        reason = f"a reference has the name of its image here, and {several[0]} is one of several: give each a folder"
        found.lose("control_directory", reason)
    elif (own := found.get("control_resolution")) is not None:
        condition(found, folder, "reference_loose", **size_of(own, is_bucketed=True))
        found.drop(["control_directory", "control_resolution"], "it is a dataset of references here")
    else:
        condition(found, folder, "reference_strict", **size_of(resolution, is_bucketed=True))
        found.look(
            "control_directory", "an image whose reference has another aspect is left out here, and cropped there"
        )


MUSUBI_TUNER = ForeignTrainer(
    MUSUBI,
    RUN,
    (model, network, length, optimizer, precision, schedule, warmup, levels, datasets_and_prompts),
    entries,
    dataset_file="dataset_config",
    is_flat=True,
)
