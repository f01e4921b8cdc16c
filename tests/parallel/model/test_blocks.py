"""Which classes become units: on models made to be tricky, and on every published architecture."""

from __future__ import annotations

import pytest
from torch import nn

from simpletuner.models.catalog.registry import flavours_of, presets
from simpletuner.models.folder.diffusers_io import build_on_meta
from simpletuner.parallel.fsdp2 import format_units, units_by_class
from simpletuner.parallel.model.blocks import blocks_of, detect_blocks, recommended_blocks
from simpletuner.settings.declared.sections import Parallel

ARCHITECTURES = {
    f"{key}-{flavour.architecture.source}": flavour.architecture
    for key in presets()
    for flavour in flavours_of(key).values()
}
MUST_HOLD_ENOUGH = ("flux-", "sdxl-", "sd3-", "wan-", "sana-")


class Part(nn.Module):
    """Parts of a model; subclasses give them other names."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)


class Inner(Part): ...


class Outer(Part): ...


class Other(Part): ...


class Root(Part): ...


def inner(width: int = 10) -> Inner:
    return Inner(nn.Linear(width, width, bias=False))


def taken(model: nn.Module) -> tuple[str, ...]:
    """Return what is recommended, having seen that no unit contains another, nor is one twice."""
    names = recommended_blocks(model)
    assert detect_blocks(model).recommended == names
    units = units_by_class(model, names)
    assert len(set(units)) == len(units)
    for unit in units:
        assert not [below for below in unit.modules() if below is not unit and type(below).__name__ in names]
    return names


def why(model: nn.Module, name: str) -> str:
    return next(item.reason for item in detect_blocks(model).classes if item.class_name == name)


def test_a_block_is_taken_and_what_lies_within_is_not():
    model = Root(*(Outer(inner(), inner()) for _ in range(30)))
    assert taken(model) == ("Outer",)
    assert why(model, "Outer") == "repeats in parts"
    assert why(model, "Inner") == "inside Outer"
    assert why(model, "Linear") == "inside Outer"


def test_large_blocks_give_way_to_those_within():
    model = Root(*(Outer(*(inner() for _ in range(20))) for _ in range(3)))
    assert taken(model) == ("Inner",)
    assert why(model, "Outer") == "holds Inner; one is up to 33.3% of the model"
    assert why(model, "ModuleList") == "only a list of other modules"


def test_large_blocks_stay_if_what_lies_within_holds_too_little():
    model = Root(*(Outer(nn.Linear(100, 100), inner(), inner()) for _ in range(3)))
    assert taken(model) == ("Outer",)


def test_a_class_that_stands_within_another_and_outside_is_never_wrapped_twice():
    mostly_outside = Root(*(inner() for _ in range(50)), *(Outer(inner()) for _ in range(2)))
    assert taken(mostly_outside) == ("Inner",)
    mostly_within = Root(*(Outer(inner(), nn.Linear(30, 30)) for _ in range(30)), inner(), inner())
    assert taken(mostly_within) == ("Outer",)
    assert why(mostly_within, "Inner") == "partly inside Outer"


def test_blocks_that_do_not_contain_one_another_are_all_taken_largest_first():
    model = Root(*(inner() for _ in range(20)), *(Outer(nn.Linear(20, 20)) for _ in range(20)))
    assert taken(model) == ("Outer", "Inner")
    assert detect_blocks(model).outside == {}


def test_what_repeats_within_itself_is_no_unit():
    model = Root(*(Outer(Outer(nn.Linear(9, 9)), Outer(nn.Linear(9, 9))) for _ in range(9)))
    assert taken(model) == ()
    assert why(model, "Outer") == "modules of this class contain one another"
    assert next(item.parameters for item in detect_blocks(model).classes if item.class_name == "Outer") == 18 * 90


def test_leaves_lists_single_modules_and_trifles_are_no_units():
    model = Root(nn.Linear(50, 50), nn.Linear(50, 50), Other(nn.Linear(50, 50)), inner(2), inner(2))
    assert taken(model) == ()
    assert why(model, "Linear") == "holds no modules"
    assert why(model, "Other") == "repeats in no ModuleList"
    assert why(model, "Inner") == "the largest is only 0.05% of the model"
    assert blocks_of(model) == ["Inner"]


def test_what_stays_outside_is_named_and_every_parameter_is_somewhere():
    model = Root(*(Outer(inner()) for _ in range(20)), Other(nn.Linear(3, 3), Outer(inner())))
    model.scale = nn.Parameter(nn.Linear(4, 1).weight.detach())
    blocks = detect_blocks(model)
    assert blocks.recommended == ("Outer",)
    assert blocks.outside == {"parts.20.parts.0": 12, "scale": 4}
    assert sum(blocks.outside.values()) + blocks.classes[0].parameters == blocks.total_parameters
    assert blocks.classes[0].sample_paths == ("parts.0", "parts.1", "parts.2")
    assert blocks.classes[0].count == 21 and blocks.classes[0].largest == 100


def test_diffusers_own_hints_are_told():
    model = Root(*(Outer(inner()) for _ in range(20)))
    model._no_split_modules, model._repeated_blocks = ["Outer", "Nothing"], None
    outer = detect_blocks(model).classes[0]
    assert outer.class_name == "Outer" and outer.no_split and not outer.repeated


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "Outer x 20: 100.0% of the weights, recommended"),
        ({"fsdp_transformer_layer_cls_to_wrap": "Inner"}, "Inner x 20: 83.3% of the weights, as set"),
        ({"fsdp_auto_wrap_policy": "NO_WRAP"}, "the model as one: 100.0% of the weights, NO_WRAP"),
    ],
)
def test_units_are_told_with_their_share(settings, said):
    model = Root(*(Outer(inner(), nn.Linear(4, 4)) for _ in range(20)))
    assert format_units(model, Parallel(**settings)) == said


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_published_models_are_wrapped_in_units_that_are_small_and_not_nested(name):
    architecture = ARCHITECTURES[name]
    model = build_on_meta({**architecture.config, "_class_name": architecture.class_name}, include_buffers=True)
    assert taken(model)
    blocks = detect_blocks(model)
    outside = sum(blocks.outside.values()) / blocks.total_parameters
    assert outside <= (0.05 if name.startswith(MUST_HOLD_ENOUGH) else 0.1)
    assert max(item.largest for item in blocks.classes if item.recommended) <= blocks.total_parameters / 10
    assert architecture.parameters in (None, blocks.total_parameters)
