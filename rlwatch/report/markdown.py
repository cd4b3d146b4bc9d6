"""The post-mortem of a run as Markdown, with the sections of the HTML page; curves are lines of block characters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from rlwatch.report.gather import TABLES, Chart, ReportTable, RunSummary, TimelineEntry
from rlwatch.report.html import environment
from rlwatch.wording import Markup, for_markdown, number, step

if TYPE_CHECKING:
    from jinja2 import Template

BLOCKS = "▁▂▃▄▅▆▇█"
COLUMNS = 60
"""Width of a curve in characters."""


def markdown(facts: RunSummary) -> str:
    """Return a post-mortem as Markdown text.

    Texts of users are escaped, so that they cannot become links, images or headings. Raises ``MissingExtraError`` where
    jinja2 is not installed.
    """
    tables = {name: rows(facts) for name, rows in TABLES.items()}
    return _template().render(facts=facts, moments=_moments(facts.timeline), tables=tables) + "\n"


@cache
def _template() -> Template:
    """Return the template of the text, which escapes every value that is no Markup."""
    made = environment(lambda value: value if hasattr(value, "__html__") else Markup(for_markdown(str(value))))
    made.filters.update(code=_code, about=_about, drawn=_drawn)
    return made.get_template("page.md.jinja")


def _moments(moments: Sequence[TimelineEntry]) -> ReportTable:
    rows = tuple((str(m.number) if m.number else "", step(m.step), m.level, m.text) for m in moments)
    return ReportTable(("no", ">step", "severity", "what"), rows)


def _code(text: str) -> Markup:
    """Return an escaped text in which parts in backticks remain code."""
    parts = re.split(r"(`[^`]+`)", text)
    return Markup("".join(part if part.startswith("`") else _spaced(part) for part in parts))


def _spaced(part: str) -> str:
    """Return an escaped text that keeps blanks at its ends."""
    bare = for_markdown(part)
    return f"{' ' if part[:1] == ' ' else ''}{bare}{' ' if part[-1:] == ' ' and bare else ''}"


def _about(chart: Chart) -> Markup:
    """Return the text after the name of a chart: unit, first level, non-finite values; lowest, highest
    and last value.
    """
    values, bad = chart.curve.values, chart.curve.bad
    notes = [chart.unit, f"at the start {number(chart.baseline)}" if chart.baseline is not None else ""]
    notes += [f"{len(bad)} not finite, first at step {step(bad[0][0])}"] if bad else []
    about = for_markdown(", ".join(filter(None, notes)))
    if not values:
        return Markup(f": {about}")
    span = f"{number(min(values))} to {number(max(values))}, last {number(values[-1])}"
    return Markup(f" ({about}): {span}" if about else f": {span}")


def _drawn(chart: Chart) -> Markup:
    return Markup(blocks(chart.curve.steps, chart.curve.values))


def blocks(steps: Sequence[int], values: Sequence[float], columns: int = COLUMNS) -> str:
    """Draw a curve as at most ``columns`` block characters, one for each stretch of steps.

    Each stretch shows its value that is farthest from the middle of the range. ``steps`` and ``values`` are not empty
    and equally long; values are finite.

    >>> blocks(range(8), range(8), 8)
    '▁▂▃▄▅▆▇█'
    """
    low, high = min(values), max(values)
    middle, first, span = low / 2 + high / 2, steps[0], (steps[-1] - steps[0]) or 1
    chosen: dict[int, float] = {}
    for at, value in zip(steps, values, strict=True):
        column = min(columns - 1, (at - first) * columns // (span + 1))
        if column not in chosen or abs(value - middle) > abs(chosen[column] - middle):
            chosen[column] = value
    height = (high / 2 - low / 2) or 1.0
    top = len(BLOCKS) - 1
    return "".join(
        BLOCKS[round((chosen[c] / 2 - low / 2) / height * top)] if c in chosen else " " for c in range(columns)
    ).rstrip()
