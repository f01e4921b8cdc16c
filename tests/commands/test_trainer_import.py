"""`config import` of kohya's sd-scripts and of diffusion-pipe: recognised by looking, translated where they map.

The examples are made up from the names of both trainers.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from simpletuner.app import main
from simpletuner.commands.config import Program
from simpletuner.commands.config_import import TRAINERS
from simpletuner.settings import load
from simpletuner.settings.declared.sections import SECTION_OF
from simpletuner.settings.foreign.original_names import TABLE
from simpletuner.settings.foreign.recognition import AITOOLKIT, KOHYA, OF_KOHYA, ONETRAINER, PIPE, PROGRAMS, trainer_of

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
    for folder in ("pictures", "more/pictures"):
        Path(folder, "list").touch()  # an empty folder is refused


@pytest.fixture
def run(capsys):
    """Run the command line in this process; return exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        return int(caught.value.code or 0), *capsys.readouterr()

    return run


PRESET = '{"attention_mechanism": "FLASH", "base_model_name": "m", "training_method": "LORA"}'
JOB = "job: extension\nconfig:\n  name: x\n  process:\n    - type: sd_trainer\n"


@pytest.mark.parametrize(
    ("text", "whose"),
    [
        (KOHYA_DATA, KOHYA),
        (KOHYA_RUN, KOHYA),
        (PIPE_DATA, PIPE),
        (PIPE_RUN, PIPE),
        (JOB, AITOOLKIT),
        (PRESET, ONETRAINER),
    ],
)
def test_commands_that_read_settings_say_whose_file_it_is_and_what_to_do(run, text, whose):
    their = {JOB: "their.yaml", PRESET: "their.json"}.get(text, "their.toml")
    Path(their).write_text(text)
    output = "datasets.json" if text in (KOHYA_DATA, PIPE_DATA) else "run.toml"
    for command in (("config", "validate", their), ("train", "--dry_run", f"--config={their}")):
        code, _, err = run(*command)
        assert code == 2 and err.splitlines() == [
            f"error: {their} is a file of {whose}",
            f"hint: `simpletuner config import {their} --output={output}` translates it, or says what would be lost",
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
        ('"networks.lora"', '"networks.dylora"', "only networks.lora"),
        ("min_snr_gamma = 5", "noise_offset = 0.1", "noise_offset = 0.1 "),
        ('"AdamW8bit"', '"CAME"', "does not have this optimizer"),
        ('"cosine"', '"inverse_sqrt"', "does not have this schedule"),
        ("weight_decay=0.1", "decouple=True", "decouple=True"),
        ('dataset_config = "data.toml"', 'train_data_dir = "d"', "REPEATS_PHRASE"),
    ],
)
def test_what_has_no_place_here_ends_the_import(run, before, after, said):
    Path("data.toml").write_text(KOHYA_DATA)
    assert KOHYA_RUN.count(before) == 1
    Path("train.toml").write_text(KOHYA_RUN.replace(before, after))
    code, _, err = run("config", "import", "train.toml", "--output=run.toml")
    assert code == 2 and said in err and not Path("run.toml").exists() and "this is a bug" not in err


@pytest.mark.parametrize(
    "line",
    [
        "flip_aug = true",
        "is_reg = true",
        'conditioning_data_dir = "c"',
        "keep_tokens_separator = '|'\nshuffle_caption = true",
    ],
)
def test_datasets_that_would_be_others_end_the_import(run, line):
    Path("data.toml").write_text(f"{KOHYA_DATA}  {line}\n")
    code, out, err = run("config", "import", "data.toml")
    assert (code, out) == (2, "") and line.partition(" ")[0] in err
    assert len(json.loads(run("config", "import", "data.toml", "--partial")[1])) == 2


def test_a_lora_of_diffusion_pipe_has_other_layers(run):
    Path("data.toml").write_text(PIPE_DATA)
    Path("main.toml").write_text(f'{PIPE_RUN}[adapter]\ntype = "lora"\nrank = 32\n')
    assert run("config", "import", "main.toml", "--output=run.toml")[0] == 0
    own = load({}, Path("run.toml"), environment={}).settings.lora
    assert (own.lora_rank, own.lora_target_modules) == (32, "transformer_blocks.*,single_transformer_blocks.*")


