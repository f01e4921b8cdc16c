"""Datasets of the Hugging Face hub as they are downloaded: Parquet files with images in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ranks
from conftest import ROOT, SMALL
from dataset_files import data_of, refusal
from hub import COMMIT, serving
from scanning import found
from tabled import scan_table
from video_files import SIZE, numbers_of, write_video

from simpletuner.caches.latents import decode_image
from simpletuner.data.config.dataset_types import LocalImages, SnapshotImages
from simpletuner.data.config.datasets import load_datasets
from simpletuner.data.images.image_formats import BY_PILLOW
from simpletuner.data.samples.samples import Samples
from simpletuner.data.storage.hub_datasets import as_fetched, fetch_files, files_of_split, find_files
from simpletuner.errors import DataError, EnvironmentNotReady, SettingsError
from simpletuner.settings.declared.sections import Data
from simpletuner.tools.dataset.contents import Content, read_content

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def row(path: Path) -> dict:
    return {"bytes": path.read_bytes(), "path": path.name}


def write(folder: Path, name: str, images: list, texts: list, kind: pa.DataType = IMAGE, group: int = 3) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table({"image": pa.array(images, kind), "text": texts, "other": list(range(len(texts)))})
    pq.write_table(table, folder / name, row_group_size=group)


def snapshot(folder: Path, **keys) -> SnapshotImages:
    return SnapshotImages(**{"id": "d", "dataset_name": folder, "resolution": 64, "caption_column": "text", **keys})


def test_rows_are_the_images_and_captions_of_a_folder(shapes, tmp_path):
    files = sorted(shapes.glob("*.png"))[:10]
    texts = [file.with_suffix(".txt").read_text() for file in files]
    write(tmp_path / "hub" / "data", "train-00000-of-00002.parquet", [row(each) for each in files[:7]], texts[:7])
    plain = [each.read_bytes() for each in files[7:]]
    write(tmp_path / "hub" / "data", "train-00001-of-00002.parquet", plain, texts[7:], pa.binary())
    write(tmp_path / "hub" / "data", "test-00000-of-00001.parquet", [row(files[0])], ["not of this split"])
    own = found([snapshot(tmp_path / "hub")]).samples
    theirs = found([LocalImages(id="d", instance_data_dir=shapes, resolution=64)]).samples
    assert [sample.name for sample in own][6:8] == [
        "data/train-00000-of-00002/00000006.png",
        "data/train-00001-of-00002/00000000.png",
    ]
    for ours, reference in zip(own, theirs, strict=False):
        assert ours.geometry == reference.geometry and ours.captions == reference.captions
        assert np.array_equal(decode_image(ours), decode_image(reference))
    for position in (9, 0, 5, 1, 8):  # row groups in any order
        assert np.array_equal(decode_image(own[position]), decode_image(theirs[position]))


def test_rows_without_an_image_are_named_and_lists_of_captions_are_several(shapes, tmp_path):
    files = sorted(shapes.glob("*.png"))[:4]
    rows = [row(files[0]), {"bytes": None, "path": "x.png"}, {"bytes": b"torn", "path": "y.png"}, row(files[3])]
    texts = [["one", "two\nlines"], ["a"], ["b"], ["c"]]
    write(tmp_path, "train.parquet", rows, texts)
    discovery = found([snapshot(tmp_path)])
    assert [sample.captions for sample in discovery.samples] == [("one", "two", "lines"), ("c",)]
    assert {name: why.split(":")[0] for name, why in discovery.broken.items()}.keys() == {
        "d/train/00000001.png",
        "d/train/00000002.png",
    }
    assert discovery.broken["d/train/00000001.png"] == "has no bytes in its row"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"image_column": "imge"}, "has no column `imge`"),
        ({"image_column": "other"}, "column `other` of .* holds no images"),
        ({"caption_column": "txt"}, "has no column `txt`"),
        ({"split": "validation"}, "no Parquet file of the split `validation`"),
    ],
)
def test_what_is_not_there_is_named(shapes, tmp_path, keys, sentence):
    write(tmp_path, "train.parquet", [row(shapes / "0000.png")], ["a circle"])
    with pytest.raises(DataError, match=sentence):
        found([snapshot(tmp_path, **keys)])


def test_paths_in_the_place_of_bytes_and_what_save_to_disk_writes_are_named(shapes, tmp_path):
    """As `datasets` writes an imagefolder with to_parquet, and any dataset with save_to_disk."""
    file = next(shapes.glob("*.png"))
    write(tmp_path / "hub", "train.parquet", [row(file), {"bytes": None, "path": str(file)}], ["a", "b"])
    samples = found([snapshot(tmp_path / "hub")]).samples
    said = found([snapshot(tmp_path / "hub")]).broken["d/train/00000001.png"]
    assert len(samples) == 1 and f"the path {file}, which is not followed: `push_to_hub`" in said
    (tmp_path / "disk").mkdir()
    for name in ("data-00000-of-00001.arrow", "dataset_info.json", "state.json"):
        (tmp_path / "disk" / name).write_bytes(b"{}")
    with pytest.raises(DataError) as caught:
        found([snapshot(tmp_path / "disk")])
    assert "written by `save_to_disk`" in caught.value.hint
    assert f'`load_from_disk("{tmp_path / "disk"}").to_parquet("OTHER/train.parquet")`' in caught.value.hint
    (tmp_path / "disk" / "dataset_dict.json").write_text("{}")  # of several splits: it has no to_parquet
    with pytest.raises(DataError) as caught:
        found([snapshot(tmp_path / "disk", split="test")])
    assert f'`load_from_disk("{tmp_path / "disk"}")["test"].to_parquet("OTHER/test.parquet")`' in caught.value.hint


def test_a_row_without_a_caption_is_named_by_its_column(shapes, tmp_path):
    """As img2dataset writes rows of a list without a caption."""
    files = sorted(shapes.glob("*.png"))[:2]
    write(tmp_path, "train.parquet", [row(file) for file in files], ["a", None])
    with pytest.raises(DataError, match="1 image without a caption in the column `text`") as caught:
        found([snapshot(tmp_path)])
    assert caught.value.hint.endswith("or name another caption_column")


def test_a_folder_of_images_beside_a_table_is_named_with_the_keys_that_read_it(tmp_path):
    (tmp_path / "metadata.jsonl").write_text("{}")
    with pytest.raises(DataError, match="no Parquet file") as caught:
        found([snapshot(tmp_path)])
    assert f'caption_strategy parquet and parquet {{"path": "{tmp_path}/metadata.jsonl"' in (caught.value.hint or "")


def test_damaged_files_are_a_sentence(shapes, tmp_path):
    write(tmp_path, "train.parquet", [row(shapes / f"000{n}.png") for n in range(6)], list("abcdef"))
    path, whole = tmp_path / "train.parquet", (tmp_path / "train.parquet").read_bytes()
    random = np.random.default_rng(0)
    outcomes = set()
    for _ in range(60):
        damaged = bytearray(whole)
        for place in random.integers(0, len(whole), 3):
            damaged[place] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged[: len(whole) - int(random.integers(0, 2)) * int(random.integers(1, 300))])
        try:
            discovery = found([snapshot(tmp_path)])
            outcomes |= {"broken"} if discovery.broken else {"read"}
        except DataError:
            outcomes.add("refused")
    assert outcomes == {"read", "broken", "refused"}


def test_the_originals_keys_are_understood(tmp_path):
    file = tmp_path / "datasets.json"
    entry = {"id": "d", "type": "huggingface", "dataset_name": str(tmp_path), "caption_strategy": "huggingface"}
    columns = {"image_column": "picture", "caption_column": "words"}
    file.write_text(json.dumps([entry | {"metadata_backend": "huggingface", "huggingface": columns}]))
    (dataset,), _ = load_datasets(Data(data_backend_config=file))
    assert isinstance(dataset, SnapshotImages) and dataset.caption_strategy == "textfile"
    assert (dataset.image_column, dataset.caption_column) == ("picture", "words") and not dataset.is_on_hub
    file.write_text(json.dumps([entry | {"dataset_type": "video", "huggingface": {"video_column": "clip"}, **columns}]))
    (films,), _ = load_datasets(Data(data_backend_config=file))
    assert isinstance(films, SnapshotImages) and (films.content_column, films.caption_column) == ("clip", "words")
    file.write_text(json.dumps([entry | {"huggingface": {"image_colunm": "picture"}, "hf_token": "hf_secret"}]))
    with pytest.raises(SettingsError) as caught:
        load_datasets(Data(data_backend_config=file))
    assert "image_colunm" in caught.value.message and "did you mean `image_column`?" in caught.value.message
    assert "HF_TOKEN" in caught.value.message and "hf_secret" not in caught.value.message


def test_a_run_trains_on_a_snapshot(sdxl, shapes, train, tmp_path):
    files = sorted(shapes.glob("*.png"))[:8]
    write(tmp_path / "hub", "train.parquet", [row(each) for each in files], [f"caption {n}" for n in range(8)])
    entry = {"id": "d", "type": "huggingface", "dataset_name": str(tmp_path / "hub"), "caption_column": "text"}
    (tmp_path / "datasets.json").write_text(json.dumps([entry]))
    flags = ("--model_family=sdxl", f"--pretrained_model_name_or_path={sdxl}", "--train_batch_size=2")
    run = train(tmp_path / "run", *flags, f"--data_backend_config={tmp_path / 'datasets.json'}", "--max_train_steps=2")
    assert len(run.losses) == 2 and "8 in" in run.said


def test_ranks_fetch_datasets_of_the_hub_once_at_one_commit_and_resume_without_it(sdxl, shapes, starter, tmp_path):
    files = sorted(shapes.glob("*.png"))[:8]
    rows, folder = tmp_path / "hub/datasets/someone/rows", tmp_path / "hub/datasets/someone/folder"
    write(rows / "data", "train-00000.parquet", [row(each) for each in files], [f"caption {n}" for n in range(8)])
    write(rows / "data", "test-00000.parquet", [row(files[0])], ["of another split"])
    (folder / "train").mkdir(parents=True)
    table = [{"file_name": each.name, "text": f"of {each.stem}"} for each in files[:4]]
    for each in files[:4]:
        shutil.copy(each, folder / "train")
    (folder / "train" / "metadata.jsonl").write_text("".join(json.dumps(each) + "\n" for each in table))
    common = {"type": "huggingface", "caption_column": "text"}
    entries = [{"id": name, "dataset_name": f"someone/{name}", **common} for name in ("rows", "folder")]
    entries[0]["revision"] = "v1"
    (tmp_path / "datasets.json").write_text(json.dumps(entries))
    output = tmp_path / "run"
    flags = (*SMALL, "--model_family=sdxl", f"--pretrained_model_name_or_path={sdxl}", "--train_batch_size=2")
    flags = (*flags, f"--data_backend_config={tmp_path / 'datasets.json'}", f"--output_dir={output}", "--use_cpu")

    def run(address: str, *more: str) -> str:
        variables = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
        started = starter.start(ranks.command_line_at_hub, 2, variables, ["train", *flags, *more])
        assert started.wait() == [0, 0], started.said
        return started.said

    with serving(tmp_path / "hub") as hub:
        said = run(hub.address, "--max_train_steps=1")
        assert sorted(hub.fetched) == sorted(
            ["data/train-00000.parquet", "train/metadata.jsonl", *(f"train/{each.name}" for each in files[:4])]
        )
    assert "12 in" in said and f"dataset `rows`: someone/rows of the hub at {COMMIT[:12]}" in said, said
    record = json.loads((output / "hub_datasets.json").read_text())
    assert [(each["revision"], each["commit"]) for each in record.values()] == [("v1", COMMIT), (None, COMMIT)]
    said = run("http://127.0.0.1:9", "--max_train_steps=2")
    assert "12 in" in said and "resuming from" in said, "nothing is asked for that is here"


def test_a_dataset_that_cannot_be_fetched_gets_the_command_that_fetches_it(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(EnvironmentNotReady) as caught:
        find_files(snapshot(Path("someone/rows"), revision="v2"))
    assert (
        "no folder is named someone/rows, and the hub's someone/rows at v2 cannot be fetched: " in caught.value.message
    )
    assert "`hf download someone/rows --repo-type dataset --revision v2 --local-dir FOLDER`" in caught.value.hint


@pytest.mark.parametrize(
    ("names", "files"),
    [
        (["data/train-0.parquet", "data/test-0.parquet", "README.md"], ["data/train-0.parquet"]),
        (["train/a.png", "test/b.png", "train/metadata.csv"], ["train/a.png", "train/metadata.csv"]),
        (["a.png", "metadata.parquet", "b.txt"], ["a.png", "metadata.parquet"]),
        (["data.zip", "script.py", "metadata.csv"], []),
    ],
)
def test_files_of_a_split_are_parquet_files_or_images_with_their_table(names, files):
    assert files_of_split(names, "train", BY_PILLOW) == files


def films_in(folder: Path, *names: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    return [write_video(folder / name, frames=10 + number) for number, name in enumerate(names)]


def test_rows_are_videos_by_the_column_that_video_column_names(tmp_path):
    files = films_in(tmp_path / "films", "a.mp4", "b.webm", "c.avi", "d.mp4")
    rows = [
        row(files[0]),
        row(files[1]),
        {"bytes": files[2].read_bytes(), "path": "c.mpg"},
        {"bytes": None, "path": "x.mp4"},
    ]
    write(tmp_path / "hub", "train.parquet", rows, ["one", "two", "three", "four"], group=2)
    keys = {"dataset_type": "video", "video": {"num_frames": 9, "clip_position": "start"}, "video_column": "image"}
    discovery = found([snapshot(tmp_path / "hub", **keys)], alignment_px=16, frame_step=4)
    assert [(each.name, each.captions, each.geometry.original.frames) for each in discovery.samples] == [
        ("train/00000000.mp4", ("one",), 10),
        ("train/00000001.webm", ("two",), 11),
        ("train/00000002.mp4", ("three",), 12),
    ]
    assert discovery.broken == {"d/train/00000003.mp4": "has no bytes in its row"}
    for sample in discovery.samples:
        assert numbers_of(list(sample.images(SIZE))) == list(range(9))
        assert not isinstance(decode_image(sample), str) and isinstance(read_content(sample), Content)
    with pytest.raises(DataError, match="has no column `video`"):
        found([snapshot(tmp_path / "hub", dataset_type="video")])
    with pytest.raises(DataError, match="column `text` of .* holds no videos") as caught:
        found([snapshot(tmp_path / "hub", dataset_type="video", video_column="text")])
    assert "name it in video_column; one of addresses is read by type csv" in caught.value.hint
    entry = {"id": "d", "type": "huggingface", "dataset_name": str(tmp_path), "caption_column": "text"}
    assert "it is for dataset_type video" in refusal(data_of(tmp_path, {**entry, "video_column": "clip"}))


def test_videos_of_the_hub_are_fetched_with_their_table(tmp_path, monkeypatch):
    folder = tmp_path / "hub/datasets/someone/films"
    films_in(folder / "train", "a.mp4", "b.mkv")
    films_in(folder / "test", "c.mp4")
    (folder / "train" / "poster.png").touch()
    table = [{"file_name": name, "text": f"of {name}", "num_frames": 9} for name in ("a.mp4", "b.mkv")]
    (folder / "train" / "metadata.jsonl").write_text("".join(json.dumps(each) + "\n" for each in table))
    dataset = snapshot(Path("someone/films"), dataset_type="video", video={"num_frames": 9})
    with serving(tmp_path / "hub") as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", hub.address)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            hub.address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home"))
        files = find_files(dataset)
        assert files.files == ["train/a.mp4", "train/b.mkv", "train/metadata.jsonl"] and files.is_of(dataset)
        assert not files.is_of(dataset.model_copy(update={"dataset_type": "image", "video": None}))
        fetch_files(dataset, files, lambda: None, lambda done: None)
        own = as_fetched(dataset, files)
    assert isinstance(own, LocalImages)
    scanned = scan_own_table(own)
    assert {each.name: each.captions for each in scanned} == {"a.mp4": ("of a.mp4",), "b.mkv": ("of b.mkv",)}
    assert [numbers_of(list(each.images(SIZE))) for each in scanned] == [list(range(9))] * 2


def scan_own_table(dataset: LocalImages) -> Samples:
    assert dataset.parquet and dataset.video
    columns = {"filename_column": "file_name", "caption_column": ["text"], "identifier_includes_extension": True}
    values = {"dataset_type": "video", "video": {"num_frames": 9}, "caption_strategy": dataset.caption_strategy}
    scanned = scan_table(
        dataset.instance_data_dir, dataset.parquet.path, columns, metadata_backend=dataset.metadata_backend, **values
    )
    return scanned.found.samples
