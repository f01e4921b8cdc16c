"""Training with captions and sizes from tables: the losses of the folder with text files."""

from __future__ import annotations

import json
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
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


def test_two_ranks_download_a_list_of_addresses_once(sdxl, shapes, train, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=shapes))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    host = f"http://127.0.0.1:{server.server_port}"
    rows = [{"url": f"{host}/{row['file']}.png", "text": row["caption"]} for row in rows_of(shapes)]
    write_rows(tmp_path / "urls.csv", [*rows, {"url": f"{host}/gone.png", "text": "x"}])
    entry = {
        "id": "d",
        "type": "csv",
        "csv_file": str(tmp_path / "urls.csv"),
        "csv_cache_dir": str(tmp_path / "images"),
    }
    (tmp_path / "d.json").write_text(json.dumps([{**entry, "caption_strategy": "csv", "csv_caption_column": "text"}]))
    flags = [
        "--model_family=sdxl",
        f"--pretrained_model_name_or_path={sdxl}",
        f"--data_backend_config={tmp_path}/d.json",
    ]
    first = train(tmp_path / "run", *flags, "--max_train_steps=1", world=2)
    assert first.said.count(f"1 address without an image left out:\n  {host}/gone.png: HTTP 404") == 1
    assert len(list((tmp_path / "images").glob("*.png"))) == len(rows)
    write_rows(tmp_path / "urls.csv", rows)
    server.shutdown()
    server.server_close()
    again = train(tmp_path / "run", *flags, "--max_train_steps=2", world=2)
    assert len(again.losses) == 2
    write_rows(tmp_path / "urls.csv", [*rows, {"url": f"{host}/new.png", "text": "x"}])
    down = train(tmp_path / "run", *flags, "--max_train_steps=3", world=2, code=3)
    assert (
        down.said.count("error: dataset `d`: 1 image cannot be downloaded:") == 1 and "Connection refused" in down.said
    )