@pytest.mark.parametrize("text", ["datasets = [1]\n", "[[datasets]]\n", "[[directory]]\n", "network_dim = 'x'\n"])
def test_odd_files_of_theirs_are_answered_with_a_sentence(run, text):
    Path("their.toml").write_text(text)
    code, _, err = run("config", "import", "their.toml", "--output=run.json" if "[[" in text else "--output=run.toml")
    assert code == 2 and err.startswith("error: ") and "this is a bug" not in err


SHORT = """\
pretrained_model_name_or_path = "runwayml/stable-diffusion-v1-5"
network_module = "networks.lora"
network_train_unet_only = true
dataset_config = "data.toml"
"""
SHORT_DATA = """\
[general]
caption_extension = "txt"
resolution = 512
[[datasets]]
  [[datasets.subsets]]
  image_dir = "pictures"
"""


def imported(run, text: str, data: str, code: int = 0):
    """Import a training file and the dataset file that it names; return settings, datasets and what was said."""
    # What the dataset file says of sizes goes before the training file.
    Path("data.toml").write_text(data.replace("resolution = 512\n", "") if "resolution =" in text else data)
    Path("their.toml").write_text(text)
    found, _, err = run("config", "import", "their.toml", "--output=run.toml", "--force")
    assert found == code, err
    if code:
        return None, None, err
    return load({}, Path("run.toml"), environment={}).settings, json.loads(Path("run.datasets.json").read_text()), err


def test_what_a_file_of_sd_scripts_is_silent_about_is_its_default(run):
    made, (data,), err = imported(run, SHORT, SHORT_DATA)
    assert (made.lora.lora_rank, made.lora.lora_alpha, made.optimizer.learning_rate) == (4, 1, 2e-6)
    assert (made.training.mixed_precision, made.training.train_batch_size) == ("no", 1)
    assert (made.model.prediction_type, data["caption_lines"], data["resolution"]) == ("epsilon", "first", 512)
    assert "0 need a look" in err
    v2 = (
        SHORT.replace("v1-5", "2-1")
        + "v2 = true\nnetwork_alpha = 0\nnetwork_dim = 8\nmin_snr_gamma = 0\nresolution = 256\n"
    )
    made, (data,), _ = imported(run, v2 + 'lr_scheduler_type = ""\nuse_8bit_adam = true\n', SHORT_DATA)
    assert (made.model.model_family, made.model.prediction_type, made.lora.lora_alpha) == ("sd2x", "epsilon", None)
    assert (made.objective.snr_gamma, data["resolution"]) == (None, 256)
    prodigy = 'optimizer_type = "Prodigy"\noptimizer_args = ["decouple=True"]\nlearning_rate = 1.0\n'
    assert imported(run, SHORT + prodigy, SHORT_DATA)[0].optimizer.optimizer == "prodigy"
    assert "set model_family" in imported(run, SHORT.replace("runwayml/stable-diffusion-v1-5", "noobai"), SHORT_DATA)[2]


def test_the_batch_of_a_dataset_goes_before_that_of_the_run(run):
    text, two = (
        f"{SHORT}train_batch_size = 8\n",
        f"{SHORT_DATA}[[datasets]]\nbatch_size = 3\n  [[datasets.subsets]]\n  image_dir = 'more/pictures'\n",
    )
    assert imported(run, text, SHORT_DATA)[0].training.train_batch_size == 8
    general = SHORT_DATA.replace("[general]", "[general]\nbatch_size = 2")
    assert imported(run, text, general)[0].training.train_batch_size == 2
    assert "batch_size = [3, 8]" in imported(run, text, two, code=2)[2]


def test_folders_of_sd_scripts_are_those_that_it_trains(run):
    twice = "  [[datasets.subsets]]\n  image_dir = 'pictures'\n  num_repeats = 4\n"
    none = "  [[datasets.subsets]]\n  image_dir = 'more'\n  num_repeats = 0\n"
    _, data, err = imported(run, SHORT, SHORT_DATA + twice + none)
    assert [each["instance_data_dir"] for each in data] == ["pictures"] and "2 need a look" in err
    Path("pictures/sub").mkdir()
    Path("pictures/sub/a.png").touch()
    assert "images in subfolders, such as pictures/sub/a.png" in imported(run, SHORT, SHORT_DATA, code=2)[2]


