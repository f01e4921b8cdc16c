"""Attention that ranks share: outputs and gradients are those of whole attention, and what cannot be split says so."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from exchanging import attend_in_turn
from torch import nn

from simpletuner.errors import TrainingError
from simpletuner.parallel.context.attention_exchange import SequenceGroup
from simpletuner.parallel.context.context_parallel import SplitModel, TokenSplit, override_attention
from simpletuner.parallel.mesh import build_mesh
from simpletuner.parallel.world import World
from simpletuner.settings.declared.sections import Parallel, Settings

ALONE = SplitModel(SequenceGroup("0", 1, 0), "allgather")


def test_each_rank_has_its_part_of_whole_attention_with_any_mask_and_lengths(starter, tmp_path):
    started = starter.start(attend_in_turn, 3, str(tmp_path / "report"))
    assert started.wait(300) == [0] * 3, started.said
    errors = torch.load(tmp_path / "report")
    assert len(errors) == 16
    assert {case: error for case, error in errors.items() if not error < 1e-5} == {}


@pytest.mark.parametrize("shape", [(8,), (2, 8)])
def test_a_tensor_of_other_axes_than_the_plan_says_is_not_split(shape):
    timestep, split = torch.zeros(shape), SplitModel(SequenceGroup("0", 2, 0), "allgather")
    assert split.part("time", timestep, TokenSplit(len(shape) - 1, 3)) is timestep and split.lengths == {}
    assert split.part("time", timestep, TokenSplit(len(shape) - 1)).shape[-1] == 4 and split.lengths == {"time": 8}


def test_attention_that_is_not_torchs_is_an_error_with_what_decides_it():
    class Softmax(nn.Module):
        def forward(self, query: torch.Tensor) -> torch.Tensor:
            return (query @ query.transpose(-1, -2)).softmax(-1) @ query

    attention = Softmax()
    ALONE.lengths["x"] = 4
    override_attention(attention, ("x",), ALONE)
    with pytest.raises(TrainingError, match="Softmax called torch's scaled_dot_product_attention 0 times, not once"):
        attention(torch.zeros(1, 1, 4, 2))


@pytest.mark.parametrize(
    ("copies", "cp", "axes"), [(1, 1, (1, 8, 1)), (2, 1, (2, 4, 1)), (1, 4, (1, 2, 4)), (2, 2, (2, 2, 2))]
)
def test_ranks_are_copies_times_shards_times_those_that_share_a_sequence(copies, cp, axes):
    parallel = Parallel(fsdp_enable=True, dp_replicate_size=copies, context_parallel_size=cp)
    mesh = build_mesh(Settings(parallel=parallel), World(0, 8, 0, torch.device("cpu"), dist.HashStore()))
    assert (mesh.dp_replicate, mesh.dp_shard, mesh.cp) == axes
