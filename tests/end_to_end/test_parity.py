"""The proof: however many ranks, and whatever engine, the losses and gradients are those of one process."""

from __future__ import annotations

import json
from itertools import chain

import collectives
import engines
import pytest
import torch
from safetensors.torch import load_file

LAYOUTS = {
    "one rank x 4": (1, 1, "whole"),
    "one rank x 2 x 2": (1, 2, "whole"),
    "data-parallel 2 x 2": (2, 1, "whole"),
    "data-parallel 2 x 1 x 2": (2, 2, "whole"),
    "FSDP2 2 x 2": (2, 1, "fsdp2"),
    "FSDP2 2 x 2, not resharded": (2, 1, "fsdp2-kept"),
    "FSDP2 2 x 1 x 2": (2, 2, "fsdp2"),
    "FSDP2 4 x 1": (4, 1, "fsdp2"),
}
"""Number of ranks, passes of each step, and engine; the effective batch is 4."""


def gradients(output) -> dict[str, torch.Tensor]:
    """Return what AdamW's first moment holds after one step: a tenth of the (clipped) gradient."""
    return load_file(output / "checkpoints" / "checkpoint-000001" / "exp_avg" / "diffusion_pytorch_model.safetensors")


def largest_relative_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    norm = torch.stack([value.norm() for value in one.values()]).norm()
    return float(torch.stack([(one[name] - other[name]).norm() for name in one]).norm() / norm)


@pytest.mark.long
@pytest.mark.parametrize(("family", "alone", "count"), [("flux", 10, 4), ("sdxl", 2, 2)])
def test_losses_are_the_same_on_every_engine(family, alone, count, run_on, arguments_of):
    """Of a transformer ten on one rank, the first four on several; two of a U-Net, whose steps cost twice as much."""
    taken: dict[str, list[list[float]]] = {}
    for world, passes in sorted({(world, passes) for world, passes, _ in LAYOUTS.values()}):
        names = {label: name for label, (*place, name) in LAYOUTS.items() if place == [world, passes]}
        arguments = arguments_of(family, passes=passes, caption_dropout=0.2)
        steps = run_on(engines.losses_in_turn, world, arguments, list(names.values()), alone if world == 1 else count)
        taken |= {label: steps[name] for label, name in names.items()}
    expected = taken["one rank x 4"]
    assert len(taken) == len(LAYOUTS) and len(expected) == alone
    assert alone < 10 or expected[-1][0] < expected[0][0]
    for label, steps in taken.items():
        assert list(chain(*steps)) == pytest.approx(list(chain(*expected[: len(steps)])), rel=1e-5), label


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_gradients_equal_those_of_one_process(family, request, train, tmp_path):
    flags = (*request.getfixturevalue(f"{family}_flags"), "--max_train_steps=1", "--max_grad_norm=0")
    whole = "--fsdp_state_dict_type=FULL_STATE_DICT"
    plain = train(tmp_path / "plain", *flags, "--train_batch_size=4", whole)
    for name, engine in {"dp": (), "fsdp": ("--fsdp_enable",)}.items():
        run = train(tmp_path / name, *flags, "--train_batch_size=2", whole, *engine, world=2)
        parts = sorted((run.output / "checkpoints" / "checkpoint-000001" / "exp_avg").glob("*.safetensors"))
        assert len(parts) == 2
        merged = {key: value for part in parts for key, value in load_file(part).items()}
        assert largest_relative_difference(gradients(plain.output), merged) < 1e-5


def test_accumulated_gradients_are_reduced_once(sdxl, starter, tmp_path):
    run = starter.start(collectives.count_reductions, 2, str(sdxl), str(tmp_path / "counts"))
    assert run.wait() == [0, 0], run.said
    counts = json.loads((tmp_path / "counts").read_text())
    for engine, (one_pass, three_passes) in counts.items():
        assert one_pass == three_passes > 0, (engine, counts)


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_bf16_over_float32_masters_stays_near_float32(family, run_on, arguments_of):
    [exact] = run_on(engines.losses_in_turn, 1, arguments_of(family), ["whole"], 3).values()
    rounded = run_on(engines.losses_in_turn, 2, arguments_of(family, mixed_precision="bf16"), ["whole", "fsdp2"], 3)
    for name, steps in rounded.items():
        assert steps != exact
        assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in exact], rel=2e-2), name


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_the_tiny_flavour_is_built_here_and_trained_from_a_config_file(family, shapes, train, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(f'model_family = "{family}"\nmodel_flavour = "tiny"\ninstance_data_dir = "{shapes}"\n')
    train(tmp_path / "run", f"--config={config}", "--max_train_steps=1", "--train_batch_size=2", world=2)
    assert (tmp_path / "run" / f"base-{family}-tiny" / "model_index.json").exists()
    run = train(tmp_path / "run", f"--config={config}", "--max_train_steps=2")
    assert "making" not in run.said and len(run.rows) == 2
