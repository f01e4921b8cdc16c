"""`config import` of ai-toolkit's jobs: what its code computes (27a03a91) is what is written, named or refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trainer_files import put, value_of, vocabulary

from simpletuner.commands.config_import import foreign_file, import_files
from simpletuner.data.config.caption_rules import compile_rule
from simpletuner.errors import SettingsError
from simpletuner.models.family.objectives import FlowMatching
from simpletuner.settings import load
from simpletuner.training.optimizers import LearningRate, Schedule

JOB: dict[str, Any] = {
    "type": "sd_trainer",
    "training_folder": "output",
    "network": {"type": "lora", "linear": 16, "linear_alpha": 16},
    "datasets": [{"folder_path": "img", "caption_ext": "txt"}],
    "train": {"steps": 2000, "noise_scheduler": "flowmatch", "optimizer": "adamw8bit", "lr": "1e-4", "dtype": "bf16"},
    "model": {"name_or_path": "black-forest-labs/FLUX.1-dev", "is_flux": True},
}
UNET: dict[str, Any] = {
    "model": {"name_or_path": "stabilityai/stable-diffusion-xl-base-1.0", "arch": "sdxl"},
    "train.noise_scheduler": "ddpm",
    "train.dtype": "bf16",
}
WAN: dict[str, Any] = {"model": {"name_or_path": "Wan-AI/Wan2.2-T2V-A14B-Diffusers", "arch": "wan22_14b:t2v"}}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def job(changes: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
    process = copy.deepcopy(JOB)
    for name, value in copy.deepcopy(changes).items():
        put(process, name, value)
    return {"job": "extension", "config": {"name": "mine", "process": [process, *others]}}


def imported(changes: dict[str, Any], *others: dict[str, Any], partial: bool = False, suffix: str = ".yaml"):
    """Import a job; return its settings, its datasets and the written file's text."""
    values = job(changes, *others)
    file = Path(f"job{suffix}")
    file.write_text(yaml.safe_dump(values) if suffix == ".yaml" else json.dumps(values))
    import_files(file, Path("run.toml"), force=True, partial=partial)
    return made()


def made(name: str = "run"):
    text = Path(f"{name}.toml").read_text()
    return (
        load({}, Path(f"{name}.toml"), environment={}).settings,
        json.loads(Path(f"{name}.datasets.json").read_text()),
        text,
    )


