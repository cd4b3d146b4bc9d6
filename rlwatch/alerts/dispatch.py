"""Decide what is published to whom: the one door to a store's outbox.

Trainers, ``rlwatch watch`` and the dashboard each have a dispatcher; they share no memory. The outbox is the record of
what was published, and whoever comes first writes to it in one transaction with reading it. So planning twice, in one
process or in several, publishes nothing twice, and planning later, after a process died, publishes what it could not.

In order: what was published so far is read from the outbox; what is due of each alert follows from that, its state and
the time; some of it is held back (silences, quiet hours, inhibition, a group that is awaited) and is due again at the
next look; the rest is grouped into messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache, partial

from rlwatch.alerts.engine import AlertEvent
from rlwatch.alerts.messages import Case, Notice, compose_message
from rlwatch.alerts.rules import GroupBy, Inhibition, Policy, Rule, inhibitors
from rlwatch.clock import Clock, SystemClock
from rlwatch.diagnosis import Cause, Sureness, diagnose
from rlwatch.errors import StoreError
from rlwatch.ports import Store
from rlwatch.records import JSON, Alert, AlertState, Ledger, OutboxMessage, OutboxStatus, RunInfo, Severity, Silence


@dataclass(frozen=True, slots=True)
class Publication:
    """One alert in one message. ``thread``: the alert whose message this is, which others of its group share.
    ``waits``: it is not delivered yet.
    """

    alert_id: str
    event: AlertEvent
    severity: Severity
    channel: str
    at: float
    thread: str
    waits: bool = False


class Publications:
    """What a set of messages told, by alert."""

    def __init__(self, messages: Iterable[OutboxMessage]) -> None:
        self._by_alert: dict[str, list[Publication]] = {}
        for message in messages:
            for told in _publications(message):
                self._by_alert.setdefault(told.alert_id, []).append(told)

    def of(self, alert_id: str, channel: str | None = None) -> list[Publication]:
        """What was said of the alert, on one channel or on any, in order of writing."""
        said = self._by_alert.get(alert_id, [])
        return [told for told in said if channel is None or told.channel == channel]

    def channels(self, alert_id: str) -> tuple[str, ...]:
        """Those that were told of it."""
        return tuple(dict.fromkeys(told.channel for told in self.of(alert_id)))

    def thread(self, alert_id: str, channel: str) -> str:
        """The alert under which ``channel`` was told of this one; itself where it was not."""
        said = self.of(alert_id, channel)
        return said[0].thread if said else alert_id

    def sharing(self, thread: str, channel: str) -> list[str]:
        """Alerts that ``channel`` was told of under this one."""
        return [
            alert_id
            for alert_id in self._by_alert
            if self.of(alert_id, channel) and self.thread(alert_id, channel) == thread
        ]


def alert_ids(message: OutboxMessage) -> tuple[str, ...]:
    """The alerts the message is about, the one it is led by first."""
    return tuple(dict.fromkeys([message.alert_id, *(str(alert.get("id", "")) for alert in _alerts(message))]))


def _publications(message: OutboxMessage) -> Iterator[Publication]:
    event = message.payload.get("event")
    if event not in set(AlertEvent):
        return  # not ours: a trial message, say
    for alert in _alerts(message):
        severity = alert.get("severity")
        yield Publication(
            alert_id=str(alert.get("id", "")),
            event=AlertEvent(event),
            severity=Severity(severity) if severity in set(Severity) else Severity.WARNING,
            channel=message.channel,
            at=message.created_at,
            thread=message.alert_id,
            waits=message.status is OutboxStatus.PENDING,
        )


def _alerts(message: OutboxMessage) -> list[Mapping[str, JSON]]:
    payload = message.payload
    found = [payload.get("alert"), *(payload.get("also") or ())]
    return [alert for alert in found if isinstance(alert, Mapping)] or [{"id": message.alert_id}]


# What is due of one alert: from the alert as it is, what was published, and the time. Silences come later.

FRESH_S = 24 * 3600.0
"""Of a run that is no longer live, alerts nobody was told of are news for so long."""


def due(case: Case, telling: Publications, now: float) -> list[Notice]:
    """What is to be told of the alert at ``now`` (Unix seconds), all channels."""
    alert = case.alert
    if alert.state is AlertState.RESOLVED:
        return list(_resolved(case, telling))
    if alert.state is not AlertState.FIRING or case.acknowledged or not _still_current(case, telling, now):
        return []
    told = [*_first_publications(case, telling), *_unacknowledged(case, telling, now)]
    spoken_to = {notice.channel for notice in told}
    return told + [notice for notice in _repeats(case, telling, now) if notice.channel not in spoken_to]


def _resolved(case: Case, telling: Publications) -> Iterator[Notice]:
    """Whoever was told that it fires, and not yet that it is over."""
    for channel in telling.channels(case.alert.alert_id):
        said = telling.of(case.alert.alert_id, channel)
        if AlertEvent.RESOLVED not in {told.event for told in said}:
            worst = max((told.severity for told in said), key=lambda severity: severity.rank)
            yield Notice(case, AlertEvent.RESOLVED, channel, _worse(worst, case.alert.severity), case.alert.reason)


def _still_current(case: Case, telling: Publications, now: float) -> bool:
    if case.live or not case.rule.only_live:
        return True
    fired = case.alert.fired_at or 0.0
    return not telling.of(case.alert.alert_id) and now - fired < FRESH_S


def _first_publications(case: Case, telling: Publications) -> Iterator[Notice]:
    alert = case.alert
    for channel in dict.fromkeys(case.rule.channels):
        said = telling.of(alert.alert_id, channel)
        if not said:
            yield Notice(case, AlertEvent.FIRING, channel, alert.severity, alert.reason)
        elif all(told.severity.rank < alert.severity.rank for told in said):
            yield Notice(case, AlertEvent.ESCALATED, channel, alert.severity, alert.reason)


def _unacknowledged(case: Case, telling: Publications, now: float) -> Iterator[Notice]:
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


def _repeats(case: Case, telling: Publications, now: float) -> Iterator[Notice]:
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


# How long an alert that its cause held back stays quiet after the cause is over. An alert outlives its condition by
# ``keep_firing_for`` steps, so that "still firing" says nothing at the moment the cause ends. Only what fires when
# these steps have passed, too, held without the cause.


def settling_steps(rule: Rule, alert: Alert) -> int:
    """Steps for which a symptom must go on without its cause: the longer of those that its rule asks for before it
    fires and before it ends.
    """
    return max(rule.wait(alert.severity), rule.keep_firing_for)


def ended(alerts: Iterable[Alert]) -> list[Alert]:
    """Those that fired and are over, the one that ended last first."""
    over = [a for a in alerts if a.state is AlertState.RESOLVED and a.fired_at is not None]
    return sorted(over, key=lambda a: (-1 if a.resolved_step is None else a.resolved_step, a.alert_id), reverse=True)


def settling(alert: Alert, rule: Rule, at: int | None, over: Sequence[Alert], inhibitions: Sequence[Inhibition]) -> str:
    """Why ``alert``, which fires, is not told at step ``at`` of its run though its cause is over; empty if it is.

    Only what fired, or was as bad as it is now, while one of the causes ``over`` fired is kept back: what begins or
    gets worse afterwards is news. A run whose steps went back to before the end of the cause waits for nothing.
    """
    patience = settling_steps(rule, alert)
    for cause in over:
        end = cause.resolved_step
        if end is None or at is None or not alert.step <= end <= at < end + patience:
            continue
        if any(inhibition.inhibits(cause, alert) for inhibition in inhibitions):
            return f"inhibited until step {end + patience}: {cause.kind} was over at step {end}"
    return ""


# Why something that is due is not published now. It is not lost: it is published when the reason is gone, if it still
# holds then; what a cause held back, if it goes on without the cause for a while.


def held_back(
    notice: Notice, policy: Policy, silences: Sequence[Silence], inhibited: Mapping[str, str], now: float
) -> str:
    """Why ``notice`` is not told at ``now``, in words; empty if it is. What is over is never inhibited.

    ``inhibited``: alert id -> the words for a cause that fires or has only just ended.
    """
    why = inhibited.get(notice.case.alert.alert_id, "") if notice.event is not AlertEvent.RESOLVED else ""
    return (
        why
        or silenced(notice, silences, now)
        or in_quiet_hours(notice, policy, now)
        or awaits_group(notice, policy, now)
    )


def silenced(notice: Notice, silences: Sequence[Silence], now: float) -> str:
    """The silence it falls under, in words."""
    case = notice.case
    for silence in silences:
        if silence.created_at <= now < silence.until and silence_matches(
            silence, case.alert, case.run, case.rule.labels
        ):
            return f"silenced by {silence.by}" + (f": {silence.why}" if silence.why else "")
    return ""


def silence_matches(silence: Silence, alert: Alert, run: RunInfo | None, labels: Mapping[str, str]) -> bool:
    """Whether the silence is about this alert, whenever it is; ``run`` None: only its id is known."""
    names = {alert.run_id, run.name if run else alert.run_id}
    return (
        (not silence.run or silence.run in names)
        and (not silence.project or (run is not None and silence.project == run.project))
        and (not silence.kind or silence.kind == alert.kind)
        and (not silence.rule or silence.rule == alert.rule)
        and all(labels.get(key) == value for key, value in silence.labels.items())
    )


def in_quiet_hours(notice: Notice, policy: Policy, now: float) -> str:
    """The quiet hours it falls into, in words."""
    for hours in policy.quiet_hours:
        until = hours.until(now)
        if until is not None and notice.severity.rank < hours.let_through.rank:
            return f"quiet hours until {datetime.fromtimestamp(until, hours.zone()):%H:%M} {hours.time_zone}"
    return ""


def awaits_group(notice: Notice, policy: Policy, now: float) -> str:
    """Whether it waits for others that begin with it."""
    fired, wait = notice.case.alert.fired_at or 0.0, policy.grouping.wait_s
    if notice.event is AlertEvent.FIRING and wait and math.isfinite(fired) and 0 <= now - fired < wait:
        return WAITING
    return ""


WAITING = "waits for others of its group"


# What is to be written now, given all that is stored: pure, so that whoever decides comes to the same.

MOST_EARLIER = 5


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The time (Unix seconds), the runs and which of them are live, and the silences.

    ``final``: nobody will plan for these alerts soon, so that none waits, for others of its group or to settle.
    ``cause`` says what most likely set a kind of failure of a run off, by what was known at a step (None: by now), if
    that is known.
    """

    now: float
    runs: Mapping[str, RunInfo]
    live: frozenset[str] = frozenset()
    silences: Sequence[Silence] = ()
    final: bool = False
    cause: Callable[[str, str, int | None], Cause | None] = lambda run_id, kind, at: None  # noqa: ARG005


