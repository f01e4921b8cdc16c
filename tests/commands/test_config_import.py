"""`config import`: the original's files become one of ours that runs, and nothing of them goes missing unsaid.

The examples are made up from the original's names and usual values.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from simpletuner.app import main
from simpletuner.importing.translation import ORIGINAL_FAMILIES, OriginalFamily
from simpletuner.models.catalog.registry import flavours_of, presets
from simpletuner.settings import load

FAMILIES = [name for name, preset in presets().items() if preset.family_class and preset.flavours]
DATASETS = "config/multidatabackend.json"
CONFIG = Path(__file__).with_name("original_config.json")
ENTRIES = Path(__file__).with_name("original_datasets.json")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys):
    """Run the command line in this process; return exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        return int(caught.value.code or 0), *capsys.readouterr()

    return run


def example(family: str, **changes: Any) -> dict[str, Any]:
    """Return a complete config.json for the full model of a family; None as a change takes a name away."""
    trainable = next(name for name, flavour in flavours_of(family).items() if not flavour.untrainable)
    values = {"model_family": family, "model_flavour": trainable, **json.loads(CONFIG.read_text()), **changes}
    return {name: value for name, value in values.items() if value is not None or name not in changes}


def write(name: str, value: object) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value, indent=1), encoding="utf-8")
    return path


def write_example(family: str, pictures: Path | str = "pictures", **changes: Any) -> None:
    write("config/config.json", example(family, **changes))
    datasets = json.loads(ENTRIES.read_text())
    datasets[0]["instance_data_dir"] = str(pictures)
    del datasets[1]  # which this version cannot train on
    write(DATASETS, datasets)
    Path("pictures").mkdir(exist_ok=True)
    Path("pictures", "a.png").touch()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_complete_example_of_a_family_becomes_a_file_that_train_accepts(run, family):
    multiple = presets()[family].image_multiple
    write_example(family, **({"aspect_bucket_alignment": multiple} if multiple > 16 else {}))
    code, out, err = run("config", "import", "config", "--output=run.toml")
    if ORIGINAL_FAMILIES.get(family, OriginalFamily()).lost:
        assert (code, out, Path("run.toml").exists()) == (2, "", False)
        assert "would train something else" in err and "model_family" in err.splitlines()[1]
        code, out, err = run("config", "import", "config", "--output=run.toml", "--partial")
        assert "1 lost" in err and "starts what is left of the run" in err
    assert (code, out) == (0, "") and "0 need a look" in err and "this is a bug" not in err
    assert run("config", "validate", "run.toml")[0] == 0
    code, plan, _ = run("train", "--dry_run", "--config=run.toml")
    assert code == 0 and plan.startswith("# machine 0")
    made = load({}, Path("run.toml"), environment={}).settings
    assert (made.model.model_family, made.model.model_type, made.training.max_train_steps) == (family, "full", 1)
    assert (made.optimizer.optimizer, made.data.minimum_image_size) == ("adamw", None)
    assert made.model.vae_dtype == ("fp32" if family == "sana" else "bf16")


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_the_imported_file_trains_unchanged(run, family, pipelines, shapes, starter):
    write_example(family, shapes, pretrained_model_name_or_path=str(pipelines(family)))
    assert run("config", "import", "config/config.json", "--output=run.toml")[0] == 0
    ranks = starter.train(1, "--config=run.toml")
    assert ranks.wait() == [0], ranks.said
    assert Path("output/run/pipeline/model_index.json").is_file()
    assert list(Path(f"cache/{family}/pictures").iterdir()) and list(Path("cache/texts").iterdir())


def test_every_name_is_a_line_or_a_remark_and_changes_say_why(run):
    write_example(
        "flux", optimizer="optimi-lion", push_checkpoints_to_hub=True, nonsense=1, report_to="comet_ml", hf_token="abc"
    )
    datasets = json.loads(Path(DATASETS).read_text())
    write(DATASETS, [*datasets, {"id": "far", "type": "memory", "aws_secret_access_key": "abc"}])
    assert run("config", "import", "config/config.json")[0] == 2
    code, out, err = run("config", "import", "config/config.json", "--partial")
    assert code == 0 and "4 need a look; 2 lost" in err
    text = out.replace("\n", " ")
    assert [name for name in example("flux") if f"{name} = " not in text] == []
    for said in (
        "# optimizer = 'optimi-lion' there: weights and optimizer state are float32, 8 bytes per weight\noptimizer = ",
        "\nmax_grad_norm = 0.01\n",
        "# not set there: optimi_lion has it there\n",
        "# flow_schedule_shift = 0.0 there\nflow_schedule_shift = 1\n",
        "# not set there: the original's default\n",
        '\nvae_dtype = "bf16"\n',
        "# push_checkpoints_to_hub = true (config/config.json:",
        "# report_to = 'comet_ml' (config/config.json:",
        "# nonsense = 1 (config/config.json:",
        "type = 'memory' (config/multidatabackend.json:42, dataset `far`): not supported",
        "dataset `far` is left out",
    ):
        assert said in out
    assert not re.search(r"(# not set there: the original's default\n)(?:[^#\n].*\n)+\1", out), (
        "once of several in a row"
    )
    assert "abc" not in out + err
    assert all(line.startswith("#") or not line for line in out.partition("\n\n")[2].splitlines())


