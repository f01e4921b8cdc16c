"""`config import` of diffusion-pipe's files: what its code computes (8f83dbf) is what is written, named or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simpletuner.commands.config_import import import_files
from simpletuner.data.scan.captions import caption_variants
from simpletuner.errors import SettingsError
from simpletuner.settings import load

RUN = """\
output_dir = "out"
dataset = "data.toml"
epochs = 10
save_every_n_epochs = 1
{top}
[model]
type = "{kind}"
dtype = "bfloat16"
{model}
[adapter]
type = "lora"
rank = 16
{adapter}
[optimizer]
type = "adamw_optimi"
lr = 2e-5
"""
DATA = "resolutions = [512]\nenable_ar_bucket = true\n[[directory]]\npath = 'img'\n"


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("img", "masks", "before"):
        Path(folder).mkdir()
        Path(folder, "a.png").touch()


@pytest.fixture
def imported(capsys):
    def imported(
        kind: str = "flux", model: str = "", adapter: str = "", top: str = "", data: str = DATA, end: str = ""
    ):
        Path("data.toml").write_text(data)
        Path("main.toml").write_text(RUN.format(kind=kind, model=model, adapter=adapter, top=top) + end)
        import_files(Path("main.toml"), Path("ours.toml"), True)
        listed = json.loads(Path("ours.datasets.json").read_text())
        return load({}, Path("ours.toml"), environment={}).settings, listed, capsys.readouterr().err

    return imported


@pytest.mark.parametrize(
    ("kind", "family", "layers"),
    [
        ("flux", "flux", "transformer_blocks.*,single_transformer_blocks.*"),
        ("krea2", "krea2", "transformer_blocks.*,text_fusion.*,txt_in.*"),
        ("ltx-video", "ltxvideo", "transformer_blocks.*"),
        ("lumina_2", "lumina2", "layers.*,noise_refiner.*,context_refiner.*"),
        ("ernie_image", "ernie", "layers.*"),
        ("wan", "wan", "blocks.*"),
        ("ltx2", "ltxvideo2", "transformer_blocks.*"),
    ],
)
def test_families_and_layers(imported, kind, family, layers):
    made, _, said = imported(kind)
    assert (made.model.model_family, made.lora.lora_target_modules) == (family, layers)
    assert made.objective.flow_schedule_shift == 1 and ("one matrix" in said) == (kind == "lumina_2")
    assert made.data.aspect_bucket_alignment == (32 if kind.startswith("ltx") else 16)


def test_sdxl_trains_its_text_encoders_unless_their_rates_are_0(imported):
    quiet = "text_encoder_1_lr = 0\ntext_encoder_2_lr = 0\nunet_lr = 3e-5"
    made, *_ = imported("sdxl", quiet)
    assert (made.lora.lora_target_modules, made.optimizer.learning_rate) == ("*.attentions.*,*.time_emb_proj", 3e-5)
    assert made.model.prediction_type == "epsilon"
    for model in ("", "text_encoder_1_lr = 0", f"{quiet}\nv_pred = true"):
        with pytest.raises(SettingsError, match="text encoders are trained|v_pred"):
            imported("sdxl", model)


def test_noise_levels_batches_and_precision(imported):
    Path("a.safetensors").touch()
    made, *_ = imported(model='flux_shift = true\ntransformer_dtype = "float8"\nmerge_adapters = ["a.safetensors"]')
    assert made.objective.flow_schedule_auto_shift and made.lora.base_model_precision == "float8"
    assert made.lora.assistant_lora == [Path("a.safetensors")]
    made, *_ = imported(model='timestep_sample_method = "uniform"\nshift = 3', top="uncond_fraction = 0.1")
    assert (made.objective.flow_use_uniform_schedule, made.objective.flow_schedule_shift) == (True, 3)
    assert made.data.caption_dropout_probability == 0.1
    made, *_ = imported(top="micro_batch_size_per_gpu = [[512, 2], [1024, 2]]\nimage_micro_batch_size_per_gpu = 2")
    assert made.training.train_batch_size == 2
    made, *_ = imported(top="gradient_accumulation_steps = 1")
    assert made.training.train_batch_size == 1


def test_a_tracker(imported):
    made, *_ = imported(adapter='[monitoring]\nenable_wandb = true\nwandb_tracker_name = "p"\nwandb_run_name = "r"\n')
    own = made.logging
    assert (own.report_to, own.tracker_project_name, own.tracker_run_name) == ("wandb", "p", "r")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": "hunyuan-video"}, "trains hunyuan-video, a model that this version does not have"),
        ({"kind": "z_image", "model": "flux_shift = true"}, "model.flux_shift = true"),
        ({"top": "micro_batch_size_per_gpu = [[512, 4], [1024, 1]]"}, "one batch holds for all sizes"),
        ({"top": "micro_batch_size_per_gpu = 1\nimage_micro_batch_size_per_gpu = 4"}, "one batch holds for all sizes"),
        ({"top": "huber_delta = 0.1"}, "huber_delta"),
        ({"adapter": "alpha = 8"}, "adapter.alpha = 8"),
        ({"adapter": "exclude_modules = 'x'"}, "adapter.exclude_modules"),
        ({"model": "a_new_name = 3"}, "model.a_new_name = 3"),
        ({"data": f"{DATA}caption_prefix = 'sks'\ncache_shuffle_num = 2\n"}, "caption_prefix"),
        ({"data": f"{DATA}size_buckets = [[512, 512, 1]]\n"}, "size_buckets"),
        ({"data": f"subsample_ratio = 0.5\n{DATA}"}, "subsample_ratio"),
        ({"data": "resolutions = 512\ndirectory = 3\n"}, "lists no datasets"),
    ],
)
def test_what_changes_the_training_ends_the_import(imported, given, said):
    with pytest.raises(SettingsError) as caught:
        imported(**given)
    assert said in caught.value.message and "this is a bug" not in caught.value.message


def test_masks_references_and_shuffled_copies(imported):
    _, [images, masks], said = imported(data=f"{DATA}mask_path = 'masks'\n")
    assert images["conditioning_data"] == [masks["id"]] and masks["conditioning_type"] == "mask"
    assert "the loss is over the mask" in said
    _, [images, references], _ = imported("qwen_image", data=f"{DATA}control_path = 'before'\n")
    assert (references["conditioning_type"], references["instance_data_dir"]) == ("reference_strict", "before")
    for ratios in ('["a", "b"]', "[1, 0]", "[]", "-1", "1e400", "true", "[[1, 1], 2]"):
        assert "crop_aspect" not in imported(data=DATA.replace("[[dir", f"ar_buckets = [{ratios}]\n[[dir"))[1][0]
    _, [images], _ = imported(data=DATA.replace("[[dir", "ar_buckets = [0.5, [512, 512]]\n[[dir"))
    assert images["crop_aspect_buckets"] == [0.5111, 1.0]  # 368 x 720
    _, [images], _ = imported(data=f"{DATA}caption_prefix = 'a/b, '\n")
    assert caption_variants("a cat", tuple(images["caption_filter_list"]), None) == ["a/b, a cat"]
    _, [images], _ = imported(data=f"{DATA}num_repeats = 2\ncache_shuffle_num = 3\n")
    assert images["repeats"] == 5 and images["caption_shuffle"]["count"] == 3
    _, [images], _ = imported(data=DATA.replace("enable_ar_bucket = true", "").replace("[512]", "[[960, 540]]"))
    assert (images["resolution"], images["crop_aspect"]) == (720, "square")


@pytest.mark.parametrize("betas", ["'0.9,0.95'", "[0.9]", "0.9"])
def test_betas_that_are_no_two_numbers_are_not_dropped_in_silence(imported, betas):
    with pytest.raises(SettingsError, match="betas are a list of two numbers"):
        imported(end=f"betas = {betas}\n")
