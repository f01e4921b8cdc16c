"""docs/start.md names the calls of a start, in the order of the functions that make them."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from simpletuner import worker
from simpletuner.commands import train as command

PAGE = Path(__file__).parents[1] / "docs" / "start.md"
STAGES: dict[str, Callable[..., object]] = {
    each.__name__: each
    for each in (
        *(command.train_rank, command.import_rank),
        *(worker.run_rank, worker.run, worker.resume, worker.train),
        *(worker.prove_family, worker.check_start, worker.record_start, worker.take_steps),
    )
}
QUICK = {
    # Python's, and objects that hold what they are given
    *("len", "get", "update", "reversed", "sorted", "int", "bool", "partial", "closing", "ExitStack", "enter_context"),
    *("SettingsError", "Report", "Activity", "MessageStore", "TorchStore", "Group", "Session", "Run", "restarted"),
    # messages
    *(
        "warn",
        "warn_all",
        "say",
        "table",
        "phase",
        "begin",
        "timed",
        "write",
        "write_records",
        "count_noun",
        "stop_advice",
    ),
    # contexts that change an error's text, or what happens at a signal or an import
    *("explain_system_errors", "explain_out_of_memory", "compiler_explained", "exit_on_interrupt", "lasting"),
    *("no_collection", "silence_libraries", "set_float32_precision"),
    # a look at settings, the environment or what has been computed before
    *("is_rank", "source_of", "as_arguments", "prefix_in", "message_signer", "node_info"),
    *("compute_dtype", "folders_of", "samples_by_shape", "facts", "pipelines_of", "planned"),
}
"""Calls that take no time and cannot end a run."""


def calls_of(stage: Callable[..., object]) -> Iterator[str]:
    """Yield the names of what a function calls, or passes to `partial`, in the order of its text.

    For another stage its own calls stand, and for a function within, where it is passed on.
    """
    (tree,) = ast.parse(inspect.getsource(stage)).body
    within = {each.name: each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each is not tree}
    yield from calls_in(tree, within)


def calls_in(tree: ast.AST, within: dict[str, ast.FunctionDef]) -> Iterator[str]:
    elsewhere = {node for each in within.values() if each is not tree for node in ast.walk(each)}
    found: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node not in elsewhere:
            is_partial = isinstance(node.func, ast.Name) and node.func.id == "partial"
            passed = [each for each in node.args if isinstance(each, ast.Name) and each.id in within]
            found += [node.func, *passed, *node.args[:is_partial]]
    for each in sorted(found, key=lambda each: (each.end_lineno or 0, each.end_col_offset or 0)):
        if isinstance(each, ast.Attribute):
            yield each.attr
        elif isinstance(each, ast.Name) and each.id in within:
            yield from calls_in(within[each.id], within)
        elif isinstance(each, ast.Name) and each.id in STAGES:
            yield from calls_of(STAGES[each.id])
        elif isinstance(each, ast.Name):
            yield each.id


def test_the_page_names_each_call_of_a_start_in_order():
    made = list(dict.fromkeys(calls_of(command.train)))
    assert not QUICK - {*made}, f"no stage calls {QUICK - {*made}}"
    quoted = re.findall(r"`(?:\w+\.)*(\w+)\(", PAGE.read_text())
    assert list(dict.fromkeys(quoted)) == [name for name in made if name not in QUICK]


def test_every_place_that_the_page_names_exists_and_it_stays_short():
    links = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text())
    assert links and all((PAGE.parent / link).exists() for link in links)
    assert len(PAGE.read_text().splitlines()) <= 70
