from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoint_states import state_of
from disk_calls import recorded_calls
from real_mounts import or_skipped, overlay

from simpletuner.checkpoints.layout import (
    checkpoint_folder,
    clear_unfinished,
    file_sizes,
    find_resume_folders,
    is_complete,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    set_aside,
)
from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.files.atomic import unfinished_path, write_json
from simpletuner.system.files.checksums import with_checksum


def checkpoint(root: Path, step: int, content: str = "weights") -> Path:
    folder = checkpoint_folder(root, step)
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "a.safetensors").write_text(content)
    (folder / "model" / "config.json").write_text("{}")
    write_json(folder / "state.json", with_checksum({**state_of(step), "checksums": {}, "files": file_sizes(folder)}))
    return folder


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_checkpoint_lies_in_a_folder_numbered_by_its_step(tmp_path):
    assert checkpoint_folder(tmp_path, 100).name == "checkpoint-000100"
    assert checkpoint_folder(tmp_path, 12_345_678).name == "checkpoint-12345678"


def test_checkpoints_are_numbered_newest_first_by_number_not_by_name(tmp_path):
    for step in (20, 9_999_999, 100, 1_000_000):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-9").mkdir()
    for other in ("checkpoint-abc", "checkpoint-5.old", ".checkpoint-000300.unfinished", "notes"):
        (tmp_path / other).mkdir()
    (tmp_path / "checkpoint-000900").write_text("a file")
    steps = [int(path.name.removeprefix("checkpoint-")) for path in list_checkpoints(tmp_path)]
    assert steps == [9_999_999, 1_000_000, 100, 20, 9]
    assert list_checkpoints(tmp_path / "none") == []


def test_an_opened_checkpoint_knows_its_step_state_and_files(tmp_path):
    folder = checkpoint(tmp_path, 7)
    found = load_checkpoint(folder)
    assert (found.step, found.folder) == (7, folder)
    assert found.files("model") == [folder / "model" / "a.safetensors"]
    assert found.files("ema") == []
    assert set(found.state["files"]) == {"model/a.safetensors", "model/config.json"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("step", value) for value in (-1, 6, 10**9, "7", None, [])),
        *((f"position.{name}", value) for name in ("epoch", "batch", "batch_size") for value in (-5, None, "x")),
        *(("position.consumed", value) for value in (None, {"64x64": -1}, [1])),
        *(
            ("optimizer", value)
            for value in (None, {}, {"steps": -1, "moments": []}, {"steps": 1, "moments": ["../x"]})
        ),
        *(("ema_updates", value) for value in (-1, "no")),
        *(("schedule", value) for value in (None, {}, {"start_step": -1})),
        *(("checksums", value) for value in (None, [], {"model/a.safetensors": 7})),
        *(("files", value) for value in (None, [], {"model/a.safetensors": "7"}, {"absent": 1})),
    ],
)
def test_a_state_that_cannot_be_is_refused(tmp_path, path, value):
    folder = checkpoint(tmp_path, 7)
    state = json.loads((folder / "state.json").read_text())
    where = state
    *above, name = path.split(".")
    for key in above:
        where = where[key]
    where[name] = value
    del state["checksum"]
    write_json(folder / "state.json", with_checksum(state))
    with pytest.raises(EnvironmentNotReady, match="checkpoint-000007"):
        load_checkpoint(folder)


def test_any_bit_of_the_state_is_noticed_by_its_own_checksum(tmp_path):
    folder = checkpoint(tmp_path, 7)
    whole = with_checksum({**state_of(7), "checksums": {}, "files": {}, "model_family": "sdxl", "more": [1.5, "text"]})
    content = json.dumps(whole, indent=2).encode()
    for place in range(len(content)):
        for bit in (0, 4):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            (folder / "state.json").write_bytes(damaged)
            try:
                state = load_checkpoint(folder).state
            except EnvironmentNotReady:
                continue
            assert state == whole, "no bit of it is another"


