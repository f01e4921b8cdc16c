from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest
import scanning
from PIL import Image

from simpletuner.data.config.dataset_types import LocalImages
from simpletuner.data.samples.discovery import Discovery
from simpletuner.data.storage.storage import scan_folder
from simpletuner.errors import DataError


def add(folder: Path, name: str, caption: str | None = "a caption", size: tuple[int, int] = (64, 64)) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, "red").save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def found_in(folder: Path, name: str = "d", **values) -> Discovery:
    return scanning.found([LocalImages(id=name, instance_data_dir=folder, resolution=64, **values)])


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_samples_are_found_in_all_folders_sorted_and_hidden_ones_skipped(tmp_path):
    for name in ("z.png", "sub/b.jpg", "sub/deep/a.webp", "A.png", ".hidden/x.png", ".y.png"):
        add(tmp_path, name)
    samples = found_in(tmp_path).samples
    assert [sample.id for sample in samples] == ["d/A.png", "d/sub/b.jpg", "d/sub/deep/a.webp", "d/z.png"]
    assert [Path(sample.storage.describe(sample.name)) for sample in samples] == [
        tmp_path / sample.id[2:] for sample in samples
    ]
    assert {sample.dataset for sample in samples} == {"d"}


def test_discovery_gives_the_same_list_again_and_writes_nothing(tmp_path):
    for number in range(12):
        add(tmp_path, f"{number}.png", size=(64 + number, 64))
    before = contents(tmp_path)
    assert list(found_in(tmp_path).samples) == list(found_in(tmp_path).samples)
    assert contents(tmp_path) == before


def test_sizes_and_buckets_come_with_the_sample(tmp_path):
    add(tmp_path, "wide.png", size=(128, 32))
    (sample,) = found_in(tmp_path).samples
    assert sample.geometry.original.size == (128, 32)
    assert sample.geometry.target.size == (128, 64)


def test_the_version_changes_when_the_file_does(tmp_path):
    add(tmp_path, "a.png")
    (first,) = found_in(tmp_path).samples
    (same,) = found_in(tmp_path).samples
    add(tmp_path, "a.png", size=(80, 80))
    (changed,) = found_in(tmp_path).samples
    assert first.version == same.version != changed.version


@pytest.mark.parametrize(
    ("text", "captions"),
    [
        ("one caption", ("one caption",)),
        ("  one  \n\n  two\n   \nthree\n", ("one", "two", "three")),
        ("one\r\ntwo\r\n", ("one", "two")),
        ("ein Bär, 熊", ("ein Bär, 熊",)),
    ],
)
def test_a_text_file_holds_a_caption_per_line(tmp_path, text, captions):
    add(tmp_path, "a.png", text)
    assert found_in(tmp_path).samples[0].captions == captions


def test_the_file_name_is_the_caption_on_request(tmp_path):
    add(tmp_path, "a_red_square.png", None)
    assert found_in(tmp_path, caption_strategy="filename").samples[0].captions == ("a red square",)


def test_the_instance_prompt_is_the_caption_on_request(tmp_path):
    add(tmp_path, "a.png", "ignored")
    values = {"caption_strategy": "instanceprompt", "instance_prompt": "sks bear", "prepend_instance_prompt": True}
    assert found_in(tmp_path, **values).samples[0].captions == ("sks bear",)


@pytest.mark.parametrize(
    ("strategy", "captions"), [("textfile", ("sks bear one", "sks bear two")), ("filename", ("sks bear a",))]
)
def test_the_instance_prompt_is_put_before_every_caption_on_request(tmp_path, strategy, captions):
    add(tmp_path, "a.png", "one\ntwo")
    values = {"caption_strategy": strategy, "instance_prompt": "sks bear"}
    assert found_in(tmp_path, prepend_instance_prompt=True, **values).samples[0].captions == captions
    assert "sks" not in found_in(tmp_path, **values).samples[0].captions[0]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_captions_are_read_as_their_byte_order_mark_says(tmp_path, encoding):
    add(tmp_path, "a.png").with_suffix(".txt").write_bytes("ein Bär, 熊\r\nzwei".encode(encoding))
    assert found_in(tmp_path).samples[0].captions == ("ein Bär, 熊", "zwei")


