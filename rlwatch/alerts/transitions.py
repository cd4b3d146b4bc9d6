"""What the alert engine says: an alert, and the reason it was or was not told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlwatch.alerts.rules import Rule
from rlwatch.records import Alert


class AlertEvent(StrEnum):
    """What a receiver is told."""

    FIRING = "firing"
    ESCALATED = "escalated"
    """It got worse."""
    REPEATED = "repeated"
    """It still fires, and nobody has acknowledged it."""
    UNACKNOWLEDGED = "unacknowledged"
    """Nobody has acknowledged it for as long as the rule allows: others are told, or at a higher severity."""
    RESOLVED = "resolved"


class Reason(StrEnum):
    """Why the engine decided as it did. Those that end in ``_silent`` change nothing."""

    FIRST_PENDING = "first_pending"
    """The condition began to hold; the rule asks for more steps."""
    PENDING_SILENT = "pending_silent"
    """It still holds, not yet for long enough."""
    CONDITION_GONE = "condition_gone"
    """It ceased to hold before the alert fired: nobody was told, nobody will be."""
    FIRED_AT_ONCE = "fired_at_once"
    """The rule asks for no patience."""
    HELD_FOR = "held_for"
    """It has held for as long as the rule asks."""
    STILL_FIRING_SILENT = "still_firing_silent"
    """Known already: this episode was told at this severity."""
    ESCALATED = "escalated"
    """It became worse than what was told."""
    KEPT_FIRING_SILENT = "kept_firing_silent"
    """The condition is gone, not yet for as long as the rule asks."""
    RESOLVED = "resolved"
    """The condition has been gone for as long as the rule asks."""

    @property
    def event(self) -> AlertEvent | None:
        """What receivers are told, None if nothing."""
        return _EVENTS.get(self)

    @property
    def changes(self) -> bool:
        """Whether the alert is now something else than before."""
        return not self.value.endswith("_silent")


_EVENTS = {
    Reason.FIRED_AT_ONCE: AlertEvent.FIRING,
    Reason.HELD_FOR: AlertEvent.FIRING,
    Reason.ESCALATED: AlertEvent.ESCALATED,
    Reason.RESOLVED: AlertEvent.RESOLVED,
}


@dataclass(frozen=True, slots=True)
class Transition:
    """An alert as it is now and why. ``ts`` is the time given with the step: a stamp, never evaluated."""

    alert: Alert
    reason: Reason
    rule: Rule
    ts: float = 0.0

    @property
    def event(self) -> AlertEvent | None:
        """What receivers are told, None if nothing."""
        return self.reason.event

    @property
    def notify(self) -> bool:
        """Whether receivers are told: there is something to tell, and the rule names somebody."""
        return self.reason.event is not None and bool(self.rule.channels)