@dataclass(frozen=True, slots=True)
class Decision:
    """Messages to write, and what is due but kept back: (notice, why)."""

    messages: tuple[OutboxMessage, ...] = ()
    held_back: tuple[tuple[Notice, str], ...] = field(default=())


def decide(ledger: Ledger, policy: Policy, scene: Snapshot, dashboard_url: str = "") -> Decision:
    """What to write of the ledger's alerts. Alerts of rules that ``policy`` does not have are left alone."""
    telling = Publications(ledger.messages)
    cases = list(_cases(ledger, policy, scene))
    inhibited = _inhibited(cases, policy, scene)
    told: list[Notice] = []
    kept: list[tuple[Notice, str]] = []
    for case in cases:
        for notice in due(case, telling, scene.now):
            why = held_back(notice, policy, scene.silences, inhibited, scene.now)
            kept.append((notice, why)) if why else told.append(notice)
    awaited = [notice for notice, why in kept if why == WAITING]
    joining = awaited if scene.final else _joining(told, awaited, policy)
    groups = _grouped([*told, *joining], policy, telling)
    messages = tuple(_message(group, telling, ledger.alerts, scene, dashboard_url) for group in groups)
    return Decision(messages, tuple(pair for pair in kept if pair[0] not in joining))


def _cases(ledger: Ledger, policy: Policy, scene: Snapshot) -> Iterator[Case]:
    taken = {acknowledgement.alert_id: acknowledgement for acknowledgement in ledger.acknowledgements}
    for alert in sorted(ledger.alerts, key=lambda a: (-a.severity.rank, a.onset_step, a.rule, a.kind, a.alert_id)):
        rule, run = policy.rule(alert.rule), scene.runs.get(alert.run_id)
        if rule is not None and run is not None:
            yield Case(alert, rule, run, run.run_id in scene.live, taken.get(alert.alert_id))


