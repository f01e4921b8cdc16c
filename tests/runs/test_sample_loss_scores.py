"""Samples are compared with others at the same timesteps, in the same part of a run, of the same bucket."""

from __future__ import annotations

import json

import numpy as np
import pytest

from simpletuner.errors import SettingsError
from simpletuner.runs.sample_loss_scores import SAMPLE_LOSSES, read_losses, score_samples


def test_a_sample_with_a_higher_loss_is_found_though_timesteps_steps_and_buckets_matter_more(tmp_path):
    dice, lines = np.random.default_rng(0), []
    for step in range(1, 601):
        bucket = int(dice.integers(2))
        samples = 50 * bucket + dice.permutation(50)[:8]
        timesteps = dice.random(8)
        # The loss falls twentyfold over timesteps, tenfold over the run, and is twice as high in a bucket.
        logs = (
            -3 * timesteps - 2.3 * step / 600 + 0.7 * bucket + 0.3 * dice.standard_normal(8) + 0.3 * (samples % 25 == 3)
        )
        row = {"step": step, "bucket": f"{bucket}", "ids": [f"d/{each}.png" for each in samples]}
        row |= {"timesteps": timesteps.tolist(), "losses": np.exp(logs).tolist()}
        lines.append(json.dumps(row))
    odd = ['{"step": 3, "buck', "[]", json.dumps({**json.loads(lines[0]), "losses": [1.0]}), '{"step": NaN}']
    (tmp_path / SAMPLE_LOSSES).write_text("\n".join([*odd, *lines]))
    scores = score_samples(read_losses(tmp_path / SAMPLE_LOSSES))
    assert {each.id for each in scores[:4]} == {"d/3.png", "d/28.png", "d/53.png", "d/78.png"}
    assert len(scores) == 100 and sum(each.looks_wrong for each in scores) in (4, 5)
    assert all(1.2 < each.ratio < 1.5 and each.ratio_at_end > 1.1 for each in scores[:4])


def test_a_run_without_the_record_is_a_mistake_and_an_empty_one_has_no_samples(tmp_path):
    with pytest.raises(SettingsError, match=r"there is no .*sample_losses\.jsonl"):
        read_losses(tmp_path / SAMPLE_LOSSES)
    (tmp_path / SAMPLE_LOSSES).touch()
    assert score_samples(read_losses(tmp_path / SAMPLE_LOSSES)) == []
