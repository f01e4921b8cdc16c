"""Templates, fragments and toasts. Everything is escaped; a misspelled name is an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from rich.filesize import decimal
from starlette.requests import Request
from starlette.responses import HTMLResponse

from simpletuner import __version__
from simpletuner.errors import SimpleTunerError
from simpletuner.runs.folder import Folders
from simpletuner.settings.declared.sections import setting_fields
from simpletuner.system.numbers import count_noun, format_count, format_gib

HERE = Path(__file__).parent
FLAG = re.compile(r"(?<![\w-])--([a-z]\w+)", re.ASCII)

NAVIGATION = (
    ("Configuration", "/configurations"),
    ("Datasets", "/datasets"),
    ("Export", "/export"),
    ("Runs", "/runs"),
    ("Preferences", "/preferences"),
)


@cache
def environment() -> Environment:
    loader = FileSystemLoader(HERE / "templates")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.globals |= {"navigation": NAVIGATION, "version": __version__}
    made.filters |= {
        "count": count_noun,
        "code": as_code,
        "path": as_path,
        "time": as_time,
        "bytes": decimal,
        "parameters": format_count,
        "gib": format_gib,
    }
    return made


def as_code(text: str) -> Markup:
    """Show text between backticks, as in messages, as code; elsewhere a setting has its name, and no flag."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one has no partner
        return escape(text)
    # A command needs its flags.
    named = [part if n % 2 or "simpletuner " in part else FLAG.sub(as_name, part) for n, part in enumerate(parts)]
    parts = [escape(part) for part in named]
    return Markup().join(Markup("<code>{}</code>").format(part) if n % 2 else part for n, part in enumerate(parts))


def as_name(flag: re.Match[str]) -> str:
    return flag[1] if flag[1] in setting_fields() else flag[0]


def as_path(text: str, separator: str = "/") -> Markup:
    # A phone would break it within a name otherwise.
    return Markup("{}<wbr>").format(separator).join(text.split(separator))


def as_time(seconds: float) -> Markup:
    """Show a time in seconds since 1970; a script adds how long ago that is."""
    time = datetime.fromtimestamp(seconds, UTC)
    return Markup('<time datetime="{}">{:%Y-%m-%d %H:%M:%S} UTC</time>').format(time.isoformat(), time)


def render(template: str, /, **values: Any) -> str:
    """Return the text of a template; names end in `.html.jinja`, which is left out here."""
    text = environment().get_template(f"{template}.html.jinja").render(values)
    # File names and captions that are no UTF-8 have lone surrogates, which no answer can hold.
    return text.encode("utf-8", "replace").decode("utf-8")


def respond(
    request: Request, template: str, /, code: int = 200, headers: Mapping[str, str] | None = None, **values: Any
) -> HTMLResponse:
    """Return a whole page, or the fragment that a script of the page asked for."""
    values |= {"csrf": request.app.state.csrf, "path": request.url.path}
    return HTMLResponse(render(template, **values), code, headers)


def is_fragment(request: Request) -> bool:
    """True if htmx will put the response into a page that is loaded already."""
    # htmx asks for a whole page when it has lost one of its history.
    return request.headers.get("hx-request") == "true" and request.headers.get("hx-history-restore-request") != "true"


def toast(text: str, hint: str = "", kind: str = "done") -> str:
    """Return a message that htmx adds to those on the page; `kind` is done, warning or error."""
    return render("toast", text=text, hint=hint, kind=kind)


def respond_error(request: Request, error: SimpleTunerError, code: int = 400) -> HTMLResponse:
    """Return an error: as a toast to a script, else as a page."""
    if is_fragment(request):
        # The rest of the page stays as it is.
        return HTMLResponse(toast(error.message, error.hint, "error"), code, {"HX-Reswap": "none"})
    return respond(request, "error", code, title="That did not work", message=error.message, hint=error.hint)


def folders_of(request: Request) -> Folders:
    return request.app.state.folders


def editor_address(file: str) -> str:
    return f"/configurations/edit?{urlencode({'file': file})}"


def fields_of(request: Request) -> set[str]:
    return {*getattr(request.state, "form", {}), *request.query_params}


def fields(request: Request, name: str) -> list[str]:
    """Return all values of a field of a form."""
    form: dict[str, list[str]] = getattr(request.state, "form", {})
    return form.get(name, [])


def field(request: Request, name: str, default: str = "") -> str:
    form: dict[str, list[str]] = getattr(request.state, "form", {})
    return form[name][-1] if name in form else request.query_params.get(name, default)
