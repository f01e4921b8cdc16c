"""`config import` of presets of the kohya_ss GUI: the values that it writes for sd-scripts, by the folders here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simpletuner.commands.config_import import import_files
from simpletuner.errors import SettingsError
from simpletuner.settings import load
from simpletuner.settings.foreign.recognition import GUI, trainer_of

LORA = {
    "LoRA_type": "Standard",
    "pretrained_model_name_or_path": "stabilityai/stable-diffusion-xl-base-1.0",
    "sdxl": True,
    "train_data_dir": "train",
    "max_resolution": "1024,1024",
    "enable_bucket": True,
    "max_bucket_reso": 2048,
    "caption_extension": ".txt",
    "learning_rate": 0.0001,
    "text_encoder_lr": 0,
    "unet_lr": 0.0002,
    "network_dim": 32,
    "network_alpha": 16,
    "optimizer": "AdamW8bit",
    "lr_scheduler": "cosine",
    "lr_warmup": 10,
    "epoch": 5,
    "train_batch_size": 2,
    "mixed_precision": "bf16",
    "max_grad_norm": 1,
    "stop_text_encoder_training": 0,
}


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Three images of ten repeats and one, with a text each, and a folder that is no set."""
    monkeypatch.chdir(tmp_path)
    for name in ("train/10_sks cat/a", "train/10_sks cat/b", "train/10_sks cat/c", "train/1_extra/d"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(f"{name}.png").touch()
        Path(f"{name}.txt").write_text(f"{name}, tag\nsecond line\n")
    Path("train/notes").mkdir()


@pytest.fixture
def imported(capsys):
    def imported(values: dict, partial: bool = False):
        """Import a preset; return settings, datasets and what was said."""
        Path("preset.json").write_text(json.dumps(values))
        import_files(Path("preset.json"), Path("run.toml"), True, partial)
        datasets = Path("run.datasets.json")
        listed = json.loads(datasets.read_text()) if datasets.is_file() else []
        return load({}, Path("run.toml"), environment={}).settings, listed, capsys.readouterr().err

    return imported


def test_folders_and_epochs_become_datasets_and_steps(imported):
    made, (many, few), _ = imported(LORA)
    # ceil((3 x 10 + 1) / 2 x 5), where five epochs of its own are 80.
    assert (made.training.max_train_steps, made.optimizer.lr_warmup_steps) == (78, 0.1)
    assert (many["instance_data_dir"], many["repeats"], few["instance_data_dir"]) == (
        "train/10_sks cat",
        9,
        "train/1_extra",
    )
    assert (many["resolution"], many["caption_lines"]) == (1024, "first")
    assert (made.lora.lora_rank, made.lora.lora_alpha, made.lora.lora_target_modules) == (32, 16, "*.attentions.*")
    assert (made.optimizer.learning_rate, made.model.model_family, made.training.train_batch_size) == (2e-4, "sdxl", 2)
    made, *_ = imported({**LORA, "max_train_epochs": 4, "lr_warmup_steps": 30})
    assert (made.training.num_train_epochs, made.training.max_train_steps, made.optimizer.lr_warmup_steps) == (
        4,
        None,
        30,
    )
    Path("train/10_sks cat/a.txt").unlink()
    with pytest.raises(SettingsError, match="class_tokens = 'sks cat'"):
        imported(LORA)


def test_zeros_are_left_out_so_defaults_of_sd_scripts_count(imported):
    made, _, said = imported({**LORA, "max_grad_norm": 0, "network_alpha": 0, "seed": 0, "caption_extension": ".txt"})
    assert (made.optimizer.max_grad_norm, made.lora.lora_alpha) == (1.0, 1.0)
    assert "max_grad_norm = 0" in said and "default counts: 1" in said
    with pytest.raises(SettingsError, match=r"caption_extension = '\.caption'"):
        imported(
            {**LORA, "caption_extension": "", "train_data_dir": "", "dataset_config": "d.toml"} | file_of_datasets()
        )


def file_of_datasets() -> dict[str, str]:
    Path("d.toml").write_text("[[datasets]]\n  [[datasets.subsets]]\n  image_dir = 'train/1_extra'\n")
    return {"dataset_config": "d.toml"}


def test_with_a_dataset_file_the_warm_up_is_counted_and_epochs_are_not(imported):
    made, *_ = imported({**LORA, **file_of_datasets(), "max_train_steps": 205})
    assert (made.training.max_train_steps, made.optimizer.lr_warmup_steps) == (205, 20)
    made, *_ = imported({**LORA, **file_of_datasets()})
    assert (made.training.max_train_steps, made.optimizer.lr_warmup_steps) == (1600, 0)


FLUX = {
    "LoRA_type": "Flux1",
    "sdxl": False,
    "flux1_checkbox": True,
    "pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev",
    "model_prediction_type": "raw",
    "timestep_sampling": "sigmoid",
    "discrete_flow_shift": 3,
    "guidance_scale": 1,
    "weighting_scheme": "mode",
    "lumina_discrete_flow_shift": 6,
    "fp8_base": True,
}
LYCORIS = {"conv_dim": 32, "conv_alpha": 16, "text_encoder_lr": 0, "factor": 8, "unit": 1, "train_on_input": True}
FULL = "*.attentions.*,*.resnets.*,*.downsamplers.*,*.upsamplers.*"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"LoRA_type": "LyCORIS/LoKr", **LYCORIS}, ("lokr", 32, 16, FULL)),
        ({"LoRA_type": "LyCORIS/LoKr", "LyCORIS_preset": "attn-mlp", **LYCORIS}, ("lokr", 32, 16, "*.attentions.*")),
        (
            {"LoRA_type": "LyCORIS/LoKr", **LYCORIS, "network_dim": 100000, "network_alpha": 1}
            | {"LyCORIS_preset": "attn-only"},
            ("lokr", 100000, None, "*.attn1.*,*.attn2.*"),
        ),
        ({"LoRA_type": "LyCORIS/LoHa", **LYCORIS}, ("loha", 32, 16, FULL)),
        ({"LoRA_type": "LoCon", **LYCORIS}, ("lora", 32, 16, FULL)),
        (
            {"LoRA_type": "LyCORIS/LoCon", "dora_wd": True, "LyCORIS_preset": "unet-transformer-only", **LYCORIS},
            ("dora", 32, 16, "*.attentions.*"),
        ),
        ({"LoRA_type": "Kohya LoCon", **LYCORIS}, ("lora", 32, 16, FULL)),
        (FLUX, ("lora", 32, 16, "transformer_blocks.*,single_transformer_blocks.*")),
    ],
)
def test_networks_become_kinds_and_layers(imported, given, expected):
    made = imported(LORA | given)[0].lora
    assert (made.lora_type, made.lora_rank, made.lora_alpha, made.lora_target_modules) == expected


