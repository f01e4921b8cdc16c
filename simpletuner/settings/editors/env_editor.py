"""Lines as a shell reads them: `NAME=value`, spelled like the others of the file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from simpletuner.settings.editors.edit import Edit, insert_line, replace_span
from simpletuner.settings.files.config_files import PREFIX
from simpletuner.settings.files.env_format import assignments
from simpletuner.settings.resolving.loading import canonical_name


def edit_env(text: str, edit: Edit) -> Iterator[str]:
    """Replace a value, remove a line, or add one at the end, spelled like the last one."""
    found = [pair for _, pair in assignments(text)]
    ours = [pair for pair in found if canonical_name(pair["key"].removeprefix(PREFIX)) == edit.name]
    if edit.removes:
        # From the end, so that the places of earlier ones stay right.
        for pair in reversed(ours):
            text = replace_span(text, *pair.span())
        yield text
        return
    value = quoted(edit.value)
    if edit.is_there:
        for pair in ours:
            yield replace_span(text, *pair.span("value"), value)
        return
    key = found[-1]["key"] if found else PREFIX
    name = (PREFIX if key.startswith(PREFIX) else "") + (edit.name if key.islower() else edit.name.upper())
    export = "export " if found and re.match(r"[ \t]*export[ \t]", found[-1][0]) else ""
    yield insert_line(text, len(text), f"{export}{name}={value}")


def quoted(value: str) -> str:
    """Double quotes where nothing in them needs another meaning, as most people write them."""
    return f'"{value}"' if re.fullmatch(r"[\w,. /~+-]*", value) else shlex.quote(value)
