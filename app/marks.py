"""Marks of a run's charts: alarms, findings, spikes, commands, resets and resumes.

All are symbols above the charts. In the charts an alarm, or a critical finding that no alert reports, as in an imported
log, is a line at its onset and a band until it was resolved; the other marks are drawn where the mouse points at them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlwatch.metrics import family_of
from rlwatch.records import (
    CRASH_FORECAST,
    JSON,
    LOCALISED,
    Alert,
    AlertState,
    Event,
    Finding,
    Severity,
    Stage,
)
from rlwatch.state import arrival
from rlwatch.step_notes import StepNote

from . import format as fmt
from .health import AMBER, GREY, LOOKS, SEVERITY_WORD, VERMILLION, Word

MOST_MARKS = 24
"""Most alarms that are marked, the newest ones; more would hide the line."""
MOST_SPIKES = 100
MOST_LINES = 6
"""Most numbers of the evidence in a mark; the table of findings has all of them."""

EVENT_SHAPES = {"reference_reset": "⟲", "resume": "↻", "exception": "✕", "signal": "✕"}
"""Events that get a mark, with its shape; all others are only in the table of events."""

COMMAND_SHAPES = {
    "lower-lr": "↓",
    "set-kl-coef": "β",
    "pause": "‖",
    "save-checkpoint": "⤓",
    "rollback": "↶",
    "raise-lr": "↑",
    "hold": "=",
    "skip-step": "≠",
    "undo": "↶",
    "stop": "✕",
}
"""Commands that get a mark, with its shape: they change the curves, or explain a flat curve."""

SPIKE = "◆"
SPIKE_COLOUR = "#A0529B"
"""Colour of localised steps, a purple of Okabe and Ito's, darkened to differ from alarms and commands."""


@dataclass(frozen=True, slots=True)
class ChartMark:
    """A mark at a step, with a ``shape`` above the charts and a ``text``, or ``dashed``: the onset of an alarm, which
    has no shape.

    ``until``: for an onset, the step at which the alarm was resolved, None if it still fires. ``families`` are the
    metric families that it concerns (empty: all). ``more`` and ``lines`` hold details beyond ``text``; ``go`` is the
    page that it links to. Of overlapping marks the one with the highest ``rank`` is drawn.
    """

    step: int
    shape: str
    colour: str
    text: str
    families: frozenset[str] = frozenset()
    dashed: bool = False
    more: str = ""
    lines: Sequence[tuple[str, str]] = ()
    go: str = ""
    go_label: str = ""
    rank: int = 0
    until: int | None = None


def marks_of_run(
    alerts: Sequence[Alert],
    findings: Sequence[Finding],
    events: Iterable[Event],
    starts: Mapping[int, int],
    notes: Sequence[StepNote] = (),
    *,
    recoveries: Sequence[Finding] = (),
) -> list[ChartMark]:
    """Return all chart marks of a run.

    Parameters
    ----------
    alerts, events, notes
        Alerts, events and users' notes of the run.
    findings
        Findings, which give the metric families and steps of the alerts.
    starts
        First step of each attempt.
    recoveries
        Updates of the findings that eased or ended.
    """
    events = list(events)
    families = {finding.kind: _families(finding) for finding in findings if finding.kind != CRASH_FORECAST}
    return [
        *_resumes(starts),
        *(mark for event in events if (mark := _of_event(event)) is not None),
        *(
            mark
            for alert in _newest(alerts)
            for mark in _of_alert(alert, families.get(alert.kind, frozenset()), seen_at(alert, findings))
        ),
        *(mark for finding in _unalerted(findings, alerts) for mark in _of_finding(finding, recoveries)),
        *_spikes(events),
        *(_of_note(note) for note in notes[-MOST_MARKS:]),
    ]


NOTE = "✎"


def _of_note(note: StepNote) -> ChartMark:
    text = f"note by {fmt.shorten(note.by, 60)}"
    return ChartMark(note.step, NOTE, GREY, text, more=fmt.shorten(note.text, 2000), rank=2)


def _unalerted(findings: Sequence[Finding], alerts: Sequence[Alert]) -> list[Finding]:
    """Return the newest findings without an alert of their kind."""
    alerted = {alert.kind for alert in alerts if alert.state is AlertState.FIRING or alert.fired_at is not None}
    return [finding for finding in findings if finding.kind not in alerted][-MOST_MARKS:]


