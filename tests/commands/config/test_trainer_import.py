"""`config import` of kohya's sd-scripts and of diffusion-pipe: recognised by looking, translated where they map.

The examples are made up from the names of both trainers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simpletuner.app import main
from simpletuner.settings import load
from simpletuner.settings.declared.sections import SECTION_OF
from simpletuner.settings.foreign.original.names import TABLE
from simpletuner.settings.foreign.recognition import KOHYA, OF_KOHYA, PIPE, trainer_of

KOHYA_DATA = """\
[general]
enable_bucket = true
caption_extension = ".txt"
[[datasets]]
resolution = [1024, 1024]
batch_size = 2
bucket_reso_steps = 32
  [[datasets.subsets]]
  image_dir = "pictures"
  num_repeats = 10
  [[datasets.subsets]]
  image_dir = "more/pictures"
"""
KOHYA_RUN = """\
pretrained_model_name_or_path = "stabilityai/stable-diffusion-xl-base-1.0"
[network]
network_module = "networks.lora"
network_dim = 32
network_train_unet_only = true
[training]
dataset_config = "data.toml"
learning_rate = 1e-3
unet_lr = 1e-4
optimizer_type = "AdamW8bit"
optimizer_args = ["weight_decay=0.1", "betas=0.9,0.99"]
lr_scheduler = "cosine"
lr_warmup_steps = 10
max_train_steps = 100
min_snr_gamma = 5
save_every_n_steps = 50
mixed_precision = "bf16"
output_name = "mine"
"""
PIPE_DATA = """\
resolutions = [512, [1280, 720]]
enable_ar_bucket = true
num_ar_buckets = 7
[[directory]]
path = "pictures"
num_repeats = 2
"""
PIPE_RUN = """\
output_dir = "out"
dataset = "data.toml"
epochs = 10
micro_batch_size_per_gpu = 3
pipeline_stages = 1
gradient_accumulation_steps = 4
gradient_clipping = 0.5
activation_checkpointing = true
[model]
type = "flux"
diffusers_path = "black-forest-labs/FLUX.1-dev"
dtype = "bfloat16"
[optimizer]
type = "adamw_optimi"
lr = 2e-5
betas = [0.9, 0.99]
eps = 1e-8
"""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pictures").mkdir()
    Path("more/pictures").mkdir(parents=True)


@pytest.fixture
def run(capsys):
    """Run the command line in this process; return exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        return int(caught.value.code or 0), *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("text", "whose"), [(KOHYA_DATA, KOHYA), (KOHYA_RUN, KOHYA), (PIPE_DATA, PIPE), (PIPE_RUN, PIPE)]
)
def test_commands_that_read_settings_say_whose_file_it_is_and_what_to_do(run, text, whose):
    Path("their.toml").write_text(text)
    for command in (("config", "validate", "their.toml"), ("train", "--dry_run", "--config=their.toml")):
        code, _, err = run(*command)
        assert code == 2 and err.splitlines() == [
            f"error: their.toml is a file of {whose}",
            "hint: `simpletuner config import their.toml --output=run.toml` translates it, or says what would be lost",
        ]


def test_no_file_of_settings_is_taken_for_theirs():
    assert OF_KOHYA.isdisjoint({*SECTION_OF, *TABLE.rules})
    # Sections, which somebody may write although settings stand side by side.
    assert trainer_of({"model": {"model_family": "sdxl"}, "optimizer": {"optimizer": "lion"}}) == ""


def test_kohyas_lora_becomes_one_of_ours(run):
    Path("data.toml").write_text(KOHYA_DATA)
    Path("train.toml").write_text(KOHYA_RUN)
    code, _, err = run("config", "import", "train.toml", "--output=run.toml")
    assert code == 0 and "starts the run" in err, err
    assert run("config", "validate", "run.toml")[0] == 0
    made = load({}, Path("run.toml"), environment={}).settings
    assert (made.model.model_family, made.model.model_type, made.training.train_batch_size) == ("sdxl", "lora", 2)
    assert (made.lora.lora_rank, made.lora.lora_alpha, made.training.max_train_steps) == (32, 1.0, 100)
    own = made.optimizer
    assert (own.optimizer, own.learning_rate, own.lr_scheduler, own.lr_warmup_steps) == ("adamw", 1e-4, "cosine", 10)
    assert (own.adam_weight_decay, own.adam_beta2, own.max_grad_norm) == (0.1, 0.99, 1.0)
    assert (made.objective.snr_gamma, made.data.aspect_bucket_alignment) == (5.0, 32)
    assert made.data.caption_dropout_probability == 0
    first, second = json.loads(Path("run.datasets.json").read_text())
    assert (first["instance_data_dir"], first["repeats"], first["resolution"]) == ("pictures", 9, 1024)
    assert (second["id"], second["instance_data_dir"]) == ("pictures-2", "more/pictures")


