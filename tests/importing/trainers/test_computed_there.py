"""Values that other trainers have computed from small files of theirs: an import has them, or names them.

Computed by the programs' own parsers, data pipelines and network builders, at the commits that each module of
importing/trainers names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scanning
from imported_beside import CASES as CASES_BESIDE
from imported_beside import WARM_UP, imported_there, write_case
from PIL import Image
from trainer_files import value_of

from simpletuner.commands.config_import import import_files
from simpletuner.data.config.datasets import load_datasets
from simpletuner.errors import SettingsError
from simpletuner.settings import load

BESIDE = json.loads((Path(__file__).parents[1] / "computed_there.json").read_text())
TEXT = "{0}, tag one, tag two, tag three\nsecond line of {0}\n\n third line\n"
FIRST = "{0}, tag one, tag two, tag three"
SQUARES = {
    "a_square": (1024, 1024),
    "b_4x3": (1600, 1200),
    "c_16x9": (1920, 1080),
    "d_9x16": (1080, 1920),
    "e_small": (500, 400),
    "f_3x2": (3000, 2000),
    "g_pano": (2400, 800),
    "h_tall": (700, 2100),
    "i_2x3": (832, 1216),
    "j_5x4": (1280, 1024),
}
SIX = {"a": (1024, 1024), "b": (1600, 900), "c": (800, 1200), "d": (300, 300), "e": (2000, 500), "f": (641, 479)}
TAGS = {
    "a": "1girl, red hair, blue eyes, smile\n",
    "b": "[trigger] on a beach\nsecond line",
    "c": "sks person standing",
    "d": "",
    "e": "a photo of a bench, wide",
}
LINES = TAGS | {"b": "a beach\n\na sunny beach, waves\n", "e": "a bench, wide"}
IN_SUBFOLDERS = "images in subfolders, such as img/sub/z_nested.png, are not read there"


@dataclass(frozen=True)
class Case:
    """Files, and what the program made of them; `remarks` name what is otherwise here, as (text, its facts)."""

    files: dict[str, str]
    images: dict[str, dict[str, tuple[int, int]]]
    texts: dict[str, str]
    """Captions by stem; `*` is that of the others, with the stem in it."""
    settings: dict[str, Any]
    captions: dict[str, str | tuple[str, ...]] = field(default_factory=dict)
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    passes: int | list[int] = 1
    dropout: float = 0.0
    remarks: tuple[str, ...] = ()
    differs: frozenset[str] = frozenset()
    """Stems whose size or caption is another one here, which a remark names."""


JOB = """\
job: extension
config:
  name: my_lora
  process:
    - type: sd_trainer
      {trigger}
      network: {network}
      datasets:
        - {dataset}
      train: {train}
      model: {model}
