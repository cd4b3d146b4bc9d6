"""The post-mortem as a file: one HTML page without scripts and requests, or the same sections as Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from rlwatch.errors import MissingExtraError
from rlwatch.glance import DARK, LIGHT, RULES, actions_block, cause_block, table_cell
from rlwatch.report.charts import figures
from rlwatch.report.gather import TABLES, Chart, ReportTable, RunSummary, TimelineEntry
from rlwatch.wording import Markup, cut, for_markdown, number, sentence, step, visible

if TYPE_CHECKING:
    from jinja2 import Template

if TYPE_CHECKING:
    from jinja2 import Environment, Template

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Content security policy of the page: it may load nothing."""
FEW_DETECTORS = 8
"""Largest number of detectors that could not run which are listed without collapsing the list."""
GOOD = ("finished", "running", "healthy")
BAD = ("crashed", "collapsed", "damaged", "failing", "killed", "not learning")


def html(facts: RunSummary) -> str:
    """Return a post-mortem as one HTML page. Raises ``MissingExtraError`` if jinja2 is not installed."""
    return _template().render(
        facts=facts,
        look="critical" if facts.status.split("@")[0] in BAD else "good" if facts.status in GOOD else "warning",
        cause=cause_block(facts.diagnosis),
        actions=actions_block(facts.diagnosis),
        charts=figures(facts.charts, facts.timeline),
        tables={name: rows(facts) for name, rows in TABLES.items()},
        policy=POLICY,
        light=Markup(LIGHT),
        dark=Markup(DARK),
        rules=Markup(RULES),
        few=FEW_DETECTORS,
    )


def _visible(value: object) -> object:
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


@cache
def _template() -> Template:
    """Return the template of the page, which escapes every text and makes its control characters visible."""
    made = environment(_visible)
    made.globals.update(cell=table_cell)
    return made.get_template("page.html.jinja")


def environment(finalize: Callable[[object], object]) -> Environment:
    """Return the jinja2 environment of the templates of reports.

    ``finalize``: applied to every inserted value. Raises ``MissingExtraError`` where jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError:
        raise MissingExtraError("jinja2", "cli", "a report") from None
    made = Environment(
        loader=PackageLoader("rlwatch.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(cut=cut, sentence=sentence, step=step)
    return made


# The post-mortem of a run as Markdown, with the sections of the HTML page; curves are lines of block characters.

BLOCKS = "▁▂▃▄▅▆▇█"
COLUMNS = 60
"""Width of a curve in characters."""


def markdown(facts: RunSummary) -> str:
    """Return a post-mortem as Markdown text.

    Texts of users are escaped, so that they cannot become links, images or headings. Raises ``MissingExtraError`` where
    jinja2 is not installed.
    """
    tables = {name: rows(facts) for name, rows in TABLES.items()}
    return _text_template().render(facts=facts, moments=_moments(facts.timeline), tables=tables) + "\n"


@cache
def _text_template() -> Template:
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
