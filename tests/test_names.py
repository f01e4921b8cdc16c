"""A name of the package leads to one thing, and a folder can be taken in at a glance."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "simpletuner"


def test_no_class_name_stands_twice():
    nodes = [node for file in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(file.read_text("utf-8")))]
    counts = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    doubled = {name for name, count in counts.items() if count > 1}
    assert doubled == set()


OF_ONE_KIND = {"commands", "models/families"}
"""Folders whose files are all of one kind: a subcommand each, a family each."""


def test_no_folder_of_several_kinds_has_more_than_13_modules():
    folders = Counter(file.parent for file in PACKAGE.rglob("*.py") if file.name != "__init__.py")
    named = {folder.relative_to(PACKAGE).as_posix(): count for folder, count in folders.items()}
    assert {name: count for name, count in named.items() if count > 13 and name not in OF_ONE_KIND} == {}
