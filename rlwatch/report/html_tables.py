"""Plain rows as an HTML table."""

from __future__ import annotations

from rlwatch.report.markup import Markup, el, joined
from rlwatch.report.tables import Rows

WORD = 16
"""Letters of a word that is not broken."""
LEVELS = ("critical", "warning")


def table(rows: Rows) -> Markup:
    """Nothing where there are no rows; long ones behind a fold."""
    if not rows.rows:
        return Markup()
    numeric = [header.startswith(">") for header in rows.headers]
    head = el("tr", *(_cell("th", h.removeprefix(">"), n) for h, n in zip(rows.headers, numeric, strict=True)))
    body = [el("tr", *(_cell("td", c, n) for c, n in zip(row, numeric, strict=True))) for row in rows.rows]
    whole = el("div", el("table", el("thead", head), el("tbody", *body)), cls="scroll")
    note = el("p", rows.note, cls="soft") if rows.note else Markup()
    more = el("p", f"{rows.left_out} more not shown.", cls="soft") if rows.left_out else Markup()
    if not rows.folded:
        return joined(note, whole, more)
    return joined(note, el("details", el("summary", f"{len(rows.rows)} rows"), whole, more))


def _cell(tag: str, text: str, numeric: bool) -> Markup:
    level = text if tag == "td" and text in LEVELS else ""
    word = "w" if len(text) <= WORD and " " not in text else ""
    return el(tag, text, cls="n" if numeric else f"{level} {word}".strip())
