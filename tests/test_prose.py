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


ROOT = PACKAGE.parent
FOLDERS = {path.name for parent in (ROOT, PACKAGE) for path in parent.iterdir() if path.is_dir()} - {"examples"}
PATHS = re.compile(r"(?<![\w/.*<>{}$-])((?:[\w-]+/)+[\w-]+\.(?:py|txt|md|toml|jinja))\b")
"""Files by their paths: a name without a folder may be another program's, as `examples/` of diffusers."""


def missing_paths(file: Path) -> Iterator[str]:
    """Yield the paths below the repository or the package that a file names and that do not exist."""
    for number, line in enumerate(file.read_text("utf-8").splitlines(), start=1):
        for path in PATHS.findall(line):
            if path.split("/")[0] in FOLDERS and not any(
                (each / path).exists() for each in (ROOT, PACKAGE, ROOT / "tests")
            ):
                yield f"{file.relative_to(ROOT)}:{number}: {path}"


def test_every_file_that_prose_names_exists():
    pages = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")), *ROOT.glob("docs/*.md")]
    scripts = [file for folder in ("simpletuner", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    missing = [each for file in [*pages, *scripts, *ROOT.glob("benchmarks/*.md")] for each in missing_paths(file)]
    assert missing == []
