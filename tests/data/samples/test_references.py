"""References are paired by name, cropped with their images or by themselves, and may bring the captions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scanning import scanned

from simpletuner.data.config.datasets import load_datasets
from simpletuner.data.samples.buckets import make_buckets
from simpletuner.data.samples.dataset_summary import summarize
from simpletuner.data.samples.discovery import Discovery, discover
from simpletuner.data.samples.samples import held_out_batches, references_of
from simpletuner.data.storage.storage import open_storage
from simpletuner.errors import SettingsError
from simpletuner.settings.declared.sections import Data
from simpletuner.settings.values.shape import Shape


def add(folder: Path, name: str, size: tuple[int, int], caption: str = "") -> None:
    folder.mkdir(exist_ok=True)
    Image.new("RGB", size, "red").save(folder / name)
    if caption:
        (folder / name).with_suffix(".txt").write_text(caption)


def entry(folder: Path, **keys: object) -> dict[str, object]:
    return {"id": folder.name, "type": "local", "instance_data_dir": str(folder), "resolution": 64, **keys}


def reference(folder: Path, kind: str = "reference_strict", **keys: object) -> dict[str, object]:
    return entry(folder, dataset_type="conditioning", conditioning_type=kind, **keys)


def data_of(entries: list[dict[str, object]], tmp_path: Path) -> Data:
    (tmp_path / "data.json").write_text(json.dumps(entries))
    return Data(data_backend_config=tmp_path / "data.json")


def found(entries: list[dict[str, object]], tmp_path: Path) -> Discovery:
    datasets, _ = load_datasets(data_of(entries, tmp_path))
    scans = []
    for dataset in datasets:
        others = tuple(scanned(each, open_storage(each, ())) for each in dataset.conditioning)
        scans.append(replace(scanned(dataset, open_storage(dataset, ())), conditioning=others))
    return discover(scans, Shape(1, 16, 16), 0)


def test_a_strict_reference_is_cropped_as_its_image_and_a_loose_one_by_itself(tmp_path):
    images, strict, loose = (tmp_path / name for name in ("images", "strict", "loose"))
    for number in range(6):
        add(images, f"{number}.png", (96, 64), f"caption {number}")
        add(strict, f"{number}.webp", (48, 32))
        add(loose, f"{number}.jpg", (128, 64) if number % 2 else (64, 128))
    crop = {"crop": True, "crop_style": "random", "resolution_type": "pixel"}
    entries = [
        entry(images, conditioning_data=["strict", "loose"], **crop),
        reference(strict),
        reference(loose, "reference_loose"),
    ]
    discovery = found(entries, tmp_path)
    discovery.check()
    samples = discovery.samples
    lefts = set()
    for sample in samples:
        first, second = sample.references
        assert first.id == f"strict/{Path(sample.name).stem}.webp" and second.id.startswith("loose/")
        assert first.geometry == replace(sample.geometry, original=Shape(1, 32, 48))
        assert sample.geometry.target == Shape(1, 64, 64)
        assert second.geometry.target in (Shape(1, 48, 80), Shape(1, 80, 48))
        lefts.add(first.geometry.crop_left_top)
    assert len(lefts) > 1, "random crops"

    buckets = make_buckets(samples)
    assert {name: len(bucket) for name, bucket in buckets.items()} == {"64x64+64x64+48x80": 3, "64x64+64x64+80x48": 3}
    for name, bucket in buckets.items():
        assert {str(samples[index].shape) for own in bucket.groups.values() for index in own} == {name}
    batches = held_out_batches(samples, np.arange(6), 6)
    assert sorted(len(batch.samples) for batch in batches) == [3, 3]


def test_datasets_of_pairs_share_their_buckets(tmp_path):
    images, strict = tmp_path / "images", tmp_path / "strict"
    for number in range(3):
        add(images, f"{number}.png", (64, 64), f"caption {number}")
        add(strict, f"{number}.png", (64, 64))
    more = entry(images) | {"id": "more", "repeats": 1, "conditioning_data": "again"}
    entries = [entry(images, conditioning_data="strict"), more, entry(images) | {"id": "alone"}]
    entries += [reference(strict), reference(strict) | {"id": "again"}]
    samples = found(entries, tmp_path).samples
    buckets = make_buckets(samples)
    assert {name: len(bucket) for name, bucket in buckets.items()} == {"64x64": 3, "64x64+64x64": 3 + 2 * 3}
    summaries = summarize(samples, buckets, np.array([], np.int64))
    found_by = {each.id: {own.name: own.samples for own in each.buckets} for each in summaries}
    assert found_by == {"images": {"64x64+64x64": 3.0}, "more": {"64x64+64x64": 6.0}, "alone": {"64x64": 3.0}}


def test_what_is_broken_is_found_by_the_reference_and_left_out_by_the_image(tmp_path):
    images, references = tmp_path / "images", tmp_path / "references"
    for number in range(4):
        add(images, f"{number}.png", (64, 64), "a")
        add(references, f"{number}.png", (64, 64))
    discovery = found([entry(images), reference(references, source_dataset_id="images")], tmp_path)
    (part,) = discovery.samples.parts
    (own,) = references_of(part.where(np.array([False, True, True, True])))
    assert [each.id for each in own] == [f"references/{number}.png" for number in (1, 2, 3)]
    assert own.samples_of({}) == {}
    broken = own.samples_of({"references/2.png": "cut off", "references/0.png": "not of these"})
    assert broken == {"images/2.png": "its reference 2.png: cut off"}


def test_captions_come_from_either_side(tmp_path):
    images, references = tmp_path / "images", tmp_path / "references"
    add(images, "a.png", (64, 64), "of the image")
    add(images, "b.png", (64, 64))
    add(references, "a.png", (64, 64), "not taken")
    add(references, "b.png", (64, 64), "of the reference")
    discovery = found([entry(images, conditioning_data="references"), reference(references)], tmp_path)
    discovery.check()
    assert [sample.captions for sample in discovery.samples] == [("of the image",), ("of the reference",)]


def test_without_any_reference_it_is_references_that_are_missing(tmp_path):
    images = tmp_path / "images"
    add(images, "a.png", (64, 64), "a caption")
    (tmp_path / "empty").mkdir()
    discovery = found([entry(images, conditioning_data="empty"), reference(tmp_path / "empty")], tmp_path)
    (error,) = discovery.errors()
    assert str(error).startswith("dataset `images`: 1 image without a reference in `empty`:\n  a.png")


def test_pairs_that_do_not_fit_together_are_refused(tmp_path):
    images, more, first, second = (tmp_path / name for name in ("images", "more", "first", "second"))
    mask = {"conditioning_type": "mask", "dataset_type": "conditioning"}
    entries = [
        entry(images, conditioning_data=["first", "second", "fourth"]),
        entry(more, conditioning_data="third"),
        entry(first, **mask),
        entry(second, **mask, source_dataset_id="image"),
        reference(tmp_path / "third", source_dataset_id="images"),
    ]
    with pytest.raises(SettingsError) as caught:
        load_datasets(data_of(entries, tmp_path))
    said = str(caught.value)
    for part in (
        "no dataset of dataset_type conditioning has this id",
        "it names more than one dataset of masks",
        "2 datasets of images name it as theirs: write an entry with an id for each",
        "no dataset of images has this id",
    ):
        assert part in said, part


def test_masks_and_references_may_be_beside_their_images_with_an_ending(tmp_path):
    images = tmp_path / "images"
    for name in ("a", "b", "a-mask", "b-mask", "a.before", "b.before"):
        add(images, f"{name}.png", (64, 64), "a caption")
    add(images / "in", "c.png", (64, 64), "c")
    add(images / "in", "c-mask.jpg", (64, 64))
    add(images / "in", "c.before.jpg", (64, 64))
    both = [
        {**reference(images, "mask", name_ending="-mask"), "id": "masks"},
        {**reference(images, name_ending=".before"), "id": "before"},
    ]
    discovery = found([entry(images, conditioning_data=["masks", "before"]), *both], tmp_path)
    discovery.check()
    paired = {sample.name: (sample.mask.name, sample.references[0].id) for sample in discovery.samples}
    assert paired == {
        "a.png": ("a-mask.png", "before/a.before.png"),
        "b.png": ("b-mask.png", "before/b.before.png"),
        "in/c.png": ("in/c-mask.jpg", "before/in/c.before.jpg"),
    }
    for wrong in (entry(images, name_ending="-mask"), reference(images, "mask", name_ending="/a")):
        with pytest.raises(SettingsError, match="it is the end of the names of masks or references"):
            load_datasets(data_of([{**wrong, "id": "x"}], tmp_path))