def test_datasets_that_change_are_a_copy_beside_the_file(run):
    write_example("sdxl")
    before = Path(DATASETS).read_bytes()
    assert run("config", "import", "config", "--output=runs/mine.toml")[0] == 0
    first, *texts = json.loads(Path("runs/mine.datasets.json").read_text())
    assert (first["cache_dir_vae"], first["repeats"]) == ("cache/sdxl/pictures", 4)
    assert [each["id"] for each in texts] == ["texts", "texts-2"]
    assert not {"minimum_image_size", "write_batch_size"} & {*first}
    assert tomllib.loads(Path("runs/mine.toml").read_text())["data_backend_config"] == "runs/mine.datasets.json"
    assert Path(DATASETS).read_bytes() == before
    assert "exists already" in run("config", "import", "config", "--output=runs/mine.toml")[2]
    Path("runs/mine.toml").unlink()
    code, _, err = run("config", "import", "config", "--output=runs/mine.toml")
    assert code == 2 and "runs/mine.datasets.json exists already" in err and not Path("runs/mine.toml").exists()
    assert run("config", "import", "config", "--output=runs/mine.toml", "--force")[0] == 0


def test_datasets_that_this_version_reads_stay_where_they_are(run):
    write_example("sdxl")
    write(DATASETS, [{"id": "a", "type": "local", "instance_data_dir": "pictures"}])
    _, out, err = run("config", "import", "config/config.json", "--output=run.toml")
    assert "0 need a look" in err and not Path("run.datasets.json").exists()
    assert tomllib.loads(Path("run.toml").read_text())["data_backend_config"] == DATASETS


def test_a_list_of_datasets_alone_becomes_one_that_runs_can_name(run):
    write_example("sdxl")
    code, out, err = run("config", "import", DATASETS)
    assert (code, [entry["id"] for entry in json.loads(out)]) == (0, ["pictures", "texts", "texts-2"])
    assert "3 datasets taken" in err
    assert run("config", "import", DATASETS, "--output=ours.json")[0] == 0
    assert "name it ours.json" in run("config", "import", DATASETS, "--output=ours.toml")[2]
    again = run("config", "import", "ours.json")
    assert json.loads(again[1]) == json.loads(out) and "0 need a look" in again[2]


def test_paths_of_another_folder_still_mean_the_same(run, tmp_path, monkeypatch):
    write_example("sdxl", output_dir="~/out", logging_dir="logs")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run("config", "import", "../config", "--output=run.toml")[0] == 0
    text = Path("run.toml").read_text()
    made = tomllib.loads(text)
    assert (made["output_dir"], made["logging_dir"]) == (str(Path.home() / "out"), str(tmp_path / "logs"))
    assert f"Paths are those of a run in {tmp_path}." in text.splitlines()[0]
    assert f"# logging_dir = 'logs' there: relative to {tmp_path} there" in text
    first, *_ = json.loads(Path("run.datasets.json").read_text())
    assert first["instance_data_dir"] == str(tmp_path / "pictures")
    assert run("config", "validate", "run.toml")[0] == 0


ENV = """\
export HF_TOKEN=geheim
NCCL_DEBUG=INFO
CONFIG_BACKEND=env
MODEL_FAMILY=sdxl
MODEL_TYPE=full
MODEL_NAME=stabilityai/stable-diffusion-xl-base-1.0
DATALOADER_CONFIG=config/multidatabackend.json
MAX_NUM_STEPS=10
NUM_EPOCHS=0
LR_SCHEDULE=constant
HUB_MODEL_NAME=''
USE_XFORMERS=true
MIN_SNR_GAMMA=5
TRAINING_NUM_PROCESSES=2
TRAINER_EXTRA_ARGS="--use_ema --lr_end=1e-7 --push_checkpoints_to_hub"
"""


