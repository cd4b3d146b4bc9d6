"""The post-mortem of a run as one HTML file: no script, no request, all data as escaped text."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from rlwatch.errors import MissingExtraError
from rlwatch.glance import DARK, LIGHT, RULES, actions_block, cause_block, table_cell
from rlwatch.report.charts import figures
from rlwatch.report.gather import TABLES, RunSummary
from rlwatch.wording import Markup, cut, sentence, step, visible

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
