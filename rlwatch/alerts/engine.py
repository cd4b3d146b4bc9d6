"""Turn findings into alerts, one closed step after another: pending, firing, resolved.

Causal and deterministic: decisions depend on the rules and on the steps so far, never on time. Two engines that receive
the same steps decide the same, with the same alert ids, so a store keeps one of each.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from rlwatch.alerts.rules import Rule
from rlwatch.errors import ConfigError
from rlwatch.records import JSON, Alert, AlertState, Finding, Severity
from rlwatch.wording import plural

__all__ = ["AlertEngine", "DecisionReason", "Transition"]


class AlertEvent(StrEnum):
    """Kinds of events about an alert of which receivers are notified."""

    FIRING = "firing"
    ESCALATED = "escalated"
    """The alert got worse."""
    EASED = "eased"
    """The alert is less severe than before, and not over."""
    REPEATED = "repeated"
    """The alert still fires, unacknowledged."""
    UNACKNOWLEDGED = "unacknowledged"
    """Not acknowledged within the time of the rule: other channels are notified, or at a higher severity."""
    RESOLVED = "resolved"


class DecisionReason(StrEnum):
    """Reasons for the engine's decision on an alert at a step. Those that end in ``_silent`` change nothing."""

    FIRST_PENDING = "first_pending"
    """The condition began to hold; the rule asks for more steps."""
    PENDING_SILENT = "pending_silent"
    """The condition still holds, not yet for long enough."""
    CONDITION_GONE = "condition_gone"
    """The condition ended before the alert fired: no channel is notified."""
    FIRED_AT_ONCE = "fired_at_once"
    """The rule has no delay."""
    HELD_FOR = "held_for"
    """The condition has held for as long as the rule asks."""
    STILL_FIRING_SILENT = "still_firing_silent"
    """Nothing new: the alert was published at this severity."""
    ESCALATED = "escalated"
    """The alert became worse than published."""
    EASED = "eased"
    """The alert has been less severe than published for as long as the rule requires before it ends."""
    KEPT_FIRING_SILENT = "kept_firing_silent"
    """The condition is gone, not yet for as long as the rule asks."""
    RESOLVED = "resolved"
    """The condition has been gone for as long as the rule asks."""

    @property
    def event(self) -> AlertEvent | None:
        """Event of which receivers are notified for this reason; None if there is none."""
        return _EVENTS.get(self)

    @property
    def changes(self) -> bool:
        """Return whether the alert changed."""
        return not self.value.endswith("_silent")


_EVENTS = {
    DecisionReason.FIRED_AT_ONCE: AlertEvent.FIRING,
    DecisionReason.HELD_FOR: AlertEvent.FIRING,
    DecisionReason.ESCALATED: AlertEvent.ESCALATED,
    DecisionReason.EASED: AlertEvent.EASED,
    DecisionReason.RESOLVED: AlertEvent.RESOLVED,
}


@dataclass(frozen=True, slots=True)
class Transition:
    """An alert after a decision at one row, with the reason and the rule.

    ``ts``: time of the row (Unix seconds), never evaluated. ``seq``: position of the row in the run's stream.
    """

    alert: Alert
    reason: DecisionReason
    rule: Rule
    ts: float = 0.0
    seq: int = 0

    @property
    def event(self) -> AlertEvent | None:
        """Event of which receivers are notified; None if there is none."""
        return self.reason.event

    @property
    def notify(self) -> bool:
        """Return whether receivers are notified: there is an event to publish, and the rule names a channel."""
        return self.reason.event is not None and bool(self.rule.channels)


# One episode of one rule and kind: pending, firing, resolved. Pure: steps in, reasons out.

Back = Callable[[str], str]
"""Returns a text with the values by which a kind of failure recovered; empty where there are none."""


def no_numbers(_: str) -> str:
    """Return an empty text: the default function for callers that know no values which show the recovery of a kind of
    finding.
    """
    return ""


