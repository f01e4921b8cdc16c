"""Whatever is exported and replayed gives the same settings."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from generated_settings import HOOK, NOWHERE, loaded_settings
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from simpletuner.app import main
from simpletuner.settings import Loaded, Settings, load, settings_as_json
from simpletuner.settings.files.formats import env_entries
from simpletuner.settings.showing.clusters import CLUSTERS, Exported
from simpletuner.settings.showing.export import export

OFTEN = hypothesis_settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
SELDOM = hypothesis_settings(OFTEN, max_examples=25)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """No config of this repository is found; the environment has what a secret refers to."""
    monkeypatch.chdir(tmp_path)
    for name, value in HOOK.items():
        monkeypatch.setenv(name, value)


def saved(exported: Exported) -> Path:
    path = Path(exported.name)
    path.write_bytes(exported.text.encode())
    return path


def from_file(exported: Exported) -> Settings:
    return load({}, saved(exported), complete=False, environment=NOWHERE).settings


def from_config_env(exported: Exported) -> Settings:
    folder = Path("config")
    folder.mkdir(exist_ok=True)
    (folder / "config.env").write_bytes(exported.text.encode())
    try:
        return load({}, complete=False, environment=NOWHERE).settings
    finally:
        (folder / "config.env").unlink()


def from_variables(exported: Exported) -> Settings:
    variables = {entry.key: entry.value for entry in env_entries(exported.text)}
    return load({}, complete=False, environment=NOWHERE | variables).settings


@pytest.mark.parametrize(
    ("to", "replayed"),
    [
        ("json", from_file),
        ("toml", from_file),
        ("yaml", from_file),
        ("env", from_file),
        ("env", from_config_env),
        ("env", from_variables),
    ],
)
@given(loaded=loaded_settings(), everything=st.booleans())
@OFTEN
def test_what_is_exported_to_a_file_loads_as_the_same_settings(
    to: str, replayed: Callable[[Exported], Settings], loaded: Loaded, everything: bool
):
    assert replayed(export(loaded, to, everything)) == loaded.settings


def shown(words: list[str]) -> dict[str, Any]:
    """Give the words after `simpletuner train` to the real command line; return the settings that it understood."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        main(["config", "show", "--all", "--json", *words[words.index("train") + 1 :]])
    return {name: row["value"] for name, row in json.loads(out.getvalue()).items()}


@given(loaded=loaded_settings(), everything=st.booleans())
@SELDOM
def test_an_exported_command_line_means_the_same_settings(loaded, everything):
    assert shown(export(loaded, "cli", everything).command) == settings_as_json(loaded)


@given(loaded=loaded_settings(), everything=st.booleans())
@SELDOM
def test_accelerates_file_and_the_flags_beside_it_mean_the_same_settings(loaded, everything):
    from accelerate.commands.config.config_args import load_config_from_file

    exported = export(loaded, "accelerate", everything)
    path = saved(exported)
    assert load_config_from_file(str(path)).num_machines == loaded.settings.launch.num_machines
    assert shown([*exported.command, f"--accelerate_config={path}"]) == settings_as_json(loaded)


@given(loaded=loaded_settings().filter(lambda loaded: loaded.settings.parallel.zero_stage is not None))
@SELDOM
def test_deepspeeds_file_and_the_flags_beside_it_mean_the_same_settings(loaded):
    exported = export(loaded, "deepspeed")
    saved(exported)
    assert shown(exported.command) == settings_as_json(loaded)


@pytest.mark.parametrize(("learning_rate", "lr_end"), [(1.1227972450552087e308, 1e-7), (1.0, 5e-324), (3e-4, 1e-6)])
def test_deepspeeds_file_holds_no_ratio_that_contradicts_the_flag_beside_it(learning_rate, lr_end):
    rates = {"learning_rate": learning_rate, "lr_end": lr_end, "lr_scheduler": "cosine", "max_train_steps": 70}
    loaded = load({"zero_stage": 2, **rates}, complete=False, environment=NOWHERE)
    exported = export(loaded, "deepspeed")
    saved(exported)
    assert shown(exported.command) == settings_as_json(loaded)


@pytest.mark.parametrize("to", ["json", "toml", "yaml", "env", "cli", "accelerate", *CLUSTERS])
def test_an_emptied_list_is_said_since_a_weaker_source_may_fill_it(to):
    loaded = load({"validation_prompt": []}, complete=False, environment=NOWHERE)
    assert "validation_prompt" in export(loaded, to).text.lower()


@pytest.mark.parametrize(
    "sign", ["\x85", "\u2028", "\u2029", "\ufeff", "\x07", "\n", "ä", "\U0001f98a", " ", "null", "~"]
)
@pytest.mark.parametrize("to", ["json", "toml", "yaml", "env"])
def test_signs_that_formats_treat_in_ways_of_their_own_survive_at_any_depth(to, sign):
    inner = {"leaf_module": {"names": [sign, f"a{sign}b"]}}
    values = {
        "zero_stage": 3,
        "deepspeed_config": {"zero_optimization": inner},
        "validation_negative_prompt": f"a{sign}",
    }
    loaded = load(values, complete=False, environment=NOWHERE)
    assert from_file(export(loaded, to)) == loaded.settings
