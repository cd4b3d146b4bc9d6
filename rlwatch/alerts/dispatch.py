"""Decide which messages are written to a store's outbox, and for which channels.

Trainers, ``rlwatch watch`` and the dashboard each have a dispatcher; they share no memory. The outbox records what was
published, and each dispatcher reads and writes it in one transaction. So planning twice, in one process or in several,
publishes nothing twice, and planning after a process died publishes what it could not.

The order: read from the outbox what was published; derive from that, the state of each alert and the time what is due;
hold back some of it (silences, quiet hours, inhibition, a group that is awaited), which is due again at the next check;
group the rest into messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache, partial

from rlwatch.alerts.engine import AlertEvent
from rlwatch.alerts.matching import alerts_in, quiet_words, silence_matches
from rlwatch.alerts.messages import AlertCase, Notification, compose_message
from rlwatch.alerts.rules import AlertingConfig, GroupBy, Inhibition, Rule, inhibitors
from rlwatch.clock import Clock, SystemClock
from rlwatch.diagnosis import Cause, Confidence, Diagnosis
from rlwatch.errors import StoreError
from rlwatch.ports import Store
from rlwatch.records import Alert, AlertState, Ledger, OutboxMessage, OutboxStatus, RunInfo, Severity, Silence
from rlwatch.state import Verdict, headline_of
from rlwatch.view import stored_explanation


@dataclass(frozen=True, slots=True)
class Publication:
    """One alert in one message that was written to the outbox.

    Parameters
    ----------
    alert_id, event, severity
        The alert, the reported event, and the severity at which it was published.
    channel, at
        Channel and time of the message (Unix seconds).
    group
        Id of the first alert of the group (alerts that share messages) in which this alert was first published.
    pending
        Whether the message is not delivered yet.
    """

    alert_id: str
    event: AlertEvent
    severity: Severity
    channel: str
    at: float
    group: str
    pending: bool = False


class Publications:
    """Everything that a set of messages published about alerts, by alert."""

    def __init__(self, messages: Iterable[OutboxMessage]) -> None:
        self._by_alert: dict[str, list[Publication]] = {}
        for message in messages:
            for publication in _publications(message):
                self._by_alert.setdefault(publication.alert_id, []).append(publication)

    def of(self, alert_id: str, channel: str | None = None) -> list[Publication]:
        """Return the publications of the alert ``alert_id``, in the order in which they were written.

        ``channel``: the only channel to look at; None: any.
        """
        every = self._by_alert.get(alert_id, [])
        return [publication for publication in every if channel is None or publication.channel == channel]

    def channels(self, alert_id: str) -> tuple[str, ...]:
        """Return the channels that were notified of the alert ``alert_id``."""
        return tuple(dict.fromkeys(publication.channel for publication in self.of(alert_id)))

    def group(self, alert_id: str, channel: str) -> str:
        """Return the id of the group (alerts that share messages) in which ``channel`` was first notified of an alert.

        It is the alert's own id if the channel was not notified of the alert.
        """
        earlier = self.of(alert_id, channel)
        return earlier[0].group if earlier else alert_id

    def members(self, group: str, channel: str) -> list[str]:
        """Return the ids of the alerts of which ``channel`` was notified in one ``group`` (alerts that share
        messages).
        """
        return [
            alert_id
            for alert_id in self._by_alert
            if self.of(alert_id, channel) and self.group(alert_id, channel) == group
        ]


def _publications(message: OutboxMessage) -> Iterator[Publication]:
    event = message.payload.get("event")
    if event not in set(AlertEvent):
        return  # such as a trial message
    for alert in alerts_in(message):
        severity = alert.get("severity")
        yield Publication(
            alert_id=str(alert.get("id", "")),
            event=AlertEvent(event),
            severity=Severity(severity) if severity in set(Severity) else Severity.WARNING,
            channel=message.channel,
            at=message.created_at,
            group=message.alert_id,
            pending=message.status is OutboxStatus.PENDING,
        )


# The notifications that are due for one alert, by its state, what was published, and the time. Silences come later.

FRESH_S = 24 * 3600.0
"""Seconds for which unpublished alerts of a run that is no longer live are still published."""


def due(case: AlertCase, publications: Publications, now: float) -> list[Notification]:
    """Return the notifications about an alert that are due at ``now`` (Unix seconds), on all channels.

    ``case``: the alert with its rule and acknowledgement. ``publications``: everything that was published about alerts.
    They follow from the state of the alert, its rule, and what was already published. Silences are not considered here.
    """
    alert = case.alert
    if alert.state is AlertState.RESOLVED:
        return list(_resolved(case, publications))
    if alert.state is not AlertState.FIRING or not _still_current(case, publications, now):
        return []
    if case.acknowledged:
        return list(_eased(case, publications))
    fresh = [
        *_eased(case, publications),
        *_first_publications(case, publications),
        *_unacknowledged(case, publications, now),
    ]
    notified = {notification.channel for notification in fresh}
    return fresh + [again for again in _repeats(case, publications, now) if again.channel not in notified]


def _resolved(case: AlertCase, publications: Publications) -> Iterator[Notification]:
    """Yield one notification for every channel that was notified of the alert firing and not of its end."""
    for channel in publications.channels(case.alert.alert_id):
        earlier = publications.of(case.alert.alert_id, channel)
        if AlertEvent.RESOLVED not in {publication.event for publication in earlier}:
            severity = _worse(_worst(earlier), case.alert.severity)
            yield Notification(case, AlertEvent.RESOLVED, channel, severity, case.alert.reason)


def _still_current(case: AlertCase, publications: Publications, now: float) -> bool:
    if case.live or not case.rule.only_live:
        return True
    fired = case.alert.fired_at or 0.0
    return not publications.of(case.alert.alert_id) and now - fired < FRESH_S


def _first_publications(case: AlertCase, publications: Publications) -> Iterator[Notification]:
    alert = case.alert
    for channel in dict.fromkeys(case.rule.channels):
        earlier = publications.of(alert.alert_id, channel)
        if not earlier:
            yield Notification(case, AlertEvent.FIRING, channel, alert.severity, alert.reason)
        elif _worst(_lately(earlier)).rank < alert.severity.rank:
            number = _count(earlier, AlertEvent.ESCALATED)
            yield Notification(case, AlertEvent.ESCALATED, channel, alert.severity, alert.reason, number)


def _eased(case: AlertCase, publications: Publications) -> Iterator[Notification]:
    """Yield one notification for every channel that was notified of a higher severity than the present one."""
    alert = case.alert
    for channel in publications.channels(alert.alert_id):
        earlier = publications.of(alert.alert_id, channel)
        published = [each for each in _lately(earlier) if each.event in _OWN]
        if published and _worst(published).rank > alert.severity.rank:
            number = _count(earlier, AlertEvent.EASED)
            yield Notification(case, AlertEvent.EASED, channel, alert.severity, alert.reason, number)


_OWN = (AlertEvent.FIRING, AlertEvent.ESCALATED, AlertEvent.EASED)
"""Events published at the alert's own severity; escalations, and so repeats, may have a higher one."""


