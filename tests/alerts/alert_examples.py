"""Small makers of findings, alerts and rules for the tests of this room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlwatch.alerts.engine import AlertEngine, Transition
from rlwatch.alerts.rules import Rule
from rlwatch.records import Finding, Severity

INFO, WARNING, CRITICAL = Severity


def finding(
    kind: str = "entropy_collapse",
    severity: Severity = WARNING,
    step: int = 0,
    onset: int | None = None,
    **more: object,
) -> Finding:
    """A finding that says little more than what it is."""
    values = {"detector": "entropy", "message": f"{kind} at {step}"} | more
    return Finding(kind=kind, severity=severity, step=step, onset_step=step if onset is None else onset, **values)


Row = tuple[int, Sequence[Finding]]
"""A step and what holds at it."""


def told(engine: AlertEngine, rows: Iterable[Row]) -> list[Transition]:
    """All changes over the rows; ``seq`` counts them from 1."""
    return [t for seq, (step, holding) in enumerate(rows, 1) for t in engine.step(seq, step, holding, ts=1000.0 + step)]


def steps_and_reasons(transitions: Iterable[Transition]) -> list[tuple[int, str]]:
    """(step, reason) pairs."""
    return [(t.alert.step, t.reason.value) for t in transitions]


def rows(steps: Iterable[int], holds: Iterable[bool], severity: Severity = WARNING) -> list[Row]:
    """The same finding at those steps where it holds."""
    return [(s, [finding(severity=severity, step=s)] if h else []) for s, h in zip(steps, holds, strict=True)]


ANY = Rule("any", min_severity=INFO)