def test_a_job_is_a_run_with_ai_toolkits_defaults_where_it_is_silent(monkeypatch):
    own, [data], text = imported({})
    assert (own.model.model_family, own.model.model_type, own.lora.lora_rank, own.lora.lora_alpha) == (
        *("flux", "lora", 16, None),  # the scale is 1
    )
    assert own.lora.lora_target_modules == "transformer_blocks.*,single_transformer_blocks.*"
    steps = own.optimizer
    assert (steps.learning_rate, steps.adam_epsilon, steps.adam_weight_decay, steps.max_grad_norm) == (
        *(1e-4, 1e-6, 0.01, 1.0),
    )
    assert (own.objective.flow_schedule_shift, own.objective.flow_use_uniform_schedule) == (1.0, False)
    assert (own.training.max_train_steps, own.training.output_dir) == (2000, Path("output/mine"))
    assert (own.data.aspect_bucket_alignment, own.data.allow_dataset_oversubscription) == (32, True)
    assert (data["resolution"], own.data.caption_dropout_probability, data["caption_lines"]) == (512, 0, "one")
    assert "# lost" not in text
    windows = imported({"training_folder": "D:\\out"})[2]
    assert "a path of Windows: set output_dir" in windows and "a path of Windows" not in text
    monkeypatch.setenv("DATA", "pictures")
    [data] = imported({"training_folder": "${DATA}/x", "datasets.folder_path": "${DATA}"})[1]
    assert (data["id"], data["instance_data_dir"]) == ("DATA", "{env:DATA}")
    assert imported({}, suffix=".json")[0] == own


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train.gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 1, "max_train_steps": 500}),
        (
            {"train.gradient_accumulation": 4},
            *[
                {
                    "gradient_accumulation_steps": 4,
                    "max_train_steps": 2000,
                    "max_grad_norm": 0.25,
                    "adam_epsilon": 2.5e-7,
                }
            ],
        ),
        (
            {"train.lr_scheduler": "constant_with_warmup", "train.gradient_accumulation_steps": 2},
            {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 500},
        ),
        ({"train.lr_scheduler": "cosine_with_restarts"}, {"lr_scheduler": "cosine", "lr_end": 0.0}),
        (
            {"train.lr_scheduler": "cosine", "train.lr_scheduler_params": {"eta_min": "1e-6"}},
            {"lr_scheduler": "cosine", "lr_end": 1e-6},
        ),
        ({"train.optimizer": "prodigy", "train.lr": 1e-4}, {"optimizer": "prodigy", "learning_rate": 1.0}),
        ({"train.optimizer": "lion"}, {"optimizer": "lion", "adam_beta2": 0.99, "adam_weight_decay": 0.0}),
        ({"train.optimizer": "adam8bit"}, {"optimizer": "adam", "adam_weight_decay": 0.0}),
        (
            {"train.optimizer_params": {"weight_decay": "1e-4", "betas": [0.9, 0.95]}},
            {"adam_weight_decay": 1e-4, "adam_beta2": 0.95},
        ),
        ({"train.timestep_type": "linear"}, {"flow_use_uniform_schedule": True, "flow_schedule_shift": 1.0}),
        ({"train.timestep_type": "flux_shift"}, {"flow_use_uniform_schedule": True, "flow_schedule_auto_shift": True}),
        ({"train.ema_config": {"use_ema": True}}, {"use_ema": True, "ema_decay": 0.999}),
        ({"model.quantize": True}, {"base_model_precision": "float8"}),
        ({"model.quantize": True, "model.qtype": "uint3|owner/adapter"}, {"base_model_precision": "nf4"}),
        ({"model.quantize": True, "model.qtype": "qint8"}, {"base_model_precision": "int8"}),
        (
            {"network.type": "lokr", "network.lokr_factor": 8},
            {"lora_type": "lokr", "lokr_factor": 8, "lora_rank": 65536},
        ),
        ({"network.type": "lokr", "network.lokr_full_rank": False}, {"lora_type": "lokr", "lora_rank": 16}),
        (
            {
                "network": {
                    "type": "lokr",
                    "linear": 8,
                    "linear_alpha": 4,
                    "lokr_full_rank": False,
                    "old_lokr_format": True,
                }
            },
            {"lora_rank": 8, "lora_alpha": 4.0},
        ),
        ({"network.type": "dora"}, {"lora_type": "dora"}),
        (
            {"network.network_kwargs": {"only_if_contains": ["transformer.single_transformer_blocks.7.", "to_q"]}},
            {
                "lora_target_modules": "single_transformer_blocks.7.*,"
                "transformer_blocks.*to_q*,single_transformer_blocks.*to_q*"
            },
        ),
        ({"network.transformer_only": False}, {"lora_target_modules": "*"}),
        ({"training_seed": 7, "train.cfg_scale": 3.5}, {"seed": 7, "flux_guidance_value": 3.5}),
        ({**UNET}, {"model_family": "sdxl", "prediction_type": "epsilon", "aspect_bucket_alignment": 16}),
        ({**UNET, "network": {"linear": 16}}, {"lora_rank": 16, "lora_alpha": 1.0}),
        ({**UNET, "network": None}, {"model_type": "full"}),
        ({"network": {}}, {"model_type": "lora", "lora_rank": 4}),
        ({**UNET, "train.min_snr_gamma": 5}, {"snr_gamma": 5.0}),
        (
            {**UNET, "network": {"linear": 8, "linear_alpha": 4, "conv": 8, "conv_alpha": 4}},
            {"lora_alpha": 4.0, "lora_target_modules": "*"},
        ),
        ({"model": {"name_or_path": "m", "is_v3": True}, "train.timestep_type": "shift"}, {"flow_schedule_shift": 3.0}),
        (
            {"model": {"name_or_path": "m", "is_lumina2": True}, "train.timestep_type": "lumina2_shift"},
            {"model_family": "lumina2", "flow_schedule_shift": 6.0, "aspect_bucket_alignment": 16},
        ),
        ({"logging": {"use_wandb": True, "project_name": "p", "run_name": "r"}}, {"tracker_project_name": "p"}),
        ({"save": {"push_to_hub": True, "hf_repo_id": "me/it"}}, {"push_to_hub": True, "hub_model_id": "me/it"}),
    ],
)
def test_what_a_key_means_there_is_what_is_written(changes, expected):
    own, _, _ = imported(changes)
    found = {name: value_of(own, name) for name in expected}
    assert found == {name: pytest.approx(value) if type(value) is float else value for name, value in expected.items()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train.lr_scheduler": "linear"}, "it rises from a third"),
        ({"train.lr_scheduler": "polynomial"}, "it ends in an error there"),
        ({"train.gradient_accumulation_steps": -1}, "an epoch is a step there"),
        ({"train.optimizer": "adafactor"}, "do not scale with the weights"),
        ({"train.optimizer": "automagic"}, "does not have this optimizer"),
        ({"train.optimizer_params": {"d_coef": 2}}, "d_coef = 2"),
        ({"train.timestep_type": "weighted"}, "weighed by a table"),
        ({"train.timestep_type": "lognorm_blend"}, "does not draw noise levels so"),
        ({"train.linear_timesteps": True}, "weighed by a bell"),
        ({"train.content_or_style": "style"}, "favours high or low noise"),
        ({"train.bypass_guidance_embedding": True}, "the guidance embedding is left out"),
        ({"train.snr_gamma": 5}, "without the minimum"),
        ({"train.dtype": "fp8"}, "fp8 is not offered"),
        ({"train.train_text_encoder": True}, "text encoders are not trained"),
        ({"train.train_unet": False}, "the denoiser is always trained"),
        ({"train.noise_scheduler": "ddpm"}, "trained with flowmatch"),
        ({"train.diff_output_preservation": True}, "diff_output_preservation = true"),
        ({"train.loss_type": "mae"}, "loss_type = 'mae'"),
        ({"adapter": {"type": "redux"}}, "adapter = 'type'"),
        ({"network.network_kwargs": {"ignore_if_contains": ["ff"]}}, "lora_target_modules alone"),
        ({"model.assistant_lora_path": "ostris/adapter"}, "download it"),
        ({"datasets.is_reg": True}, "every second step"),
        ({"datasets.flip_x": True}, "a second time, mirrored"),
        ({"datasets.token_dropout_rate": 0.1}, "token_dropout_rate = "),
        ({"datasets.controls": ["depth"]}, 'controls = ["depth"]'),
        ({"datasets.control_path": "before"}, "not given images here"),
        ({"datasets.caption_ext": "json"}, "captions are read from .txt files"),
        ({"datasets.num_frames": 33, **WAN}, "frames are taken from all of a video"),
        ({**UNET, "network": {"linear": 16, "conv": 8}}, "one rank and alpha hold for all layers"),
        ({**WAN, "train.gradient_accumulation": 2}, "take turns with the denoisers"),
        ({"unheard_of": 1}, "not a key of ai-toolkit"),
    ],
)
def test_what_has_no_place_here_ends_the_import(changes, said):
    with pytest.raises(SettingsError) as caught:
        imported(changes)
    assert said in caught.value.message and "this version does not do" in caught.value.message
    assert not Path("run.toml").exists()
    imported(changes, partial=True)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (job({"model": {"name_or_path": "m", "arch": "hidream"}}), "job.yaml trains `hidream`"),
        (job({"type": "concept_slider"}), "a process of type `concept_slider` is not translated"),
        ({**job({}), "job": "extract"}, "a job of type `extract` trains no model"),
        ({"job": "extension", "config": {"name": "x", "process": []}}, "use a list of processes"),
        ({"job": "extension", "config": {"name": "x", "process": {"type": "sd_trainer"}}}, "use a list of processes"),
        (job({"datasets": []}), "has no dataset of images"),
        (job({"datasets": "img"}), "use a list of tables"),
    ],
)
def test_a_job_that_trains_nothing_of_ours_is_one_sentence(values, said):
    Path("job.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(SettingsError, match=said):
        import_files(Path("job.yaml"), Path("run.toml"), force=False)


def test_files_that_are_there_already_stay_and_datasets_need_a_file():
    Path("job.yaml").write_text(yaml.safe_dump(job({}, JOB)))
    with pytest.raises(SettingsError, match="names datasets") as caught:
        import_files(Path("job.yaml"), None, force=False)
    assert caught.value.hint == "give --output=run.toml"
    Path("run-2.toml").write_text("mine")
    with pytest.raises(SettingsError, match="run-2.toml exists already"):
        import_files(Path("job.yaml"), Path("run.toml"), force=False)
    assert Path("run-2.toml").read_text() == "mine"


def test_the_schedule_and_the_noise_levels_are_ai_toolkits():
    """As torch's CosineAnnealingLR, which it makes, and as its sampler draws them (medians and quartiles, run)."""
    cosine = {"train.lr_scheduler": "cosine", "train.steps": 20, "train.lr_scheduler_params": {"eta_min": 1e-6}}
    own, _, _ = imported(cosine)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-4)
    theirs, rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=1e-6), []
    for _ in range(20):
        rates.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    ours = LearningRate(Schedule(own.training.max_train_steps or 0), own.optimizer)
    assert [ours.at(step) for step in range(20)] == pytest.approx(rates)
    u = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9])
    for kind, model, expected in (
        ("sigmoid", JOB["model"], [0.22, 0.34, 0.50, 0.66, 0.78]),
        ("linear", JOB["model"], [0.1, 0.25, 0.5, 0.75, 0.9]),
        ("shift", {"name_or_path": "m", "arch": "sd3"}, [0.25, 0.5, 0.75, 0.9, 0.964]),
    ):
        levels = imported({"train.timestep_type": kind, "model": model})[0].objective
        flow = FlowMatching(
            levels.flow_schedule_shift or 0, levels.flow_sigmoid_scale, levels.flow_use_uniform_schedule
        )
        assert flow.sigmas(u, levels.flow_schedule_shift or 0).tolist() == pytest.approx(expected, abs=0.005)