def _lately(earlier: Sequence[Publication]) -> Sequence[Publication]:
    """Return the publications since the alert eased, including that one; all where it never did."""
    eased = [place for place, each in enumerate(earlier) if each.event is AlertEvent.EASED]
    return earlier[eased[-1] :] if eased else earlier


def _count(earlier: Sequence[Publication], event: AlertEvent) -> int:
    return sum(publication.event is event for publication in earlier)


def _unacknowledged(case: AlertCase, publications: Publications, now: float) -> Iterator[Notification]:
    rule, alert = case.rule, case.alert
    earlier = publications.of(alert.alert_id)
    since = min((publication.at for publication in earlier), default=alert.fired_at or 0.0)
    why = _overdue(case, since, now)
    if not why or (rule.channels and not earlier):
        return
    severity = _worse(rule.escalate_severity, alert.severity)
    louder = rule.channels if severity.rank > alert.severity.rank else ()
    for channel in dict.fromkeys((*rule.escalate_to, *louder)):
        events = {publication.event for publication in publications.of(alert.alert_id, channel)}
        if AlertEvent.UNACKNOWLEDGED not in events:
            yield Notification(case, AlertEvent.UNACKNOWLEDGED, channel, severity, why)


def _overdue(case: AlertCase, since: float, now: float) -> str:
    """Return the reason to escalate now, as text; empty if there is none."""
    rule, steps = case.rule, (case.run.last_step or 0) - case.alert.step
    if rule.escalate_after_minutes and now - since >= 60.0 * rule.escalate_after_minutes:
        return f"not acknowledged for {(now - since) / 60:.0f} minutes"
    if rule.escalate_after_steps and steps >= rule.escalate_after_steps:
        return f"not acknowledged for {steps} steps"
    return ""


