"""The commands of the README that start a run do what its page says, with the file that its first commands write."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from PIL import Image

from simpletuner.app import command_of, main
from simpletuner.settings.values.spelling import normalize_name

TEXT = (ROOT / "README.md").read_text()
LINES = TEXT.replace("\\\n", " ")
"""The text, with each command in one line."""


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 0 and "usually trained at" not in said and "warning" not in said, said


def test_the_first_commands_work_in_a_clone_as_they_stand(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "simpletuner train" in "\n".join(TEXT.splitlines()[:20])
    block = LINES.partition("```bash\n")[2].partition("```")[0]
    install, draw, init, train = [shlex.split(line, comments=True) for line in block.strip().splitlines()]
    assert install == ["pip", "install", "."]
    subprocess.run([sys.executable, ROOT / draw[1], *draw[2:]], check=True)
    run(init[1:], capsys)
    run([*train[1:], "--dry_run"], capsys)


def test_every_command_for_photos_can_start_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for number in range(36):
        Image.new("RGB", (1024, 1024), (number, 0, 0)).save(f"photos/{number}.png")
        Path(f"photos/{number}.txt").write_text("a photo")
    for name, count in (("style", 1), ("all", 3)):
        lines = re.findall(rf"^simpletuner (.*{name}\.toml[^#\n]*)", LINES, re.MULTILINE)
        init, *others = [shlex.split(line) for line in lines]
        run(init, capsys)
        file = Path(f"{name}.toml")
        text = file.read_text()
        # What `plan --apply` adds to it; the plan itself takes a minute.
        is_planned = any("--apply" in words for words in others)
        file.write_text(text + 'state_layout = "split"\n' * is_planned)
        starts = [words for words in others if words[0] == "train"]
        assert len(starts) == count
        for words in starts:
            run([*words, "--dry_run"], capsys)


def documented_commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the page and the words after `simpletuner` of each command in a block of code."""
    for page in (ROOT / "README.md", ROOT / "AGENTS.md", *ROOT.glob("docs/*.md")):
        for block in re.findall(r"^ *```(?:bash)?\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE):
            for line in re.findall(r"^[ $]*simpletuner (.*)$", block.replace("\\\n", " "), re.MULTILINE):
                yield page.name, shlex.split(re.split(r"&&|>|\|", line)[0], comments=True)


def test_every_command_of_the_documentation_exists_with_each_of_its_flags():
    found, wrong = list(documented_commands()), []
    for page, words in found:
        command = command_of("simpletuner", words[0])
        for word in words:
            command = getattr(command, "commands", {word: command}).get(word, command)
        known = {normalize_name(flag.lstrip("-")) for each in command.params for flag in each.opts}
        flags = [word for word in words if word.startswith("--")]
        wrong += [f"{page}: {flag}" for flag in flags if normalize_name(flag[2:].partition("=")[0]) not in known]
    assert len(found) > 60 and wrong == []


def cells_of(text: str, heading: str) -> list[list[str]]:
    """Return the rows of the table below a heading, its head first."""
    lines = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in rows if not row[0].startswith("---")]


def test_what_fits_where_is_what_its_own_page_says():
    tree = ast.parse((ROOT / "benchmarks" / "what_fits.py").read_text())
    [names] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "README_MODELS"
    ]
    page = (ROOT / "docs" / "what-fits.md").read_text()
    tables = {"full": cells_of(page, "Full fine-tuning"), "LoRA": cells_of(page, "LoRA")}
    head, *rows = cells_of(TEXT, "What fits where")
    assert [row[0] for row in rows] == [*names.values()]
    for model, row in zip(names, rows, strict=True):
        for place, cell in zip(head[1:], row[1:], strict=True):
            kind, _, card = place.partition(", ")
            known = {line[0]: line for line in tables[kind]}
            seconds = known[model][tables[kind][0].index(card)]
            assert re.fullmatch(r"\d+ GiB, (.*)", cell)[1] == re.match(r"\S+ s", seconds)[0], f"{model}: {place}"


def headings_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_of_the_documentation_lead_to_pages_and_headings_that_exist():
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("tests/campaigns/*.md"),
        *ROOT.glob("benchmarks/*.md"),
    ]
    found = [(page, link) for page in pages for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    wrong = []
    for page, link in found:
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        is_there = target.exists() and (not heading or heading in headings_of(target))
        wrong += [f"{page.name}: {link}"] * (not link.startswith("http") and not is_there)
    assert len(found) > 200 and wrong == []