def _notifies(case: Case) -> bool:
    """An alert that tells nobody keeps nobody else from being told."""
    return bool(case.rule.channels or case.rule.escalate_to)


def _inhibited(cases: Sequence[Case], policy: Policy, scene: Snapshot) -> dict[str, str]:
    """Alert id -> words, of those whose cause fires or has only just ended. What waits itself keeps nobody back."""
    settles = _settling(cases, policy, scene)
    firing = [each.alert for each in cases if _notifies(each) and each.alert.state is AlertState.FIRING]
    causes = [alert for alert in firing if alert.alert_id not in settles]
    kept = inhibitors([case.alert for case in cases], causes, policy.inhibitions)
    return settles | {key: f"inhibited by {cause.kind} since step {cause.onset_step}" for key, cause in kept.items()}


def _settling(cases: Sequence[Case], policy: Policy, scene: Snapshot) -> dict[str, str]:
    """Those whose cause has only just ended; a run that goes no further has no steps to wait for."""
    over = ended(case.alert for case in cases if _notifies(case))
    waiting = [] if scene.final else [c for c in cases if c.live and c.alert.state is AlertState.FIRING]
    whys = {c.alert.alert_id: settling(c.alert, c.rule, c.run.last_step, over, policy.inhibitions) for c in waiting}
    return {alert_id: why for alert_id, why in whys.items() if why}


