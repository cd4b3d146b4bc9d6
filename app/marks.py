"""Moments of a run that every chart shows at their step: alarms, findings, spikes, commands, resets, resumes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlwatch.metrics import family_of
from rlwatch.records import CRASH_FORECAST, JSON, LOCALISED, Alert, AlertState, Event, Finding

from . import format as fmt
from .health import AMBER, GREY, LOOKS, SEVERITY_WORD, VERMILLION, Word

MOST_MARKS = 24
"""At most this many alarms are marked (the newest), or the marks would hide the line."""
MOST_SPIKES = 100
MOST_LINES = 6
"""Numbers of the evidence that a mark shows; all of them are in the table of findings."""

EVENT_SHAPES = {"reference_reset": "⟲", "resume": "↻", "exception": "✕", "signal": "✕"}
"""Events worth a mark; the others are in the table of events."""

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
"""Commands worth a mark: they bend the curves, or tell why these stand still."""

SPIKE = "◆"
SPIKE_COLOUR = "#A0529B"
"""Okabe and Ito's purple, darkened: a step whose tokens were localised is neither alarm nor command."""


@dataclass(frozen=True, slots=True)
class ChartMark:
    """A vertical line: ``shape`` above it, ``text`` for people, dashed where it is an inference.

    ``families`` are those whose charts it concerns (none: all of them); the others do not show one that is ``faint``.
    ``more`` and ``lines`` are what is known of it beyond ``text``; ``go`` is the page it leads to. Of marks that would
    overlap the one of the highest ``rank`` is seen.
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
    faint: bool = False
    rank: int = 0


def marks_of_run(
    alerts: Sequence[Alert], findings: Sequence[Finding], events: Iterable[Event], starts: Mapping[int, int]
) -> list[ChartMark]:
    """All marks of a run. ``findings`` tell families and when it was seen; ``starts`` an attempt's first step."""
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
        *(_of_finding(finding) for finding in _unalerted(findings, alerts)),
        *_spikes(events),
    ]


def _unalerted(findings: Sequence[Finding], alerts: Sequence[Alert]) -> list[Finding]:
    """The newest findings of which no alert speaks."""
    told = {alert.kind for alert in alerts if alert.state is AlertState.FIRING or alert.fired_at is not None}
    return [finding for finding in findings if finding.kind not in told][-MOST_MARKS:]


def _of_finding(finding: Finding) -> ChartMark:
    look = LOOKS[SEVERITY_WORD[finding.severity]]
    return ChartMark(
        finding.step,
        look.shape,
        _colour(look.shape),
        f"{fmt.words(finding.kind)} (finding)",
        _families(finding),
        more=finding.message,
        lines=_evidence(finding.evidence),
        faint=True,
        rank=1,
    )


def _spikes(events: Iterable[Event]) -> list[ChartMark]:
    """Steps whose tokens were localised, each with the way there; of a later attempt the same step once."""
    steps = {event.step: event for event in events if event.kind == LOCALISED and event.step is not None}
    return [
        ChartMark(
            step,
            SPIKE,
            SPIKE_COLOUR,
            "spike, its tokens were found",
            go="tokens",
            go_label="Tokens",
            faint=True,
            rank=2,
        )
        for step in sorted(steps)[-MOST_SPIKES:]
    ]


def _evidence(evidence: Mapping[str, JSON]) -> list[tuple[str, str]]:
    return fmt.evidence_lines(evidence)[:MOST_LINES]


def _colour(shape: str) -> str:
    return {"■": VERMILLION, "▲": AMBER}.get(shape, GREY)


def _families(finding: Finding) -> frozenset[str]:
    """The detector's family, and that of the metric it speaks of (a NaN may be in any)."""
    of_metric = family_of(finding.metric).value if finding.metric else ""
    return frozenset(filter(None, (finding.family, of_metric)))


def _newest(alerts: Sequence[Alert]) -> list[Alert]:
    fired = [alert for alert in alerts if alert.state is AlertState.FIRING or alert.fired_at is not None]
    return sorted(fired, key=lambda alert: alert.onset_step)[-MOST_MARKS:]


def seen_at(alert: Alert, findings: Sequence[Finding]) -> int:
    """The step of the alarm: an alert that is over keeps only its onset, the finding behind it both."""
    if alert.state is AlertState.FIRING:
        return alert.step
    behind = [f.step for f in findings if f.kind == alert.kind and f.onset_step <= alert.step and f.step <= alert.step]
    return max(behind, default=alert.onset_step)


def _of_alert(alert: Alert, families: frozenset[str], seen: int) -> list[ChartMark]:
    if alert.kind == CRASH_FORECAST:  # what counts is how early it came, not when it got worse
        shape, what = LOOKS[Word.AT_RISK].shape, fmt.words(alert.kind)
        return [ChartMark(alert.onset_step, shape, AMBER, what, families, more=alert.message, rank=3)]
    look = LOOKS[SEVERITY_WORD[alert.severity]]
    what = fmt.words(alert.kind)
    colour, rank = _colour(look.shape), 4 if look.shape == "■" else 3
    more = f"{alert.message}; began at step {fmt.step(alert.onset_step)}"
    lines = _evidence(alert.evidence)
    return [
        ChartMark(alert.onset_step, "", colour, f"{what} (onset)", families, dashed=True),
        ChartMark(seen, look.shape, colour, f"{what} (alarm)", families, more=more, lines=lines, rank=rank),
    ]


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
