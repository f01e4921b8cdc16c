"""`simpletuner deepspeed` as people and scripts use it: questions in a real terminal, flags, templates."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from terminal import Terminal

from simpletuner.app import main
from simpletuner.errors import ExitCode

HEAVY = ("torch", "numpy", "accelerate", "diffusers", "transformers", "deepspeed", "PIL", "safetensors")
IMPORTED = """
import sys
from simpletuner.app import main
try:
    main(sys.argv[2:])
finally:
    found = [name for name in sys.argv[1].split(",") if name in sys.modules]
    print("imported", found, file=sys.stderr)
"""
PARAMETERS = "--parameters=2.6e9"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SIMPLETUNER_HOME", str(tmp_path / "home"))


@pytest.fixture
def terminal(tmp_path):
    opened: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        opened.append(Terminal(tmp_path, *arguments))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def built(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    """Return the JSON on stdout and the talk on stderr."""
    assert command("deepspeed", "build", *arguments) == ExitCode.OK
    out, err = capsys.readouterr()
    return json.loads(out), err


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert command("deepspeed", *arguments) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_what_does_not_fit_is_refused_with_a_stage_that_does(capsys, tmp_path):
    model = ("build", PARAMETERS, "--num_processes=8", f"--output={tmp_path / 'ds.json'}")
    said = refusal(capsys, *model, "--stage=2", "--gpu_memory=12GiB")
    assert "this does not fit: it needs " in said and said.count("does not fit") == 1
    [hint] = re.findall(r"^hint: stage \d.* fits: (.*)$", said, re.MULTILINE)
    assert not (tmp_path / "ds.json").exists()
    assert command("deepspeed", *model, *hint.split(), "--gpu_memory=12GiB") == ExitCode.OK
    assert "nothing fits" in refusal(capsys, *model, "--force", "--stage=1", "--gpu_memory=1MiB")


def test_the_wizard_builds_a_configuration_that_a_config_file_can_name(terminal, tmp_path):
    dialogue = terminal("deepspeed", "build", PARAMETERS, "--gpu_memory=24GiB")
    dialogue.answer("How many GPUs in all?", "2")
    compared = dialogue.answer("Partition optimizer state (1)", "2")
    assert " 3       nvme        nvme      " in compared
    assert (compared.count("  yes "), compared.count("  no  ")) == (6, 3)
    shown = dialogue.answer("Where is optimizer state kept?", "nvme")
    assert '"stage": 2' in shown
    assert "does not fit" in shown
    dialogue.wait_for("Please select one of the available options")  # stage 2 has none
    dialogue.press("cpu\n")
    shown = dialogue.answer("Which optimizer?", "")
    assert '"device": "cpu"' in shown
    assert "fits: " in shown
    dialogue.answer("Which learning rate schedule", "constant_with_warmup")
    dialogue.answer("How many warm-up steps?", "100")
    dialogue.answer("How many forward passes per optimizer step?", "none")
    dialogue.wait_for("gradient_accumulation_steps = 'none' (flag): use a whole number of at least 1")
    dialogue.answer("How many forward passes per optimizer step?", "4")
    dialogue.answer("Clip gradients to which norm?", "1.0")
    dialogue.answer("Compute in bf16", "")
    (tmp_path / "mine.json").write_text("mine")
    dialogue.answer("Write to", "mine.json")
    dialogue.answer("mine.json exists already: overwrite it? [y/N]", "n")
    dialogue.answer("Write to", "")
    dialogue.wait_for("config/deepspeed.json is written")
    assert dialogue.ended() == ExitCode.OK

    assert (tmp_path / "mine.json").read_text() == "mine"
    written = json.loads((tmp_path / "config" / "deepspeed.json").read_text())
    assert written["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert written["gradient_accumulation_steps"] == 4
    assert written["train_batch_size"] == written["optimizer"]["params"]["lr"] == "auto"
    assert written["scheduler"]["params"]["warmup_num_steps"] == 100
    config = tmp_path / "run.toml"
    config.write_text(
        'model_family = "sdxl"\ninstance_data_dir = "."\nnum_processes = 2\nlearning_rate = 3e-5\n'
        'deepspeed_config = "config/deepspeed.json"\n'
    )
    assert command("config", "validate", str(config)) == ExitCode.OK
    assert command("deepspeed", "validate", "config/deepspeed.json") == ExitCode.OK


@pytest.mark.parametrize("keys", ["\x04", signal.SIGINT])
def test_interrupting_the_wizard_writes_nothing(terminal, tmp_path, keys):
    dialogue = terminal("deepspeed", "build", "--output=ds.json")
    dialogue.answer("How many GPUs in all?", "2")
    dialogue.wait_for("weights too (3)?")
    if isinstance(keys, str):
        dialogue.press(keys)
    else:
        dialogue.process.send_signal(keys)
    assert dialogue.ended() == ExitCode.INTERRUPTED
    assert "Traceback" not in dialogue.drawn
    assert [path.name for path in tmp_path.iterdir()] == []


def test_the_wizard_overwrites_a_file_after_asking(terminal, tmp_path):
    (tmp_path / "old.json").write_text("old")
    flags = ("--num_processes=2", "--max_grad_norm=1", "--lr_warmup_steps=0", "--gradient_accumulation_steps=1")
    dialogue = terminal("deepspeed", "build", *flags, "--optimizer=adamw", "--lr_scheduler=cosine")
    dialogue.answer("Partition optimizer state (1)", "1")
    dialogue.answer("Where is optimizer state kept?", "")
    dialogue.answer("Compute in bf16", "")
    dialogue.answer("Write to", "old.json")
    dialogue.answer("old.json exists already: overwrite it? [y/N]", "y")
    dialogue.wait_for("old.json is written")
    assert dialogue.ended() == ExitCode.OK
    assert json.loads((tmp_path / "old.json").read_text())["zero_optimization"] == {"stage": 1}


def test_what_is_chosen_already_is_not_asked_for(terminal, tmp_path):
    (tmp_path / "run.toml").write_text('optimizer = "adamw"\nlr_scheduler = "cosine"\nmixed_precision = "no"\n')
    flags = ("--num_processes=2", "--max_grad_norm=1", "--lr_warmup_steps=0", "--gradient_accumulation_steps=1")
    dialogue = terminal("deepspeed", "build", "--config=run.toml", *flags, "--output=ds.json")
    dialogue.answer("Partition optimizer state (1)", "3")
    dialogue.answer("Where is optimizer state kept?", "nvme")
    dialogue.answer("In which folder?", "swap")
    dialogue.answer("Where are weights kept", "cpu")
    dialogue.wait_for("ds.json is written")
    assert dialogue.ended() == ExitCode.OK
    written = json.loads((tmp_path / "ds.json").read_text())
    assert written["zero_optimization"]["offload_optimizer"] == {"device": "nvme", "nvme_path": "swap"}
    assert written["bf16"] == {"enabled": False}


def test_flags_are_enough_and_data_goes_to_stdout(capsys):
    flags = ("--stage=2", "--offload_optimizer=cpu", "--gpu_memory=24GiB", "--num_processes=8", PARAMETERS)
    config, told = built(capsys, *flags)
    assert config["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert "stage 2 with optimizer state on cpu: 2,600,000,000 parameters, 8 ranks" in told
    assert "12 P / N" in told
    assert "also counts activations" in told
    assert "fits: " in told


def test_chosen_settings_are_values_and_the_rest_is_auto(capsys):
    config, _ = built(capsys, "--stage=1", "--learning_rate=1e-4", "--train_batch_size=2", "--max_grad_norm=0")
    assert config == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.0,
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 1},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-4, "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
    }


def test_auto_takes_the_lowest_stage_that_fits_and_says_why(capsys):
    config, told = built(capsys, "--stage=auto", "--gpu_memory=24GiB", "--num_processes=8", PARAMETERS)
    assert config["zero_optimization"] == {"stage": 1}
    assert told.startswith("stage 1 fits 24.0 GiB per GPU, ")
    flags = ("--gpu_memory=24GiB", "--num_processes=8", "--offload_optimizer=cpu", PARAMETERS)
    config, _ = built(capsys, "--stage=auto", *flags)  # what is chosen already holds
    assert config["zero_optimization"] == {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    config, told = built(capsys, "--stage=auto", "--gpu_memory=8GiB", "--num_processes=8", PARAMETERS)
    assert config["zero_optimization"] == {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    assert "stage 1 would need 11.8 GiB per GPU" in told
    flags = ("--gpu_memory=10GiB", "--num_processes=8", PARAMETERS, "--offload_optimizer=none")
    config, told = built(capsys, "--stage=auto", *flags)
    assert config["zero_optimization"] == {"stage": 3}
    assert "on cpu" not in told


def test_auto_offloads_to_files_only_where_a_folder_is_named(capsys):
    flags = ("--stage=auto", "--gpu_memory=24GiB", "--host_memory=64GiB", "--model_family=flux", "--num_processes=1")
    assert "nothing fits 24.0 GiB per GPU: stage 1 would need" in refusal(capsys, "build", *flags)
    assert command("deepspeed", "build", *flags, "--offload_param_path=swap") == ExitCode.ENVIRONMENT
    assert "offload_param_path = " in capsys.readouterr().err  # this machine has no such disk
    assert not Path("swap").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["build"], "--stage is required without a terminal"),
        (["build", "--stage=auto"], "--stage=auto needs --gpu_memory=24GiB and --parameters=2.6e9"),
        (["build", "--stage=auto", PARAMETERS], "--stage=auto needs --gpu_memory=24GiB\n"),
        (["build", "--stage=2", "--gpu_memory=much"], "--gpu_memory = 'much': use an amount of memory"),
        (["build", "--stage=2", "--parameters=0"], "--parameters = '0': use a number of parameters"),
        (["build", "--stage=4"], "invalid value for '--stage'"),
        (["build", "--stage=2", "--lerning_rate=1"], "did you mean `learning_rate`?"),
        (["build", "--stage=2", "--fsdp_enable"], "FSDP and DeepSpeed cannot be enabled simultaneously."),
        (["build", "--stage=2", "--model_type=lora"], "model_type=lora cannot run with DeepSpeed"),
        (["build", "--stage=2", "--offload_param=cpu"], "offload_param = cpu, but zero_stage = 2"),
        (["build", "--template=zero2-ofload"], "there is no template `zero2-ofload`; did you mean `zero2-offload`?"),
        (["build", "--stage=2", "--save_template=a/b"], "`a/b` cannot name a template"),
        (["validate", "no.json"], "deepspeed_config = 'no.json' (flag): use JSON or the path of a JSON file"),
    ],
)
def test_mistakes_are_usage_errors(capsys, arguments, sentence):
    assert sentence in refusal(capsys, *arguments)


def test_an_existing_file_is_kept(capsys):
    Path("ds.json").write_text("mine")
    assert "ds.json exists already" in refusal(capsys, "build", "--stage=1", "--output=ds.json")
    assert Path("ds.json").read_text() == "mine"
    assert command("deepspeed", "build", "--stage=1", "--output=ds.json", "--force") == ExitCode.OK
    assert json.loads(Path("ds.json").read_text())["zero_optimization"] == {"stage": 1}


def test_an_existing_file_is_refused_before_the_first_question(terminal, tmp_path):
    (tmp_path / "ds.json").write_text("mine")
    dialogue = terminal("deepspeed", "build", "--output=ds.json")
    assert dialogue.ended() == ExitCode.USAGE
    assert "ds.json exists already" in dialogue.drawn and "How many" not in dialogue.drawn


@pytest.mark.parametrize("name", ["run.toml", "run.json", "run.yaml", "run.env"])
def test_apply_writes_the_result_into_a_config_file(capsys, name):
    written = {
        "run.toml": 'model_family = "sdxl"  # mine\nnum_processes = 4\n',
        "run.json": '{\n  "model_family": "sdxl",\n  "num_processes": 4\n}\n',
        "run.yaml": "model_family: sdxl  # mine\nnum_processes: 4\n",
        "run.env": "MODEL_FAMILY=sdxl # mine\nNUM_PROCESSES=4\n",
    }[name]
    Path("config").mkdir()
    config = Path("config", name)
    config.write_text(written)
    assert command("deepspeed", "build", "--stage=3", "--max_grad_norm=1", f"--apply={config}") == ExitCode.OK
    out, told = capsys.readouterr()
    assert out == ""
    assert f"config/deepspeed.json is written, and {config} names it" in told
    assert "stage 3: 2,567,463,684 parameters, 4 ranks" in told
    assert all(line.rstrip(",") in config.read_text() for line in written.splitlines())
    assert command("config", "show", f"--config={config}", "--json") == ExitCode.OK
    rows = json.loads(capsys.readouterr().out)
    assert (rows["zero_stage"]["value"], rows["max_grad_norm"]["value"]) == (3, 1.0)
    built = json.loads(Path("config/deepspeed.json").read_text())
    assert built["train_batch_size"] == built["optimizer"]["params"]["lr"] == "auto"
    assert "config/deepspeed.json exists already" in refusal(capsys, "build", "--stage=2", f"--apply={config}")
    again = ("deepspeed", "build", "--stage=2", f"--apply={config}", "--force")
    assert command(*again) == ExitCode.OK, "what it names already is not what it says"
    assert json.loads(Path("config/deepspeed.json").read_text())["zero_optimization"] == {"stage": 2}


def test_a_contradicting_config_file_is_kept_and_nothing_is_written(capsys, tmp_path):
    text = "zero_stage = 1\nlearning_rate = 1e-4\n"
    Path("run.toml").write_text(text)
    said = refusal(capsys, "build", "--stage=2", "--learning_rate=2e-4", "--apply=run.toml")
    assert "run.toml:1" in said and "run.toml:2" in said
    assert "cannot read no.toml" in refusal(capsys, "build", "--stage=2", "--apply=no.toml")
    assert "cannot be both --output and --apply" in refusal(
        capsys, "build", "--stage=1", "--apply=run.toml", "--output=run.toml", "--force"
    )
    # In a file whose other lines use the setting, it cannot be changed alone.
    Path("run.env").write_text("DEEPSPEED_CONFIG=none\nOUTPUT_DIR=$DEEPSPEED_CONFIG\n")
    kept = ("--apply=run.env", "--output=b.json", "--save_template=mine")
    assert 'deepspeed_config = "b.json"' in refusal(capsys, "build", "--stage=1", *kept)
    assert Path("run.toml").read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.env", "run.toml"]


INLINE = {
    "zero_optimization": {"stage": 2, "overlap_comm": False},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 100, "warmup_num_steps": 10, "warmup_type": "linear"},
    },
    "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.99]}},
    "train_batch_size": 32,
    "steps_per_print": 7,
}


def test_what_an_inline_config_says_is_never_dropped(capsys):
    Path("run.json").write_text(json.dumps({"model_family": "sdxl", "num_processes": 4, "deepspeed_config": INLINE}))

    def changed() -> dict[str, object]:
        assert command("config", "show", "--config=run.json", "--json") == ExitCode.OK
        return {name: row["value"] for name, row in json.loads(capsys.readouterr().out).items()}

    before = changed()
    assert (before["max_train_steps"], before["train_batch_size"], before["zero_stage"]) == (100, 8, 2)
    text = Path("run.json").read_text()
    said = refusal(capsys, "build", "--apply=run.json", "--output=ds.json", "--lr_scheduler=constant")
    assert "the deepspeed_config in run.json says max_train_steps = 100, which the new one cannot hold" in said
    assert Path("run.json").read_text() == text and not Path("ds.json").exists()
    assert command("deepspeed", "build", "--stage=3", "--apply=run.json", "--output=ds.json") == ExitCode.OK
    assert (
        "kept of the deepspeed_config in run.json: adam_beta1, adam_beta2, deepspeed_config, "
        in capsys.readouterr().err
    )
    assert json.loads(Path("run.json").read_text())["deepspeed_config"] == "ds.json"
    assert changed() == before | {"zero_stage": 3}


def test_templates_are_saved_listed_and_started_from(capsys, tmp_path):
    flags = ("--stage=2", "--offload_optimizer=cpu", "--max_grad_norm=0.5", "--save_template=mine")
    kept, told = built(capsys, *flags)
    assert f"saved as {tmp_path}/home/deepspeed/mine.toml: --template=mine" in told
    assert "mine.toml exists already" in refusal(capsys, "build", "--stage=1", "--save_template=mine")
    assert built(capsys, "--stage=1", "--save_template=own", "--force")
    assert built(capsys, "--stage=2", "--save_template=own", "--force")[0]["zero_optimization"] == {"stage": 2}
    again, _ = built(capsys, "--template=mine")
    assert again == kept
    other, _ = built(capsys, "--template=mine", "--offload_optimizer=none")
    assert other["zero_optimization"] == {"stage": 2}
    assert command("deepspeed", "templates", "--json") == ExitCode.OK
    listed = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert {"zero1", "zero2", "zero2-offload", "zero3", "zero3-offload", "zero3-nvme", "mine", "own"} == set(listed)
    assert listed["mine"]["config"] == kept


def test_every_shipped_template_builds_its_configuration(capsys):
    assert command("deepspeed", "templates", "--json") == ExitCode.OK
    for one in json.loads(capsys.readouterr().out):
        config, _ = built(capsys, f"--template={one['name']}", "--offload_param_path=/tmp")
        wanted, got = one["config"]["zero_optimization"], config["zero_optimization"]
        for part, device in (("offload_optimizer", "none"), ("offload_param", "none")):
            assert got.get(part, {}).get("device", device) == wanted.get(part, {}).get("device", device)
        assert got["stage"] == wanted["stage"]


def test_a_damaged_template_is_named(capsys, tmp_path):
    folder = tmp_path / "home" / "deepspeed"
    folder.mkdir(parents=True)
    (folder / "bad.toml").write_text("zero_optimization = [")
    assert f"{folder}/bad.toml is not a template" in refusal(capsys, "templates")
    (folder / "bad.toml").write_text("[zero_optimization]\nstag = 2\n")
    assert "DeepSpeed knows no such key; did you mean `stage`?" in refusal(capsys, "build", "--template=bad")
    (folder / "bad.toml").unlink()
    os.mkfifo(folder / "bad.toml")
    assert f"{folder}/bad.toml is not a template" in refusal(capsys, "templates"), "nobody waits for a writer"


def test_validate_shows_what_was_normalized(capsys):
    config = {
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "optimizer": {"type": "CPUAdam", "params": {"lr": 1e-4}},
        "train_batch_size": 12,
    }
    Path("ds.json").write_text(json.dumps(config))
    assert command("deepspeed", "validate", "ds.json", "--num_processes=3", "--json") == ExitCode.OK
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert {name: row["value"] for name, row in rows.items() if name != "num_processes"} == {
        "zero_stage": 2,
        "optimizer": "adamw",
        "learning_rate": 1e-4,
        "train_batch_size": 4,
        "deepspeed_config": {"zero_optimization": {"overlap_comm": True}},
    }
    assert rows["train_batch_size"]["because"] == "12 samples over all ranks / (num_processes 3)"
    assert "optimizer CPUAdam (ds.json) becomes AdamW" in err
    assert "ds.json: valid for 3 ranks" in err
    assert "must be a multiple of num_processes 5" in refusal(capsys, "validate", "ds.json", "--num_processes=5")


@pytest.mark.parametrize(
    "arguments",
    [
        ["build", "--stage=auto", "--gpu_memory=24GiB", "--model_family=sdxl"],
        ["templates"],
        ["validate", "ds.json"],
    ],
)
def test_nothing_heavy_is_imported(tmp_path, arguments):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    program = [sys.executable, "-c", IMPORTED, ",".join(HEAVY), "deepspeed", *arguments]
    done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE, env=dict(os.environ))
    assert done.returncode == ExitCode.OK, done.stderr
    assert done.stderr.splitlines()[-1] == "imported []"
