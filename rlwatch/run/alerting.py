"""Alerting of a live run: its rules and channels, its own log, and the actions it may take by itself."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rlwatch.alerts.config import Config, build_notifiers, load_config
from rlwatch.alerts.engine import AlertEvent, Transition
from rlwatch.alerts.rules import AlertingConfig, Rule, inhibitors
from rlwatch.clock import Clock
from rlwatch.control.commands import request
from rlwatch.control.policy import ActionHistory, PermittedAction, action_key, action_refusal
from rlwatch.control.rescue import RescuePolicy
from rlwatch.errors import ConfigError, RLWatchError, StoreBusyError, StoreError
from rlwatch.ports import CommandStore, Notifier, Store
from rlwatch.records import Alert, AlertState, RunInfo, Silence

if TYPE_CHECKING:
    from rlwatch.alerts.dispatch import Dispatcher
    from rlwatch.alerts.outbox import DeliveryThread
    from rlwatch.monitor.step_judge import MonitorOutcome


logger = logging.getLogger("rlwatch")
_logged_once: set[str] = set()


@dataclass(frozen=True, slots=True)
class Alerting:
    """Policy to judge and notify by, and channels; no channels means that alerts are recorded and logged only.

    ``map``: role -> names of metrics that have it, as ``[map]`` of the configuration says.
    """

    policy: AlertingConfig = field(default_factory=AlertingConfig)
    notifiers: Mapping[str, Notifier] = field(default_factory=dict)
    dashboard_url: str = ""
    actions: tuple[PermittedAction, ...] = ()
    rescue: RescuePolicy | None = None
    map: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules to judge by."""
        return self.policy.rules

    def with_forecast(self, wanted: bool | None) -> Alerting:
        """The same, but forecasting as ``wanted``; None: as it is. Raises ``ConfigError`` for what is no bool."""
        if wanted is None:
            return self
        if not isinstance(wanted, bool):
            raise ConfigError(f"forecast must be True, False or None, got {wanted!r}")
        return replace(self, policy=replace(self.policy, forecast=wanted))

    def dispatcher(
        self, store: Store, *, clock: Clock | None = None, live: Callable[[RunInfo], bool] = lambda _: True
    ) -> Dispatcher:
        """Dispatcher of the alerts of the store's runs: messages are also written for channels this process
        lacks, which another may have.
        """
        from rlwatch.alerts.dispatch import Dispatcher  # with all of diagnosis: the judge\'s thread loads it

        return Dispatcher(store, self.policy, dashboard_url=self.dashboard_url, clock=clock, live=live)

    def start(self, store: Store, failed: Callable[[BaseException], object] | None = None) -> DeliveryThread | None:
        """Begin to deliver what the store's outbox holds, if there is a channel; ``failed`` is told what goes wrong."""
        if not self.notifiers:
            return None
        from rlwatch.alerts.outbox import DeliveryThread

        thread = DeliveryThread(store, self.notifiers, failed=failed)
        thread.start()
        return thread


def alerting_for(
    *,
    config_file: str | os.PathLike[str] | None,
    webhook_url: str | None,
    rules: Sequence[Rule] | None,
    store: Store,
) -> Alerting:
    """From what the caller, ``rlwatch.toml`` and the environment say; the caller wins, then the file.

    Raises
    ------
    ConfigError
        For a wrong setting, or a missing extra: alerting that was asked for must work.
    """
    config = load_config(config_file, store_root=getattr(store, "root", None), webhook_url=webhook_url)
    for said in (config.refused, *config.warnings):
        _say_once(said)
    policy = config.policy if rules is None else replace(config.policy, rules=tuple(rules))
    return Alerting(
        policy,
        build_notifiers(config, console=False),
        config.dashboard_url,
        actions_of(config),
        rescue_of(config),
        config.map,
    )


def _say_once(said: str) -> None:
    if said and said not in _logged_once:
        _logged_once.add(said)
        logger.warning("%s", said)


def rescue_of(config: Config) -> RescuePolicy | None:
    """Rescue that the file permits without asking. Raises ``ConfigError`` naming the file and what is wrong."""
    try:
        return next((RescuePolicy(**table) for table in config.rescue), None)
    except ConfigError as error:
        raise ConfigError(f"{config.path}: {error}") from None


