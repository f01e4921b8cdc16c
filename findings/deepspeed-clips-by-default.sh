#!/usr/bin/env bash
# DeepSpeed clips gradients at 1.0 where its JSON says nothing of gradient_clipping.
#
# accelerate's dialogue leaves the key out when one answers that gradients are not to be clipped, so the file that it writes
# clips. Only an explicit 0 turns it off.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy setuptools wheel ninja
"$folder/venv/bin/pip" install --quiet --no-build-isolation deepspeed==0.19.8
cat > "$folder/step.py" <<'PY'
import logging
import os

import torch

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
torch.distributed.init_process_group("gloo", init_method=f"file://{os.environ['FOLDER']}/store", rank=0, world_size=1)
import deepspeed

logging.disable(logging.INFO)


def step_norm(**config):
    """Norm of one step of SGD at rate 1 from a gradient of norm 100."""
    layer = torch.nn.Linear(1, 1, bias=False)
    before = layer.weight.detach().clone()
    engine, *_ = deepspeed.initialize(
        model=layer,
        optimizer=torch.optim.SGD(layer.parameters(), lr=1.0),
        config={"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, **config},
    )
    engine.backward(engine(torch.full((1, 1), 100.0)).sum())
    engine.step()
    return (layer.weight.detach() - before).norm().item()


silent, zero = step_norm(), step_norm(gradient_clipping=0.0)
print(f"deepspeed {deepspeed.__version__}, torch {torch.__version__}")
print(f"a gradient of norm 100 moves a weight by {silent:.2f} without gradient_clipping, by {zero:.2f} with gradient_clipping 0")
assert abs(silent - 1) < 0.01 and abs(zero - 100) < 0.1, (silent, zero)
torch.distributed.destroy_process_group()
PY
export FOLDER="$folder" TORCH_EXTENSIONS_DIR="$folder/extensions" DS_ACCELERATOR=cpu
PATH="$folder/venv/bin:$PATH" "$folder/venv/bin/python" "$folder/step.py" > "$folder/log" 2>&1 || { tail -20 "$folder/log"; exit 1; }
tail -2 "$folder/log"