"""
CAPTIONS_OF_AI_TOOLKIT = Case(
    {
        "job.yaml": JOB.format(
            trigger="trigger_word: sks",
            network="{type: lora, linear: 16, linear_alpha: 16}",
            dataset="{folder_path: img, caption_ext: txt, caption_dropout_rate: 0.1, default_caption: a thing}",
            train="{steps: 600, noise_scheduler: flowmatch, lr: 1e-4, dtype: bf16}",
            model="{name_or_path: black-forest-labs/FLUX.1-dev, is_flux: true}",
        )
    },
    {"img": SIX},
    TAGS,
    {"learning_rate": 1e-4, "max_train_steps": 600, "lora_rank": 16, "lora_alpha": None},
    # Another blank behind a comma is none to FLUX's tokenizers, and so is the line feed at the end.
    {
        "a": "sks 1girl, red hair, blue eyes, smile",
        "b": "sks on a beach\nsecond line",
        "c": "sks person standing",
        "e": "sks a photo of a bench, wide",
    },
    dropout=0.1,
    remarks=("'sks a thing' (job.yaml): 2 images without a caption, such as img/d.jpg", "is the trigger word there"),
    differs=frozenset("df"),
)
JOB_OF_A_WINDOW = Case(
    {
        "job.yaml": JOB.format(
            trigger="device: cuda:0",
            network="{type: lora, linear: 32, linear_alpha: 32, conv: 16, conv_alpha: 16, lokr_full_rank: true}",
            dataset="{folder_path: img, mask_path: null, default_caption: '', caption_dropout_rate: 0.05, "
            "resolution: [512, 768, 1024], num_repeats: 1, flip_x: false, is_reg: false, controls: []}",
            train="{batch_size: 1, steps: 3000, gradient_accumulation: 1, noise_scheduler: flowmatch, dtype: bf16, "
            "timestep_type: sigmoid, content_or_style: balanced, optimizer_params: {weight_decay: 1e-4}, lr: 0.0001, "
            "ema_config: {use_ema: false, ema_decay: 0.99}}",
            model="{name_or_path: black-forest-labs/FLUX.1-dev, arch: flux, quantize: true, qtype: qfloat8}",
        )
    },
    {"img": SIX},
    TAGS,
    {
        "learning_rate": 1e-4,
        "adam_weight_decay": 1e-4,
        "adam_epsilon": 1e-6,
        "max_train_steps": 3000,
        "lora_rank": 32,
        "lora_alpha": None,
        "use_ema": False,
        "flow_schedule_shift": 1.0,
        "flow_sigmoid_scale": 1.0,
        "max_grad_norm": 1.0,
    },
    passes=[1, 1, 1],
    dropout=0.05,
    remarks=("'' (job.yaml): 2 images without a caption",),
    differs=frozenset("df"),
)
FEW_KEYS = Case(
    {
        "main.toml": "output_dir = 'o'\ndataset = 'dataset.toml'\nepochs = 5\n[model]\ntype = 'flux'\n"
        "diffusers_path = 'black-forest-labs/FLUX.1-dev'\ndtype = 'bfloat16'\n"
        "[optimizer]\ntype = 'adamw_optimi'\nlr = 1e-5\n",
        "dataset.toml": "resolutions = [512]\nenable_ar_bucket = true\nmin_ar = 0.5\nmax_ar = 2.0\n"
        "num_ar_buckets = 5\n[[directory]]\npath = 'img'\n",
    },
    {"img": SQUARES},
    {"*": TEXT},
    {
        "learning_rate": 1e-5,
        "lr_scheduler": "constant",
        "train_batch_size": 1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.99,
        "adam_epsilon": 1e-6,
        "adam_weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "flow_schedule_shift": 1.0,
        "flux_guidance_value": 1.0,
        "num_train_epochs": 5,
    },
    # FLUX's tokenizers take any blanks for one.
    {"a_square": "a_square, tag one, tag two, tag three\nsecond line of a_square\nthird line"},
    {"a_square": (512, 512), "b_4x3": (608, 432), "c_16x9": (720, 368), "i_2x3": (432, 608)},
)
WARM_UP_OF_THE_GUI = Case(
    {
        "preset.json": json.dumps(
            {
                "LoRA_type": "Standard",
                "pretrained_model_name_or_path": "stabilityai/stable-diffusion-xl-base-1.0",
                "sdxl": True,
                "train_data_dir": "train",
                "caption_extension": ".txt",
                "max_resolution": "1024,1024",
                "max_bucket_reso": 2048,
                "enable_bucket": True,
                "lr_scheduler": "constant_with_warmup",
                "lr_warmup": 15,
                "lr_warmup_steps": 30,
                "epoch": 10,
                "max_train_epochs": 4,
                "learning_rate": 0.0001,
                "unet_lr": 0.0002,
                "text_encoder_lr": 0,
                "network_dim": 32,
                "network_alpha": 16,
                "optimizer": "AdamW8bit",
                "optimizer_args": "weight_decay=0.05 betas=0.9,0.95",
                "max_grad_norm": 1,
                "min_snr_gamma": 5,
                "seed": 1234,
                "mixed_precision": "bf16",
            }
        )
    },
    {"train/10_sks cat": dict(list(SQUARES.items())[:3]), "train/1_extra": {"d_9x16": (1080, 1920)}},
    {"*": TEXT},
    {
        "learning_rate": 2e-4,
        "lr_scheduler": "constant_with_warmup",
        "lr_warmup_steps": 30,
        "num_train_epochs": 4,
        "max_train_steps": None,
        "train_batch_size": 1,
        "lora_rank": 32,
        "lora_alpha": 16.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_weight_decay": 0.05,
        "max_grad_norm": 1.0,
        "snr_gamma": 5.0,
        "seed": 1234,
    },
    {stem: FIRST.format(stem) for stem in ("a_square", "b_4x3", "c_16x9", "d_9x16")},
    {"a_square": (1024, 1024), "b_4x3": (1152, 896)},
    passes=[10, 1],
    remarks=("the size of the nearest w/h", "lr_warmup_steps = 30 there: its first step has rate 0 there"),
)
Z_IMAGE = Case(
    {
        "train.toml": 'dit = "d.safetensors"\ndataset_config = "dataset.toml"\noptimizer_type = "adamw"\n'
        'optimizer_args = ["weight_decay=0.1", "betas=(0.9,0.95)"]\nlearning_rate = 1e-4\nlr_scheduler = "cosine"\n'
        'lr_warmup_steps = 0.1\ntimestep_sampling = "shift"\ndiscrete_flow_shift = 2.0\nweighting_scheme = "none"\n'
        'network_module = "networks.lora_zimage"\nnetwork_dim = 32\nnetwork_alpha = 32\nmax_train_steps = 40\n',
        "dataset.toml": '[general]\nresolution = 1024\ncaption_extension = ".txt"\nbatch_size = 1\n'
        'enable_bucket = true\n[[datasets]]\nimage_directory = "img"\ncache_directory = "c"\n',
    },
    {"img": SQUARES},
    {"*": TEXT},
    {
        "learning_rate": 1e-4,
        "lr_scheduler": "cosine",
        "lr_warmup_steps": 0.1,
        "max_train_steps": 40,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_weight_decay": 0.1,
        "lora_rank": 32,
        "lora_alpha": 32.0,
        "flow_schedule_shift": 2.0,
        "flow_sigmoid_scale": 1.0,
        "flow_use_uniform_schedule": False,
        "lora_target_modules": "layers.*.attention.*,layers.*.feed_forward.*",
        "train_batch_size": 1,
    },
    {"a_square": TEXT.format("a_square").strip()},
    {
        "a_square": (1024, 1024),
        "b_4x3": (1184, 880),
        "c_16x9": (1360, 768),
        "d_9x16": (768, 1360),
        "e_small": (1136, 912),
        "f_3x2": (1248, 832),
        "g_pano": (1760, 592),
        "h_tall": (592, 1760),
        "i_2x3": (848, 1232),
        "j_5x4": (1136, 912),
    },
    remarks=(
        "the size of the nearest w/h",
        "empty lines, and blanks around a line, are left out here, such as those of img/a_square.txt",
        "lr_warmup_steps = 0.1 there: its first step has rate 0 there",
    ),
    differs=frozenset({"a_square"}),
)


def concepts(*, text: str = "sample", **keys: object) -> str:
    made = {"name": "me", "path": "img", "image": {"enable_crop_jitter": False}, "text": {"prompt_source": text}}
    return json.dumps([made | keys, made | {"path": "other", "enabled": False}])


FLUX_PRESET = Case(
    {
        "config.json": json.dumps(
            {
                "__version": 11,
                "training_method": "LORA",
                "model_type": "FLUX_DEV_1",
                "base_model_name": "black-forest-labs/FLUX.1-dev",
                "concept_file_name": "concepts.json",
                "resolution": "768",
                "batch_size": 2,
                "epochs": 40,
                "learning_rate": 0.0003,
                "transformer": {"weight_dtype": "BFLOAT_16"},
                "text_encoder": {"train": False},
                "text_encoder_2": {"train": False},
                "train_dtype": "BFLOAT_16",
                "timestep_distribution": "LOGIT_NORMAL",
                "dynamic_timestep_shifting": True,
            }
        ),
        "concepts.json": concepts(balancing=4.0, balancing_strategy="REPEATS"),
    },
    {"img": SIX},
    LINES,
    {
        "learning_rate": 3e-4,
        "lr_warmup_steps": 200,
        "lora_rank": 16,
        "lora_alpha": 1.0,
        "lora_target_modules": "*",
        "num_train_epochs": 40,
        "flow_schedule_auto_shift": True,
        "flow_sigmoid_scale": 1.0,
        "max_grad_norm": 1.0,
    },
    {"b": ("a beach", "a sunny beach, waves")},
    {"a": (768, 768), "b": (1024, 576), "c": (640, 960), "d": (768, 768), "e": (1536, 384), "f": (960, 640)},
    passes=4,
    remarks=(
        "2 images without a caption, such as img/d.jpg",
        "one line of a caption file is drawn for the whole run there",
        "images that do not fill a batch are left out of an epoch there",
        "it takes no part in the training there, and is left out here: concepts = 'other'",
    ),
    differs=frozenset("df"),
)
OLD_VERSION = Case(
    {
        "config.json": json.dumps(
            {
                "__version": 3,
                "training_method": "LORA",
                "model_type": "STABLE_DIFFUSION_XL_10_BASE",
                "base_model_name": "stabilityai/stable-diffusion-xl-base-1.0",
                "weight_dtype": "BFLOAT_16",
                **{name: {"weight_dtype": "NONE"} for name in ("prior", "unet", "effnet_encoder", "decoder")},
                **{f"text_encoder{end}": {"train": False, "weight_dtype": "NONE"} for end in ("", "_2")},
                "vae": {"weight_dtype": "FLOAT_32"},
                "concept_file_name": "concepts.json",
                "resolution": "1024",
                "epochs": 10,
                "batch_size": 1,
                "learning_rate": 0.0001,
                "timestep_distribution": "LOGIT_NORMAL",
                "lora_layers": "attentions",
                "lora_layer_preset": "attn-mlp",
                "train_dtype": "BFLOAT_16",
            }
        ),
        "concepts.json": concepts(repeats=2, validation_concept=False),
    },
    {"img": SIX},
    LINES,
    {
        "learning_rate": 1e-4,
        "lora_target_modules": "*attentions*",
        "lr_warmup_steps": 200,
        "lora_alpha": 1.0,
        "num_train_epochs": 10,
    },
    passes=2,
    remarks=("files before version 4 are migrated to UNIFORM there, and so it is here",),
    differs=frozenset("df"),
)
CASES = {
    "ai-toolkit captions": CAPTIONS_OF_AI_TOOLKIT,
    "ai-toolkit window": JOB_OF_A_WINDOW,
    "diffusion-pipe": FEW_KEYS,
    "kohya_ss": WARM_UP_OF_THE_GUI,
    "musubi-tuner": Z_IMAGE,
    "OneTrainer": FLUX_PRESET,
    "OneTrainer 3": OLD_VERSION,
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make(case: Case) -> Path:
    """Write the files of a case; return the first."""
    for name, text in case.files.items():
        Path(name).write_text(text)
    for place, images in case.images.items():
        Path(place).mkdir(parents=True)
        for stem, size in images.items():
            # The extension that all images of the facts of ai-toolkit and OneTrainer have.
            Image.new("L", size).save(Path(place, f"{stem}{'.jpg' if len(stem) == 1 else '.png'}"))
            if (text := case.texts.get(stem, case.texts.get("*"))) is not None:
                Path(place, f"{stem}.txt").write_text(text.format(stem))
    return Path(next(iter(case.files)))


@pytest.mark.parametrize("name", CASES)
def test_what_a_program_computes_is_written_or_named(name):
    case = CASES[name]
    import_files(make(case), Path("run.toml"), False)
    settings = load({}, Path("run.toml"), environment={}).settings
    assert {key: value_of(settings, key) for key in case.settings} == case.settings
    written = " ".join(Path("run.toml").read_text().split())
    assert [each for each in case.remarks if each not in written] == []
    datasets, _ = load_datasets(settings.data)
    passes = case.passes if isinstance(case.passes, list) else [case.passes]
    assert [dataset.repeats + 1 for dataset in datasets] == passes
    assert {dataset.caption_dropout_probability for dataset in datasets} == {case.dropout}
    # Images without a caption end a run, which the import has said.
    found = scanning.found(
        [dataset.model_copy(update={"skip_uncaptioned": True}) for dataset in datasets],
        alignment_px=settings.data.aspect_bucket_alignment or 64,
    )
    samples = {Path(sample.name).stem: sample for sample in found.samples}
    stems = {stem for images in case.images.values() for stem in images}
    targets = {stem: sample.geometry.target for stem, sample in samples.items()}
    captions = {stem: each if isinstance(each, tuple) else (each,) for stem, each in case.captions.items()}
    sizes = {stem for stem, size in case.sizes.items() if stem in samples and targets[stem].size != size}
    texts = {stem for stem, each in captions.items() if stem in samples and samples[stem].captions != each}
    assert sizes | texts | (stems - samples.keys()) == case.differs


@pytest.mark.parametrize(("program", "name"), [(program, name) for program in BESIDE for name in BESIDE[program]])
def test_rates_buckets_captions_and_noise_levels_are_those_of_the_programs_code(program, name, tmp_path):
    """Its numbers are computed by tests/campaigns/computed_there.py, from the same files."""
    ours, theirs = imported_there(write_case(CASES_BESIDE[program][name], tmp_path)), BESIDE[program][name]
    # The k-th of w steps of a warm-up has k/(w + 1) of the rate here, and (k - 1)/w there, which a remark says.
    warm_up = WARM_UP if "warm-up" in name else 0
    assert ours["rates"][warm_up:] == pytest.approx(theirs["rates"][warm_up:], abs=1e-6)
    assert max(map(abs, np.subtract(ours["rates"], theirs["rates"]))) <= 1 / (warm_up + 1) if warm_up else True
    assert ours["levels"] == pytest.approx(theirs["levels"], abs=0.004)
    assert ours["captions"]["dropped"] == pytest.approx(theirs["captions"]["dropped"], abs=0.01)
    for tag, shares in ours["captions"]["places"].items():
        assert shares == pytest.approx(theirs["captions"]["places"][tag], abs=0.03)
    if program == "ai-toolkit":  # whose sizes have never more than the area: named for each import
        assert "a smaller image is trained in its own size there" in Path("run.toml").read_text()
    else:
        assert ours["buckets"] == theirs["buckets"]


@pytest.mark.parametrize("name", ["diffusion-pipe", "musubi-tuner"])
def test_images_that_a_program_does_not_read_are_refused(name):
    path = make(CASES[name])
    Path("img/sub").mkdir()
    Image.new("L", (900, 900)).save("img/sub/z_nested.png")
    with pytest.raises(SettingsError, match=IN_SUBFOLDERS):
        import_files(path, Path("run.toml"), False)
    assert not [*Path().glob("run.*")]


def test_a_folder_of_which_some_images_have_a_caption_and_others_a_phrase_is_refused():
    """sd-scripts gives r0 the text of r0.caption, and the others the phrase of their class."""
    Path("train.toml").write_text(
        'pretrained_model_name_or_path = "runwayml/stable-diffusion-v1-5"\ndataset_config = "dataset.toml"\n'
        'network_module = "networks.lora"\nnetwork_train_unet_only = true\n'
    )
    Path("dataset.toml").write_text(
        '[general]\nresolution = 512\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = "reg"\nclass_tokens = "sks cat"\n'
    )
    Path("reg").mkdir()
    for number in range(3):
        Image.new("L", (64, 64)).save(f"reg/r{number}.png")
    Path("reg/r0.caption").write_text("a caption of its own")
    with pytest.raises(SettingsError, match="the others this phrase"):
        import_files(Path("train.toml"), Path("run.toml"), False)
    Path("reg/r0.caption").unlink()
    import_files(Path("train.toml"), Path("run.toml"), False)
    [entry] = json.loads(Path("run.datasets.json").read_text())
    assert (entry["caption_strategy"], entry["instance_prompt"]) == ("instanceprompt", "sks cat")
