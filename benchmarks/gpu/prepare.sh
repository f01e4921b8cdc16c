#!/usr/bin/env bash
# On a machine without a GPU, after `make install`: bash benchmarks/gpu/prepare.sh [--no-plans]
# Fills .gpu-check/, which git ignores and which travels with the working tree: wheels of what packages-there.txt lacks,
# and what `plan` says of each step (95 CPU seconds for all; those that are there stay).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || { echo "error: there is no $python; run \`make install\`, or set PYTHON" >&2; exit 3; }
mkdir -p .gpu-check
platforms=()
for each in 2_28 2_27 2_24 2_17 2_5; do platforms+=(--platform "manylinux_${each}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)

# One version of each: two of one package would stop the installation there.
rm -f .gpu-check/*.whl
"$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
  --implementation cp "${platforms[@]}" -d .gpu-check $(sed 's/#.*//; /^ *$/d' "$here/wheels.txt")
for each in $(sed -n 's/^#sdist //p' "$here/wheels.txt"); do
  DS_BUILD_OPS=0 "$python" -m pip wheel -q --disable-pip-version-check --no-deps -w .gpu-check "$each" ||
    echo "no wheel of $each: parts with ZeRO will fail there" >&2
done
if ls .gpu-check/*.whl | grep -vE -- '-(py3|py2\.py3)-none-any|cp312-cp312|cp3[0-9]+-abi3' >&2; then
  echo "error: these wheels are not for Python 3.12" >&2; exit 1
fi

# What the project and the wheels need, and neither they nor the machine have.
plain() { tr '_' '-' | tr A-Z a-z; }
there=$({ sed '/^#/d' "$here/packages-there.txt"; ls .gpu-check | sed -n 's/-[0-9].*whl$//p'; } | plain)
needs=$(sed -n '/^dependencies/,/^]/s/^ *"\([A-Za-z0-9._-]*\).*/\1/p' pyproject.toml
  for each in .gpu-check/*.whl; do
    unzip -p "$each" '*/METADATA' | sed -n '/extra ==/d; s/^Requires-Dist: *\([A-Za-z0-9._-]*\).*/\1/p'
  done)
for each in $(plain <<< "$needs" | sort -u); do
  # diffusers names the backport importlib_metadata, and imports it on Python < 3.8 only; the others are for Windows.
  case $each in importlib-metadata|colorama|tomli) continue;; esac
  grep -qxF -- "$each" <<< "$there" || { echo "error: $each is not there; add it to benchmarks/gpu/wheels.txt" >&2; exit 1; }
done

[ "${1:-}" = --no-plans ] || "$python" benchmarks/gpu plan .gpu-check/plans.json
echo ".gpu-check: $(du -sm .gpu-check | cut -f1) MiB. There: bash benchmarks/gpu/check.sh SECONDS"