def _joining(told: Sequence[Notice], awaited: Sequence[Notice], policy: Policy) -> list[Notice]:
    """Those that wait no longer, because one of their group is told now."""
    ready = {_group(notice, policy) for notice in told}
    return [notice for notice in awaited if _group(notice, policy) in ready]


def _group(notice: Notice, policy: Policy) -> tuple[str, ...]:
    run, by = notice.case.run, policy.grouping.by
    whose = {
        GroupBy.NONE: notice.case.alert.alert_id,
        GroupBy.RUN: run.run_id,
        GroupBy.PROJECT: run.project,
    }[by]
    return (notice.event.value, notice.channel, whose)


def _grouped(notices: Sequence[Notice], policy: Policy, telling: Publications) -> list[list[Notice]]:
    """Notices that make one message; of what was told together, the end is told together."""
    groups: dict[tuple[str, ...], list[Notice]] = {}
    for notice in sorted(notices, key=lambda n: (-n.severity.rank, n.case.alert.onset_step, n.case.alert.alert_id)):
        key = _group(notice, policy)
        if notice.event is AlertEvent.RESOLVED:
            key = (notice.event.value, notice.channel, telling.thread(notice.case.alert.alert_id, notice.channel))
        groups.setdefault(key, []).append(notice)
    return list(groups.values())


def _message(
    notices: list[Notice], telling: Publications, alerts: Sequence[Alert], scene: Snapshot, dashboard_url: str
) -> OutboxMessage:
    leading = notices[0].case.alert
    thread = telling.thread(leading.alert_id, notices[0].channel)
    sharing = {*telling.sharing(thread, notices[0].channel), *(notice.case.alert.alert_id for notice in notices)}
    firing = [alert for alert in alerts if alert.state is AlertState.FIRING]
    earlier = [a for a in firing if a.run_id == leading.run_id and a.onset_step < leading.onset_step]
    return compose_message(
        notices,
        thread=thread,
        firing=sum(alert.alert_id in sharing for alert in firing),
        earlier=sorted(earlier, key=lambda alert: alert.onset_step)[:MOST_EARLIER],
        cause=_cause(notices[0], scene),
        dashboard_url=dashboard_url,
        now=scene.now,
    )


def _cause(leading: Notice, scene: Snapshot) -> Cause | None:
    """What set it off, by what was known when it was first said; by now, if it is said again."""
    if leading.event is AlertEvent.RESOLVED:
        return None
    case, first = leading.case, leading.event in (AlertEvent.FIRING, AlertEvent.ESCALATED)
    return scene.cause(case.run.run_id, case.alert.kind, case.alert.step if first else None)


CONSOLE = "console"
"""Not written: a process logs its own alerts, at once."""