def actions_of(config: Config) -> tuple[PermittedAction, ...]:
    """Actions that the file permits without asking. Raises ``ConfigError`` naming the file and what is wrong."""
    try:
        actions = tuple(PermittedAction(**table) for table in config.actions)
    except ConfigError as error:
        raise ConfigError(f"{config.path}: {error}") from None
    names = [action.name for action in actions]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{config.path}: actions: more than one is named {twice[0]!r}")
    return actions


# The log of the run's own process: alerts that would be notified, and how many are held back.


class OwnLog:
    """Logs alerts at once, as a listener of a run: a log wakes nobody, so that quiet hours and channels do not matter.

    Inhibited and silenced ones are held back: one line says how many and why. They are logged when nothing holds them
    back any more, if they fire then; not, as a message would, only after a while without their cause. What was never
    logged is not logged to be over.

    Parameters
    ----------
    silences
        Those that apply; asked only when there is something to log.
    """

    def __init__(self, policy: AlertingConfig, run: RunInfo, silences: Callable[[], Sequence[Silence]]) -> None:
        self._policy = policy
        self._run = run
        self._silences = silences
        self._firing: dict[str, Alert] = {}
        self._logged: set[str] = set()
        self._held: dict[str, Transition] = {}

    def __call__(self, outcome: MonitorOutcome) -> None:
        """Take what changed, step by step: what fires at a step may hold back others of it."""
        held_now = Counter[str]()
        for _, changed in groupby(outcome.transitions, key=lambda transition: transition.alert.step):
            held_now += self._step(list(changed))
        if held_now:
            count = held_now.total()
            why = "; ".join(f"{many} {reason}" if len(held_now) > 1 else reason for reason, many in held_now.items())
            logger.info("%d alert%s held back: %s (rlwatch alerts lists all)", count, "s" * (count > 1), why)

    def _step(self, changed: list[Transition]) -> Counter[str]:
        for transition in changed:
            self._follow(transition)
        due_now = {t.alert.alert_id: t for t in changed if t.notify}
        due = due_now | {key: t for key, t in self._held.items() if key not in due_now}
        reasons = self._reasons(list(due.values())) if due else {}
        known = {
            *self._held,
            *self._logged,
            *(t.alert.alert_id for t in due.values() if t.event is AlertEvent.RESOLVED),
        }
        new = Counter(why for key, why in reasons.items() if key not in known)
        for key, transition in due.items():
            over = transition.alert.state is AlertState.RESOLVED
            if key in reasons:
                if not over:
                    self._held[key] = transition
            elif not over or key in self._logged:
                self._held.pop(key, None)
                self._logged.add(key)
                better = over or transition.event is AlertEvent.EASED
                logger.log(logging.INFO if better else logging.WARNING, "%s", _line_of(transition))
        return new

    def _follow(self, transition: Transition) -> None:
        alert = transition.alert
        if alert.state is AlertState.FIRING:
            known = self._firing.get(alert.alert_id, alert)  # one that eased goes on to hold others back
            self._firing[alert.alert_id] = known if known.severity.rank > alert.severity.rank else alert
        else:
            self._firing.pop(alert.alert_id, None)
            self._held.pop(alert.alert_id, None)

    def _reasons(self, due: Sequence[Transition]) -> dict[str, str]:
        """Reasons to hold alerts back, by alert id."""
        from rlwatch.alerts.dispatch import silenced  # with all of diagnosis, as above
        from rlwatch.alerts.messages import AlertCase, Notification

        alerts, heard = [t.alert for t in due], [a for a in self._firing.values() if self._tells(a)]
        causes = inhibitors(alerts, heard, self._policy.inhibitions)
        silences: Sequence[Silence] = ()
        with suppress(StoreError):
            silences = self._silences()
        reasons = {}
        for transition in due:
            alert = transition.alert
            cause = causes.get(alert.alert_id)
            case = AlertCase(alert, transition.rule, self._run, live=True)
            why = silenced(Notification(case, AlertEvent.FIRING, "", alert.severity, ""), silences, time.time())
            if cause is not None and alert.state is AlertState.FIRING:
                why = f"inhibited by {cause.kind} since step {cause.onset_step}"
            if why:
                reasons[alert.alert_id] = why
        return reasons

    def _tells(self, alert: Alert) -> bool:
        rule = self._policy.rule(alert.rule)
        return rule is not None and bool(rule.channels or rule.escalate_to)


