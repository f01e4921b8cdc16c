#!/usr/bin/env bash
# On the machine with the GPU: bash benchmarks/gpu/check.sh SECONDS [--done=FILE...] [--tiny] [PART...]
# Installs the wheels of .gpu-check/ into a temporary folder, says all that is missing at once, and runs the parts
# until SECONDS are over. Figures are in $OUT/results.jsonl as soon as they are there.
set -u
case ${1:-} in ''|*[!0-9]*) echo "error: for how many seconds? bash benchmarks/gpu/check.sh 430" >&2; exit 2;; esac
budget=$1; shift
cd "$(dirname "$0")/../.."
export OUT=${OUT:-$PWD/gpu-check}; mkdir -p "$OUT"
python=${PYTHON:-python3} site=${GPU_CHECK_SITE:-$(mktemp -d)}
unset PYTHONDONTWRITEBYTECODE  # a dozen processes would each compile diffusers again
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false
export HF_HOME=$site/hf XDG_CACHE_HOME=$site/cache TORCHINDUCTOR_CACHE_DIR=$site/inductor TRITON_CACHE_DIR=$site/triton
export PYTHONPATH=$site:$PWD${PYTHONPATH:+:$PYTHONPATH}
{ nvidia-smi; nvidia-smi --query-gpu=name,clocks.sm,clocks.mem,power.limit,driver_version --format=csv
  "$python" -V; uname -a; nproc; df -h /tmp /dev/shm; } > "$OUT/machine.txt" 2>&1
if ls .gpu-check/*.whl > /dev/null 2>&1; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check --upgrade \
    --target "$site" .gpu-check/*.whl > "$OUT/install.txt" 2>&1 || { cat "$OUT/install.txt"; exit 90; }
fi
"$python" -m compileall -q -j 0 "$site" simpletuner benchmarks > /dev/null 2>&1
echo "installed after $SECONDS s"
"$python" - <<'PY' || exit 91
import importlib, sys, warnings
warnings.simplefilter("ignore")
missing = []
for name in """torch accelerate diffusers transformers peft safetensors tokenizers huggingface_hub typer rich pydantic yaml
platformdirs filelock psutil numpy pyarrow PIL imagesize xxhash matplotlib jinja2 sentencepiece google.protobuf
simpletuner.app simpletuner.worker""".split():
    try:
        importlib.import_module(name)
    except Exception as error:
        missing.append(f"{name}: {type(error).__name__}: {error}")
for name in ("triton", "deepspeed", "torchao"):
    if importlib.util.find_spec(name) is None:
        print(f"not there, its parts will fail: {name}")
print("\n".join(missing) or "all imports work")
sys.exit(bool(missing))
PY
"$python" benchmarks/gpu check --seconds=$((budget - SECONDS)) --plans=.gpu-check/plans.json "$@" 2>&1 | tee "$OUT/table.txt" | tail -c 11000
echo "ended after $SECONDS s; the whole table is in $OUT/table.txt"
