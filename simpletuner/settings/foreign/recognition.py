"""Recognition of config files and setting names of other programs.

Files: kohya's sd-scripts, diffusion-pipe and the original SimpleTuner. Names: diffusers 0.36
(examples/dreambooth, examples/text_to_image), sd-scripts 48d368fa and ai-toolkit, answered by their meaning.
A guess by spelling would mislead: `class_data_dir` is most similar to `instance_data_dir`, and means the
opposite.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpletuner.settings.declared.errors import FLOAT8

KOHYA, PIPE, GUI = "kohya's sd-scripts", "diffusion-pipe", "kohya_ss, the GUI"
MUSUBI, ONETRAINER, AITOOLKIT = "musubi-tuner", "OneTrainer", "ai-toolkit"
# A file whose keys both have: what is told by the command line there, such as the base, is not in it.
EITHER = f"{KOHYA} or {MUSUBI}"
PROGRAMS = {
    "sd-scripts": KOHYA,
    "kohya-gui": GUI,
    "musubi-tuner": MUSUBI,
    "diffusion-pipe": PIPE,
    "onetrainer": ONETRAINER,
    "ai-toolkit": AITOOLKIT,
}
"""Words of `config import --from`."""
OF_KOHYA = frozenset(
    (
        *("network_module", "network_dim", "network_alpha", "network_args", "network_train_unet_only", "unet_lr"),
        *("dataset_config", "train_data_dir", "optimizer_type", "optimizer_args", "max_train_epochs", "output_name"),
        *("save_every_n_epochs", "save_every_n_steps", "save_model_as", "cache_latents"),
    )
)
"""Names of sd-scripts, musubi-tuner and the GUI that no file of ours has."""
OF_GUI = frozenset(("LoRA_type", "max_resolution", "lr_warmup", "stop_text_encoder_training"))
OF_MUSUBI = frozenset(("dit", "dit_high_noise", "text_encoder1", "task", "fp8_scaled"))
ONLY_KOHYA = frozenset(
    (
        *("pretrained_model_name_or_path", "network_train_unet_only", "train_data_dir", "cache_latents", "unet_lr"),
        *("save_model_as", "clip_l", "t5xxl", "ae", "v2", "sdxl", "min_snr_gamma", "resolution", "enable_bucket"),
    )
)
NETWORKS_OF_MUSUBI = tuple(
    f"networks.lora_{name}"
    for name in ("wan", "zimage", "flux_2", "qwen_image", "krea2", "hv_1_5", "kandinsky", "framepack", "hidream_o1")
)
OF_MUSUBI_DATA = frozenset(("image_directory", "video_directory", "image_jsonl_file", "video_jsonl_file"))
OF_ONETRAINER = frozenset(
    (
        *("training_method", "base_model_name", "concept_file_name", "output_model_destination", "weight_dtype"),
        *("timestep_distribution", "output_dtype", "learning_rate_warmup_steps", "workspace_dir", "train_dtype"),
    )
)


def trainer_of(values: Mapping[str, object] | list[object]) -> str:
    """Name of the program that wrote a file, by its content; EITHER if it could be two; empty if unknown.

    Only keys that our own files never have count. A list is of datasets: OneTrainer's have path, no id.
    """
    if isinstance(values, list):
        concepts = all(isinstance(each, Mapping) and "path" in each and "id" not in each for each in values)
        return ONETRAINER if values and concepts else ""
    job, model = values.get("config"), values.get("model")
    if isinstance(job, Mapping) and isinstance(job.get("process"), list | Mapping):
        return AITOOLKIT
    if is_dataset_file(values):
        return trainer_of_datasets(values)
    if len(OF_ONETRAINER & values.keys()) >= 2 and "model_family" not in values:
        return ONETRAINER
    if isinstance(model, Mapping) and "type" in model and {"adapter", "optimizer", "dataset"} & values.keys():
        return PIPE
    if "LoRA_type" in values or len(OF_GUI & values.keys()) >= 2:
        return GUI
    flattened = flat(values)
    return "" if OF_KOHYA.isdisjoint(flattened) else kohya_or_musubi(flattened)


def trainer_of_datasets(values: Mapping[str, object]) -> str:
    if "datasets" not in values:
        return PIPE
    tables = [each for each in (values.get("general"), *as_list(values["datasets"])) if isinstance(each, Mapping)]
    if any(not OF_MUSUBI_DATA.isdisjoint(each) for each in tables):
        return MUSUBI
    return KOHYA if any("subsets" in each for each in tables) else EITHER


def kohya_or_musubi(flattened: Mapping[str, object]) -> str:
    # One of the two may be on the command line.
    if not ONLY_KOHYA.isdisjoint(flattened):
        return KOHYA
    is_of_musubi = not OF_MUSUBI.isdisjoint(flattened) or flattened.get("network_module") in NETWORKS_OF_MUSUBI
    return MUSUBI if is_of_musubi else EITHER


def as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def is_dataset_file(values: Mapping[str, object]) -> bool:
    tables = [values.get("datasets"), values.get("directory")]
    return any(isinstance(table, list) and all(isinstance(each, Mapping) for each in table) for table in tables)


def flat(values: Mapping[str, object]) -> dict[str, Any]:
    """Return the values of all sections side by side, as sd-scripts reads them."""
    inner = {name: each for value in values.values() if isinstance(value, Mapping) for name, each in value.items()}
    return {name: value for name, value in values.items() if not isinstance(value, Mapping)} | inner


def import_hint(file: str | Path, is_list: bool = False, trainer: str = "") -> str:
    output = "--output=datasets.json" if is_list else "--output=run.toml"
    command = shlex.join(["simpletuner", "config", "import", str(file), output])
    if trainer == EITHER:
        words = [word for word, name in PROGRAMS.items() if name in (KOHYA, MUSUBI)]
        return f"say which: `{command} --from={words[0]}` or `--from={words[1]}`"
    return f"`{command}` translates it, or says what would be lost"


# Words that people type for a setting with another name; they are not accepted, but answered with ours.
RENAMED = {
    "output_dir": "path folder dir output training_folder",
    "instance_data_dir": "images image_dir data_dir train_data_dir dataset_dir folder_path",
    "data_backend_config": "dataset_config dataset_config_file",
    "pretrained_model_name_or_path": "model model_path base_model name_or_path",
    "learning_rate": "lr unet_lr",
    "lr_warmup_steps": "warmup_steps warmup num_warmup_steps",
    "lr_power": "lr_scheduler_power",
    "lr_end": "lr_scheduler_min_lr min_lr",
    "optimizer": "optimizer_type",
    "train_batch_size": "batch_size bs per_device_train_batch_size micro_batch_size",
    "max_train_steps": "steps max_steps iterations",
    "num_train_epochs": "epochs max_train_epochs",
    "num_processes": "gpus num_gpus nproc_per_node",
    "mixed_precision": "dtype precision",
    "gradient_accumulation_steps": "gradient_accumulation grad_accum",
    "max_grad_norm": "gradient_clipping clip_grad_norm",
    "validation_prompt": "prompt prompts sample_prompts final_validation_prompt",
    "validation_prompt_file": "sample_prompt_file prompts_file",
    "validation_step_interval": "sample_every sample_every_n_steps",
    "validation_num_inference_steps": "num_inference_steps sample_steps",
    "validation_guidance": "cfg cfg_scale sample_guidance",
    "validation_negative_prompt": "negative_prompt",
    "checkpoint_step_interval": "save_steps save_every save_every_n_steps save_state_steps",
    "checkpoints_total_limit": "save_total_limit max_step_saves_to_keep save_last_n_steps",
    "caption_dropout_probability": "caption_dropout_rate proportion_empty_prompts caption_dropout",
    "instance_prompt": "trigger_word class_tokens trigger",
    "repeats": "num_repeats dataset_repeats",
    "aspect_bucket_alignment": "bucket_reso_steps bucket_step_size",
    "lora_rank": "rank network_dim linear",
    "lora_alpha": "alpha network_alpha linear_alpha",
    "lora_dropout": "network_dropout",
    "lora_target_modules": "lora_layers target_modules",
    "lora_init": "network_weights init_from_existing",
    "flow_schedule_shift": "discrete_flow_shift timestep_shift",
    "flux_guidance_value": "guidance_scale",
    "tokenizer_max_length": "max_sequence_length max_token_length",
    "adam_weight_decay": "weight_decay",
    "adam_epsilon": "epsilon eps",
    "ema_decay": "ema_rate",
    "hub_model_id": "repo_id huggingface_repo_id",
    "tracker_run_name": "run_name wandb_run_name log_tracker_name",
    "tracker_project_name": "wandb_project",
    "logging_dir": "log_dir tensorboard_dir",
    "report_to": "log_with",
    "max_workers": "dataloader_num_workers max_data_loader_n_workers num_workers",
}

ANSWERS = {
    "class images are a dataset with is_regularisation_data and prior_images: docs/dataset-file.md": (
        "class_data_dir reg_data_dir num_class_images with_prior_preservation prior_preservation class_prompt"
        " sample_batch_size prior_generation_precision"
    ),
    "probability of the dataset with is_regularisation_data=true weighs it": "prior_loss_weight",
    "validation counts in steps: set validation_step_interval": (
        "validation_epochs eval_epochs sample_every_n_epochs validate_every_n_epochs"
    ),
    "checkpoints count in steps: set checkpoint_step_interval": (
        "save_every_n_epochs checkpointing_epochs save_model_epochs save_n_epoch_ratio"
    ),
    "one image is drawn per prompt: give validation_prompt several times": "num_samples",
    "text encoders are not trained": (
        "text_encoder_lr1 text_encoder_lr2 train_text_encoder_ti"
        " adam_weight_decay_text_encoder network_train_text_encoder_only stop_text_encoder_training"
    ),
    "images are never flipped: put flipped copies into a folder of their own": "random_flip flip_aug",
    "set crop=true, which crops in the centre": "center_crop",
    "set crop=true with crop_style=random": "random_crop",
    "set optimizer=adamw with state_layout=split, which has moments of 8 bits (whole models)": (
        "use_8bit_adam use_8bit use_bnb"
    ),
    FLOAT8: "fp8 fp8_base fp8_base_unet fp8_scaled use_fp8 enable_fp8 fp8_training",
    "multiply learning_rate by the effective batch size yourself": "scale_lr",
    "set lora_type (lora, dora, loha, lokr, oft)": "network_module network_type adapter_type",
    "attention is torch's own, which needs as little memory: see attention_backend": (
        "enable_xformers_memory_efficient_attention xformers mem_eff_attn sdpa use_flash_attention"
    ),
    "latents are always cached: vae_cache_disable turns it off": "cache_latents cache_latents_to_disk",
    "text embeddings are always cached: text_cache_disable turns it off": (
        "cache_text_encoder_outputs cache_text_encoder_outputs_to_disk cache_text_embeddings"
    ),
    "no schedule rises again": "lr_scheduler_num_cycles",
    "log in with `hf auth login`, or set the variable HF_TOKEN": "hub_token hf_token huggingface_token",
    "set the variable HF_HOME": "hf_cache_dir",
    "datasets of the hub, tables and columns are entries of data_backend_config (docs/tables-and-stores.md)": (
        "dataset_name dataset_config_name image_column caption_column"
    ),
    "captions are read from .txt files beside the images": "caption_extension caption_ext",
    "write captions in several orders with caption_shuffle of a dataset (docs/data.md)": (
        "shuffle_caption shuffle_tokens keep_tokens"
    ),
    "buckets have the area of resolution and any aspect": (
        "enable_bucket min_bucket_reso max_bucket_reso bucket_no_upscale enable_ar_bucket"
    ),
    "name the VAE inside of a model folder that pretrained_model_name_or_path names": ("vae vae_path"),
    "it is not offered: noise is that of the published training": (
        "multires_noise_iterations adaptive_noise_scale ip_noise_gamma"
    ),
    "levels are sampled logit-normally (flow_sigmoid_scale) or uniformly (flow_use_uniform_schedule)": (
        "weighting_scheme logit_mean logit_std mode_scale timestep_sampling timestep_type"
    ),
}
"""Names without a setting, by what to do instead or why there is none."""


def meaning_of(name: str) -> str:
    """Answer to a name of another program, as the end of a sentence; empty for one that is not known."""
    for ours, theirs in RENAMED.items():
        if name in theirs.split():
            return f"did you mean `{ours}`?"
    return foreign_hint(name)


def foreign_hint(name: str) -> str:
    """Advice for a name that is no setting; empty if unknown."""
    return next((answer for answer, names in ANSWERS.items() if name in names.split()), "")