@pytest.mark.parametrize(
    ("key", "code", "said"),
    [
        ("lr_warmup_steps = 5.0", 2, "a share of all steps there, 500% of them: write 5"),
        ("lr_warmup_steps = 0.05\nlr_scheduler = 'constant_with_warmup'", 0, "0 need a look"),
        ("lr_warmup_steps = 5", 0, "with lr_scheduler=constant sd-scripts ends in an error"),
        ("network_dropout = 0.1", 0, "its inputs here"),
        ("clip_skip = 2", 2, "clip_skip = 2"),
        ("enable_bucket = true\nresolution = 1024", 0, "max_bucket_reso = 1024"),
        ("enable_bucket = true\nresolution = 1024\nmax_bucket_reso = 2048", 0, "1 needs a look"),
    ],
)
def test_meanings_of_sd_scripts_are_written_named_or_refused(run, key, code, said):
    assert said in imported(run, f"{SHORT}{key}\n", SHORT_DATA, code)[2]


def test_captions_of_a_class_are_the_phrase_only_without_caption_files(run):
    data = SHORT_DATA.replace('caption_extension = "txt"', "").replace(
        "image_dir", "class_tokens = 'sks cat'\n  image_dir"
    )
    assert "goes before" not in imported(run, SHORT, data)[2]
    Path("pictures/a.caption").write_text("a caption of its own")
    assert "class_tokens = 'sks cat'" in imported(run, SHORT, data, code=2)[2]
    Path("pictures/b.txt").write_text("first\nsecond")
    assert "0 need a look" in imported(run, SHORT, SHORT_DATA)[2]
    assert json.loads(Path("run.datasets.json").read_text())[0]["caption_lines"] == "first"


def test_what_a_file_of_diffusion_pipe_is_silent_about_is_its_default(run):
    few = PIPE_RUN.replace("betas = [0.9, 0.99]\neps = 1e-8\n", "").replace("micro_batch_size_per_gpu = 3\n", "")
    made, (first, _), err = imported(run, f"{few}[monitoring]\nenable_wandb = false\n", PIPE_DATA)
    own = made.optimizer
    assert (own.adam_beta1, own.adam_beta2, own.adam_epsilon, own.adam_weight_decay) == (0.9, 0.99, 1e-6, 0.01)
    assert (made.training.train_batch_size, made.data.aspect_bucket_alignment) == (1, 16)
    assert (first["caption_lines"], first["skip_uncaptioned"]) == ("one", True)
    assert "sides multiples of 16" in err and "monitoring" not in err


@pytest.mark.parametrize(
    ("before", "after", "code", "said"),
    [
        ("epochs = 10", "epochs = 10\nmax_steps = 50", 0, "here max_train_steps counts"),
        ("epochs = 10", "epochs = 10\nmax_steps = 50\nlr_scheduler = 'cosine'", 2, "it spans all epochs"),
        ("epochs = 10", "epochs = 10\nlr_scheduler = 'cosine'", 0, "1 needs a look"),
        ('type = "flux"', 'type = "sdxl"', 2, "both text encoders are trained"),
        ("num_repeats = 2", "num_repeats = 1.5", 2, "passes are whole here"),
    ],
)
def test_meanings_of_diffusion_pipe_are_written_named_or_refused(run, before, after, code, said):
    text, data = (each.replace(before, after) for each in (PIPE_RUN, PIPE_DATA))
    made, _, err = imported(run, text, data, code)
    assert said in err
    if made and made.optimizer.lr_scheduler == "cosine":
        assert made.optimizer.lr_end == 1e-6


def test_frame_buckets_of_diffusion_pipe_are_a_dataset_of_stills_and_one_of_clips(run):
    def made_of(*names: str, mode: str = "") -> tuple[list[dict], str]:
        for file in Path("pictures").iterdir():
            file.unlink()
        for name in names:
            Path("pictures", name).touch()
        text = PIPE_RUN.replace('"flux"', '"wan"').replace("FLUX.1-dev", "Wan")
        data = PIPE_DATA.replace("num_repeats = 2", "frame_buckets = [33, 1, 17]").replace(", [1280, 720]", "")
        _, entries, err = imported(run, f"{mode}\n{text}", data)
        return entries, err

    stills, clips = made_of("a.png", "a.txt", "b.MP4", "b.txt")[0]
    assert "video" not in stills and "dataset_type" not in stills
    assert (clips["dataset_type"], clips["video"]) == ("video", {"frame_buckets": [17, 33]})
    same = {"instance_data_dir", "resolution", "resolution_type", "skip_uncaptioned", "caption_lines"}
    assert {name: stills[name] for name in same} == {name: clips[name] for name in same}
    assert stills["id"] != clips["id"]
    [clips], err = made_of("b.mp4", mode="video_clip_mode = 'single_middle'")
    assert clips["video"]["clip_position"] == "middle" and "set video.fps" in err
    [stills], err = made_of("a.png")
    assert "video" not in stills and "frame_buckets" not in err
    entries, err = made_of()
    assert len(entries) == 2 and "remove that of which the folder has none" in err


