"""From findings to alerts, one closed step after another.

Causal and deterministic: what it says depends on the rules and on the steps given so far, never on time.
Two engines given the same steps say the same, with the same alert ids, so a store keeps one of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlwatch.alerts.episode import Episode, begin, worst
from rlwatch.alerts.rules import Rule
from rlwatch.alerts.transitions import Reason, Transition
from rlwatch.errors import ConfigError
from rlwatch.records import Alert, AlertState, Finding

__all__ = ["AlertEngine", "Reason", "Transition"]


class _At(NamedTuple):
    seq: int
    step: int
    ts: float


class AlertEngine:
    """The states of all rules on one run.

    Feed it every closed step in order, also those where nothing holds: an alert resolves at a step that
    says so. ``seq`` must grow from step to step, it makes alert ids unique.

    Parameters
    ----------
    run_id
        Part of every alert id.
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
        """All that was decided at the last call, the silent decisions too."""
        self._episodes: dict[tuple[str, str], Episode] = {}

    def step(self, seq: int, step: int, holding: Sequence[Finding], ts: float = 0.0) -> list[Transition]:
        """Evaluate one closed step, given all findings whose condition holds at it.

        Returns what changed, in the order of the rules, then of kinds. ``ts`` only stamps.
        """
        at, decisions = _At(seq, step, ts), []
        for rule in self.rules:
            present = _by_kind(rule, holding)
            kinds = sorted(present.keys() | {kind for name, kind in self._episodes if name == rule.name})
            decisions += [self._decide(at, rule, kind, present.get(kind)) for kind in kinds]
        return self._answer(decisions)

    def arrival(self, seq: int, step: int, holding: Sequence[Finding], ts: float = 0.0) -> list[Transition]:
        """Evaluate findings that do not wait for their step to close.

        Only findings their rule tells at once are heard; nothing ends here.
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
        """Their ids."""
        return frozenset(alert.alert_id for alert in self.active)

    def _decide(self, at: _At, rule: Rule, kind: str, finding: Finding | None) -> Transition:
        key = (rule.name, kind)
        episode = self._episodes.get(key)
        if finding is None:
            assert episode is not None  # noqa: S101  (kinds without a finding come from the episodes)
            reason = episode.miss(at.step, at.ts)
        else:
            if episode is None:
                episode = self._episodes[key] = begin(self.run_id, rule, finding, at.seq, at.step)
            reason = episode.hold(finding, at.step, at.ts)
        if episode.alert.state is AlertState.RESOLVED:
            del self._episodes[key]
        return Transition(episode.alert, reason, rule, at.ts)

    def _answer(self, decisions: list[Transition]) -> list[Transition]:
        self.decisions = tuple(decisions)
        return [decision for decision in decisions if decision.reason.changes]


def _by_kind(rule: Rule, holding: Sequence[Finding]) -> dict[str, Finding]:
    kinds: dict[str, list[Finding]] = {}
    for finding in holding:
        if rule.matches(finding):
            kinds.setdefault(finding.kind, []).append(finding)
    return {kind: worst(findings) for kind, findings in kinds.items()}
