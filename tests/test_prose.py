"""Docstrings, and strings under constants and fields, open as PyTorch's do: with a verb or a noun."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "simpletuner"
OPENINGS = re.compile(r"(What|Whether|Which|Whose|Who|One|All that|How|That|Where|When|If)\b")


def documented(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every string that is a statement."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.lstrip()


def test_no_summary_line_opens_with_a_subordinate_clause():
    found = [(file, line, text) for file in PACKAGE.rglob("*.py") for line, text in documented(file)]
    assert len(found) > 2_500
    wrong = [f"{file.relative_to(PACKAGE)}:{line}: {text[:60]}" for file, line, text in found if OPENINGS.match(text)]
    assert wrong == []
