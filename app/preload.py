"""Scripts that a page will need, named in its HTML: a browser loads all of them at once.

Without the names it learns of each group from the one before: Streamlit's elements are loaded as they are drawn, and a
chart's modules name each other.
"""

from __future__ import annotations

import re
from functools import cache
from html import escape
from pathlib import Path

from streamlit.file_util import get_static_dir

from .endpoint import FIRST, module_address, modules

ELEMENTS = ("Html", "TextInput", "Checkbox", "BidiComponent")
"""Scripts of Streamlit for the elements of every page."""
OF_CHARTS = ("Slider", "Button", "DownloadButton")
"""Those for the elements of a page with charts."""
CHARTED = frozenset({"run", "compare", "forecasts", "tokens"})
"""Pages with charts."""
OF_LISTS = ("first.js", "nodes.js", "style.js", "table.js", "keys.js")
"""Scripts of the pages without charts."""
FIRST_DATA = frozenset({"run", "runs"})
"""Pages with data for a first picture (:mod:`app.first_page`)."""
IMPORTED = re.compile(r"""(?:from|import)\s*["']\./([\w.-]+\.js)["']""")


def links(path: str, base_path: str = "", query: str = "") -> str:
    """Return HTML that begins to load what the page at a URL path needs, most urgent first: the data of its first
    picture, the script that draws it, and other scripts.

    ``base_path``: URL path of the dashboard. ``query``: of the page's address.
    """
    page = path.removeprefix(base_path).strip("/") or "runs"
    charted = page in CHARTED
    early = "" if page not in FIRST_DATA else _early(f"{base_path}{FIRST}/{page}", query, base_path)
    of_page = modules() if charted else OF_LISTS
    addresses = [module_address(name, base_path) for name in of_page]
    addresses += [f"./static/js/{name}" for name in _chunks(ELEMENTS + OF_CHARTS * charted)]
    return early + "".join(f'<link rel="modulepreload" crossorigin href="{escape(one)}">' for one in addresses)


def _early(data: str, query: str, base_path: str) -> str:
    found = [
        f'<link rel="preload" as="fetch" crossorigin data-rl-first href="{escape(f"{data}/{theme}?{query}")}" '
        f'media="(prefers-color-scheme: {theme})">'
        for theme in ("light", "dark")
    ]
    return "".join(
        [*found, f'<script type="module" async src="{escape(module_address("first.js", base_path))}"></script>']
    )


@cache
def _chunks(elements: tuple[str, ...]) -> tuple[str, ...]:
    """Return the files of Streamlit's elements and of what they import, without those that its page names by itself."""
    static = Path(get_static_dir())
    folder = static / "static" / "js"
    named = (static / "index.html").read_text(encoding="utf-8") if folder.is_dir() else ""
    found: dict[str, None] = {}
    waiting = [path.name for name in elements for path in sorted(folder.glob(f"{name}.*.js"))]
    while waiting:
        name = waiting.pop(0)
        if name in found or name in named or not (folder / name).is_file():
            continue
        found[name] = None
        waiting += IMPORTED.findall((folder / name).read_text(encoding="utf-8"))
    return tuple(found)
