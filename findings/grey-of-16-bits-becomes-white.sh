#!/usr/bin/env bash
# diffusers' load_image turns a grey PNG of 16 bits, as depth maps are saved, into a white image; one of 8 bits is kept.
#
# load_image ends with Pillow's convert("RGB"), which clips the values of mode I;16 at 255 instead of scaling them: of a ramp
# from 0 to 65535 only what is below 256 is not white. A colour PNG of 16 bits is opened with the high byte of each value, so
# the same ramp in colour stays a ramp. datasets and training scripts that call convert("RGB") themselves do the same.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet diffusers==0.42.1 pillow==13.0.0 numpy==2.4.6 opencv-python-headless==5.0.0.93
cat > "$folder/load.py" <<'PY'
import os

import cv2
import diffusers
import numpy
import PIL
from diffusers.utils import load_image

os.chdir(os.path.dirname(os.path.abspath(__file__)))
ramp = numpy.linspace(0, 65535, 16).astype(numpy.uint16).reshape(4, 4)
cv2.imwrite("grey16.png", ramp)
cv2.imwrite("grey8.png", (ramp >> 8).astype(numpy.uint8))
cv2.imwrite("colour16.png", numpy.stack([ramp] * 3, axis=-1))
print(f"diffusers {diffusers.__version__}, Pillow {PIL.__version__}")
found = {}
for name in ("grey16", "grey8", "colour16"):
    image = load_image(f"{name}.png")
    found[name] = numpy.asarray(image)[..., 0].ravel().tolist()
    print(f"{name}: mode in the file {PIL.Image.open(f'{name}.png').mode}, after load_image {image.mode} {found[name]}")
assert found["grey16"] == [0] + [255] * 15, found
assert found["grey8"] == found["colour16"] == (ramp >> 8).ravel().tolist(), found
PY
"$folder/venv/bin/python" "$folder/load.py" 2>/dev/null
