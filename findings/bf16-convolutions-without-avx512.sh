#!/usr/bin/env bash
# On a CPU with AVX2 alone, a convolution in bf16 takes many times as long as in float32, and the larger the image, the more.
#
# torch takes bf16 on every x86 CPU, and autocast to bf16 is a usual way to halve activations. Below AVX-512 it gives oneDNN no
# convolution in bf16, where float32 has a kernel for AVX2, and takes aten::_slow_conv2d_forward in its place: a U-Net in bf16 is
# slower by far than in float32, without a warning.
# Seen on a CPU with AVX2: 20, 52 and 106 times at 8, 32 and 64 px. ONEDNN_MAX_CPU_ISA=AVX2 asks newer CPUs for the same (not tried there).
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/convolve.py" <<'PY'
import time

import torch

torch.set_num_threads(1)
print(f"torch {torch.__version__}")


def seconds(side, dtype):
    layer = torch.nn.Conv2d(64, 64, 3, padding=1).to(dtype)
    image = torch.randn(4, 64, side, side, dtype=dtype)
    best = float("inf")
    with torch.no_grad():
        for _ in range(4):
            began = time.process_time()
            layer(image)
            best = min(best, time.process_time() - began)
    return best


ratios = {}
for side in (8, 32, 64):
    exact, half = (seconds(side, dtype) for dtype in (torch.float32, torch.bfloat16))
    ratios[side] = half / exact
    print(f"{side} x {side}: float32 {exact * 1e3:.2f} ms, bf16 {half * 1e3:.2f} ms, {half / exact:.0f} times")
assert min(ratios.values()) > 3 and ratios[64] > ratios[8], "bf16 is no longer that slow"
taken = {}
for dtype in (torch.float32, torch.bfloat16):
    layer, image = torch.nn.Conv2d(64, 64, 3, padding=1).to(dtype), torch.randn(4, 64, 32, 32, dtype=dtype)
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(image)
    names = {each.key for each in profile.key_averages()}
    taken[dtype] = names & {"aten::mkldnn_convolution", "aten::_slow_conv2d_forward"}
    print(f"{dtype}: {', '.join(taken[dtype])}")
assert taken[torch.float32] == {"aten::mkldnn_convolution"}
assert taken[torch.bfloat16] == {"aten::_slow_conv2d_forward"}, "bf16 has another kernel now"
PY
ONEDNN_MAX_CPU_ISA=AVX2 "$folder/venv/bin/python" "$folder/convolve.py" 2>/dev/null
