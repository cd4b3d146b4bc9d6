"""The table component of every page: cells are data, drawn as text nodes by ``table.js`` (never as HTML)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import streamlit as st

from rlwatch import columns as columns_of

from . import format as fmt
from .health import LOOKS, SEVERITY_WORD, Word
from .page_script import page_script

Cell = dict[str, Any]
HERE = Path(__file__).resolve().parent
BLOCK = 60
"""Rows of a long table that are sent, and fetched, together."""
NAME_LIMIT = 80
"""Characters of a name shown in a table; the whole name is in the tooltip."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a table.

    ``style`` is a class of ``table.css``: ``right``, ``tight``, ``long``, ``wide`` (dropped when narrow), ``roomy``
    (dropped when not wide), ``lead`` (the head of a card, on a phone). ``sort``: message sent by a click on its
    header (``""``: none); ``sorted``: ``ascending`` or ``descending``.
    """

    label: str
    style: str = ""
    sort: str = ""
    sorted: str = ""


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table. ``opens``: message sent by a click, on most pages a run's id (``""``: none); ``chosen``: shown
    now.

    ``picked``: its box is ticked; None: it has no box. ``unfolded``: True if the members of a group are shown;
    ``member``: it belongs to the group above.
    """

    cells: Sequence[Cell]
    opens: str = ""
    quiet: bool = False
    chosen: bool = False
    picked: bool | None = None
    unfolded: bool | None = None
    member: bool = False


def columns(of: Mapping[str, columns_of.Column], **styles: str) -> tuple[TableColumn, ...]:
    """Return the table columns for columns of :mod:`rlwatch.columns`, each with a style; numbers are aligned to the
    right.
    """
    return tuple(
        TableColumn(columns_of.title_of(of, name), f"right {style}".strip() if of[name].right else style)
        for name, style in styles.items()
    )


def text(value: str, sub: str = "", *, quiet: bool = False, title: str = "") -> Cell:
    """Return a cell of plain text, with an optional subtitle ``sub`` and tooltip ``title``.

    ``quiet``: drawn in a fainter colour.
    """
    return {"kind": "text", "text": value, "sub": sub, "quiet": quiet, "title": title}


def word(value: Word, label: str = "") -> Cell:
    """Return a cell with the word, shape and colour of a run's state; ``label`` replaces the word."""
    look = LOOKS[value]
    return {"kind": "word", "shape": look.shape, "colour": look.colour, "text": label or value.value}


def mark(shape: str, colour: str, label: str) -> Cell:
    """Return a cell with a coloured shape before a label."""
    return {"kind": "word", "shape": shape, "colour": colour, "text": label}


def severity(value: Any) -> Cell:
    """Return a cell with a severity, in the shape and colour of the matching state."""
    return word(SEVERITY_WORD[value], str(value))


def run_link(run_id: str, project: str, name: str, tags: Sequence[str] = (), notes: str = "") -> Cell:
    """Return a cell with a link to the run's page, its tags and a mark for notes; a plain click stays
    inside the app.
    """
    shown = name or run_id
    return {
        "kind": "link",
        "text": fmt.shorten(shown, NAME_LIMIT),
        "sub": fmt.shorten(project, 30),
        "title": shown if len(shown) > NAME_LIMIT else "",
        "href": "run?" + urlencode({"run": run_id}),
        "id": run_id,
        "tags": [fmt.shorten(tag, 30) for tag in tags],
        "notes": fmt.shorten(notes, 300),
    }


def link(label: str, href: str, asks: str, lead: str = "", *, acts: bool = False) -> Cell:
    """Return a cell with a link to the page ``href``; a plain click sends the message ``asks`` and stays inside the
    app.

    ``lead``: emphasised beginning of the label; if empty, the whole label is emphasised. ``acts``: the link does
    something, and looks so.
    """
    length = len(lead) if label.casefold().startswith(lead.casefold()) else 0
    cell = {"kind": "link", "text": label, "sub": "", "title": "", "href": href}
    return {**cell, "id": asks, "lead": length, "acts": acts}