def test_config_env_with_its_extra_arguments_is_imported(run):
    write_example("sdxl")
    write("config/foo/config.env", ENV)
    code, out, err = run("config", "import", "config/foo")
    made = tomllib.loads(out)
    assert (code, made["use_ema"], made["lr_end"], made["num_processes"]) == (0, True, 1e-7, 2)
    assert (made["snr_gamma"], made["max_train_steps"]) == (5.0, 10)
    assert (
        "push_checkpoints_to_hub = 'true' (config/foo/config.env:15 TRAINER_EXTRA_ARGS): checkpoints are not uploaded"
        in err
    )
    assert "# HF_TOKEN, NCCL_DEBUG: set them in the shell" in out and "geheim" not in out + err


def test_what_stands_in_the_environment_is_not_written_to_remarks(run, monkeypatch):
    monkeypatch.setenv("MY_KEY", "geheim")
    write_example("sdxl")
    more = 'TRAINER_EXTRA_ARGS+=" --webhook_config=$MY_KEY --seed=$MY_KEY"\nDEBUG_EXTRA_ARGS="\'"\nNONSENSE=$MY_KEY\n'
    write("config/foo/config.env", ENV + more)
    assert run("config", "import", "config/foo")[0] == 2
    code, out, err = run("config", "import", "config/foo", "--partial")
    assert code == 0 and "seed = '$MY_KEY' (config/foo/config.env:16 TRAINER_EXTRA_ARGS): use a whole number" in err
    assert "nonsense = '$MY_KEY'" in out.lower().replace("$my_key", "$MY_KEY") and "geheim" not in out + err
    assert "a quote in it is not closed" in out


def test_of_a_folder_json_is_taken_with_what_config_env_says_to_launchers(run):
    write_example("sdxl")
    write("config/config.env", ENV.replace("CONFIG_BACKEND=env\n", ""))
    _, out, err = run("config", "import", "config")
    made = tomllib.loads(out)
    assert (made["num_processes"], made["max_train_steps"], "use_ema" in made) == (2, 1, True)
    assert made["use_ema"] is False and "config.json is read in its place: " in out
    assert "config/config.env is read by every run in this folder" in err
    write("config/config.env", ENV)
    assert tomllib.loads(run("config", "import", "config")[1])["max_train_steps"] == 10


def test_the_webui_and_toml_are_read(run):
    values = {f"--{name}": value for name, value in example("sdxl").items()}
    write_example("sdxl")
    write("web.json", {"_metadata": {"name": "x"}, "config": values})
    made = tomllib.loads(run("config", "import", "web.json")[1])
    assert made == tomllib.loads(run("config", "import", "config/config.json")[1])
    write("t.toml", 'model_family = "sdxl"\ninstance_data_dir = "pictures"\nlora_rank = 4\n')
    assert "lora_rank = 4" in run("config", "import", "t.toml")[1]


def test_deepspeed_and_accelerate_files_are_kept(run):
    write("ds.json", {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "gradient_clipping": 1.0})
    write("acc.yaml", "distributed_type: MULTI_GPU\nnum_processes: 2\n")
    write_example("sdxl", deepspeed_config="ds.json", accelerate_config="acc.yaml", max_grad_norm=None)
    assert run("config", "import", "config", "--output=run.toml")[0] == 0
    settings = load({}, Path("run.toml"), environment={}).settings
    assert (settings.parallel.zero_stage, settings.launch.num_processes, settings.optimizer.max_grad_norm) == (2, 2, 1)


