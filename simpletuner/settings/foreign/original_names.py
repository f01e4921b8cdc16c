"""Settings of the original SimpleTuner: each name in its files maps to a setting, has no effect, or is
refused.

The data are here and in `original_tables.py`; docs/from-the-original.md is generated from both. A family that
is not listed has the same name here. Refused names stand in one text per reason; `name=value|value` adds
values without an effect, besides those that mean "off".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import get_args

from simpletuner.settings.declared.sections import SECTION_OF, setting_fields
from simpletuner.settings.files.raw_values import EXTRA_ARGS
from simpletuner.settings.foreign.key_table import Ignores, KeyTable, MappedField, Maps, Refuses, Rule, map_field
from simpletuner.settings.foreign.original_tables import ASKS_FOR_NOTHING, RENAMED
from simpletuner.settings.values.spelling import normalize_name

AUDIO = "it generates audio"
NO_PIPELINE = "diffusers has no pipeline of it"
NO_TEXT = "its pipeline has no encode_prompt, whose embeddings could be cached"
UNTRAINED = {
    "ace_step": AUDIO,
    "boogu_image": NO_PIPELINE,
    "cosmos": "its scheduler is for EDM, which is not trained here",
    "cosmos3": NO_TEXT,
    "deepfloyd": "it denoises pixels, in stages of their own",
    "heartmula": AUDIO,
    "hidream": "its pipeline generates images of one area alone, whatever size it is asked for",
    "kandinsky5_image": "its pipeline generates images of sizes of its own, whatever size it is asked for",
    "longcat_video": NO_PIPELINE,
    "mage_flow": NO_PIPELINE,
    "mageflow": NO_PIPELINE,
    "minimax_h3": "its pipeline generates clips of 5 to 15 seconds with audio, and no single frame",
    "minimax_music": AUDIO,
    "minimax_music3": AUDIO,
    "omnigen": NO_TEXT,
    "stable_cascade": "it has two denoisers, one after the other",
    "wan_s2v": NO_PIPELINE,
    "z_image_omni": "its pipeline generates from images, too",
    "zlab_i1": NO_PIPELINE,
}
"""Families that cannot be trained by a class or by their pipeline's own call, with the reason."""


def why_untrained(family: str) -> str:
    """Sentence that a family of the original cannot be trained here, with the reason; empty for another."""
    reason = UNTRAINED.get(family)
    return f"{family} cannot be trained: {reason}" if reason else ""


