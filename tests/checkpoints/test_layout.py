from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from simpletuner.checkpoints.layout import (
    chosen,
    clear_unfinished,
    folder_of_step,
    numbered,
    opened,
    prune,
    sizes,
)
from simpletuner.errors import EnvironmentFault, SettingsError
from simpletuner.files import unfinished, write_json


def checkpoint(root: Path, step: int, content: str = "weights") -> Path:
    folder = folder_of_step(root, step)
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "a.safetensors").write_text(content)
    (folder / "model" / "config.json").write_text("{}")
    write_json(folder / "state.json", {"step": step, "files": sizes(folder)})
    return folder


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_checkpoint_lies_in_a_folder_numbered_by_its_step(tmp_path):
    assert folder_of_step(tmp_path, 100).name == "checkpoint-000100"
    assert folder_of_step(tmp_path, 12_345_678).name == "checkpoint-12345678"


def test_checkpoints_are_numbered_newest_first_by_number_not_by_name(tmp_path):
    for step in (20, 9_999_999, 100, 1_000_000):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-9").mkdir()
    for other in ("checkpoint-abc", "checkpoint-5.old", ".checkpoint-000300.unfinished", "notes"):
        (tmp_path / other).mkdir()
    (tmp_path / "checkpoint-000900").write_text("a file")
    steps = [int(path.name.removeprefix("checkpoint-")) for path in numbered(tmp_path)]
    assert steps == [9_999_999, 1_000_000, 100, 20, 9]
    assert numbered(tmp_path / "none") == []


def test_an_opened_checkpoint_knows_its_step_state_and_files(tmp_path):
    folder = checkpoint(tmp_path, 7)
    found = opened(folder)
    assert (found.step, found.folder) == (7, folder)
    assert found.files("model") == [folder / "model" / "a.safetensors"]
    assert found.files("ema") == []
    assert set(found.state["files"]) == {"model/a.safetensors", "model/config.json"}


def test_the_newest_complete_checkpoint_is_chosen(tmp_path):
    for step in (100, 1000, 300):
        checkpoint(tmp_path, step)
    found, passed_over = chosen(tmp_path, "latest")
    assert found is not None
    assert (found.step, passed_over) == (1000, [])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("truncated", "model/a.safetensors has 3 of 7 bytes"),
        ("missing file", "a.safetensors"),
        ("no state", "state.json"),
        ("torn state", "is not a complete checkpoint"),
        ("state of something else", "is not a complete checkpoint"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(tmp_path, damage, said):
    checkpoint(tmp_path, 100)
    newer = checkpoint(tmp_path, 200)
    if damage == "truncated":
        (newer / "model" / "a.safetensors").write_text("wei")
    elif damage == "missing file":
        (newer / "model" / "a.safetensors").unlink()
    elif damage == "no state":
        (newer / "state.json").unlink()
    elif damage == "torn state":
        (newer / "state.json").write_text('{"step": 200, "fi')
    else:
        (newer / "state.json").write_text("[1]")
    found, passed_over = chosen(tmp_path, "latest")
    assert found is not None
    assert found.step == 100
    assert len(passed_over) == 1
    assert str(newer) in passed_over[0]
    assert said in passed_over[0]
    with pytest.raises(EnvironmentFault, match="checkpoint-000200"):
        chosen(tmp_path, "checkpoint-000200")


def test_when_all_are_damaged_none_is_chosen_and_each_is_named(tmp_path):
    for step in (1, 2):
        (checkpoint(tmp_path, step) / "state.json").unlink()
    found, passed_over = chosen(tmp_path, "latest")
    assert found is None
    assert ["checkpoint-000002" in passed_over[0], "checkpoint-000001" in passed_over[1]] == [True, True]


def test_latest_of_nothing_is_a_new_run(tmp_path):
    assert chosen(tmp_path / "checkpoints", "latest") == (None, [])


def test_none_is_a_new_run_whatever_there_is(tmp_path):
    checkpoint(tmp_path, 100)
    assert chosen(tmp_path, "none") == (None, [])


def test_a_checkpoint_is_chosen_by_name_or_by_absolute_or_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "run" / "checkpoints"
    for step in (100, 200):
        checkpoint(root, step)
    for wish in ("checkpoint-000100", str(root / "checkpoint-000100"), "run/checkpoints/checkpoint-000100"):
        found, _ = chosen(root, wish)
        assert found is not None
        assert found.step == 100


def test_a_checkpoint_of_another_run_is_chosen_by_its_path(tmp_path):
    elsewhere = checkpoint(tmp_path / "other", 50)
    found, _ = chosen(tmp_path / "mine", str(elsewhere))
    assert found is not None
    assert found.folder == elsewhere


def test_an_unknown_name_lists_what_there_is(tmp_path):
    for step in (100, 200):
        checkpoint(tmp_path, step)
    with pytest.raises(SettingsError) as caught:
        chosen(tmp_path, "checkpoint-300")
    assert "checkpoint-300" in caught.value.message
    assert "checkpoint-000200, checkpoint-000100" in caught.value.hint
    with pytest.raises(SettingsError) as caught:
        chosen(tmp_path / "empty", "checkpoint-300")
    assert "none yet" in caught.value.hint


def test_prune_keeps_the_newest(tmp_path):
    for step in (100, 200, 300, 1000):
        checkpoint(tmp_path, step)
    prune(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint-000300", "checkpoint-001000"]
    prune(tmp_path, 2)
    prune(tmp_path, 5)
    assert names(tmp_path) == ["checkpoint-000300", "checkpoint-001000"]


def test_prune_touches_nothing_that_is_no_checkpoint(tmp_path):
    for step in (1, 2):
        checkpoint(tmp_path, step)
    (tmp_path / "notes").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    prune(tmp_path, 1)
    assert names(tmp_path) == ["checkpoint-000002", "checkpoint-best", "notes"]


def test_what_a_killed_save_or_prune_left_is_cleared(tmp_path):
    kept = checkpoint(tmp_path, 100)
    shutil.copytree(kept, unfinished(folder_of_step(tmp_path, 200)))
    (tmp_path / ".other").mkdir()
    clear_unfinished(tmp_path)
    assert names(tmp_path) == [".other", "checkpoint-000100"]


def test_an_unfinished_folder_is_never_chosen(tmp_path):
    checkpoint(tmp_path, 100).rename(unfinished(folder_of_step(tmp_path, 100)))
    assert chosen(tmp_path, "latest") == (None, [])


def test_sizes_name_every_file_below_a_folder(tmp_path):
    folder = checkpoint(tmp_path, 3, "12345")
    state = (folder / "state.json").stat().st_size
    assert sizes(folder) == {"model/a.safetensors": 5, "model/config.json": 2, "state.json": state}


def test_prune_never_removes_the_newest_complete_checkpoint(tmp_path):
    (checkpoint(tmp_path, 200) / "state.json").unlink()
    checkpoint(tmp_path, 150)
    prune(tmp_path, 1)
    assert (tmp_path / "checkpoint-000150").is_dir()