def test_captions_that_are_no_text_are_named_with_the_reason_and_never_trained_on(tmp_path):
    contents = {
        "latin": "café au lait".encode("latin-1"),
        "utf16": "a cat".encode("utf-16-le"),
        "cut": "\ufeffa cat".encode("utf-16")[:-1],
        "large": bytes(2 << 20),
    }
    for name, content in contents.items():
        add(tmp_path, f"{name}.png").with_suffix(".txt").write_bytes(content)
    add(tmp_path, "pipe.png", None)
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError) as caught:
        found_in(tmp_path)
    assert caught.value.message == (
        "dataset `d`: 5 caption files cannot be read as text:"
        "\n  cut.txt is not UTF-16: byte 12 is 0x74"
        "\n  large.txt has 2,097,152 bytes; at most 1,048,576 are read"
        '\n  latin.txt is not UTF-8: byte 3 is 0xe9 (as windows-1252: "café au lait")'
        "\n  pipe.txt cannot be read: not a regular file"
        "\n  utf16.txt has a zero at byte 1: is it UTF-16 without a byte order mark?"
    )
    assert "iconv" in caught.value.hint and "--caption_encoding=windows-1252" in caught.value.hint
    assert len(found_in(tmp_path, caption_strategy="filename").samples) == 5


@pytest.mark.parametrize(
    ("encoding", "captions"),
    [
        ("windows-1252", {"latin": "café", "utf8": "ein Bär", "marked": "熊", "ascii": "a cat"}),
        ("utf-16-le", {"utf16": "a cät", "utf8": "ein Bär", "marked": "熊"}),
        ("iso-2022-jp", {"jis": "熊", "utf8": "ein Bär", "marked": "熊", "ascii": "a cat"}),
    ],
)
def test_one_encoding_beside_utf_8_is_allowed_by_name(tmp_path, encoding, captions):
    encodings = {"latin": "latin-1", "utf8": "utf-8", "marked": "utf-16", "ascii": "ascii"}
    encodings |= {"utf16": "utf-16-le", "jis": "iso-2022-jp"}
    for name, caption in captions.items():
        add(tmp_path, f"{name}.png").with_suffix(".txt").write_bytes(caption.encode(encodings[name]))
    samples = found_in(tmp_path, caption_encoding=encoding).samples
    assert {Path(sample.name).stem: sample.captions for sample in samples} == {
        name: (caption,) for name, caption in captions.items()
    }
    (tmp_path / "utf8.txt").write_bytes(b"\x81\xff\xfe")
    with pytest.raises(DataError, match="utf8.txt is not (CP1252|UTF-16-LE|ISO2022_JP)"):
        found_in(tmp_path, caption_encoding=encoding)


@pytest.mark.parametrize("name", ["windows", "base64", "undefined"])
def test_what_is_no_encoding_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="is no encoding that Python knows"):
        LocalImages(id="d", instance_data_dir=tmp_path, caption_encoding=name)


def test_only_regular_files_of_bounded_size_are_pictures(tmp_path):
    add(tmp_path, "good.png")
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "circle.png").symlink_to(tmp_path / "circle.png")
    (tmp_path / "null.webp").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listening, contextlib.chdir(tmp_path):
        listening.bind("door.png")
    with (tmp_path / "sparse.png").open("wb") as file:
        file.truncate(10 << 30)
    (tmp_path / "folder.png").mkdir()
    (tmp_path / os.fsdecode(b"caf\xe9.png")).write_bytes((tmp_path / "good.png").read_bytes())
    found = found_in(tmp_path, caption_strategy="filename")
    assert [sample.id for sample in found.samples] == ["d/good.png"]
    reasons = {name.removeprefix("d/"): reason for name, reason in found.broken.items()}
    assert set(reasons) == {"pipe.jpg", "circle.png", "null.webp", "door.png", "sparse.png", "caf\udce9.png"}
    assert reasons["pipe.jpg"] == reasons["null.webp"] == reasons["door.png"] == "is not a regular file"
    assert reasons["sparse.png"] == "has 10,737,418,240 bytes; at most 1,073,741,824 are read"
    assert reasons["caf\udce9.png"] == "its name is not UTF-8: rename it"