def test_captions_json_of_diffusion_pipe_is_named(run):
    Path("pictures/captions.json").write_text("{}")
    assert "pictures/captions.json goes before .txt files" in imported(run, PIPE_RUN, PIPE_DATA)[2]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("pipe.toml", PIPE_DATA, f"pipe.toml is a file of {PIPE}"),
        ("kohya.toml", KOHYA_DATA, f"kohya.toml is a file of {KOHYA}"),
        ("musubi.toml", '[[datasets]]\nvideo_directory = "clips"\n', "musubi.toml is a file of musubi-tuner"),
        ("own.yaml", "- id: a\n  instance_data_dir: pictures\n", "own.yaml is no JSON file"),
        ("own.toml", 'id = "a"\n', "own.toml is no JSON file"),
    ],
)
def test_datasets_of_other_trainers_are_named_where_ours_are_expected(run, name, text, said):
    """They were answered with what JSON takes."""
    Path(name).write_text(text)
    code, _, err = run("train", "--dry_run", "--model_family=sdxl", f"--data_backend_config={name}")
    assert code == 2 and err.startswith(f"error: {said}\nhint: "), err
    Path(name).write_text('[{"id": "a", "instance_data_dir": "pictures", "resolution": 64}]')
    assert "JSON" not in run("train", "--dry_run", "--model_family=sdxl", f"--data_backend_config={name}")[2]
    if name in ("pipe.toml", "kohya.toml"):
        command = shlex.split(err.split("`")[1])
        assert command[1:] == ["config", "import", name, "--output=datasets.json"]


FOREIGN = {
    "gui.json": ('{"LoRA_type": "Standard", "network_dim": 32, "epoch": 10}', "kohya_ss, the GUI"),
    "one.json": ('{"training_method": "LORA", "base_model_name": "m", "model_type": "FLUX_DEV_1"}', "OneTrainer"),
    "krea.json": ('{"attention_mechanism": "FLASH", "base_model_name": "m", "training_method": "LORA"}', "OneTrainer"),
    "ai.yaml": ("job: extension\nconfig:\n  name: x\n  process:\n    - type: sd_trainer\n", "ai-toolkit"),
    "musubi.toml": ('dit = "x"\nnetwork_module = "networks.lora_wan"\nnetwork_dim = 4\n', "musubi-tuner"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_other_programs_are_named_alike_by_every_command(run, name):
    text, program = FOREIGN[name]
    Path(name).write_text(text)
    for command in (("config", "validate", name), ("train", f"--config={name}")):
        code, _, err = run(*command)
        hint = f"`simpletuner config import {name} --output=run.toml` translates it, or says what would be lost"
        assert code == 2 and err.splitlines() == [f"error: {name} is a file of {program}", f"hint: {hint}"], err


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ('network_module = "networks.lora_flux"\nnetwork_dim = 8\nmax_train_steps = 9\n', "run.toml"),
        ("[general]\nresolution = 512\n[[datasets]]\nnum_repeats = 2\n", "datasets.json"),
    ],
)
def test_a_file_that_two_programs_could_have_written_is_asked_about(run, text, output):
    Path("their.toml").write_text(text)
    which = f"`simpletuner config import their.toml --output={output} --from=sd-scripts` or `--from=musubi-tuner`"
    for command in (("config", "validate", "their.toml"), ("config", "import", "their.toml")):
        code, _, err = run(*command)
        assert code == 2 and "a file of kohya's sd-scripts or musubi-tuner" in err, err
        assert err.splitlines()[-1] == f"hint: say which: {which}", err
    for word in ("sd-scripts", "musubi-tuner"):
        err = run("config", "import", "their.toml", f"--output={output}", f"--from={word}", "--partial")[2]
        assert "could be" not in err and "images" in err, err  # which neither of them names