def _repeats(case: AlertCase, publications: Publications, now: float) -> Iterator[Notification]:
    rule, alert = case.rule, case.alert
    if not rule.repeat_minutes:
        return
    for channel in publications.channels(alert.alert_id):
        earlier = publications.of(alert.alert_id, channel)
        early = now - earlier[-1].at < 60.0 * rule.repeat_minutes
        undelivered = any(publication.pending for publication in earlier)
        if early or undelivered or channel not in (*rule.channels, *rule.escalate_to):
            continue  # a message that has not arrived is not repeated
        severity = _worse(_worst(_lately(earlier)), alert.severity)
        number = 1 + _count(earlier, AlertEvent.REPEATED)
        yield Notification(case, AlertEvent.REPEATED, channel, severity, "still firing, not acknowledged", number)


def _worst(earlier: Sequence[Publication]) -> Severity:
    return max((publication.severity for publication in earlier), key=lambda severity: severity.rank)


def _worse(one: Severity | None, other: Severity) -> Severity:
    return one if one is not None and one.rank > other.rank else other


# How long an inhibited alert stays quiet after its cause is over. An alert outlives its condition by
# ``keep_firing_for`` steps, so at the end of the cause a firing symptom proves nothing. Only an alert that still fires
# after these steps persists without the cause.


def settling_steps(rule: Rule, alert: Alert) -> int:
    """Return the number of steps for which a symptom must persist after its cause has ended to be published.

    It is the longer of the rule's delays before firing and before resolving.
    """
    return max(rule.wait(alert.severity), rule.keep_firing_for)


def ended(alerts: Iterable[Alert]) -> list[Alert]:
    """Return the alerts that fired and are over, the last to end first."""
    over = [a for a in alerts if a.state is AlertState.RESOLVED and a.fired_at is not None]
    return sorted(over, key=lambda a: (-1 if a.resolved_step is None else a.resolved_step, a.alert_id), reverse=True)


def settling(alert: Alert, rule: Rule, at: int | None, over: Sequence[Alert], inhibitions: Sequence[Inhibition]) -> str:
    """Return the reason to hold back a firing ``alert`` at step ``at`` although its cause is over; empty if there is
    none.

    Only an alert that already fired, at this severity or worse, during one of the causes ``over`` is held back; one
    that begins or worsens later is published. A run whose steps went back to before the end of the cause waits for
    nothing.

    Parameters
    ----------
    alert, rule
        The alert and its rule.
    at
        Present step of the run; None: not known.
    over
        Alerts that have ended, which may be causes.
    inhibitions
        Which kinds of alerts hold back which others.
    """
    patience = settling_steps(rule, alert)
    for cause in over:
        end = cause.resolved_step
        if end is None or at is None or not alert.step <= end <= at < end + patience:
            continue
        if any(inhibition.inhibits(cause, alert) for inhibition in inhibitions):
            return f"inhibited until step {end + patience}: {cause.kind} was over at step {end}"
    return ""


# Reasons to hold back what is due. It is published when the reason is gone, if it still holds then; after an
# inhibition, if it persists without the cause for a while.


