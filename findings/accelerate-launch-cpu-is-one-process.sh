#!/usr/bin/env bash
# `accelerate launch --cpu --num_processes=2` starts one process and says nothing: --num_processes has no effect without MPI.
#
# Two processes on one machine without a GPU are started by `--multi_gpu` with ACCELERATE_USE_CPU=true, which makes them use gloo.
# A script that divides its data, or its learning rate, by the number that was asked for trains on half of it.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet accelerate==1.15.0 torch==2.13.0 numpy
cat > "$folder/rank.py" <<'PY'
from accelerate import Accelerator

state = Accelerator()
print(f"process {state.process_index} of {state.num_processes}", flush=True)
PY
started() {
  "$folder/venv/bin/accelerate" launch "$@" --num_machines=1 --mixed_precision=no --dynamo_backend=no --num_processes=2 \
    "$folder/rank.py" 2>/dev/null | grep -o 'process [0-9] of [0-9]' | sort | paste -sd,
}
"$folder/venv/bin/python" -c 'import accelerate, torch; print("accelerate", accelerate.__version__, "torch", torch.__version__)'
cpu=$(started --cpu)
echo "--cpu --num_processes=2: $cpu"
gloo=$(ACCELERATE_USE_CPU=true started --multi_gpu)
echo "ACCELERATE_USE_CPU=true --multi_gpu --num_processes=2: $gloo"
test "$cpu" = "process 0 of 1"
test "$gloo" = "process 0 of 2,process 1 of 2"
