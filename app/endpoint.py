"""Routes of the data endpoint and of the pages' scripts: the server has them before anything of a store is loaded.

Scripts are plain ES modules, served as they are beside this file, under an address that names their content: a browser
asks for each once. The drawing library is no module; it becomes one here.
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
    "/api/runs/{run_id}/series": "series",
    "/api/runs/{run_id}/axes": "axes",
    "/api/runs/{run_id}/state": "state",
    "/api/events": "events",
}
"""Path -> the function of :mod:`app.api` that answers."""


def routes(base_path: str = "") -> list[Route]:
    """Every route of the endpoint, below ``base_path``."""
    found = [Route(base_path + path, _answering(name), methods=["GET"]) for path, name in ROUTES.items()]
    return [*found, Route(f"{base_path}/web/{{version}}/{{name}}", script, methods=["GET"])]


def _answering(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        api = import_module(".api", __package__)  # what it remembers belongs to a server that runs
        answered: Response = await getattr(api, name)(request)
        return answered

    return answer


MODULES = ("board.js", "curves.js", "live.js", "look.js", "page.js")
A_YEAR_S = 31_536_000
HERE = Path(__file__).resolve().parent


def module_address(name: str, base_path: str = "") -> str:
    """Address of a script for a browser; another one once its content is."""
    scripts = modules()
    version = sha256("\0".join(scripts[one] for one in sorted(scripts)).encode()).hexdigest()[:16]
    return f"{base_path}/web/{version}/{name}"


@cache
def modules() -> dict[str, str]:
    """Name -> text of every script."""
    found = {name: (HERE / name).read_text(encoding="utf-8") for name in MODULES}
    library, sheet, own = (
        (HERE / name).read_text(encoding="utf-8")
        for name in ("vendor/uPlot.iife.min.js", "vendor/uPlot.min.css", "board.css")
    )
    return {
        **found,
        "uplot.js": f"{library}\nexport default uPlot;\n",
        "style.js": f"export default {json.dumps(sheet + own)};\n",
    }


async def script(request: Request) -> Response:
    """A script of the pages; of another version than this one, the present one, which nobody keeps."""
    name = request.path_params["name"]
    text = modules().get(name)
    if text is None:
        return Response("No such script.\n", 404, media_type="text/plain")
    present = request.url.path.endswith(module_address(name))
    kept = f"private, max-age={A_YEAR_S}, immutable" if present else "no-store"
    return Response(text, headers={"cache-control": kept}, media_type="text/javascript")
