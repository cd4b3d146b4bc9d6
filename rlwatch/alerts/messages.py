"""Messages to receivers: one for the alerts of a group that are published together, for each event and channel.

The payload, a JSON object (``schema_version`` 1)::

    schema_version  int     grows when a key changes its meaning or is removed; new keys may come without
    event           str     "firing" | "escalated" | "eased" | "repeated" | "unacknowledged" | "resolved"
    text            str     the whole message in one line, for people (the key chat services look for)
    alert           object  the leading one: the most severe, then the one that began first
      id            str     the same for all events of one episode
      rule, kind, detector, message              str
      reason        str     why it is published now
      severity      str     "info" | "warning" | "critical": now; once it is over, the worst published one
      state         str     "firing" | "resolved"
      onset_step    int     when it began, in retrospect
      step          int     when this was written
      resolved_step int     null while it fires
      fired_at, resolved_at                      Unix seconds, null if not (yet)
      labels        object  of the rule, text to text
      run_id        str     the run it is about
    also            list    the others in this message, each as ``alert``; empty for most
    group           object
      id            str     the same for all messages of alerts that were first published together
      firing        int     how many of them fire now: with 0 the whole is over
    earlier         list    alerts that already fired on this run: objects of kind, severity, onset_step
    state           str     of the run: "failing", "collapsed", "at risk"...; "" where it is unknown
    headline        str     the run in one sentence: state, what broke, cause, next action; "" likewise
    cause           object  null where nothing but the alert itself is known
      kind, title, summary, why                  str: first sign, its name, chain in time order, reasons for confidence
      sure          str     "strong" | "plausible"
      onset_step    int
    finding         object
      detector      str
      evidence      object  the numbers behind it; keys depend on the detector
    advice          object  null for kinds without
      title, meaning                             str
      actions       list    the most useful first: objects of name, what, options (trainer -> settings),
                            source, strength ("measured", "published", "reported", "folklore"), evidence
    run             object
      id, name, project, source                  str
    links           object
      dashboard     str     only if an address of the dashboard is configured

Numbers that are not finite are the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import hashlib
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from rlwatch import codec
from rlwatch.alerts.engine import AlertEvent
from rlwatch.alerts.rules import Rule
from rlwatch.diagnosis import Cause, advice
from rlwatch.notify.payload import json_safe
from rlwatch.records import JSON, Acknowledgement, Alert, OutboxMessage, RunInfo, Severity

SCHEMA_VERSION = 1
TRIAL_EVENT = "test"


@dataclass(frozen=True, slots=True)
class AlertCase:
    """One alert, with everything that decides if notifications of it are due.

    ``rule``, ``run``: rule and run of the alert. ``live``: True if the run goes on. ``acknowledgement``: a user's, if
    any.
    """

    alert: Alert
    rule: Rule
    run: RunInfo
    live: bool
    acknowledgement: Acknowledgement | None = None

    @property
    def acknowledged(self) -> bool:
        """Return whether the alert was acknowledged at its present severity or a higher one."""
        taken = self.acknowledgement
        return taken is not None and taken.severity.rank >= self.alert.severity.rank


@dataclass(frozen=True, slots=True)
class Notification:
    """One event of one alert for one channel, before it becomes a message.

    ``severity``: severity at which it is published. ``why``: reason to publish it now. ``number``: number of earlier
    repeats.
    """

    case: AlertCase
    event: AlertEvent
    channel: str
    severity: Severity
    why: str
    number: int = 0


def compose_message(
    notifications: Sequence[Notification],
    *,
    group: str = "",
    firing: int = 1,
    earlier: Sequence[Alert] = (),
    cause: Cause | None = None,
    headline: tuple[str, str] = ("", ""),
    dashboard_url: str = "",
    now: float = 0.0,
) -> OutboxMessage:
    """Compose the message of ``notifications``, all of one event and channel, the leading one first.

    Its id depends only on the leading alert, the event and the channel: composing twice makes no second message.

    Parameters
    ----------
    notifications
        Notifications; the first one leads.
    group
        Id of the alert that led when the channel was first notified of the group; by default of the leading one.
    firing
        Number of alerts of the group that fire now.
    earlier
        Alerts that already fired on the run.
    cause
        The likeliest cause.
    headline
        State and headline of the run.
    dashboard_url
        Address of the dashboard; its query (the access token) is not passed on.
    now
        Time of writing, Unix seconds.
    """
    first = notifications[0]
    alert = first.case.alert
    group = group or alert.alert_id
    return OutboxMessage(
        message_id=message_id(alert.alert_id, first.event, first.severity, first.channel, first.number),
        run_id=alert.run_id,
        alert_id=group,
        channel=first.channel,
        payload=payload(
            notifications,
            {"id": group, "firing": firing},
            earlier,
            cause,
            headline=headline,
            dashboard_url=dashboard_url,
        ),
        created_at=now,
    )


def message_id(alert_id: str, event: AlertEvent, severity: Severity, channel: str, number: int = 0) -> str:
    """Return the id of an alert message as 32 hex digits: a digest of alert, event, severity, channel and ``number``.

    A message that is written twice for one event therefore has one id. ``number`` distinguishes repeats.
    """
    identity = f"{alert_id}|{event.value}|{severity.value}|{channel}" + (f"|{number}" if number else "")
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def payload(
    notifications: Sequence[Notification],
    group: dict[str, JSON],
    earlier: Sequence[Alert] = (),
    cause: Cause | None = None,
    *,
    headline: tuple[str, str] = ("", ""),
    dashboard_url: str = "",
) -> dict[str, JSON]:
    """Return the payload of a message, as the module describes it.

    Parameters
    ----------
    notifications
        Notifications of one event and channel; the first one leads.
    group
        ``id`` of the group, and number of its alerts that fire now (``firing``).
    earlier
        Alerts that already fired on the run.
    cause
        The likeliest cause; None: not known.
    headline
        State and headline of the run.
    dashboard_url
        Address of the dashboard; empty: no link.
    """
    first = notifications[0]
    alert, run = first.case.alert, first.case.run
    known = advice(alert.kind, run.source)
    whole = {
        "schema_version": SCHEMA_VERSION,
        "event": first.event,
        "text": summary(notifications, cause),
        "alert": _alert(first),
        "also": [_alert(notification) for notification in notifications[1:]],
        "group": group,
        "earlier": [{"kind": a.kind, "severity": a.severity, "onset_step": a.onset_step} for a in earlier],
        "state": headline[0],
        "headline": headline[1],
        "cause": None if cause is None else _cause(cause),
        "finding": {"detector": alert.detector, "evidence": alert.evidence},
        "advice": None if known is None else known.to_dict(),
        "run": {"id": run.run_id, "name": run.name, "project": run.project, "source": run.source},
        "links": {"dashboard": run_page(dashboard_url, run.run_id)} if dashboard_url else {},
    }
    return dict(json_safe(whole))


def summary(notifications: Sequence[Notification], cause: Cause | None = None) -> str:
    """Return an alert message in one line: event, severity, run, kind, step, further alerts, and the likeliest cause.

    ``notifications``: the notifications that the message combines, the leading one first. The cause is left out if it
    is the alert's own kind. For alerts that eased or are resolved the line has the step since when, and the values that
    show it.
    """
    first = notifications[0]
    alert = first.case.alert
    better = first.event in (AlertEvent.EASED, AlertEvent.RESOLVED)
    began = f" (since step {alert.onset_step})" if alert.onset_step != alert.step else ""
    others = ", ".join(dict.fromkeys(_named(notification, first.case.run) for notification in notifications[1:]))
    return (
        f"[{first.event.value} {first.severity.value}] {_whose(first.case.run)}: {alert.kind} at step {alert.step}"
        f"{began}: {first.why if better else alert.message}"
        + (f"; also {others}" if others else "")
        + (f"; most likely cause: {cause.title} ({cause.sure.words})" if cause and cause.kind != alert.kind else "")
    )


def _whose(run: RunInfo) -> str:
    return f"{run.project}/{run.name or run.run_id}"


def _named(notification: Notification, leading: RunInfo) -> str:
    run = notification.case.run
    return notification.case.alert.kind + (f" ({_whose(run)})" if run.run_id != leading.run_id else "")


def run_page(dashboard_url: str, run_id: str) -> str:
    """Return the address of a run's page in the dashboard, without the query of the dashboard's address.

    >>> run_page("http://host:8501/?token=abc", "seed 3")
    'http://host:8501/run?run=seed%203'
    """
    parts = urlsplit(dashboard_url)
    return (
        f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}/run?run={quote(run_id, safe='')}"
    )


def _cause(cause: Cause) -> dict[str, JSON]:
    return {
        "kind": cause.kind,
        "title": cause.title,
        "sure": cause.sure.value,
        "why": cause.why,
        "onset_step": cause.onset_step,
        "summary": cause.summary,
    }


def _alert(notification: Notification) -> dict[str, JSON]:
    alert = notification.case.alert
    body: dict[str, JSON] = {
        "id": alert.alert_id,
        "rule": alert.rule,
        "kind": alert.kind,
        "detector": alert.detector,
        "severity": notification.severity,
        "state": alert.state,
        "message": alert.message,
        "reason": notification.why,
        "onset_step": alert.onset_step,
        "step": alert.step,
        "resolved_step": alert.resolved_step,
        "fired_at": alert.fired_at,
        "resolved_at": alert.resolved_at,
        "labels": notification.case.rule.labels,
        "run_id": alert.run_id,
    }
    more = {name: value for name, value in codec.encoded(alert).items() if name not in {*body, "alert_id", "evidence"}}
    return body | more


def trial_message(channel: str, dashboard_url: str, now: float) -> OutboxMessage:
    """Return a test message for ``channel``, in the form of an alert's message, which states that it is a test.

    ``dashboard_url``: address of the dashboard, for the link; empty: none. ``now``: Unix seconds.
    """
    text = f"test message from {socket.gethostname()}: no alert, this channel works"
    trial_id = uuid.uuid4().hex
    alert: dict[str, JSON] = {
        "id": f"trial-{trial_id[:8]}",
        "rule": "trial",
        "kind": "trial",
        "detector": "rlwatch alerts test",
        "severity": "info",
        "state": "firing",
        "message": text,
        "reason": "sent by rlwatch alerts test",
        "onset_step": 0,
        "step": 0,
        "resolved_step": None,
        "fired_at": now,
        "resolved_at": None,
        "labels": {},
        "run_id": "trial",
    }
    payload: dict[str, JSON] = {
        "schema_version": SCHEMA_VERSION,
        "event": TRIAL_EVENT,
        "text": f"[{TRIAL_EVENT}] {text}",
        "alert": alert,
        "also": [],
        "group": {"id": alert["id"], "firing": 0},
        "earlier": [],
        "finding": {"detector": alert["detector"], "evidence": {}},
        "advice": None,
        "run": {"id": "trial", "name": "trial", "project": "rlwatch", "source": ""},
        "links": {"dashboard": dashboard_url.partition("?")[0]} if dashboard_url else {},
    }
    return OutboxMessage(trial_id, "trial", alert["id"], channel, payload, created_at=now)
