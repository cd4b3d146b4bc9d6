"""How long an alert that its cause kept back stays quiet after the cause is over. Pure.

An alert outlives its condition by ``keep_firing_for`` steps, so that "still firing" says nothing at the moment the
cause ends. Only what fires when these steps have passed, too, held without the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlwatch.alerts.policy import Inhibition
from rlwatch.alerts.rules import Rule
from rlwatch.records import Alert, AlertState


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
