"""What is due to be told of one alert: pure, from the alert as it is, what was told, and the time.

Nothing here knows of silences, quiet hours and inhibition: :mod:`rlwatch.alerts.muting` keeps back what is due.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlwatch.alerts.messages import Case, Notice
from rlwatch.alerts.told import Telling
from rlwatch.alerts.transitions import AlertEvent
from rlwatch.records import AlertState, Severity

FRESH_S = 24 * 3600.0
"""Of a run that is no longer live, alerts nobody was told of are news for so long."""


def due(case: Case, telling: Telling, now: float) -> list[Notice]:
    """What is to be told of the alert at ``now`` (Unix seconds), all channels."""
    alert = case.alert
    if alert.state is AlertState.RESOLVED:
        return list(_resolved(case, telling))
    if alert.state is not AlertState.FIRING or case.acknowledged or not _still_news(case, telling, now):
        return []
    told = [*_first_words(case, telling), *_unacknowledged(case, telling, now)]
    spoken_to = {notice.channel for notice in told}
    return told + [notice for notice in _repeats(case, telling, now) if notice.channel not in spoken_to]


def _resolved(case: Case, telling: Telling) -> Iterator[Notice]:
    """Whoever was told that it fires, and not yet that it is over."""
    for channel in telling.channels(case.alert.alert_id):
        said = telling.of(case.alert.alert_id, channel)
        if AlertEvent.RESOLVED not in {told.event for told in said}:
            worst = max((told.severity for told in said), key=lambda severity: severity.rank)
            yield Notice(case, AlertEvent.RESOLVED, channel, _worse(worst, case.alert.severity), case.alert.reason)


def _still_news(case: Case, telling: Telling, now: float) -> bool:
    if case.live or not case.rule.only_live:
        return True
    fired = case.alert.fired_at or 0.0
    return not telling.of(case.alert.alert_id) and now - fired < FRESH_S


def _first_words(case: Case, telling: Telling) -> Iterator[Notice]:
    alert = case.alert
    for channel in dict.fromkeys(case.rule.channels):
        said = telling.of(alert.alert_id, channel)
        if not said:
            yield Notice(case, AlertEvent.FIRING, channel, alert.severity, alert.reason)
        elif all(told.severity.rank < alert.severity.rank for told in said):
            yield Notice(case, AlertEvent.ESCALATED, channel, alert.severity, alert.reason)


def _unacknowledged(case: Case, telling: Telling, now: float) -> Iterator[Notice]:
    rule, alert = case.rule, case.alert
    said = telling.of(alert.alert_id)
    why = _overdue(case, min((told.at for told in said), default=alert.fired_at or 0.0), now)
    if not why or (rule.channels and not said):
        return
    severity = _worse(rule.escalate_severity, alert.severity)
    louder = rule.channels if severity.rank > alert.severity.rank else ()
    for channel in dict.fromkeys((*rule.escalate_to, *louder)):
        if AlertEvent.UNACKNOWLEDGED not in {told.event for told in telling.of(alert.alert_id, channel)}:
            yield Notice(case, AlertEvent.UNACKNOWLEDGED, channel, severity, why)


def _overdue(case: Case, since: float, now: float) -> str:
    """Why it is time to escalate; empty if it is not."""
    rule, steps = case.rule, (case.run.last_step or 0) - case.alert.step
    if rule.escalate_after_minutes and now - since >= 60.0 * rule.escalate_after_minutes:
        return f"not acknowledged for {(now - since) / 60:.0f} minutes"
    if rule.escalate_after_steps and steps >= rule.escalate_after_steps:
        return f"not acknowledged for {steps} steps"
    return ""


def _repeats(case: Case, telling: Telling, now: float) -> Iterator[Notice]:
    rule, alert = case.rule, case.alert
    if not rule.repeat_minutes:
        return
    for channel in telling.channels(alert.alert_id):
        said = telling.of(alert.alert_id, channel)
        early = now - said[-1].at < 60.0 * rule.repeat_minutes
        if early or channel not in (*rule.channels, *rule.escalate_to) or any(told.waits for told in said):
            continue  # what has not arrived is not repeated
        severity = _worse(max((told.severity for told in said), key=lambda severity: severity.rank), alert.severity)
        number = 1 + sum(told.event is AlertEvent.REPEATED for told in said)
        yield Notice(case, AlertEvent.REPEATED, channel, severity, "still firing, not acknowledged", number)


def _worse(one: Severity | None, other: Severity) -> Severity:
    return one if one is not None and one.rank > other.rank else other
