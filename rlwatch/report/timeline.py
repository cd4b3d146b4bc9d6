"""What happened when: onsets, alarms, events and commands in one order, the likeliest cause's signs numbered."""

from __future__ import annotations

from collections.abc import Sequence

from rlwatch.diagnosis import Diagnosis
from rlwatch.records import LOCALISED, Alert, Command, Event, Finding
from rlwatch.report.facts import Moment
from rlwatch.report.words import cut, words

MOST = 60
"""Rows: the likeliest cause's, then the first ones."""
LONGEST = 220
EVENTS = {
    "reference_reset": "the reference was reset",
    "reference_restored": "the reference was restored from a checkpoint",
    "resume": "the run was resumed",
    "step_skipped": "the update of a culprit batch was skipped",
    "signal": "the process got a signal",
}


def timeline(
    said: Diagnosis,
    findings: Sequence[Finding],
    alerts: Sequence[Alert],
    events: Sequence[Event],
    commands: Sequence[Command],
) -> tuple[Moment, ...]:
    """Rows in order of step."""
    signs = [e for e in said.causes[0].evidence if e.severity is not None] if said.causes else []
    numbered = [
        Moment(e.step, f"{words(e.kind)}: {e.message or e.text}", e.severity.value if e.severity else "", number)
        for number, e in enumerate(signs, 1)
    ]
    told = {(sign.kind, sign.step) for sign in signs}
    others = [
        Moment(f.onset_step, f"{words(f.kind)}: {f.message}", f.severity.value)
        for f in _once(findings)
        if (f.kind, f.onset_step) not in told and f.severity.rank > 0
    ]
    alarms = [Moment(a.step, f"alarm: {words(a.kind)}", a.severity.value) for a in alerts if a.fired_at is not None]
    asked = [_asked(command) for command in commands if command.finished_step is not None]
    rest = [*alarms, *filter(None, map(_happened, events)), *asked, *others]
    kept = [*numbered, *sorted(rest, key=_order)[: MOST - len(numbered)]]
    return tuple(Moment(m.step, cut(m.text, LONGEST), m.level, m.number) for m in sorted(kept, key=_order))


def _order(moment: Moment) -> tuple[int, bool, int, str]:
    return (moment.step, moment.number == 0, moment.number, moment.text)


def _once(findings: Sequence[Finding]) -> list[Finding]:
    """Each failure's beginning once, in its severest words."""
    worst: dict[tuple[str, int], Finding] = {}
    for finding in findings:
        known = worst.get((finding.kind, finding.onset_step))
        if known is None or finding.severity.rank > known.severity.rank:
            worst[finding.kind, finding.onset_step] = finding
    return list(worst.values())


def _happened(event: Event) -> Moment | None:
    if event.step is None:
        return None
    if event.kind == LOCALISED:
        said = event.body.get("message") or event.body.get("why_not")
        return Moment(event.step, f"gradient localised: {said}") if said else None
    if event.kind == "exception":
        return Moment(event.step, f"training ended: {event.body.get('error', 'an exception')}", "critical")
    return Moment(event.step, EVENTS[event.kind]) if event.kind in EVENTS else None


def _asked(command: Command) -> Moment:
    by = f" by {command.requested_by}" if command.requested_by else ""
    why = f" ({command.why})" if command.why else ""
    return Moment(command.finished_step or 0, f"command {command.kind}{by}: {command.status.value}{why}")
