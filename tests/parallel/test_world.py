from __future__ import annotations

import pytest
import torch

from simpletuner.errors import EnvironmentNotReady
from simpletuner.parallel.world import check_no_gpu_is_lost, device_of


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here to leave alone")
def test_use_cpu_leaves_gpus_alone():
    assert device_of(0).type == "cuda"
    assert device_of(0, use_cpu=True).type == "cpu"


def test_a_gpu_that_torch_cannot_use_is_named_instead_of_training_on_the_cpu(tmp_path):
    check_no_gpu_is_lost(tmp_path / "nvidia0")
    (tmp_path / "nvidia0").touch()
    with pytest.raises(EnvironmentNotReady, match=r"has a GPU .*nvidia0.*, but torch .* cannot use it") as caught:
        check_no_gpu_is_lost(tmp_path / "nvidia0")
    assert "--use_cpu" in caught.value.hint
