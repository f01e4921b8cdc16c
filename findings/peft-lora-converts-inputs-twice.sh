#!/usr/bin/env bash
# Under autocast, each LoRA layer of peft converts its input from bf16 to float32 and back, in the forward and the backward pass.
#
# peft keeps the matrices of a LoRA in float32 over a base in bf16, and converts a layer's input to their dtype before it
# multiplies; autocast then converts it back. The values are what they were, but a float32 and a bf16 matrix of the input's size
# are written in each direction, and the bf16 one of the forward pass is kept for the backward pass: q, k and v each keep a copy of the
# input that they share. The four conversions of a layer also wait for the host of a GPU where samples are few.
# `disable_input_dtype_casting` of peft.helpers leaves them out, as a context manager around the forward pass.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy peft==0.21.2 transformers==5.23.0
cat > "$folder/converts.py" <<'PY'
from contextlib import nullcontext

import peft
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.helpers import disable_input_dtype_casting
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS, WIDTH = 64, 32


class Conversions(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].numel() == TOKENS * WIDTH:
            self.found.append(f"{args[0].dtype} -> {result.dtype}".replace("torch.", ""))
        return result


print(f"torch {torch.__version__}, peft {peft.__version__}")
found = {}
for name, context in (("as it is", lambda model: nullcontext()), ("without casting", disable_input_dtype_casting)):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH)).bfloat16().requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["0"], init_lora_weights=False), model, "default")
    for key, each in model.named_parameters():
        if "lora_" in key:
            each.data = each.data.float()
    x = torch.randn(TOKENS, WIDTH).bfloat16().requires_grad_()
    with Conversions() as mode, context(model), torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    forward = [*mode.found]
    with mode:
        output.sum().backward()
    found[name] = forward, mode.found[len(forward):]
    values = output.detach()
    print(f"{name}: forward {forward}, backward {found[name][1]}")
    if name == "as it is":
        first = values
assert torch.equal(first, values), "the same values"
there, back = "bfloat16 -> float32", "float32 -> bfloat16"
assert found["as it is"] == ([there, back], [there, back]), found
assert found["without casting"] == ([], []), found
PY
"$folder/venv/bin/python" "$folder/converts.py" 2>/dev/null
