from __future__ import annotations

import pytest
import torch

from simpletuner.parallel.world import device_of


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here to leave alone")
def test_use_cpu_leaves_gpus_alone():
    assert device_of(0).type == "cuda"
    assert device_of(0, use_cpu=True).type == "cpu"
