from __future__ import annotations

import json
import re

import pytest
from PIL import Image

from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.config.datasets import load_datasets
from simpletuner.errors import BrokenRule, SettingsError
from simpletuner.models.catalog.support import SCOPES
from simpletuner.settings import load
from simpletuner.settings.declared.sections import SECTION_OF, setting_fields
from simpletuner.settings.declared.table import canonical_name
from simpletuner.settings.foreign.recognition import ANSWERS, RENAMED
from simpletuner.settings.rules.effects import FACTS, condition_of
from simpletuner.tools.run_check import warnings_about_data

ENOUGH = {"model_family": "sdxl", "model_flavour": "tiny", "instance_data_dir": "pictures"}
ALWAYS = """
model_family model_flavour model_families model_type pretrained_model_name_or_path revision variant vae_dtype
vae_enable_tiling vae_enable_slicing caption_strategy repeats resolution resolution_type aspect_bucket_sizes crop
minimum_image_size caption_dropout_probability preserve_data_backend_cache vae_cache_disable text_cache_disable
max_workers instance_data_dir data_backend_config aspect_bucket_alignment allow_dataset_oversubscription
vae_cache_dtype rescan dataloader_prefetch_qlen output_dir seed train_batch_size gradient_accumulation_steps
global_batch_size max_train_steps mixed_precision float8 activation_memory_budget fuse_qkv_projections
attention_backend optimizer state_layout optimizer_release_gradients learning_rate lr_scheduler lr_warmup_steps
adam_weight_decay max_grad_norm use_ema fsdp_enable fsdp_state_dict_type context_parallel_size zero_stage
num_processes num_machines preemption_check preemption_grace_seconds use_cpu dynamo_backend checkpoint_step_interval
async_checkpointing checkpoints_total_limit export_single_file export_precision resume_from_checkpoint mirror_output
validation_prompt continue_with_other_data
validation_prompt_file eval_split report_to device_peak_tflops profile_steps log_sample_losses notify_url push_to_hub
"""
"""Settings that no other setting switches off, or that a rule refuses where they would have no effect."""


@pytest.mark.parametrize("name", setting_fields())
def test_a_setting_always_has_an_effect_or_says_when(name):
    condition = condition_of(name)
    assert (
        sum(
            [
                name in ALWAYS.split(),
                bool(condition),
                name in SCOPES and name not in ("flow_sigmoid_scale", "framerate"),
            ]
        )
        == 1
    )
    for term in (term for group in condition for term in group):
        assert term.name in SECTION_OF or term.name in FACTS


IDLE = [
    (
        {"instance_prompt": "sks"},
        "instance_prompt = 'sks' has no effect with caption_strategy = textfile: it is for caption_strategy "
        "= instanceprompt or prepend_instance_prompt = true",
    ),
    ({"prepend_instance_prompt": True}, "prepend_instance_prompt = true has no effect without instance_prompt"),
    ({"ema_decay": 0.5}, "ema_decay = 0.5 has no effect without use_ema = true"),
    (
        {"validation_guidance": 9},
        "validation_guidance = 9.0 has no effect without validation_prompt, validation_prompt_file or validation_pairs",
    ),
    ({"crop_style": "random"}, "crop_style = 'random' has no effect without crop = true"),
    (
        {"assistant_lora_strength": 0.5, "model_type": "lora", "learning_rate": 1e-4},
        "assistant_lora_strength = 0.5 has no effect without assistant_lora",
    ),
    (
        {"lr_end": 1e-7},
        "lr_end = 1e-07 has no effect with lr_scheduler = constant: it is for lr_scheduler = linear, cosine "
        "or polynomial",
    ),
    ({"num_train_epochs": 3, "max_train_steps": 9}, "num_train_epochs = 3 has no effect beside max_train_steps = 9"),
    ({"node_timeout": 5}, "node_timeout = 5.0 has no effect with num_machines = 1: it is for num_machines above 1"),
    (
        {"adam_epsilon": 1e-3, "optimizer": "lion"},
        "adam_epsilon = 0.001 has no effect with optimizer = lion: it is for another optimizer",
    ),
    (
        {"tracker_project_name": "x", "report_to": "tensorboard"},
        "tracker_project_name = 'x' has no effect with report_to = tensorboard: it is for report_to = wandb, "
        "trackio or swanlab",
    ),
    (
        {"eval_timesteps": 2},
        "eval_timesteps = 2 has no effect without eval_split above 0 or a dataset of dataset_type eval",
    ),
    ({"notify_format": "json"}, "notify_format = 'json' has no effect without notify_url"),
    (
        {"gradient_checkpointing": True, "activation_memory_budget": 0, "dynamo_backend": "inductor"},
        "gradient_checkpointing = true has no effect beside activation_memory_budget = 0.0",
    ),
]


@pytest.mark.parametrize(("flags", "sentence"), IDLE)
def test_what_was_written_and_has_no_effect_is_said(flags, sentence):
    assert load({**ENOUGH, **flags}, environment={}).warnings == (sentence,)


