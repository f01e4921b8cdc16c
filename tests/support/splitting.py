"""Families whose sequences are split over ranks, in turn in one process group, beside the same run with whole ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engines import opened, prepared_by, rows_of, settings_of, steps_of, whole, write
from torch._dynamo.utils import counters

from simpletuner.parallel.torch_engine import local_tensor
from simpletuner.parallel.world import World, joined_world
from simpletuner.preparation.prepare import Prepared
from simpletuner.training.validation.validator import Validator

LIMITS = {"losses": 1e-5, "gradients": 1e-5, "latents": 1e-4}
"""What a split run may differ by from a whole one in float32, relative."""

NO_TOKENIZER_LIMIT = ("lumina2", "qwen_image", "z_image")
FIRST_IMAGE = "00"


@dataclass(frozen=True)
class Result:
    """What a case has computed: each step's loss and norm, the first gradients, and latents that it sampled then.

    Gradients are whole of a family's first case, and of the others what this rank holds.
    """

    steps: list[list[float]]
    gradients: dict[str, torch.Tensor]
    latents: dict[str, torch.Tensor]
    graphs: int


def case(family: str, engine: str, steps: int = 1, what: str = "", **more: Any) -> dict[str, Any]:
    """Return a case for `compare_in_turn`, of parts that differ in length: 5 x 5 tokens, or 3 x 3 of 32 px each.

    One step is enough: latents are sampled after it, so they show what the update has made of the weights.

    Captions differ in length, so that there are masks.
    """
    own: dict[str, Any] = {} if family in NO_TOKENIZER_LIMIT else {"tokenizer_max_length": 9}
    own |= {"resolution": 96, "alignment": 32} if family == "ltxvideo" else {"resolution": 80}
    named = {"family": family, "engine": engine, "steps": steps, "label": f"{family} {engine}{what}"}
    return own | {"caption_dropout": 0.5, "max_grad_norm": 0.0, "validation_prompt": ["a red circle"]} | more | named


def compare_in_turn(cases: list[dict[str, Any]], report: str) -> None:
    """Train each case, and write how far it is from its family's first one, by label."""
    with joined_world() as joined:
        taken: dict[str, Any] = {}
        prepared: dict[str, Prepared] = {}
        expected: dict[str, Result] = {}
        for case in cases:
            family = case["family"]
            world = replace(joined, store=dist.PrefixStore(family, joined.store))
            settings = settings_of(case, case["engine"], Path(case["folder"]) / case["label"], world.size)
            if family not in prepared:
                prepared[family] = prepared_by(world, settings)
            result = computed(world, settings, prepared[family], case["steps"], is_first=family not in expected)
            found = differences(result, expected.setdefault(family, result))
            found["gradients"] = largest(map(float, world.gather_texts(str(found["gradients"]))))
            taken[case["label"]] = found
        write(taken, report, joined)


def computed(world: World, settings: Any, prepared: Prepared, steps: int, *, is_first: bool) -> Result:
    """Take some steps; the gradients of the first one are what AdamW's first moment has of it."""
    with opened(world, settings, prepared) as (trainer, state):
        taken = steps_of(trainer, world, 1)
        moment = state.engine.optimizer_state().tensors["exp_avg"]()
        gradients = {name: (whole(each) if is_first else each).clone() for name, each in moment.items()}
        are_sampled = bool(settings.validation.validation_prompt)  # what is prepared serves cases without prompts, too
        validators = [each for each in trainer.evaluations if are_sampled and isinstance(each, Validator)]
        samples = [sample for each in validators for sample in each._samples(lambda done: None)]
        latents = {planned.prompt.name: tensor.clone() for planned, tensor, _ in samples}
        return Result(taken + steps_of(trainer, world, steps - 1), gradients, latents, compiled_graphs())


def compiled_graphs() -> int:
    """Return how many graphs the compiler has made since the last call."""
    made = counters["stats"]["unique_graphs"]
    counters.clear()
    torch.compiler.reset()
    return made


def differences(result: Result, expected: Result) -> dict[str, Any]:
    """Return the largest relative differences of a case, beside its losses; rank 0 has the first image."""
    (losses, norms), (expected_losses, expected_norms) = (zip(*each.steps, strict=True) for each in (result, expected))
    found = {
        "values": losses,
        "graphs": result.graphs,
        "losses": largest(abs(one / other - 1) for one, other in zip(losses, expected_losses, strict=False)),
        "norms": largest(abs(one / other - 1) for one, other in zip(norms, expected_norms, strict=False)),
        "gradients": gradient_difference(result.gradients, expected.gradients),
    }
    if (latents := result.latents.get(FIRST_IMAGE)) is not None:
        whole = expected.latents[FIRST_IMAGE]
        found["latents"] = float((latents - whole).abs().max() / whole.abs().max())
    return found


def largest(values: Iterable[float]) -> float:
    """Return the largest of some differences; NaN if one is."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())


def gradient_difference(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of what this rank holds of a gradient, relative to the norm of that part of the
    whole one, or to 1e-4 of that of all."""
    assert gradients.keys() == expected.keys()
    least = 1e-4 * torch.stack([each.norm() for each in expected.values()]).norm()
    parts = ((local_tensor(each), rows_of(expected[name], each)) for name, each in gradients.items())
    return largest(float((ours - theirs).norm() / theirs.norm().clamp(min=least)) for ours, theirs in parts)
