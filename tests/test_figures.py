"""The figures of docs/performance.md are those of benchmarks/README.md, which says how they were measured."""

from __future__ import annotations

import re

from conftest import ROOT

NUMBER = re.compile(r"\d+(?:\.\d+)?")


def measured(text: str) -> dict[str, str]:
    """Return all rows of each command in a table; those below it have an empty first cell."""
    found, command = {}, ""
    for line in text.splitlines():
        if not line.startswith("|"):
            command = ""
            continue
        first, _, rest = line.strip("|").partition("|")
        script = re.search(r"benchmarks/\w+\.py", first)
        command = script[0] if script else command if not first.strip() else ""
        if command:
            found[command] = found.get(command, "") + rest.rpartition("|")[2] + " "
    return found


def test_each_figure_of_the_page_is_that_of_the_benchmark():
    shown = measured((ROOT / "docs" / "performance.md").read_text().partition("## Figures")[2])
    sources = measured((ROOT / "benchmarks" / "README.md").read_text())
    assert len(shown) == 5
    for command, figures in shown.items():
        own = [float(number) for number in NUMBER.findall(sources[command])]
        for figure in NUMBER.findall(figures):
            digits = len(figure.partition(".")[2])
            assert float(figure) in {round(number, digits) for number in own}, f"{command}: {figure}"
