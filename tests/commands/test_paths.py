"""Paths as a shell hands them over: `~` that it did not expand, empty words, pipes; and what is no file at all."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from simpletuner.app import main
from simpletuner.settings import load
from simpletuner.settings.declared.sections import setting_fields

PATHS = ("instance_data_dir", "data_backend_config", "cache_dir_vae", "cache_dir_text", "output_dir", "logging_dir")
PATHS += ("offload_param_path", "run_secret_file", "pretrained_model_name_or_path")
PATHS += ("resume_from_checkpoint", "lora_init", "single_file_config", "validation_prompt_file")
PATHS += ("validation_images", "assistant_lora")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a command in a folder of its own, which is the home folder, too; return its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return int(ended.value.code or 0), *capsys.readouterr()

    return command


@pytest.fixture
def pipe():
    """Return the path of a pipe that holds a text, as `<(...)` makes it."""
    descriptors: list[int] = []

    def filled(text: str) -> str:
        reader, writer = os.pipe()
        descriptors.append(reader)
        os.write(writer, text.encode())
        os.close(writer)
        return f"/dev/fd/{reader}"

    yield filled
    for descriptor in descriptors:
        os.close(descriptor)


def shown(out: str) -> dict[str, object]:
    return {name: row["value"] for name, row in json.loads(out).items()}


def test_the_list_of_paths_is_complete():
    declared = {name for name, field in setting_fields().items() if "Path" in str(field.annotation)}
    assert declared <= set(PATHS)


@pytest.mark.parametrize("names", [[name for name in PATHS if name != "data_backend_config"], ["data_backend_config"]])
@pytest.mark.parametrize("source", ["flag", "c.toml", "c.json", "c.env", "variable"])
def test_home_is_meant_by_its_sign_in_every_path_from_every_source(run, monkeypatch, tmp_path, source, names):
    arguments = ["config", "show", "--json", "--model_type=lora", "--learning_rate=1e-4"]
    if source == "flag":
        arguments += [f"--{name}=~/x y" for name in names]
    elif source == "variable":
        for name in names:
            monkeypatch.setenv(f"SIMPLETUNER_{name.upper()}", "~/x y")
    else:
        lines = {"c.toml": "{} = '~/x y'", "c.env": "{}=~/'x y'"}.get(source, "").format
        text = "\n".join(map(lines, names)) if source != "c.json" else json.dumps(dict.fromkeys(names, "~/x y"))
        Path(source).write_text(text)
        arguments.append(f"--config=~/{source}")
    code, out, err = run(*arguments)
    assert (code, [line for line in err.splitlines() if "has no effect" not in line]) == (0, [])
    expected = str(tmp_path / "x y")
    for name in names:
        assert shown(out)[name] in (expected, [expected]), name


def test_a_name_that_begins_like_home_can_be_written(run, tmp_path):
    (tmp_path / "~x").mkdir()
    for again in range(2):
        code, out, _ = run("config", "show", "--json", "--output_dir=./~x" if not again else "--config=c.json")
        assert (code, shown(out)["output_dir"]) == (0, str(tmp_path / "~x"))
        run("config", "export", "--to=json", "--output=~/c.json", "--output_dir=./~x")


def test_a_dataset_file_knows_home_too(run, tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.png").touch()
    entry = {"id": "a", "type": "local", "instance_data_dir": "~/p", "cache_dir_vae": "~/v"}
    (tmp_path / "d.json").write_text("\ufeff" + json.dumps([entry]))
    (tmp_path / "c.toml").write_text("model_family = 'sdxl'\ndata_backend_config = '~/d.json'\n")
    assert run("config", "validate", "~/c.toml")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["config", "show", "--output_dir="],
            "output_dir = '' (flag): a path cannot be empty; `.`",
        ),
        (["config", "show", "--config="], "'': a path cannot be empty"),
        (["config", "validate", ""], "'': a path cannot be empty"),
        (["config", "show", "--output_dir=~nobody-of-this-name/x"], "there is no home folder ~nobody-of-this-name"),
        (["config", "show", "--accelerate_config=~nobody-of-this-name/x"], "there is no home folder"),
        (["config", "show", "--deepspeed_config=~nobody-of-this-name/x"], "there is no home folder"),
        (["config", "show", "--config=/dev/zero"], "cannot read /dev/zero: not a regular file"),
        (["config", "show", "--config=fifo"], "cannot read fifo: not a regular file"),
        (["config", "show", "--accelerate_config=fifo"], "cannot read fifo: not a regular file"),
        (["config", "show", "--deepspeed_config=fifo"], "not a regular file"),
        (["config", "show", "--config=large.json"], "cannot read large.json: it is larger than 4 MiB"),
    ],
)
def test_what_is_no_file_to_read_is_one_sentence(run, arguments, said):
    os.mkfifo("fifo")
    Path("large.json").write_text('{"instance_prompt": "' + "x" * (5 << 20) + '"}')
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert said in err


PIPED = ('{"seed": 5}', "seed = 5", "# mine\n\nseed: 5\n", "---\nseed: 5", '"seed": 5', "SEED=5\nREVISION=x")


@pytest.mark.parametrize("text", PIPED)
def test_a_pipe_holds_any_format(run, pipe, text):
    code, out, err = run("config", "show", "--json", f"--config={pipe(text)}")
    assert (code, err, shown(out)["seed"]) == (0, "", 5)


def test_a_mistake_in_a_pipe_is_a_mistake(run, pipe):
    code, _, err = run("config", "show", "--config", pipe('{"seed": 5,\n"nonsense": 7}'))
    assert code == 2 and "nonsense (a pipe:2): unknown setting" in err


def test_a_dry_run_shows_a_pipe_as_it_was_typed(run, pipe):
    Path("a.png").touch()
    enough = ("--model_family=sdxl", "--instance_data_dir=.")
    code, out, _ = run("train", "--dry_run", *enough, "--config", pipe("seed: 5"))
    assert code == 0 and "simpletuner train '--config=<(...)' --model_family=sdxl" in out and "/dev/fd" not in out


def test_pipes_hold_files_of_accelerate_deepspeed_and_datasets_too(run, pipe, tmp_path):
    zero = f"--deepspeed_config={pipe(json.dumps({'zero_optimization': {'stage': 2}, 'gradient_clipping': 1}))}"
    accelerate = f"--accelerate_config={pipe('distributed_type: MULTI_GPU')}"
    code, out, err = run("config", "show", "--json", zero, accelerate)
    assert (code, err, shown(out)["zero_stage"]) == (0, "", 2)
    datasets = pipe(json.dumps([{"id": "photos", "type": "local", "instance_data_dir": "nowhere"}]))
    code, _, err = run("train", "--dry_run", "--model_family=sdxl", f"--data_backend_config={datasets}")
    assert code == 4 and "dataset `photos`: there is no folder 'nowhere'" in err


def test_a_long_pipe_is_read_to_its_end_and_again_by_whoever_comes_next(run):
    reader, writer = os.pipe()
    text = "# long\n" * 50_000 + "seed = 5\n"

    def fill() -> None:
        with os.fdopen(writer, "w") as file:
            file.write(text)

    thread = threading.Thread(target=fill)
    thread.start()
    for _ in range(2):  # a launcher reads it, then its ranks
        assert load({}, Path(f"/dev/fd/{reader}"), complete=False, environment={}).settings.training.seed == 5
    thread.join()
    os.close(reader)


def test_ranks_read_the_pipe_of_their_launcher(run, pipe, tmp_path):
    (tmp_path / "empty").mkdir()
    settings = {"model_family": "sdxl", "model_flavour": "tiny", "instance_data_dir": "empty"}
    code, _, err = run("train", f"--config={pipe(json.dumps(settings))}", "--use_cpu", "--num_processes=2")
    assert code == 4, err  # no images: without their settings the ranks would end with 2