def test_what_the_run_writes_below_its_pictures_is_never_trained_on(tmp_path):
    add(tmp_path, "a.png")
    output, latents = tmp_path / "out", tmp_path / "sub" / "latents"
    for name in ("out/loss.png", "out/validation/grid-000002.png", "out/validation/step-000002/trained-00.png"):
        add(tmp_path, name, None)
    add(tmp_path, "sub/latents/x.png", None)
    add(tmp_path, "sub/b.png")
    (tmp_path / "link").symlink_to(output)

    def found(folder: Path, *written: Path) -> Discovery:
        return scanning.found([LocalImages(id="d", instance_data_dir=folder, resolution=64)], written)

    inside = found(tmp_path, output, latents)
    assert [sample.id for sample in inside.samples] == ["d/a.png", "d/sub/b.png"]
    assert inside.others[0].written == [str(tmp_path / "link"), str(output), str(latents)]
    add(output, "pictures/c.png")
    assert [sample.id for sample in found(output / "pictures", output).samples] == ["d/c.png"]
    same = found(output, output)
    assert [sample.id for sample in same.samples] == ["d/pictures/c.png"]
    assert same.others[0].written == [str(output / "loss.png"), str(output / "validation")]


def test_a_folder_that_cannot_be_read_is_named(tmp_path):
    add(tmp_path, "a.png")
    with pytest.raises(DataError, match="cannot read the folder .*/nowhere: No such file or directory"):
        scan_folder(tmp_path / "nowhere")


def test_a_broken_picture_is_named_with_the_reason_and_left_where_it_is(tmp_path):
    add(tmp_path, "good.png")
    bad = add(tmp_path, "sub/bad.png")
    bad.write_text("no picture")
    found = found_in(tmp_path)
    assert [sample.id for sample in found.samples] == ["d/good.png"]
    assert found.broken == {"d/sub/bad.png": "is not an image in a known format, or is damaged"}
    assert bad.read_text() == "no picture"


def test_pictures_outside_the_limits_are_counted(tmp_path):
    add(tmp_path, "good.png")
    add(tmp_path, "small.png", size=(20, 20))
    add(tmp_path, "wide.png", size=(640, 64))
    found = found_in(tmp_path, minimum_image_size=40, maximum_aspect_ratio=3)
    assert (len(found.samples), found.unwanted, found.broken) == (1, 2, {})


def test_pictures_without_captions_are_an_error_with_count_and_name(tmp_path):
    add(tmp_path, "good.png")
    add(tmp_path, "one.png", None)
    add(tmp_path, "two.png", " \n ")
    with pytest.raises(DataError) as caught:
        found_in(tmp_path)
    assert caught.value.message == (
        "dataset `d`: 2 images without a caption in a .txt file of the same name:\n  one.png\n  two.png"
    )
    assert "caption_strategy" in caught.value.hint and "--skip_uncaptioned" in caught.value.hint
    skipping = found_in(tmp_path, skip_uncaptioned=True)
    assert [sample.id for sample in skipping.samples] == ["d/good.png"]
    assert (skipping.skipped, skipping.uncaptioned) == (2, {"d": ["one.png", "two.png"]})
    assert len(found_in(tmp_path, skip_uncaptioned=True, max_num_samples=1).samples) == 1
    (tmp_path / "good.txt").unlink()
    with pytest.raises(DataError, match="no usable image in .* \\(3 without a caption\\)"):
        found_in(tmp_path, skip_uncaptioned=True)