USED = [
    {"instance_prompt": "sks", "prepend_instance_prompt": True},
    {"instance_prompt": "sks", "caption_strategy": "instanceprompt"},
    {"ema_decay": 0.5, "use_ema": True},
    {"ema_decay": 0.995},  # the default, as settings.json has it
    {"num_train_epochs": 0, "max_train_steps": 9},  # says so itself
    {"lr_end": 1e-7, "lr_scheduler": "cosine"},
    {"validation_guidance": 9, "validation_prompt": ["x"]},
    {"grad_clip_method": "value"},
]


@pytest.mark.parametrize("flags", USED)
def test_nothing_is_said_of_what_counts(flags):
    assert load({**ENOUGH, **flags}, environment={}).warnings == ()


def test_a_dataset_file_decides_for_its_datasets(tmp_path):
    file = tmp_path / "d.json"
    images = {"id": "a", "instance_data_dir": "a"}
    entries = [{**images, "instance_prompt": "sks", "repeats": 2}, {**images, "id": "b", "crop": True, "repeats": 1}]
    file.write_text(json.dumps(entries))
    flags = {"crop_style": "random", "repeats": 3, "caption_encoding": "cp1252", "masked_loss_probability": 0.5}
    loaded = load({"model_family": "sdxl", "data_backend_config": str(file), **flags}, environment={})
    assert loaded.warnings == ()
    said = [*warnings_about_data(loaded, load_datasets(loaded.settings.data)[0])]
    assert said == [
        "instance_prompt = 'sks' has no effect with caption_strategy = textfile: it is for caption_strategy = "
        f"instanceprompt or prepend_instance_prompt = true ({file}:1, dataset `a`)",
        f"repeats has no effect: each dataset of {file} has its own",
        "masked_loss_probability = 0.5 has no effect without a dataset of masks",
    ]


@pytest.mark.parametrize("asked", [True, None, False])
def test_pairs_of_validation_are_first_frames_of_clips_too(asked, tmp_path):
    clips = {"id": "a", "instance_data_dir": "a", "dataset_type": "video", "video": {"is_i2v": asked}}
    (tmp_path / "d.json").write_text(json.dumps([clips]))
    flags = {"model_family": "wan", "data_backend_config": str(tmp_path / "d.json"), "validation_pairs": 1}
    loaded = load(flags, environment={})
    said = "without a dataset of references or clips that continue their first frame"
    expected = [f"validation_pairs = 1 has no effect {said}"] if asked is False else []  # None: the model decides
    assert [*warnings_about_data(loaded, load_datasets(loaded.settings.data)[0])] == expected


ELSEWHERE = {
    "class_data_dir": "is_regularisation_data and prior_images",
    "validation_epochs": "set validation_step_interval",
    "rank": "did you mean `lora_rank`?",
    "use_8bit_adam": "state_layout=split",
    "hub_token": "HF_TOKEN",
    "lr_num_cycles": "cosine_with_restarts",
}


def test_names_of_other_programs_are_answered_by_their_meaning():
    with pytest.raises(SettingsError) as caught:
        load({**ENOUGH, **dict.fromkeys(ELSEWHERE, "1")}, environment={})
    for mistake, answer in zip(caught.value.mistakes, ELSEWHERE.values(), strict=True):
        assert answer in mistake.hint
    names = [name for names in (*RENAMED.values(), *ANSWERS.values()) for name in names.split()]
    assert len({*names}) == len(names)
    assert not [name for name in names if canonical_name(name)]
    assert not RENAMED.keys() - setting_fields().keys()


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_names_settings_that_there_are_and_values_that_they_take(answer):
    for name in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b|\b[a-z0-9]+(?==)", answer):
        assert name in setting_fields() or name in LocalImages.model_fields, name
    given = {name: value for name, value in re.findall(r"\b([a-z0-9_]+)=(\w+)", answer) if name in setting_fields()}
    with pytest.raises(SettingsError) as caught:
        load({**ENOUGH, **given, "learning_rate": "fast"}, environment={})
    refused = [each.setting for each in caught.value.mistakes if not isinstance(each, BrokenRule)]
    assert refused == ["learning_rate"]


def test_caption_files_beside_one_phrase_are_said(tmp_path):
    from simpletuner.data.scan.file_list import list_images
    from simpletuner.data.storage.storage import open_storage

    for number in range(3):
        Image.new("RGB", (64, 64)).save(tmp_path / f"{number}.png")
    (tmp_path / "0.txt").write_text("a cat")
    (tmp_path / "notes.txt").write_text("of no image")
    keys = {"id": "a", "instance_data_dir": tmp_path, "instance_prompt": "sks"}
    for strategy, unused in {"instanceprompt": 1, "filename": 1, "textfile": 0}.items():
        dataset = LocalImages(**keys, caption_strategy=strategy)
        assert list_images(dataset, open_storage(dataset, ()), lambda: None).others.unused_captions == unused