def test_processes_and_denoisers_are_a_file_each():
    first, _, _ = imported({}, {**JOB, "name": "[name]-2", "trigger_word": "[name]"})
    second, [data], _ = made("run-2")
    assert (first.training.output_dir, second.training.output_dir) == (Path("output/mine"), Path("output/mine-2"))
    assert compile_rule(data["caption_filter_list"][1])("a cat") == "mine a cat"
    high, _, text = imported({**WAN, "train.timestep_type": "linear"})
    low = made("run-2")[0]
    assert (high.model.model_flavour, low.model.model_flavour) == ("t2v-14b-2.2-high", "t2v-14b-2.2-low")
    assert high.training.max_train_steps == low.training.max_train_steps == 1000 and "take turns" in text
    assert high.training.output_dir != low.training.output_dir
    one = {**WAN["model"], "model_kwargs": {"train_high_noise": False, "train_low_noise": True}}
    only, _, _ = imported({"model": one})
    assert (only.model.model_flavour, only.training.max_train_steps) == ("t2v-14b-2.2-low", 2000)


def test_datasets_have_their_sizes_masks_controls_and_clips():
    _, data, _ = imported(
        {"datasets": [{"folder_path": "C:\\img", "resolution": [512, 768], "num_repeats": 3, "mask_path": "masks"}]}
    )
    assert [each["id"] for each in data] == ["img-512", "img-512-masks", "img-768", "img-768-masks"]
    assert (data[2]["resolution"], data[2]["repeats"], data[2]["conditioning_data"]) == (768, 2, ["img-768-masks"])
    assert (data[1]["conditioning_type"], data[1]["instance_data_dir"]) == ("mask", "masks")
    twice = {"datasets": [{"folder_path": "a/img", "mask_path": "m"}, {"folder_path": "b/img", "mask_path": "n"}]}
    assert [each.get("conditioning_data") for each in imported(twice)[1]] == [
        ["img-masks"],
        None,
        ["img-2-masks"],
        None,
    ]
    edits = {"name_or_path": "Qwen/Qwen-Image-Edit-2509", "arch": "qwen_image_edit_plus"}
    controls = {"model": edits, "datasets.control_path_1": "one", "datasets.control_path_2": "two"}
    first, *pairs = imported(controls)[1]
    assert first["conditioning_data"] == ["img-references", "img-references-2"]
    assert [(each["conditioning_type"], each["resolution"]) for each in pairs] == [("reference_loose", 1024)] * 2
    kontext = {"model": {"name_or_path": "m", "arch": "flux_kontext"}, "datasets.control_path": "before"}
    assert imported(kontext)[1][1]["conditioning_type"] == "reference_strict"
    wan = {"model": {"name_or_path": "m", "arch": "wan21:1b"}, "datasets.auto_frame_count": True, "datasets.fps": 16}
    assert imported(wan)[1][1]["video"] == {"bucket_strategy": "resolution_frames", "fps": 16}
    _, (still, clip), text = imported(
        wan | {"datasets": [{"folder_path": "img", "num_frames": 33, "shrink_video_to_frames": False}]}
    )
    assert clip["video"] == {"num_frames": 33, "fps": 24, "clip_position": "random"} and "video" not in still
    assert "drawn each time there, and once here" in text