def alert_id(run_id: str, rule: str, kind: str, onset_seq: int) -> str:
    """Return the id of an alert as 16 hex digits: a digest of run, rule, kind and ``onset_seq``.

    ``onset_seq``: position of the row at which the alert began. Every process that judges these rows gets an equal id.
    """
    return hashlib.sha256(f"{run_id}|{rule}|{kind}|{onset_seq}".encode()).hexdigest()[:16]


@dataclass(slots=True)
class RuleState:
    """State of one rule for one kind of finding, from the beginning of an alert to its end.

    ``since``, ``critical_since``, ``milder_since`` and ``gone_since`` are steps since which the condition holds, is
    critical, is less severe, or is gone. ``worst``: worst published severity.
    """

    rule: Rule
    alert: Alert
    since: int
    fresh: bool = True
    critical_since: int | None = None
    milder_since: int | None = None
    gone_since: int | None = None
    worst: Severity = Severity.INFO

    def hold(self, finding: Finding, step: int, ts: float, back: Back = no_numbers) -> DecisionReason:
        """Take a step at which the rule's condition holds, update the alert, and return the reason for the decision.

        ``finding``: the finding that represents the condition. ``ts``: Unix seconds. ``back``: returns, for a kind of
        finding, a text with the values that show its recovery.
        """
        firing = self.alert.state is AlertState.FIRING
        reason = self._go_on(finding, step) if firing else self._wait(finding, step)
        if reason is DecisionReason.STILL_FIRING_SILENT:
            return reason
        self.alert = replace(
            self.alert,
            severity=alert_severity(self.rule, finding),
            step=step,
            message=finding.message,
            detector=finding.detector,
            evidence=evidence(finding),
            reason=self._words(reason, step, back),
        )
        if reason in (DecisionReason.HELD_FOR, DecisionReason.FIRED_AT_ONCE):
            self.alert = replace(self.alert, state=AlertState.FIRING, fired_at=ts)
        if self.alert.state is AlertState.FIRING:
            self.worst = _worse(self.worst, self.alert.severity)
        return reason

    def miss(self, step: int, ts: float, back: Back = no_numbers) -> DecisionReason:
        """Take a step at which the rule's condition does not hold, update the alert, and return the reason for the
        decision.

        ``ts``: Unix seconds. ``back``: returns, for a kind of finding, a text with the values that show its recovery.
        """
        if self.alert.state is AlertState.PENDING:
            self._end(DecisionReason.CONDITION_GONE, step, ts, back)
            return DecisionReason.CONDITION_GONE
        self.gone_since = step if self.gone_since is None else min(self.gone_since, step)
        if step - self.gone_since < self.rule.keep_firing_for:
            return DecisionReason.KEPT_FIRING_SILENT
        self._end(DecisionReason.RESOLVED, step, ts, back)
        return DecisionReason.RESOLVED

    def _go_on(self, finding: Finding, step: int) -> DecisionReason:
        self.gone_since = None
        change = alert_severity(self.rule, finding).rank - self.alert.severity.rank
        if change >= 0:
            self.milder_since = None
            return DecisionReason.ESCALATED if change else DecisionReason.STILL_FIRING_SILENT
        self.milder_since = step if self.milder_since is None else min(self.milder_since, step)
        eased = step - self.milder_since >= self.rule.keep_firing_for
        return DecisionReason.EASED if eased else DecisionReason.STILL_FIRING_SILENT

    def _wait(self, finding: Finding, step: int) -> DecisionReason:
        first, self.fresh = self.fresh, False
        self.since = min(self.since, step)  # a step number may go back: the wait begins anew
        if finding.severity is not Severity.CRITICAL:
            self.critical_since = None
        elif self.critical_since is None or step < self.critical_since:
            self.critical_since = step
        patience = self.rule.wait(Severity.CRITICAL)
        critical = self.critical_since is not None and step - self.critical_since >= patience
        if critical or step - self.since >= self.rule.for_steps:
            return DecisionReason.FIRED_AT_ONCE if first else DecisionReason.HELD_FOR
        return DecisionReason.FIRST_PENDING if first else DecisionReason.PENDING_SILENT

    def _end(self, reason: DecisionReason, step: int, ts: float, back: Back) -> None:
        self.alert = replace(
            self.alert,
            severity=_worse(self.worst, self.alert.severity),
            state=AlertState.RESOLVED,
            step=step,
            reason=self._words(reason, step, back),
            resolved_step=step,
            resolved_at=ts,
        )

    def _words(self, reason: DecisionReason, step: int, back: Back) -> str:
        if reason is DecisionReason.RESOLVED:
            return self._over(back(self.alert.kind))
        if reason is DecisionReason.EASED:
            numbers = back(self.alert.kind)
            was = f"no longer {self.alert.severity.value} since step {self.milder_since}"
            return f"{was}: {numbers}" if numbers else was
        rule, since = self.rule, self.since
        return {
            DecisionReason.FIRST_PENDING: f"active since step {since}; fires after {rule.for_steps} steps",
            DecisionReason.PENDING_SILENT: f"active since step {since}, {step - since} of {rule.for_steps} steps",
            DecisionReason.CONDITION_GONE: f"began at step {since}, resolved before it fired",
            DecisionReason.FIRED_AT_ONCE: f"fired immediately at step {step}",
            DecisionReason.HELD_FOR: f"active from step {since} to step {step}",
            DecisionReason.ESCALATED: f"worse than {self.alert.severity.value} since step {step}",
        }[reason]

    def _over(self, numbers: str) -> str:
        if not numbers or self.gone_since is None:
            return f"gone since step {self.gone_since}"
        lasted = plural(self.gone_since - self.alert.onset_step, "step")
        return f"recovered at step {self.gone_since} after {lasted}: {numbers}"


