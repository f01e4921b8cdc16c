from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from simpletuner.app import main
from simpletuner.models.catalog.registry import TINY, flavour_of, presets
from simpletuner.settings import load
from simpletuner.settings.declared.sections import Model, setting_fields

HEAVY = ("torch", "numpy", "accelerate", "diffusers", "transformers", "deepspeed", "PIL")
ENOUGH = ("--model_family=sdxl", "--instance_data_dir=pictures")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys):
    """Run the command line in this process; return exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        return int(caught.value.code or 0), *capsys.readouterr()

    return run


def write(name: str, text: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)


SIX_SOURCES = {
    "config/config.env": "# mine\nSEED=1\n",
    "a.yaml": "distributed_type: 'NO'\nnum_processes: 2\nmixed_precision: 'no'\nuse_cpu: false\nmain_process_port: 2\n",
    "c.toml": "main_process_port = 3\nseed = 3\n",
}


@pytest.mark.parametrize(
    ("sources", "value", "place", "because"),
    [
        (0, 29500, "default", ""),
        (1, 1, "config/config.env:2", ""),
        (2, 2, "a.yaml:5", "outranks config/config.env:2 (= 1)"),
        (3, 3, "c.toml:1", "outranks a.yaml:5 (= 2); outranks config/config.env:2 (= 1)"),
        (
            4,
            4,
            "environment SIMPLETUNER_MAIN_PROCESS_PORT",
            "outranks c.toml:1 (= 3); outranks a.yaml:5 (= 2); outranks config/config.env:2 (= 1)",
        ),
        (
            5,
            5,
            "flag",
            "outranks environment SIMPLETUNER_MAIN_PROCESS_PORT (= 4); outranks c.toml:1 (= 3); "
            "outranks a.yaml:5 (= 2); outranks config/config.env:2 (= 1)",
        ),
    ],
)
def test_stronger_sources_outrank_weaker_ones_and_say_so(run, monkeypatch, sources, value, place, because):
    arguments = ["config", "show", "--all", "--json", "--num_processes=2"]
    for name, text in list(SIX_SOURCES.items())[:sources]:
        write(name, text.replace("SEED", "MAIN_PROCESS_PORT"))
    if sources >= 2:
        arguments.append("--accelerate_config=a.yaml")
    if sources >= 3:
        arguments.append("--config=c.toml")
    if sources >= 4:
        monkeypatch.setenv("SIMPLETUNER_MAIN_PROCESS_PORT", "4")
    if sources >= 5:
        arguments.append("--main-process-port=5")
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    row = json.loads(out)["main_process_port"]
    assert row == {"value": value, "default": 29500, "from": place, "because": because}


def test_show_as_json_names_the_value_default_and_origin_of_every_setting(run):
    write("config/config.toml", 'crop = "yes"\nlr_scheduler = "Cosine"\nmixed_precision = "fp32"\n')
    code, out, err = run("config", "show", "--all", "--json", *ENOUGH, "--context_parallel_comm_strategy=alltoall")
    rows = json.loads(out)
    assert (code, err.count("\n")) == (0, 1) and "comm_strategy = 'alltoall' has no effect" in err
    assert list(rows) == list(setting_fields())
    assert rows["crop"] == {"value": True, "default": False, "from": "config/config.toml:1", "because": ""}
    assert rows["mixed_precision"]["because"] == "written `fp32`"
    assert rows["lr_scheduler"]["because"] == ""
    assert rows["context_parallel_comm_strategy"]["because"] == "reset, since context_parallel_size = 1 turns it off"
    assert rows["model_family"]["from"] == "flag"
    assert {row["from"] for name, row in rows.items() if row["value"] == row["default"]} <= {"default", "flag"}


def test_show_prints_what_is_set_and_how_much_is_not(run):
    flags = ("--seed=42", "--learning_rate=0.5", "--resolution=64", "--max_grad_norm=3.5")
    _, out, err = run("config", "show", "--json", *flags)
    rows = json.loads(out)
    assert list(rows) == ["resolution", "seed", "learning_rate", "max_grad_norm"] and not err
    assert out.count('"value": 64,') == out.count('"value": 3.5,') == 1, "whole numbers as people write them"
    _, out, err = run("config", "show", *flags)
    assert [line.split()[0] for line in out.splitlines() if line.strip()][2:] == list(rows)
    assert err == f"{len(setting_fields()) - 4} settings at their default: `--all` shows them, too\n"


def test_show_prints_a_table_with_every_setting_on_its_line(run):
    code, out, err = run("config", "show", "--all", "--instance_prompt=a\nb [bold]x", "--learning_rate=2e-5")
    assert code == 0 and err.startswith("warning: instance_prompt = ")
    lines = [line.split() for line in out.splitlines() if line.strip()]
    assert lines[0] == ["setting", "value", "from", "because"]
    assert {"learning_rate", "2e-05", "flag"} <= {word for line in lines for word in line}
    assert [name for name in setting_fields() if not any(line[:1] == [name] for line in lines)] == []
    assert "[bold]x" in out


def trainable_flavours() -> list[tuple[str, str]]:
    """Return every family with its default flavour, unless that one cannot be trained, and with its tiny one."""
    defaults = {key: flavour_of(Model(model_family=key)) for key, preset in presets().items() if preset.family_class}
    started = [(key, "") for key, flavour in defaults.items() if flavour and not flavour.untrainable]
    return started + [(key, TINY) for key in defaults if presets()[key].tiny]


@pytest.mark.parametrize(("family", "flavour"), trainable_flavours())
@pytest.mark.parametrize("count", [1, 8])
def test_init_writes_a_file_that_loads_and_validates(run, family, count, flavour):
    flags = [
        f"--model_family={family}",
        f"--num_processes={count}",
        *([f"--model_flavour={flavour}"] if flavour else []),
    ]
    code, out, err = run("config", "init", *flags)
    assert (code, out) == (0, "")
    assert err.startswith("config/config.toml is written")
    text = Path("config/config.toml").read_text()
    assert "None" not in text, "an empty default is no value"
    settings = load({}).settings
    assert (settings.model.model_family, settings.model.model_flavour) == (family, flavour)
    assert (settings.launch.num_processes, settings.parallel.fsdp_enable) == (count, count > 1)
    Path("pictures").mkdir()
    Path("pictures", "a.png").touch()
    assert run("config", "validate", "config/config.toml")[0] == 0
    named = re.findall(r"^(?:# )?(\w+) = ", text, re.MULTILINE)
    assert len(named) == len(set(named)) >= 20
    uncommented = re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE)
    Path("all.toml").write_text(uncommented)
    assert load({}, Path("all.toml")).settings == settings, "what is commented out is the default"


def test_init_says_which_flavours_can_be_trained_where_the_default_cannot(run):
    code, _, err = run("config", "init", "--model_family=z_image")
    assert code == 2 and "use turbo, and name the adapter's file with assistant_lora" in err
    assert not Path("config").exists()


def test_init_never_writes_over_a_file_unless_told_to(run):
    write("config/config.toml", "seed = 1\n")
    code, _, err = run("config", "init", "--model_family=sdxl")
    assert code == 2
    assert "exists already" in err
    assert Path("config/config.toml").read_text() == "seed = 1\n"
    assert run("config", "init", "--model_family=sdxl", "--output=new/c.toml")[0] == 0
    assert run("config", "init", "--model_family=sdxl", "--force")[0] == 0
    new, forced = (Path(name).read_text() for name in ("new/c.toml", "config/config.toml"))
    assert new.replace('output/c"', 'output/config"') == forced != "seed = 1\n"


def test_validate_accepts_what_train_would_and_leaves_other_sources_out(run, monkeypatch):
    write("good.json", '{"--model_family": "sdxl", "--instance_data_dir": "pictures", "accelerate_config": "a.yaml"}')
    write("a.yaml", "distributed_type: MULTI_GPU\nnum_processes: 2\ntpu_name: x\n")
    write("config/config.env", "SEED=wrong\n")
    monkeypatch.setenv("SIMPLETUNER_SEED", "wrong, too")
    Path("pictures").mkdir()
    Path("pictures", "a.png").touch()
    code, out, err = run("config", "validate", "good.json")
    assert (code, out) == (0, "")
    assert "a.yaml:3: tpu_name = 'x' is not used: TPUs are not supported" in err
    assert "good.json: 3 settings, all valid" in err
    code, out, err = run("config", "validate", "good.json", "--json")
    found = json.loads(out)
    assert (code, err, found["valid"], found["settings"]) == (0, "", True, 3) and "tpu_name" in str(found["warnings"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model_family": "sdxl"}', "no images"),
        ('{"model_family": "sdlx", "instance_data_dir": "x"}', "did you mean `sdxl`"),
        ('{"model_family": "pixart_sigma", "instance_data_dir": "x", "model_type": "lora"}', "cannot load a LoRA"),
        ('{"model_family": "sdxl", "instance_data_dir": "x", "seed": -1}', "c.json:1"),
    ],
)
def test_validate_refuses_what_train_would_refuse(run, text, said):
    write("c.json", text)
    code, out, err = run("config", "validate", "c.json")
    assert (code, out) == (2, "")
    assert said in err
    code, out, err = run("config", "validate", "c.json", "--json")
    found = json.loads(out)
    assert (code, err, found["valid"]) == (2, "", False) and said in " ".join([*found["mistakes"], found["hint"]])


def test_validate_looks_for_the_pictures_as_train_would(run):
    write("c.json", '{"model_family": "sdxl", "instance_data_dir": "gone"}')
    code, _, err = run("config", "validate", "c.json")
    assert (code, "there is no folder 'gone' [instance_data_dir: c.json:1]" in err) == (4, True)
    write("c.json", '{"model_family": "sdxl", "instance_data_dir": ".", "flow_schedule_shift": 1}')
    code, _, err = run("config", "validate", "c.json")
    assert (code, "has no effect with model_family=sdxl: it is for flow matching" in err) == (0, True)


def test_what_train_refuses_is_not_exported_and_what_runs_otherwise_is_exported_as_it_runs(run):
    split = ("--context_parallel_size=2", "--num_processes=2", "--fsdp_enable")
    code, out, err = run("config", "export", "--to=json", *ENOUGH, *split)
    assert (code, out) == (2, "") and "sdxl cannot be split" in err
    code, out, err = run("config", "export", "--to=json", "--model_family=flux", "--instance_data_dir=x", *split)
    assert (code, json.loads(out)["context_parallel_size"]) == (0, 2)
    code, out, err = run("config", "export", "--to=json", *ENOUGH, "--fsdp_enable", "--fsdp_version=1")
    assert (code, json.loads(out)["fsdp_version"]) == (0, 2)


def test_values_of_other_tools_are_answered_with_the_reason(run):
    code, _, err = run("config", "show", "--optimizer=adamw8bit", "--report_to=comet_ml")
    assert (
        code == 2
        and "state_layout=split has moments of 8 bits" in err
        and "comet_ml is not supported; use one or several of tensorboard,wandb,trackio,swanlab" in err
    )


def test_export_writes_data_to_stdout_and_how_to_replay_it_to_stderr(run):
    code, out, err = run("config", "export", "--to=json", *ENOUGH)
    assert (code, json.loads(out)) == (0, {"model_family": "sdxl", "instance_data_dir": "pictures"})
    assert err == "replay with:\nsimpletuner train --config=settings.json\n"
    code, out, err = run("config", "export", "--to=toml", "--output=a b/c.toml", *ENOUGH)
    assert (code, out) == (0, "")
    assert err == "replay with:\nsimpletuner train --config='a b/c.toml'\n"
    assert Path("a b/c.toml").read_text() == 'model_family = "sdxl"\ninstance_data_dir = "pictures"\n'
    assert run("config", "export", "--to=cli", "--seed=1") == (0, "simpletuner train --seed=1\n", "")


def test_export_keeps_a_default_that_a_weaker_source_could_change(run):
    _, out, _ = run("config", "export", "--to=json", "--seed=42")
    assert json.loads(out) == {"seed": 42}
    _, out, _ = run("config", "export", "--to=json", "--all")
    assert list(json.loads(out)) == list(setting_fields())


IMPORTED = """
import sys
from simpletuner.app import main
try:
    main(sys.argv[2:])
except SystemExit as error:
    assert not error.code, error.code
print("imported", [name for name in sys.argv[1].split(",") if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["config", "--help"],
        ["config", "show", "--json"],
        ["config", "show"],
        ["config", "validate", "c.yaml"],
        ["config", "import", "c.yaml"],
        ["config", "schema"],
        ["config", "docs"],
        ["config", "init", "--model_family=flux", "--output=new.toml"],
        *(["config", "export", f"--to={to}"] for to in ("cli", "json", "toml", "yaml", "env", "slurm", "kubernetes")),
        ["config", "export", "--to=accelerate", "--fsdp_enable"],
        ["config", "export", "--to=deepspeed", "--zero_stage=2"],
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(arguments):
    Path("pictures").mkdir()
    Path("pictures", "a.png").touch()
    write("c.yaml", "model_family: sdxl\ninstance_data_dir: pictures\n")
    write("a.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 2\n")
    environment = {**os.environ, "SIMPLETUNER_ACCELERATE_CONFIG": "none" if "deepspeed" in str(arguments) else "a.yaml"}
    command = [sys.executable, "-c", IMPORTED, ",".join(HEAVY), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    assert done.stderr.splitlines()[-1] == "imported []", done.stderr