def held_back(
    notification: Notification,
    policy: AlertingConfig,
    silences: Sequence[Silence],
    inhibited: Mapping[str, str],
    now: float,
) -> str:
    """Return the reason to hold back a notification at ``now`` (Unix seconds), as text; empty if it may be sent.

    The end of an alert is never inhibited.

    Parameters
    ----------
    notification
        The notification.
    policy
        Quiet hours and grouping.
    silences
        Periods without notifications.
    inhibited
        Alert id -> description of a cause that fires or has just ended.
    now
        Unix seconds.
    """
    over = notification.event is AlertEvent.RESOLVED
    return (
        ("" if over else inhibited.get(notification.case.alert.alert_id, ""))
        or silenced(notification, silences, now)
        or in_quiet_hours(notification, policy, now)
        or awaits_group(notification, policy, now)
    )


def silenced(notification: Notification, silences: Sequence[Silence], now: float) -> str:
    """Return a description of the silence (period without notifications) that covers a notification;
    empty without one.
    """
    case = notification.case
    for silence in silences:
        if silence.created_at <= now < silence.until and silence_matches(
            silence, case.alert, case.run, case.rule.labels
        ):
            return quiet_words(silence)
    return ""


def in_quiet_hours(notification: Notification, policy: AlertingConfig, now: float) -> str:
    """Return a description of the quiet hours that apply to a notification at ``now`` (Unix seconds);
    empty if none do.
    """
    for hours in policy.quiet_hours:
        until = hours.until(now)
        if until is not None and notification.severity.rank < hours.let_through.rank:
            return f"quiet hours until {datetime.fromtimestamp(until, hours.zone()):%H:%M} {hours.time_zone}"
    return ""


def awaits_group(notification: Notification, policy: AlertingConfig, now: float) -> str:
    """Return :data:`WAITING` while a notification waits for alerts that begin soon after, to share one message; else an
    empty text.

    ``now`` is in Unix seconds.
    """
    fired, wait = notification.case.alert.fired_at or 0.0, policy.grouping.wait_s
    if notification.event is AlertEvent.FIRING and wait and math.isfinite(fired) and 0 <= now - fired < wait:
        return WAITING
    return ""


WAITING = "waits for others of its group"


# The messages to write, given everything that is stored. Pure, so that every process reaches the same decision.

MOST_EARLIER = 5
Explained = Callable[[str, int | None], tuple[Verdict, Diagnosis] | None]
"""Returns state and diagnosis of a run (by id) as of a step."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything apart from alerts on which the decision about messages depends, read at one moment.

    Parameters
    ----------
    now
        Unix seconds.
    runs, live
        Id -> run, and the ids of the live ones.
    silences
        Periods without notifications.
    final
        Whether no later decision will follow soon, so that no alert waits for its group or for the end of an
        inhibition.
    cause
        ``cause(run_id, kind, at)``: likeliest cause of a kind of failure as known at step ``at`` (None: now), if any.
    headline
        ``headline(run_id, at)``: state and headline of the run as known at that step.
    """

    now: float
    runs: Mapping[str, RunInfo]
    live: frozenset[str] = frozenset()
    silences: Sequence[Silence] = ()
    final: bool = False
    cause: Callable[[str, str, int | None], Cause | None] = lambda run_id, kind, at: None  # noqa: ARG005
    headline: Callable[[str, int | None], tuple[str, str]] = lambda run_id, at: ("", "")  # noqa: ARG005


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """Messages to write to the outbox, and notifications that are due but held back, each with the reason."""

    messages: tuple[OutboxMessage, ...] = ()
    held_back: tuple[tuple[Notification, str], ...] = field(default=())


