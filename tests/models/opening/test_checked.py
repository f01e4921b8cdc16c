"""A base model that a run has found complete is not checked again by any run, until one of its files changes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from simpletuner.errors import EnvironmentNotReady
from simpletuner.models.opening.completeness import MOST_READ_BYTES, identity_of, note_checked, note_of
from simpletuner.models.opening.loading import load_family
from simpletuner.parallel.world import World
from simpletuner.settings.declared.sections import Data, Model, Settings, Training


@pytest.fixture
def folder(sdxl, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SIMPLETUNER_HOME", str(tmp_path / "home"))
    return Path(shutil.copytree(sdxl, tmp_path / "base"))


def start(folder: Path, run: Path | None, **model: str) -> Path:
    """Open a base model as a start does whose run has this folder, and note that it is complete; return the note."""
    world = World(0, 1, 0, torch.device("cpu"), dist.HashStore(), 0)
    chosen = Model(model_family="sdxl", pretrained_model_name_or_path=str(folder), **model)
    settings = Settings(model=chosen, data=Data(), training=Training(output_dir=run or folder))
    family = load_family(settings, world, lambda: None, skips_checked=run is not None)
    if run is not None:
        note_checked(family)
    return note_of(family)


def damage(file: Path, before: bytes, after: bytes) -> None:
    """Write another file of the same size and times, as a failing disk makes one."""
    content, status = file.read_bytes(), file.stat()
    file.write_bytes(content.replace(before, after))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_model_is_checked_again_where_a_setting_or_a_version_has_changed(folder, tmp_path):
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    run = tmp_path / "another run"
    note = start(folder, tmp_path / "run")
    facts = json.loads(note.read_text())
    damage(weights, b"bias", b"bios")
    with pytest.raises(EnvironmentNotReady, match="lacks"):
        start(folder, None)
    with pytest.raises(EnvironmentNotReady, match="lacks"):
        start(folder, run, model_flavour="base-1.0")
    facts["files"]["vae/diffusion_pytorch_model.safetensors"] = identity_of(weights)
    note.write_text(json.dumps(facts))
    start(folder, run)  # by its note it is complete, so that it is not read
    facts["versions"]["diffusers"] = "0.1"
    note.write_text(json.dumps(facts))
    with pytest.raises(EnvironmentNotReady, match="lacks"):
        start(folder, run)
    note.write_text("{")
    with pytest.raises(EnvironmentNotReady, match="lacks"):
        start(folder, run)
    assert note.read_text() == "{", "nothing is noted of a model that lacks something"


@pytest.mark.parametrize(
    ("file", "before", "after", "sentence"),
    [
        ("vae/diffusion_pytorch_model.safetensors", b"bias", b"bios", "vae lacks"),
        ("text_encoder/config.json", b'"hidden_size": 3', b'"hidden_size": 2', "text_encoder cannot be opened"),
        ("tokenizer_2/tokenizer.json", b'"vocab"', b'"vokab"', "tokenizer_2 cannot be opened"),
    ],
)
def test_a_file_that_changed_is_read_though_its_times_and_size_are_as_before(
    file, before, after, sentence, folder, tmp_path
):
    run = tmp_path / "run"
    start(folder, run)
    damage(folder / file, before, after)
    with pytest.raises(EnvironmentNotReady, match=sentence):
        start(folder, run)


def test_other_files_of_gigabytes_are_not_read(tmp_path):
    (path := tmp_path / "a.ckpt").touch()
    os.truncate(path, MOST_READ_BYTES + 1)
    assert identity_of(path) == [MOST_READ_BYTES + 1, path.stat().st_mtime_ns]
