from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from simpletuner import __version__
from simpletuner.app import main
from simpletuner.commands.shell.scripts import LINE, PROGRAMS
from simpletuner.errors import ExitCode
from simpletuner.extras import OTHER_PROGRAM
from simpletuner.models.catalog.registry import presets
from simpletuner.settings.declared.sections import setting_fields

HEAVY = ("torch", "numpy", "accelerate", "diffusers", "transformers", "deepspeed", "PIL")
SCRIPTS = Path(sys.executable).parent

ENOUGH = ("--model_family=sdxl", "--instance_data_dir=pictures")


def start(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True, timeout=PATIENCE)


def ended(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the command line in this process; return exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


IMPORTED = """
import sys
from simpletuner.app import main
code = 0
try:
    main(sys.argv[2:])
except SystemExit as error:
    code = error.code
found = [name for name in sys.argv[1].split(",") if name in sys.modules]
print("exit", code, "imported", found, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["train", "--help"], 0),
        (["completion", "zsh"], 0),
        (["train", *ENOUGH, "--seed=x"], 2),
        (["train", "--model_family=sdlx", "--instance_data_dir=x"], 2),
        (["cache", "list"], 0),
        (["cache", "clear", "all", "--dry_run"], 0),
    ],
)
def test_help_and_mistakes_are_answered_without_heavy_imports(tmp_path, arguments, code):
    done = start(sys.executable, "-c", IMPORTED, ",".join(HEAVY), *arguments, folder=tmp_path)
    assert done.stderr.splitlines()[-1] == f"exit {code} imported []"


def test_a_tab_is_answered_without_heavy_imports(tmp_path, monkeypatch):
    monkeypatch.setenv(LINE, "simpletuner train --model_family=")
    done = start(sys.executable, "-c", IMPORTED, ",".join(HEAVY), "train", "--seed=x", folder=tmp_path)
    assert done.stderr == "exit 0 imported []\n"
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == [
        f"--model_family={name}" for name in [*presets(), "auto"]
    ]


def test_its_end_collects_no_garbage(tmp_path):
    at_the_end = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count()))"  # the first one is the last
    done = start(sys.executable, "-c", f"{at_the_end}\n{IMPORTED}", "", "--version", folder=tmp_path)
    assert int(done.stdout.split()[-1]) > 10_000


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_calls_itself_by_its_own_name(tmp_path, program):
    done = start(SCRIPTS / program, "--help", folder=tmp_path)
    assert done.stdout.split()[:2] == ["Usage:", program]


@pytest.mark.parametrize(
    "command",
    [
        (SCRIPTS / "simpletuner", "train"),
        (SCRIPTS / "simpletuner-train",),
        (sys.executable, "-m", "simpletuner", "train"),
    ],
)
def test_every_way_to_start_training_explains_every_setting(tmp_path, command):
    short = start(*command, "--help", folder=tmp_path).stdout
    assert "--instance_data_dir " in short and "--help-all" in short and len(short.splitlines()) < 150
    done = start(*command, "--help-all", folder=tmp_path)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "--config" in done.stdout
    assert [name for name in setting_fields() if f"--{name} " not in done.stdout] == []


def test_the_real_command_ends_with_2_and_one_sentence_on_stderr(tmp_path):
    done = start(SCRIPTS / "simpletuner", "train", *ENOUGH, "--seed=-1", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: seed = '-1' (flag): use a whole number of at least 0\n"
    assert list(tmp_path.iterdir()) == []


def test_help_says_what_the_program_is_for_and_lists_its_commands(capsys):
    code, out, err = ended(capsys, "--help")
    assert (code, err) == (0, "")
    assert "Fine-tune whole diffusion models" in out
    assert "train" in out


def test_version_is_printed(capsys):
    assert ended(capsys, "--version") == (0, f"{__version__}\n{OTHER_PROGRAM}\n", "")


def test_a_typo_in_a_flag_ends_with_2_and_names_the_flag_that_was_meant(capsys):
    code, out, err = ended(capsys, "train", "--lerning_rate=1")
    assert (code, out) == (2, "")
    assert "--lerning_rate (flag): unknown setting; did you mean `learning_rate`?" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["deepspeed", "build", "--satge=2"], "--stage"),
        (["train", "--dry_rn"], "--dry-run"),
        (["detect-blocks", "--refrehs"], "--refresh"),
        (["config", "show", "--jsno"], "--json"),
        (["cache", "list", "--cnfig=x"], "--config"),
    ],
)
def test_a_typo_in_an_option_of_the_command_names_it_too(capsys, typed, meant):
    code, out, err = ended(capsys, *typed)
    assert (code, out) == (2, "")
    assert f"error: unknown option `{typed[-1].partition('=')[0]}`; did you mean `{meant}`?" in err


def test_a_typo_in_a_command_ends_with_2(capsys):
    code, out, err = ended(capsys, "trian")
    assert (code, out) == (2, "")
    assert "'train'" in err


def test_an_unknown_family_names_the_nearest(capsys):
    code, out, err = ended(capsys, "train", "--model_family=sdlx", "--instance_data_dir=x")
    assert (code, out) == (2, "")
    assert err.splitlines()[0] == "error: Unknown model_family 'sdlx'; did you mean `sdxl`?"
    assert err.splitlines()[-1].startswith("hint: `simpletuner models` lists all families")


def test_an_unknown_flavour_names_the_nearest(capsys):
    code, _, err = ended(capsys, "train", *ENOUGH[1:], "--model_family=flux", "--model_flavour=schnel")
    assert code == 2
    assert "Unknown model_flavour 'schnel' of flux; did you mean `schnell`?" in err


def test_several_mistakes_in_file_and_flags_are_reported_at_once(capsys, tmp_path):
    config = tmp_path / "c.json"
    config.write_text(json.dumps({"--model_family": "sdxl", "--trian_batch_size": 3, "--ema_decay": 2}))
    code, out, err = ended(capsys, "train", f"--config={config}", "--fsdp-enable=perhaps")
    assert (code, out) == (2, "")
    assert f"--trian_batch_size ({config}:1): unknown setting" in err
    assert "did you mean `train_batch_size`?" in err
    assert f"ema_decay = 2 ({config}:1)" in err
    assert "fsdp_enable = 'perhaps' (flag)" in err


@pytest.mark.parametrize(
    "spelling",
    [["--fsdp_enable"], ["--fsdp_enable=true"], ["--fsdp-enable"], ["--fsdp_enable", "true"], ["--fsdp-enable=YES"]],
)
def test_every_spelling_of_a_true_flag_reaches_the_settings(capsys, spelling):
    _, _, err = ended(capsys, "train", *spelling, *ENOUGH, "--zero_stage=2")
    assert "FSDP and DeepSpeed cannot be enabled simultaneously" in err


@pytest.mark.parametrize("spelling", [["--fsdp_enable", "false"], ["--fsdp_enable=no"], []])
def test_every_spelling_of_a_false_flag_reaches_the_settings(capsys, spelling):
    _, _, err = ended(capsys, "train", *spelling, *ENOUGH, "--model_type=lora", "--lora_init=gone")
    assert "lora_init = gone: there is no such file or folder" in err


def test_a_missing_or_damaged_config_file_ends_with_2(capsys, tmp_path):
    code, out, err = ended(capsys, "train", f"--config={tmp_path}/no.toml")
    assert (code, out) == (2, "")
    assert "cannot read" in err
    broken = tmp_path / "c.json"
    broken.write_text("{")
    code, out, err = ended(capsys, "train", f"--config={broken}")
    assert (code, out) == (2, "")
    assert "does not parse" in err


def test_a_sentence_is_printed_as_it_is_however_it_looks_to_rich(capsys):
    _, _, err = ended(capsys, "train", *ENOUGH, "--validation_resolution=[bold]x[/nope]")
    assert "validation_resolution = '[bold]x[/nope]'" in err


def test_debug_shows_the_whole_traceback(monkeypatch):
    monkeypatch.setenv("SIMPLETUNER_DEBUG", "")  # main sets it for the ranks that it starts: undo that afterwards
    with pytest.raises(Exception, match="Unknown model_family") as caught:
        main(["train", "--model_family=sdlx", "--instance_data_dir=x", "--debug"])
    assert caught.value.exit_code == ExitCode.USAGE


def test_exit_codes_are_the_documented_numbers():
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0,
        "BUG": 1,
        "USAGE": 2,
        "ENVIRONMENT": 3,
        "DATA": 4,
        "TRAINING": 5,
        "HANGUP": 129,
        "INTERRUPTED": 130,
        "TERMINATED": 143,
    }
