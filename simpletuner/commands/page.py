"""`simpletuner page`: settings, exports, caches and runs in a browser."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from simpletuner.commands.help import path_option
from simpletuner.errors import EnvironmentNotReady, SettingsError
from simpletuner.extras import install_command

PACKAGES = ("starlette", "uvicorn", "jinja2")
INSTALL = install_command("page")


def page(
    config: Annotated[Path | None, path_option("--config", "Config file to open first.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Port; empty: 8001, or a free one.")
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; others than loopback can be reached from outside.")
    ] = "127.0.0.1",
    folder: Annotated[
        list[Path] | None,
        path_option("--folder", "Folder whose files may be read and written; empty: the current one."),
    ] = None,
    browser: Annotated[bool, typer.Option("--browser/--no_browser", help="Open a browser where there is one.")] = True,
) -> None:
    """Serve a page for all settings, exports, caches and runs. Prints its address, with a token."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise EnvironmentNotReady(f"the page needs {' and '.join(missing)}", INSTALL)
    from simpletuner.page.server import serve

    if config is not None and not config.is_file():
        raise SettingsError(f"there is no file {config}", "check the path; the page can make a new one")
    folders = [*(folder or [Path.cwd()]), *([config.parent] if config else [])]
    serve(folders, config and config.resolve(), host, port, browser)
