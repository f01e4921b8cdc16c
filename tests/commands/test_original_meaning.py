"""`config import` never starts a run of something else: what decides the result is carried over, or it ends the import.

One file for each thing that decides: examples made up from the original's names, as in `test_config_import.py`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from simpletuner.app import main
from simpletuner.data.config.dataset_types import SnapshotImages
from simpletuner.data.config.datasets import load_datasets
from simpletuner.importing.translation import PRECISIONS
from simpletuner.settings import Settings, load
from simpletuner.settings.declared.sections import Data
from simpletuner.settings.foreign.original_names import UNTRAINED
from simpletuner.settings.values.parsed import TRACKERS

CONFIG = Path(__file__).with_name("original_config.json")
IMAGES = {"id": "pictures", "type": "local", "instance_data_dir": "pictures"}
TEXTS = {"id": "texts", "dataset_type": "text_embeds", "default": True, "cache_dir": "cache/texts"}
LORA = {"model_type": "lora"}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pictures").mkdir()
    Path("pictures", "a.png").touch()


@pytest.fixture
def imported(capsys) -> Callable[..., tuple[int, str]]:
    """Import a config.json with changes and a dataset file; return exit code and stderr."""

    def run(changes: dict[str, Any], datasets: list[dict[str, Any]], *flags: str) -> tuple[int, str]:
        base = {"model_family": "sdxl", **json.loads(CONFIG.read_text()), "max_grad_norm": None}
        values = {name: value for name, value in {**base, **changes}.items() if value is not None}
        Path("config").mkdir(exist_ok=True)
        Path("config/config.json").write_text(json.dumps(values, indent=1))
        Path("config/multidatabackend.json").write_text(json.dumps(datasets, indent=1))
        with pytest.raises(SystemExit) as caught:
            main(["config", "import", "config", "--output=run.toml", *flags])
        return int(caught.value.code or 0), capsys.readouterr().err

    return run


LOST: dict[str, tuple[dict[str, Any], str]] = {
    "lycoris": ({**LORA, "lora_type": "lycoris"}, "lora_type = 'lycoris' "),
    "pissa": ({**LORA, "lora_init_type": "pissa"}, "lora_init_type = 'pissa' "),
    "loss": ({"loss_type": "huber"}, "loss_type = 'huber' "),
    "z_image turbo": ({**LORA, "model_family": "z-image", "model_flavour": "turbo"}, "on top of an assistant LoRA"),
    "schnell": ({**LORA, "model_family": "flux", "model_flavour": "schnell"}, "on top of an assistant LoRA"),
    "cosine": ({"lr_scheduler": "cosine"}, "lr_scheduler = 'cosine' "),
    "sine": ({"lr_scheduler": "sine"}, "lr_scheduler = 'sine' "),
    "prodigy": ({"optimizer": "prodigy"}, "optimizer = 'prodigy' "),
    "soap": ({"optimizer": "soap"}, "optimizer = 'soap' "),
    "muon": ({"optimizer": "muon"}, "optimizer = 'muon' "),
    "4 bits": ({"optimizer": "ao-adamw4bit"}, "optimizer = 'ao-adamw4bit' "),
    "fallback": ({"optimizer": "optimi-lion", "fsdp_enable": True}, "trains with adamw_schedulefree in its place"),
    "optimizer_config": ({"optimizer_config": "decouple_lr=true,eps=1e-8"}, "optimizer_config = 'decouple_lr=true' "),
    "beta schedule": ({"model_family": "flux", "flow_use_beta_schedule": True}, "flow_use_beta_schedule = true "),
    "guidance": ({"model_family": "flux", "flux_guidance_mode": "random-range"}, "flux_guidance_mode = "),
    "offset noise": ({"offset_noise": True}, "offset_noise = true "),
    "routes": ({"tread_config": {"routes": [1]}}, "tread_config = "),
    "distillation": ({"distillation_method": "lcm"}, "distillation_method = 'lcm' "),
    "ema": ({"ema_warmup_steps": 100}, "ema_warmup_steps = 100 "),
    "text encoder": ({"train_text_encoder": True}, "train_text_encoder = true "),
    "vae": ({"pretrained_vae_model_name_or_path": "a/vae"}, "pretrained_vae_model_name_or_path = 'a/vae' "),
    "lr_scale": ({"lr_scale": True}, "lr_scale = true "),
    "sampling": ({"data_backend_sampling": "uniform"}, "data_backend_sampling = 'uniform' "),
    "rounding": ({"aspect_bucket_rounding": 4}, "aspect_bucket_rounding = 4 "),
    "controlnet targets": ({**LORA, "model_family": "flux", "flux_lora_target": "controlnet"}, "flux_lora_target = "),
    "sana": ({"model_family": "sana"}, "latents are halved"),
    "by its pipeline": ({**LORA, "model_family": "kolors"}, "there code of its own trains it"),
    "chroma": ({"model_family": "chroma"}, "noise levels are pushed towards 0 and 1"),
    "typing error": ({"learnng_rate": 1e-4}, "learnng_rate = 0.0001 "),
    "unknown": ({"nonsense": 1}, "nonsense = 1 "),
    "value": ({"seed": "many"}, "seed = 'many' "),
}


@pytest.mark.parametrize("case", LOST)
def test_what_decides_the_result_and_is_not_here_ends_the_import(imported, case):
    changes, said = LOST[case]
    code, err = imported(changes, [IMAGES])
    assert code == 2 and said in err and "a run would train something else" in err and "--partial" in err
    assert not Path("run.toml").exists() and "leave it out" not in err and "this is a bug" not in err
    code, err = imported(changes, [IMAGES], "--partial")
    assert (code, "starts what is left of the run" in err) == (0, True), err
    lost = Path("run.toml").read_text().partition("# Lost, so this file trains something else:\n")[2]
    assert said in lost.split("\n\n")[0]


EDITED = {"id": "edited", "dataset_type": "conditioning", "conditioning_type": "reference_strict"}
LOST_DATA: dict[str, tuple[list[dict[str, Any]], str]] = {
    "canny": ([{**IMAGES, "conditioning": [{"type": "canny"}]}], "conditioning = "),
    "references": ([{**IMAGES, "conditioning_data": "edited"}, EDITED], "conditioning_data = 'edited' "),
    "memory": ([IMAGES, {"id": "far", "type": "memory"}], "type = 'memory' "),
    "batch": ([{**IMAGES, "train_batch_size": 2}], "train_batch_size = 2 "),
    "timesteps": ([{**IMAGES, "timestep_sampling_offset": 0.5}], "timestep_sampling_offset = 0.5 "),
    "face": ([{**IMAGES, "crop": True, "crop_style": "face"}], "crop_style = 'face' "),
    "typing error": ([{**IMAGES, "reapets": 3}], "did you mean `repeats`?"),
}


@pytest.mark.parametrize("case", LOST_DATA)
def test_datasets_that_would_be_others_end_the_import(imported, capsys, case):
    datasets, said = LOST_DATA[case]
    code, err = imported({}, datasets)
    assert code == 2 and said in err and "--partial" in err and not Path("run.toml").exists()
    with pytest.raises(SystemExit) as caught:
        main(["config", "import", "config/multidatabackend.json"])
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "") and said in err
    assert imported({}, datasets, "--partial")[0] == 0


@pytest.mark.parametrize(("family", "code"), [("wan", 0), ("sdxl", 2)])
def test_videos_are_imported_for_families_that_train_on_clips(imported, family, code):
    films = [IMAGES, {**IMAGES, "id": "films", "dataset_type": "video"}]
    found, err = imported({"model_family": family, "model_flavour": None}, films)
    assert found == code and Path("run.toml").exists() == (code == 0), err
    assert ("dataset `films` has videos, and model_family=sdxl trains on images alone" in err) == (code == 2)


Check = Callable[[Settings], tuple[Any, ...]]


def adam(settings: Settings) -> tuple[Any, ...]:
    own = settings.optimizer
    return own.optimizer, own.adam_beta1, own.adam_beta2, own.adam_epsilon, own.adam_weight_decay


def clipping(settings: Settings) -> tuple[Any, ...]:
    return settings.optimizer.grad_clip_method, settings.optimizer.max_grad_norm


def schedule(settings: Settings) -> tuple[Any, ...]:
    own = settings.optimizer
    return own.lr_scheduler, own.lr_warmup_steps, own.lr_end


def shift(settings: Settings) -> tuple[Any, ...]:
    return (settings.objective.flow_schedule_shift,)


def lora(settings: Settings) -> tuple[Any, ...]:
    own = settings.lora
    return own.base_model_precision, own.lora_target_modules, own.lora_dropout


def data(settings: Settings) -> tuple[Any, ...]:
    own = settings.data
    return own.aspect_bucket_sizes, own.aspect_bucket_alignment, own.tokenizer_max_length


def engine(settings: Settings) -> tuple[Any, ...]:
    own = settings.parallel
    return settings.training.mixed_precision, own.fsdp_enable, settings.launch.num_processes, own.context_parallel_size


IMAGE_STREAM = "to_k,to_q,to_v,to_out.0"
BOTH_STREAMS = f"{IMAGE_STREAM},add_k_proj,add_q_proj,add_v_proj,to_add_out"
FLUX = {"model_family": "flux", "model_flavour": "dev"}
PLAIN = {"aspect_bucket_alignment": None}
CARRIED: dict[str, tuple[dict[str, Any], Check, tuple[Any, ...]]] = {
    "lion": ({"optimizer": "optimi-lion"}, adam, ("lion", 0.9, 0.99, 1e-8, 0)),
    "no optimizer": ({"optimizer": None}, adam, ("adamw", 0.9, 0.999, 1e-6, 0.01)),
    "optimi": ({"optimizer": "optimi-adamw"}, adam, ("adamw", 0.9, 0.99, 1e-6, 0)),
    "8 bits": ({"optimizer": "bnb-adamw8bit"}, adam, ("adamw", 0.9, 0.999, 1e-6, 0.01)),
    "kahan": (
        {"optimizer": "adamw_schedulefree+no_kahan"},
        adam,
        ("adamw_schedulefree", 0.9, 0.999, 1e-6, 1e-3),
    ),
    # adam_* is read with DeepSpeed's optimizers alone; one beta without the other is not read.
    "not read": (
        {"optimizer": "optimi-lion", "adam_beta2": 0.5, "adam_weight_decay": 0.1, "optimizer_beta1": 0.1},
        adam,
        ("lion", 0.9, 0.99, 1e-8, 0),
    ),
    "betas": ({"optimizer_beta1": 0.8, "optimizer_beta2": 0.95}, adam, ("adamw", 0.8, 0.95, 1e-6, 0.01)),
    "optimizer_config": ({"optimizer_config": "eps=1e-7,weight_decay=0"}, adam, ("adamw", 0.9, 0.999, 1e-7, 0)),
    "clip values": ({"grad_clip_method": None}, clipping, ("value", 2.0)),
    "clip norm": ({"grad_clip_method": "norm", "max_grad_norm": 1}, clipping, ("norm", 1.0)),
    "fsdp": ({"fsdp_enable": True, "max_grad_norm": 1}, clipping, ("value", 0.0)),  # which then does not clip
    "pixart": ({"model_family": "pixart_sigma", "max_grad_norm": 1}, clipping, ("value", 0.01)),
    "pixart expert": (
        {"model_family": "pixart_sigma", "max_grad_norm": 1, "i_know_what_i_am_doing": True},
        clipping,
        ("value", 1.0),
    ),
    "constant": ({"lr_scheduler": "constant", "lr_warmup_steps": 1}, schedule, ("constant", 0, 0.0)),
    "linear": ({"lr_scheduler": "linear", "lr_end": 1e-6}, schedule, ("linear", 1, 0.0)),
    "polynomial": ({"lr_scheduler": "polynomial"}, schedule, ("polynomial", 1, 4e-7)),
    "shift wins": ({**FLUX, "flow_schedule_auto_shift": True, "flow_schedule_shift": None}, shift, (3.0,)),
    "flux targets": ({**FLUX, **LORA}, lora, ("no_change", BOTH_STREAMS, 0.1)),
    "sd3 targets": ({"model_family": "sd3", **LORA}, lora, ("no_change", IMAGE_STREAM, 0.1)),
    "qwen targets": ({"model_family": "qwen_image", **LORA}, lora, ("no_change", IMAGE_STREAM, 0.1)),
    "nano": (
        {**FLUX, **LORA, "flux_lora_target": "nano"},
        lora,
        ("no_change", "single_transformer_blocks.7.proj_out", 0.1),
    ),
    "sdnq": ({**LORA, "base_model_precision": "int8-sdnq"}, lora, ("int8", IMAGE_STREAM, 0.1)),
    "quanto": ({**LORA, "base_model_precision": "int8-quanto"}, lora, ("int8", IMAGE_STREAM, 0.1)),
    "int4": ({**LORA, "base_model_precision": "int4-quanto"}, lora, ("nf4", IMAGE_STREAM, 0.1)),
    "uint5": ({**LORA, "base_model_precision": "uint5-sdnq"}, lora, ("int8", IMAGE_STREAM, 0.1)),
    "int16": ({**LORA, "base_model_precision": "int16-sdnq"}, lora, ("no_change", IMAGE_STREAM, 0.1)),
    "fp8": ({**LORA, "base_model_precision": "fp8-torchao"}, lora, ("float8", IMAGE_STREAM, 0.1)),
    "sdxl buckets": ({**PLAIN}, data, ("nearest", 64, None)),
    "flux2 buckets": ({**PLAIN, "model_family": "flux2"}, data, ("nearest", 16, 512)),
    "qwen buckets": ({**PLAIN, "model_family": "qwen_image"}, data, ("nearest", 32, None)),
    "sd3 tokens": ({"model_family": "sd3"}, data, ("nearest", 64, 154)),
    "too many tokens": ({"model_family": "sd3", "tokenizer_max_length": 256}, data, ("nearest", 64, 154)),
    "auraflow tokens": ({"model_family": "auraflow"}, data, ("nearest", 64, 120)),
    "float16": ({"mixed_precision": "fp16"}, engine, ("bf16", False, 1, 1)),
    "split": ({**LORA, "model_family": "wan", "context_parallel_size": 2}, engine, ("bf16", True, 2, 2)),
    "split over more": (
        {**LORA, "model_family": "wan", "context_parallel_size": 2, "num_processes": 4},
        engine,
        ("bf16", True, 4, 2),
    ),
    "krea2": ({**LORA, "model_family": "krea2"}, lora, ("no_change", IMAGE_STREAM, 0.1)),
    "pony": ({"model_family": "auraflow", "model_flavour": "pony"}, data, ("nearest", 64, 768)),
}


def test_a_file_that_cannot_start_yet_is_written_with_what_it_needs(imported):
    missing = next(name for name in TRACKERS if find_spec(name) is None)
    code, err = imported({**PLAIN, "report_to": missing}, [IMAGES])
    assert code == 0 and Path("run.toml").exists() and "starts the run" not in err
    said = " ".join(err.split())
    assert f"`simpletuner train --config=run.toml` is refused: report_to={missing} needs a package" in said
    assert TRACKERS[missing] in said


@pytest.mark.parametrize("case", CARRIED)
def test_what_the_original_does_by_itself_is_written_out(imported, case):
    changes, values_of, expected = CARRIED[case]
    if changes.get("model_family") == "auraflow" and "model_flavour" not in changes:
        changes = {**changes, "model_flavour": "v0.3"}
    code, err = imported(changes, [IMAGES])
    assert code == 0 and "starts the run" in err, err
    assert values_of(load({}, Path("run.toml"), environment={}).settings) == expected


def test_bytes_and_errors_of_a_quantized_base_are_those_of_the_page(imported):
    code, err = imported({**LORA, "base_model_precision": "int2-quanto"}, [IMAGES])
    assert (
        code == 0 and "bytes per weight 0.52, there 0.25; weights are 9.2 % off" in Path("run.toml").read_text() + err
    )
    table = (ROOT / "docs" / "lora.md").read_text().replace(" (e4m3)", "").replace(" (NormalFloat4, of QLoRA)", "")
    for name, (held, error) in PRECISIONS.items():
        assert re.search(rf"\| `{name}` \| {held} \|[^|]*\| {error} % \|", table), name


def test_private_stays_private_and_crops_stay_random(imported):
    datasets = [{**IMAGES, "crop": True, "crop_aspect": "preserve"}]
    assert imported({"push_to_hub": True}, datasets)[0] == 0
    made = load({}, Path("run.toml"), environment={}).settings
    assert made.hub.push_to_hub and made.hub.model_card_private and made.data.crop_style == "random"


def test_text_caches_keep_the_datasets_that_name_them(imported):
    other = {**TEXTS, "id": "alt", "default": False, "cache_dir": "cache/alt"}
    datasets = [{**IMAGES, "text_embeds": "alt"}, {**IMAGES, "id": "more", "text_embeds": "texts"}, TEXTS, other]
    code, err = imported({}, datasets)
    assert code == 0, err
    named = tomllib.loads(Path("run.toml").read_text())["data_backend_config"]
    assert [entry.get("text_embeds") for entry in json.loads(Path(named).read_text())][:2] == ["alt", "texts"]


def test_optimisations_are_left_out_and_said(imported):
    code, err = imported({**LORA, "fuse_qkv_projections": True, "dynamo_mode": "max-autotune"}, [IMAGES])
    assert code == 0 and "fuse_qkv_projections = true " in err and "would pass over the adapters" in err
    assert "fuse_qkv_projections" not in tomllib.loads(Path("run.toml").read_text())


def test_the_model_decides_before_all_else_and_why_it_is_not_trained_is_said(imported):
    for family in ("kandinsky5-image", *UNTRAINED):
        changes = {"model_family": family, "fuse_qkv_projections": True, "context_parallel_size": 2, "controlnet": True}
        code, err = imported({**LORA, **changes}, [])
        first, name = err.splitlines()[0], family.replace("-", "_")
        assert code == 2 and f"model_family {name} " in first and "did you mean" not in err
        assert UNTRAINED[name] in first


def test_a_family_that_is_only_called_otherwise_is_trained_by_its_name_here(imported, capsys):
    code, err = imported({"model_family": "pixart", "model_flavour": None}, [IMAGES])
    assert code == 0, err
    assert tomllib.loads(Path("run.toml").read_text())["model_family"] == "pixart_sigma"
    assert "# model_family = 'pixart' there" in Path("run.toml").read_text()
    Path("none.toml").touch()
    loaded = load({"model_family": "pixart"}, Path("none.toml"), complete=False, environment={})
    assert loaded.settings.model.model_family == "pixart_sigma"
    assert loaded.warnings == ("model_family=pixart is called pixart_sigma here",)
    flags = {"model_family": "pixart", "model_families": "pixart=mine:Own"}
    own = load(flags, Path("none.toml"), complete=False, environment={})
    assert own.settings.model.model_family == "pixart" and not own.warnings


def test_a_dataset_of_the_hub_has_its_columns_beside_the_others(imported):
    Path("art").mkdir()
    columns = {"image_column": "picture", "caption_column": "words"}
    hub = {"id": "art", "type": "huggingface", "caption_strategy": "huggingface", "metadata_backend": "huggingface"}
    code, err = imported({}, [{**hub, "dataset_name": "art", "huggingface": columns}])
    assert code == 0, err
    named = tomllib.loads(Path("run.toml").read_text())["data_backend_config"]
    (dataset,), _ = load_datasets(Data(data_backend_config=Path(named)))
    assert isinstance(dataset, SnapshotImages)
    assert (dataset.image_column, dataset.caption_column) == ("picture", "words")
    rows = {**columns, "filter_func": {"min_width": 512}}
    code, err = imported({}, [{**hub, "dataset_name": "art", "huggingface": rows}], "--force")
    assert code == 2 and "all rows of a dataset are trained on" in err


def test_a_dataset_of_the_hub_that_is_not_here_is_left_to_the_run_that_fetches_it(imported):
    hub = {"id": "art", "type": "huggingface", "dataset_name": "owner/art", "revision": "v1", "caption_column": "words"}
    hub["caption_strategy"] = "huggingface"
    code, err = imported({}, [hub])
    assert code == 0, err
    named = tomllib.loads(Path("run.toml").read_text())["data_backend_config"]
    (dataset,), _ = load_datasets(Data(data_backend_config=Path(named)))
    assert isinstance(dataset, SnapshotImages) and dataset.is_on_hub and dataset.revision == "v1"


LYCORIS = {**LORA, "lora_type": "lycoris", "lycoris_config": "config/lycoris.json"}
LOKR = {"algo": "lokr", "multiplier": 1.0, "linear_dim": 10000, "linear_alpha": 1, "factor": 12, "bypass_mode": True}
ATTENTION = {"target_module": ["Attention"], "module_algo_map": {"Attention": {"factor": 16}}}
BOTH = {"target_module": ["Attention", "FeedForward"]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({**LOKR, "apply_preset": ATTENTION}, ("lokr", 65_536, 65_536, 16, "*.attn*.*")),
        ({**LOKR, "linear_dim": 8, "apply_preset": BOTH}, ("lokr", 8, 1, 12, "*.attn*.*,*.ff*.*")),
        ({"algo": "loha", "apply_preset": {"target_module": ["UNet2DConditionModel"]}}, ("loha", 4, 1, -1, "*")),
    ],
)
def test_a_file_of_lycoris_is_the_adapter_of_the_run(imported, given, expected):
    changes = {**LYCORIS, "lora_rank": 16, "lora_alpha": 2}
    code, err = imported(changes, [IMAGES])
    assert code == 2 and "its lycoris_config, config/lycoris.json, is not here" in err
    Path("config/lycoris.json").write_text(json.dumps(given))
    code, err = imported(changes, [IMAGES])
    assert code == 0 and "starts the run" in err, err
    own = load({}, Path("run.toml"), environment={}).settings.lora
    assert (own.lora_type, own.lora_rank, own.lora_alpha, own.lokr_factor, own.lora_target_modules) == expected
    assert own.lora_dropout == 0 and "lora_type = 'lycoris' there" in Path("run.toml").read_text()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[1]", "holds a list, not names and values"),
        ("{", "does not parse"),
        ({"algo": "boft"}, "algo=boft of config/lycoris.json is not in this version"),
        ({**LOKR}, "names no target_module"),
        ({**LOKR, "apply_preset": 3}, "names no target_module"),
        ({**LOKR, "apply_preset": {"target_module": ["Attention"], "exclude_name": ["x"]}}, "exclude_name of"),
        ({**LOKR, "apply_preset": {"target_module": ["SwiGLUFFN"]}}, "layers of SwiGLUFFN"),
        ({**LOKR, "apply_preset": {**ATTENTION, **BOTH}}, "different sizes"),
        ({**LOKR, "apply_preset": {**BOTH, "module_algo_map": {"Attention": {"algo": "lora"}}}}, "more than sizes"),
        ({**LOKR, "multiplier": 0.5, "apply_preset": ATTENTION}, "multiplier=0.5"),
        ({**LOKR, "dropout": 0.5, "apply_preset": ATTENTION}, "dropout=0.5"),
        ({**LOKR, "linear_dim": [4], "apply_preset": ATTENTION}, "are numbers"),
    ],
)
def test_what_a_file_of_lycoris_has_beyond_one_adapter_ends_the_import(imported, given, said):
    Path("config").mkdir()
    Path("config/lycoris.json").write_text(given if isinstance(given, str) else json.dumps(given))
    code, err = imported(LYCORIS, [IMAGES])
    assert code == 2 and said in err and "this is a bug" not in err and not Path("run.toml").exists()


def test_caches_of_the_original_are_made_again(imported):
    vae, texts = {**IMAGES, "cache_dir_vae": "cache/vae"}, {**TEXTS}
    assert "encoded again" not in imported({}, [vae, texts])[1]
    for folder in ("cache/vae", "cache/texts"):
        Path(folder, "a").mkdir(parents=True)
        Path(folder, "a/0123.pt").touch()
    code, err = imported({"cache_dir_text": "cache/texts"}, [vae, texts], "--force")
    assert code == 0 and err.count("are encoded again, into caches of this program") == 3, err
    for name in ("cache_dir_vae = 'cache/vae'", "cache_dir = 'cache/texts'", "cache_dir_text = 'cache/texts'"):
        assert f"warning: {name}" in err
