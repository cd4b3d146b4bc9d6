"""What a run's own process logs of its alerts: what people would be told, and how much of it is held back."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby

from rlwatch.alerts.dispatch import silenced
from rlwatch.alerts.engine import AlertEvent, Transition
from rlwatch.alerts.messages import Case, Notice
from rlwatch.alerts.rules import Policy, inhibitors
from rlwatch.errors import StoreError
from rlwatch.monitor.engine import Outcome
from rlwatch.records import Alert, AlertState, RunInfo, Silence

logger = logging.getLogger("rlwatch")


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

    def __init__(self, policy: Policy, run: RunInfo, silences: Callable[[], Sequence[Silence]]) -> None:
        self._policy = policy
        self._run = run
        self._silences = silences
        self._firing: dict[str, Alert] = {}
        self._logged: set[str] = set()
        self._held: dict[str, Transition] = {}

    def __call__(self, outcome: Outcome) -> None:
        """Take what changed, step by step: what fires at a step may hold back others of it."""
        news = Counter[str]()
        for _, changed in groupby(outcome.transitions, key=lambda transition: transition.alert.step):
            news += self._step(list(changed))
        if news:
            count = news.total()
            why = "; ".join(f"{many} {reason}" if len(news) > 1 else reason for reason, many in news.items())
            logger.info("%d alert%s held back: %s (rlwatch alerts lists all)", count, "s" * (count > 1), why)

    def _step(self, changed: list[Transition]) -> Counter[str]:
        for transition in changed:
            self._follow(transition)
        told = {t.alert.alert_id: t for t in changed if t.notify}
        due = told | {key: t for key, t in self._held.items() if key not in told}
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
                logger.log(logging.INFO if over else logging.WARNING, "%s", _words(transition.alert))
        return new

    def _follow(self, transition: Transition) -> None:
        alert = transition.alert
        if alert.state is AlertState.FIRING:
            self._firing[alert.alert_id] = alert
        else:
            self._firing.pop(alert.alert_id, None)
            self._held.pop(alert.alert_id, None)

    def _reasons(self, due: Sequence[Transition]) -> dict[str, str]:
        """Alert id -> why it is held back."""
        alerts, heard = [t.alert for t in due], [a for a in self._firing.values() if self._tells(a)]
        causes = inhibitors(alerts, heard, self._policy.inhibitions)
        silences: Sequence[Silence] = ()
        with suppress(StoreError):
            silences = self._silences()
        reasons = {}
        for transition in due:
            alert = transition.alert
            cause = causes.get(alert.alert_id)
            case = Case(alert, transition.rule, self._run, live=True)
            why = silenced(Notice(case, AlertEvent.FIRING, "", alert.severity, ""), silences, time.time())
            if cause is not None and alert.state is AlertState.FIRING:
                why = f"inhibited by {cause.kind} since step {cause.onset_step}"
            if why:
                reasons[alert.alert_id] = why
        return reasons

    def _tells(self, alert: Alert) -> bool:
        rule = self._policy.rule(alert.rule)
        return rule is not None and bool(rule.channels or rule.escalate_to)


def _words(alert: Alert) -> str:
    return f"{alert.state.value} {alert.severity.value} {alert.kind} at step {alert.step}: {alert.message}"
