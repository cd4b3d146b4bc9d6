"""What a store holds already, and a resumed run says again because it relives its history."""

from __future__ import annotations

from rlwatch.monitor.engine import Outcome
from rlwatch.ports import Store
from rlwatch.records import Alert, AlertState, Finding

_STATES = (AlertState.PENDING, AlertState.FIRING, AlertState.RESOLVED)


class Told:
    """Findings and alerts of a run as they stood in the store when a process began to watch it."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._findings = {_identity(finding) for finding in store.findings(run_id)}
        self._forecast = max((record.seq for record in store.forecasts(run_id, last=1)), default=0)
        self._alerts = {alert.alert_id: _progress(alert) for alert in store.alerts(run_id)}

    def news(self, outcome: Outcome) -> Outcome:
        """The outcome without what is stored: findings, forecasts, and alerts that are stored as far along."""
        findings = tuple(finding for finding in outcome.findings if _identity(finding) not in self._findings)
        transitions = tuple(
            transition
            for transition in outcome.transitions
            if _progress(transition.alert) > self._alerts.get(transition.alert.alert_id, (-1, -1))
        )
        kept = tuple(record for record in outcome.kept if record.seq > self._forecast)
        self._findings.update(map(_identity, findings))  # rows left unjudged may be relived once more
        self._alerts.update({each.alert.alert_id: _progress(each.alert) for each in transitions})
        self._forecast = max([self._forecast, *(record.seq for record in kept)])
        return Outcome(findings, transitions, outcome.forecasts, kept)


def _identity(finding: Finding) -> tuple[object, ...]:
    return (finding.seq, finding.detector, finding.kind, finding.severity)


def _progress(alert: Alert) -> tuple[int, int]:
    return (_STATES.index(alert.state), alert.severity.rank)