def test_captions_get_the_trigger_word_where_it_is_missing():
    Path("img").mkdir()
    for name, caption in {
        "a": "1girl, smile\n",
        "b": "[trigger] on a beach\nsecond",
        "c": "sks person",
        "d": "",
    }.items():
        Path(f"img/{name}.jpg").touch()
        Path(f"img/{name}.txt").write_text(caption)
    changes = {"trigger_word": "sks", "datasets.default_caption": "a thing", "datasets.caption_dropout_rate": 0.1}
    _, [data], text = imported(changes)
    place, front = map(compile_rule, data["caption_filter_list"])
    captions = [front(place(Path(f"img/{name}.txt").read_text().strip())) for name in "abc"]
    assert captions == ["sks 1girl, smile", "sks on a beach\nsecond", "sks person"]  # as its FileItemDTO has them
    assert "1 images without a caption, such as img/d.jpg," in text and "a dropped caption is the trigger word" in text
    for name in "abc":
        Path(f"img/{name}.txt").unlink()
    _, [data], _ = imported(changes)
    assert (data["caption_strategy"], data["instance_prompt"]) == ("instanceprompt", "sks a thing")
    word = compile_rule(
        imported({"trigger_word": r"a/b\c*", "datasets.folder_path": "other"})[1][0]["caption_filter_list"][1]
    )
    assert (word("x"), word(r"a/b\c* x")) == (r"a/b\c* x", r"a/b\c* x")