def test_every_program_can_be_named():
    assert {each.value for each in Program} == {*PROGRAMS} and {*PROGRAMS.values()} == {*TRAINERS}


SAMPLED = """\
      datasets: [{folder_path: pictures, caption_ext: txt, resolution: 512}]
      train: {steps: 20, dtype: bf16, noise_scheduler: flowmatch, batch_size: 1}
      network: {type: lora, linear: 8}
      model: {name_or_path: black-forest-labs/FLUX.1-dev, arch: flux}
      sample: {prompts: [a cat --w 512]}
"""
RUN_JOB = JOB + SAMPLED


@pytest.mark.parametrize(
    ("text", "existing", "said"),
    [
        (RUN_JOB, "run.prompts.jsonl", "run.prompts.jsonl exists already"),
        (RUN_JOB, "run.datasets.json", "run.datasets.json exists already"),
        (RUN_JOB + JOB[JOB.index("    - ") :] + SAMPLED, "run-2.toml", "run-2.toml exists already"),
        (RUN_JOB + JOB[JOB.index("    - ") :] + SAMPLED.replace("flux}", "nosuch}"), "", "trains `nosuch`"),
    ],
)
def test_files_of_runs_are_written_all_or_none(run, text, existing, said):
    """A refusal leaves nothing behind that the next try would be refused for."""
    Path("job.yaml").write_text(text)
    if existing:
        Path(existing).write_text("mine")
    before = {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    code, out, err = run("config", "import", "job.yaml", "--output=run.toml")
    assert code == 2 and said in err and "written" not in err and not out, err
    assert {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()} == before
    if existing:
        code, _, err = run("config", "import", "job.yaml", "--output=run.toml", "--force")
        assert code == 0, err
        assert load({}, Path("run.toml"), environment={}).settings.data.data_backend_config == Path("run.datasets.json")


def test_the_command_that_starts_an_imported_run_can_be_pasted(run):
    Path("job.yaml").write_text(RUN_JOB)
    code, _, err = run("config", "import", "job.yaml", "--output=it's mine.toml")
    command = shlex.split(err.split("`")[-2])
    assert code == 0 and command == ["simpletuner", "train", "--config=it's mine.toml"], err
    assert run(*command[1:], "--dry_run")[0] in (0, 3)


SECRETS = ("wandb_api_key", "huggingface_token", "HF_TOKEN", "password", "api_key", "aws_secret_access_key")


@pytest.mark.parametrize("more", [(), ("--partial",)])
@pytest.mark.parametrize(
    ("file", "text"),
    [
        (
            "job.yaml",
            RUN_JOB
            + "".join(f"      {name}: unseen7\n" for name in SECRETS)
            + "      logging: {wandb_api_key: unseen7}\n",
        ),
        ("train.toml", "".join(f'{name} = "unseen7"\n' for name in SECRETS) + KOHYA_RUN),
        ("main.toml", PIPE_RUN + '[monitoring]\nwandb_api_key = "unseen7"\n'),
        (
            "gui.json",
            json.dumps(
                {
                    "LoRA_type": "Standard",
                    "sdxl": True,
                    "text_encoder_lr": 0,
                    "unet_lr": 1e-4,
                    "train_data_dir": "pictures",
                    "additional_parameters": "--wandb_api_key unseen7 --hf_token=unseen7 --hf_args token=unseen7",
                }
            ),
        ),
        (
            "concepts.json",
            json.dumps(
                {
                    "training_method": "LORA",
                    "base_model_name": "m",
                    "model_type": "FLUX_DEV_1",
                    "concepts": [],
                    "secrets": {"huggingface_token": "unseen7"},
                    "wandb_api_key": "unseen7",
                }
            ),
        ),
    ],
)
def test_secrets_are_neither_copied_nor_shown_nor_a_reason_to_refuse(run, file, text, more):
    Path("data.toml").write_text(PIPE_DATA if file == "main.toml" else KOHYA_DATA)
    Path(file).write_text(text)
    _, out, err = run("config", "import", file, "--output=run.toml", *more)
    assert "unseen7" not in out + err
    assert not [path for path in Path().glob("run.*") if "unseen7" in path.read_text()]
    lost = [line.partition(" = ")[0] for line in err.splitlines() if "not a key" in line]
    assert not [name for name in lost if name.endswith(SECRETS)], lost
