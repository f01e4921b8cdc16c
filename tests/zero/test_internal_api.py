"""The internal DeepSpeed API that `simpletuner.deepspeed` lists is in the installed DeepSpeed."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import simpletuner.deepspeed

LISTED = re.findall(r"^(\w+/\S+\.py) +(\w.*)$", simpletuner.deepspeed.__doc__ or "", re.MULTILINE)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_every_listed_name_is_in_its_file():
    spec = find_spec("deepspeed")
    root = Path((spec and spec.origin) or "").parent
    names = [(file, name) for file, names in LISTED for name in names.split()]
    assert len(names) > 20
    missing = [(file, name) for file, name in names if not re.search(rf"\b{name}\b", (root / file).read_text())]
    assert missing == []
