"""The post-mortem as Markdown: the same sections; curves as lines of blocks, which any viewer shows."""

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
"""Characters of a curve."""


def markdown(facts: RunSummary) -> str:
    """Return the whole text; texts of users are escaped, so that they cannot become links, images or headings.

    Raises ``MissingExtraError`` where jinja2 is not installed.
    """
    tables = {name: rows(facts) for name, rows in TABLES.items()}
    return _template().render(facts=facts, moments=_moments(facts.timeline), tables=tables) + "\n"


@cache
def _template() -> Template:
    """The text, in which all that is no Markup is escaped."""
    made = environment(lambda value: value if hasattr(value, "__html__") else Markup(for_markdown(str(value))))
    made.filters.update(code=_code, about=_about, drawn=_drawn)
    return made.get_template("page.md.jinja")


def _moments(moments: Sequence[TimelineEntry]) -> ReportTable:
    rows = tuple((str(m.number) if m.number else "", step(m.step), m.level, m.text) for m in moments)
    return ReportTable(("no", ">step", "severity", "what"), rows)


def _code(text: str) -> Markup:
    """Backticks of the playbook stay code."""
    parts = re.split(r"(`[^`]+`)", text)
    return Markup("".join(part if part.startswith("`") else _spaced(part) for part in parts))


def _spaced(part: str) -> str:
    """Escaped, blanks at the ends kept."""
    bare = for_markdown(part)
    return f"{' ' if part[:1] == ' ' else ''}{bare}{' ' if part[-1:] == ' ' and bare else ''}"


def _about(chart: Chart) -> Markup:
    """The words after the name of a chart: unit, first level, what is not finite; lowest, highest and last value."""
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
    """A curve as block characters, a column for each stretch of steps: the value farthest from the middle in it.

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
