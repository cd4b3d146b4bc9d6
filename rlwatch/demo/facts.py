"""One look at the store: all that the person, the narrator and the checks ever know of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlwatch.errors import RunNotFoundError, StoreBusyError
from rlwatch.ports import Series, Store
from rlwatch.records import Alert, AlertState, Command, Event, Finding, OutboxMessage, RunInfo, Severity

REWARD, ENTROPY, KL, SILENT = "reward", "entropy", "kl", "frac_reward_zero_std"
"""TRL's names of what the demo is about."""
CURVES = (REWARD, ENTROPY, KL, SILENT)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the store holds of one run at one moment."""

    run: RunInfo
    curves: Mapping[str, Series]
    findings: tuple[Finding, ...] = ()
    alerts: tuple[Alert, ...] = ()
    commands: tuple[Command, ...] = ()
    events: tuple[Event, ...] = ()
    outbox: tuple[OutboxMessage, ...] = ()

    def values(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Values (N,) of a curve at the steps ``first <= step <= last``."""
        curve = self.curves[name]
        inside = (curve.steps >= first) & (curve.steps <= (np.inf if last is None else last))
        return curve.values[inside]

    def level(self, name: str, first: int = 0, last: int | None = None) -> float:
        """Median of a curve between two steps; NaN if nothing was measured there."""
        values = self.values(name, first, last)
        return float(np.median(values)) if len(values) else float("nan")

    @property
    def step(self) -> int:
        """The last step recorded."""
        steps = self.curves[REWARD].steps
        return int(steps[-1]) if len(steps) else 0

    def firing(self, severity: Severity) -> list[Alert]:
        """Alerts of this severity that fire now, oldest first."""
        return [a for a in reversed(self.alerts) if a.state is AlertState.FIRING and a.severity is severity]


def look(store: Store, run_id: str) -> Facts | None:
    """The facts now; None while the run has not begun or its files are held by somebody for a moment."""
    try:
        return Facts(
            run=store.run(run_id),
            curves=store.series(run_id, CURVES),
            findings=tuple(store.findings(run_id)),
            alerts=tuple(store.alerts(run_id)),
            commands=tuple(store.commands(run_id)),
            events=tuple(store.events(run_id)),
            outbox=tuple(store.outbox(run_id)),
        )
    except (RunNotFoundError, StoreBusyError):
        return None
