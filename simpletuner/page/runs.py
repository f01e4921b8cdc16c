"""Runs: start, stop and watch them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from simpletuner.page.rendering import respond


def show_runs(request: Request) -> Response:
    return respond(request, "runs", title="Runs")


ROUTES = [Route("/runs", show_runs)]
