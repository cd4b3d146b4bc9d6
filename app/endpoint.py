"""Routes of the data endpoint, which the server has before anything of a store is loaded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import import_module

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

ROUTES = {
    "/api/openapi.json": "described",
    "/api/runs": "listed",
    "/api/runs/{run_id}/series": "series",
    "/api/runs/{run_id}/state": "state",
    "/api/events": "events",
}
"""Path -> the function of :mod:`app.api` that answers."""


def routes(base_path: str = "") -> list[Route]:
    """Every route of the endpoint, below ``base_path``."""
    return [Route(base_path + path, _answering(name), methods=["GET"]) for path, name in ROUTES.items()]


def _answering(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        api = import_module(".api", __package__)  # what it remembers belongs to a server that runs
        answered: Response = await getattr(api, name)(request)
        return answered

    return answer
