#!/usr/bin/env bash
# LyCORIS merges LoHa and LoKr at the square of alpha / rank, while the same networks train and run at alpha / rank.
#
# `get_weight` of the two has the scale already, and `get_diff_weight`, which `merge_to` adds to the weights, multiplies
# by it once more. With alpha half of the rank a merged checkpoint has half of the trained change, with a quarter a
# quarter; equal alpha and rank hide it. A LoRA of the same library merges as it runs.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy lycoris-lora==4.1.3
"$folder/venv/bin/python" - 2> "$folder/log" <<'PY' || { tail -20 "$folder/log"; exit 1; }
import logging
from importlib.metadata import version

import torch
from lycoris import LycorisNetwork, create_lycoris

logging.disable(logging.INFO)
LycorisNetwork.apply_preset({"target_module": ["Linear"], "target_name": [".*"]})
RANK = 8


@torch.no_grad()
def share_merged(algo, alpha):
    """Return which share of what the network adds to a layer's output is left in the merged weight."""
    torch.manual_seed(0)
    layer, inputs = torch.nn.Sequential(torch.nn.Linear(32, 64)), torch.randn(16, 32)
    before = layer(inputs)
    network = create_lycoris(layer, 1.0, linear_dim=RANK, linear_alpha=alpha, algo=algo, factor=2)
    network.apply_to()
    for weight in network.parameters():
        weight.add_(torch.randn_like(weight))
    running = layer(inputs) - before
    network.restore()
    assert torch.equal(layer(inputs), before)
    network.merge_to(1.0)
    added = layer(inputs) - before
    share = ((added * running).sum() / (running * running).sum()).item()
    torch.testing.assert_close(added, share * running, rtol=1e-3, atol=1e-3)
    return round(share, 3)


alphas = (RANK, RANK // 2, RANK // 4)
found = {algo: [share_merged(algo, alpha) for alpha in alphas] for algo in ("lora", "loha", "lokr")}
print(f"lycoris-lora {version('lycoris-lora')}, torch {torch.__version__}, rank {RANK}")
for algo, shares in found.items():
    print(f"{algo}: " + ", ".join(f"alpha {alpha}: {share:g} of it merged" for alpha, share in zip(alphas, shares)))
assert found == {"lora": [1, 1, 1], "loha": [1, 0.5, 0.25], "lokr": [1, 0.5, 0.25]}, found
PY
