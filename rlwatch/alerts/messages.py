"""What receivers are sent: one message for each alert, event, severity and channel.

The payload, a JSON object (``schema_version`` 1)::

    schema_version  int     grows when a key changes its meaning or goes; new keys may come without
    event           str     "firing" | "escalated" | "resolved"
    text            str     the whole in one line, for people (the key chat services look for)
    alert           object
      id            str     the same for all events of one episode
      rule, kind, detector, message, reason      str
      severity      str     "info" | "warning" | "critical": the worst so far
      state         str     "firing" | "resolved"
      onset_step    int     when it began, looking back
      step          int     when this was said
      resolved_step int     null while it fires
      fired_at, resolved_at                      Unix seconds, null if not (yet)
      labels        object  of the rule, text to text
    finding         object
      detector      str
      evidence      object  the numbers to believe it by; keys depend on the detector
    run             object
      id, name, project, source                  str
    links           object
      dashboard     str     only if an address of the dashboard is configured

Numbers that are not finite are the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from urllib.parse import quote, urlsplit

from rlwatch.alerts.transitions import AlertEvent, Transition
from rlwatch.notify.encode import json_safe
from rlwatch.records import JSON, Alert, OutboxMessage, RunInfo

SCHEMA_VERSION = 1


def messages_for(
    transition: Transition,
    run: RunInfo,
    *,
    channels: Collection[str] | None = None,
    dashboard_url: str = "",
    now: float | None = None,
) -> list[OutboxMessage]:
    """The messages a transition calls for: none if nobody is to be told.

    Ids depend only on the alert, what is told and to whom: composing twice makes no second message.

    Parameters
    ----------
    transition, run
        What happened, and where.
    channels
        The channels there are; a rule may name others. None: all that the rule names.
    dashboard_url
        Where the dashboard is; a query (the access token) is not passed on.
    now
        When the message is written; the transition's own time stamp if None.
    """
    if transition.event is None:
        return []
    body = payload(transition, run, dashboard_url)
    written = transition.ts if now is None else now
    return [
        OutboxMessage(
            message_id=message_id(transition.alert, transition.event, channel),
            run_id=run.run_id,
            alert_id=transition.alert.alert_id,
            channel=channel,
            payload=body,
            created_at=written,
        )
        for channel in dict.fromkeys(transition.rule.channels)
        if channels is None or channel in channels
    ]


def message_id(alert: Alert, event: AlertEvent, channel: str) -> str:
    """32 hex digits."""
    told = f"{alert.alert_id}|{event.value}|{alert.severity.value}|{channel}"
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def payload(transition: Transition, run: RunInfo, dashboard_url: str = "") -> dict[str, JSON]:
    """The payload described above."""
    alert = transition.alert
    whole = {
        "schema_version": SCHEMA_VERSION,
        "event": transition.event,
        "text": summary(transition, run),
        "alert": _alert(transition),
        "finding": {"detector": alert.detector, "evidence": alert.evidence},
        "run": {"id": run.run_id, "name": run.name, "project": run.project, "source": run.source},
        "links": {"dashboard": run_page(dashboard_url, run.run_id)} if dashboard_url else {},
    }
    return dict(json_safe(whole))


def summary(transition: Transition, run: RunInfo) -> str:
    """One line: what, how bad, which run, where in it."""
    alert, event = transition.alert, transition.event or transition.reason
    where = f"{run.project}/{run.name or run.run_id}"
    began = f" (since step {alert.onset_step})" if alert.onset_step != alert.step else ""
    return f"[{event.value} {alert.severity.value}] {where}: {alert.kind} at step {alert.step}{began}: {alert.message}"


def run_page(dashboard_url: str, run_id: str) -> str:
    """The run's page of the dashboard, without any query the address had.

    >>> run_page("http://host:8501/?token=abc", "seed 3")
    'http://host:8501/run?run=seed%203'
    """
    parts = urlsplit(dashboard_url)
    return (
        f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}/run?run={quote(run_id, safe='')}"
    )


def _alert(transition: Transition) -> dict[str, JSON]:
    alert = transition.alert
    return {
        "id": alert.alert_id,
        "rule": alert.rule,
        "kind": alert.kind,
        "detector": alert.detector,
        "severity": alert.severity,
        "state": alert.state,
        "message": alert.message,
        "reason": alert.reason,
        "onset_step": alert.onset_step,
        "step": alert.step,
        "resolved_step": alert.resolved_step,
        "fired_at": alert.fired_at,
        "resolved_at": alert.resolved_at,
        "labels": transition.rule.labels,
    }
