"""How a run alerts: its rules, its channels, and the thread that delivers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rlwatch.alerts.config import Config, build_notifiers, load_config
from rlwatch.alerts.rules import Policy, Rule
from rlwatch.clock import Clock
from rlwatch.control.policy import Action
from rlwatch.errors import ConfigError
from rlwatch.ports import Notifier, Store
from rlwatch.records import RunInfo

if TYPE_CHECKING:
    from rlwatch.alerts.dispatch import Dispatcher
    from rlwatch.alerts.outbox import DeliveryThread

logger = logging.getLogger("rlwatch")
_said: set[str] = set()


@dataclass(frozen=True, slots=True)
class Alerting:
    """What to judge and tell by, and channels to tell; no channels means that alerts are recorded and logged only."""

    policy: Policy = field(default_factory=Policy)
    notifiers: Mapping[str, Notifier] = field(default_factory=dict)
    dashboard_url: str = ""
    actions: tuple[Action, ...] = ()

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules to judge by."""
        return self.policy.rules

    def dispatcher(
        self, store: Store, *, clock: Clock | None = None, live: Callable[[RunInfo], bool] = lambda _: True
    ) -> Dispatcher:
        """Where alerts of the store's runs are put down: messages are also written for channels this process
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
    _say_once(config.refused)
    policy = config.policy if rules is None else replace(config.policy, rules=tuple(rules))
    return Alerting(policy, build_notifiers(config, console=False), config.dashboard_url, actions_of(config))


def _say_once(refused: str) -> None:
    if refused and refused not in _said:
        _said.add(refused)
        logger.warning("%s", refused)


def actions_of(config: Config) -> tuple[Action, ...]:
    """What the file permits to be done without asking. Raises ``ConfigError`` naming the file and what is wrong."""
    try:
        actions = tuple(Action(**table) for table in config.actions)
    except ConfigError as error:
        raise ConfigError(f"{config.path}: {error}") from None
    names = [action.name for action in actions]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{config.path}: actions: more than one is named {twice[0]!r}")
    return actions
