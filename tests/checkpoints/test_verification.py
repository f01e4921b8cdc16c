from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_states import state_of

from simpletuner.checkpoints.layout import Checkpoint, checkpoint_folder
from simpletuner.checkpoints.saving import write_state
from simpletuner.checkpoints.verification import CheckpointDamaged, Verification, compute_checksums, find_newest
from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.parallel.world import World, joined_world


@pytest.fixture(scope="module")
def world():
    with joined_world({}, use_cpu=True) as world:
        yield world


def checkpoint(root: Path, step: int, world: World) -> Path:
    folder = checkpoint_folder(root, step)
    (folder / "model").mkdir(parents=True)
    safetensors.torch.save_file({"weight": torch.arange(64.0)}, folder / "model" / "a.safetensors")
    (folder / "model" / "config.json").write_text("{}")
    write_state(folder, state_of(step), compute_checksums(folder, world, {}))
    return folder


def find_newest_healthy(root: Path, wish: str, world: World) -> tuple[Checkpoint | None, list[str]]:
    damaged: dict[Path, str] = {}
    while True:
        found, passed_over = find_newest(root, wish, world, damaged)
        try:
            if found is not None:
                Verification(found, world).wait()
            return found, list(passed_over.values())
        except CheckpointDamaged as error:
            damaged[error.folder] = error.message


DAMAGES = {
    "truncated": ("model/a.safetensors has 3 of", lambda folder: cut(folder / "model" / "a.safetensors")),
    "missing file": ("a.safetensors", lambda folder: (folder / "model" / "a.safetensors").unlink()),
    "a bit of a weight": ("checksum does not match", lambda folder: flip(folder / "model" / "a.safetensors", -9)),
    "a bit of a header": ("checksum does not match", lambda folder: flip(folder / "model" / "a.safetensors", 12)),
    "a bit of a config": ("checksum does not match", lambda folder: flip(folder / "model" / "config.json", 0)),
    "no state": ("state.json", lambda folder: (folder / "state.json").unlink()),
    "torn state": ("is not a complete checkpoint", lambda folder: cut(folder / "state.json", 30)),
    "another state": ("is not a complete checkpoint", lambda folder: (folder / "state.json").write_text("[1]")),
    "deep state": ("is not a complete checkpoint", lambda folder: (folder / "state.json").write_text("[" * 100_000)),
}


def cut(path: Path, length: int = 3) -> None:
    path.write_bytes(path.read_bytes()[:length])


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(tmp_path, world, damage):
    said, harm = DAMAGES[damage]
    for step in (50, 100):
        checkpoint(tmp_path, step, world)
    newer = checkpoint(tmp_path, 200, world)
    harm(newer)
    found, passed_over = find_newest_healthy(tmp_path, "latest", world)
    assert found is not None and found.step == 100
    assert len(passed_over) == 1 and str(newer) in passed_over[0] and said in passed_over[0]
    with pytest.raises(EnvironmentNotReady, match="checkpoint-000200") as caught:
        find_newest_healthy(tmp_path, "checkpoint-000200", world)
    assert "set-aside" not in caught.value.hint, "there are others, which starting again would put away"


def test_a_run_whose_checkpoints_are_all_damaged_does_not_silently_start_again(tmp_path, world):
    for step in (1, 2):
        (checkpoint(tmp_path, step, world) / "state.json").unlink()
    with pytest.raises(EnvironmentNotReady) as caught:
        find_newest_healthy(tmp_path, "latest", world)
    assert "checkpoint-000002" in caught.value.message and "checkpoint-000001" in caught.value.message
    assert "--resume_from_checkpoint=none" in caught.value.hint
    assert find_newest_healthy(tmp_path, "none", world) == (None, [])


def test_checkpoints_are_chosen_by_name_or_by_path_and_an_unknown_one_lists_what_there_is(tmp_path, world, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "run" / "checkpoints"
    for step in (100, 1000, 300):
        checkpoint(root, step, world)
    for wish in ("checkpoint-000100", str(root / "checkpoint-000100"), "run/checkpoints/checkpoint-000100"):
        found, _ = find_newest_healthy(root, wish, world)
        assert found is not None and found.step == 100
    found, _ = find_newest_healthy(tmp_path / "mine", str(root / "checkpoint-000300"), world)
    assert found is not None and found.folder == root / "checkpoint-000300"
    found, passed_over = find_newest_healthy(root, "latest", world)
    assert found is not None and (found.step, passed_over) == (1000, [])
    with pytest.raises(SettingsError) as caught:
        find_newest_healthy(root, "checkpoint-400", world)
    assert "checkpoint-400" in caught.value.message
    assert "checkpoint-001000, checkpoint-000300, checkpoint-000100" in caught.value.hint
    with pytest.raises(SettingsError, match="no such folder"):
        find_newest_healthy(tmp_path / "empty", "checkpoint-300", world)
    assert find_newest_healthy(tmp_path / "empty", "latest", world) == (None, [])


def test_every_file_has_a_checksum_and_the_state_its_own(tmp_path, world):
    state = json.loads((checkpoint(tmp_path, 5, world) / "state.json").read_text())
    assert state["checksums"].keys() == state["files"].keys() == {"model/a.safetensors", "model/config.json"}
    assert state["checksum"].startswith("xxh3:")