def _line_of(transition: Transition) -> str:
    alert, eased = transition.alert, transition.event is AlertEvent.EASED
    word = AlertEvent.EASED.value if eased else alert.state.value
    said = alert.reason if (eased or alert.state is AlertState.RESOLVED) and alert.reason else alert.message
    return f"{word} {alert.severity.value} {alert.kind} at step {alert.step}: {said}"


# Actions: alerts in, commands out, all of it on record.

ACTION_EVENT = "action"
"""Kind of the events that say what a policy did, would have done, or did not do and why."""
ACTED_UPON = (AlertEvent.FIRING, AlertEvent.ESCALATED)

Record = Callable[..., None]
"""``Run.event``."""


@dataclass(slots=True)
class Acting:
    """Listens to a run (:meth:`rlwatch.run.Run.listen`) on the writer thread, and asks what ``actions`` permit.

    A store that is busy is asked again with the next outcome; until then the wish waits here. Why an action was refused
    is recorded once for each alert: one that gets worse is refused again for the same reason.
    """

    actions: Sequence[PermittedAction]
    store: CommandStore
    run_id: str
    record: Record
    _tried: dict[str, ActionHistory] = field(default_factory=dict)
    _waiting: list[tuple[PermittedAction, Alert]] = field(default_factory=list)
    _refused: set[tuple[str, str, str]] = field(default_factory=set)

    def __call__(self, outcome: MonitorOutcome) -> None:
        """Take notice of what was found and which alerts changed."""
        fired = [t.alert for t in outcome.transitions if t.reason.event in ACTED_UPON]
        wishes = [(action, alert) for alert in fired for action in self.actions if action.concerns(alert)]
        wishes, self._waiting = [*self._waiting, *wishes], []
        for action, alert in wishes:
            self._decide(action, alert)

    def _decide(self, action: PermittedAction, alert: Alert) -> None:
        try:
            past = self._past(action)
            why_not = action_refusal(action, alert, past)
            if why_not is None and action.dry_run:
                self._tried[action.name] = past.more(alert.step)
            elif why_not is None:
                self._ask(action, alert)
        except StoreBusyError:
            self._waiting.append((action, alert))
            return
        except RLWatchError as error:
            why_not = str(error)
        if why_not is None or self._is_new(action, alert, why_not):
            self._record(action, alert, why_not)

    def _is_new(self, action: PermittedAction, alert: Alert, why_not: str) -> bool:
        refused = (action.name, alert.alert_id, why_not)
        known = refused in self._refused
        self._refused.add(refused)
        return not known

    def _past(self, action: PermittedAction) -> ActionHistory:
        if action.dry_run:
            return self._tried.get(action.name, ActionHistory())
        return ActionHistory.of(action, self.store.commands(self.run_id))

    def _ask(self, action: PermittedAction, alert: Alert) -> None:
        why = f"{alert.kind} since step {alert.onset_step}: {alert.message}"
        request(
            self.store,
            self.run_id,
            action.do,
            args=action.args,
            why=why,
            by=action.by,
            idempotency_key=action_key(action, alert),
        )

    def _record(self, action: PermittedAction, alert: Alert, why_not: str | None) -> None:
        outcome = "refused" if why_not else "dry run" if action.dry_run else "requested"
        body: dict[str, Any] = {"action": action.name, "do": action.do, "args": dict(action.args), "outcome": outcome}
        if why_not:
            body["why_not"] = why_not
        self.record(ACTION_EVENT, alert.step, **body, alert=alert.alert_id, kind_of_alert=alert.kind)
        logger.info("action %s (%s) upon %s at step %d: %s", action.name, action.do, alert.kind, alert.step, outcome)
