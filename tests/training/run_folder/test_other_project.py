"""The images of which a run's folder is: moved, copied, renamed, added and removed ones are its own, others are not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from scanning import found

from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.samples.samples import DatasetSamples, Samples
from simpletuner.errors import OtherRunsFolder
from simpletuner.runs.data_listing import DataListing, place_of, record_data
from simpletuner.settings import load
from simpletuner.training.run_folder.other_project import has_image_of, places_in, refuse_other_base, shares_images

HELD_OUT = np.array([], dtype=np.int64)


def draw(folder: Path, seed: int, count: int = 6, size: int = 32) -> Path:
    """Write images of equal size on disk, under the names that every camera and every project gives."""
    folder.mkdir(exist_ok=True, parents=True)
    for number, colour in enumerate(np.random.default_rng(seed).integers(0, 255, (count, 3), np.uint8)):
        Image.new("RGB", (size, size), tuple(colour.tolist())).save(folder / f"{number:03d}.bmp")
        os.utime(folder / f"{number:03d}.bmp", (0, 0))  # as unpacked from an archive that is made reproducibly
    return folder


def dataset(folder: Path, name: str = "images", **keys: object) -> LocalImages:
    values = {"id": name, "instance_data_dir": folder, "caption_strategy": "filename", "resolution": 64}
    return LocalImages.model_validate({"type": "local", **values, **keys})


def samples_of(*datasets: LocalImages) -> Samples:
    return found(datasets).samples


def rename(folder: Path) -> Path:
    for path in [*folder.iterdir()]:
        path.rename(path.with_stem(f"photo of a dog {path.stem}"))
    return folder


def copy(source: Path, target: Path, names: str = "*") -> Path:
    target.mkdir()
    for path in source.glob(names):
        shutil.copyfile(path, target / path.name)  # with the time of now
    return target


Change = Callable[[Path, Path], Path]
CHANGES: dict[str, tuple[bool, Change]] = {
    "the same": (True, lambda dogs, tmp: dogs),
    "moved": (True, lambda dogs, tmp: dogs.rename(tmp / "moved")),
    "copied": (True, lambda dogs, tmp: copy(dogs, tmp / "copy")),
    "renamed": (True, lambda dogs, tmp: rename(copy(dogs, tmp / "copy"))),
    "all but one removed": (True, lambda dogs, tmp: copy(dogs, tmp / "copy", "003.*")),
    "others added": (True, lambda dogs, tmp: copy(dogs, draw(tmp / "all", 1) / "dogs").parent),
    "others of equal names, sizes and times": (False, lambda dogs, tmp: draw(tmp / "cats", 1)),
    "others of another size": (False, lambda dogs, tmp: draw(tmp / "cats", 1, size=48)),
    "others in the same folder": (False, lambda dogs, tmp: draw(dogs, 1, size=48)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_only_images_none_of_which_was_trained_on_are_another_project(change, tmp_path):
    dogs = draw(tmp_path / "dogs", 0)
    record_data(tmp_path, samples_of(dataset(dogs)), HELD_OUT)
    listing = record_data(tmp_path, samples_of(dataset(dogs)), HELD_OUT)  # as read again
    is_own, change_folder = CHANGES[change]
    assert has_image_of(listing, samples_of(dataset(change_folder(dogs, tmp_path)))) == is_own
    assert places_in(listing) == str(tmp_path / "dogs")


def test_one_more_dataset_is_the_same_project_but_not_one_that_only_validates_or_regularises(tmp_path):
    dogs, cats, classes = (draw(tmp_path / name, seed) for seed, name in enumerate(("dogs", "cats", "classes")))
    regularising = dataset(classes, "class", is_regularisation_data=True)
    evaluating = dataset(draw(tmp_path / "eval", 9), "eval", dataset_type="eval")
    before = record_data(tmp_path, samples_of(dataset(dogs), regularising, evaluating), HELD_OUT)
    assert has_image_of(before, samples_of(dataset(cats, "cats"), dataset(dogs, "dogs")))
    assert has_image_of(before, samples_of(dataset(dogs), regularising))
    assert not has_image_of(before, samples_of(dataset(cats), regularising, evaluating))
    assert has_image_of(before, samples_of(regularising)), "all that it trains on"
    held_out = np.arange(6, 12)
    before = record_data(tmp_path, samples_of(dataset(dogs), dataset(cats, "held")), held_out)
    assert not has_image_of(before, samples_of(dataset(cats))), "those were not trained on"


def test_of_a_listing_of_an_earlier_version_names_and_sizes_count(tmp_path):
    dogs = draw(tmp_path / "dogs", 0)
    listing = record_data(tmp_path, samples_of(dataset(dogs)), HELD_OUT)
    earlier = DataListing(listing.key, "", listing.places, {}, listing.table)
    assert has_image_of(earlier, samples_of(dataset(copy(dogs, tmp_path / "copy"))))
    assert not has_image_of(earlier, samples_of(dataset(draw(tmp_path / "cats", 1, size=48))))


class Elsewhere:
    """Of a store that is not a folder, what a dataset has of it: its address."""

    def __init__(self, address: str) -> None:
        self.address = address

    def describe(self, name: str = "") -> str:
        return f"{self.address}/{name}".rstrip("/")


def part_in(address: str, names: list[str], versions: list[str]) -> DatasetSamples:
    from scanning import drawn

    from simpletuner.data.config.dataset_types import BucketImages

    part = drawn(*[(64, 64)] * len(names))
    table = pa.table({**{name: part.table[name] for name in ("captions",)}, "name": names, "version": versions})
    table = table.cast(
        pa.schema(
            {"captions": table.schema.field("captions").type, "name": pa.large_string(), "version": pa.large_string()}
        )
    )
    made = BucketImages.model_construct(id="d", caption_strategy="textfile", dataset_type="image")
    return DatasetSamples(made, Elsewhere(address), table, part.rows, part.sizes, 0)


@pytest.mark.parametrize(
    ("address", "name", "version", "is_own"),
    [
        ("s3://one", "a/1.png", "10-etag", True),
        ("s3://mirror", "1.png", "10-etag", True),
        ("s3://mirror", "1.png", "10-uploaded-in-parts-2", True),
        ("s3://one", "1.png", "11-other", False),
        ("/hub/datasets--owner--dogs/snapshots/2", "new.png", "99-1", True),
        ("/hub/datasets--owner--cats/snapshots/1", "new.png", "99-1", False),
    ],
)
def test_images_of_buckets_and_of_the_hub(address, name, version, is_own, tmp_path):
    first = "/hub/datasets--owner--dogs/snapshots/1" if address.startswith("/hub") else "s3://one"
    table = pa.table({"id": ["d/a/1.png"], "version": ["10-etag"], "held_out": [False]})
    table = table.cast(pa.schema({"id": pa.large_string(), "version": pa.large_string(), "held_out": pa.bool_()}))
    before = DataListing("", "", {"d": first}, {}, table)
    part = part_in(address, [name], [version])
    assert has_image_of(before, Samples([part])) == is_own and place_of(part) == address
    assert address.startswith("/hub") or shares_images(before, table, part) == is_own


XL, PATH = "stable-diffusion-xl-base-1.0", "pretrained_model_name_or_path"
SNAPSHOT = f"/hub/models--stabilityai--{XL}/snapshots/0123456789abcdef"
BASES = [
    # Family, settings of the run and of the start; what is said to one that has finished, and to one that goes on.
    (
        "sdxl",
        {"model_flavour": "base-1.0"},
        {PATH: "/models/other"},
        "set model_flavour=base-1.0 without pretrained",
        "",
    ),
    ("sdxl", {}, {PATH: "/models/other"}, "was trained from base-1.0, and has finished, but pretrained", ""),
    ("sdxl", {PATH: "/models/other"}, {}, "from /models/other, and has finished, but model_flavour = base-1.0", ""),
    ("sdxl", {PATH: "/models/other"}, {"model_flavour": "tiny"}, "but model_flavour = tiny", ""),
    (
        "sdxl",
        {PATH: "a/one"},
        {PATH: "a/two"},
        "from a/one, and has finished, but pretrained_model_name_or_path = a/two",
        "",
    ),
    (
        "flux",
        {"model_flavour": "dev"},
        {"model_flavour": "schnell"},
        "trained from dev, and has finished",
        "trained from dev, but",
    ),
    ("flux", {"model_flavour": "schnell"}, {}, "but model_flavour = krea", "but model_flavour = krea"),
    (
        "wan",
        {"model_flavour": "t2v-14b-2.2-high"},
        {"model_flavour": "t2v-14b-2.2-low"},
        "trained from t2v",
        "trained from t2v",
    ),
    ("sdxl", {}, {"model_flavour": "base-1.0"}, "", ""),
    ("sdxl", {}, {PATH: f"/models/{XL}"}, "", ""),
    ("sdxl", {PATH: f"stabilityai/{XL}"}, {"model_flavour": "base-1.0", PATH: SNAPSHOT}, "", ""),
    ("sdxl", {PATH: SNAPSHOT}, {}, "", ""),
    ("sdxl", {PATH: "/models/own", "model_flavour": "base-1.0"}, {PATH: "/moved/own"}, "", ""),
    ("auto", {PATH: "/models/own"}, {PATH: "/models/own/"}, "", ""),
    ("auto", {PATH: "/models/own"}, {PATH: "/models/two"}, "but pretrained_model_name_or_path = /models/two", ""),
]


@pytest.mark.parametrize(("family", "before", "now", "finished", "goes_on"), BASES)
def test_another_base_model_is_refused_however_it_is_named(family, before, now, finished, goes_on, shapes):
    """A flavour that became a path was told as a changed setting, and ended as "finished already"."""
    settings = load({"model_family": family, "instance_data_dir": str(shapes), **now}, environment={}).settings
    for has_finished, said in ((True, finished), (False, goes_on)):
        recorded = {"model_family": family, "model_flavour": "", PATH: None, **before}
        if not said:
            refuse_other_base(settings, recorded, has_finished)
            continue
        with pytest.raises(OtherRunsFolder) as refused:
            refuse_other_base(settings, recorded, has_finished)
        assert said in f"{refused.value.message}; {refused.value.hint}" and "another --output_dir" in refused.value.hint
