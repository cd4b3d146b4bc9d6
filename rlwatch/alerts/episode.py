"""One episode of one rule and kind: pending, firing, resolved. Pure: steps in, reasons out."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace

from rlwatch.alerts.rules import Rule
from rlwatch.alerts.transitions import Reason
from rlwatch.records import JSON, Alert, AlertState, Finding, Severity


def alert_id(run_id: str, rule: str, kind: str, onset_seq: int) -> str:
    """16 hex digits: the same wherever and whenever the same rows are judged by the same rule."""
    return hashlib.sha256(f"{run_id}|{rule}|{kind}|{onset_seq}".encode()).hexdigest()[:16]


@dataclass(slots=True)
class Episode:
    """What is remembered between steps. ``since``, ``critical_since`` and ``gone_since`` are steps."""

    rule: Rule
    alert: Alert
    since: int
    fresh: bool = True
    critical_since: int | None = None
    gone_since: int | None = None

    def hold(self, finding: Finding, step: int, ts: float) -> Reason:
        """The condition holds at ``step``."""
        firing = self.alert.state is AlertState.FIRING
        reason = self._go_on(finding) if firing else self._wait(finding, step)
        if firing and reason is not Reason.ESCALATED:
            return reason
        self.alert = replace(
            self.alert,
            severity=told_severity(self.rule, finding),
            step=step,
            message=finding.message,
            detector=finding.detector,
            evidence=evidence(finding),
            reason=self._words(reason, step),
        )
        if reason in (Reason.HELD_FOR, Reason.FIRED_AT_ONCE):
            self.alert = replace(self.alert, state=AlertState.FIRING, fired_at=ts)
        return reason

    def miss(self, step: int, ts: float) -> Reason:
        """The condition does not hold at ``step``."""
        if self.alert.state is AlertState.PENDING:
            self._end(Reason.CONDITION_GONE, step, ts)
            return Reason.CONDITION_GONE
        self.gone_since = step if self.gone_since is None else min(self.gone_since, step)
        if step - self.gone_since < self.rule.keep_firing_for:
            return Reason.KEPT_FIRING_SILENT
        self._end(Reason.RESOLVED, step, ts)
        return Reason.RESOLVED

    def _go_on(self, finding: Finding) -> Reason:
        self.gone_since = None
        worse = told_severity(self.rule, finding).rank > self.alert.severity.rank
        return Reason.ESCALATED if worse else Reason.STILL_FIRING_SILENT

    def _wait(self, finding: Finding, step: int) -> Reason:
        first, self.fresh = self.fresh, False
        self.since = min(self.since, step)  # a step number may go back: the wait begins anew
        if finding.severity is not Severity.CRITICAL:
            self.critical_since = None
        elif self.critical_since is None or step < self.critical_since:
            self.critical_since = step
        patience = self.rule.wait(Severity.CRITICAL)
        critical = self.critical_since is not None and step - self.critical_since >= patience
        if critical or step - self.since >= self.rule.for_steps:
            return Reason.FIRED_AT_ONCE if first else Reason.HELD_FOR
        return Reason.FIRST_PENDING if first else Reason.PENDING_SILENT

    def _end(self, reason: Reason, step: int, ts: float) -> None:
        self.alert = replace(
            self.alert,
            state=AlertState.RESOLVED,
            step=step,
            reason=self._words(reason, step),
            resolved_step=step,
            resolved_at=ts,
        )

    def _words(self, reason: Reason, step: int) -> str:
        rule, since = self.rule, self.since
        return {
            Reason.FIRST_PENDING: f"holds since step {since}; fires if it lasts {rule.for_steps} steps",
            Reason.PENDING_SILENT: f"holds since step {since}, {step - since} of {rule.for_steps} steps",
            Reason.CONDITION_GONE: f"began at step {since} and was gone before it fired",
            Reason.FIRED_AT_ONCE: f"fired at once at step {step}",
            Reason.HELD_FOR: f"has held from step {since} to step {step}",
            Reason.ESCALATED: f"became worse at step {step}; was {self.alert.severity.value}",
            Reason.RESOLVED: f"gone since step {self.gone_since}",
        }[reason]


def begin(run_id: str, rule: Rule, finding: Finding, seq: int, step: int) -> Episode:
    """A new episode; give it the finding with :meth:`Episode.hold` next."""
    alert = Alert(
        alert_id=alert_id(run_id, rule.name, finding.kind, seq),
        run_id=run_id,
        rule=rule.name,
        kind=finding.kind,
        severity=told_severity(rule, finding),
        state=AlertState.PENDING,
        onset_step=finding.onset_step,
        step=step,
        message=finding.message,
    )
    return Episode(rule, alert, since=step)


def told_severity(rule: Rule, finding: Finding) -> Severity:
    """The rule's severity if it has one, else the finding's."""
    return rule.severity or finding.severity


def evidence(finding: Finding) -> dict[str, JSON]:
    """The finding's numbers, with its metric, score and baseline where it has them."""
    own = {"metric": finding.metric or None, "score": finding.score, "baseline": finding.baseline}
    return {key: value for key, value in own.items() if value is not None} | dict(finding.evidence)


def worst(findings: list[Finding]) -> Finding:
    """The one that speaks for several of a kind: severest, then highest score, then earliest."""

    def badness(finding: Finding) -> tuple[int, float, int, str, str]:
        score = finding.score if finding.score is not None and not math.isnan(finding.score) else -math.inf
        return (finding.severity.rank, score, -finding.onset_step, finding.detector, finding.metric)

    return max(findings, key=badness)
