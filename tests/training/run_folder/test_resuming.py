"""Which checkpoints fit a model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from simpletuner.checkpoints.layout import Checkpoint, file_sizes
from simpletuner.training.run_folder.resuming import find_misfit

SHAPES = {"a": (2, 3), "b": (4,)}


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (SHAPES, ""),
        ({"a": (2, 3)}, "b is missing in the checkpoint, (4,) in the model"),
        ({**SHAPES, "c": (1,)}, "c is (1,) in the checkpoint, missing in the model"),
        ({"a": (3, 2), "b": (4,)}, "a is (3, 2) in the checkpoint, (2, 3) in the model"),
        ({"b": (4,)} | dict.fromkeys("cdefgh", (1,)), "and 4 more"),
    ],
)
def test_a_checkpoint_fits_a_model_of_the_same_weights_neither_fewer_nor_more(held, said, tmp_path):
    (tmp_path / "model").mkdir()
    save_file({name: torch.zeros(shape) for name, shape in held.items()}, tmp_path / "model" / "w.safetensors")
    checkpoint = Checkpoint(tmp_path, {"files": file_sizes(tmp_path)})
    found = find_misfit(checkpoint, SimpleNamespace(trained_shapes=lambda: SHAPES))
    assert said in found and bool(found) == bool(said)
