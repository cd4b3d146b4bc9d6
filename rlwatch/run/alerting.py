"""Alerting of a live run: its rules and channels, the log of its own process, and its automatic actions."""

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
    """Alerting of a run: its rules, notification channels and permitted actions.

    Parameters
    ----------
    policy
        Alert rules and their settings.
    notifiers
        Name -> notification channel; without any, alerts are only recorded and logged.
    dashboard_url
        Address of the dashboard, for links in messages; empty: none.
    actions
        Commands that alerts may send without a user.
    rescue
        Permission to save a failing run; None: not permitted.
    map
        Role of a metric, such as ``reward`` -> names that the user's logs have for it, from ``[map]`` of the
        configuration.
    """

    policy: AlertingConfig = field(default_factory=AlertingConfig)
    notifiers: Mapping[str, Notifier] = field(default_factory=dict)
    dashboard_url: str = ""
    actions: tuple[PermittedAction, ...] = ()
    rescue: RescuePolicy | None = None
    map: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Alert rules that apply to the run."""
        return self.policy.rules

    def with_forecast(self, wanted: bool | None) -> Alerting:
        """Return a copy with forecasting on or off; ``wanted`` None: unchanged. Raises ``ConfigError`` if it is not a
        bool.
        """
        if wanted is None:
            return self
        if not isinstance(wanted, bool):
            raise ConfigError(f"forecast must be True, False or None, got {wanted!r}")
        return replace(self, policy=replace(self.policy, forecast=wanted))

    def dispatcher(
        self, store: Store, *, clock: Clock | None = None, live: Callable[[RunInfo], bool] = lambda _: True
    ) -> Dispatcher:
        """Return a dispatcher, which writes messages about alerts of the store's runs into the outbox.

        It also queues messages for channels that only another process has. ``live`` returns whether a run is alive.
        """
        from rlwatch.alerts.dispatch import Dispatcher  # with all of diagnosis: the judge\'s thread loads it

        return Dispatcher(store, self.policy, dashboard_url=self.dashboard_url, clock=clock, live=live)

    def start(self, store: Store, failed: Callable[[BaseException], object] | None = None) -> DeliveryThread | None:
        """Start the thread that sends the store's queued messages, and return it; None if there is no channel.

        ``failed`` is called with each error of the thread.
        """
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
    """Return how a run alerts, from the arguments, ``rlwatch.toml`` and the environment, in this order of precedence.

    Parameters
    ----------
    config_file
        Configuration file; None: the one that is found.
    webhook_url
        Address of a webhook; None: from the configuration or ``RLWATCH_WEBHOOK_URL``.
    rules
        Alert rules that replace all others; None: those of the configuration.
    store
        Store of the run: a file inside it is data and no configuration.

    Raises
    ------
    ConfigError
        For a wrong setting, or a missing extra that the configured alerting needs.
    """
    config = load_config(config_file, store_root=getattr(store, "root", None), webhook_url=webhook_url)
    for warning in (config.refused, *config.warnings):
        _warn_once(warning)
    policy = config.policy if rules is None else replace(config.policy, rules=tuple(rules))
    return Alerting(
        policy,
        build_notifiers(config, console=False),
        config.dashboard_url,
        actions_of(config),
        rescue_of(config),
        config.map,
    )


def _warn_once(text: str) -> None:
    if text and text not in _logged_once:
        _logged_once.add(text)
        logger.warning("%s", text)


def rescue_of(config: Config) -> RescuePolicy | None:
    """Return the permission to save a failing run that the configuration gives; None without one.

    Raises ``ConfigError`` with the file and the error.
    """
    try:
        return next((RescuePolicy(**table) for table in config.rescue), None)
    except ConfigError as error:
        raise ConfigError(f"{config.path}: {error}") from None


def actions_of(config: Config) -> tuple[PermittedAction, ...]:
    """Return the commands that the configuration permits without a user. Raises ``ConfigError`` with the file and the
    error.
    """
    try:
        actions = tuple(PermittedAction(**table) for table in config.actions)
    except ConfigError as error:
        raise ConfigError(f"{config.path}: {error}") from None
    names = [action.name for action in actions]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{config.path}: actions: more than one is named {twice[0]!r}")
    return actions


# The log of the run's process: alerts that would be sent, and the number of those held back.


class OwnLog:
    """Listener of a run that logs its alerts in the run's own process at once, regardless of quiet hours and channels.

    Inhibited and silenced alerts are held back; one line gives their number and the reason. They are logged as soon as
    nothing holds them back, if they still fire then; messages, in contrast, wait some time longer. The end of an alert
    is logged only if its beginning was.

    Parameters
    ----------
    policy
        Alert rules and their settings.
    run
        The run.
    silences
        Returns the silences (periods without notifications); called only when there is an alert to log.
    """

    def __init__(self, policy: AlertingConfig, run: RunInfo, silences: Callable[[], Sequence[Silence]]) -> None:
        self._policy = policy
        self._run = run
        self._silences = silences
        self._firing: dict[str, Alert] = {}
        self._logged: set[str] = set()
        self._held: dict[str, Transition] = {}

    def __call__(self, outcome: MonitorOutcome) -> None:
        """Log the alerts that changed, step by step: an alert that fires at a step may hold back
        others of that step.
        """
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
            known = self._firing.get(alert.alert_id, alert)  # an eased alert still holds others back
            self._firing[alert.alert_id] = known if known.severity.rank > alert.severity.rank else alert
        else:
            self._firing.pop(alert.alert_id, None)
            self._held.pop(alert.alert_id, None)

    def _reasons(self, due: Sequence[Transition]) -> dict[str, str]:
        """Return the reasons to hold alerts back, by alert id."""
        from rlwatch.alerts.dispatch import silenced  # with all of diagnosis, as above
        from rlwatch.alerts.messages import AlertCase, Notification

        alerts, heard = [t.alert for t in due], [a for a in self._firing.values() if self._is_sent(a)]
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

    def _is_sent(self, alert: Alert) -> bool:
        rule = self._policy.rule(alert.rule)
        return rule is not None and bool(rule.channels or rule.escalate_to)


def _line_of(transition: Transition) -> str:
    alert, eased = transition.alert, transition.event is AlertEvent.EASED
    word = AlertEvent.EASED.value if eased else alert.state.value
    text = alert.reason if (eased or alert.state is AlertState.RESOLVED) and alert.reason else alert.message
    return f"{word} {alert.severity.value} {alert.kind} at step {alert.step}: {text}"


# Actions: turn alerts into commands, and record each decision.

ACTION_EVENT = "action"
"""Kind of the events that record what an automatic action did, would have done, or was refused, and why."""
ACTED_UPON = (AlertEvent.FIRING, AlertEvent.ESCALATED)

Record = Callable[..., None]
"""Type of ``Run.event``."""


@dataclass(slots=True)
class Acting:
    """Listener of a run (:meth:`rlwatch.run.Run.listen`) that sends the commands of permitted actions when alerts fire.

    It runs on the writer thread. If the store is busy, the command waits for the next call. The reason that an action
    was refused is recorded once for each alert, also if the alert worsens and the action is refused again.

    Parameters
    ----------
    actions
        Commands that may be sent without a user.
    store, run_id
        Store of the commands, and id of the run.
    record
        Records an event of the run.
    """

    actions: Sequence[PermittedAction]
    store: CommandStore
    run_id: str
    record: Record
    _tried: dict[str, ActionHistory] = field(default_factory=dict)
    _waiting: list[tuple[PermittedAction, Alert]] = field(default_factory=list)
    _refused: set[tuple[str, str, str]] = field(default_factory=set)

    def __call__(self, outcome: MonitorOutcome) -> None:
        """Send, or refuse and record, the commands for alerts that fired or got worse."""
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
