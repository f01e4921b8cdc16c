"""Private API of torch, diffusers and typer stands in simpletuner/private_api alone: one place to look at."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "simpletuner"
LIBRARIES = ("torch", "dist", "diffusers", "typer")
OF_MODELS = {"_cp_plan", "_no_split_modules", "_repeated_blocks", "_keep_in_fp32_modules"}


def is_private(dotted: str) -> bool:
    library, *parts = dotted.split(".")
    return library in LIBRARIES and any(part.startswith("_") and not part.startswith("__") for part in parts)


def private_uses(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                yield from (name for each in names if is_private(name := f"{module}.{each.name}"))
            case ast.Import(names=names):
                yield from (each.name for each in names if is_private(each.name))
            case ast.Attribute(attr=attr) if attr in OF_MODELS or is_private(ast.unparse(node)):
                yield ast.unparse(node)
            case ast.Constant(value=str(text)) if text in OF_MODELS:
                yield text


def test_the_package_has_one_place_for_it():
    files = [file for file in PACKAGE.rglob("*.py") if file.parent.name != "private_api"]
    found = {file.name: uses for file in files if (uses := list(private_uses(file.read_text("utf-8"))))}
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "from torch._dynamo import config",
        "from torch.utils import _pytree",
        "import diffusers.models._modeling_parallel",
        "torch._foreach_norm(gradients)",
        "dist.distributed_c10d._abort_process_group()",
        "model._cp_plan",
        "getattr(model, '_repeated_blocks')",
        "from typer._adapters import x",
    ],
)
def test_another_place_would_be_found(source):
    assert len(list(private_uses(source))) == 1
