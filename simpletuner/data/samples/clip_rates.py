"""A warning about clips whose frames follow one another at another rate than the model shows them."""

# pyright: basic, reportAttributeAccessIssue=false
# pyarrow comes without types.

from __future__ import annotations

from collections import Counter

import numpy as np

from simpletuner.data.scan.scan import Scan
from simpletuner.system.numbers import count_noun

TOLERANCE = 0.02
"""29.97 and 23.976 frames per second are those of 30 and 24."""
MAX_RATES = 4


def remark_on_rates(scan: Scan, model_fps: float) -> tuple[int, str]:
    """Return how many videos have another rate than the model's, after `fps` of the dataset, and a sentence about them.

    Families place frames by their number, so a film of 60 per second would teach LTX-Video, of 25, motion at 0.4 of its
    speed. 0 where all fit, or the model has no rate.
    """
    if (video := scan.dataset.clips) is None or not model_fps:
        return 0, ""
    frames, fps = (scan.table[name].to_numpy() for name in ("frames", "fps"))
    fps = np.where((fps == 0) & (frames > 1), video.frame_folders_fps or 0, fps)
    shown = np.minimum(fps, video.fps or np.inf)
    differ = np.flatnonzero((frames > 1) & (fps > 0) & (np.abs(shown / model_fps - 1) > TOLERANCE))
    if not len(differ):
        return 0, ""
    rates = Counter(f"{rate:.4g}" for rate in shown[differ])
    named = ", ".join(f"{count:,} of {rate}" for rate, count in rates.most_common(MAX_RATES))
    more = ", and others" if len(rates) > MAX_RATES else ""
    slow = int(np.count_nonzero(shown[differ] < model_fps))
    hints = [f'`"fps": {model_fps:g}` in the block `video` takes fewer frames of faster ones'] * (slow < len(differ))
    hints += ["slower ones are learned faster than they are"] * bool(slow)
    return len(differ), (
        f"dataset `{scan.dataset.id}`: {count_noun(len(differ), 'video')} with other frames per second than the "
        f"{model_fps:g} of the model: {named}{more} (such as {scan.table['name'][int(differ[0])]}); {'; '.join(hints)}"
    )
