"""`config import` of musubi-tuner's files: what its code computes (30c658c) is what is written, named or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simpletuner.commands.config_import import import_files
from simpletuner.data.config.datasets import load_datasets
from simpletuner.errors import SettingsError
from simpletuner.settings import load
from simpletuner.settings.foreign.recognition import MUSUBI, trainer_of

RUN = """\
dit = "models/z_image_bf16.safetensors"
vae = "models/ae.safetensors"
dataset_config = "data.toml"
sdpa = true
optimizer_type = "adamw"
optimizer_args = ["weight_decay=0.1", "betas=(0.9,0.95)"]
learning_rate = 1e-4
lr_scheduler = "cosine"
lr_warmup_steps = 0.1
timestep_sampling = "shift"
discrete_flow_shift = 2.0
network_module = "networks.lora_zimage"
network_dim = 32
max_train_steps = 40
"""
DATA = """\
[general]
resolution = 1024
caption_extension = ".txt"
batch_size = 3
enable_bucket = true
[[datasets]]
image_directory = "img"
cache_directory = "cache/img"
num_repeats = 2
"""
CLIPS = """\
[general]
resolution = [832, 480]
caption_extension = ".txt"
[[datasets]]
video_directory = "clips"
target_frames = [1, 26, 45, 46]
source_fps = 30.0
frame_extraction = "uniform"
"""


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("img", "clips", "before"):
        Path(folder).mkdir()
    for name in ("img/a.png", "img/b.png", "before/a.png", "before/b.png", "clips/c.mp4"):
        Path(name).touch()
        Path(name).with_suffix(".txt").write_text("one\n\ntwo\n")


@pytest.fixture
def imported(capsys):
    def imported(run: str = RUN, data: str = DATA, partial: bool = False):
        """Import a file with its datasets; return settings, datasets and what was said."""
        Path("data.toml").write_text(data)
        Path("run.toml").write_text(run)
        import_files(Path("run.toml"), Path("ours.toml"), True, partial)
        listed = json.loads(Path("ours.datasets.json").read_text())
        return load({}, Path("ours.toml"), environment={}).settings, listed, capsys.readouterr().err

    return imported


def with_network(name: str, more: str = "") -> str:
    return f"{RUN.replace('networks.lora_zimage', f'networks.{name}')}{more}"


def test_a_lora_of_z_image(imported):
    made, [data], said = imported()
    assert (made.model.model_family, made.lora.lora_rank, made.lora.lora_alpha) == ("z_image", 32, 1)
    assert made.lora.lora_target_modules == "layers.*.attention.*,layers.*.feed_forward.*"
    own = made.optimizer
    assert (own.adam_weight_decay, own.adam_beta2, own.lr_warmup_steps, own.max_grad_norm) == (0.1, 0.95, 0.1, 1)
    assert (made.objective.flow_schedule_shift, made.objective.flow_use_uniform_schedule) == (2.0, False)
    assert (made.training.train_batch_size, made.training.mixed_precision) == (3, "bf16")
    assert (made.data.aspect_bucket_alignment, made.data.caption_dropout_probability) == (16, 0)
    assert (data["repeats"], data["caption_lines"], data["skip_uncaptioned"]) == (1, "one", True)
    assert "the published base of the family" in said and data["crop_aspect"] == "closest"
    assert imported(RUN.replace("z_image_bf16", "z_image_turbo"))[0].model.model_flavour == "turbo"


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ("", (1.0, False, True)),  # sigma: discrete_flow_shift has no effect
        ('weighting_scheme = "logit_normal"', (1.0, False, False)),
        ('timestep_sampling = "uniform"', (1.0, False, True)),
        ('timestep_sampling = "sigmoid"', (1.0, False, False)),
        ('timestep_sampling = "qwen_shift"', (None, True, False)),
    ],
)
def test_noise_levels(imported, sampling, expected):
    text = with_network("lora_qwen_image", sampling).replace('timestep_sampling = "shift"\n', "")
    own = imported(text)[0].objective
    shift = None if own.flow_schedule_auto_shift else own.flow_schedule_shift
    assert (shift, own.flow_schedule_auto_shift, own.flow_use_uniform_schedule) == expected


@pytest.mark.parametrize(
    ("network", "more", "family", "flavour", "layers"),
    [
        ("lora_wan", 'task = "t2v-1.3B"', "wan", "t2v-480p-1.3b-2.1", "blocks.*"),
        ("lora_wan", 'task = "i2v-A14B"', "wan", "i2v-14b-2.2-low", "blocks.*"),
        ("lora_wan", "", "wan", "t2v-480p-14b-2.1", "blocks.*"),
        ("lokr", 'task = "t2v-14B"\nnetwork_args = ["factor=8"]', "wan", "t2v-480p-14b-2.1", "blocks.*"),
        ("lora_qwen_image", 'model_version = "edit-2511"', "qwen_image", "edit-v3", "transformer_blocks.*"),
        ("lora_flux_2", 'model_version = "klein-base-4b"', "flux2", "klein-4b", None),
        ("lora_flux", "", "flux", "kontext", None),
        ("lora_krea2", "", "krea2", "", "*"),
    ],
)
def test_families_flavours_and_layers(imported, network, more, family, flavour, layers):
    made = imported(with_network(network, more))[0]
    assert (made.model.model_family, made.model.model_flavour) == (family, flavour)
    assert layers in (None, made.lora.lora_target_modules)
    assert (made.lora.lora_type, made.lora.lokr_factor) == (("lokr", 8) if network == "lokr" else ("lora", -1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("networks.lora_zimage", "networks.lora_framepack"), "trains FramePack"),
        (("networks.lora_zimage", "networks.lora"), "trains HunyuanVideo of 2024"),
        (("networks.lora_zimage", "networks.lora_hv_1_5"), "hunyuanvideo cannot load a LoRA"),
        (('network_module = "networks.lora_zimage"', "network_dim = 32"), "the name of musubi-tuner's script"),
        (('optimizer_type = "adamw"', ""), "ends in an error: write adamw"),
        (('"adamw"', '"Lion"'), "of torch.optim alone there"),
        (('"adamw"', '"CAME"'), "optimizer_type = 'CAME'"),
        (('"shift"', '"krea2_shift"'), "krea2_shift of z_image"),
        (('"shift"', '"logsnr"'), "timestep_sampling = 'logsnr'"),
        (("sdpa = true", "min_timestep = 200"), "min_timestep = 200"),
        (("sdpa = true", "dino_loss_weight = 0.1"), "dino_loss_weight = 0.1"),
        (("sdpa = true", "network_args = [\"exclude_patterns=['.*']\"]"), "exclude_patterns"),
        (("sdpa = true", "a_new_name = 1"), "a_new_name = 1"),
    ],
)
def test_what_changes_the_training_ends_the_import(imported, change, said):
    text = RUN.replace(*change)
    if "network_dim = 32\nnetwork_dim" in text:
        text = text.replace("network_dim = 32\n", "", 1)
    with pytest.raises(SettingsError) as caught:
        imported(text)
    assert said in caught.value.message and "this is a bug" not in caught.value.message


def test_optimizers_of_packages_and_8_bits(imported):
    made = imported(RUN.replace('"adamw"', '"prodigyopt.Prodigy"').replace("1e-4", "1"))[0].optimizer
    assert (made.optimizer, made.adam_weight_decay) == ("prodigy", 0.1)
    made = imported(RUN.replace('"adamw"', '"lion_pytorch.Lion"').replace('"weight_decay=0.1", "betas=(0.9,0.95)"', ""))
    assert (made[0].optimizer.optimizer, made[0].optimizer.adam_weight_decay) == ("lion", 0)
    made = imported(f"{RUN}fp8_base = true\nfp8_scaled = true\n")[0]
    assert made.lora.base_model_precision == "float8"


def test_each_length_of_clips_is_a_dataset_of_its_own(imported):
    _, listed, said = imported(with_network("lora_wan", 'task = "t2v-1.3B"'), CLIPS)
    assert [each["video"] for each in listed] == [{"num_frames": frames, "fps": 16} for frames in (1, 25, 45)]
    assert {each["dataset_type"] for each in listed} == {"video"} and listed[0]["id"] == "clips-1"
    assert listed[0]["resolution"] == 631 and listed[0]["crop_aspect"] == "closest" and "the rate in the header" in said
    for line in ("frame_extraction = 'chunk'", "frame_sample = 4", "control_directory = 'before'"):
        with pytest.raises(SettingsError, match=line.partition(" ")[0]):
            imported(
                with_network("lora_wan"), CLIPS.replace('frame_extraction = "uniform"', f"{UNIFORM[line[:7]]}\n{line}")
            )


UNIFORM = {"frame_e": "", "frame_s": 'frame_extraction = "uniform"', "control": ""}


def test_controls_are_references(imported):
    edit = with_network("lora_qwen_image", 'model_version = "edit"')
    _, [images, references], said = imported(edit, f"{DATA}control_directory = 'before'\n")
    assert images["conditioning_data"] == [references["id"]] == ["img-references"]
    assert references["conditioning_type"] == "reference_strict" and "another aspect" in said
    _, [_, references], _ = imported(edit, f"{DATA}control_directory = 'before'\ncontrol_resolution = [512, 512]\n")
    assert (references["conditioning_type"], references["resolution"]) == ("reference_loose", 512)
    Path("before/a_1.png").touch()
    with pytest.raises(SettingsError, match="one of several"):
        imported(edit, f"{DATA}control_directory = 'before'\n")


def test_without_buckets_all_images_have_the_shape_of_resolution(imported):
    _, [data], _ = imported(data=DATA.replace("enable_bucket = true", "").replace("1024", "[960, 544]"))
    assert (data["resolution"], data["crop_aspect"], data["crop_aspect_buckets"]) == (722, "closest", [1.7647])
    _, [data], _ = imported(data=DATA.replace("enable_bucket = true", ""))
    assert (data["resolution"], data["crop_aspect"]) == (1024, "square")


JSONL = DATA.replace('image_directory = "img"', "image_jsonl_file = 'a.jsonl'")


def lines(*rows: object) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


@pytest.mark.parametrize("is_absolute", [False, True])
def test_json_lines_are_the_table_of_their_folder(imported, is_absolute):
    name = str(Path("img/a.png").absolute()) if is_absolute else "img/a.png"
    Path("a.jsonl").write_text(lines({"image_path": name, "caption": "a cat\nof two lines"}))
    made, [data], said = imported(data=JSONL)
    assert data["instance_data_dir"] == str(Path(name).parent) and "cache_directory" not in said
    assert "skip_uncaptioned" not in data and "caption_lines" not in data
    columns = {"filename_column": "image_path", "caption_column": "caption", "identifier_includes_extension": True}
    assert data["parquet"] == {"path": "a.jsonl", **columns} and data["metadata_backend"] == "parquet"
    [dataset] = load_datasets(made.data)[0]
    assert dataset.caption_strategy == "parquet"
    Path("cache/img").mkdir(parents=True)
    Path("cache/img/a_0032x0032_zi.safetensors").touch()
    said = imported(data=JSONL)[2]
    assert "warning: cache_directory = 'cache/img' (data.toml" in said and "are encoded again" in said


def test_references_of_json_lines(imported):
    row = {"image_path": "img/a.png", "caption": "b", "control_path": "before/a.png"}
    Path("a.jsonl").write_text(lines(row))
    edit = with_network("lora_qwen_image", 'model_version = "edit"')
    _, [images, references], _ = imported(edit, JSONL)
    assert images["parquet"]["path"] == "a.jsonl" and references["instance_data_dir"] == "before"
    for changed in ({"control_path": "before/b.png"}, {"control_path_1": "img/c.png"}):
        Path("a.jsonl").write_text(lines({**row, **changed}))
        with pytest.raises(SettingsError, match="have no place here: give each a folder"):
            imported(edit, JSONL)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a.jsonl is empty"),
        ("{\n", "a.jsonl:1 cannot be read"),
        ('{"image_path": "img/a.png", "caption": "b"}\n{\n', "a.jsonl:2 cannot be read"),
        ("[]\n", "a.jsonl:1 has no image_path and caption"),
        (
            lines({"image_path": "img/a.png", "caption": "b"}, {"image_path": "img/b.png"}),
            "a.jsonl:2 has no image_path",
        ),
        (lines({"image_path": 3, "caption": "b"}), "a.jsonl:1 has no image_path"),
        (
            lines({"image_path": "/a.png", "caption": "b"}, {"image_path": "b.png", "caption": "b"}),
            "no folder in common",
        ),
        (lines(*[{"image_path": "img/a.png", "caption": "b"}] * 2), "the first"),
        ("\udcff", "cannot be read"),
        (f"{'[' * 100_000}\n", "cannot be read"),
    ],
)
def test_json_lines_that_are_no_table_end_the_import(imported, text, said):
    Path("a.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SettingsError) as caught:
        imported(data=JSONL)
    assert said in caught.value.message and "this is a bug" not in caught.value.message


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (JSONL, "image_jsonl_file = 'a.jsonl': there is no such file"),
        (DATA.replace('".txt"', '".caption"'), "caption_extension = '.caption'"),
        (f"{DATA}multiple_target = true\n", "multiple_target"),
        (f"{DATA}[[datasets]]\nimage_directory = 'before'\nbatch_size = 1\n", "batch_size = [1, 3]"),
        ("[[datasets]]\nimage_directory = 3\n", "instance_data_dir = 3"),
        ("general = 1\n[[datasets]]\nimage_directory = 'img'\n", "general = 1 is not"),
    ],
)
def test_datasets_that_would_be_others_end_the_import(imported, data, said):
    with pytest.raises(SettingsError) as caught:
        imported(data=data)
    assert said in caught.value.message and "this is a bug" not in caught.value.message


def test_files_are_recognised_by_what_they_hold():
    assert trainer_of({"dit": "x", "network_module": "networks.lora_wan"}) == MUSUBI
    assert trainer_of({"network_module": "networks.lora_wan", "network_dim": 4}) == MUSUBI
    assert trainer_of({"datasets": [{"video_jsonl_file": "a.jsonl"}]}) == MUSUBI
    assert trainer_of({"pretrained_model_name_or_path": "x", "network_module": "networks.lora"}) != MUSUBI