# Names that decide what is trained: without them a file would train something else.
DECIDES: dict[str, str] = {
    # Parts of a model.
    "the parts of a model come from one pipeline folder: put this one there, and name the folder with "
    "pretrained_model_name_or_path": (
        "pretrained_vae_model_name_or_path=madebyollin/sdxl-vae-fp16-fix pretrained_transformer_model_name_or_path "
        "pretrained_transformer_subfolder=transformer pretrained_unet_model_name_or_path "
        "pretrained_unet_subfolder=unet pretrained_t5_model_name_or_path pretrained_gemma_model_name_or_path "
        "qwen_text_encoder_model_name_or_path"
    ),
    "ControlNets and control channels are not trained by this version": "controlnet control",
    "grounding is not trained by this version": "max_grounding_entities",
    "text encoders are not trained by this version; leave it out": "train_text_encoder lyrics_embedder_train",
    "SDXL's refiner is not trained by this version": "refiner_training",
    "all weights are trained; leave it out": "layer_freeze_strategy use_bitfit",
    "the text encoder's usual layers are used; leave it out": "custom_text_encoder_intermediary_layers",
    # LoRA.
    "adapters are those of peft; leave it out": "peft_lora_mode=standard",
    "the first matrix is drawn from a uniform distribution, the second is 0; leave it out": "lora_init_type=default",
    "set lora_target_modules; without it the attention projections are adapted": "flux_lora_target=all",
    # The objective.
    "the objective is the mean squared error; leave it out": "loss_type=l2 use_soft_min_snr snr_weight=1",
    "the base model's scheduler decides: set rescale_betas_zero_snr in its scheduler_config.json": (
        "rescale_betas_zero_snr"
    ),
    "noise levels are logit-normal, or uniform with flow_use_uniform_schedule; leave it out": (
        "flow_use_beta_schedule flow_cubic_schedule_weights flow_custom_timesteps timestep_bias_strategy"
    ),
    "noise is plain Gaussian noise; leave it out": "offset_noise input_perturbation",
    "guidance is the constant flux_guidance_value; leave it out": "flux_guidance_mode=constant",
    "the family's own inputs are used, as its pipeline makes them; leave it out": (
        "flux_attention_masked_training flux_fast_schedule sana_complex_human_instruction "
        "wan_force_2_1_time_embedding t5_padding=unmodified sd3_clip_uncond_behaviour=empty_string "
        "sd3_t5_uncond_behaviour=empty_string hidream_use_load_balancing_loss"
    ),
    "this method of training is not known to this version; leave it out": (
        "tread_config diffusion_blocks_config distillation_method diff2flow_enabled scheduled_sampling_max_step_offset "
        "scheduled_sampling_reflexflow mixflow_enabled xm_enabled nextlat_enabled irepa_enabled crepa_enabled "
        "twinflow_enabled internal_guidance_enabled layersync_enabled urepa_enabled slider_lora_target"
    ),
    # Optimizer and schedule.
    "write the product into learning_rate yourself": "lr_scale lr_scale_sqrt",
    "write adam_beta1, adam_beta2, adam_epsilon and adam_weight_decay as settings": "optimizer_config",
    "the average begins at the first step; leave it out": "ema_warmup_steps",
    # Data.
    "what images show is not checked; leave it out": "enable_nsfw_check",
    "it is a key of a dataset: write it into the file of data_backend_config": (
        "type maximum_image_size target_downsample_size max_upscale_threshold crop_aspect_buckets "
        "disable_multiline_split"
    ),
    "datasets are weighted by repeats and probability alone": "data_backend_sampling=auto-weighting",
    "set caption_strategy=instanceprompt": "only_instance_prompt",
}

# Names that are refused unless their value asks for nothing, by the reason and what to do instead.
REFUSED: dict[str, str] = {
    **DECIDES,
    # Adapters.
    "adapters are not loaded by this version": "validation_adapter_path validation_adapter_config",
    # Memory.
    "set fsdp_enable and fsdp_offload_params, which keep weights in the machine's memory, with one GPU, too": (
        "ramtorch musubi_blocks_to_swap enable_group_offload"
    ),
    "leave it out; zero_stage=2 with offload_optimizer=cpu keeps optimizer state in memory": (
        "optimizer_cpu_offload_method optimizer_offload_gradients"
    ),
    # Data and caches.
    "your images are never deleted; leave it out": (
        "delete_unwanted_images delete_problematic_images delete_nsfw_images delete_small_images delete_errored_images"
    ),
    "downloads are never deleted; leave it out": "delete_model_after_load",
    "captions are encoded before training, or with text_cache_ondemand while training; leave it out": (
        "text_embed_full_cache"
    ),
    "set cache_dir_vae and cache_dir_text; HF_HOME says where downloads go": "cache_dir",
    # Checkpoints.
    "checkpoints are counted in steps: set checkpoint_step_interval": (
        "checkpoint_epoch_interval checkpointing_rolling_steps"
    ),
    "a full disk ends the run, which goes on from its last checkpoint; leave it out": "disk_low_threshold",
    # Validation.
    "validation is counted in steps: set validation_step_interval": (
        "validation_epoch_interval validate_after_step validate_after_epoch"
    ),
    "leave validation_prompt out: without prompts nothing is drawn": "validation_disable",
    "write the prompts as the list validation_prompt, or as lines of validation_prompt_file": (
        "validation_prompt_library user_prompt_library"
    ),
    "one PNG image is drawn per prompt; leave it out": "num_validation_images=1 validation_image_format=png",
    "images are written when they are finished; leave it out": "validation_preview",
    "validation draws from text alone; leave it out": "validation_input validation_using_datasets",
    "set validation_seed": "validation_randomize",
    "images are drawn by the family's own pipeline with validation_guidance; leave it out": (
        "validation_guidance_rescale validation_guidance_real=1 validation_guidance_skip_layers "
        "validation_noise_scheduler validation_method=simpletuner-local enable_watermark "
        "deepfloyd_validation_pipeline_mode=auto|trained-stage deepfloyd_validation_stage3_mode "
        "ltx2_validation_pipeline_mode=trained-stage pixart_validation_pipeline_mode=trained-stage "
        "sdxl_validation_pipeline_mode=trained-stage wan_validation_load_other_stage"
    ),
    "images are not scored; leave it out, and look at validation_prompt's": "evaluation_type eval_dataset_id",
    # Publishing.
    "checkpoints are not uploaded: set push_to_hub, which uploads the pipeline when the run has ended": (
        "push_checkpoints_to_hub push_checkpoints publishing_config"
    ),
    "set notify_url to one address, which gets JSON": "webhook_config",
    "no program is run by a run: leave it out": "post_checkpoint_script post_upload_script",
    "trackers of your own are not loaded; metrics.jsonl in output_dir has all metrics": "custom_tracker",
    "set gpu_ids, use_cpu or an accelerate file": "accelerate_extra_args",
    "write each argument as a setting": "trainer_extra_args",
}


