#!/usr/bin/env bash
# A module that torchao's `quantize_` has quantized is not freed when its last name goes: its weights stay until Python collects garbage.
#
# For int8 and float8 weights, `quantize_` gives each linear layer an `extra_repr` of its own, a method bound to that layer, so the layer
# refers to itself. Python counts no container objects in proportion to a weight's size: with few allocations in between,
# gigabytes wait for the next collection, and on a GPU `torch.cuda.empty_cache()` does not free what is still referred to. It shows
# where models are quantized one after another, or layer by layer by way of a module that is thrown away.
# `gc.collect()` frees them, or removing `extra_repr` from the layer. NF4 by `to_nf4` makes no such reference.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy torchao==0.18.0
cat > "$folder/freed.py" <<'PY'
import gc
import weakref

import torch
import torchao
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

print(f"torch {torch.__version__}, torchao {torchao.__version__}")
gc.disable()
for config in (None, Int8WeightOnlyConfig(), Float8WeightOnlyConfig()):
    found = []
    for unbinds in (False, True):
        layer = torch.nn.Linear(256, 256, dtype=torch.bfloat16)
        if config is not None:
            quantize_(layer, config)
        if unbinds:
            vars(layer).pop("extra_repr", None)
        weight = weakref.ref(layer.weight)
        del layer
        found.append(weight() is None)
        gc.collect()
        assert weight() is None
    name = "not quantized" if config is None else type(config).__name__
    print(f"{name}: freed with its last name {found[0]}, without its extra_repr {found[1]}")
    assert found == [config is None, True], found
PY
"$folder/venv/bin/python" "$folder/freed.py" 2>/dev/null
