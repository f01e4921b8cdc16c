from __future__ import annotations

import io
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import scanning
import torch
from PIL import Image

from simpletuner.caches.latents import decode_image
from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.samples.discovery import discover
from simpletuner.data.scan.comparison import hash_ends
from simpletuner.data.storage.storage import Listing, LocalStorage, StoredFile, UnreadableFileError
from simpletuner.settings.values.shape import Shape

DATASET = LocalImages(id="d", instance_data_dir=Path("unused"), resolution=64)


@dataclass(frozen=True)
class MemoryStorage:
    """A store without paths, as one in the cloud is."""

    files: dict[str, bytes] = field(default_factory=dict, hash=False)
    concurrent_reads: int = 3

    def list_files(self, suffixes: Collection[str]) -> Listing:
        files = [StoredFile(name, len(blob), f"etag-{len(blob)}") for name, blob in sorted(self.files.items())]
        return Listing([file for file in files if file.suffix in suffixes])

    def open(self, name: str) -> io.BytesIO:
        return io.BytesIO(self.files[name])

    def open_header(self, name: str) -> io.BytesIO:
        return self.open(name)

    def read(self, name: str, limit_bytes: int) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name]

    def describe(self, name: str = "") -> str:
        return f"memory://{name}"


def image(suffix: str, size: tuple[int, int] = (64, 64)) -> bytes:
    blob = io.BytesIO()
    Image.new("RGB", size, "red").save(blob, {"jpg": "JPEG"}.get(suffix, suffix))
    return blob.getvalue()


def test_a_store_needs_no_more_than_the_protocol():
    blobs = {f"sub/{suffix}.{suffix}": image(suffix, (128, 64)) for suffix in ("jpg", "png", "webp")}
    captions = {f"{name.rpartition('.')[0]}.txt": b"a caption\nanother" for name in blobs}
    storage = MemoryStorage({**blobs, **captions, "a.psd": b"", "bad.png": b"no image"})
    found = discover([scanning.scanned(DATASET, storage)], Shape(1, 64, 64), 0)
    samples = list(found.samples)
    assert [sample.id for sample in samples] == [f"d/{name}" for name in sorted(blobs)]
    assert {sample.captions for sample in samples} == {("a caption", "another")}
    assert found.not_read == {".psd": 1} and found.others[0].example == "memory://a.psd"
    assert found.broken == {"d/bad.png": "is not an image in a known format, or is damaged"}
    for sample in samples:
        pixels = decode_image(sample)
        width, height = sample.geometry.target.size
        assert isinstance(pixels, torch.Tensor) and pixels.shape == (3, height, width)
        assert hash_ends(storage, sample.name)


def test_files_are_sorted_by_the_parts_of_their_names(tmp_path):
    for name in ("a/z.png", "a-b/c.png", "a.png", "B.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    listed = [file.name for file in LocalStorage(tmp_path).list_files({".png"}).files]
    assert listed == [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*.png"))]
    assert listed == ["B.png", "a/z.png", "a-b/c.png", "a.png"]


def test_a_version_is_size_and_time_of_change(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"12345")
    (file,) = LocalStorage(tmp_path).list_files({".png"}).files
    assert (file.size_bytes, file.version) == (5, f"5-{path.stat().st_mtime_ns}")


def test_a_small_file_is_read_whole_or_not_at_all(tmp_path):
    storage = LocalStorage(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"12345")
    (tmp_path / "folder").mkdir()
    assert storage.read("a.txt", 5) == b"12345"
    with pytest.raises(UnreadableFileError, match="has 5 bytes; at most 4 are read"):
        storage.read("a.txt", 4)
    with pytest.raises(UnreadableFileError, match="cannot be read: is a directory"):
        storage.read("folder", 5)
    with pytest.raises(FileNotFoundError):
        storage.read("missing.txt", 5)
    assert storage.describe("a.txt") == str(tmp_path / "a.txt")
