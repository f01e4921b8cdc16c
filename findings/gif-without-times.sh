#!/usr/bin/env bash
# A GIF whose frames have no delay: FFmpeg decodes it at 10 frames per second, and `average_rate` says otherwise.
#
# The GIF demuxer takes a delay of 0 for 0.1 s, as browsers do. The average rate of nine such frames is nevertheless 12.5:
# one frame more than there are, over the 0.8 s between the first and the last. A dataset that asks
# `average_rate` when to show frame i shows some frames twice and never the last ones. The times of the decoded frames
# and `guessed_rate` are right.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet av==18.1.0 pillow==13.0.0
"$folder/venv/bin/python" - <<'PY'
import io

import av
import PIL
from PIL import Image

frames = [Image.new("RGB", (64, 64), (25 * i, 0, 255 - 25 * i)) for i in range(9)]
seen = {}
for milliseconds in (0, 100):
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=milliseconds)
    file.seek(0)
    with av.open(file) as container:
        stream = container.streams.video[0]
        times = [round(float(frame.pts * frame.time_base), 3) for frame in container.decode(stream)]
        seen[milliseconds] = float(stream.average_rate), float(stream.guessed_rate), times
print(f"PyAV {av.__version__}, FFmpeg's libavformat {av.library_versions['libavformat']}, Pillow {PIL.__version__}")
for milliseconds, (average, guessed, times) in seen.items():
    print(f"delay {milliseconds} ms: average_rate {average}, guessed_rate {guessed}, frames at {times}")
tenths = [i / 10 for i in range(9)]
assert seen[100] == (10.0, 10.0, tenths), seen
assert seen[0] == (12.5, 10.0, tenths), seen
PY
