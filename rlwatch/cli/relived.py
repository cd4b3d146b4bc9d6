"""What an earlier watch has stored already, and a resumed one says again because it relives its history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlwatch.monitor.engine import Outcome
from rlwatch.ports import Item, RunWriter, Store
from rlwatch.records import Alert, Finding, RunState


class Told:
    """Findings and alerts of a run as they stand in the store when a watch begins."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._findings = {_of_finding(finding) for finding in store.findings(run_id)}
        self._alerts = {_of_alert(alert) for alert in store.alerts(run_id)}

    def has(self, item: Item | Finding) -> bool:
        """Whether ``item`` is a finding that is stored already."""
        return isinstance(item, Finding) and _of_finding(item) in self._findings

    def news(self, outcome: Outcome) -> Outcome:
        """The outcome without what people were told before."""
        return replace(
            outcome,
            findings=tuple(finding for finding in outcome.findings if not self.has(finding)),
            transitions=tuple(t for t in outcome.transitions if _of_alert(t.alert) not in self._alerts),
        )


def _of_finding(finding: Finding) -> tuple[object, ...]:
    return (finding.seq, finding.detector, finding.kind, finding.severity)


def _of_alert(alert: Alert) -> tuple[object, ...]:
    return (alert.alert_id, alert.state, alert.severity)


class WriterOfNews:
    """A ``RunWriter`` that passes everything on but findings that are stored already."""

    def __init__(self, writer: RunWriter, told: Told) -> None:
        self.run = writer.run
        self.last_seq = writer.last_seq
        self._writer = writer
        self._told = told

    def write(self, items: Sequence[Item | Finding]) -> None:
        """Store what is new, all or nothing."""
        news = [item for item in items if not self._told.has(item)]
        if news:
            self._writer.write(news)
        self.last_seq = self._writer.last_seq

    def heartbeat(self, now: float) -> None:
        """Say that the writer lives."""
        self._writer.heartbeat(now)

    def finish(self, state: RunState, reason: str, now: float) -> None:
        """Record the run's end."""
        self._writer.finish(state, reason, now)

    def close(self) -> None:
        """Release the run."""
        self._writer.close()
