"""The site is the same text as the repository: links to files that lie beside ``docs/`` become their paths."""

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Replace links that leave ``docs/`` by their words and the path that they name."""
    home = (DOCS / page.file.src_uri).parent

    def replaced(link: re.Match[str]) -> str:
        words, target = link[1], link[2]
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        path = (home / target).resolve()
        if path.is_relative_to(DOCS) or not path.exists():
            return link[0]
        there = path.relative_to(DOCS.parent).as_posix()
        return f"`{there}`" if there in words or words in there else f"{words} (`{there}`)"

    return _LINK.sub(replaced, markdown)
