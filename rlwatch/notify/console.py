"""Alerts on this process's own log."""

from __future__ import annotations

import logging

from rlwatch.notify.encode import one_line
from rlwatch.ports import Delivery
from rlwatch.records import OutboxMessage

LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}


class ConsoleNotifier:
    """Writes one line to the logger ``rlwatch``: what ends, and info, as INFO; critical as ERROR.

    Parameters
    ----------
    name
        The channel.
    """

    def __init__(self, *, name: str = "console") -> None:
        self.name = name
        self._logger = logging.getLogger("rlwatch")

    def __repr__(self) -> str:
        return f"ConsoleNotifier(name={self.name!r})"

    def deliver(self, message: OutboxMessage) -> Delivery:
        """Log it."""
        payload = message.payload
        alert = payload.get("alert") or {}
        resolved = payload.get("event") == "resolved"
        level = logging.INFO if resolved else LEVELS.get(alert.get("severity", ""), logging.WARNING)
        self._logger.log(level, "%s", one_line(str(payload.get("text", ""))), extra={"message_id": message.message_id})
        return Delivery(ok=True, reason="logged")
