"""HTML and SVG in which data are text: every child of :func:`el` is escaped unless it was made by :func:`el`."""

from __future__ import annotations

import unicodedata
from html import escape

VOID = ("meta", "br", "line", "polyline", "circle")


class Markup(str):
    """Markup made here."""

    __slots__ = ()


def el(tag: str, *children: str, cls: str = "", **attributes: str | float) -> Markup:
    """``<tag>`` with ``children``; plain strings are escaped, and characters that command a terminal or turn the
    reading direction are made visible. In names of attributes ``_`` stands for ``-``.

    >>> el("b", "<script>", cls="x", data_step=3)
    '<b class="x" data-step="3">&lt;script&gt;</b>'
    """
    given = {"class": cls, **{name.replace("_", "-"): value for name, value in attributes.items()}}
    written = "".join(f' {name}="{escape(str(value), quote=True)}"' for name, value in given.items() if value != "")
    if tag in VOID and not children:
        return Markup(f"<{tag}{written}/>")
    return Markup(f"<{tag}{written}>{''.join(map(_text, children))}</{tag}>")


def joined(*children: str) -> Markup:
    """``children`` one after another, plain strings escaped."""
    return Markup("".join(map(_text, children)))


def inert(text: str) -> str:
    r"""``text`` with control and formatting characters replaced.

    >>> inert("a\x1b[2J\u202eb")
    'a\ufffd[2J\ufffdb'
    """
    if text.isprintable():
        return text
    return "".join("\N{REPLACEMENT CHARACTER}" if _hidden(char) else char for char in text)


def _hidden(char: str) -> bool:
    return char not in "\n\t" and unicodedata.category(char) in {"Cc", "Cf", "Cs", "Co", "Cn"}


def _text(child: str) -> str:
    return str(child) if isinstance(child, Markup) else escape(inert(child), quote=True)
