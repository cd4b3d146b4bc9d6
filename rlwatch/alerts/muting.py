"""Why something that is due is not told now: silences, quiet hours, inhibition, a group that is awaited. Pure.

What is kept back is not lost: it is told when the reason is gone, if it still holds then; what a cause kept back, if it
goes on without the cause for a while (:mod:`rlwatch.alerts.settling`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime

from rlwatch.alerts.messages import Notice
from rlwatch.alerts.policy import Policy
from rlwatch.alerts.transitions import AlertEvent
from rlwatch.records import Alert, RunInfo, Silence


def kept_back(
    notice: Notice, policy: Policy, silences: Sequence[Silence], inhibited: Mapping[str, str], now: float
) -> str:
    """Why ``notice`` is not told at ``now``, in words; empty if it is. What is over is never inhibited.

    ``inhibited``: alert id -> the words for a cause that fires or has only just ended.
    """
    why = inhibited.get(notice.case.alert.alert_id, "") if notice.event is not AlertEvent.RESOLVED else ""
    return why or silenced(notice, silences, now) or resting(notice, policy, now) or awaiting(notice, policy, now)


def silenced(notice: Notice, silences: Sequence[Silence], now: float) -> str:
    """The silence it falls under, in words."""
    case = notice.case
    for silence in silences:
        if silence.created_at <= now < silence.until and fits(silence, case.alert, case.run, case.rule.labels):
            return f"silenced by {silence.by}" + (f": {silence.why}" if silence.why else "")
    return ""


def fits(silence: Silence, alert: Alert, run: RunInfo | None, labels: Mapping[str, str]) -> bool:
    """Whether the silence is about this alert, whenever it is; ``run`` None: only its id is known."""
    names = {alert.run_id, run.name if run else alert.run_id}
    return (
        (not silence.run or silence.run in names)
        and (not silence.project or (run is not None and silence.project == run.project))
        and (not silence.kind or silence.kind == alert.kind)
        and (not silence.rule or silence.rule == alert.rule)
        and all(labels.get(key) == value for key, value in silence.labels.items())
    )


def resting(notice: Notice, policy: Policy, now: float) -> str:
    """The quiet hours it falls into, in words."""
    for hours in policy.quiet_hours:
        until = hours.until(now)
        if until is not None and notice.severity.rank < hours.let_through.rank:
            return f"quiet hours until {datetime.fromtimestamp(until, hours.zone()):%H:%M} {hours.time_zone}"
    return ""


def awaiting(notice: Notice, policy: Policy, now: float) -> str:
    """Whether it waits for others that begin with it."""
    fired, wait = notice.case.alert.fired_at or 0.0, policy.grouping.wait_s
    if notice.event is AlertEvent.FIRING and wait and math.isfinite(fired) and 0 <= now - fired < wait:
        return WAITING
    return ""


WAITING = "waits for others of its group"