OFF = ("false", "no", "off", "none", "null", "0", "0.0", "[]", "{}", "", "no_change")
ZERO = (0, "0", "0.0")
FLOAT32 = "weights and optimizer state are float32, 12 bytes per weight, which fsdp_enable shares out over the ranks"
OPTIMIZERS: dict[str, tuple[str, str]] = {
    "adamw_bf16": ("adamw", FLOAT32),
    "optimi_adamw": ("adamw", FLOAT32),
    "optimi_adam": ("adam", FLOAT32),
    "optimi_lion": ("lion", "weights and optimizer state are float32, 8 bytes per weight"),
    "torch_adamw": ("adamw", ""),
    "torch_adafactor": ("adafactor", ""),
    "bnb_adamw": ("adamw", ""),
    "bnb_adam": ("adam", ""),
    "bnb_adagrad": ("adagrad", ""),
    "bnb_lion": ("lion", ""),
}
"""The original's optimizers with ours in their place, and the cost of that."""
FEW_BITS = ("8bit", "4bit", "fp8")
EIGHT_BIT = (
    "optimizer=adamw with state_layout=split has moments of 8 bits (model_type=full); without it adamw takes its place "
    "with 8 bytes of state per weight instead of 2, which fsdp_enable shares out over the ranks"
)
LIBRARIES = ("optimi_", "bnb_", "torch_", "torchao_", "ao_", "dadapt")
NOT_HERE = "this version does not have it; adamw takes its place, with a learning_rate of its own"


def optimizer_here(value: object) -> object:
    """Optimizer that takes the place of one of the original's. Raises ValueError where none does."""
    name = normalize_name(value)
    if any(bits in name for bits in FEW_BITS):
        raise ValueError(EIGHT_BIT)
    if name not in OPTIMIZERS and name.startswith(LIBRARIES):
        raise ValueError(NOT_HERE)
    return OPTIMIZERS.get(name, (value, ""))[0]


def target_names(value: object) -> object:
    """Return a list of names as one text; the original also has them as JSON in a text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError("use names with commas between them") from None
    return ",".join(map(str, value)) if isinstance(value, list) else value


def zero_as(here: object) -> Callable[[object], object]:
    """Conversion of 0, the original's value for a setting that is not set."""
    return lambda value: here if not isinstance(value, bool) and value in ZERO else value


def adapter_here(value: object) -> object:
    """Kind of adapter, also for use_dora. Raises ValueError for LyCORIS, whose algorithm has its own file."""
    if normalize_name(value) == "lycoris":
        raise ValueError("set lora_type to the algorithm of lycoris_config (loha, lokr; lora for locon), and its sizes")
    return "dora" if normalize_name(value) == "true" else value


