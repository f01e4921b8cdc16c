"""Folders of numbered images as clips: which folders are, in which order, what is refused, and what changes them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import scanning
from dataset_files import data_of, image, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tabled import OpenedFiles, scan_table, write_rows
from video_files import SIZE, frame_of, numbers_of, write_video

from simpletuner.caches.latents import decode_image
from simpletuner.caches.store.records import latents_parts
from simpletuner.data.config.dataset_parts import VideoSettings
from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.images.frame_folders import in_order, read_folder_frames, read_folder_header
from simpletuner.data.images.images import DECODE_ERRORS
from simpletuner.data.samples.dataset_warnings import dataset_warnings
from simpletuner.data.samples.discovery import Discovery
from simpletuner.data.scan.comparison import DatasetFiles
from simpletuner.data.scan.file_list import list_images, with_folder_rows
from simpletuner.data.scan.stale_file_watcher import version_of
from simpletuner.data.storage.storage import LocalStorage, StoredFile
from simpletuner.errors import DataError
from simpletuner.settings.values.shape import Shape
from simpletuner.tools.dataset.contents import Content, read_content


def write_frames(folder: Path, pattern: str = "{:04}.png", numbers: Sequence[int] = range(12), size=SIZE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for place, number in enumerate(numbers):
        Image.fromarray(frame_of(place, size)).save(folder / pattern.format(number))
    return folder


def dataset_of(folder: Path, **video) -> LocalImages:
    rules = VideoSettings.model_validate({"num_frames": 9, "frame_folders_fps": 24, **video})
    return LocalImages(id="d", dataset_type="video", instance_data_dir=folder, resolution=64, video=rules)


def clips(folder: Path, **video) -> Discovery:
    return scanning.found([dataset_of(folder, **video)], alignment_px=16, frame_step=4)


@pytest.fixture
def films(tmp_path) -> Path:
    """Two folders of frames, one of them unpadded and in a folder, beside a video; each with a caption."""
    root = tmp_path / "films"
    write_frames(root / "clip.v2")
    write_frames(root / "more" / "walk", "shot-2_{}.jpg", range(3, 15))
    write_video(root / "more" / "film.mp4")
    (root / "cover.jpg").touch()
    (root / "more" / "poster.jpg").touch()
    (root / "clip.v2" / ".0099.png").touch()
    for name in ("clip.v2", "more/walk", "more/film"):
        (root / f"{name}.txt").write_text(f"of {name}\n")
    return root


def test_folders_of_frames_are_clips_beside_videos(films):
    found = clips(films, clip_position="middle")
    assert [(each.name, each.captions) for each in found.samples] == [
        ("clip.v2/", ("of clip.v2",)),
        ("more/film.mp4", ("of more/film",)),
        ("more/walk/", ("of more/walk",)),
    ]
    assert [each.geometry.original.frames for each in found.samples] == [12, 20, 12]
    for sample in (found.samples[0], found.samples[2]):
        assert numbers_of(list(sample.images(SIZE))) == list(range(1, 10))
        assert numbers_of(list(sample.images(SIZE, [0, 4, 8]))) == [1, 5, 9]
        pixels = decode_image(sample)
        assert not isinstance(pixels, str) and pixels.shape == (3, 9, 48, 80)
    assert found.not_read == {".jpg": 2} and not found.broken
    [warning] = [each for each in dataset_warnings(found, 16) if "not read" in each]
    assert "MP4, MOV" in warning and "folders of numbered JPEG, PNG" in warning
    phrase = dataset_of(films).model_copy(update={"caption_strategy": "filename"})
    named = scanning.found([phrase], alignment_px=16, frame_step=4).samples
    assert [each.captions for each in named] == [("clip.v2",), ("film",), ("walk",)]


def test_without_the_key_images_are_not_read_and_it_is_named(films):
    found = clips(films, frame_folders_fps=None)
    assert [each.name for each in found.samples] == ["more/film.mp4"]
    [warning] = [each for each in dataset_warnings(found, 16) if "not read" in each]
    assert "12 .png" in warning and "clips with `frame_folders_fps` in the block `video`" in warning
    with pytest.raises(DataError) as caught:
        clips(films / "clip.v2", frame_folders_fps=None)
    assert "frame_folders_fps" in caught.value.hint


def test_the_scan_opens_the_first_frame_alone_and_frames_are_left_out_by_the_given_rate(films):
    dataset, storage = dataset_of(films, fps=12, num_frames=5, frame_folders_fps=24), OpenedFiles(films)
    scan = scanning.scanned(dataset, storage)
    assert storage.opened == ["clip.v2/0000.png", "more/film.mp4", "more/walk/shot-2_3.jpg"]
    assert scan.table["fps"].to_pylist()[::2] == [0, 0]
    found = scanning.found([dataset], alignment_px=16, frame_step=4).samples
    assert numbers_of(list(found[0].images(SIZE))) == [0, 2, 4, 6, 8]
    slow = clips(films, fps=12, num_frames=5, frame_folders_fps=12).samples
    assert numbers_of(list(slow[0].images(SIZE))) == [0, 1, 2, 3, 4]


def broken(films: Path) -> str:
    [(name, why)] = clips(films).broken.items()
    assert name == "d/clip.v2/"
    return why


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["1.png", "2.png", "4.png"], "lacks frame 3 of 1 to 4"),
        (["0001.png", "0004.png", "0006.png"], "lacks frame 2 of 1 to 6 and 2 more"),
        (["1.png", "2.png", "poster.png"], "has an image without a number, poster.png"),
        (["1.png", "2.png", "02.jpg"], "has two images with the number 2, 02.jpg and 2.png"),
    ],
)
def test_numbers_that_are_no_sequence_are_a_sentence(films, names, said):
    for path in (films / "clip.v2").iterdir():
        path.unlink()
    for name in names:
        write_frames(films / "clip.v2", name, [0])
    assert broken(films) == said


def test_a_broken_first_frame_is_known_by_the_scan_and_others_when_they_are_decoded(films):
    frames = films / "clip.v2"
    (frames / "0000.png").write_bytes(b"torn")
    assert broken(films) == "frame 0000.png: is not an image in a known format, or is damaged"
    (frames / "0000.png").unlink()
    (frames / "0000.png").symlink_to("/dev/null")
    assert broken(films) == "frame 0000.png: is not a regular file"
    (frames / "0000.png").unlink()
    write_frames(frames, "{:04}.png", [0])
    content = (frames / "0003.png").read_bytes()
    (frames / "0003.png").write_bytes(content[:60])
    said = decode_image(clips(films).samples[0])
    assert isinstance(said, str) and said.startswith("frame 0003.png: ") and "<" not in said
    write_frames(frames, "{:04}.png", [3], (32, 32))
    assert decode_image(clips(films).samples[0]) == "frame 0003.png: has 32x32 px, and the folder 64x48"
    sample = clips(films).samples[0]
    (frames / "0011.png").unlink()
    said = decode_image(sample)
    assert said == "has 11 frames, not 12: the table is wrong, or the folder changed"
    for path in frames.iterdir():
        path.unlink()
    assert decode_image(sample) == "has no image that is read"
    frames.rmdir()
    assert "No such file or directory" in str(decode_image(sample))


def test_any_frame_changes_version_key_and_what_is_compared(films):
    def seen() -> tuple[object, ...]:
        sample = clips(films).samples[0]
        [row] = [row for name, row in files_of(films).ids() if name.endswith("v2/")]
        content = read_content(sample)
        assert isinstance(content, Content)
        assert version_of(films, "clip.v2/") == row["version"] == sample.version
        return latents_parts(sample, "vae", "fp32")["file"], files_of(films).facts(row).ends, content.checksum

    first, frame = seen(), films / "clip.v2" / "0007.png"
    assert seen() == first
    content, time = frame.read_bytes(), frame.stat().st_mtime_ns
    os.utime(frame, ns=(time, time + 1))
    touched = seen()
    assert touched[0] != first[0] and touched[1:] == first[1:], "copies of a folder may have other times"
    frame.write_bytes(content[:-1] + b"?")
    assert all(new != old for new, old in zip(seen(), first, strict=True))
    frame.rename(frame.with_name("0012.png"))
    assert version_of(films, "clip.v2/") != first[0] and version_of(films, "gone/") == ""


def files_of(films: Path) -> DatasetFiles:
    dataset, storage = dataset_of(films), LocalStorage(films)
    return DatasetFiles(dataset, storage, list_images(dataset, storage, lambda: None))


@pytest.mark.parametrize("name", ["{}", "{}/"])
def test_a_table_names_folders_with_or_without_a_slash(films, tmp_path, name):
    keys = {"num_frames": 12, "fps": 48.0, "width": 64, "height": 48}
    rows = [{"file": name.format(each), "caption": f"row {each}", **keys} for each in ("clip.v2", "more/walk")]
    table = write_rows(tmp_path / "table.parquet", [*rows, {**rows[0], "file": "film.mp4", "num_frames": 20}])
    block = {"dataset_type": "video", "metadata_backend": "parquet", "caption_strategy": "parquet"}
    rules = {"num_frames": 3, "fps": 12, "frame_folders_fps": 24}
    scanned = scan_table(films, table, {}, **block, video=rules)
    assert scanned.opened == [] and {*scanned.captions} == {"clip.v2/", "more/walk/", "more/film.mp4"}
    assert scanned.captions["more/walk/"] == ("row more/walk",)
    assert numbers_of(list(scanned.found.samples[0].images(SIZE))) == [0, 4, 8]  # the table's rate counts


def test_mistakes_in_the_key(tmp_path):
    said = refusal(data_of(tmp_path, image(dataset_type="video", video={"frame_folders_fps": 0})))
    assert "video.frame_folders_fps = 0" in said
    entry = {"id": "a", "type": "csv", "csv_file": "a.csv", "csv_cache_dir": "b", "caption_strategy": "instanceprompt"}
    video = {"dataset_type": "video", "video": {"frame_folders_fps": 24}}
    said = refusal(data_of(tmp_path, {**entry, **video, "instance_prompt": "x"}))
    assert "folders are of type local, aws, gcs or azure" in said


NAMES = st.lists(st.text("01289a_-é.", min_size=1, max_size=4).map(lambda name: f"{name}.png"), unique=True, max_size=8)


@given(NAMES)
def test_any_names_are_in_order_or_refused_in_a_sentence(names):
    try:
        frames = in_order(names)
    except ValueError as error:
        assert str(error).startswith(("has ", "lacks "))
        return
    assert sorted(frames) == sorted(names)
    numbers = [int(re.findall("[0-9]+", PurePosixPath(name).stem)[-1]) for name in frames]
    assert numbers == list(range(numbers[0], numbers[0] + len(frames)))


@given(st.integers(0, 10**30), st.integers(1, 30), st.integers(0, 3), st.randoms())
def test_a_sequence_is_in_the_order_of_its_numbers_however_it_is_padded(first, count, width, random):
    frames = [f"shot 7_{number:0{width}}x.png" for number in range(first, first + count)]
    mixed = random.sample(frames, count)
    assert in_order(mixed) == frames


PARTS = st.sampled_from(["a", "a-b", "b", "1.png", "2.png", "c.mp4", "d.txt"])
TREE = st.lists(st.lists(PARTS, min_size=1, max_size=3), max_size=14)


@given(TREE)
def test_each_image_is_in_one_row_or_noted_whatever_the_folders(paths):
    files = sorted({"/".join(path) for path in paths if "." in path[-1]}, key=lambda name: name.split("/"))
    noted: list[StoredFile] = []
    rows = [each.name for each in with_folder_rows([StoredFile(name, 1, "v") for name in files], noted.extend)]
    folders = {name for name in rows if name.endswith("/")}
    images: Mapping[str, str] = {name: name.rpartition("/")[0] + "/" for name in files if name.endswith(".png")}
    with_video = {name.rpartition("/")[0] + "/" for name in files if name.endswith(".mp4")}
    assert folders == {*images.values()} - with_video - {"/"} and len(rows) == len({*rows})
    assert {each.name for each in noted} == {name for name, own in images.items() if own not in folders}
    assert [name for name in rows if name not in folders] == [name for name in files if name not in images]


FLIPS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), max_size=4)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@settings(max_examples=60, deadline=None)
@given(place=st.integers(0, 4), flips=FLIPS, kept=st.floats(0, 1))
def test_damaged_frames_are_read_or_refused_in_a_sentence(films_of_all_formats, place, flips, kept):
    whole = dict(films_of_all_formats)
    name = sorted(whole)[place]
    content = bytearray(whole[name])
    for where, bit in flips:
        content[int(where * len(content))] ^= 1 << bit
    whole[name] = bytes(content[: round(kept * len(content))])
    path = films_of_all_formats.folder / "damaged"
    path.mkdir(exist_ok=True)
    for each, bytes_ in whole.items():
        (path / each).write_bytes(bytes_)
    storage = LocalStorage(path.parent)
    names = storage.list_folder("damaged/", {PurePosixPath(each).suffix for each in whole})
    try:
        header = read_folder_header(names, storage.open)
        shape = Shape(header.frames, *header.size[::-1])
        assert len(list(read_folder_frames(names, storage.open, range(len(names)), shape, SIZE))) == len(names)
    except DECODE_ERRORS as error:
        assert str(error).startswith(f"frame {name}: ") and "<" not in str(error) and "\n" not in str(error)


class Frames(dict[str, bytes]):
    """The frames of one clip, each in another format, and a folder for damaged ones."""

    folder: Path

    def __repr__(self) -> str:
        return ", ".join(self)


@pytest.fixture(scope="module")
def films_of_all_formats(tmp_path_factory) -> Frames:
    frames = Frames()
    frames.folder = tmp_path_factory.mktemp("damaged")
    for number, suffix in enumerate((".png", ".jpg", ".tif", ".bmp", ".avif")):
        path = frames.folder / f"{number}{suffix}"
        Image.fromarray(np.ascontiguousarray(frame_of(number))).save(path)
        frames[path.name] = path.read_bytes()
    return frames