@pytest.mark.parametrize("prepare", ["missing", "a file", "empty", "only text"])
def test_a_folder_without_pictures_is_an_error_that_names_it(tmp_path, prepare):
    folder = tmp_path / "pictures"
    if prepare == "a file":
        folder.write_text("")
    elif prepare != "missing":
        folder.mkdir()
    if prepare == "only text":
        (folder / "a.txt").write_text("a caption")
    with pytest.raises(DataError) as caught:
        found_in(folder)
    assert str(folder) in caught.value.message
    assert "dataset `d`" in caught.value.message


def test_of_many_pictures_without_captions_twenty_are_named(tmp_path):
    for number in range(25):
        add(tmp_path, f"{number:02d}.png", None)
    with pytest.raises(DataError) as caught:
        found_in(tmp_path)
    assert caught.value.message.endswith("\n  18.png\n  19.png\n  and 5 more")


def test_a_folder_of_nothing_but_other_formats_says_which(tmp_path):
    for name in ("a.psd", "b.PSD", "c.jxl"):
        (tmp_path / name).touch()
    with pytest.raises(DataError) as caught:
        found_in(tmp_path)
    assert caught.value.message.endswith("(3 not read)")
    assert caught.value.hint.endswith("; .psd is not")


def test_a_folder_of_nothing_usable_says_how_many_are_left_out(tmp_path):
    add(tmp_path, "bad.png").write_text("no picture")
    add(tmp_path, "small.png", size=(20, 20))
    with pytest.raises(DataError) as caught:
        found_in(tmp_path, minimum_image_size=40)
    assert "(1 broken, 1 outside the size limits)" in caught.value.message


def test_each_dataset_must_hold_something_of_its_own(tmp_path):
    add(tmp_path, "full/a.png")
    (tmp_path / "empty").mkdir()
    datasets = [LocalImages(id=name, instance_data_dir=tmp_path / name) for name in ("full", "empty")]
    with pytest.raises(DataError, match="dataset `empty`"):
        scanning.found(datasets)


def test_the_same_folder_in_two_datasets_gives_two_samples(tmp_path):
    add(tmp_path, "a.png")
    datasets = [
        LocalImages(id=name, instance_data_dir=tmp_path, resolution=resolution)
        for name, resolution in (("low", 64), ("high", 128))
    ]
    samples = scanning.found(datasets).samples
    assert {sample.id: sample.geometry.target.size for sample in samples} == {
        "low/a.png": (64, 64),
        "high/a.png": (128, 128),
    }


def test_a_link_to_nowhere_is_a_broken_picture(tmp_path):
    add(tmp_path, "good.png")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    found = found_in(tmp_path)
    assert (len(found.samples), set(found.broken)) == (1, {"d/gone.png"})


def test_a_link_to_a_folder_above_does_not_multiply_pictures(tmp_path):
    add(tmp_path, "a.png")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert len(found_in(tmp_path).samples) == 1


def test_a_byte_order_mark_is_no_part_of_a_caption(tmp_path):
    add(tmp_path, "a.png").with_suffix(".txt").write_bytes(b"\xef\xbb\xbfa bear")
    assert found_in(tmp_path).samples[0].captions == ("a bear",)


def test_a_file_name_without_words_is_reported_as_what_it_is(tmp_path):
    add(tmp_path, "_.png", None)
    with pytest.raises(DataError) as caught:
        found_in(tmp_path, caption_strategy="filename")
    assert ".txt" not in caught.value.message


def test_a_picture_that_would_be_resized_beyond_all_memory_is_left_out(tmp_path):
    add(tmp_path, "good.png")
    add(tmp_path, "line.png", size=(30000, 1))
    found = found_in(tmp_path, crop=True)
    assert found.broken == {}
    found = scanning.found([LocalImages(id="d", instance_data_dir=tmp_path, crop=True)])
    assert found.broken == {"d/line.png": "would be resized to 30720000x1024 px"}
