#!/usr/bin/env bash
# `Dataset.to_parquet` of an imagefolder writes no image: `bytes` is null, and `path` is absolute on the machine that wrote.
#
# The file opens without a warning there, and elsewhere has nothing but names. `push_to_hub` embeds the bytes, and so does
# `datasets.table.embed_table_storage` before writing.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 pillow==13.0.0
FOLDER="$folder" HF_HOME="$folder/hub" HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 "$folder/venv/bin/python" - <<'PY'
import os

import datasets
import pyarrow
import pyarrow.parquet
from datasets.table import embed_table_storage
from PIL import Image

folder = os.environ["FOLDER"]
os.makedirs(f"{folder}/images")
for i in range(2):
    Image.new("RGB", (32, 32), (99 * i, 0, 0)).save(f"{folder}/images/{i}.png")
images = datasets.load_dataset("imagefolder", data_dir=f"{folder}/images", split="train")
images.to_parquet(f"{folder}/written.parquet")
pyarrow.parquet.write_table(embed_table_storage(images.data.table), f"{folder}/embedded.parquet")
rows = [row["image"] for row in pyarrow.parquet.read_table(f"{folder}/written.parquet").to_pylist()]
embedded = [row["image"] for row in pyarrow.parquet.read_table(f"{folder}/embedded.parquet").to_pylist()]
print(f"datasets {datasets.__version__}, pyarrow {pyarrow.__version__}")
for row in rows:
    print(f"to_parquet: bytes {row['bytes']}, path absolute: {os.path.isabs(row['path'])}")
for row in embedded:
    print(f"embedded: {len(row['bytes'])} bytes, path {row['path']}")
assert all(row["bytes"] is None and os.path.isabs(row["path"]) for row in rows)
assert all(row["bytes"] and not os.path.isabs(row["path"]) for row in embedded)
PY