def decide(ledger: Ledger, policy: AlertingConfig, snapshot: Snapshot, dashboard_url: str = "") -> DispatchPlan:
    """Decide which messages to write about the alerts of one or more runs, and return them as a plan. Alerts of rules
    that ``policy`` lacks are ignored.

    ``ledger``: alerts, earlier messages and acknowledgements. ``snapshot``: time, runs and silences. ``dashboard_url``:
    address for links in the messages; empty: none. A pure function, so that every process decides alike.
    """
    publications = Publications(ledger.messages)
    cases = list(_cases(ledger, policy, snapshot))
    inhibited = _inhibited(cases, publications, policy, snapshot)
    ready: list[Notification] = []
    held: list[tuple[Notification, str]] = []
    for case in cases:
        for notification in due(case, publications, snapshot.now):
            why = held_back(notification, policy, snapshot.silences, inhibited, snapshot.now)
            held.append((notification, why)) if why else ready.append(notification)
    awaiting = [notification for notification, why in held if why == WAITING]
    joining = awaiting if snapshot.final else _joining(ready, awaiting, policy)
    groups = _grouped([*ready, *joining], policy, publications)
    messages = tuple(_message(group, publications, ledger.alerts, snapshot, dashboard_url) for group in groups)
    return DispatchPlan(messages, tuple(pair for pair in held if pair[0] not in joining))


def _cases(ledger: Ledger, policy: AlertingConfig, snapshot: Snapshot) -> Iterator[AlertCase]:
    acknowledged = {acknowledgement.alert_id: acknowledgement for acknowledgement in ledger.acknowledgements}
    for alert in sorted(ledger.alerts, key=lambda a: (-a.severity.rank, a.onset_step, a.rule, a.kind, a.alert_id)):
        rule, run = policy.rule(alert.rule), snapshot.runs.get(alert.run_id)
        if rule is not None and run is not None:
            yield AlertCase(alert, rule, run, run.run_id in snapshot.live, acknowledged.get(alert.alert_id))


def _notifies(case: AlertCase) -> bool:
    """Return whether the alert notifies a channel; one that does not inhibits no other."""
    return bool(case.rule.channels or case.rule.escalate_to)


def _inhibited(
    cases: Sequence[AlertCase], publications: Publications, policy: AlertingConfig, snapshot: Snapshot
) -> dict[str, str]:
    """Return alert id -> description, for alerts whose cause fires or has just ended.

    An alert that is held back after the end of its cause inhibits nothing. A cause that eased still inhibits: easing
    makes no symptom news.
    """
    settles = _settling(cases, policy, snapshot)
    firing = [_at_worst(each.alert, publications) for each in cases if _fires(each)]
    causes = [alert for alert in firing if alert.alert_id not in settles]
    inhibiting = inhibitors([case.alert for case in cases], causes, policy.inhibitions)
    words = {key: f"inhibited by {cause.kind} since step {cause.onset_step}" for key, cause in inhibiting.items()}
    return settles | words


def _fires(case: AlertCase) -> bool:
    return _notifies(case) and case.alert.state is AlertState.FIRING


def _at_worst(alert: Alert, publications: Publications) -> Alert:
    """Return the alert with the worst severity that was published."""
    published = [each for each in publications.of(alert.alert_id) if each.event in _OWN]
    return replace(alert, severity=_worse(_worst(published), alert.severity)) if published else alert


def _settling(cases: Sequence[AlertCase], policy: AlertingConfig, snapshot: Snapshot) -> dict[str, str]:
    """Return alert id -> description, for alerts whose cause has just ended; a run that ended waits for nothing."""
    over = ended(case.alert for case in cases if _notifies(case))
    waiting = [] if snapshot.final else [c for c in cases if c.live and c.alert.state is AlertState.FIRING]
    whys = {c.alert.alert_id: settling(c.alert, c.rule, c.run.last_step, over, policy.inhibitions) for c in waiting}
    return {alert_id: why for alert_id, why in whys.items() if why}


def _joining(
    ready: Sequence[Notification], awaiting: Sequence[Notification], policy: AlertingConfig
) -> list[Notification]:
    """Return the notifications that stop waiting, because one of their group is published now."""
    groups = {_group(notification, policy) for notification in ready}
    return [notification for notification in awaiting if _group(notification, policy) in groups]


def _group(notification: Notification, policy: AlertingConfig) -> tuple[str, ...]:
    run, by = notification.case.run, policy.grouping.by
    whose = {
        GroupBy.NONE: notification.case.alert.alert_id,
        GroupBy.RUN: run.run_id,
        GroupBy.PROJECT: run.project,
    }[by]
    return (notification.event.value, notification.channel, whose)


