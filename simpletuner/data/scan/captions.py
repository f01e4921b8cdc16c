"""Read the captions of an image. Files that cannot be read for certain are refused: a guess would be trained
on.

A file of several lines holds alternatives, one a line, or one text. Language models write paragraphs,
Markdown, JSON or YAML, and editors wrap lines; split at its lines, such a text would be trained as captions
like `{` and `---`. One file may be ambiguous, so all files of a dataset decide together.

Rules and shuffling then make the variants of a caption.
"""

# pyright: basic, reportAttributeAccessIssue=false

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise
from pathlib import PurePosixPath
from statistics import mean

import numpy as np

from simpletuner.data.config.caption_rules import CaptionShuffle, compile_rule, is_blank, split_lines
from simpletuner.data.config.dataset_types import ImageDataset
from simpletuner.data.images.frame_folders import is_frame_folder
from simpletuner.data.sampler.epoch_order import hash_key, permuted
from simpletuner.data.storage.storage import CAPTION_SUFFIX, Storage, UnreadableFileError

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
OBJECT = re.compile(r'\{\s*("|$)')
# Share of the words of the shorter of two texts that both have; alternatives describe the same.
LIKE_ANOTHER = 0.4
LONG_PARAGRAPH_LETTERS = 80
JSON = "JSON"


def form_of(text: str) -> str:
    """Kind of text that a file's lines form; empty for one line, and for alternatives."""
    lines = [line.rstrip() for line in split_lines(text)]
    shown = [line for line in lines if not is_blank(line)]
    if len(shown) < 2:
        return ""
    if is_json(shown):
        return JSON
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
    """True if all lines together are one JSON value, even a damaged one, rather than one value per line."""
    if lines[0].lstrip()[0] not in "{[" or lines[-1][-1] not in "}]":
        return False
    if any(not re.search(r"\w", line) for line in lines):
        return True
    is_object = OBJECT.match(lines[0].lstrip()) is not None  # a damaged one, too
    return (is_object or holds_json("\n".join(lines))) and not all(map(holds_json, lines))


def holds_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


def is_xml(lines: Sequence[str]) -> bool:
    """True for elements over several lines, or with different names."""
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
    # `---`, `***` or a bracket is never a caption.
    return not any(letter.isalnum() or unicodedata.category(letter) == "So" for letter in line)


def is_yaml(lines: Sequence[str]) -> bool:
    """True if each line that is not indented begins with another name and a colon."""
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
    """True if sentences, or lists with commas, continue from line to line.

    A line that is filled says nothing by itself: alternatives may be of one length. So at least one line must
    end where no caption does, and all others where the first word of the next would not have fitted.
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
    """True if blocks between blank lines, or lines of several sentences, are parts of one description."""
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


SEPARATORS = {"comma": (",", ", "), "space": (None, " "), "period": (".", ". ")}
"""Argument of `str.split`, and the string that joins tags."""


@cache
def compile_rules(rules: tuple[str, ...]) -> tuple[Callable[[str], str], ...]:
    return tuple(map(compile_rule, rules))


def caption_variants(caption: str, rules: tuple[str, ...], shuffle: CaptionShuffle | None) -> list[str]:
    """Captions made from one by its dataset's rules; several are shown equally often."""
    for rule in compile_rules(rules):
        caption = rule(caption)
    if rules:  # what is removed leaves its spaces on both sides
        caption = re.sub(r"[ \t]{2,}", " ", caption).strip()
    if not (shuffle and shuffle.enable) or holds_json(caption):  # which has commas, and no tags
        return [caption]
    return shuffle_parts(caption, shuffle)


