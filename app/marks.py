"""Moments of a run that every chart shows at their step: alarms, resets, resumes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlwatch.metrics import family_of
from rlwatch.records import CRASH_FORECAST, Alert, AlertState, Event, Finding

from . import format as fmt
from .health import AMBER, GREY, LOOKS, SEVERITY_WORD, VERMILLION, Word

MOST = 24
"""At most this many alarms are marked (the newest), or the marks would hide the line."""

EVENT_SHAPES = {"reference_reset": "⟲", "resume": "↻", "exception": "✕", "signal": "✕"}
"""Events worth a mark; the others are in the table of events."""

COMMAND_SHAPES = {"lower-lr": "↓", "set-kl-coef": "β"}
"""Commands worth a mark: they bend the curves."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line: ``shape`` above it, ``text`` for people, dashed where it is an inference.

    ``families`` are those whose charts it concerns (none: all of them).
    """

    step: int
    shape: str
    colour: str
    text: str
    families: frozenset[str] = frozenset()
    dashed: bool = False


def of_run(
    alerts: Sequence[Alert], findings: Sequence[Finding], events: Iterable[Event], starts: Mapping[int, int]
) -> list[Mark]:
    """All marks of a run. ``findings`` tell families and when it was seen; ``starts`` an attempt's first step."""
    families = {finding.kind: _families(finding) for finding in findings if finding.kind != CRASH_FORECAST}
    return [
        *_resumes(starts),
        *(mark for event in events if (mark := _of_event(event)) is not None),
        *(
            mark
            for alert in _newest(alerts)
            for mark in _of_alert(alert, families.get(alert.kind, frozenset()), seen_at(alert, findings))
        ),
    ]


def _families(finding: Finding) -> frozenset[str]:
    """The detector's family, and that of the metric it speaks of (a NaN may be in any)."""
    of_metric = family_of(finding.metric).value if finding.metric else ""
    return frozenset(filter(None, (finding.family, of_metric)))


def _newest(alerts: Sequence[Alert]) -> list[Alert]:
    told = [alert for alert in alerts if alert.state is AlertState.FIRING or alert.fired_at is not None]
    return sorted(told, key=lambda alert: alert.onset_step)[-MOST:]


def seen_at(alert: Alert, findings: Sequence[Finding]) -> int:
    """The step of the alarm: an alert that is over keeps only its onset, the finding behind it both."""
    if alert.state is AlertState.FIRING:
        return alert.step
    behind = [f.step for f in findings if f.kind == alert.kind and f.onset_step <= alert.step and f.step <= alert.step]
    return max(behind, default=alert.onset_step)


def _of_alert(alert: Alert, families: frozenset[str], seen: int) -> list[Mark]:
    if alert.kind == CRASH_FORECAST:  # what counts is how early it came, not when it got worse
        return [Mark(alert.onset_step, LOOKS[Word.WATCH].shape, AMBER, fmt.words(alert.kind), families)]
    look = LOOKS[SEVERITY_WORD[alert.severity]]
    what = fmt.words(alert.kind)
    colour = {"■": VERMILLION, "▲": AMBER}.get(look.shape, GREY)
    return [
        Mark(alert.onset_step, "", colour, f"{what} (onset)", families, dashed=True),
        Mark(seen, look.shape, colour, f"{what} (alarm)", families),
    ]


def _of_event(event: Event) -> Mark | None:
    kind = str(event.body.get("command", "")) if event.kind == "command" else event.kind
    shape = COMMAND_SHAPES.get(kind) if event.kind == "command" else EVENT_SHAPES.get(kind)
    return None if shape is None or event.step is None else Mark(event.step, shape, GREY, fmt.words(kind))


def _resumes(starts: Mapping[int, int]) -> list[Mark]:
    return [
        Mark(first, "↻", GREY, f"attempt {attempt} began")
        for attempt, first in sorted(starts.items())
        if attempt > min(starts)
    ]
