#!/usr/bin/env bash
# `datasets` decides columns and types of a webdataset by its first five samples, and bends all later ones to them.
#
# Where captions begin at the sixth sample, the dataset has no captions. A score in the JSON beside the images that is 6
# five times and 6.75 later is read as 6, and a key that comes later is gone; no warning, streamed or not. One sample of
# another shape among the first five is an error instead. Only `features=` names what there is.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 pillow==13.0.0
FOLDER="$folder" HF_HOME="$folder/hub" HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 "$folder/venv/bin/python" - <<'PY'
import io
import json
import os
import tarfile
import warnings

import datasets
from datasets import Features, Image, Value
from PIL import Image as Picture

warnings.simplefilter("error", UserWarning)
png = io.BytesIO()
Picture.new("RGB", (16, 16), "teal").save(png, "PNG")
path = os.path.join(os.environ["FOLDER"], "shard.tar")


def shard(plain):
    """Write eight samples, the first `plain` of them without caption and license and with a whole score."""
    with tarfile.open(path, "w") as tar:
        for i in range(8):
            files = {"png": png.getvalue(), "json": json.dumps({"score": 6}).encode()}
            if i >= plain:
                files |= {"txt": b"a lake", "json": json.dumps({"score": 6.75, "license": "CC0"}).encode()}
            for ending, content in files.items():
                member = tarfile.TarInfo(f"{i:04}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def last(**options):
    rows = datasets.load_dataset("webdataset", data_files=path, split="train", **options)
    row = list(rows)[-1]
    return {name: row[name] for name in ("txt", "json") if name in row}


shard(5)
text = Value("string")
whole = Features(png=Image(), txt=text, json={"score": Value("float64"), "license": text}, __key__=text, __url__=text)
found = [last(), last(streaming=True), last(features=whole)]
shard(4)
try:
    refused = str(last())
except ValueError as error:
    refused = type(error).__name__
print(f"datasets {datasets.__version__}: the last sample has the caption 'a lake', a score of 6.75 and a license")
print(f"read: {found[0]}; streamed: {found[1]}; with features: {found[2]}; if the fifth has them too: {refused}")
assert found[:2] == [{"json": {"score": 6}}] * 2, found
assert found[2] == {"txt": "a lake", "json": {"score": 6.75, "license": "CC0"}}, found
assert refused == "ValueError", refused
PY