def shuffle_parts(caption: str, shuffle: CaptionShuffle) -> list[str]:
    """Return a caption's parts in other orders, which depend on the seed and the caption alone."""
    separator, glue = SEPARATORS[shuffle.split_on]
    parts = [part.strip() for part in caption.split(separator) if part.strip()]
    fixed, moved = parts[: shuffle.position_start], parts[shuffle.position_start :]
    if len(moved) < 2:
        return [caption]
    end = "." if shuffle.split_on == "period" and caption.endswith(".") else ""
    numbers = np.arange(shuffle.count * len(moved), dtype=np.uint64)
    orders = permuted(numbers, len(moved), hash_key(shuffle.seed, caption)).reshape(shuffle.count, -1)
    variants = [glue.join([*fixed, *(moved[place] for place in order)]) + end for order in orders.tolist()]
    return list(dict.fromkeys([caption] * shuffle.include_original + variants))


MAX_BYTES = 1 << 20
EXAMPLE_BYTES = 40

BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark is its beginning
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def read_caption_file(storage: Storage, name: str, encoding: str = "") -> str:
    """Return the text of an image's caption file; empty where there is no such file.

    Raises UnreadableFileError for a caption file that is not text in UTF-8 or in `encoding`.
    """
    try:
        return decode_text(storage.read(caption_file(name), MAX_BYTES), encoding)
    except FileNotFoundError:
        return ""


def lines_of(text: str, form: str = "") -> list[str]:
    """Lines of a caption file without blanks around them; JSON is one caption, kept as it is written."""
    lines = split_lines(text)
    return ["\n".join(lines).strip()] if form == JSON else [line.strip() for line in lines if not is_blank(line)]


def captions_of(dataset: ImageDataset, name: str, lines: Sequence[str]) -> tuple[str, ...]:
    """Captions of an image by the dataset's strategy; `lines` are from its text file."""
    phrase = dataset.instance_prompt or ""
    if dataset.caption_strategy == "instanceprompt":
        return (phrase,)
    if dataset.caption_strategy == "filename":
        lines = [line] if (line := PurePosixPath(caption_file(name)).stem.replace("_", " ").strip()) else []
    elif dataset.caption_lines == "one":
        lines = ["\n".join(lines)] if lines else []
    elif dataset.caption_lines == "first":
        lines = lines[:1]
    lines = [
        text for line in lines for text in caption_variants(line, dataset.caption_filter_list, dataset.caption_shuffle)
    ]
    prefix = f"{phrase} " if dataset.prepend_instance_prompt and phrase else ""
    return tuple(prefix + line for line in lines)


def caption_file(name: str) -> str:
    if is_frame_folder(name):
        return name[:-1] + CAPTION_SUFFIX
    return PurePosixPath(name).with_suffix(CAPTION_SUFFIX).as_posix()


def decode_text(content: bytes, encoding: str = "") -> str:
    """Decode UTF-8, or UTF-16 or UTF-32 with a byte order mark; what is neither, in `encoding`.

    Raises UnreadableFileError. Without `encoding` no other one is tried: Latin-1 decodes any bytes, so a
    wrong guess would never be noticed. Files of a folder where only some are in it stay UTF-8.
    """
    marked = next((name for mark, name in BYTE_ORDER_MARKS if content.startswith(mark)), "")
    if not encoding or marked or (is_utf8(content) and not content.isascii()):
        return decode_strictly(content, marked or "utf-8")
    return decode_strictly(content, encoding)  # ASCII as well: ISO-2022-JP and UTF-7 consist of it


def is_utf8(content: bytes) -> bool:
    try:
        return "\0" not in content.decode()
    except UnicodeDecodeError:
        return False


def decode_strictly(content: bytes, encoding: str) -> str:
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        name = encoding.upper().removesuffix("-SIG")
        raise UnreadableFileError(
            f"is not {name}: byte {error.start} is 0x{content[error.start]:02x}{example(content)}"
        ) from None
    if "\0" in text:
        raise UnreadableFileError(f"has a zero at byte {content.index(0)}: is it UTF-16 without a byte order mark?")
    return text


def example(content: bytes) -> str:
    """Phrase with a file's start read as windows-1252, for people to judge; empty if unprintable."""
    text = " ".join(content[:EXAMPLE_BYTES].decode("cp1252", "replace").split())
    return f' (as windows-1252: "{text}")' if text.isprintable() and "\ufffd" not in text else ""


# pyarrow comes without types.
