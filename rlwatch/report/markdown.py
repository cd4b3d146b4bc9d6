"""The post-mortem as Markdown: the same sections; curves as lines of blocks, which any viewer shows."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlwatch.diagnosis import Action, Cause, Diagnosis
from rlwatch.report.gather import TABLES, Chart, Facts, Moment, Rows
from rlwatch.wording import cut, for_markdown, number, step

BLOCKS = "▁▂▃▄▅▆▇█"
COLUMNS = 60
"""Characters of a curve."""


def markdown(facts: Facts) -> str:
    """The whole text; what others wrote is escaped, so that it cannot become a link, an image or a heading."""
    head = [f"# {for_markdown(cut(facts.title, 240))}", "", f"**{for_markdown(facts.status)}**", ""]
    head += [for_markdown(facts.verdict), ""] if facts.verdict else []
    head += [f"- {for_markdown(label)}: {for_markdown(cut(text, 400))}" for label, text in facts.head.items()]
    sections = {
        "What happened": _verdict(facts.diagnosis),
        "What to do": _actions(facts.diagnosis),
        "Timeline": _timeline(facts.timeline),
        "Curves": _curves(facts.charts),
        "Other causes considered": [line for cause in facts.diagnosis.causes[1:] for line in _other(cause)],
        **{name: _table(rows(facts)) for name, rows in TABLES.items()},
        "Not measured": [f"- {for_markdown(line)}" for line in facts.missing],
    }
    body = [line for name, lines in sections.items() if lines for line in ("", f"## {name}", "", *lines)]
    return "\n".join([*head, *body, "", f"Made by rlwatch, {for_markdown(facts.made_at)}.", ""])


def _verdict(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.causes:
        return ["Nothing was found that needs an explanation."]
    first = diagnosis.causes[0]
    if not diagnosis.enough:
        return [for_markdown(diagnosis.why_not)]
    return [
        f"**{for_markdown(first.title)}** ({first.sure.value})",
        "",
        for_markdown(first.summary),
        "",
        f"Because {for_markdown(first.why)}.",
    ]


def _actions(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.causes:
        return []
    first = diagnosis.causes[0]
    guess = [] if diagnosis.enough else ["No cause is sure enough to act on. What people do about the first sign:", ""]
    withheld = [f"**{for_markdown(first.withheld)}**", ""] if first.withheld else []
    rows = [line for place, action in enumerate(first.actions, 1) for line in _action(place, action)]
    return [*guess, *withheld, *rows] if rows else []


def _action(place: int, action: Action) -> list[str]:
    return [
        f"{place}. **{for_markdown(action.name)}** ({action.strength.value}). {for_markdown(action.what)}",
        *(f"   - {trainer}: {_options(text)}" for trainer, text in action.options.items()),
        f"   - evidence: {for_markdown(action.evidence)} Source: {for_markdown(action.source)}.",
    ]


def _options(text: str) -> str:
    """Backticks of the playbook stay code."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part if part.startswith("`") else _spaced(part) for part in parts)


def _spaced(part: str) -> str:
    """Escaped, blanks at the ends kept."""
    bare = for_markdown(part)
    return f"{' ' if part[:1] == ' ' else ''}{bare}{' ' if part[-1:] == ' ' and bare else ''}"


def _timeline(moments: Sequence[Moment]) -> list[str]:
    rows = tuple((str(m.number) if m.number else "", step(m.step), m.level, m.text) for m in moments)
    return _table(Rows(("no", ">step", "severity", "what"), rows))


def _curves(charts: Sequence[Chart]) -> list[str]:
    return [line for chart in charts for line in _curve(chart)]


def _curve(chart: Chart) -> list[str]:
    values, steps = chart.curve.values, chart.curve.steps
    notes = [chart.unit, f"at the start {number(chart.baseline)}" if chart.baseline is not None else ""]
    bad = f"{len(chart.curve.bad)} not finite, first at step {step(chart.curve.bad[0][0])}" if chart.curve.bad else ""
    about = ", ".join(filter(None, (*notes, bad)))
    if not values:
        return [f"- **{for_markdown(chart.name)}**: {for_markdown(about)}"]
    span = f"{number(min(values))} to {number(max(values))}, last {number(values[-1])}"
    drawn = blocks(steps, values)
    return [
        f"- **{for_markdown(chart.name)}** ({for_markdown(about)}): {span}"
        if about
        else f"- **{for_markdown(chart.name)}**: {span}",
        "",
        f"      {drawn}",
        "",
    ]


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


def _other(cause: Cause) -> list[str]:
    return [f"- **{for_markdown(cause.title)}** ({cause.sure.value}): {for_markdown(f'{cause.summary}; {cause.why}')}"]


def _table(rows: Rows) -> list[str]:
    if not rows.rows:
        return []
    names = [for_markdown(header.removeprefix(">")) for header in rows.headers]
    lines = ["---:" if header.startswith(">") else "---" for header in rows.headers]
    body = [f"| {' | '.join(for_markdown(cell) for cell in row)} |" for row in rows.rows]
    more = ["", f"{rows.left_out} more not shown."] if rows.left_out else []
    return [f"| {' | '.join(names)} |", f"| {' | '.join(lines)} |", *body, *more]
