"""One setting is set in a user's file, and everything else in it stays as it was, to the letter."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from generated_settings import NOWHERE, loaded_settings
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from simpletuner.errors import SettingsError
from simpletuner.settings import Loaded, Settings, load
from simpletuner.settings.editing import set_in_file
from simpletuner.settings.export import export

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
        ("c.toml", f'{KNOB} = """\nold"""\n', "cannot be edited without risk"),
        ("c.yaml", f"{KNOB}: >\n  old\n# c\nseed: 1\n", "cannot be edited without risk"),
        ("c.yaml", f"a: &x old\n{KNOB}: *x\n", "cannot be edited without risk"),
        ("c.yaml", f"x: &x\n  {KNOB}: old\n<<: *x\n", "cannot be edited without risk"),
        ("c.yaml", f"{KNOB}:\n  a: 1\nseed: 1\n", "cannot be edited without risk"),
        ("c.toml", f"seed = 1\n[{KNOB}]\na = 1\n", "cannot be edited without risk"),
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
    (tmp_path / ".c.toml.unfinished").mkdir()
    (tmp_path / "c.toml").write_text("seed = 1\n")
    with pytest.raises(SettingsError, match="cannot write .*c.toml: Is a directory"):
        set_in_file(tmp_path / "c.toml", KNOB, VALUE)


def test_a_value_that_formats_write_differently_is_refused(tmp_path):
    (tmp_path / "c.env").write_text("SEED=1\n")
    with pytest.raises(SettingsError, match=r"`\$HOME` is not put into a file"):
        set_in_file(tmp_path / "c.env", KNOB, "$HOME")


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


def settings_in(path: Path) -> Settings:
    return load({}, path, complete=False, environment=NOWHERE).settings


@pytest.mark.parametrize("to", ["json", "toml", "yaml", "env"])
@given(loaded=loaded_settings(), everything=st.booleans(), draw=st.data())
@hypothesis_settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_file_loads_as_before_plus_what_was_set(tmp_path, monkeypatch, to, loaded, everything, draw):
    monkeypatch.chdir(tmp_path)
    path = saved(loaded, to, everything, draw)
    try:
        before = settings_in(path)
    except SettingsError:  # a comment in the middle of a value
        assume(False)
    old = path.read_bytes().decode()
    standing = before.parallel.fsdp_transformer_layer_cls_to_wrap
    try:
        set_in_file(path, KNOB, VALUE)
    except SettingsError:
        assert path.read_bytes().decode() == old and not standing.isalnum(), "only odd values are refused"
        return
    parallel = before.parallel.model_copy(update={KNOB: VALUE})
    assert settings_in(path) == before.model_copy(update={"parallel": parallel})
    new = path.read_bytes().decode()
    start = len(os.path.commonprefix([old, new]))
    end = len(old) - len(os.path.commonprefix([old[start:][::-1], new[start:][::-1]]))
    assert len(old[start:end]) <= 12 * len(standing) + 2, "nothing but the value is replaced"
