#!/usr/bin/env bash
# Mono sound that FFmpeg brings to stereo is 3 dB quieter on each channel, and 5.1 in float may exceed 1.
#
# Models of video with sound are given stereo, and clips of telephones and cameras are often mono. AudioResampler(layout="stereo")
# of PyAV, as `ffmpeg -ac 2`, puts a mono track on both channels at 0.707 of its level, which keeps its power. Spectrograms are
# of magnitudes: their logarithms are lower by 0.35, for mono clips alone. A mix of six channels is not
# made quieter: of 0.5 on each it has a peak of 1.21.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet av==17.0.1 numpy==2.3.5
cat > "$folder/mix.py" <<'PY'
import av
import numpy as np

print(f"PyAV {av.__version__}, FFmpeg's swresample {'.'.join(map(str, av.library_versions['libswresample']))}")


def peak(channels, given, wanted):
    frame = av.AudioFrame.from_ndarray(np.full((channels, 1600), 0.5, np.float32), format="fltp", layout=given)
    frame.sample_rate = 16000
    convert = av.AudioResampler(format="fltp", layout=wanted, rate=16000)
    return float(np.concatenate([each.to_ndarray() for each in convert.resample(frame)], axis=1).max())


mono, surround = peak(1, "mono", "stereo"), peak(6, "5.1", "stereo")
print(f"mono of 0.5 on two channels: {mono:.4f}")
print(f"stereo of 0.5 on two channels: {peak(2, 'stereo', 'stereo'):.4f}")
print(f"5.1 of 0.5 on two channels: {surround:.4f}")
assert abs(mono - 0.5 * 0.5**0.5) < 1e-3, "mono is at another level now"
assert surround > 1, "5.1 is normalized now"
PY
"$folder/venv/bin/python" "$folder/mix.py"
