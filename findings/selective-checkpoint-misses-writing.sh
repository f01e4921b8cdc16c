#!/usr/bin/env bash
# torch's selective activation checkpointing gives wrong gradients, and says nothing, where a kept product is written into.
#
# Its documentation promises an error for outputs that are changed after they were kept. What a linear layer without bias makes of
# an input of three dimensions is an _unsafe_view of its product, which shares memory but not the counter of versions: `+=` goes
# unseen, and the second forward pass adds once more. DeepSpeed's ZeRO-3 adds the bias of every linear layer so.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/step.py" <<'PY'
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

torch.manual_seed(0)
layer = nn.Linear(8, 8, bias=False)
kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])


def block(values):
    product = layer(values)
    product += 1
    return product.square().sum()


def error(shape):
    """Largest error of a gradient, relative to the largest of the gradients."""
    values = torch.rand(shape, requires_grad=True)
    (plain,) = torch.autograd.grad(block(values), values)
    (again,) = torch.autograd.grad(checkpoint(block, values, use_reentrant=False, context_fn=kept), values)
    return ((again - plain).abs().max() / plain.abs().max()).item()


print(f"torch {torch.__version__}")
wrong = error((2, 4, 8))
print(f"inputs of three dimensions: gradients are off by {wrong:.0%}, and nothing is said")
try:
    error((8, 8))
except RuntimeError as raised:
    print(f"inputs of two: {str(raised).splitlines()[0][:90]}")
else:
    raise AssertionError("inputs of two dimensions are not refused any more")
assert wrong > 0.1, wrong
PY
"$folder/venv/bin/python" "$folder/step.py" 2>/dev/null
