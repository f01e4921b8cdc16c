"""`simpletuner cache clear --unused`: what the settings do not use goes, what they use stays, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import SMALL
from holders import holder
from ranks import command_line

from simpletuner.caches.store.shards import RETRACTING_RANK, ShardReader, ShardWriter
from simpletuner.errors import EnvironmentNotReady
from simpletuner.system.files.cache_files import bytes_of
from simpletuner.tools.cache.contents import CacheKind, find_shards
from simpletuner.tools.cache.unused import find_unused, remove_unused

STEPS = ("--train_batch_size=4", "--max_train_steps=1")


def clear(starter, *flags: str, code: int = 0) -> str:
    run = starter.start(command_line, 1, ["cache", "clear", "--unused", *flags])
    assert run.wait() == [code], run.said
    return run.said


def records(folder: Path) -> dict[str, list[float]]:
    reader = ShardReader(folder)
    return {place.name: reader.read(place)["latents"].flatten().tolist() for place in reader.records()}


def test_what_a_run_used_before_and_no_longer_uses_is_removed_and_nothing_is_made_again(
    sdxl, shapes, starter, train, tmp_path
):
    images, output = shutil.copytree(shapes, tmp_path / "images"), tmp_path / "run"
    flags = (*SMALL, "--model_family=sdxl", f"--pretrained_model_name_or_path={sdxl}", f"--instance_data_dir={images}")
    train(output, *flags, *STEPS)
    latents, where = output / "cache" / "latents", f"--output_dir={output}"
    (folder,) = [path for path in latents.iterdir() if path.is_dir()]
    before, size = records(folder), bytes_of(output / "cache")
    said = clear(starter, where, *flags, *STEPS, "--dry_run")
    assert "there is nothing to remove" in said
    gone = sorted(images.glob("*.png"))[:12]
    for image in gone:
        image.unlink()
    with holder("cache", folder):
        assert "is in use by a run" in clear(starter, where, *flags, *STEPS, "--yes", code=3)
    said = clear(starter, where, *flags, *STEPS, "--dry_run", "--json")
    assert "would remove" in said and '"unused_entries": 12' in said
    assert bytes_of(output / "cache") == size and len(records(folder)) == 36
    assert "there is no terminal to confirm" in clear(starter, where, *flags, *STEPS, code=2)
    said = clear(starter, where, *flags, *STEPS, "--yes")
    freed = size - bytes_of(output / "cache")
    assert f"{freed:,} bytes" in said and freed > 0
    ids = {f"{folder.name}/{image.name}" for image in gone}
    assert records(folder) == {name: values for name, values in before.items() if name not in ids}
    assert "there is nothing to remove" in clear(starter, where, *flags, *STEPS, "--yes")
    assert "making" not in train(output, *flags, "--train_batch_size=4", "--max_train_steps=2").said
    assert "named with --unused" in clear(starter, where, *flags, *STEPS, "blocks", code=2)


PARTS = {"file": "1"}


class Request:
    """A request of a record."""

    def __init__(self, name: str) -> None:
        self.name, self.parts = name, PARTS


def a_cache(folder: Path) -> Path:
    """Write shards with used records, with unused ones, with both, with a damaged and with a broken one."""
    import torch

    for rank, names in enumerate(("ab", "cd", "efg", "h")):
        with ShardWriter(folder, rank) as writer:
            for name in names:
                writer.write(name, PARTS, {"latents": torch.full((100,), float(ord(name)))})
    with ShardWriter(folder, 4) as writer:
        writer.write_broken("i", PARTS, "cut short")
        writer.write_broken("j", PARTS, "cut short")
    path = folder / "rank003-00000.shard"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    reader = ShardReader(folder)
    with pytest.raises(EnvironmentNotReady):
        reader.read(reader.find("h", PARTS))
    (folder / "rank007-00000.index.jsonl").write_text("without a shard")
    return folder


@pytest.mark.parametrize(
    ("used", "shards"),
    [
        ("abcdefgij", {0, 1, 2, 4}),
        ("abegi", {0, 998, 4}),
        ("ceg", {998}),
        ("i", {4}),
        ("", set()),
    ],
)
def test_shards_stay_are_rewritten_or_go_and_what_is_used_stays(tmp_path, used, shards):
    folder = a_cache(tmp_path / "cache")
    (item,) = find_shards(CacheKind.LATENTS, [folder])
    found = find_unused(item, {folder.resolve(): map(Request, used)})
    before = bytes_of(folder)
    freed = remove_unused([found])
    assert freed == before - bytes_of(folder) > 0
    assert {int(path.name[4:7]) for path in folder.glob("rank*")} == shards
    assert RETRACTING_RANK not in shards and folder.exists() == bool(used)
    reader = ShardReader(folder)
    for name in "abcdefghij":
        place = reader.find(name, PARTS)
        assert (place is not None) >= (name in used), name
        if place is not None and not place.broken:
            assert reader.read(place)["latents"].tolist() == [float(ord(name))] * 100
        elif name in used:
            assert place.broken == "cut short"
    left = find_shards(CacheKind.LATENTS, [folder])
    assert all(find_unused(each, {folder.resolve(): map(Request, used)}).bytes == 0 for each in left)


def test_a_cache_that_grew_since_it_was_looked_at_is_left(tmp_path):
    folder = a_cache(tmp_path)
    (item,) = find_shards(CacheKind.LATENTS, [folder])
    found = find_unused(item, {})
    with ShardWriter(folder, 5) as writer:
        writer.write_broken("new", PARTS, "cut short")
    with pytest.raises(EnvironmentNotReady, match="has changed, so nothing is removed"):
        remove_unused([found])
    assert len(list(ShardReader(folder).records())) == 10


def test_list_names_the_datasets_of_each_folder(starter, tmp_path):
    for name in ("own", "shared", "text"):
        a_cache(tmp_path / name)
    entries = [
        {"id": "one", "instance_data_dir": "p", "cache_dir_vae": str(tmp_path / "own")},
        {"id": "two", "instance_data_dir": "q", "cache_dir_vae": str(tmp_path / "shared")},
        {"id": "three", "instance_data_dir": "r", "cache_dir_vae": str(tmp_path / "shared")},
    ]
    (tmp_path / "data.json").write_text(json.dumps(entries))
    run = starter.start(
        command_line,
        1,
        ["cache", "list", f"--data_backend_config={tmp_path / 'data.json'}", f"--cache_dir_text={tmp_path / 'text'}"],
    )
    assert run.wait() == [0]
    for line, datasets in (("own", "one"), ("shared", "two, three"), ("text", "one, two, three")):
        assert any(f"/{line} " in each and datasets in each for each in run.said.splitlines()), run.said
