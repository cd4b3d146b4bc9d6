"""What is to be written now, given all that is stored: pure, so that whoever plans comes to the same.

The outbox is the record of what was told. Planning twice, in one process or in several, tells nothing twice;
planning later, after a process died, tells what it could not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rlwatch.alerts.messages import Case, Notice, message
from rlwatch.alerts.muting import WAITING, kept_back
from rlwatch.alerts.notices import due
from rlwatch.alerts.policy import GroupBy, Policy, inhibitors
from rlwatch.alerts.settling import ended, settling
from rlwatch.alerts.told import Telling
from rlwatch.alerts.transitions import AlertEvent
from rlwatch.diagnosis import Cause
from rlwatch.records import Alert, AlertState, Ledger, OutboxMessage, RunInfo, Silence

MOST_EARLIER = 5


@dataclass(frozen=True, slots=True)
class Scene:
    """The time (Unix seconds), the runs and which of them are live, and the silences.

    ``last_word``: nobody will plan for these alerts soon, so that none waits, for others of its group or to settle.
    ``cause`` says what most likely set a kind of failure of a run off, by what was known at a step (None: by now), if
    that is known.
    """

    now: float
    runs: Mapping[str, RunInfo]
    live: frozenset[str] = frozenset()
    silences: Sequence[Silence] = ()
    last_word: bool = False
    cause: Callable[[str, str, int | None], Cause | None] = lambda run_id, kind, at: None  # noqa: ARG005


@dataclass(frozen=True, slots=True)
class Plan:
    """Messages to write, and what is due but kept back: (notice, why)."""

    messages: tuple[OutboxMessage, ...] = ()
    kept: tuple[tuple[Notice, str], ...] = field(default=())


def plan(ledger: Ledger, policy: Policy, scene: Scene, dashboard_url: str = "") -> Plan:
    """What to write of the ledger's alerts. Alerts of rules that ``policy`` does not have are left alone."""
    telling = Telling(ledger.messages)
    cases = list(_cases(ledger, policy, scene))
    inhibited = _inhibited(cases, policy, scene)
    told: list[Notice] = []
    kept: list[tuple[Notice, str]] = []
    for case in cases:
        for notice in due(case, telling, scene.now):
            why = kept_back(notice, policy, scene.silences, inhibited, scene.now)
            kept.append((notice, why)) if why else told.append(notice)
    awaited = [notice for notice, why in kept if why == WAITING]
    joining = awaited if scene.last_word else _joining(told, awaited, policy)
    groups = _grouped([*told, *joining], policy, telling)
    messages = tuple(_message(group, telling, ledger.alerts, scene, dashboard_url) for group in groups)
    return Plan(messages, tuple(pair for pair in kept if pair[0] not in joining))


def _cases(ledger: Ledger, policy: Policy, scene: Scene) -> Iterator[Case]:
    taken = {acknowledgement.alert_id: acknowledgement for acknowledgement in ledger.acknowledgements}
    for alert in sorted(ledger.alerts, key=lambda a: (-a.severity.rank, a.onset_step, a.rule, a.kind, a.alert_id)):
        rule, run = policy.rule(alert.rule), scene.runs.get(alert.run_id)
        if rule is not None and run is not None:
            yield Case(alert, rule, run, run.run_id in scene.live, taken.get(alert.alert_id))


def _heard(case: Case) -> bool:
    """An alert that tells nobody keeps nobody else from being told."""
    return bool(case.rule.channels or case.rule.escalate_to)


def _inhibited(cases: Sequence[Case], policy: Policy, scene: Scene) -> dict[str, str]:
    """Alert id -> words, of those whose cause fires or has only just ended. What waits itself keeps nobody back."""
    settles = _settling(cases, policy, scene)
    firing = [each.alert for each in cases if _heard(each) and each.alert.state is AlertState.FIRING]
    causes = [alert for alert in firing if alert.alert_id not in settles]
    kept = inhibitors([case.alert for case in cases], causes, policy.inhibitions)
    return settles | {key: f"inhibited by {cause.kind} since step {cause.onset_step}" for key, cause in kept.items()}


def _settling(cases: Sequence[Case], policy: Policy, scene: Scene) -> dict[str, str]:
    """Those whose cause has only just ended; a run that goes no further has no steps to wait for."""
    over = ended(case.alert for case in cases if _heard(case))
    waiting = [] if scene.last_word else [c for c in cases if c.live and c.alert.state is AlertState.FIRING]
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


def _grouped(notices: Sequence[Notice], policy: Policy, telling: Telling) -> list[list[Notice]]:
    """Notices that make one message; of what was told together, the end is told together."""
    groups: dict[tuple[str, ...], list[Notice]] = {}
    for notice in sorted(notices, key=lambda n: (-n.severity.rank, n.case.alert.onset_step, n.case.alert.alert_id)):
        key = _group(notice, policy)
        if notice.event is AlertEvent.RESOLVED:
            key = (notice.event.value, notice.channel, telling.thread(notice.case.alert.alert_id, notice.channel))
        groups.setdefault(key, []).append(notice)
    return list(groups.values())


def _message(
    notices: list[Notice], telling: Telling, alerts: Sequence[Alert], scene: Scene, dashboard_url: str
) -> OutboxMessage:
    leading = notices[0].case.alert
    thread = telling.thread(leading.alert_id, notices[0].channel)
    sharing = {*telling.sharing(thread, notices[0].channel), *(notice.case.alert.alert_id for notice in notices)}
    firing = [alert for alert in alerts if alert.state is AlertState.FIRING]
    earlier = [a for a in firing if a.run_id == leading.run_id and a.onset_step < leading.onset_step]
    return message(
        notices,
        thread=thread,
        firing=sum(alert.alert_id in sharing for alert in firing),
        earlier=sorted(earlier, key=lambda alert: alert.onset_step)[:MOST_EARLIER],
        cause=_cause(notices[0], scene),
        dashboard_url=dashboard_url,
        now=scene.now,
    )


def _cause(leading: Notice, scene: Scene) -> Cause | None:
    """What set it off, by what was known when it was first said; by now, if it is said again."""
    if leading.event is AlertEvent.RESOLVED:
        return None
    case, first = leading.case, leading.event in (AlertEvent.FIRING, AlertEvent.ESCALATED)
    return scene.cause(case.run.run_id, case.alert.kind, case.alert.step if first else None)