def test_samples_are_prompts_with_their_sizes_seeds_and_flags():
    sample = {"sample_every": 250, "width": 1024, "height": 768, "seed": 42, "guidance_scale": 4, "neg": ""}
    prompts = ["a [trigger] cat", "a dog --n ugly --w 512 --h 512 --seed 9 --cfg 2"]
    own, _, _ = imported({"trigger_word": "sks", "sample": {**sample, "walk_seed": True, "prompts": prompts}})
    assert (own.validation.validation_resolution, own.validation.validation_seed) == ("1024x768", 42)
    assert (own.validation.validation_step_interval, own.validation.validation_guidance) == (250, 4.0)
    first, second = map(json.loads, Path("run.prompts.jsonl").read_text().splitlines())
    assert first == {"prompt": "a sks cat"}
    assert second == {
        "prompt": "a dog",
        "negative_prompt": "ugly",
        "resolution": "512x512",
        "seed": 9,
        "guidance": 2,
    }
    own, _, _ = imported({"sample": {**sample, "samples": [{"prompt": "x", "width": 512, "ctrl_img": "c.png"}]}})
    assert json.loads(Path("run.prompts.jsonl").read_text()) == {
        "prompt": "x",
        "seed": 42,
        "resolution": "512x768",
        "images": ["c.png"],
    }
    off, _, _ = imported({"train.disable_sampling": True, "sample": {**sample, "prompts": prompts}})
    assert not off.validation.validation_prompt and off.validation.validation_prompt_file is None


def test_a_lora_that_is_here_is_merged_or_trained_on():
    Path("adapter.safetensors").touch()
    own, _, _ = imported({"model.assistant_lora_path": "adapter.safetensors"})
    assert own.lora.assistant_lora == [Path("adapter.safetensors")]
    own, _, _ = imported({"network.pretrained_lora_path": "adapter.safetensors"})
    assert own.lora.lora_init == Path("adapter.safetensors")


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.just("")
    | st.just("1e-4")
    | st.just("x")
    | st.just(float("inf")),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "prompt", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)
KEYS = [name for name, _, _ in vocabulary("ai_toolkit")]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from([*KEYS, "train", "model", "datasets", "network", "sample", "save"]), JUNK, max_size=4
    )
)
def test_garbage_ends_in_a_sentence(changes):
    values = job({})
    for name, value in changes.items():
        try:
            put(values["config"]["process"][0], name, value)
        except (AttributeError, IndexError, TypeError):
            continue  # its section is junk already
    Path("job.json").write_text(json.dumps(values))
    if foreign_file(Path("job.json")) is None:
        return
    try:
        import_files(Path("job.json"), Path("run.toml"), force=True, partial=True)
    except SettingsError as error:
        assert error.message
