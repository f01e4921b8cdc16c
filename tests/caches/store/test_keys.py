from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from simpletuner.caches.store.records import (
    PROBE_BYTES,
    PROBES,
    changed_parts,
    file_fingerprint,
    folder_fingerprint,
    latents_parts,
    short_hash,
    text_parts,
)
from simpletuner.data.images.geometry import Geometry
from simpletuner.data.samples.samples import Sample
from simpletuner.data.storage.storage import LocalStorage
from simpletuner.settings.values.shape import Shape

GEOMETRY = Geometry(Shape(1, 80, 100), Shape(1, 64, 80), (8, 0), Shape(1, 64, 64))
SAMPLE = Sample("d/a.png", "d", LocalStorage(Path()), "a.png", "123-456", GEOMETRY, ("a caption",))


def component(folder: Path, size: int = 1_000_000) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"width": 4}')
    (folder / "model.safetensors").write_bytes(os.urandom(size))
    return folder


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        (latents_parts(replace(SAMPLE, version="123-457"), "vae", "fp32"), "file"),
        (latents_parts(SAMPLE, "other", "fp32"), "VAE"),
        (latents_parts(SAMPLE, "vae", "bf16"), "dtype"),
        *[
            (latents_parts(replace(SAMPLE, geometry=replace(GEOMETRY, **change)), "vae", "fp32"), "resolution and crop")
            for change in (
                {"original": Shape(1, 80, 101)},
                {"resized": Shape(1, 64, 81)},
                {"crop_left_top": (7, 0)},
                {"target": Shape(1, 128, 64)},
            )
        ],
    ],
)
def test_each_change_to_a_picture_or_its_encoding_is_named(changed, part):
    assert changed_parts(latents_parts(SAMPLE, "vae", "fp32"), changed) == [part]


def test_captions_and_names_do_not_change_latents():
    other = replace(SAMPLE, captions=("another",), id="d/b.png", name="b.png")
    assert latents_parts(other, "vae", "fp32") == latents_parts(SAMPLE, "vae", "fp32")


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        (text_parts("other", "bf16", 77), "text encoders"),
        (text_parts("clip", "fp32", 77), "dtype"),
        (text_parts("clip", "bf16", None), "maximum length"),
    ],
)
def test_each_change_to_the_text_encoding_is_named(changed, part):
    assert changed_parts(text_parts("clip", "bf16", 77), changed) == [part]


def test_several_changes_are_all_named():
    assert changed_parts(text_parts("clip", "bf16", 77), text_parts("t5", "fp32", 77)) == ["text encoders", "dtype"]


def test_the_fingerprint_of_a_folder_repeats_itself_and_does_not_depend_on_where_it_lies(tmp_path):
    folder = component(tmp_path / "vae")
    before = folder_fingerprint([folder])
    assert folder_fingerprint([folder]) == before
    folder.rename(tmp_path / "moved")
    assert folder_fingerprint([tmp_path / "moved"]) == before


def test_other_weights_of_the_same_size_are_noticed(tmp_path):
    folder = component(tmp_path / "vae")
    before = folder_fingerprint([folder])
    (folder / "model.safetensors").write_bytes(os.urandom(1_000_000))
    assert folder_fingerprint([folder]) != before


@pytest.mark.parametrize("place", [0, 5_000, 99_999])
def test_a_single_byte_in_a_small_file_is_noticed(tmp_path, place):
    path = tmp_path / "w"
    blob = bytearray(100_000)
    path.write_bytes(blob)
    before = file_fingerprint(path)
    blob[place] = 1
    path.write_bytes(blob)
    assert file_fingerprint(path) != before


def test_a_slightly_trained_large_file_is_noticed(tmp_path):
    path = tmp_path / "w"
    blob = bytearray(os.urandom(4_000_000))
    path.write_bytes(blob)
    before = file_fingerprint(path)
    for place in range(0, len(blob), 1000):
        blob[place] ^= 1
    path.write_bytes(blob)
    assert file_fingerprint(path) != before


def test_one_changed_run_as_long_as_the_distance_of_probes_is_noticed(tmp_path):
    path = tmp_path / "w"
    size = 4_000_000
    blob = bytearray(size)
    path.write_bytes(blob)
    before = file_fingerprint(path)
    for start in (0, size // 3, size - size // PROBES - PROBE_BYTES):
        changed = bytearray(blob)
        length = size // PROBES + PROBE_BYTES
        changed[start : start + length] = b"\x01" * length
        path.write_bytes(changed)
        assert file_fingerprint(path) != before


@pytest.mark.parametrize("change", ["config", "longer", "new file", "renamed"])
def test_every_other_change_to_a_component_is_noticed(tmp_path, change):
    folder = component(tmp_path / "vae", 10_000)
    before = folder_fingerprint([folder])
    if change == "config":
        (folder / "config.json").write_text('{"width": 8}')
    elif change == "longer":
        with (folder / "model.safetensors").open("ab") as file:
            file.write(b"\0")
    elif change == "new file":
        (folder / "sub").mkdir()
        (folder / "sub" / "extra.json").write_text("{}")
    else:
        (folder / "config.json").rename(folder / "config2.json")
    assert folder_fingerprint([folder]) != before


def test_several_folders_count_and_a_missing_one_does_not(tmp_path):
    one, two = component(tmp_path / "one", 100), component(tmp_path / "two", 100)
    assert folder_fingerprint([one, two]) != folder_fingerprint([one])
    assert folder_fingerprint([one, tmp_path / "none"]) == folder_fingerprint([one])


def test_an_empty_file_has_a_fingerprint(tmp_path):
    (tmp_path / "w").touch()
    assert len(file_fingerprint(tmp_path / "w")) == 16


def test_a_short_hash_is_that_of_the_value_not_of_the_order_of_keys():
    assert short_hash({"a": 1, "b": [2, 3]}) == short_hash({"b": (2, 3), "a": 1})
    assert short_hash({"a": 1}) != short_hash({"a": "1"})
    assert len(short_hash("x")) == 16
