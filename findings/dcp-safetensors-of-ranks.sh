#!/usr/bin/env bash
# torch's HuggingFaceStorageWriter with its default arguments loses the rows of all ranks but one, without an error.
#
# With save_distributed=False each rank writes its shard under the same name, model-00001-of-00001.safetensors: here the
# file of two ranks holds 4 of 8 rows, and the index beside it still counts 64 bytes for 32. With save_distributed=True
# each rank has a file of its own (and no index).
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 safetensors==0.8.0 numpy
cat > "$folder/save.py" <<'PY'
import glob
import json
import os
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def rank_main(rank, folder):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    weight = distribute_tensor(torch.arange(16.0).reshape(8, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
    for name, options in (("default", {}), ("distributed", {"save_distributed": True})):
        save({"weight": weight}, storage_writer=HuggingFaceStorageWriter(f"{folder}/{name}", **options))
        dist.barrier()
    dist.destroy_process_group()


def rows_of(path):
    with safe_open(path, "pt") as file:
        return file.get_slice("weight").get_shape()[0]


if __name__ == "__main__":
    folder = os.path.dirname(os.path.abspath(__file__))
    torch.multiprocessing.spawn(rank_main, args=(folder,), nprocs=2)
    print(f"torch {torch.__version__}, 2 ranks, a weight of 8 rows in float32")
    found = {}
    for name in ("default", "distributed"):
        files = sorted(glob.glob(f"{folder}/{name}/*.safetensors"))
        found[name] = {os.path.basename(path): rows_of(path) for path in files}
        print(f"{name}: rows by file {found[name]}")
    with open(f"{folder}/default/model.safetensors.index.json", encoding="utf-8") as file:
        total_size = json.load(file)["metadata"]["total_size"]
    print(f"default: total_size of the index {total_size}")
    assert found["default"] == {"model-00001-of-00001.safetensors": 4}, found
    assert list(found["distributed"].values()) == [4, 4], found
    assert total_size == 64, total_size
PY
"$folder/venv/bin/python" "$folder/save.py"
