"""The editor of one config file: its form in several views, checked as it is typed, saved in place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from simpletuner.page.editing.documents import Document
from simpletuner.page.editing.fields import ConfigCheck, FieldGroup, examine, make_field, make_note
from simpletuner.page.editing.hardware import accelerate_groups
from simpletuner.page.rendering import field, fields_of, folders_of, render, respond, toast
from simpletuner.parallel.devices import DEVICES
from simpletuner.settings.declared.sections import SECTIONS, setting_fields
from simpletuner.settings.declared.table import GROUPS
from simpletuner.settings.editors.editing import write
from simpletuner.system.numbers import count_noun

FIRST, ALL = "essential", "all"
"""The default view, and the one of all settings."""


RARE = ("global_batch_size", "fsdp_reshard_after_forward")
"""Settings that the short form leaves out where nothing sets them."""


def essential_groups(document: Document, examined: ConfigCheck) -> Iterator[FieldGroup]:
    """Yield the groups of settings that `config init` writes."""
    given = {*document.values, *document.typed, *examined.mistakes}
    for number, (title, names) in enumerate(GROUPS.items()):
        shown = [name for name in names if name in given or name not in RARE]
        yield FieldGroup(f"essential-{number}", title, [make_field(name, document, examined) for name in shown])


def set_groups(document: Document, examined: ConfigCheck) -> Iterator[FieldGroup]:
    """Yield the sections with all settings that a source sets or that are wrong."""
    shown = {*document.values, *document.typed, *examined.origins, *examined.mistakes}
    for group in groups_of(document, examined, lambda name: name in shown):
        if group.fields:
            yield group


def all_groups(document: Document, examined: ConfigCheck) -> Iterator[FieldGroup]:
    """Yield all settings in their sections."""
    return groups_of(document, examined, lambda name: True)


def groups_of(document: Document, examined: ConfigCheck, is_shown: Callable[[str], bool]) -> Iterator[FieldGroup]:
    for name, section in SECTIONS.items():
        fields = [make_field(each, document, examined) for each in section.model_fields if is_shown(each)]
        yield FieldGroup(name, section.__doc__ or name, fields)


VIEWS: Mapping[str, tuple[str, Callable[[Document, ConfigCheck], Iterator[FieldGroup]]]] = {
    FIRST: ("Essentials", essential_groups),
    "set": ("Only what is set", set_groups),
    ALL: ("All settings", all_groups),
    "accelerate": ("Hardware → Accelerate", accelerate_groups),
}
"""Titles of the views, and what makes their groups."""


def view_named(name: str) -> str:
    return name if name in VIEWS else FIRST


def show(request: Request) -> Response:
    """The editor. What was typed may come with the address of a form that was sent without scripts."""
    document = read_document(request)
    values = editor_values(request, document, examine(document, folders_of(request)))
    return respond(request, "editor", title=document.path.name, **values)


def read_document(request: Request) -> Document:
    typed = {name: field(request, name) for name in fields_of(request) if name in setting_fields()}
    return Document.read(folders_of(request), field(request, "file"), typed)


def editor_values(request: Request, document: Document, examined: ConfigCheck) -> dict[str, Any]:
    view = view_named(field(request, "view"))
    groups: list[FieldGroup] = list(VIEWS[view][1](document, examined))
    return {
        "document": document,
        "examined": examined,
        "groups": groups,
        "names": {each.name for group in groups for each in group.fields},
        "view": view,
        "gpus": {name: device.memory_gib for name, device in DEVICES.items()},
        "views": {name: title for name, (title, _) in VIEWS.items()},
        "query": field(request, "q"),
    }


def check(request: Request) -> Response:
    """Check the form while it is typed: notes of all fields, the summary, and changes of the file."""
    document = read_document(request)
    examined = examine(document, folders_of(request))
    groups = VIEWS[view_named(field(request, "view"))][1](document, examined)
    # What was typed in another view has a field of its own in this one.
    typed = {name: make_note(name, examined) for name in document.typed}
    notes = typed | {each.name: each.note for group in groups for each in group.fields}
    parts = [render("notes", notes=notes.values(), names=notes, examined=examined, document=document)]
    if field(request, "seen") == document.checksum:
        # The same conflict is shown already: only what is typed is new, and its buttons stay where they are.
        body = render("conflict_body", document=document, **conflict_of(request, document))
        parts.append(f'<div id="conflict-body" hx-swap-oob="true">{body}</div>')
    elif field(request, "checksum") != document.checksum:
        parts.append(render("conflict", document=document, **conflict_of(request, document)))
    # Only parts that are swapped by their ids: the field that is being typed into keeps its focus.
    return HTMLResponse("".join(parts), headers={"HX-Reswap": "none"})


def show_flavours(request: Request) -> Response:
    """Return the flavours of the family that was chosen, and have what is chosen then be checked."""
    document = read_document(request)
    flavour = make_field("model_flavour", document, examine(document, folders_of(request)))
    return HTMLResponse(render("options", field=flavour), headers={"HX-Trigger-After-Settle": "check"})


def save(request: Request) -> Response:
    """Write what was typed into the file; not over changes that somebody else has made meanwhile."""
    document = read_document(request)
    # Two tabs that save at the same time: the second one must see what the first has written.
    with request.app.state.saving:
        if field(request, "checksum") != document.checksum:
            conflict = render("conflict", document=document, **conflict_of(request, document))
            warning = toast(f"{document.path} has changed on disk: nothing is saved", "choose above", "warning")
            attend = json.dumps({"attend": {"id": "conflict"}})
            return HTMLResponse(conflict + warning, headers={"HX-Reswap": "none", "HX-Trigger-After-Settle": attend})
        refused = refuse_invalid(document, examine(document, folders_of(request)))
        if refused:
            return HTMLResponse(toast(*refused, "error"), headers={"HX-Reswap": "none"})
        new = document.changed_text()
        if new != document.text:
            write(folders_of(request).resolve(field(request, "file")), new)
    saved = replace(document, text=new, typed={})
    examined = examine(saved, folders_of(request))
    editor = render("editor_form", **editor_values(request, saved, examined))
    return HTMLResponse(editor + saved_toast(document, examined))


def refuse_invalid(document: Document, examined: ConfigCheck) -> tuple[str, str] | None:
    """Return a message and hint if something typed is no value of its setting, so that nothing is saved."""
    invalid = [name for name in document.typed if name in examined.invalid]
    if not invalid:
        return None
    return f"nothing is saved: correct {', '.join(invalid)} first", "; ".join(examined.mistakes.get(invalid[0], ()))


def saved_toast(document: Document, examined: ConfigCheck) -> str:
    said = f"{document.path} is saved: {count_noun(len(document.typed), 'setting')} changed"
    if not examined.count:
        return toast(said)
    return toast(said, f"{count_noun(examined.count, 'mistake')} in it: a run would not start", "warning")


def conflict_of(request: Request, document: Document) -> dict[str, object]:
    """Both versions: the file as it is now, and with what was typed on top of it."""
    on_disk = {name: str(document.values.get(name, "not set")) for name in document.typed}
    view = view_named(field(request, "view"))
    return {"on_disk": on_disk, "mine": document.typed, "merged": document.changed_text(), "view": view}


ROUTES = [
    Route("/configurations/edit", show),
    Route("/configurations/edit/flavours", show_flavours),
    Route("/configurations/check", check, methods=["POST"]),
    Route("/configurations/save", save, methods=["POST"]),
]
