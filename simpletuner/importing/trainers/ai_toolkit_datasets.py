"""Datasets of ai-toolkit (27a03a91): folders in several sizes, captions, masks, control images, clips."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from simpletuner.errors import SettingsError
from simpletuner.importing.folders import (
    BLANKS_MATTER,
    blanks,
    captioned,
    condition,
    files_in,
    folder_entry,
    images_of,
    rule,
    size_of,
    stills_and_clips,
)
from simpletuner.importing.foreign_trainer import CACHES, FASTER, Translation, key_table
from simpletuner.importing.trainers.ai_toolkit_models import EDITORS, PLACES, arch_of
from simpletuner.settings.foreign.original_names import is_off

DATASET = key_table(
    maps={"caption_dropout_probability": "caption_dropout_rate"},
    converted={},
    idle={
        FASTER: "type bucket_tolerance num_workers prefetch_factor debug fast_image_size replay_transforms",
        CACHES: (
            "cache_latents cache_latents_to_disk cache_tensors_to_disk cache_clip_vision_to_disk "
            "cache_text_embeddings load_image_when_caching_latents cache_latents_num_workers"
        ),
        "it keeps from token_dropout_rate alone": "keep_tokens",
        "used only with what is refused": (
            "diff_output_preservation diff_output_preservation_class random_triggers_max control_transparent_color "
            "num_controls_from_same_folder shuffle_augmentations guidance_type extra_values audio_preserve_pitch "
            "audio_normalize clip_image_shuffle_augmentations"
        ),
        "used only with masks": "mask_min_value invert_mask",
        "used only with control images": "full_size_control_images",
        "used only with clips": (
            "num_frames=1 fps shrink_video_to_frames auto_frame_count trim_auto_frame_count_tail do_i2v"
        ),
    },
    look={},
    lost={
        "it has no place here": (
            "random_scale scale=1 prior_reg network_weight=1 token_dropout_rate augments augmentations inpaint_path "
            "alpha_mask unconditional_path poi use_short_captions standardize_images clip_image_path "
            "clip_image_from_same_folder clip_image_augmentations replacements loss_multiplier=1 random_triggers "
            "control_from_same_folder do_audio controls"
        ),
        "every image is there a second time, mirrored: put mirrored copies into a folder of their own": "flip_x flip_y",
        "every second step is one of these there: here datasets are mixed by their size; weigh it with probability": (
            "is_reg"
        ),
        "one size of a batch holds for all datasets here": "batch_size",
    },
)


def entries(run: Translation, values: Mapping[str, Any] | Sequence[Any]) -> Iterator[Translation]:
    """Yield a dataset for each folder and resolution, and those of its masks and control images."""
    listed = run.written.get("datasets")
    run.values.pop("datasets", None)
    if any(not isinstance(given, Mapping) for given in (listed if isinstance(listed, list) else [listed])):
        raise SettingsError(f"{run.file}: datasets: use a list of tables", "each has folder_path")
    for given in listed or []:
        sizes = given.get("resolution", 512)
        said: set[tuple[str, str]] = set()
        for size in sizes if isinstance(sizes, list) and sizes else [sizes]:
            for found in of_folder(run, given, size):
                conditions(run, found, given)
                found.answer(DATASET)
                # What is said of a folder is said once.
                found.left_out = [item for item in found.left_out if (item.name, item.reason) not in said]
                said |= {(item.name, item.reason) for item in found.left_out}
                yield found


def of_folder(run: Translation, given: Mapping[str, Any], size: object) -> Iterator[Translation]:
    path = given.get("dataset_path") or given.get("folder_path")
    video = clips(given)
    for kind in stills_and_clips(path, video):
        found = run.within({**given, "folder_path": path, "dataset_path": None})
        if isinstance(path, str) and path.endswith(".json"):
            found.lose("folder_path", "a JSON file of images and captions is not read: name the folder")
        folder_entry(found, "folder_path", "num_repeats")
        found.defaults["caption_dropout_probability"] = 0.0
        if isinstance(given.get("resolution"), list) and len(given["resolution"]) > 1:
            found.defaults["id"] = f"{found.defaults['id']}-{size}"
        found.values.pop("resolution", None)
        sizes_of(found, size)
        captions(run, found, path)
        if video:
            speed(found, video)
        found.defaults |= kind
        yield found


def sizes_of(found: Translation, size: object) -> None:
    found.defaults |= size_of(size, found.is_on("buckets", True))
    if found.is_on("square_crop"):
        found.defaults |= {"crop": True, "crop_aspect": "square", "crop_style": "center"}
    if found.is_on("random_crop"):
        aspect = "square" if found.is_on("square_crop") else "preserve"
        found.defaults |= {"crop": True, "crop_style": "random", "crop_aspect": aspect}
        found.remark("random_crop", "drawn each time there, and once for each image here")
    found.drop(["buckets", "square_crop", "random_crop"], "it is crop here")
    found.remark("resolution", SIZES, size)


SIZES = "a smaller image is trained in its own size there, and enlarged here; a side may differ by a step of the model"


def clips(given: Mapping[str, Any]) -> dict[str, Any]:
    """Block `video` of a dataset; empty if its files are images."""
    frames = given.get("num_frames", 1)
    is_i2v = {"is_i2v": True} if not is_off(given.get("do_i2v")) else {}
    if not is_off(given.get("auto_frame_count")):
        return {"bucket_strategy": "resolution_frames", "fps": given.get("fps", 24), **is_i2v}
    if str(frames) in ("1", "0", "None"):
        return {}
    place = {} if not is_off(given.get("shrink_video_to_frames", True)) else {"clip_position": "random"}
    return {"num_frames": frames, "fps": given.get("fps", 24), **place, **is_i2v}


def speed(found: Translation, video: Mapping[str, object]) -> None:
    if "num_frames" in video and "clip_position" not in video:
        reason = "frames are taken from all of a video there, however long it is; here a clip keeps its speed"
        found.lose("shrink_video_to_frames", reason, True)
    elif "num_frames" in video:
        found.remark("num_frames", "the place of a clip is drawn each time there, and once here")
    elif not found.is_on("trim_auto_frame_count_tail", True):
        found.lose("trim_auto_frame_count_tail", "videos are stretched to whole latent frames there")
    names = "num_frames fps shrink_video_to_frames auto_frame_count trim_auto_frame_count_tail do_i2v"
    found.drop(names.split(), "it is video here")


def captions(run: Translation, found: Translation, path: object) -> None:
    """Captions of text files, one text each; a missing trigger word is put in front."""
    suffix = str(found.get("caption_type") or found.get("caption_ext") or ".txt")
    suffix = suffix if suffix.startswith(".") else f".{suffix}"
    if suffix != ".txt":
        found.lose("caption_ext", "captions are read from .txt files", suffix)
    trigger = found.get("trigger_word", run.get("trigger_word")) if not found.is_on("is_reg") else None
    default = PLACES.sub(lambda _: str(trigger or ""), str(found.get("default_caption") or ""))
    phrase = f"{trigger} {default}".strip() if trigger and str(trigger) not in default else default
    names = images_of(files_in(path))
    bare = [file for file in names if not captioned(file, suffix)]
    found.defaults["caption_lines"] = "one"
    if names and len(bare) == len(names) and phrase:
        found.defaults |= {"caption_strategy": "instanceprompt", "instance_prompt": phrase}
    else:
        if trigger:
            found.defaults["caption_filter_list"] = trigger_rules(str(trigger))
        if bare or not names:
            which = f"{len(bare)} images without a caption, such as {bare[0]}," if bare else "images without a caption"
            found.remark("default_caption", f"{which} have this one there, and end the run here", phrase)
    if trigger and found.number("caption_dropout_rate", 0):
        found.remark("caption_dropout_rate", "a dropped caption is the trigger word there, and empty here")
    if found.is_on("shuffle_tokens"):
        found.put("caption_shuffle", "shuffle_tokens", {"enable": True, "count": ORDERS, "include_original": False})
        found.remark("shuffle_tokens", f"each order is drawn anew there; here one of {ORDERS} of each caption")
    elif run.defaults["model_family"] in BLANKS_MATTER:
        found.remark("caption_ext", "commas of a caption have two blanks behind them there, and one here", suffix)
    blanks(run, found, "caption_ext")
    found.drop(["caption_type", "caption_ext", "default_caption", "trigger_word", "shuffle_tokens"], "of the captions")


ORDERS = 10


def trigger_rules(trigger: str) -> list[str]:
    """Rules that put a word into its places, and in front of a caption without it (prompt_utils.py:715)."""
    pattern = re.escape(trigger).replace("/", "\\/")
    return [rule(r"\[(trigger|name)\]", trigger), rule(rf"^(?![\s\S]*{pattern})", f"{trigger} ")]


def conditions(run: Translation, found: Translation, given: Mapping[str, object]) -> None:
    """Add the control images and the masks of a folder, which are datasets of their own here."""
    controls = [given[name] for name in ("control_path_1", "control_path_2", "control_path_3") if given.get(name)]
    listed = given.get("control_path")
    controls = controls or [path for path in (listed if isinstance(listed, list) else [listed]) if path]
    kind = EDITORS.get(arch_of(run))
    if controls and kind is None:
        found.lose("control_path", "this model is not given images here", controls)
    elif kind is not None:
        size = 1024 if kind == "reference_loose" else found.defaults["resolution"]
        for path in controls:
            condition(found, path, kind, resolution=size, resolution_type=found.defaults["resolution_type"])
    if mask := given.get("mask_path"):
        condition(found, mask, "mask")
        if found.number("mask_min_value", 0) or found.is_on("invert_mask"):
            found.lose("mask_min_value", "masks count as they are here", found.get("mask_min_value"))
        found.remark("mask_path", "the loss is divided by the mean of the masks of a batch there, and of each here")
    found.drop([f"control_path{end}" for end in ("", "_1", "_2", "_3")], "control images are a dataset of their own")
    found.drop(["mask_path"], "masks are a dataset of their own")