def spark(points: Sequence[Sequence[float]], bad: Sequence[float], label: str = "") -> Cell:
    """Return a cell with a small curve in the unit square, red ticks at the places ``bad`` of non-finite values, and a
    label.

    Points are ``[x, y]``, or ``[x, y, low, high]`` with a band.
    """
    return {"kind": "spark", "points": points, "bad": bad, "text": label}


def group(name: str, count: int) -> Cell:
    """Return a cell with the name of a group of runs and the number of its runs, ``count``."""
    return {"kind": "group", "text": fmt.shorten(name, NAME_LIMIT), "sub": fmt.plural(count, "run"), "title": name}


def details(key: str, label: str, lines: Sequence[tuple[str, str]]) -> Cell:
    """Return a cell with a label that unfolds to ``lines``, named values; ``key`` keeps it unfolded over a refresh."""
    return {"kind": "details", "key": key, "text": label, "lines": [list(line) for line in lines]}


def marked(cell: Cell, shape: str, colour: str) -> Cell:
    """Return ``cell`` (made by :func:`details`) with a coloured shape before its text."""
    return {**cell, "shape": shape, "colour": colour}


def show(
    key: str,
    columns: Sequence[TableColumn],
    rows: Sequence[TableRow],
    *,
    on_open: Callable[[str], None] | None = None,
    on_pick: Callable[[Mapping[str, bool]], None] | None = None,
    on_sort: Callable[[str], None] | None = None,
    few: int = 0,
    total: int = 0,
    more: str = "",
) -> str | None:
    """Draw a table and return the message of a click on a row or link, if any.

    Parameters
    ----------
    key
        Widget key of the table.
    columns, rows
        Columns and rows.
    on_open
        Receives the message of a click before the page is redrawn.
    on_pick
        Receives the rows whose boxes were ticked (True) or cleared.
    on_sort
        Receives the message of a click on a header.
    few
        Rows that a phone shows, with the rest behind a button; 0: all.
    total
        Number of rows of the whole table, if the browser is to fetch those beyond ``rows``.
    more
        Address to fetch further rows from as they scroll into view.
    """
    data = table_json(key, columns, rows, few=few, total=total, more=more)
    result = _component()(
        key=key,
        data=data,
        on_open_change=partial(_notify, key, "open", on_open),
        on_pick_change=partial(_notify_pick, key, on_pick),
        on_sort_change=partial(_notify, key, "sort", on_sort),
    )
    opened = getattr(result, "open", None)
    return str(opened) if opened else None


def table_json(
    key: str, columns: Sequence[TableColumn], rows: Sequence[TableRow], *, few: int = 0, total: int = 0, more: str = ""
) -> dict[str, Any]:
    """Return a table as the JSON that ``table.js`` draws; the arguments are those of :func:`show`."""
    return {
        "name": key,
        "few": few,
        "total": max(total, len(rows)),
        "more": more,
        "block": BLOCK,
        "columns": [asdict(column) for column in columns],
        "rows": [row_json(row) for row in rows],
    }


def row_json(row: TableRow) -> Cell:
    """Return a table row as the JSON that ``table.js`` draws."""
    return {
        "id": row.opens,
        "quiet": row.quiet,
        "chosen": row.chosen,
        "picked": row.picked,
        "unfolded": row.unfolded,
        "member": row.member,
        "cells": list(row.cells),
    }


@cache
def _component() -> Callable[..., Any]:
    script, style = ((HERE / name).read_text(encoding="utf-8") for name in ("table.js", "table.css"))
    mounted: Callable[..., Any] = st.components.v2.component(
        "rlwatch_table", js=f"{page_script()}\n{script}", css=style
    )
    return mounted


def _notify(key: str, what: str, callback: Callable[[str], None] | None) -> None:
    """Pass the value of a trigger to a callback; Streamlit needs a callback for a trigger even if none is given."""
    brought = getattr(st.session_state.get(key), what, None)
    if brought and callback is not None:
        callback(str(brought))


def _notify_pick(key: str, callback: Callable[[Mapping[str, bool]], None] | None) -> None:
    brought = getattr(st.session_state.get(key), "pick", None)
    if brought and callback is not None:
        callback({str(row): bool(ticked) for row, ticked in dict(brought).items()})
