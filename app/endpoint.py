"""Routes of the data endpoint and of the pages' scripts; importing this module loads no code of a store.

Scripts are plain ES modules in this directory, served unchanged at an address with a hash of their content, so that a
browser fetches each once. The drawing library is not a module and is wrapped as one here.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

ROUTES = {
    "/api/openapi.json": "described",
    "/api/runs": "listed",
    "/api/list": "rows_listed",
    "/api/runs/{run_id}/series": "series",
    "/api/runs/{run_id}/axes": "axes",
    "/api/runs/{run_id}/state": "state",
    "/api/events": "events",
}
"""Name of the function in :mod:`app.api` that handles each path."""


FIRST = "/first"
"""Path below which a page gets what it shows first (:mod:`app.first_page`): the page's own data, not described."""


def routes(base_path: str = "") -> list[Route]:
    """Return all routes of the data endpoint and the scripts, below ``base_path``."""
    found = [Route(base_path + path, _answering(name), methods=["GET"]) for path, name in ROUTES.items()]
    found.append(Route(f"{base_path}{FIRST}/{{page}}/{{theme}}", _answering("first"), methods=["GET"]))
    return [*found, Route(f"{base_path}/web/{{version}}/{{name}}", script, methods=["GET"])]


def _answering(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        api = import_module(".api", __package__)  # what it remembers belongs to a server that runs
        answered: Response = await getattr(api, name)(request)
        return answered

    return answer


MODULES = (
    "arrange.js",
    "board.js",
    "chart.js",
    "controls.js",
    "curves.js",
    "first.js",
    "keys.js",
    "lane.js",
    "live.js",
    "look.js",
    "means.js",
    "menu.js",
    "nodes.js",
    "numbers.js",
    "overlay.js",
    "page.js",
    "rulers.js",
    "save.js",
    "study.js",
    "table.js",
    "tip.js",
    "views.js",
)
A_YEAR_S = 31_536_000
HERE = Path(__file__).resolve().parent


def module_address(name: str, base_path: str = "") -> str:
    """Return the URL path of the script ``name``; it changes if the content of any script changes.

    ``base_path``: URL path of the dashboard.
    """
    scripts = modules()
    version = sha256("\0".join(scripts[one] for one in sorted(scripts)).encode()).hexdigest()[:16]
    return f"{base_path}/web/{version}/{name}"


@cache
def modules() -> dict[str, str]:
    """Return the text of every script of the pages by file name."""
    found = {name: (HERE / name).read_text(encoding="utf-8") for name in MODULES}
    library, sheet, own, *others = (
        (HERE / name).read_text(encoding="utf-8")
        for name in ("vendor/uPlot.iife.min.js", "vendor/uPlot.min.css", "board.css", "table.css", "first.css")
    )
    of_table, of_first = map(json.dumps, others)
    return {
        **found,
        "uplot.js": f"{library}\nexport default uPlot;\n",
        "style.js": f"export default {json.dumps(sheet + own)};\n"
        f"export const TABLE = {of_table}, FIRST = {of_first};\n",
    }


async def script(request: Request) -> Response:
    """Answer a request with a script of the pages.

    A request for another version gets the current script, marked as not to be cached.
    """
    name = request.path_params["name"]
    text = modules().get(name)
    if text is None:
        return Response("No such script.\n", 404, media_type="text/plain")
    present = request.url.path.endswith(module_address(name))
    kept = f"private, max-age={A_YEAR_S}, immutable" if present else "no-store"
    return Response(text, headers={"cache-control": kept}, media_type="text/javascript")