def _of_finding(finding: Finding, recoveries: Sequence[Finding]) -> list[ChartMark]:
    look, what, families = LOOKS[SEVERITY_WORD[finding.severity]], fmt.words(finding.kind), _families(finding)
    colour, lines = _colour(look.shape), _evidence(finding.evidence)
    seen = ChartMark(
        finding.step, look.shape, colour, f"{what} (finding)", families, more=finding.message, lines=lines, rank=1
    )
    if finding.severity is not Severity.CRITICAL or finding.kind == CRASH_FORECAST:
        return [seen]
    ended = [one for one in recoveries if one.kind == finding.kind and one.stage is Stage.RESOLVED]
    ends = [one for one in ended if one.step >= finding.step and arrival(one) >= arrival(finding)]
    until = min(ends, key=arrival).step if ends else None
    onset = ChartMark(finding.onset_step, "", colour, f"{what} (onset)", families, dashed=True, rank=1, until=until)
    return [onset, seen]


def _spikes(events: Iterable[Event]) -> list[ChartMark]:
    """Return a mark with a link for each localised step; a step that was run twice has one mark."""
    steps = {event.step: event for event in events if event.kind == LOCALISED and event.step is not None}
    return [
        ChartMark(
            step,
            SPIKE,
            SPIKE_COLOUR,
            "spike, its tokens were found",
            go="tokens",
            go_label="Tokens",
            rank=2,
        )
        for step in sorted(steps)[-MOST_SPIKES:]
    ]


def _evidence(evidence: Mapping[str, JSON]) -> list[tuple[str, str]]:
    return fmt.evidence_lines(evidence)[:MOST_LINES]


def _colour(shape: str) -> str:
    return {"■": VERMILLION, "▲": AMBER}.get(shape, GREY)


def _families(finding: Finding) -> frozenset[str]:
    """Return the families of the detector and of the finding's metric (a NaN may be in any family)."""
    of_metric = family_of(finding.metric).value if finding.metric else ""
    return frozenset(filter(None, (finding.family, of_metric)))


def _newest(alerts: Sequence[Alert]) -> list[Alert]:
    fired = [alert for alert in alerts if alert.state is AlertState.FIRING or alert.fired_at is not None]
    return sorted(fired, key=lambda alert: alert.onset_step)[-MOST_MARKS:]


def seen_at(alert: Alert, findings: Sequence[Finding]) -> int:
    """Return the step at which an alert fired, taken from its finding, since a resolved alert has only its onset."""
    if alert.state is AlertState.FIRING:
        return alert.step
    behind = [f.step for f in findings if f.kind == alert.kind and f.onset_step <= alert.step and f.step <= alert.step]
    return max(behind, default=alert.onset_step)


def _of_alert(alert: Alert, families: frozenset[str], seen: int) -> list[ChartMark]:
    if alert.kind == CRASH_FORECAST:  # mark its onset, not the step at which it got worse
        shape, what = LOOKS[Word.AT_RISK].shape, fmt.words(alert.kind)
        return [ChartMark(alert.onset_step, shape, AMBER, what, families, more=alert.message, rank=3)]
    look = LOOKS[SEVERITY_WORD[alert.severity]]
    what = fmt.words(alert.kind)
    colour, rank = _colour(look.shape), 4 if look.shape == "■" else 3
    more = f"{alert.message}; began at step {fmt.step(alert.onset_step)}"
    lines = _evidence(alert.evidence)
    return [
        ChartMark(
            alert.onset_step, "", colour, f"{what} (onset)", families, dashed=True, rank=rank, until=_until(alert)
        ),
        ChartMark(seen, look.shape, colour, f"{what} (alarm)", families, more=more, lines=lines, rank=rank),
    ]


def _until(alert: Alert) -> int | None:
    """Return the step at which an alert was resolved; None while it fires."""
    if alert.state is AlertState.FIRING:
        return None
    return max(alert.onset_step, alert.step if alert.resolved_step is None else alert.resolved_step)


def _of_event(event: Event) -> ChartMark | None:
    kind = str(event.body.get("command", "")) if event.kind == "command" else event.kind
    shape = COMMAND_SHAPES.get(kind) if event.kind == "command" else EVENT_SHAPES.get(kind)
    if shape is None or event.step is None:
        return None
    return ChartMark(event.step, shape, GREY, fmt.words(kind), more=fmt.event_words(event)[1], rank=2)


def _resumes(starts: Mapping[int, int]) -> list[ChartMark]:
    return [
        ChartMark(first, "↻", GREY, f"attempt {attempt} began")
        for attempt, first in sorted(starts.items())
        if attempt > min(starts)
    ]