def test_diffusion_pipe_becomes_a_run_of_ours(run):
    Path("data.toml").write_text(PIPE_DATA)
    Path("main.toml").write_text(PIPE_RUN)
    code, _, err = run("config", "import", "main.toml", "--output=run.toml")
    assert code == 0 and "starts the run" in err, err
    assert run("config", "validate", "run.toml")[0] == 0
    made = load({}, Path("run.toml"), environment={}).settings
    assert (made.model.model_family, made.training.train_batch_size, made.training.num_train_epochs) == ("flux", 3, 10)
    assert (made.objective.flow_schedule_shift, made.optimizer.max_grad_norm) == (1.0, 0.5)
    assert (made.optimizer.learning_rate, made.optimizer.adam_beta2) == (2e-5, 0.99)
    first, second = json.loads(Path("run.datasets.json").read_text())
    assert (first["repeats"], first["resolution"], second["resolution"]) == (1, 512, 960)  # 1280 x 720 has its area


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("network_train_unet_only = true", "", "text encoders are not trained"),
        ('"networks.lora"', '"lycoris.kohya"', "only networks.lora"),
        ("min_snr_gamma = 5", "noise_offset = 0.1", "noise_offset = 0.1 "),
        ('"AdamW8bit"', '"CAME"', "does not have this optimizer"),
        ('"cosine"', '"cosine_with_restarts"', "does not have this schedule"),
        ("weight_decay=0.1", "decouple=True", "decouple=True"),
        ('dataset_config = "data.toml"', 'train_data_dir = "d"', "[[datasets.subsets]]"),
        ('"bf16"', '"fp16"', "mixed_precision = 'fp16' "),
    ],
)
def test_what_has_no_place_here_ends_the_import(run, before, after, said):
    Path("data.toml").write_text(KOHYA_DATA)
    assert KOHYA_RUN.count(before) == 1
    Path("train.toml").write_text(KOHYA_RUN.replace(before, after))
    code, _, err = run("config", "import", "train.toml", "--output=run.toml")
    assert code == 2 and said in err and not Path("run.toml").exists() and "this is a bug" not in err


@pytest.mark.parametrize("line", ["flip_aug = true", "is_reg = true", 'conditioning_data_dir = "c"', "keep_tokens = 1"])
def test_datasets_that_would_be_others_end_the_import(run, line):
    Path("data.toml").write_text(f"{KOHYA_DATA}  {line}\n")
    code, out, err = run("config", "import", "data.toml")
    assert (code, out) == (2, "") and line.partition(" ")[0] in err
    assert len(json.loads(run("config", "import", "data.toml", "--partial")[1])) == 2


def test_a_lora_of_diffusion_pipe_has_other_layers(run):
    Path("data.toml").write_text(PIPE_DATA)
    Path("main.toml").write_text(f'{PIPE_RUN}[adapter]\ntype = "lora"\nrank = 32\n')
    code, _, err = run("config", "import", "main.toml", "--output=run.toml")
    assert code == 2 and "set lora_target_modules" in err
    assert run("config", "import", "main.toml", "--output=run.toml", "--partial")[0] == 0
    assert "lora_rank = 32" in Path("run.toml").read_text()


@pytest.mark.parametrize("text", ["datasets = [1]\n", "[[datasets]]\n", "[[directory]]\n", "network_dim = 'x'\n"])
def test_odd_files_of_theirs_are_answered_with_a_sentence(run, text):
    Path("their.toml").write_text(text)
    code, _, err = run("config", "import", "their.toml", "--output=run.json" if "[[" in text else "--output=run.toml")
    assert code == 2 and err.startswith("error: ") and "this is a bug" not in err
