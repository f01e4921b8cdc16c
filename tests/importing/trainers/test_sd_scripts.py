"""`config import` of sd-scripts' files: networks, schedules, folders, masks and tags (48d368fa)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simpletuner.commands.config_import import import_files
from simpletuner.data.scan.captions import caption_variants
from simpletuner.errors import SettingsError
from simpletuner.settings import load

LORA = """\
pretrained_model_name_or_path = "stabilityai/stable-diffusion-xl-base-1.0"
network_module = "networks.lora"
network_train_unet_only = true
network_dim = 16
network_alpha = 8
"""
FOLDERS = "train_data_dir = 'train'\ncaption_extension = '.txt'\nresolution = '512,768'\n"


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train/4_cat/a", "masks/a"):
        Path(name).parent.mkdir(parents=True)
        Path(f"{name}.png").touch()
        Path(f"{name}.txt").write_text("one, two")


@pytest.fixture
def imported(capsys):
    def imported(text: str):
        Path("their.toml").write_text(text)
        import_files(Path("their.toml"), Path("ours.toml"), True)
        listed = json.loads(Path("ours.datasets.json").read_text())
        return load({}, Path("ours.toml"), environment={}).settings, listed, capsys.readouterr().err

    return imported


def test_folders_of_repeats_are_datasets(imported):
    made, [data], _ = imported(LORA + FOLDERS)
    assert (data["instance_data_dir"], data["repeats"], data["resolution"]) == ("train/4_cat", 3, 627)
    assert (data["crop_aspect"], data["crop_aspect_buckets"]) == ("closest", [0.6667])
    assert (made.training.max_train_steps, made.data.aspect_bucket_alignment) == (1600, 64)
    [data] = imported(LORA + FOLDERS.replace("caption_extension = '.txt'", ""))[1]
    assert (data["caption_strategy"], data["instance_prompt"]) == ("instanceprompt", "cat")


def test_epochs_and_drawn_words_are_named(imported):
    made, _, said = imported(f"{LORA}{FOLDERS}max_train_epochs = 3\n")
    assert made.training.num_train_epochs == 3 and "fill no batch" in said
    assert imported(f"{LORA}{FOLDERS}enable_wildcard = true\n")[1][0]["caption_lines"] == "alternatives"
    Path("train/4_cat/a.txt").write_text("a {red|blue} cat")
    with pytest.raises(SettingsError, match="enable_wildcard = true.*is drawn there"):
        imported(f"{LORA}{FOLDERS}enable_wildcard = true\n")


def test_tags_and_masks(imported):
    more = "shuffle_caption = true\nkeep_tokens = 1\nmasked_loss = true\nconditioning_data_dir = 'masks'\n"
    _, [images, masks], said = imported(LORA + FOLDERS + more)
    shuffled = {"enable": True, "count": 10, "position_start": 1, "include_original": False}
    assert images["caption_shuffle"] == shuffled and "in one of 10" in said
    assert (masks["conditioning_type"], images["conditioning_data"]) == ("mask", [masks["id"]])


def test_texts_around_captions(imported):
    around = "caption_prefix = 'sks,'\ncaption_suffix = 'best'\n"
    made, [images], said = imported(f"{LORA}{FOLDERS}{around}mixed_precision = 'fp16'\n")
    assert caption_variants("one, two", tuple(images["caption_filter_list"]), None) == ["sks, one, two best"]
    assert made.training.mixed_precision == "bf16" and "float16 is not offered" in said
    Path("train/4_cat/a.txt").write_text("one\ntwo")  # behind the last line, of which the first is read
    with pytest.raises(SettingsError, match="caption_suffix = 'best'"):
        imported(f"{LORA}{FOLDERS}{around}")
    Path("train/4_cat/a.txt").unlink()
    [images] = imported(LORA + FOLDERS.replace("caption_extension = '.txt'", "") + around)[1]
    assert images["instance_prompt"] == "sks, cat best" and "caption_filter_list" not in images


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr_scheduler = 'polynomial'\nlr_scheduler_power = 2", ("polynomial", 1e-7, 2)),
        ("lr_scheduler = 'cosine_with_restarts'", ("cosine", 0, 1)),
        (
            "lr_scheduler = 'cosine_with_min_lr'\nlr_scheduler_min_lr_ratio = 0.1\nlearning_rate = 1e-4",
            ("cosine", 1e-5, 1),
        ),
        ("lr_scheduler = 'cosine'\nlr_scheduler_num_cycles = 3", ("cosine", 0, 1)),
        ("optimizer_type = 'AdamWScheduleFree'\nlr_scheduler = 'cosine'\nlr_warmup_steps = 5", ("constant", 0, 1)),
    ],
)
def test_schedules(imported, text, expected):
    own = imported(f"{LORA}{FOLDERS}{text}\n")[0].optimizer
    assert (own.lr_scheduler, own.lr_end, own.lr_power) == (expected[0], pytest.approx(expected[1]), expected[2])
    assert own.lr_warmup_steps == 0


SD3 = LORA.replace("networks.lora", "networks.lora_sd3").replace(
    "stable-diffusion-xl-base-1.0", "stable-diffusion-3.5-medium"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SD3, (1.0, True, 1.0)),
        (f"{SD3}weighting_scheme = 'logit_normal'\ntraining_shift = 3\nlogit_std = 2", (3.0, False, 2.0)),
    ],
)
def test_noise_levels_of_sd3(imported, text, expected):
    own = imported(f"{text}\n{FOLDERS}")[0].objective
    assert (own.flow_schedule_shift, own.flow_use_uniform_schedule, own.flow_sigmoid_scale) == expected


@pytest.mark.parametrize(
    ("arguments", "layers"),
    [
        ('"conv_dim=16", "conv_alpha=8"', "*.attentions.*,*.resnets.*,*.downsamplers.*,*.upsamplers.*"),
        ('"verbose=True", "rank_dropout=0"', "*.attentions.*"),
    ],
)
def test_arguments_of_its_own_network(imported, arguments, layers):
    assert imported(f"{LORA}{FOLDERS}network_args = [{arguments}]")[0].lora.lora_target_modules == layers


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'{LORA}network_args = ["conv_dim=4"]', "conv_dim=4"),
        (f'{LORA}network_args = ["rank_dropout=0.1"]', "rank_dropout=0.1"),
        (f"{SD3}weighting_scheme = 'mode'", "weighting_scheme = 'mode'"),
        (f"{LORA}lr_scheduler = 'cosine_with_restarts'\nlr_scheduler_num_cycles = 3", "cosine_with_restarts"),
        (LORA.replace('network_module = "networks.lora"', "train_text_encoder = true"), "train_text_encoder = true"),
        (LORA.replace("stabilityai/stable-diffusion-xl-base-1.0", "E:/models/xl.safetensors"), "a path of Windows"),
        (f"{LORA}network_weights = 'C:/loras/a.safetensors'", "network_weights = 'C:/loras/a.safetensors'"),
        (f"{LORA}masked_loss = true\nalpha_mask = true", "alpha_mask"),
    ],
)
def test_what_changes_the_training_ends_the_import(imported, text, said):
    with pytest.raises(SettingsError) as caught:
        imported(f"{text}\n{FOLDERS}")
    assert said in caught.value.message and "this is a bug" not in caught.value.message


def test_whole_models(imported):
    whole = LORA.replace('network_module = "networks.lora"\nnetwork_train_unet_only = true\n', "")
    whole = whole.replace("network_dim = 16\nnetwork_alpha = 8\n", "")
    assert imported(whole + FOLDERS)[0].model.model_type == "full"
    sd1 = whole.replace("stable-diffusion-xl-base-1.0", "stable-diffusion-v1-5")
    assert imported(f"{sd1}stop_text_encoder_training = -1\n{FOLDERS}")[0].model.model_family == "sd1x"
    with pytest.raises(SettingsError, match="train_db.py trains the text encoder"):
        imported(sd1 + FOLDERS)
