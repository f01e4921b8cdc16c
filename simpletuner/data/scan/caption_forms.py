"""Forms of a caption file of several lines: alternatives, one a line, or one text that has lines of its own.

What language models write has paragraphs, Markdown, JSON or YAML, and editors wrap lines; split at its lines, such a
text would be trained as captions like `{` and `---`. One file may be ambiguous, so all of a dataset decide together.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from statistics import mean

from simpletuner.data.config.caption_rules import is_blank, split_lines

MARKDOWN = re.compile(
    r"#{1,6}\s+\S|\s*([-*+•]|\d{1,3}[.)])\s+\S|\*\*[^*]+\*\*:?\s*$|\*\*[^*]+(:\*\*|\*\*:)|```|\|.*\|\s*$|>\s"
)
FIELD = re.compile(r"""["']?([^\W\d_][\w/-]*( [\w/-]+){0,3})["']?\s*(：|:(\s|$))""")
ELEMENT = re.compile(r"\s*<([A-Za-z][\w.:-]*)(\s[^<>]*)?>")
SENTENCE_END = re.compile(r"""[.!?。！？…]["'”’)\]]*$""")
SENTENCE_WITHIN = re.compile(r"""[.!?]["'”’)\]]*\s+["'“‘(\[]*[^\W\da-z_]|[。！？]\S""")
DANGLING = re.compile(
    r"([,;(–—、，]|\w-|\S\s(a|an|the|and|or|of|with|in|on|at|to|by|from|for|is|are|its|his|her|their|that|which|as|into))$",
    re.IGNORECASE,
)
"""Ends of lines at which no caption ends."""
LIKE_ANOTHER = 0.4
"""Share of the words of the shorter of two texts that both have; alternatives describe the same."""
LONG_PARAGRAPH_LETTERS = 80


def form_of(text: str) -> str:
    """Return the form by which the lines of a file are one text; empty for one line, and for alternatives."""
    lines = [line.rstrip() for line in split_lines(text)]
    shown = [line for line in lines if not is_blank(line)]
    if len(shown) < 2:
        return ""
    if is_json(shown):
        return "JSON"
    if is_xml(shown):
        return "XML"
    if any(MARKDOWN.match(line) for line in shown) or any(is_rule(line) for line in shown):
        return "Markdown"
    if is_yaml(shown):
        return "YAML"
    blocks = list(paragraphs(lines))
    if any(map(is_wrapped, blocks)):
        return "wrapped lines"
    return "paragraphs" if are_paragraphs(blocks) else ""


def is_json(lines: Sequence[str]) -> bool:
    """Return whether lines are one JSON value, also a damaged one; not one value in each line."""
    if lines[0].lstrip()[0] not in "{[" or lines[-1][-1] not in "}]":
        return False
    if any(not re.search(r"\w", line) for line in lines):
        return True
    return holds_json("\n".join(lines)) and not all(map(holds_json, lines))


def holds_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


def is_xml(lines: Sequence[str]) -> bool:
    """Return whether lines are elements, one over several lines or with different names."""
    first = ELEMENT.match(lines[0])
    if lines[0].lstrip().startswith("<?xml"):
        return True
    if first is None or not lines[-1].endswith(">"):
        return False
    names = [found[1] for line in lines if (found := ELEMENT.match(line))]
    if len(set(names)) > 1 and f"</{first[1]}>" in "".join(lines):
        return True
    return f"</{first[1]}>" not in lines[0] and f"</{first[1]}>" in lines[-1]


def is_rule(line: str) -> bool:
    """Return whether a line has no word: `---`, `***`, a bracket; no caption is that."""
    return not any(letter.isalnum() or unicodedata.category(letter) == "So" for letter in line)


def is_yaml(lines: Sequence[str]) -> bool:
    """Return whether all lines that are not indented begin with names, each another one, and a colon."""
    outer = [line for line in lines if not line[0].isspace()]
    names = [found[1].lower() for line in outer if (found := FIELD.match(line))]
    return len(names) == len(outer) and len(set(names)) == len(names) and len(lines) > 1


def paragraphs(lines: Sequence[str]) -> Iterator[list[str]]:
    """Yield the lines between empty ones."""
    block: list[str] = []
    for line in (*lines, ""):
        if not is_blank(line):
            block.append(line.strip())
        elif block:
            yield block
            block = []


def is_wrapped(lines: Sequence[str]) -> bool:
    """Return whether sentences, or lists with commas, go on from each line to the next.

    A line that is filled says nothing by itself: alternatives may be of one length. So at least one line must end where
    no caption does, and all others where the first word of the next would not have fitted.
    """
    width = max(map(len, lines))
    # Alternatives in sentences begin with a capital and end with a full stop, each of them.
    is_prose = lines[0][0].isalpha() and not lines[0][0].islower() and SENTENCE_END.search(lines[-1]) is not None
    if DANGLING.search(lines[-1]):
        return False
    broken = 0
    for line, following in pairwise(lines):
        goes_on = not SENTENCE_END.search(line) and (
            DANGLING.search(line) is not None or (is_prose and not following[0].isupper())
        )
        if not goes_on and len(line) + 1 + len(following.split()[0]) <= width:
            return False
        broken += goes_on
    return broken > 0


def are_paragraphs(blocks: Sequence[Sequence[str]]) -> bool:
    """Return whether blocks between empty lines, or lines of several sentences, describe one thing after another."""
    texts = [" ".join(block) for block in blocks]
    if len(texts) == 1:
        texts = list(blocks[0])
        is_prose = sum(SENTENCE_WITHIN.search(text) is not None for text in texts) * 2 > len(texts)
    else:
        ended = sum(SENTENCE_END.search(text) is not None for text in texts) * 2 > len(texts)
        is_prose = ended and any(SENTENCE_WITHIN.search(text) or len(text) > LONG_PARAGRAPH_LETTERS for text in texts)
    return is_prose and mean(likeness(*pair) for pair in combinations(texts[:8], 2)) < LIKE_ANOTHER


def likeness(one: str, two: str) -> float:
    """Return the share of longer words of the shorter text that the other one has, too."""
    words = [set(re.findall(r"\w{4,}", text.lower())) for text in (one, two)]
    return len(words[0] & words[1]) / max(1, min(map(len, words)))
