"""What ``--config`` names, or the ``rlwatch.toml`` of this directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlwatch.alerts.rules import Rule
    from rlwatch.ports import Store
    from rlwatch.run.alerting import Alerting


def rules_of(config: Path | None) -> Sequence[Rule]:
    """The rules of the file, the default rules where there is none. Raises ``ConfigError``."""
    from rlwatch.alerts.config import load_config

    return load_config(config).rules


def alerting_of(config: Path | None, store: Store) -> Alerting:
    """Rules and channels as a trainer that uses ``store`` here would have them. Raises ``ConfigError``."""
    from rlwatch.run.alerting import alerting_for

    return alerting_for(config_file=config, webhook_url=None, rules=None, store=store)
