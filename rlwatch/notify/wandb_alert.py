"""A notification channel that raises alerts on the wandb run of this process; wandb mails them or
posts them to Slack.
"""

from __future__ import annotations

import sys
from typing import Any

from rlwatch.notify.http import raised_quietly
from rlwatch.notify.payload import chat_text, headline, shortened
from rlwatch.ports import Delivery
from rlwatch.records import OutboxMessage

LEVELS = {"info": "INFO", "warning": "WARN", "critical": "ERROR"}
LIMIT = 3000
TITLE = 60
"""Largest length of a title: wandb accepts fewer than 64 characters."""
AT_ONCE_S = 0.001
"""Seconds between two alerts of one title: wandb drops repeats for a minute by default, and ignores a wait of 0."""


class WandbNotifier:
    """Notification channel that passes messages to ``wandb.run.alert``, which sends them from wandb's own process.

    A message is delivered once wandb accepted it. Without a live wandb run (as in ``rlwatch watch``) messages are left
    to the process that has one. This class never imports wandb itself.

    Parameters
    ----------
    name
        Name of the channel.
    """

    def __init__(self, *, name: str = "wandb") -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"WandbNotifier(name={self.name!r})"

    def present(self) -> bool:
        """Return whether this process has a live wandb run, so that messages can be sent from here."""
        return _live_run() is not None

    def deliver(self, message: OutboxMessage) -> Delivery:
        """Raise the message as an alert on the live wandb run and return the outcome."""
        run = _live_run()
        if run is None:
            return Delivery(ok=False, reason="no wandb run is live in this process")
        error = raised_quietly(_alert, run, message)
        if error is not None:
            return Delivery(ok=False, reason=f"wandb raised {type(error).__name__}")
        return Delivery(ok=True, reason="wandb took it")


def _alert(run: Any, message: OutboxMessage) -> None:
    payload = message.payload
    alert = payload.get("alert") or {}
    over = payload.get("event") == "resolved"
    level = "INFO" if over else LEVELS.get(str(alert.get("severity")), "WARN")
    text = chat_text(payload, message.message_id, LIMIT)
    title = shortened(headline(payload), TITLE)
    run.alert(title=title, text=text, level=level, wait_duration=AT_ONCE_S)


def _live_run() -> Any:
    """Return the wandb run of this process; None where the trainer has none."""
    return getattr(sys.modules.get("wandb"), "run", None)
