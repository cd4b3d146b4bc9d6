"""The tables of a post-mortem, as plain rows: HTML and Markdown show the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlwatch.records import JSON
from rlwatch.report.facts import Facts
from rlwatch.report.words import cell, cut, moment, number, step, words

MOST_ROWS = 80
LONGEST = 300


@dataclass(frozen=True, slots=True)
class Rows:
    """A table: a header that starts with ``>`` is of numbers; ``left_out`` rows are not shown."""

    headers: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    left_out: int = 0
    folded: bool = False
    note: str = ""


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, folded: bool = False, note: str = "") -> Rows:
    shown = tuple(tuple(cut(text, LONGEST) for text in row) for row in rows[:MOST_ROWS])
    return Rows(tuple(headers), shown, max(0, len(rows) - MOST_ROWS), folded, note)


def findings(facts: Facts) -> Rows:
    """Each, newest first."""
    rows = [
        (f.severity.value, words(f.kind), step(f.onset_step), step(f.step), f.message) for f in reversed(facts.findings)
    ]
    return _table(("severity", "kind", ">onset", ">seen at", "what"), rows, folded=len(rows) > 12)


def alerts(facts: Facts) -> Rows:
    """Each, in order of onset."""
    rows = [
        (a.severity.value, words(a.kind), a.state.value, step(a.onset_step), step(a.resolved_step), a.message)
        for a in facts.alerts
    ]
    return _table(("severity", "kind", "state", ">onset", ">over at", "what"), rows)


def commands(facts: Facts) -> Rows:
    """What people asked of the run, oldest first."""
    rows = [
        (moment(c.created_at), words(c.kind), c.status.value, step(c.finished_step), c.requested_by, c.why, c.result)
        for c in facts.commands
    ]
    return _table(("when", "command", "status", ">at step", "by", "why", "result"), rows)


CULPRIT_COLUMNS = {
    "step": ">step",
    "text": "token",
    "token_id": ">id",
    "share": ">share",
    "contribution": ">contribution",
    "cause": "cause",
    "why": "why",
    "advantage": ">advantage",
    "logp": ">log-prob",
    "rollout_logp": ">rollout log-prob",
    "entropy": ">entropy",
    "sequence": ">response",
    "position": ">position",
}


def culprits(facts: Facts) -> Rows:
    """Tokens blamed for a gradient, newest step first."""
    columns = [name for name in CULPRIT_COLUMNS if any(name in row for row in facts.culprits)]
    rows = [[_quoted(row, name) for name in columns] for row in facts.culprits]
    note = "Share: of the gradient norm of the step. Text is what the model wrote, shown as it is."
    return _table([CULPRIT_COLUMNS[name] for name in columns], rows, note=note if rows else "")


def _quoted(row: Mapping[str, JSON], name: str) -> str:
    value = row.get(name)
    if name == "text" and value is not None:
        return f"“{cut(str(value), 60)}”"
    if name == "share" and isinstance(value, float):
        return f"{number(100 * value)} %"
    return cell(value)


def config(facts: Facts) -> Rows:
    """Flat, without secrets."""
    rows = list(facts.config.items())
    return Rows(("option", "value"), tuple(rows[:400]), max(0, len(rows) - 400), folded=True)


TABLES: Mapping[str, Callable[[Facts], Rows]] = {
    "Tokens that did it": culprits,
    "Findings": findings,
    "Alerts": alerts,
    "Commands": commands,
    "Configuration": config,
}
