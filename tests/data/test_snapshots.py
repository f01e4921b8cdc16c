"""Datasets of the Hugging Face hub as they are downloaded: Parquet files with images in them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scanning import found

from simpletuner.caches.latents import decode_image
from simpletuner.data.dataset_kinds import LocalImages, SnapshotImages
from simpletuner.data.datasets import load_datasets
from simpletuner.errors import DataError, SettingsError
from simpletuner.settings.sections import Data

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


def test_a_name_of_the_hub_gets_the_command_that_downloads_it(tmp_path):
    file = tmp_path / "datasets.json"
    entry = {"id": "d", "type": "huggingface", "dataset_name": "someone/pictures", "caption_strategy": "huggingface"}
    file.write_text(json.dumps([entry]))
    with pytest.raises(SettingsError) as caught:
        load_datasets(Data(data_backend_config=file))
    assert "hf download someone/pictures --repo-type dataset --local-dir FOLDER" in str(caught.value)
    entry |= {"dataset_name": str(tmp_path), "caption_column": "text", "metadata_backend": "huggingface"}
    file.write_text(json.dumps([entry]))
    (dataset,), _ = load_datasets(Data(data_backend_config=file))
    assert isinstance(dataset, SnapshotImages) and dataset.caption_strategy == "textfile"


def test_a_run_trains_on_a_snapshot(sdxl, shapes, train, tmp_path):
    files = sorted(shapes.glob("*.png"))[:8]
    write(tmp_path / "hub", "train.parquet", [row(each) for each in files], [f"caption {n}" for n in range(8)])
    entry = {"id": "d", "type": "huggingface", "dataset_name": str(tmp_path / "hub"), "caption_column": "text"}
    (tmp_path / "datasets.json").write_text(json.dumps([entry]))
    flags = ("--model_family=sdxl", f"--pretrained_model_name_or_path={sdxl}", "--train_batch_size=2")
    run = train(tmp_path / "run", *flags, f"--data_backend_config={tmp_path / 'datasets.json'}", "--max_train_steps=2")
    assert len(run.losses) == 2 and "8 in" in run.said
