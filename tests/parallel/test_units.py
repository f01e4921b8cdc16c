from __future__ import annotations

import pytest
from torch import nn

from simpletuner.errors import SettingsError
from simpletuner.parallel.fsdp2 import units_of
from simpletuner.settings.declared.sections import Parallel


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(10, 10), nn.Linear(10, 20)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(10, 4)


def every_block(model: Model) -> list[nn.Module]:
    """Serve as a user's own wrap policy."""
    return list(model.blocks)


def names_of(units: list[nn.Module]) -> list[str]:
    return [type(unit).__name__ for unit in units]


def test_classes_of_the_family_or_of_the_user_become_units():
    assert names_of(units_of(Model(), ("Block",), Parallel())) == ["Block"] * 3
    asked = Parallel(fsdp_transformer_layer_cls_to_wrap="Linear, Block")
    units = units_of(Model(), ("Nothing",), asked)
    assert sorted(names_of(units)) == ["Block"] * 3 + ["Linear"] * 7
    assert units.index(next(u for u in units if isinstance(u, nn.Linear))) == 0, "inner units come first"


def test_a_class_that_the_model_does_not_have_is_named_with_the_nearest():
    with pytest.raises(SettingsError) as error:
        units_of(Model(), (), Parallel(fsdp_transformer_layer_cls_to_wrap="Blok"))
    assert "Model has no `Blok`; did you mean `Block`?" in error.value.message


def test_no_wrap_leaves_only_the_root():
    assert units_of(Model(), ("Block",), Parallel(fsdp_auto_wrap_policy="NO_WRAP")) == []


@pytest.mark.parametrize(("smallest", "expected"), [(100, 6), (330, 3), (331, 0)])
def test_units_by_size_hold_at_least_so_many_parameters(smallest, expected):
    # a Block has 110 + 220 parameters, the head 44; ModuleLists cannot be units
    policy = Parallel(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=smallest)
    units = units_of(Model(), (), policy)
    assert len(units) == expected


def test_a_dotted_path_is_the_users_own_policy():
    policy = Parallel(fsdp_auto_wrap_policy=f"{__name__}.every_block")
    assert names_of(units_of(Model(), (), policy)) == ["Block"] * 3
    with pytest.raises(SettingsError, match="nowhere"):
        units_of(Model(), (), Parallel(fsdp_auto_wrap_policy="nowhere.at_all"))


def names_of_blocks(model: Model) -> list[str]:
    return [name for name, _ in model.named_children()]


def broken_policy(model: Model) -> list[nn.Module]:
    return [model.no_such_part]  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (f"{__name__}.broken_policy", "AttributeError: 'Model' object has no attribute 'no_such_part'"),
        (f"{__name__}.names_of_blocks", "returns a str that is no module of the denoiser"),
        ("torch.distributed.fsdp.wrap.size_based_auto_wrap_policy", "TypeError: size_based_auto_wrap_policy() missing"),
    ],
)
def test_a_policy_that_fails_is_the_users_mistake_and_the_hint_shows_the_signature(path, said):
    with pytest.raises(SettingsError) as error:
        units_of(Model(), (), Parallel(fsdp_auto_wrap_policy=path))
    assert said in error.value.message and "policy(model)" in error.value.hint