class Dispatcher:
    """Tells the alerts of a store's runs.

    Parameters
    ----------
    policy
        Rules and what applies to all of them. Alerts of other rules are left to processes that have these.
    dashboard_url
        What messages link to.
    live
        Whether a run goes on; a run's own trainer says yes.
    console
        Whether messages are written for the channel ``console``, too.
    """

    def __init__(
        self,
        store: Store,
        policy: Policy,
        *,
        dashboard_url: str = "",
        clock: Clock | None = None,
        live: Callable[[RunInfo], bool] = lambda _: True,
        console: bool = False,
    ) -> None:
        self.decision: Decision = Decision()
        """The last one: what it published and what it held back."""
        self._store = store
        self._policy = policy if console else replace(policy, rules=tuple(map(_without_console, policy.rules)))
        self._dashboard_url = dashboard_url
        self._clock = clock or SystemClock()
        self._live = live

    def publish(self, run_id: str, alerts: Sequence[Alert] = (), *, final: bool = False) -> list[OutboxMessage]:
        """Put the alerts down and write what is due on their run; returns the messages that are new.

        With ``final`` nothing waits for others of its group. May raise ``StoreBusyError``: nothing, or
        only the alerts, was stored then, and the same call may be made again.
        """
        if self._policy.grouping.by is GroupBy.PROJECT:
            if alerts:
                self._store.put_alerts(alerts, [])
            return self._publish_project(run_id, final=final)
        scene = self._scene([_as_of(self._store.run(run_id), alerts)], final=final)
        for alert in alerts:
            if alert.state is AlertState.FIRING:  # read what will be wanted before the control file is locked
                scene.cause(run_id, alert.kind, alert.step)
        if not alerts and not self._planned(self._store.ledger(run_id), scene).messages:
            return []  # the usual look takes no lock
        return self._store.publish(run_id, alerts, lambda ledger: self._planned(ledger, scene).messages)

    def _publish_project(self, run_id: str, *, final: bool) -> list[OutboxMessage]:
        """One message may tell alerts of several runs, so that one process at a time plans for the project."""
        project = self._store.run(run_id).project
        runs = [run for run in self._store.runs() if run.project == project]
        scene = self._scene(runs, final=final)
        if not self._planned(self._whole(runs), scene).messages:
            return []
        with self._store.exclusive():
            messages = self._planned(self._whole(runs), scene).messages
            self._store.put_alerts([], messages)
        return list(messages)

    def _planned(self, ledger: Ledger, scene: Snapshot) -> Decision:
        self.decision = decide(ledger, self._policy, scene, self._dashboard_url)
        return self.decision

    def _scene(self, runs: Sequence[RunInfo], *, final: bool) -> Snapshot:
        live = frozenset(run.run_id for run in runs if self._live(run))
        by_id = {run.run_id: run for run in runs}
        silences = self._store.silences()
        return Snapshot(self._clock.now(), by_id, live, silences, final=final, cause=cache(partial(self._cause, by_id)))

    def _cause(self, runs: Mapping[str, RunInfo], run_id: str, kind: str, at: int | None) -> Cause | None:
        """The likeliest cause of failures of this kind, where more than the failure itself is known of it."""
        try:
            findings, events = self._store.findings(run_id), self._store.events(run_id)
        except StoreError:
            return None  # the alert goes out without
        said = diagnose(findings, events=events, source=runs[run_id].source, at=at)
        sure = (cause for cause in said.causes if cause.sure is not Sureness.WEAK and cause.symptoms)
        return next((cause for cause in sure if kind in (cause.kind, *cause.symptoms)), None)

    def _whole(self, runs: Sequence[RunInfo]) -> Ledger:
        """The ledgers of all runs that can be read, as one."""
        whole = Ledger()
        for run in runs:
            try:
                part = self._store.ledger(run.run_id)
            except StoreError:
                continue  # damaged, or busy: its alerts wait for the next look
            whole = Ledger(
                whole.alerts + part.alerts,
                whole.messages + part.messages,
                whole.acknowledgements + part.acknowledgements,
            )
        return whole


def _as_of(run: RunInfo, alerts: Sequence[Alert]) -> RunInfo:
    """The run at the step of the alerts: a batch of rows is stored whole and judged step by step."""
    step = max((alert.step for alert in alerts), default=None)
    return run if step is None or step >= (run.last_step or 0) else replace(run, last_step=step)


def _without_console(rule: Rule) -> Rule:
    channels, others = (tuple(c for c in names if c != CONSOLE) for names in (rule.channels, rule.escalate_to))
    if others or rule.escalate_severity is not None:
        return replace(rule, channels=channels, escalate_to=others)
    return replace(rule, channels=channels, escalate_to=(), escalate_after_minutes=0.0, escalate_after_steps=0)
