"""Carrying out an action policy in a live run: alerts in, commands out, all of it on record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlwatch.alerts.engine import AlertEvent
from rlwatch.control.commands import request
from rlwatch.control.policy import Action, ActionHistory, action_key, action_refusal
from rlwatch.errors import RLWatchError, StoreBusyError
from rlwatch.monitor.engine import Outcome
from rlwatch.ports import CommandStore
from rlwatch.records import Alert

logger = logging.getLogger("rlwatch")

EVENT = "action"
"""Kind of the events that say what a policy did, would have done, or did not do and why."""
TOLD = (AlertEvent.FIRING, AlertEvent.ESCALATED)

Record = Callable[..., None]
"""``Run.event``."""


@dataclass(slots=True)
class Acting:
    """Listens to a run (:meth:`rlwatch.run.Run.listen`) on the writer thread, and asks what ``actions`` permit.

    A store that is busy is asked again with the next outcome; until then the wish waits here. Why an action was refused
    is recorded once for each alert: one that gets worse is refused again for the same reason.
    """

    actions: Sequence[Action]
    store: CommandStore
    run_id: str
    record: Record
    _tried: dict[str, ActionHistory] = field(default_factory=dict)
    _waiting: list[tuple[Action, Alert]] = field(default_factory=list)
    _refused: set[tuple[str, str, str]] = field(default_factory=set)

    def __call__(self, outcome: Outcome) -> None:
        """Take notice of what was found and which alerts changed."""
        fired = [t.alert for t in outcome.transitions if t.reason.event in TOLD]
        wishes = [(action, alert) for alert in fired for action in self.actions if action.concerns(alert)]
        wishes, self._waiting = [*self._waiting, *wishes], []
        for action, alert in wishes:
            self._decide(action, alert)

    def _decide(self, action: Action, alert: Alert) -> None:
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
        if why_not is None or self._is_news(action, alert, why_not):
            self._tell(action, alert, why_not)

    def _is_news(self, action: Action, alert: Alert, why_not: str) -> bool:
        refused = (action.name, alert.alert_id, why_not)
        known = refused in self._refused
        self._refused.add(refused)
        return not known

    def _past(self, action: Action) -> ActionHistory:
        if action.dry_run:
            return self._tried.get(action.name, ActionHistory())
        return ActionHistory.of(action, self.store.commands(self.run_id))

    def _ask(self, action: Action, alert: Alert) -> None:
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

    def _tell(self, action: Action, alert: Alert, why_not: str | None) -> None:
        outcome = "refused" if why_not else "dry run" if action.dry_run else "requested"
        body: dict[str, Any] = {"action": action.name, "do": action.do, "args": dict(action.args), "outcome": outcome}
        if why_not:
            body["why_not"] = why_not
        self.record(EVENT, alert.step, **body, alert=alert.alert_id, kind_of_alert=alert.kind)
        logger.info("action %s (%s) upon %s at step %d: %s", action.name, action.do, alert.kind, alert.step, outcome)