def test_what_validation_cannot_do_is_left_out_and_the_run_stays(run):
    write_example("wan", validation_resolution="854x480")
    code, out, err = run("config", "import", "config")
    assert code == 0 and "all sides must be multiples of 16 px" in err
    assert "validation_resolution" not in tomllib.loads(out)
    write_example("wan", lr_warmup_steps=100)  # which the original would never leave
    code, out, err = run("config", "import", "config")
    assert (code, out) == (2, "") and "lr_warmup_steps = 100 is more than max_train_steps = 1" in err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "lora", "model_family": "pixart_sigma", "model_flavour": None}, "cannot load a LoRA"),
        ({"model_type": "DPT"}, "model_type = 'DPT' (config/config.json:4): use one of full, lora"),
        ({"model_family": "kandinsky5-image"}, "its pipeline generates images of sizes of its own"),
        ({"model_family": "hidream", "model_flavour": None}, "its pipeline generates images of one area alone"),
        ({"model_family": None}, "model_family is missing"),
        ({"controlnet": True}, "ControlNets and control channels are not trained by this version"),
        ({"data_backend_config": None}, "no images"),
        ({"data_backend_config": ""}, "no images"),
        ({"data_backend_config": "config/examples/x.json"}, "there is no such file in "),
        ({"context_parallel_size": 2, "num_processes": 2, "fsdp_enable": True}, "sdxl cannot be split"),
    ],
    ids=str,
)
def test_what_decides_a_run_is_an_error_and_nothing_is_written(run, changes, said):
    write_example("sdxl", **changes)
    code, out, err = run("config", "import", "config", "--output=run.toml")
    assert (code, out, Path("run.toml").exists()) == (2, "", False)
    assert err.startswith("error: ") and said in err.splitlines()[0] and "hint: " in err


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"id": "a", "type": "csv"}, "csv_file = null (config/multidatabackend.json:2"),
        ({"id": "a", "type": "memory"}, "type = 'memory' (config/multidatabackend.json:2, dataset `a`): not supported"),
        ({"id": "a", "type": "aws"}, "aws_bucket_name = null (config/multidatabackend.json:2"),
        ({"id": "a", "type": "local", "dataset_type": "audio"}, "only images and videos"),
        ({"id": "a", "type": "local"}, "instance_data_dir = null"),
    ],
)
def test_without_a_dataset_there_is_no_run(run, entry, said):
    write_example("sdxl")
    write(DATASETS, [entry])
    code, _, err = run("config", "import", "config")
    assert code == 2 and "has no dataset of images" in err and said in err


def test_other_files_are_answered_with_a_sentence(run):
    write_example("sdxl")
    run("config", "import", "config", "--output=run.toml")
    Path("utf16.json").write_bytes('{"seed": 1}'.encode("utf-16"))
    cases = {
        "utf16.json": "utf16.json:1 does not parse: it is not UTF-8",
        "run.toml": "run.toml is imported already",
        "pictures": "pictures holds none of config.json, config.toml, config.env",
        "gone.json": "cannot read gone.json: No such file",
        write("b.json", '{"seed"'): "b.json:1 does not parse",
        write("c.json", "5"): "c.json holds one value",
        write("d.txt", "seed"): "settings are read from .json",
        "": "a path cannot be empty",
    }
    for path, said in cases.items():
        code, _, err = run("config", "import", path)
        assert code == 2 and said in err and "hint: " in err


def test_a_dataset_of_videos_keeps_its_clips(run):
    films = {"id": "a", "dataset_type": "video", "instance_data_dir": "sets/a", "caption_strategy": "filename"}
    write("their/config/multidatabackend.json", [films | {"video": {"num_frames": 81, "is_i2v": True}}])
    code, out, err = run("config", "import", "their/config/multidatabackend.json", "--partial")
    (imported,) = json.loads(out)
    assert code == 0 and imported["dataset_type"] == "video"
    assert imported["video"] == {"num_frames": 81, "is_i2v": True} and "is_i2v" not in err


def test_the_table_of_a_dataset_moves_with_it_and_keys_for_boxes_stay_behind(run):
    block = {"path": "sets/a.parquet", "filename_column": "id", "caption_column": "c", "bbox_column": "f"}
    entry = {"id": "a", "instance_data_dir": "sets/a", "caption_strategy": "parquet", "parquet": block}
    write(
        "their/config/multidatabackend.json", [entry, {**entry, "id": "b", "parquet": {**block, "path": "a.feather"}}]
    )
    code, out, err = run("config", "import", "their/config/multidatabackend.json", "--partial")
    (imported,) = json.loads(out)
    assert code == 0 and imported["parquet"] == {
        "path": str(Path("their").absolute() / "sets" / "a.parquet"),
        "filename_column": "id",
        "caption_column": "c",
    }
    assert "parquet.bbox_column = 'f' (their/config/multidatabackend.json:" in err
    assert "dataset `b` is left out" in err


def test_the_datasets_of_an_example_are_found_where_the_original_has_them(run, tmp_path):
    """Its examples name config/examples/x.json, and come with simpletuner/examples/x.json."""
    folder = tmp_path / "simpletuner" / "examples" / "sdxl"
    folder.mkdir(parents=True)
    (folder.parent / "x.json").write_text('[{"id": "a", "type": "local", "instance_data_dir": "datasets/a"}]')
    names = {"--model_type": "lora", "--model_family": "sdxl", "--data_backend_config": "config/examples/x.json"}
    (folder / "config.json").write_text(json.dumps(names))
    code, out, err = run("config", "import", folder / "config.json")
    assert code == 0 and "x.json" in out, err
    (folder / "config.json").write_text(json.dumps({**names, "--data_backend_config": "$HERE/x.json"}))
    code, _, err = run("config", "import", folder / "config.json")
    assert code == 2 and "{env:HERE}" in err
