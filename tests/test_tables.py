"""Training with captions and sizes from tables: the losses of the folder with text files."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from tabled import dataset_file, write_rows

COLUMNS = {"caption_column": "caption", "width_column": "w", "height_column": "h"}
BOTH = {"caption_strategy": "parquet", "metadata_backend": "parquet"}


def rows_of(images: Path) -> list[dict]:
    """Return what the text files and headers of a folder say."""
    rows = []
    for path in sorted(images.glob("*.png"), reverse=True):
        with Image.open(path) as image:
            width, height = image.size
        rows.append(
            {"file": path.stem, "caption": path.with_suffix(".txt").read_text().strip(), "w": width, "h": height}
        )
    return rows


def test_two_ranks_train_from_tables_as_from_text_files(sdxl, shapes, train, tmp_path):
    caches = [f"--cache_dir_vae={tmp_path}/latents", f"--cache_dir_text={tmp_path}/text"]
    model = ["--model_family=sdxl", f"--pretrained_model_name_or_path={sdxl}", "--max_train_steps=2"]
    rows = rows_of(shapes)

    def run(name: str, *more: str, code: int = 0, **values):
        table = write_rows(tmp_path / name, rows) if "." in name else None
        path = dataset_file(shapes, table, COLUMNS, **values).rename(tmp_path / f"{name}.datasets.json")
        flags = [*model, *caches, f"--data_backend_config={path}", *more]
        return train(tmp_path / f"run-{name}", *flags, world=2, code=code)

    files = run("files", caption_strategy="textfile")
    records = {path: path.stat().st_size for path in tmp_path.glob("*/**/*.shard")}
    assert records and len(files.losses) == 2
    for name in ("t.parquet", "t.csv", "t.jsonl"):
        tabled = run(name, **BOTH)
        assert tabled.losses == files.losses, name
        assert {path: path.stat().st_size for path in tmp_path.glob("*/**/*.shard")} == records, "nothing was encoded"

    rows[5]["w"], rows[7]["file"] = rows[5]["w"] + 8, rows[8]["file"]
    wrong = run("wrong.parquet", f"--cache_dir_vae={tmp_path}/again", "--allow_dataset_oversubscription", **BOTH)
    assert f"d/{rows[5]['file']}.png: has " in wrong.said and "the table is wrong, or the file changed" in wrong.said
    assert wrong.said.count("for an image that has one: the first one counts:") == 1
    rows[3]["caption"] = ""
    empty = run("empty.csv", code=4, **BOTH)
    assert f"1 image without a caption in the table {tmp_path}/empty.csv:\n  {rows[3]['file']}.png" in empty.said
    rows[2] = {"file": ["not text"]}
    bad = run("bad.jsonl", code=4, **BOTH)
    assert bad.said.count("error: dataset") == 1 and "cannot be read as JSON lines: " in bad.said
    assert "Traceback" not in "".join(each.said for each in (wrong, empty, bad))
