#!/usr/bin/env bash
# A LoKr or LoHa of peft draws a random number for each layer at each forward pass in training, although its dropout is 0.
#
# `module_dropout` leaves whole layers out at random. It is 0 by default, and the layer draws from torch's generator of the CPU
# all the same: noise that is drawn there between two steps depends on how many layers are adapted, and how often they run. A
# run with recomputed blocks, which restores the generator, and one without draw the same; one that leaves the adapter out for a
# pass, or adapts a layer more, does not. LoRA's layers draw nothing without dropout. What needs the same noise whatever is
# trained draws it with a generator of its own.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy peft==0.21.0 transformers==5.23.0
cat > "$folder/draws.py" <<'PY'
import peft
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, inject_adapter_in_model

print(f"torch {torch.__version__}, peft {peft.__version__}")
found = {}
for config in (LoraConfig, LoHaConfig, LoKrConfig):
    for layers in (1, 3):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers)))
        inject_adapter_in_model(config(r=2, target_modules=[str(n) for n in range(layers)]), model, "default")
        model.train()
        torch.manual_seed(1)
        model(torch.ones(1, 8))
        after = torch.get_rng_state()
        torch.manual_seed(1)
        drawn = 0
        while not torch.equal(torch.get_rng_state(), after) and drawn < 9:
            torch.rand(1)
            drawn += 1
        found[config.__name__, layers] = drawn
        print(f"{config.__name__}, {layers} layers, no dropout: {drawn} numbers drawn in a forward pass")
expected = {("LoraConfig", 1): 0, ("LoraConfig", 3): 0, ("LoHaConfig", 1): 1, ("LoHaConfig", 3): 3,
            ("LoKrConfig", 1): 1, ("LoKrConfig", 3): 3}
assert found == expected, found
PY
"$folder/venv/bin/python" "$folder/draws.py" 2>/dev/null
