"""Streamlit's scripts from memory, compressed once: a page loads a hundred of them, and Streamlit reads each file anew.

Their names have a hash of their content, so a browser keeps them.
"""

from __future__ import annotations

import gzip
import re
from functools import lru_cache
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope
from streamlit.file_util import get_static_dir

FOLDER = "/static/js/"
NAME = re.compile(r"[\w-]+(?:\.[\w-]+)*\.[\w-]{8}\.js")
KEPT = "public, immutable, max-age=31536000"
LEVEL, LEAST_BYTES = 6, 1000


def script(scope: Scope, base_path: str = "") -> Response | None:
    """Return the response to a request for one of Streamlit's scripts, or None for any other request.

    ``scope``: of the HTTP request. ``base_path``: URL path of the dashboard.
    """
    prefix = base_path + FOLDER
    name = scope["path"].removeprefix(prefix)
    if scope["method"] != "GET" or not scope["path"].startswith(prefix) or not NAME.fullmatch(name):
        return None
    held = _held(name)
    if held is None:
        return None
    whole, packed = held
    headers = {"cache-control": KEPT, "vary": "accept-encoding", "x-content-type-options": "nosniff"}
    if packed and "gzip" in Headers(scope=scope).get("accept-encoding", ""):
        return Response(packed, headers={**headers, "content-encoding": "gzip"}, media_type="text/javascript")
    return Response(whole, headers=headers, media_type="text/javascript")


@lru_cache(maxsize=512)
def _held(name: str) -> tuple[bytes, bytes] | None:
    """Return a script, and the same compressed; None if there is no such file."""
    path = Path(get_static_dir(), "static", "js", name)
    if not path.is_file():
        return None
    whole = path.read_bytes()
    return whole, gzip.compress(whole, LEVEL, mtime=0) if len(whole) >= LEAST_BYTES else b""


def warm() -> None:
    """Read and compress the scripts that Streamlit's page names, before the first page asks for them."""
    page = Path(get_static_dir(), "index.html").read_text(encoding="utf-8")
    for name in dict.fromkeys(re.findall(rf'"\.{FOLDER}([^"]+)"', page)):
        _held(name)
