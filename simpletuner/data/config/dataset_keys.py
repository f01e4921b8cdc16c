"""Keys and values of the original tool's dataset file that are not supported, and what to do instead.

The other keys are the fields of a dataset (`datasets.py`), which check their values themselves.
"""

from __future__ import annotations

from simpletuner.data.config.object_store_keys import ONLY_LISTS
from simpletuner.settings.foreign.key_table import Ignores, Refuses, Rule

LATER = "not supported by this version"
ONE_FOR_ALL = "one value holds for all datasets: set --{}"
GONE = "your images are never deleted"
LOCAL = LATER + ": only folders (local), buckets (aws, gcs, azure) and lists of addresses (csv)"
ONLY_SNAPSHOTS = "it is for images of type huggingface"
BY_READING = "files that are new or changed are read at every start"
VERIFIED = "caches are checked record by record, and what changed is made again"
NO_CONDITIONING = LATER + ": a model is trained on images, captions, masks and reference images alone"

REASONS: dict[str, str] = {
    "ignore_epochs": LATER + ": set start_epoch, end_epoch, start_step or end_step",
    "slider_strength": LATER + ": sliders are pairs of signed datasets; train one LoRA per direction",
    "timestep_sampling_offset": LATER + ": one density of timesteps holds for all datasets",
    "train_batch_size": ONE_FOR_ALL.format("train_batch_size"),
    "text_encoder_batch_size": "captions of all datasets are encoded together: set --text_encoder_batch_size",
    **dict.fromkeys(("conditioning_image_embed_batch_size", "conditioning_image_embeds"), NO_CONDITIONING),
    "cache_dir_conditioning_image_embeds": NO_CONDITIONING,
    **dict.fromkeys(("conditioning", "conditioning_config"), NO_CONDITIONING),
    **dict.fromkeys(("grounding", "grounding_data", "distillation_type"), NO_CONDITIONING),
    **dict.fromkeys(("memory_filesystem_path", "memory_filesystem_size", "memory_filesystem_sudo"), LOCAL),
    "hf_token": "a token is read from HF_TOKEN, or from what `hf auth login` has kept",
    **dict.fromkeys(("description_column", "quality_column"), LATER + ": caption_column names the one that is read"),
    "config": "a dataset of several configs has a folder for each: name that one with dataset_name",
    **dict.fromkeys(("quality_thresholds", "filter_func"), LATER + ": all rows of a dataset are trained on"),
    "composite_image_config": LATER + ": images are taken whole",
    **dict.fromkeys(("source", "metadata", "subfolder", "webshart"), LOCAL),
    **dict.fromkeys(("webshart_optimize_captions", "webshart_optimise_captions"), LOCAL),
    "bucket_resolutions": LATER + ": buckets come from resolution and aspect_bucket_alignment",
    **dict.fromkeys(("delete_unwanted_images", "delete_problematic_images", "delete_nsfw_images"), GONE),
    **dict.fromkeys(("audio", "audio_column", "s2v_datasets"), LATER + ": only images and videos"),
    **dict.fromkeys(("audio_caption_fields", "lyrics_column"), LATER + ": only images and videos"),
    "is_i2v": "it belongs into the block `video`",
}  # fmt: skip

NO_EFFECT: dict[str, str] = {
    **dict.fromkeys(("write_batch_size", "read_batch_size"), "records are written one by one; nothing to tune"),
    **dict.fromkeys(("streaming", "num_proc"), "a dataset of the hub is fetched once"),
    "image_processing_batch_size": "max_workers threads decode one image each",
    **dict.fromkeys(("metadata_update_interval", "skip_file_discovery"), BY_READING),
    **dict.fromkeys(("scan_for_errors", "vae_cache_scan_behaviour"), VERIFIED),
    **dict.fromkeys(("csv_hash_filenames", "csv_shorten_filenames"), "files are named by a hash of their address"),
    **dict.fromkeys(("hash_filenames", "cache_file_suffix"), "caches are keyed by content"),
    "disable_validation": "validation draws from text alone",
}
"""Keys that ask for what happens anyway, or for what nobody misses."""
MISSED: dict[str, str] = {
    "vae_cache_clear_each_epoch": "random crops are chosen once per image",
}
"""Keys that have no effect here, though the original's result may depend on them."""

RULES: dict[str, Rule] = {
    **{key: Refuses(reason) for key, reason in REASONS.items()},
    **{key: Ignores(reason, warns=False) for key, reason in NO_EFFECT.items()},
    **{key: Ignores(reason) for key, reason in MISSED.items()},
}

VALUES: dict[str, dict[str, str]] = {
    "type": {**dict.fromkeys(("memory", "webshart"), LOCAL), **dict.fromkeys(("http", "https"), ONLY_LISTS)},
    "dataset_type": {
        "audio": LATER + ": only images and videos",
        **dict.fromkeys(("conditioning_image_embeds", "distillation_cache"), NO_CONDITIONING),
        "caption": LATER + ": captions belong to images and videos",
    },
    "conditioning_type": {
        "controlnet": NO_CONDITIONING,
        "segmentation": "write masks, white where the loss counts, and conditioning_type mask",
    },
    "caption_strategy": {"huggingface": ONLY_SNAPSHOTS, "webshart": LATER + ": name a table in `parquet`"},
    "metadata_backend": {"huggingface": ONLY_SNAPSHOTS, "webshart": LATER + ": name a table in `parquet`"},
    "crop_style": {"face": LATER},
}
"""Values that the original accepts and this program does not, by key."""
