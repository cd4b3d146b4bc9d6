"""Acknowledge, snooze or silence alerts, leave notes, and explain why a firing alert is quiet.

Every action is recorded in the store's audit log, with user and time.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rlwatch.alerts.dispatch import ended, settling
from rlwatch.alerts.matching import quiet_words, silence_matches
from rlwatch.alerts.rules import AlertingConfig, Rule, inhibitors
from rlwatch.clock import Clock, SystemClock
from rlwatch.errors import ConfigError
from rlwatch.ports import AlertStore
from rlwatch.records import Acknowledgement, Alert, AlertState, AuditEntry, RunInfo, RunState, Severity, Silence
from rlwatch.wording import local_moment

UNITS = {"m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(min|m|h|d|w)\s*")


def seconds_of(text: str) -> float:
    """Return the seconds in a text such as ``90m``, ``2h``, ``1d12h``. Raises ``ConfigError`` for any other text.

    >>> seconds_of("1h30m"), seconds_of("2 d")
    (5400.0, 172800.0)
    """
    parts = _DURATION_PART.findall(text)
    if not parts or _DURATION_PART.sub("", text).strip():
        raise ConfigError(f"{text!r} is no duration; give numbers with m, h, d or w, as in 90m, 2h or 1d12h")
    return sum(float(number) * UNITS[unit] for number, unit in parts)


# Actions on alerts: acknowledge one, silence some for a while, and the resulting state of each.

LONGEST_S = 366 * 24 * 3600.0
MOST_LISTED = 5


def find_alert(alerts: Sequence[Alert], reference: str) -> Alert:
    """Return the alert whose id is ``reference`` or begins with it. Raises ``ConfigError`` if none or several match."""
    matching = [alert for alert in alerts if alert.alert_id == reference]
    matching = matching or [alert for alert in alerts if reference and alert.alert_id.startswith(reference)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        listed = ", ".join(alert.alert_id for alert in matching[:MOST_LISTED])
        raise ConfigError(f"{reference!r} fits {len(matching)} alerts: {listed}; give more of the id")
    firing = [f"{a.alert_id} ({a.kind} on {a.run_id})" for a in alerts if a.state is AlertState.FIRING]
    hint = f"firing: {', '.join(firing[:MOST_LISTED])}" if firing else "none is firing"
    raise ConfigError(f"there is no alert {reference!r}; {hint}")


def acknowledge(
    store: AlertStore, alert: Alert, *, by: str, why: str = "", clock: Clock | None = None
) -> Acknowledgement:
    """Acknowledge an alert at its present severity as user ``by``, and return the acknowledgement.

    ``why``: the user's reason. If another user acknowledged it before, that acknowledgement remains and is returned.

    Raises
    ------
    ConfigError
        If ``by`` is empty, or the alert does not fire (any more).
    """
    if not by.strip():
        raise ConfigError(f"an acknowledgement needs a name, got {by!r}; give yours with --by")
    if alert.state is not AlertState.FIRING:
        raise ConfigError(f"alert {alert.alert_id} is {alert.state.value}: only what fires can be acknowledged")
    now = (clock or SystemClock()).now()
    taken = Acknowledgement(alert.alert_id, alert.run_id, by.strip(), why.strip(), now, alert.severity)
    kept = store.acknowledge(taken)
    if kept == taken:
        _written(store, alert, by=taken.by, act="acknowledge", text=taken.why, now=now)
    return kept


def _written(store: AlertStore, alert: Alert, *, by: str, act: str, text: str, now: float) -> AuditEntry:
    entry = AuditEntry(uuid.uuid4().hex, now, by, act, text, alert.run_id, alert.alert_id)
    store.put_entry(entry)
    return entry


LONGEST_NOTE = 2000


def note(store: AlertStore, alert: Alert, *, by: str, text: str, clock: Clock | None = None) -> AuditEntry:
    """Store a note of user ``by`` on an alert, for other users, and return its entry of the audit log.

    Raises
    ------
    ConfigError
        If ``by`` is empty, or the note is empty or longer than 2000 characters.
    """
    if not by.strip() or not text.strip():
        raise ConfigError(f"a note needs a name and a text, got {by!r} and {text!r}")
    if len(text) > LONGEST_NOTE:
        raise ConfigError(f"a note has at most {LONGEST_NOTE} characters, got {len(text)}")
    return _written(store, alert, by=by.strip(), act="note", text=text.strip(), now=(clock or SystemClock()).now())


def snooze(
    store: AlertStore, alerts: Sequence[Alert], *, by: str, for_s: float, why: str = "", clock: Clock | None = None
) -> Silence:
    """Send no notifications of ``alerts`` for ``for_s`` seconds, unless one becomes worse than any of them is now.

    ``by``, ``why``: the user, and the reason. Returns the stored silence. Alerts that still fire afterwards are
    published then. Other alerts of their kind are published as usual.

    Raises
    ------
    ConfigError
        If ``by`` is empty, none of the alerts fires, or ``for_s`` is not positive or longer than a year.
    """
    firing = [alert for alert in alerts if alert.state is AlertState.FIRING]
    if not by.strip():
        raise ConfigError(f"a snooze needs a name, got {by!r}; give yours with --by")
    if not firing:
        listed = ", ".join(f"{alert.alert_id} is {alert.state.value}" for alert in alerts) or "there is none"
        raise ConfigError(f"only what fires can be snoozed: {listed}")
    now = (clock or SystemClock()).now()
    fresh = Silence(
        uuid.uuid4().hex[:8],
        by.strip(),
        why.strip(),
        now,
        now + _lasting(for_s),
        alerts=tuple(alert.alert_id for alert in firing),
        up_to=max((alert.severity for alert in firing), key=lambda severity: severity.rank),
    )
    store.put_silence(fresh)
    until = f"until {local_moment(fresh.until)}" + (f": {fresh.why}" if fresh.why else "")
    for alert in firing:
        _written(store, alert, by=fresh.by, act="snooze", text=until, now=now)
    return fresh


def _lasting(for_s: float) -> float:
    if not 0 < for_s <= LONGEST_S:
        raise ConfigError(f"a silence lasts more than nothing and at most a year, got {for_s:g} s")
    return for_s


def silence(
    store: AlertStore,
    *,
    by: str,
    why: str,
    for_s: float,
    run: str = "",
    project: str = "",
    kind: str = "",
    rule: str = "",
    labels: Mapping[str, str] | None = None,
    everything: bool = False,
    clock: Clock | None = None,
) -> Silence:
    """Send no notifications of alerts that match all given properties, for ``for_s`` seconds from now.

    Parameters
    ----------
    store
        Store of the alerts.
    by, why
        The user, and the reason.
    for_s
        Duration in seconds.
    run, project, kind, rule, labels
        Properties that alerts must have; empty: any.
    everything
        Whether no property is needed.
    clock
        Clock; None: the machine's.

    Raises
    ------
    ConfigError
        If ``by`` or ``why`` is empty, if no property is given and ``everything`` is false, or if ``for_s`` is not
        positive or longer than a year.
    """
    if not by.strip() or not why.strip():
        raise ConfigError("a silence needs a name and a reason: give --by and --why")
    if not (run or project or kind or rule or labels or everything):
        raise ConfigError("a silence of everything must be meant: name a run, project, kind, rule or label, or --all")
    now = (clock or SystemClock()).now()
    until = now + _lasting(for_s)
    fresh = Silence(
        uuid.uuid4().hex[:8], by.strip(), why.strip(), now, until, run, project, kind, rule, dict(labels or {})
    )
    store.put_silence(fresh)
    text = f"{matchers(fresh)} until {local_moment(until)}: {fresh.why}"
    store.put_entry(AuditEntry(uuid.uuid4().hex, now, fresh.by, "silence", text))
    return fresh


def matchers(silence: Silence) -> str:
    """Return a description of the alerts that a silence covers: ``run seed3, kind kl_drift``."""
    keys = ("run", "project", "kind", "rule")
    found = [f"{key} {getattr(silence, key)}" for key in keys if getattr(silence, key)]
    found += [f"label {key}={value}" for key, value in silence.labels.items()]
    found += [f"alert {', '.join(silence.alerts)}"] if silence.alerts else []
    up_to = "" if silence.up_to in (None, Severity.CRITICAL) else f" up to {silence.up_to}"
    return (", ".join(found) or "everything") + up_to


def end_silence(store: AlertStore, reference: str, *, by: str = "", clock: Clock | None = None) -> Silence:
    """End an active silence now, as user ``by``, and return it as stored.

    ``reference``: beginning of the silence's id. Raises ``ConfigError`` unless exactly one active silence has such an
    id.
    """
    now = (clock or SystemClock()).now()
    lasting = [each for each in store.silences() if each.until > now]
    matching = [each for each in lasting if reference and each.silence_id.startswith(reference)]
    if len(matching) != 1:
        listed = ", ".join(each.silence_id for each in lasting) or "there is none"
        raise ConfigError(
            f"{'no' if not matching else 'more than one'} silence {reference!r} lasts; those that do: {listed}"
        )
    ended = replace(matching[0], until=now)
    store.put_silence(ended)
    store.put_entry(AuditEntry(uuid.uuid4().hex, now, by.strip(), "unsilence", matchers(ended)))
    return ended


def quiet_reasons(
    alerts: Sequence[Alert],
    policy: AlertingConfig,
    now: float,
    *,
    runs: Mapping[str, RunInfo],
    acknowledgements: Iterable[Acknowledgement],
    silences: Iterable[Silence],
) -> dict[str, str]:
    """Return alert id -> reason why a firing alert sends no notifications now, as text; other alerts are left out.

    Parameters
    ----------
    alerts
        Alerts of any state.
    policy
        Alert rules and their settings.
    now
        Unix seconds.
    runs
        Id -> run.
    acknowledgements, silences
        Users' actions on alerts.
    """
    firing = [alert for alert in alerts if alert.state is AlertState.FIRING]
    taken = {each.alert_id: each for each in acknowledgements}
    lasting = [each for each in silences if each.created_at <= now < each.until]
    over = ended(alerts)
    settles = {a.alert_id: _settles(a, policy.rule(a.rule), runs.get(a.run_id), over, policy) for a in firing}
    causes = inhibitors(firing, [a for a in firing if not settles[a.alert_id]], policy.inhibitions)
    reasons: dict[str, str] = {}
    for alert in firing:
        rule, mine = policy.rule(alert.rule), taken.get(alert.alert_id)
        labels = rule.labels if rule else {}
        silenced = [each for each in lasting if silence_matches(each, alert, runs.get(alert.run_id), labels)]
        if mine is not None and mine.severity.rank >= alert.severity.rank:
            reasons[alert.alert_id] = f"acknowledged by {mine.by}" + (f": {mine.why}" if mine.why else "")
        elif silenced:
            reasons[alert.alert_id] = quiet_words(silenced[0])
        elif alert.alert_id in causes:
            reasons[alert.alert_id] = f"inhibited by {causes[alert.alert_id].kind}"
        elif settles[alert.alert_id]:
            reasons[alert.alert_id] = settles[alert.alert_id]
    return reasons


def _settles(
    alert: Alert, rule: Rule | None, run: RunInfo | None, over: Sequence[Alert], policy: AlertingConfig
) -> str:
    if rule is None or run is None or run.state is not RunState.RUNNING:
        return ""
    return settling(alert, rule, run.last_step, over, policy.inhibitions)