def test_values_of_another_model_are_left_out(imported):
    made, _, said = imported(LORA | FLUX)
    own = made.objective
    assert (made.model.model_family, own.flow_schedule_shift, own.flow_use_uniform_schedule) == ("flux", 1.0, False)
    assert (own.flux_guidance_value, made.lora.base_model_precision) == (1.0, "float8")
    assert "weighting_scheme" not in said
    made = imported(LORA | FLUX | {"guidance_scale": 0})[0]
    assert made.objective.flux_guidance_value == 3.5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"text_encoder_lr": 1e-5}, "text encoders are not trained"),
        ({"text_encoder_lr": 0, "unet_lr": 0}, "text encoders are not trained"),
        ({"text_encoder_lr": 1e-5, "unet_lr": 0}, "network_train_text_encoder_only = true"),
        ({"noise_offset": 0.05, "noise_offset_type": "Original"}, "noise_offset = 0.05"),
        ({"LoRA_type": "LyCORIS/LoKr", **LYCORIS, "conv_dim": 8}, "conv_dim=8"),
        ({"LoRA_type": "LyCORIS/LoKr", **LYCORIS, "decompose_both": True}, "decompose_both=True"),
        ({"LoRA_type": "LyCORIS/LoCon", **LYCORIS, "dora_wd": True}, "DoRA is for linear layers"),
        ({"LoRA_type": "LyCORIS/iA3"}, "algo=ia3"),
        ({"LoRA_type": "LyCORIS/LoHa", "LyCORIS_preset": "own.toml"}, "preset=own.toml"),
        ({"LoRA_type": "Kohya DyLoRA"}, "networks.dylora"),
        ({"reg_data_dir": "reg"}, "reg_data_dir = 'reg'"),
        ({"additional_parameters": "--noise_offset=0.1 --max_grad_norm 0.5"}, "noise_offset = 0.1"),
        ({"train_data_dir": "elsewhere"}, "are not here"),
        ({"optimizer_args": "betas=(0.9, 0.95)"}, "optimizer_args = '0.95)'"),
        ({"train_inpainting": True}, "train_inpainting = true"),
        ({"a_new_name": 3}, "a_new_name = 3"),
        ({"token_string": "sks", "num_vectors_per_token": 4}, "textual inversion"),
        (
            {"anima_checkbox": True, "LoRA_type": "Anima", "sdxl": False},
            "trains Anima from files of its parts",
        ),
    ],
)
def test_what_changes_the_training_ends_the_import(imported, given, said):
    with pytest.raises(SettingsError) as caught:
        imported(LORA | given)
    assert said in caught.value.message and "this is a bug" not in caught.value.message


