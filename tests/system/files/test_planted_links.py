"""Links planted at each name that is written before the final one: nothing is written through one."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

from simpletuner.caches.store.mirror import make_sparse, replace_by_sparse
from simpletuner.checkpoints.saving import make_empty_folder
from simpletuner.page.datasets import captions
from simpletuner.settings.editors import editing
from simpletuner.system.files.atomic import create_new, replace_file, save, unfinished_path, write_json
from simpletuner.system.files.checksums import write_with_checksum
from simpletuner.system.processes.run_status import replace_status
from simpletuner.tools.nfs.workspace import write_atomically

SECRET = "mine"
WRITERS: dict[str, Callable[[Path], object]] = {
    "replace_file": lambda path: replace_file(path, b"theirs"),
    "save": lambda path: save(path, "theirs"),
    "write_json": lambda path: write_json(path, "theirs"),
    "status": lambda path: replace_status(path, b"theirs", durably=True),
    "configuration": lambda path: editing.write(path, "theirs"),
    "caption": lambda path: captions.write(captions.Caption("a", path, b"old", ""), b"theirs"),
    "download": lambda path: create_new(unfinished_path(path)).close(),
    "checksum": lambda path: write_with_checksum(unfinished_path(path), [memoryview(b"theirs")]),
    "folder": lambda path: (make_empty_folder(unfinished_path(path)) or unfinished_path(path) / "a").touch(),
    "nfs": lambda path: write_atomically(path, "theirs"),
    "emptied shard": lambda path: replace_by_sparse(path, 9),
}


def plant(path: Path, target: Path) -> None:
    """Plant a link at every name beside `path` that a writer may use."""
    for name in (f".{path.name}.unfinished", f".{path.name}.{os.getpid()}.unfinished", f"{path.name}.new"):
        (path.parent / name).symlink_to(target)


@pytest.mark.parametrize("kind", ["file", "folder", "nothing"])
@pytest.mark.parametrize("name", WRITERS)
def test_nothing_is_written_through_a_planted_link(
    tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SIMPLETUNER_HOME", str(tmp_path / "home"))
    outside, path = tmp_path / "outside", tmp_path / "theirs" / "a.json"
    outside.mkdir()
    path.parent.mkdir()
    (outside / "file").write_text(SECRET)
    (outside / "folder").mkdir()
    path.write_text("old")
    plant(path, outside / kind)
    WRITERS[name](path)
    assert not path.is_symlink()
    assert (outside / "file").read_text() == SECRET and not any((outside / "folder").iterdir())
    assert not (outside / "nothing").exists()


def test_a_shard_that_is_a_link_is_not_extended(tmp_path: Path):
    (tmp_path / "mine").write_text(SECRET)
    (tmp_path / "shard").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic"):
        make_sparse(tmp_path / "shard", 1000)
    assert (tmp_path / "mine").read_text() == SECRET


TEMPORARY = {
    *("page/editing/planning.py", "page/runs/results.py", "page/server.py"),
    *("deepspeed/requirements.py", "models/opening/published.py"),
}
"""They write into a folder of tempfile's, which nobody else can enter."""
FRESH = {"models/single_file/conversion.py"}
"""It writes into a folder that it has made."""
OF_ITS_OWN = {"tools/nfs/posix_semantics.py"}
"""It checks what a file system does, in a folder with a name of its own."""


def test_there_is_one_way_to_write_a_file():
    package = ROOT / "simpletuner"
    writing = re.compile(r"\.write_(bytes|text)\(|open\([^)\n]*[\"'][wa]b?\+?[\"']")
    by_descriptor = re.compile(r"fdopen\(|av\.open\(content|os\.devnull|formatter\.write_text")
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        if writing.search(line) and not by_descriptor.search(line)
    }
    assert found == TEMPORARY | FRESH | OF_ITS_OWN


@pytest.mark.long
def test_a_run_and_its_export_write_through_no_link(sdxl_uncached, train, tmp_path: Path):
    """A run first shows its names; the second finds a link beside each, to a file and to a folder of the user's."""
    flags = (*sdxl_uncached, "--max_train_steps=2", "--train_batch_size=4", "--validation_prompt=a circle")
    flags += ("--validation_num_inference_steps=1", "--profile_steps=1:2", "--export_single_file=true")
    one, two, outside = tmp_path / "one", tmp_path / "two", tmp_path / "outside"
    train(one, *flags)
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_text(SECRET)
    made = [path.relative_to(one) for path in one.rglob("*") if ".lock" not in path.name]
    for path in made:
        place = two / path
        place.parent.mkdir(parents=True, exist_ok=True)
        target = outside / ("folder" if (one / path).is_dir() else "file")
        if not place.parent.is_relative_to(two / "checkpoints" / "checkpoint-000002"):
            for name in (f".{path.name}.unfinished", f".{path.name}.old"):
                (place.parent / name).symlink_to(target)
    for each in sorted(two.rglob("*"), reverse=True):  # only the links, where a run makes the folder itself
        if each.is_dir() and not each.is_symlink() and each.name.startswith(("pipeline", "checkpoint-")):
            shutil.rmtree(each)
    train(two, *flags)
    assert (outside / "file").read_text() == SECRET and not any((outside / "folder").iterdir())
    again = {path.relative_to(two) for path in two.rglob("*") if not path.is_symlink()}
    assert {path for path in made if "step" not in str(path)} <= again