def _grouped(
    notifications: Sequence[Notification], policy: AlertingConfig, publications: Publications
) -> list[list[Notification]]:
    """Group notifications into messages; alerts that were published together are resolved together."""
    groups: dict[tuple[str, ...], list[Notification]] = {}
    for notification in sorted(
        notifications, key=lambda n: (-n.severity.rank, n.case.alert.onset_step, n.case.alert.alert_id)
    ):
        key = _group(notification, policy)
        if notification.event is AlertEvent.RESOLVED:
            key = (
                notification.event.value,
                notification.channel,
                publications.group(notification.case.alert.alert_id, notification.channel),
            )
        groups.setdefault(key, []).append(notification)
    return list(groups.values())


def _message(
    notifications: list[Notification],
    publications: Publications,
    alerts: Sequence[Alert],
    snapshot: Snapshot,
    dashboard_url: str,
) -> OutboxMessage:
    leading, channel = notifications[0].case.alert, notifications[0].channel
    group = publications.group(leading.alert_id, channel)
    members = {*publications.members(group, channel), *(each.case.alert.alert_id for each in notifications)}
    firing = [alert for alert in alerts if alert.state is AlertState.FIRING]
    earlier = [a for a in firing if a.run_id == leading.run_id and a.onset_step < leading.onset_step]
    return compose_message(
        notifications,
        group=group,
        firing=sum(alert.alert_id in members for alert in firing),
        earlier=sorted(earlier, key=lambda alert: alert.onset_step)[:MOST_EARLIER],
        cause=_cause(notifications[0], snapshot),
        headline=snapshot.headline(notifications[0].case.run.run_id, _as_of_step(notifications[0])),
        dashboard_url=dashboard_url,
        now=snapshot.now,
    )


def _cause(leading: Notification, snapshot: Snapshot) -> Cause | None:
    """Return the likeliest cause as known when the alert is first published; as known now for later messages."""
    if leading.event is AlertEvent.RESOLVED:
        return None
    case = leading.case
    return snapshot.cause(case.run.run_id, case.alert.kind, _as_of_step(leading))


def _as_of_step(leading: Notification) -> int | None:
    """Return the step as of which the message judges: the alert's own for its first message; None: now."""
    return leading.case.alert.step if leading.event in (AlertEvent.FIRING, AlertEvent.ESCALATED) else None


CONSOLE = "console"
"""Channel that is not written to the outbox: a process logs its own alerts at once."""


