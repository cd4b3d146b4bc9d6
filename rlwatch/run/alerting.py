"""How a run alerts: its rules, its channels, and the thread that delivers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlwatch.alerts.config import build_notifiers, load_config
from rlwatch.alerts.messages import messages_for
from rlwatch.alerts.rules import Rule
from rlwatch.alerts.transitions import Transition
from rlwatch.ports import Notifier, Store
from rlwatch.records import OutboxMessage, RunInfo

if TYPE_CHECKING:
    from rlwatch.alerts.delivery import DeliveryThread

CONSOLE = "console"


@dataclass(frozen=True, slots=True)
class Alerting:
    """Rules to judge by and channels to tell; no channels means that alerts are recorded and logged only."""

    rules: tuple[Rule, ...]
    notifiers: Mapping[str, Notifier] = field(default_factory=dict)
    dashboard_url: str = ""

    def compose(self, transition: Transition, run: RunInfo, now: float) -> list[OutboxMessage]:
        """Messages to queue: also for channels this process lacks, which another may have.

        Not for the console: a process logs its own alerts, at once.
        """
        messages = messages_for(transition, run, dashboard_url=self.dashboard_url, now=now)
        return [message for message in messages if message.channel != CONSOLE]

    def start(self, store: Store) -> DeliveryThread | None:
        """Begin to deliver what the store's outbox holds, if there is a channel to deliver to."""
        if not self.notifiers:
            return None
        from rlwatch.alerts.delivery import DeliveryThread

        thread = DeliveryThread(store, self.notifiers)
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
    chosen = tuple(config.rules if rules is None else rules)
    return Alerting(chosen, build_notifiers(config, console=False), config.dashboard_url)
