"""One setting is set in a user's file, and everything else in it stays as it was, to the letter."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from generated_settings import NOWHERE, loaded_settings
from hypothesis import HealthCheck, assume, event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from simpletuner.errors import SettingsError
from simpletuner.settings import Loaded, Settings, load
from simpletuner.settings.editors.editing import as_read, change_text, set_in_file, setting_of
from simpletuner.settings.editors.text_editors import REMOVED
from simpletuner.settings.files.formats import read_entries
from simpletuner.settings.resolving.loading import settings_as_json
from simpletuner.settings.showing.export import export

KNOB, VALUE = "fsdp_transformer_layer_cls_to_wrap", "BlockA,BlockB"
COMMENTS = ("# a comment\n", f"# {KNOB} = 'no'\n", "\n", "   # [table]\n", "#'''\n")


def edited(path: Path, text: str) -> str:
    path.write_bytes(text.encode())
    assert set_in_file(path, KNOB, VALUE)
    return path.read_bytes().decode()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("c.json", "{}", f'{{\n  "{KNOB}": "{VALUE}"\n}}'),
        ("c.json", '{"seed":1}', f'{{"seed":1, "{KNOB}":"{VALUE}"}}'),
        ("c.json", '{\r\n\t"seed" : 1\r\n}\r\n', f'{{\r\n\t"seed" : 1,\r\n\t"{KNOB}" : "{VALUE}"\r\n}}\r\n'),
        ("c.json", '{\n  "--a": {"b": [1]},\n  "--seed": 1\n}', f'"--seed": 1,\n  "--{KNOB}": "{VALUE}"\n}}'),
        ("c.json", '{"--FSDP-transformer-layer-cls-to-wrap": null, "a": "{"}', f'wrap": "{VALUE}", "a": "{{"}}'),
        ("c.json", f'\ufeff{{"{KNOB}": "\\"old\\"" }}', f'\ufeff{{"{KNOB}": "{VALUE}" }}'),
        ("c.toml", "", f'{KNOB} = "{VALUE}"\n'),
        ("c.toml", "seed = 1 # one", f'seed = 1 # one\n{KNOB} = "{VALUE}"\n'),
        ("c.toml", "seed = 1\r\n\r\n# zero\r\n[deepspeed_config]\r\n", f'seed = 1\r\n{KNOB} = "{VALUE}"\r\n\r\n# zero'),
        ("c.toml", "# top\n[deepspeed_config]\na = 1\n", f'# top\n{KNOB} = "{VALUE}"\n[deepspeed_config]\na = 1\n'),
        ("c.toml", "validation_prompt = [\n[1],\n]\n[a]\n", f']\n{KNOB} = "{VALUE}"\n[a]\n'),
        ("c.toml", f'a = """\n{KNOB} = "x"\n"""\n"{KNOB}"=\'o#d\' # c\n', f'\n"{KNOB}"="{VALUE}" # c\n'),
        ("c.toml", "a = 'x\u2028[b]'\n", f"a = 'x\u2028[b]'\n{KNOB} = \"{VALUE}\"\n"),
        ("c.yaml", "# only\n", f'# only\n{KNOB}: "{VALUE}"\n'),
        ("c.yaml", "  seed: 1\n  # end\n", f'  # end\n  {KNOB}: "{VALUE}"\n'),
        ("c.yaml", "---\nseed: 1\n...\n", f'---\n{KNOB}: "{VALUE}"\nseed: 1\n...\n'),
        ("c.yaml", "{seed: 1, }\n", f'{{seed: 1, {KNOB}: "{VALUE}"}}\n'),
        ("c.yml", f"{KNOB}: old # why\nseed: 1\n", f'{KNOB}: "{VALUE}" # why\nseed: 1\n'),
        ("c.yaml", "seed: 1\na: |+\n  x\n\n", f'  x\n\n{KNOB}: "{VALUE}"\n'),
        ("c.env", "", f'SIMPLETUNER_{KNOB.upper()}="{VALUE}"\n'),
        ("c.env", "SEED=1", f'SEED=1\n{KNOB.upper()}="{VALUE}"\n'),
        ("c.env", "export SIMPLETUNER_SEED=1 # x\n", f'# x\nexport SIMPLETUNER_{KNOB.upper()}="{VALUE}"\n'),
        ("c.env", f"A='\n{KNOB}=x'\n{KNOB}= # none\nB=1\n", f'{KNOB}="{VALUE}" # none\nB=1\n'),
    ],
)
def test_the_style_of_the_file_is_kept(tmp_path, name, text, expected):
    path = tmp_path / name
    new = edited(path, text)
    assert expected in new
    assert new.count(VALUE) == 1 and len(new) >= len(text)
    assert not set_in_file(path, KNOB, VALUE), "it is there already"
    assert path.read_bytes().decode() == new


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.yaml", f"a: &x old\n{KNOB}: *x\n", "cannot be edited without risk"),
        ("c.yaml", f"x: &x\n  {KNOB}: old\n<<: *x\n", "cannot be edited without risk"),
        ("c.env", "SEED=1\\\n", "cannot be edited without risk"),
        ("c.json", f'{{"{KNOB}": "a",\n"--{KNOB}": "b"}}', f"sets {KNOB} twice, in lines 1 and 2"),
        ("c.json", '{"a": }', "does not parse"),
        ("c.txt", "a", "settings are read from"),
    ],
)
def test_what_cannot_be_edited_is_refused_and_stays(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(SettingsError) as error:
        set_in_file(path, KNOB, VALUE)
    assert said in error.value.message and error.value.hint
    assert path.read_text() == text and [path] == list(tmp_path.iterdir())


def test_a_file_that_is_not_there_or_not_to_be_written_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="cannot read"):
        set_in_file(tmp_path / "no.toml", KNOB, VALUE)
    path = tmp_path / f"{'c' * 245}.toml"  # the name that it is written under is longer
    path.write_text("seed = 1\n")
    with pytest.raises(SettingsError, match="cannot write .*c.toml: File name too long"):
        set_in_file(path, KNOB, VALUE)


CONFIG = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "names": ["a,b", "#"]}, "b c": None}


@pytest.mark.parametrize(
    ("name", "text", "changes", "expected"),
    [
        ("c.toml", f'{KNOB} = """\nold"""  # why\n', {KNOB: "A"}, f'{KNOB} = "A"  # why\n'),
        (
            "c.toml",
            "seed = 1 # one\nlr_end = [\n 1, # a ]\n] # b\n",
            {"lr_end": 1e-5},
            "seed = 1 # one\nlr_end = 1e-05 # b\n",
        ),
        (
            "c.toml",
            f"seed = 1\n[{KNOB}]\na = 1\n# c\n\n# d\n[b]\n",
            {KNOB: "A"},
            f'seed = 1\n{KNOB} = "A"\n# c\n\n# d\n[b]\n',
        ),
        (
            "c.toml",
            "# a\nseed = 1 # one\n# b\ncrop = true\n",
            {"seed": REMOVED, "crop": False},
            "# a\n# b\ncrop = false\n",
        ),
        ("c.toml", "ema_decay.a = 1\nseed = 1\nema_decay.b = 2\n", {"ema_decay": REMOVED}, "seed = 1\n"),
        (
            "c.toml",
            "seed = 1\n[deepspeed_config]\na = 1\n[deepspeed_config.b]\nc = 2\n\n# end\n",
            {"deepspeed_config": REMOVED},
            "seed = 1\n\n# end\n",
        ),
        (
            "c.toml",
            "seed = 1\n",
            {"snr_gamma": None, "validation_prompt": ["it's", "a\nb"]},
            'seed = 1\nsnr_gamma = "none"\nvalidation_prompt = ["it\'s", "a\\nb"]\n',
        ),
        ("c.yaml", f"{KNOB}: >\n  old\n# c\nseed: 1\n", {KNOB: "A"}, f'{KNOB}: "A"\n# c\nseed: 1\n'),
        ("c.yaml", f"{KNOB}:\n  a: 1 # one\n# c\nseed: 1\n", {KNOB: "A"}, f'{KNOB}: "A" # one\n# c\nseed: 1\n'),
        (
            "c.yaml",
            "seed:\ncrop: true # yes\n",
            {"seed": 5, "crop": REMOVED, "lr_end": 1e-5},
            "seed: 5\nlr_end: 1.0e-05\n",
        ),
        (
            "c.yaml",
            "# a\nvalidation_prompt: # b\n- x\n- y # c\n\n# d\nseed: 1\n",
            {"validation_prompt": REMOVED},
            "# a\n\n# d\nseed: 1\n",
        ),
        ("c.yaml", "{seed: 1, crop: true}\n", {"crop": REMOVED}, "{seed: 1}\n"),
        ("c.yaml", "seed: 1\n", {"seed": REMOVED}, ""),
        (
            "c.json",
            '{\n  "seed": 1,\n  "crop": true,\n  "a": {}\n}\n',
            {"crop": REMOVED, "seed": 2},
            '{\n  "seed": 2,\n  "a": {}\n}\n',
        ),
        ("c.json", '{"a": 1, "--seed": 1}', {"seed": REMOVED}, '{"a": 1}'),
        ("c.json", '{ "seed": 1 }', {"seed": REMOVED}, "{}"),
        (
            "c.json",
            '{\n  "seed": 1\n}',
            {"deepspeed_config": {"a": {"b": 1}}},
            '{\n  "seed": 1,\n  "deepspeed_config": {\n    "a": {\n      "b": 1\n    }\n  }\n}',
        ),
        ("c.env", "A=1\nexport SEED=1 # one\nB=$A\n", {"seed": REMOVED, "crop": True}, 'A=1\nB=$A\nCROP="true"\n'),
        ("c.env", "SEED=1\n", {KNOB: "$HOME"}, f"SEED=1\n{KNOB.upper()}='$HOME'\n"),
    ],
)
def test_every_kind_of_value_and_removing(tmp_path, name, text, changes, expected):
    path = tmp_path / name
    path.write_text(text)
    assert change_text(path, text, changes) == expected
    assert change_text(path, expected, changes) == expected, "it says so already"
    assert change_text(path, "\ufeff" + text, changes) == "\ufeff" + expected


@pytest.mark.parametrize("name", ["c.json", "c.toml", "c.yaml", "c.env"])
def test_a_table_replaces_text_and_text_a_table(tmp_path, name):
    path = tmp_path / name
    old = "{}" if name == "c.json" else ""
    table = change_text(path, old, {"deepspeed_config": CONFIG, "seed": 1})
    assert change_text(path, table, {"deepspeed_config": "ds.json"}).count("ds.json") == 1
    assert change_text(path, table, {"deepspeed_config": REMOVED}) == change_text(path, old, {"seed": 1})
    # A variable that another line uses cannot go.
    if name == "c.env":
        with pytest.raises(SettingsError, match="without risk"):
            change_text(path, "SEED=1\nMAX_TRAIN_STEPS=$SEED\n", {"seed": REMOVED})


def test_the_mode_and_a_link_stay(tmp_path):
    (tmp_path / "real.toml").write_text("seed = 1\n")
    (tmp_path / "real.toml").chmod(0o640)
    (tmp_path / "link.toml").symlink_to("real.toml")
    set_in_file(tmp_path / "link.toml", KNOB, VALUE)
    assert (tmp_path / "link.toml").is_symlink()
    assert (tmp_path / "real.toml").stat().st_mode & 0o777 == 0o640
    assert VALUE in (tmp_path / "real.toml").read_text()


def saved(loaded: Loaded, to: str, everything: bool, draw: st.DataObject) -> Path:
    """Write settings with comments where the format has them, or with another layout."""
    exported = export(loaded, to, everything)
    path, text = Path(exported.name), exported.text
    if to == "json":
        values = {draw.draw(st.sampled_from(["", "--"])) + key: value for key, value in json.loads(text).items()}
        text = json.dumps(values, indent=draw.draw(st.sampled_from([None, 1, "\t"])))
    else:
        lines = text.splitlines(keepends=True)
        for _ in range(draw.draw(st.integers(0, 4))):
            lines.insert(draw.draw(st.integers(0, len(lines))), draw.draw(st.sampled_from(COMMENTS)))
        text = "".join(lines)
    newline = draw.draw(st.sampled_from(["\n", "\r\n"]))
    path.write_bytes(text.replace("\n", newline).encode())
    return path


def values_by_name(path: Path) -> dict[str, Any]:
    return {str(setting_of(path, entry)): entry.value for entry in read_entries(path)}


def settings_in(path: Path) -> Settings:
    return load({}, path, complete=False, environment=NOWHERE).settings


@pytest.mark.parametrize("to", ["json", "toml", "yaml", "env"])
@given(loaded=loaded_settings(), changed=loaded_settings(), everything=st.booleans(), draw=st.data())
@hypothesis_settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_file_says_as_before_what_was_not_changed(tmp_path, monkeypatch, to, loaded, changed, everything, draw):
    """Set some settings to those of another run, and remove some: every line without them stays as it was."""
    monkeypatch.chdir(tmp_path)
    path = saved(loaded, to, everything, draw)
    old = path.read_bytes().decode()
    try:
        before = {
            entry.key.lstrip("-").lower().removeprefix("simpletuner_"): entry.value for entry in read_entries(path)
        }
    except SettingsError:  # a comment in the middle of a value
        assume(False)
    values = settings_as_json(changed)
    names = draw.draw(st.lists(st.sampled_from(sorted({*changed.origins, *before, "seed"})), unique=True, max_size=4))
    changes = {name: draw.draw(st.sampled_from([REMOVED, values[name]])) for name in names}
    try:
        new = change_text(path, old, changes)
    except SettingsError as error:
        assert "without risk" in error.message
        event("refused")
        return
    path.write_bytes(new.encode())
    expected = {name: value for name, value in before.items() if name not in changes}
    expected |= {name: as_read(path, value) for name, value in changes.items() if value is not REMOVED}
    assert values_by_name(path) == expected
    in_values = {line for value in before.values() for line in str(value).splitlines()}  # text, though it begins with #
    comments = [line for line in old.splitlines() if line.lstrip().startswith("#") and line not in in_values]
    assert not Counter(comments) - Counter(new.splitlines())
