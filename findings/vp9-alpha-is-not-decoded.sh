#!/usr/bin/env bash
# Transparent WebM clips are opaque in PyAV: FFmpeg's own VP8 and VP9 decoders, which it takes first, leave alpha out.
#
# The stream says `alpha_mode: 1`, but its pixel format is yuv420p and every frame has whatever colour lies under the
# transparency. The decoders of libvpx, which the same wheel has and which must be named, make yuva420p of the same
# packets.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet av==18.1.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import io

import av
import numpy as np

picture = np.zeros((64, 64, 4), np.uint8)
picture[..., 0] = 255  # red everywhere,
picture[:, 32:, 3] = 255  # and only the right half can be seen


def corners(frame):
    """Return the frame's format and the alpha of its first row's two ends."""
    return frame.format.name, *frame.to_ndarray(format="rgba")[0, [0, -1], 3].tolist()


found = {}
for encoder in ("libvpx", "libvpx-vp9"):
    file = io.BytesIO()
    with av.open(file, "w", format="webm") as container:
        stream = container.add_stream(encoder, rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuva420p"
        if encoder == "libvpx":
            stream.options = {"auto-alt-ref": "0"}  # its encoder's condition for alpha
        for _ in range(4):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgba")))
        container.mux(stream.encode())
    file.seek(0)
    with av.open(file) as container:
        stream = container.streams.video[0]
        mode, taken = stream.metadata.get("alpha_mode"), stream.codec_context.codec.name
        own = {corners(frame) for frame in container.decode(stream)}
        container.seek(0)
        decoder = av.CodecContext.create(encoder, "r")
        named = {corners(frame) for packet in container.demux(stream) for frame in decoder.decode(packet)}
    found[encoder] = mode, taken, own, named
print(f"PyAV {av.__version__}, FFmpeg's libavcodec {av.library_versions['libavcodec']}")
for encoder, (mode, taken, own, named) in found.items():
    print(f"alpha_mode {mode}: decoder {taken} gives (format, alpha left, alpha right) {own}, {encoder} {named}")
opaque, clear = {("yuv420p", 255, 255)}, {("yuva420p", 0, 255)}
assert found == {"libvpx": ("1", "vp8", opaque, clear), "libvpx-vp9": ("1", "vp9", opaque, clear)}, found
PY
