"""HTML in which data are text: every child of :func:`el` is escaped unless it was made by :func:`el`."""

from __future__ import annotations

from html import escape


class Markup(str):
    """HTML made here."""

    __slots__ = ()


def el(tag: str, *children: str, cls: str = "", style: str = "", title: str = "") -> Markup:
    """``<tag>`` with ``children``; plain strings are escaped.

    >>> el("b", "<script>", cls="x")
    '<b class="x">&lt;script&gt;</b>'
    """
    attributes = "".join(
        f' {name}="{escape(value, quote=True)}"'
        for name, value in (("class", cls), ("style", style), ("title", title))
        if value
    )
    return Markup(f"<{tag}{attributes}>{''.join(map(_text, children))}</{tag}>")


def joined(*children: str) -> Markup:
    """``children`` one after another, plain strings escaped."""
    return Markup("".join(map(_text, children)))


def _text(child: str) -> str:
    return str(child) if isinstance(child, Markup) else escape(child, quote=True)
