"""Small rows, read afresh at every look: runs, findings, events, commands, alerts, messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlwatch.alerts import silencing
from rlwatch.alerts.config import load_config
from rlwatch.alerts.rules import Policy
from rlwatch.errors import ConfigError
from rlwatch.records import Alert, Command, Event, Finding, OutboxMessage, RunInfo, Silence

from .door import store


def run(run_id: str) -> RunInfo:
    """One run. Raises ``RunNotFoundError``."""
    return store().run(run_id)


def runs_by_id() -> dict[str, RunInfo]:
    """Run id -> run, of all that can be read."""
    return {run.run_id: run for run in store().runs()}


def findings(run_id: str) -> list[Finding]:
    """Published findings, in order."""
    return store().findings(run_id)


def events(run_id: str) -> list[Event]:
    """Events, in order."""
    return store().events(run_id)


def commands(run_id: str) -> list[Command]:
    """Commands, oldest first."""
    return store().commands(run_id)


def last_values(run_id: str) -> dict[str, tuple[int, float]]:
    """Metric -> (step, value) as last recorded."""
    return store().last_values(run_id)


def alerts(run_id: str | None = None) -> list[Alert]:
    """Alerts of one run or of all, newest first."""
    return store().alerts(run_id)


def alerts_by_run() -> dict[str, list[Alert]]:
    """Run id -> its alerts, newest first."""
    grouped: dict[str, list[Alert]] = {}
    for alert in alerts():
        grouped.setdefault(alert.run_id, []).append(alert)
    return grouped


def outbox() -> list[OutboxMessage]:
    """Messages to the outside, oldest first."""
    return store().outbox()


def silences(now: float) -> list[Silence]:
    """Silences that last at ``now``, oldest first."""
    return [silence for silence in store().silences() if silence.until > now]


def standing(found: Sequence[Alert], runs: Mapping[str, RunInfo], now: float) -> dict[str, str]:
    """Alert id -> why it is quiet though it fires. Where ``rlwatch.toml`` cannot be read, the usual rules apply."""
    try:
        policy = load_config(store_root=getattr(store(), "root", None)).policy
    except ConfigError:
        policy = Policy()
    return silencing.quiet_reasons(
        found, policy, now, runs=runs, acknowledgements=store().acknowledgements(), silences=silences(now)
    )
