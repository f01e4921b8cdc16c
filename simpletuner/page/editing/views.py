"""Views of the form: which settings each shows, in which groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from simpletuner.page.editing.documents import Document
from simpletuner.page.editing.examination import Examined
from simpletuner.page.editing.fields import FieldGroup, make_field
from simpletuner.page.editing.hardware import accelerate_groups
from simpletuner.settings.declared.sections import SECTIONS
from simpletuner.settings.showing.scaffold import GROUPS

FIRST, ALL = "essential", "all"
"""The view that opens where a link names none, and the one that has every setting."""


RARE = ("global_batch_size", "fsdp_reshard_after_forward")
"""Settings that the short form leaves out where nothing sets them."""


def essential_groups(document: Document, examined: Examined) -> Iterator[FieldGroup]:
    """Yield what `config init` writes: the settings that a first run is made of."""
    given = {*document.values, *document.typed, *examined.mistakes}
    for number, (title, names) in enumerate(GROUPS.items()):
        shown = [name for name in names if name in given or name not in RARE]
        yield FieldGroup(f"essential-{number}", title, [make_field(name, document, examined) for name in shown])


def set_groups(document: Document, examined: Examined) -> Iterator[FieldGroup]:
    """Yield the settings that the file or another source sets, and those that are wrong, in their sections."""
    shown = {*document.values, *document.typed, *examined.origins, *examined.mistakes}
    for group in groups_of(document, examined, lambda name: name in shown):
        if group.fields:
            yield group


def all_groups(document: Document, examined: Examined) -> Iterator[FieldGroup]:
    """Yield all settings in their sections."""
    return groups_of(document, examined, lambda name: True)


def groups_of(document: Document, examined: Examined, is_shown: Callable[[str], bool]) -> Iterator[FieldGroup]:
    for name, section in SECTIONS.items():
        fields = [make_field(each, document, examined) for each in section.model_fields if is_shown(each)]
        yield FieldGroup(name, section.__doc__ or name, fields)


VIEWS: Mapping[str, tuple[str, Callable[[Document, Examined], Iterator[FieldGroup]]]] = {
    FIRST: ("Essentials", essential_groups),
    "set": ("Only what is set", set_groups),
    ALL: ("All settings", all_groups),
    "accelerate": ("Hardware → Accelerate", accelerate_groups),
}
"""Titles of the views, and what makes their groups."""


def view_named(name: str) -> str:
    return name if name in VIEWS else FIRST
