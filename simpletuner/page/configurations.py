"""Configurations: list, open, copy and make config files."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from simpletuner.page.rendering import respond


def show_configurations(request: Request) -> Response:
    return respond(request, "configurations", title="Configurations")


ROUTES = [Route("/configurations", show_configurations)]
