"""Functions with lines that run on a GPU alone: each is rehearsed, or a part of `benchmarks/gpu` runs it."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from conftest import ROOT

PACKAGE, BENCHMARK = ROOT / "simpletuner", ROOT / "benchmarks" / "gpu"
sys.path.append(str(BENCHMARK.parent))

from gpu import tiny_runs  # noqa: E402
from gpu.parts import all_parts  # noqa: E402

KNOWN = tomllib.loads((BENCHMARK / "cuda_functions.toml").read_text())
"""The rehearsed ones are held by tests/end_to_end/test_rehearsal.py."""


def names_cuda(node: ast.AST) -> bool:
    """True for `torch.cuda`, `tensor.is_cuda` and the string that names the device."""
    if isinstance(node, ast.Attribute):
        return node.attr == "is_cuda" or (node.attr == "cuda" and isinstance(node.value, ast.Name))
    return isinstance(node, ast.Constant) and node.value == "cuda"


def functions_below(node: ast.AST, name: str = "") -> Iterator[str]:
    """Yield the innermost function of each node that names CUDA; nothing for what runs at import."""
    for child in ast.iter_child_nodes(node):
        inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else name
        if name and names_cuda(child):
            yield name
        yield from functions_below(child, inner)


def found_functions(package: Path) -> set[str]:
    return {
        f"{file.relative_to(package)}::{name}"
        for file in package.rglob("*.py")
        for name in functions_below(ast.parse(file.read_text()))
    }


def test_each_function_with_a_line_for_cuda_alone_is_known_and_no_other():
    listed = [*KNOWN["rehearsed"], *KNOWN["several_gpus"], *KNOWN["parts"]]
    assert len(listed) == len(set(listed)) > 40
    assert found_functions(PACKAGE) == set(listed), (
        "add it to benchmarks/gpu/cuda_functions.toml, with the part that runs it"
    )


def test_parts_and_runs_that_execute_them_exist():
    runs = {*tiny_runs.FLUX, *tiny_runs.SDXL, *tiny_runs.TWO_DENOISERS}
    for function, said in KNOWN["parts"].items():
        part, _, run = said.partition(": ")
        assert part in all_parts() and (not run or run in runs), function


def test_a_new_function_is_found_by_each_way_to_name_cuda(tmp_path):
    (tmp_path / "new.py").write_text(
        "def one(device):\n    return device.type == 'cuda'\n\n"
        "class Two:\n    def two(self, tensor):\n        return (lambda: tensor.is_cuda)()\n\n"
        "def three():\n    def four():\n        import torch\n        torch.cuda.synchronize()\n    return four\n"
    )
    assert found_functions(tmp_path) == {"new.py::one", "new.py::two", "new.py::four"}