class Dispatcher:
    """Publishes the alerts of a store's runs: stores them and writes due messages to the outbox.

    Parameters
    ----------
    store
        The store.
    policy
        Rules and settings for all of its runs. Alerts of other rules are left to processes that have these rules.
    dashboard_url
        Address for the links in messages; empty: none.
    clock
        Clock; None: the machine's.
    live
        Returns whether a run is live; a trainer's own run always is.
    console
        Whether messages are also written for the channel ``console``.
    """

    def __init__(
        self,
        store: Store,
        policy: AlertingConfig,
        *,
        dashboard_url: str = "",
        clock: Clock | None = None,
        live: Callable[[RunInfo], bool] = lambda _: True,
        console: bool = False,
    ) -> None:
        self.decision: DispatchPlan = DispatchPlan()
        """The last decision: what it published and what it held back."""
        self._store = store
        self._policy = policy if console else replace(policy, rules=tuple(map(_without_console, policy.rules)))
        self._dashboard_url = dashboard_url
        self._clock = clock or SystemClock()
        self._live = live

    def publish(self, run_id: str, alerts: Sequence[Alert] = (), *, final: bool = False) -> list[OutboxMessage]:
        """Store new or changed ``alerts`` of a run, and write the messages that are due to the outbox; return the new
        messages.

        With ``final`` no message waits for alerts to be grouped with. May raise ``StoreBusyError``: nothing, or only
        the alerts, was stored then, and the call may be repeated.
        """
        if self._policy.grouping.by is GroupBy.PROJECT:
            if alerts:
                self._store.put_alerts(alerts, [])
            return self._publish_project(run_id, final=final)
        snapshot = self._snapshot([_as_of(self._store.run(run_id), alerts)], final=final)
        for alert in alerts:
            if alert.state is AlertState.FIRING:  # read before the control file is locked
                snapshot.cause(run_id, alert.kind, alert.step)
                snapshot.headline(run_id, alert.step)
        if not alerts and not self._decide(self._store.ledger(run_id), snapshot).messages:
            return []  # the common case takes no lock
        return self._store.publish(run_id, alerts, lambda ledger: self._decide(ledger, snapshot).messages)

    def _publish_project(self, run_id: str, *, final: bool) -> list[OutboxMessage]:
        """Publish for the whole project: one message may cover several runs, so only one process at a time decides."""
        project = self._store.run(run_id).project
        runs = [run for run in self._store.runs() if run.project == project]
        snapshot = self._snapshot(runs, final=final)
        if not self._decide(self._joint_ledger(runs), snapshot).messages:
            return []
        with self._store.exclusive():
            messages = self._decide(self._joint_ledger(runs), snapshot).messages
            self._store.put_alerts([], messages)
        return list(messages)

    def _decide(self, ledger: Ledger, snapshot: Snapshot) -> DispatchPlan:
        self.decision = decide(ledger, self._policy, snapshot, self._dashboard_url)
        return self.decision

    def _snapshot(self, runs: Sequence[RunInfo], *, final: bool) -> Snapshot:
        live = frozenset(run.run_id for run in runs if self._live(run))
        by_id = {run.run_id: run for run in runs}
        silences = self._store.silences()
        explained = cache(partial(self._explained, by_id))
        return Snapshot(
            self._clock.now(),
            by_id,
            live,
            silences,
            final=final,
            cause=cache(partial(self._cause, explained)),
            headline=cache(partial(self._headline, explained)),
        )

    def _explained(self, runs: Mapping[str, RunInfo], run_id: str, at: int | None) -> tuple[Verdict, Diagnosis] | None:
        """Return state and diagnosis of a run; None where its store cannot be read: the alert is sent without."""
        try:
            return stored_explanation(self._store, runs[run_id], at=at)
        except StoreError:
            return None

    def _headline(self, explained: Explained, run_id: str, at: int | None) -> tuple[str, str]:
        """Return state and headline of a run; empty where its store cannot be read."""
        known = explained(run_id, at)
        return ("", "") if known is None else (known[0].state.value, headline_of(*known))

    def _cause(self, explained: Explained, run_id: str, kind: str, at: int | None) -> Cause | None:
        """Return the likeliest cause of failures of this kind, if it adds to the failure itself."""
        known = explained(run_id, at)
        if known is None:
            return None
        diagnosis = known[1]
        sure = (cause for cause in diagnosis.causes if cause.sure is not Confidence.WEAK and cause.symptoms)
        return next((cause for cause in sure if kind in (cause.kind, *cause.symptoms)), None)

    def _joint_ledger(self, runs: Sequence[RunInfo]) -> Ledger:
        """Return the ledgers of all readable runs as one."""
        joint = Ledger()
        for run in runs:
            try:
                part = self._store.ledger(run.run_id)
            except StoreError:
                continue  # damaged, or busy: its alerts wait for the next look
            joint = Ledger(
                joint.alerts + part.alerts,
                joint.messages + part.messages,
                joint.acknowledgements + part.acknowledgements,
            )
        return joint


def _as_of(run: RunInfo, alerts: Sequence[Alert]) -> RunInfo:
    """Return the run at the step of the alerts: a batch of rows is stored whole and judged step by step."""
    step = max((alert.step for alert in alerts), default=None)
    return run if step is None or step >= (run.last_step or 0) else replace(run, last_step=step)


def _without_console(rule: Rule) -> Rule:
    channels, others = (tuple(c for c in names if c != CONSOLE) for names in (rule.channels, rule.escalate_to))
    if others or rule.escalate_severity is not None:
        return replace(rule, channels=channels, escalate_to=others)
    return replace(rule, channels=channels, escalate_to=(), escalate_after_minutes=0.0, escalate_after_steps=0)
