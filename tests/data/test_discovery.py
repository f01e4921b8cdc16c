from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from simpletuner.data.datasets import ImageDataset
from simpletuner.data.discovery import Found, discover
from simpletuner.errors import DataError


def add(folder: Path, name: str, caption: str | None = "a caption", size: tuple[int, int] = (64, 64)) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, "red").save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def found_in(folder: Path, name: str = "d", **values) -> Found:
    return discover([ImageDataset(id=name, instance_data_dir=folder, resolution=64, **values)], 64, 0)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_samples_are_found_in_all_folders_sorted_and_hidden_ones_skipped(tmp_path):
    for name in ("z.png", "sub/b.jpg", "sub/deep/a.webp", "A.png", ".hidden/x.png", ".y.png"):
        add(tmp_path, name)
    samples = found_in(tmp_path).samples
    assert [sample.id for sample in samples] == ["d/A.png", "d/sub/b.jpg", "d/sub/deep/a.webp", "d/z.png"]
    assert [sample.path for sample in samples] == [tmp_path / sample.id[2:] for sample in samples]
    assert {sample.dataset for sample in samples} == {"d"}


def test_discovery_gives_the_same_list_again_and_writes_nothing(tmp_path):
    for number in range(12):
        add(tmp_path, f"{number}.png", size=(64 + number, 64))
    before = contents(tmp_path)
    assert found_in(tmp_path) == found_in(tmp_path)
    assert contents(tmp_path) == before


def test_sizes_and_buckets_come_with_the_sample(tmp_path):
    add(tmp_path, "wide.png", size=(128, 32))
    (sample,) = found_in(tmp_path).samples
    assert sample.geometry.original == (128, 32)
    assert sample.geometry.target == (128, 64)


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


def test_bytes_that_are_no_utf8_do_not_stop_discovery(tmp_path):
    add(tmp_path, "a.png").with_suffix(".txt").write_bytes(b"caf\xe9")
    assert found_in(tmp_path).samples[0].captions[0].startswith("caf")


def test_a_broken_picture_is_named_with_the_reason_and_left_where_it_is(tmp_path):
    add(tmp_path, "good.png")
    bad = add(tmp_path, "sub/bad.png")
    bad.write_text("no picture")
    found = found_in(tmp_path)
    assert [sample.id for sample in found.samples] == ["d/good.png"]
    assert set(found.broken) == {"d/sub/bad.png"}
    assert "bad.png" in found.broken["d/sub/bad.png"]
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
    assert "dataset `d`: 2 pictures" in caught.value.message
    assert "caption" in caught.value.message
    assert "one.png" in caught.value.message
    assert "caption_strategy" in caught.value.hint


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


def test_a_folder_of_nothing_usable_says_how_many_are_left_out(tmp_path):
    add(tmp_path, "bad.png").write_text("no picture")
    add(tmp_path, "small.png", size=(20, 20))
    with pytest.raises(DataError) as caught:
        found_in(tmp_path, minimum_image_size=40)
    assert "(1 broken, 1 outside the size limits)" in caught.value.message


def test_each_dataset_must_hold_something_of_its_own(tmp_path):
    add(tmp_path, "full/a.png")
    (tmp_path / "empty").mkdir()
    datasets = [ImageDataset(id=name, instance_data_dir=tmp_path / name) for name in ("full", "empty")]
    with pytest.raises(DataError, match="dataset `empty`"):
        discover(datasets, 64, 0)


def test_the_same_folder_in_two_datasets_gives_two_samples(tmp_path):
    add(tmp_path, "a.png")
    datasets = [
        ImageDataset(id=name, instance_data_dir=tmp_path, resolution=resolution)
        for name, resolution in (("low", 64), ("high", 128))
    ]
    samples = discover(datasets, 64, 0).samples
    assert {sample.id: sample.geometry.target for sample in samples} == {
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