def test_what_is_not_passed_on_has_no_effect(imported):
    made, _, said = imported(
        LORA
        | {"noise_offset": 0.05, "noise_offset_type": "Multires", "multires_noise_iterations": 0}
        | {"optimizer": "Prodigy", "optimizer_args": '"decouple=True" "weight_decay=0.4" d_coef=1.0', "unet_lr": 1}
        | {"lr_scheduler": "cosine_with_restarts", "lr_scheduler_num_cycles": "1", "xformers": True, "clip_skip": "1"}
        | {"additional_parameters": "--max_grad_norm=0.5", "sample_prompts": "a cat --n dog --d 7\n# no\na dog\n"}
        | {"stop_text_encoder_training": 20, "num_processes": 2, "gpu_ids": "0,1", "shuffle_caption": False}
    )
    own = made.optimizer
    assert (own.optimizer, own.adam_weight_decay, own.lr_scheduler, own.max_grad_norm) == (
        "prodigy",
        0.4,
        "cosine",
        0.5,
    )
    assert made.launch.num_processes == 2 and "lost" not in said
    prompts = [json.loads(line) for line in Path("run.prompts.jsonl").read_text().splitlines()]
    assert prompts == [{"prompt": "a cat", "negative_prompt": "dog", "seed": 7}, {"prompt": "a dog"}]
    # One cycle per epoch, where the field is empty.
    with pytest.raises(SettingsError, match="cosine_with_restarts"):
        imported({**LORA, "lr_scheduler": "cosine_with_restarts", "lr_scheduler_num_cycles": ""})


WHOLE = {
    **{name: value for name, value in LORA.items() if name not in ("LoRA_type", "text_encoder_lr", "unet_lr")},
    "learning_rate_te1": 0,
    "learning_rate_te2": 0,
}


def test_whole_models_of_its_other_tabs(imported):
    made, *_ = imported({**WHOLE, "max_grad_norm": 0, "learning_rate_te": 1e-5})
    assert (made.model.model_type, made.optimizer.learning_rate, made.optimizer.max_grad_norm) == ("full", 1e-4, 0)
    for given, said in (
        ({"learning_rate_te1": 1e-6}, "train_text_encoder"),
        ({"sdxl": False, "pretrained_model_name_or_path": "runwayml/stable-diffusion-v1-5"}, "train_db.py trains"),
        ({"image_folder": "train", "train_data_dir": None}, "in_json"),
    ):
        with pytest.raises(SettingsError, match=said):
            imported(WHOLE | given)


def test_steps_of_buckets_below_a_latent_cell(imported):
    made, _, said = imported({**LORA, "bucket_reso_steps": 1})
    assert made.data.aspect_bucket_alignment == 8 and "bucket_reso_steps = 1" in said


def test_zeros_that_stand_for_nothing_in_all_tabs(imported):
    zeros = {
        "save_every_n_steps": 0,
        "sample_every_n_steps": "0",
        "max_train_epochs": 0,
        "seed": 0,
        "vae_batch_size": 0,
    }
    made, *_ = imported({**WHOLE, **zeros, "max_train_steps": "0", **file_of_datasets()})
    assert (made.training.max_train_steps, made.training.seed) == (1600, 42)


def test_a_preset_without_base_and_images_begins_a_run(imported):
    made, listed, said = imported({**LORA, "pretrained_model_name_or_path": "", "train_data_dir": "", "epoch": "3"})
    assert listed == [] and made.data.instance_data_dir == Path("images") and "a preset without images" in said
    assert (made.training.num_train_epochs, made.training.max_train_steps) == (3, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"LoRA_type": "Standard", // note\n "epoch": 1}', "preset.json:1 does not parse"),
        ('{"LoRA_type": "Standard",\n "epoch": 1,}', "preset.json:2 does not parse"),
    ],
)
def test_what_json_does_not_have_is_named_by_its_line(text, said):
    Path("preset.json").write_text(text)
    with pytest.raises(SettingsError) as caught:
        import_files(Path("preset.json"), Path("run.toml"), True)
    assert said in caught.value.message


def test_a_byte_order_mark_and_paths_of_windows(imported):
    Path("preset.json").write_bytes("\ufeff".encode() + json.dumps(LORA | {"reg_data_dir": None}).encode())
    import_files(Path("preset.json"), Path("run.toml"), True)
    with pytest.raises(SettingsError, match="are not here"):
        imported({**LORA, "train_data_dir": "D:\\train\\img"})


def test_presets_are_recognised_with_and_without_a_network():
    assert trainer_of(LORA) == trainer_of(WHOLE) == GUI
