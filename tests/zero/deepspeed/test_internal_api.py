"""The internal DeepSpeed API that `simpletuner.deepspeed` lists is in the installed DeepSpeed."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import simpletuner.deepspeed
from simpletuner.settings.foreign.deepspeed_optimizers import OPTIMIZERS, REFUSED
from simpletuner.settings.rules.engine_rules import NOT_FOR_DEEPSPEED

LISTED = re.findall(r"^(\w+/\S+\.py) +(\w.*)$", simpletuner.deepspeed.__doc__ or "", re.MULTILINE)


def installed() -> Path:
    spec = find_spec("deepspeed")
    return Path((spec and spec.origin) or "").parent


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_every_listed_name_is_in_its_file():
    root = installed()
    names = [(file, name) for file, names in LISTED for name in names.split()]
    assert len(names) > 20
    missing = [(file, name) for file, name in names if not re.search(rf"\b{name}\b", (root / file).read_text())]
    assert missing == []


def named_by(pattern: str, *files: Path) -> list[str]:
    """Return the files that match, whatever the case."""
    return [str(file) for file in files if re.search(pattern, file.read_text(), re.IGNORECASE)]


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_the_reasons_for_which_optimizers_are_refused_are_true_of_the_installed_version():
    """A new version that serves one of them, or another one, fails here; Muon was once refused while it was served."""
    root = installed()
    sources, zero = sorted(root.rglob("*.py")), sorted((root / "runtime" / "zero").rglob("*.py"))
    engine, config = ((root / "runtime" / name).read_text() for name in ("engine.py", "config.py"))
    assert len(sources) > 300 and len(zero) > 15
    # An optimizer that needs more than slices is named by the code that makes the slices, as Muon is.
    assert named_by(r"muonwithauxadam", *zero)
    untrue = {name for name in ("lamb", *NOT_FOR_DEEPSPEED) if named_by(rf"{name}(?!da)|schedule.?free", *zero)}
    untrue |= {name for name in ("onebitadam", "onebitlamb", "zerooneadam") if named_by(rf"\b{name}\b", *sources)}
    untrue |= {name for name in ("MuAdam", "MuAdamW", "MuSGD") if f"from mup import {name}\n" not in engine}
    assert untrue == set()
    checked = {"lamb", "onebitadam", "onebitlamb", "zerooneadam", "muadam", "muadamw", "musgd"}
    assert checked == set(REFUSED), "of a new refusal the evidence is looked for above"
    served = set(re.findall(r"^[A-Z]+_OPTIMIZER = '(\w+)'", config, re.MULTILINE))
    assert len(served) >= 9 and served <= {*OPTIMIZERS, *REFUSED}, "a new optimizer is mapped or refused"