def _worse(one: Severity, other: Severity) -> Severity:
    return one if one.rank >= other.rank else other


def begin(run_id: str, rule: Rule, finding: Finding, seq: int, step: int) -> RuleState:
    """Return the state of a new alert, without its finding, which :meth:`RuleState.hold` must receive next.

    ``seq``: position of the row at which it begins, which is part of the alert's id.
    """
    alert = Alert(
        alert_id=alert_id(run_id, rule.name, finding.kind, seq),
        run_id=run_id,
        rule=rule.name,
        kind=finding.kind,
        severity=alert_severity(rule, finding),
        state=AlertState.PENDING,
        onset_step=finding.onset_step,
        step=step,
        message=finding.message,
    )
    return RuleState(rule, alert, since=step)


def alert_severity(rule: Rule, finding: Finding) -> Severity:
    """Return the severity of an alert: the rule's if it has one, otherwise that of the finding."""
    return rule.severity or finding.severity


def evidence(finding: Finding) -> dict[str, JSON]:
    """Return the numbers behind a finding, with its metric, score and baseline if it has them."""
    own = {"metric": finding.metric or None, "score": finding.score, "baseline": finding.baseline}
    return {key: value for key, value in own.items() if value is not None} | dict(finding.evidence)


def worst(findings: list[Finding]) -> Finding:
    """Return the finding that represents several of one kind: the most severe, then highest score, then earliest."""

    def badness(finding: Finding) -> tuple[int, float, int, str, str]:
        score = finding.score if finding.score is not None and not math.isnan(finding.score) else -math.inf
        return (finding.severity.rank, score, -finding.onset_step, finding.detector, finding.metric)

    return max(findings, key=badness)


class _At(NamedTuple):
    seq: int
    step: int
    ts: float
    back: Back = no_numbers


MOST_COVERED = 1000
"""Kinds of findings for which the rules that cover them are remembered."""


