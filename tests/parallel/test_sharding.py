"""What the settings of FSDP2 change in how a model is sharded, on two real ranks."""

from __future__ import annotations

import json

import pytest
import sharding

from simpletuner.parallel.fsdp2 import SYNC_EACH_BATCH_ABOVE, is_synced_each_batch
from simpletuner.settings.declared.sections import Parallel


def test_copies_gradient_shards_and_offload_are_as_set(starter, tmp_path):
    run = starter.start(sharding.facts_by_engine, 2, ["fsdp2", "fsdp2-sync", "fsdp2-cpu", "hybrid"], str(tmp_path))
    assert run.wait() == [0, 0], run.said
    whole, half = [16, 16], [8, 16]
    plain = {"mesh": ["dp_shard_cp"], "shard": half, "offload": ["OffloadPolicy"], "gradients": [None, half]}
    plain["reduced in"] = ["torch.float32"]
    expected = {
        "fsdp2": plain,
        "fsdp2-sync": plain | {"gradients": [half, half]},
        "fsdp2-cpu": plain | {"offload": ["CPUOffloadPolicy"]},
        "hybrid": plain | {"mesh": ["dp_replicate", "dp_shard_cp"], "shard": whole, "gradients": [None, whole]},
    }
    assert [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)] == [expected, expected]


@pytest.mark.parametrize("asked", [None, False, True])
def test_gradients_are_reduced_in_each_micro_batch_above_two_billion_parameters_unless_set(asked):
    parallel = Parallel(fsdp_enable=True, fsdp_sync_each_batch=asked)
    answers = [is_synced_each_batch(parallel, SYNC_EACH_BATCH_ABOVE + more) for more in (-1, 0, 1)]
    assert SYNC_EACH_BATCH_ABOVE == 2_000_000_000
    assert answers == ([False, False, True] if asked is None else [asked] * 3)