def test_prune_keeps_the_newest(tmp_path):
    for step in (100, 200, 300, 1000):
        checkpoint(tmp_path, step)
    prune_checkpoints(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint-000300", "checkpoint-001000"]
    prune_checkpoints(tmp_path, 2)
    prune_checkpoints(tmp_path, 5)
    assert names(tmp_path) == ["checkpoint-000300", "checkpoint-001000"]


def test_a_checkpoint_that_a_user_removes_at_the_same_moment_is_pruned_without_a_word(tmp_path):
    for step in (100, 200):
        checkpoint(tmp_path, step)
    prune_checkpoints(tmp_path, 1, check=lambda: shutil.rmtree(checkpoint_folder(tmp_path, 100)))
    assert names(tmp_path) == ["checkpoint-000200"]


def test_what_is_pruned_has_lost_its_name_before_its_files(tmp_path):
    for step in (100, 200):
        checkpoint(tmp_path, step)
    hidden = unfinished_path(checkpoint_folder(tmp_path, 100))
    with recorded_calls() as calls:
        prune_checkpoints(tmp_path, 1)
    assert calls == [("rename", str(hidden), -1)], "killed amid its files, it would look like a damaged checkpoint"


def test_prune_touches_nothing_that_is_no_checkpoint(tmp_path):
    for step in (1, 2):
        checkpoint(tmp_path, step)
    (tmp_path / "notes").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    prune_checkpoints(tmp_path, 1)
    assert names(tmp_path) == ["checkpoint-000002", "checkpoint-best", "notes"]


def test_what_a_killed_save_or_prune_left_is_cleared(tmp_path):
    kept = checkpoint(tmp_path, 100)
    shutil.copytree(kept, unfinished_path(checkpoint_folder(tmp_path, 200)))
    (tmp_path / ".other").mkdir()
    clear_unfinished(tmp_path)
    assert names(tmp_path) == [".other", "checkpoint-000100"]
    kept.rename(tmp_path / ".checkpoint-000100.old")  # killed while another one took its place
    clear_unfinished(tmp_path)
    assert names(tmp_path) == [".other", "checkpoint-000100"] and load_checkpoint(kept).step == 100
    shutil.copytree(kept, tmp_path / ".checkpoint-000100.old")  # killed just after that
    clear_unfinished(tmp_path)
    assert names(tmp_path) == [".other", "checkpoint-000100"]


def test_an_unfinished_folder_is_never_chosen(tmp_path):
    checkpoint(tmp_path, 100).rename(unfinished_path(checkpoint_folder(tmp_path, 100)))
    assert find_resume_folders(tmp_path, "latest") == []


def test_sizes_name_every_file_below_a_folder(tmp_path):
    folder = checkpoint(tmp_path, 3, "12345")
    state = (folder / "state.json").stat().st_size
    assert file_sizes(folder) == {"model/a.safetensors": 5, "model/config.json": 2, "state.json": state}


def test_prune_never_removes_the_newest_complete_checkpoint(tmp_path):
    (checkpoint(tmp_path, 200) / "state.json").unlink()
    checkpoint(tmp_path, 150)
    prune_checkpoints(tmp_path, 1)
    assert (tmp_path / "checkpoint-000150").is_dir()


def test_checkpoints_of_a_lower_layer_are_pruned_and_set_aside(tmp_path):
    """A run in a container whose image has its checkpoints: rename(2) of their folders is EXDEV."""
    for step in (100, 200, 300, 400):
        checkpoint(tmp_path / "lower", step, f"weights {step}")
    with or_skipped(), overlay(tmp_path) as root:
        prune_checkpoints(root, 3)
        assert set_aside(root, 300) == ["checkpoint-000400"]
        assert names(root) == ["checkpoint-000200", "checkpoint-000300", "set-aside"]
        assert names(root / "set-aside") == ["checkpoint-000400"]
        moved = root / "set-aside" / "checkpoint-000400"
        assert is_complete(moved) and (moved / "model" / "a.safetensors").read_text() == "weights 400"
        (root / "checkpoint-000200" / ".removing").touch()  # killed while its files were removed
        assert [path.name for path in list_checkpoints(root)] == ["checkpoint-000300"]
        (root / "set-aside" / ".checkpoint-000300.copy.unfinished").mkdir()  # killed while one was copied
        clear_unfinished(root)
        assert names(root) == ["checkpoint-000300", "set-aside"]
        assert names(root / "set-aside") == ["checkpoint-000400"]