ATTENTION = {"flash_attn": "flash", "flash_attn_3": "flash3"}
"""The original's attention_mechanism, where attention_backend calls it otherwise."""


VALUES: dict[str, Maps] = {
    "attention_backend": Maps("attention_backend", lambda value: ATTENTION.get(normalize_name(value), value)),
    "offload_activations": Maps("offload_activations", lambda value: value == "unsloth" or value),
    "optimizer": Maps("optimizer", optimizer_here),
    "lora_target_modules": Maps("lora_target_modules", target_names),
    "lora_type": Maps("lora_type", adapter_here, neutral=("standard",)),
    "flow_schedule_shift": Maps("flow_schedule_shift", zero_as(1)),  # off, which 1 is
    **{
        name: Maps(name, zero_as(None))
        for name in ("max_train_steps", "minimum_image_size", "snr_gamma", "tokenizer_max_length")
    },
    "resume_from_checkpoint": Maps("resume_from_checkpoint", lambda value: "latest" if value is None else value),
}
"""Names that both have, with values that only the original knows."""


def names_of(texts: Mapping[str, str]) -> Iterator[tuple[str, str, tuple[object, ...]]]:
    """Yield (answer, name, values that ask for nothing) of the data."""
    for answer, text in texts.items():
        for word in text.split():
            name, _, neutral = word.partition("=")
            values = [value for value in neutral.split("|") if value]
            # As numbers, too: 1 and 1.0 are equal, their texts are not.
            yield answer, name, (*values, *(float(value) for value in values if value.isdigit()))


def renamed(setting: str, neutral: tuple[object, ...]) -> Rule:
    return replace(VALUES.get(setting, Maps(setting)), neutral=neutral)


def is_off(value: object) -> bool:
    return normalize_name(value) in OFF


TABLE = KeyTable(
    {
        **VALUES,
        **{name: renamed(setting, neutral) for setting, name, neutral in names_of(RENAMED) if setting in SECTION_OF},
        **{name: Ignores(reason, neutral) for reason, name, neutral in names_of(ASKS_FOR_NOTHING)},
        **{name: Refuses(reason, neutral) for reason, name, neutral in names_of(REFUSED)},
    },
    unset=(),
    is_off=is_off,
)


def map_name(key: str, name: str, value: object) -> MappedField:
    """Say what becomes of a value: `key` as it is written, `name` as settings and the table have it.

    In the original's files null stands for any setting that is not set.
    """
    found = map_field(TABLE, MappedField(key, name, value, "unknown"))
    if found.outcome == "unknown" and name in SECTION_OF:
        found = MappedField(key, name, value, "set", name)
    if found.outcome != "set" or found.value is not None:
        return found
    may_be_null = type(None) in get_args(setting_fields()[found.setting].annotation)  # validation knows what it means
    return found if may_be_null else MappedField(key, name, value, "neutral", note="not set")


def names_of_original(names: Iterable[str]) -> list[str]:
    """Return the names that only files of the original SimpleTuner have, each with what it is called here."""
    theirs = [name for name in names if name in EXTRA_ARGS or (name in TABLE.rules and name not in SECTION_OF)]
    return [
        f"{name} (here {rule.setting})" if isinstance(rule := TABLE.rules.get(name), Maps) else name for name in theirs
    ]


def is_value_of_original(setting: str, value: object) -> bool:
    """True if a value is valid in the original's files and has another meaning here."""
    rule = TABLE.rules.get(setting)
    if not isinstance(rule, Maps):
        return False
    try:
        return rule.read(value) != value
    except ValueError:  # the original's, and refused with a reason
        return True


def original_hint(name: str) -> str:
    """Hint for a setting name of the original: our name, or the reason for having none; empty if unknown."""
    rule = TABLE.rules.get(name)
    if isinstance(rule, Maps):
        return f"it is called `{rule.setting}` here"
    return rule.reason if isinstance(rule, Ignores | Refuses) else ""