class AlertEngine:
    """Applies all alert rules to the findings of one run, step by step, and keeps the state of its alerts.

    Pass every closed step in order, also those without findings: an alert resolves at a step without its condition.

    Parameters
    ----------
    run_id
        Id of the run, which is part of every alert id.
    rules
        Evaluated in this order; names must differ.

    Raises
    ------
    ConfigError
        If two rules have one name.
    """

    def __init__(self, run_id: str, rules: Sequence[Rule]) -> None:
        names = [rule.name for rule in rules]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"alert rules need names of their own, got more than one {', '.join(map(repr, twice))}")
        self.run_id = run_id
        self.rules = tuple(rules)
        self.decisions: tuple[Transition, ...] = ()
        """All decisions of the last call, including the silent ones."""
        self._episodes: dict[tuple[str, str], RuleState] = {}
        self._places = {rule.name: place for place, rule in enumerate(self.rules)}
        self._covered: dict[tuple[str, str, Severity], tuple[int, ...]] = {}

    def step(
        self, seq: int, step: int, holding: Sequence[Finding], ts: float = 0.0, back: Back = no_numbers
    ) -> list[Transition]:
        """Apply the rules to one closed step; return the changes of alerts, in the order of the rules, then of kinds.

        Parameters
        ----------
        seq
            Position of the row, which must grow from step to step; it makes alert ids unique.
        step
            The optimizer step.
        holding
            All findings whose condition holds at it.
        ts
            Time of the row (Unix seconds), with which changes are stamped.
        back
            Returns, for a kind of finding, a text with the values that show its recovery.
        """
        due: dict[int, dict[str, list[Finding]]] = {}
        for name, kind in self._episodes:
            due.setdefault(self._places[name], {})[kind] = []
        for finding in holding:
            for place in self._covering(finding):
                due.setdefault(place, {}).setdefault(finding.kind, []).append(finding)
        if not due:
            self.decisions = ()
            return []
        at, decisions = _At(seq, step, ts, back), []
        for place in sorted(due):
            present = due[place]
            decisions += [
                self._decide(at, self.rules[place], kind, worst(present[kind]) if present[kind] else None)
                for kind in sorted(present)
            ]
        return self._answer(decisions)

    def _covering(self, finding: Finding) -> tuple[int, ...]:
        """Return the places in ``rules`` of the rules that cover the finding, remembered: most findings last."""
        key = finding.kind, finding.detector, finding.severity
        known = self._covered.get(key)
        if known is None:
            if len(self._covered) >= MOST_COVERED:
                self._covered.clear()
            places = tuple(place for place, rule in enumerate(self.rules) if rule.matches(finding))
            known = self._covered[key] = places
        return known

    def arrival(self, seq: int, step: int, holding: Sequence[Finding], ts: float = 0.0) -> list[Transition]:
        """Apply the rules to findings on a single row, before its step closes; return the changes of alerts.

        Only findings for which a rule has no waiting time count, and no alert ends here. The parameters are those of
        :meth:`step`.
        """
        at, decisions = _At(seq, step, ts), []
        for rule in self.rules:
            urgent = _by_kind(rule, [finding for finding in holding if rule.wait(finding.severity) == 0])
            decisions += [self._decide(at, rule, kind, urgent[kind]) for kind in sorted(urgent)]
        return self._answer(decisions)

    @property
    def active(self) -> tuple[Alert, ...]:
        """Alerts that are pending or firing now."""
        return tuple(episode.alert for episode in self._episodes.values())

    def open_ids(self) -> frozenset[str]:
        """Return the ids of the alerts that are pending or firing now."""
        return frozenset(alert.alert_id for alert in self.active)

    def _decide(self, at: _At, rule: Rule, kind: str, finding: Finding | None) -> Transition:
        key = (rule.name, kind)
        episode = self._episodes.get(key)
        if finding is None:
            assert episode is not None  # noqa: S101  (kinds without a finding come from the episodes)
            reason = episode.miss(at.step, at.ts, at.back)
        else:
            if episode is None:
                episode = self._episodes[key] = begin(self.run_id, rule, finding, at.seq, at.step)
            reason = episode.hold(finding, at.step, at.ts, at.back)
        if episode.alert.state is AlertState.RESOLVED:
            del self._episodes[key]
        return Transition(episode.alert, reason, rule, at.ts, at.seq)

    def _answer(self, decisions: list[Transition]) -> list[Transition]:
        self.decisions = tuple(decisions)
        return [decision for decision in decisions if decision.reason.changes]


def _by_kind(rule: Rule, holding: Sequence[Finding]) -> dict[str, Finding]:
    kinds: dict[str, list[Finding]] = {}
    for finding in holding:
        if rule.matches(finding):
            kinds.setdefault(finding.kind, []).append(finding)
    return {kind: worst(findings) for kind, findings in kinds.items()}
