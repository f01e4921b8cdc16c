"""A secret is written as a reference to where it is, and read again from there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from simpletuner.app import main
from simpletuner.settings import load, settings_as_json
from simpletuner.settings.declared.errors import mask_arguments, shorten
from simpletuner.settings.showing.export import FORMATS, export

HOOK = "https://hooks.example.org/services/T0/whoever-knows-this-posts"
SECRET = "whoever-knows-this-posts"
VARIABLE = "SIMPLETUNER_NOTIFY_URL"
NOWHERE = {"SIMPLETUNER_ACCELERATE_CONFIG": "none"}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)


def hook(flags: dict[str, str], config: Path | None = None, **environment: str) -> tuple[str, str]:
    """Return the secret that a run uses, and what its files hold."""
    loaded = load(flags, config, complete=False, environment=NOWHERE | environment)
    return loaded.settings.logging.notify_url.get_secret_value(), settings_as_json(loaded)["notify_url"]


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("run.toml", f'notify_url = "{HOOK}"', "notify_url"),
        ("run.json", json.dumps({"--notify-url": HOOK}), "--notify-url"),
        ("run.yaml", f"notify_url: {HOOK}", "notify_url"),
        ("config/config.env", f"{VARIABLE}={HOOK}", VARIABLE),
        ("dir with #/run.toml", f'notify_url = "{HOOK}"', "notify_url"),
    ],
)
def test_of_a_file_the_file_and_its_key_are_written_and_the_secret_is_read_from_there(name, text, key, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    config = None if path.suffix == ".env" else path
    reference = f"{{file:{path}#{key}}}"
    assert hook({}, config) == (HOOK, reference)
    assert hook({"notify_url": reference}) == (HOOK, reference), "a replay of a replay says the same"


def test_of_the_environment_and_of_a_command_line_a_variable_is_written(monkeypatch, capsys):
    reference = f"{{env:{VARIABLE}}}"
    assert hook({"notify_url": HOOK}) == hook({}, **{VARIABLE: HOOK}) == (HOOK, reference)
    Path("settings.json").write_text(json.dumps({"notify_url": reference}))
    with pytest.raises(SystemExit, match="2"):
        main(["config", "show", "--config=settings.json"])
    assert (
        f"notify_url = '{reference}' (settings.json:1): {reference}: there is no {VARIABLE}" in capsys.readouterr().err
    )
    monkeypatch.setenv(VARIABLE, HOOK)
    monkeypatch.setenv("OTHER", HOOK)
    assert hook({}, Path("settings.json")) == (HOOK, reference)
    assert hook({"notify_url": "{env:OTHER}"}) == (HOOK, "{env:OTHER}")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (f"ftp://{SECRET}", "notify_url = ... (flag): use an address such as"),
        ("{file:gone.toml#notify_url}", "gone.toml: No such file"),
        ("{file:here.toml#hook}", "here.toml has no hook"),
    ],
)
def test_a_mistake_says_where_the_secret_is_looked_for_and_not_what_it_is(value, said, capsys):
    Path("here.toml").write_text(f'notify_url = "{HOOK}"\n')
    with pytest.raises(SystemExit, match="2"):
        main(["config", "show", f"--notify_url={value}"])
    error = capsys.readouterr().err
    assert said in error and SECRET not in error


@pytest.mark.parametrize("to", [*FORMATS])
@pytest.mark.parametrize("given", ["flag", "environment", "file"])
def test_no_export_and_no_explanation_holds_the_secret_and_what_does_replays(to, given, monkeypatch, capsys):
    flags = ["--model_family=sdxl", "--zero_stage=2"]
    if given == "file":
        Path("own.toml").write_text(f'notify_url = "{HOOK}"\n')
        flags.append("--config=own.toml")
    elif given == "environment":
        monkeypatch.setenv(VARIABLE, HOOK)
    else:
        flags.append(f"--notify_url={HOOK}")
    for command in (["config", "show"], ["config", "show", "--json"], ["config", "export", f"--to={to}"]):
        with pytest.raises(SystemExit, match="0"):
            main([*command, *flags])
        said = "".join(capsys.readouterr())
        assert (SECRET not in said and VARIABLE in said.upper()) or "own.toml#notify_url" in said
    if to in ("json", "toml", "yaml", "env"):
        monkeypatch.setenv(VARIABLE, HOOK)
        with pytest.raises(SystemExit, match="0"):
            main(["config", "export", f"--to={to}", "--output=exported." + to, *flags])
        assert hook({}, Path(f"exported.{to}"), **{VARIABLE: HOOK} if to == "env" else {})[0] == HOOK


def test_variables_that_a_shell_reads_keep_the_secret_that_it_has(tmp_path):
    text = export(load({"notify_url": HOOK}, complete=False, environment=NOWHERE), "env").text
    script = f"set -a\n{text}exec {sys.executable} -c 'import os; print(os.environ[\"{VARIABLE}\"])'"
    done = subprocess.run(["bash", "-c", script], env={VARIABLE: HOOK}, capture_output=True, text=True)
    assert done.stdout.strip() == HOOK, done.stderr


def test_secrets_are_masked_on_a_command_line_and_inside_of_values_before_these_are_shortened():
    typed = [
        "train",
        f"--Notify-URL={HOOK}",
        "--notify_url",
        HOOK,
        "--seed=1",
        "--notify_url={env:X}",
        "http://a:b@c/d",
    ]
    shown = ["train", "--Notify-URL=...", "--notify_url", "...", "--seed=1", "--notify_url={env:X}", "http://...@c/d"]
    assert mask_arguments(typed) == shown
    nested = {"webhook": {"url": HOOK}, "list": [{"hub_token": "hf_1"}], "seed": 1}
    assert shorten(nested) == '{"webhook": "...", "list": [{"hub_token": "..."}], "seed": 1}'
    assert "pass" not in shorten(f"https://me:{'pass' * 30}@example.org")
