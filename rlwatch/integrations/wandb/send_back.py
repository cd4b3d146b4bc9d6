"""Telling wandb what rlwatch found.

It is said on the thread that logs, just before a row of its own and into the same row (``commit=False``): wandb is
used from no other thread, its step counter moves as it would have, and no row is added.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from rlwatch.control.policy import Health
from rlwatch.monitor import Outcome
from rlwatch.records import Alert, AlertState, Severity
from rlwatch.run import Run

LEVELS = {Severity.INFO: "INFO", Severity.WARNING: "WARN", Severity.CRITICAL: "ERROR"}
"""wandb's names for severities."""
TITLE = 63
"""wandb's titles are shorter than 64 characters."""

Log = Callable[..., None]


class SendBack:
    """Turns firing alerts into ``wandb.alert`` and what holds into metrics of wandb.

    ``rlwatch/<kind>`` is 1, 2, 3 while a finding of that kind holds as info, warning, critical, and 0 after.
    ``forecast/p50`` and its kin are the newest forecast, once each, in the row that follows: it is of the step before.

    Parameters
    ----------
    run
        Ours, which finds.
    theirs
        wandb's run.
    log
        wandb's ``Run.log``, not mirrored.
    """

    def __init__(self, run: Run, theirs: Any, log: Log) -> None:
        self._run = run
        self._theirs = theirs
        self._log = log
        self._alerts: deque[Alert] = deque()
        self._kinds: set[str] = set()
        self._foretold: int | None = None
        run.listen(self._hear)

    def row(self, step: Any) -> None:
        """A row is about to be given to wandb, with this ``step=`` (or None)."""
        health = self._run.health()
        said = {**self._levels(health), **self._forecast(health)}
        if said:
            self._log(self._theirs, said, step=step, commit=False)
        self.alerts()

    def alerts(self) -> None:
        """Say the alerts not said yet."""
        while self._alerts:
            alert = self._alerts.popleft()
            title = f"rlwatch: {alert.kind} since step {alert.onset_step}"[:TITLE]
            self._theirs.alert(title=title, text=alert.message, level=LEVELS[alert.severity])

    def _forecast(self, health: Health) -> dict[str, float]:
        if health.forecast is None or health.forecast.step == self._foretold:
            return {}
        self._foretold = health.forecast.step
        return health.forecast.metrics

    def _levels(self, health: Health) -> dict[str, int]:
        worst: dict[str, int] = {}
        for finding in health.findings:
            worst[finding.kind] = max(worst.get(finding.kind, 0), finding.severity.rank + 1)
        self._kinds.update(worst)
        return {f"rlwatch/{kind}": worst.get(kind, 0) for kind in sorted(self._kinds)}

    def _hear(self, outcome: Outcome) -> None:
        """On the writer thread: remember what fires."""
        self._alerts.extend(
            transition.alert
            for transition in outcome.transitions
            if transition.notify and transition.alert.state is AlertState.FIRING
        )
