#!/usr/bin/env bash
# A LoRA trained with lora_dropout samples at random in diffusers: the adapter that is loaded is left in training mode.
#
# `save_lora_adapter` writes the whole LoraConfig into the file's metadata, `load_lora_adapter` makes the layers from it,
# dropout included, and peft adds them in training mode to a model that is in evaluation mode. Two equal calls differ
# until somebody calls `.eval()` again, which no pipeline does.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 diffusers==0.42.1 peft==0.21.2 transformers==5.23.0 accelerate==1.15.0 numpy
FOLDER="$folder" HF_HOME="$folder/hub" HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PY'
import os

import diffusers
import peft
import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig

diffusers.utils.logging.set_verbosity_error()
CONFIG = dict(
    patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
    joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
)  # fmt: skip
FILE = {"weight_name": "pytorch_lora_weights.safetensors"}
torch.manual_seed(0)
inputs = dict(
    hidden_states=torch.randn(1, 16, 4), encoder_hidden_states=torch.randn(1, 8, 32), timestep=torch.tensor([0.5]),
    pooled_projections=torch.randn(1, 32), img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(8, 3),
)  # fmt: skip
trained = FluxTransformer2DModel(**CONFIG)
trained.add_adapter(LoraConfig(r=4, lora_alpha=4, lora_dropout=0.5, target_modules=["to_q", "to_v"]))
for name, weight in trained.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(weight)
trained.save_lora_adapter(os.environ["FOLDER"], **FILE)

model = FluxTransformer2DModel(**CONFIG).eval()
model.load_lora_adapter(os.environ["FOLDER"], prefix=None, **FILE)


@torch.no_grad()
def difference():
    return (model(**inputs).sample - model(**inputs).sample).abs().max().item()


left = sorted({type(module).__name__ for module in model.modules() if module.training and isinstance(module, torch.nn.Dropout)})
loaded = difference()
evaluated = model.eval() and difference()
print(f"torch {torch.__version__}, diffusers {diffusers.__version__}, peft {peft.__version__}")
print(f"in training mode after loading: {left}; two equal calls differ by {loaded:.3f}, after .eval() by {evaluated:.3f}")
assert left == ["Dropout"] and loaded > 1e-3 and evaluated == 0
PY
