#!/usr/bin/env bash
# FlowMatchEulerDiscreteScheduler with a constant shift (SD3's is 3) does not sample at the noise levels it is made with:
# its own smallest level is already shifted when `set_timesteps` spaces the steps, and is shifted again with them.
#
# Made, it has levels down to 0.0030, which training scripts index by timestep. Asked for the same 1000 steps, it ends
# at 0.0089, and levels in between differ as well. Only a shift of 1 gives one table, and `use_dynamic_shifting`, whose
# levels are not shifted when it is made. Made with a shift of 1 and set to 3 by `set_shift`, it shifts once.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 diffusers==0.42.1 numpy
HF_HOME="$folder/hub" HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2> "$folder/log" <<'PY' || { tail -20 "$folder/log"; exit 1; }
import diffusers
from diffusers import FlowMatchEulerDiscreteScheduler


def levels(shift: float, then: float | None = None):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    made = scheduler.sigmas.clone()
    if then is not None:
        scheduler.set_shift(then)
    scheduler.set_timesteps(1000)
    sampled = scheduler.sigmas[:-1]  # the last one is 0, where sampling ends
    return made, sampled


print(f"diffusers {diffusers.__version__}: noise levels as made, and of set_timesteps(1000)")
found = {}
for shift in (1.0, 3.0, 7.0):
    made, sampled = levels(shift)
    found[shift] = [round(value, 4) for value in (made[-1].item(), sampled[-1].item(), (made - sampled).abs().max().item())]
    print(f"shift {shift:g}: smallest {found[shift][0]} and {found[shift][1]}, at most {found[shift][2]} apart")
_, changed = levels(1.0, then=3.0)
print(f"made with shift 1, set to 3: smallest {changed[-1].item():.4f}")
assert found == {1.0: [0.001, 0.001, 0.0], 3.0: [0.003, 0.0089, 0.0059], 7.0: [0.007, 0.0468, 0.0398]}, found
assert round(changed[-1].item(), 4) == 0.003
PY
