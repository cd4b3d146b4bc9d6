"""Signs, one for each time that a failure began, and chains of causes and effects between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rlwatch import catalogue
from rlwatch.records import Event, Finding, Severity

MOST = 400
"""Largest number of signs considered: the newest. In a run with more, their order explains nothing."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One beginning of one kind of failure in a run, as its findings report it.

    Parameters
    ----------
    kind
        Kind of the findings.
    onset_step
        Step at which it began, in retrospect.
    seen_step, last_seen_step
        Steps of the first and the last report of a detector.
    severity, message, metric
        Of the most severe finding.
    standing
        Whether it was present from the run's first rows.
    """

    kind: str
    onset_step: int
    seen_step: int
    severity: Severity
    message: str = ""
    metric: str = ""
    last_seen_step: int = 0
    standing: bool = False

    @property
    def entry(self) -> catalogue.FindingKind:
        """Entry of the catalogue of failures for the kind of this failure."""
        return catalogue.entry(self.kind)

    @property
    def bad(self) -> bool:
        """Return whether the failure is worse than a remark (severity info)."""
        return self.severity is not Severity.INFO

    def leads_to(self, other: Sign, slack: int) -> bool:
        """Return whether ``other`` is a known effect of this failure and began in time.

        In time: at most ``slack`` steps before this failure, or within the catalogue's ``reach`` after it. A state from
        the first rows explains nothing that began later: the run was well with it.
        """
        if self.standing and not other.standing:
            return False
        return other.kind in self.entry.leads_to and self.onset_step - slack <= other.onset_step <= self.last_effect

    @property
    def last_effect(self) -> int:
        """Last step at which an effect may begin: a failure that was slow to be detected has slow effects."""
        reach = max(self.entry.reach, self.seen_step - self.onset_step)
        return max(self.onset_step, self.seen_step, self.last_seen_step) + reach


def signs(findings: Iterable[Finding], *, begun: float = -math.inf) -> list[Sign]:
    """Return one sign for each beginning of a kind of failure, in order of onset.

    A finding whose onset lies before an earlier sign of its kind was reported continues that sign. At most the newest
    :data:`MOST` are returned. ``begun``: the last of the run's first rows; what was present by then is ``standing``.
    """
    found: list[Sign] = []
    newest: dict[str, int] = {}
    for finding in sorted(findings, key=_order):
        at = newest.get(finding.kind)
        if at is not None and finding.onset_step <= found[at].seen_step:
            found[at] = _joined(found[at], finding)
        else:
            newest[finding.kind] = len(found)
            found.append(_sign(finding))
    dated = (replace(sign, standing=True) if sign.onset_step <= begun else sign for sign in found)
    return sorted(dated, key=lambda sign: (sign.onset_step, sign.kind, sign.seen_step))[-MOST:]


def on_branch(findings: Iterable[Finding], starts: Mapping[int, int]) -> list[Finding]:
    """Return the findings without those of steps that a later attempt ran again.

    ``starts``: attempt (process of the run) -> its first step.
    """
    return [
        finding
        for finding in findings
        if all(finding.step < start for attempt, start in starts.items() if attempt > finding.attempt)
    ]


def starts_of(findings: Sequence[Finding], events: Sequence[Event]) -> dict[int, int]:
    """Return attempt (process of the run) -> its first known step, from findings and events."""
    starts: dict[int, int] = {}
    steps = [(f.attempt, f.step) for f in findings] + [(e.attempt, e.step) for e in events if e.step is not None]
    for attempt, step in steps:
        starts[attempt] = min(step, starts.get(attempt, step))
    return starts


def row_steps(steps: Sequence[int]) -> int:
    """Return the median number of steps between two rows of a log; 1 if there are fewer than two.

    >>> row_steps([10, 20, 30, 60])
    10
    """
    gaps = sorted(later - earlier for earlier, later in pairwise(steps) if later > earlier)
    return gaps[len(gaps) // 2] if gaps else 1


def _order(finding: Finding) -> tuple[int, int, int, str, str, str]:
    return (finding.step, finding.onset_step, finding.severity.rank, finding.kind, finding.detector, finding.message)


def _sign(finding: Finding) -> Sign:
    severity = Severity(finding.severity)
    return Sign(finding.kind, finding.onset_step, finding.step, severity, finding.message, finding.metric, finding.step)


def _joined(sign: Sign, finding: Finding) -> Sign:
    joined = replace(sign, onset_step=min(sign.onset_step, finding.onset_step), last_seen_step=finding.step)
    if finding.severity.rank <= sign.severity.rank:
        return joined
    return replace(joined, severity=Severity(finding.severity), message=finding.message, metric=finding.metric)


def failure_onset(onsets: Iterable[tuple[catalogue.FindingKind, int]]) -> int | None:
    """Return the step at which a failure began, from the kind and onset of each of its most severe findings; None for
    none.

    It is the first onset. Quantities that accumulate count only where nothing else was found: KL to the reference had
    been growing for 20 steps when a demo's learning rate rose, and no setting that changed between the two could then
    be its cause.
    """
    known = list(onsets)
    return min([at for kind, at in known if not kind.accumulates] or [at for _, at in known], default=None)


# Explanations: chains from unexplained signs down to their known effects.


@dataclass(frozen=True, slots=True)
class Chain:
    """A sign (beginning of a failure) that nothing before it explains, and its known effects, in order of onset."""

    root: Sign
    effects: tuple[Sign, ...]


def chains(signs: Sequence[Sign], slack: int) -> list[Chain]:
    """Return one chain for each sign (beginning of a failure) that no earlier sign explains.

    ``slack``: error of onsets, in steps. Where signs explain each other in a cycle (possible within the slack only),
    the earliest is the root.
    """
    ahead = {sign: [other for other in signs if _explains(sign, other, slack)] for sign in signs}
    explained = {other for followers in ahead.values() for other in followers}
    found = [Chain(sign, _reached(sign, ahead)) for sign in signs if sign not in explained]
    covered = {sign for chain in found for sign in (chain.root, *chain.effects)}
    for sign in sorted(signs, key=lambda sign: (sign.onset_step, sign.entry.symptom, sign.kind)):
        if sign not in covered:
            found.append(Chain(sign, _reached(sign, ahead)))
            covered.update((sign, *found[-1].effects))
    return found


def _explains(cause: Sign, effect: Sign, slack: int) -> bool:
    """Return whether ``cause`` explains ``effect``: by order, or within the slack by the catalogue's direction."""
    if cause == effect or not cause.leads_to(effect, slack):
        return False
    return cause.onset_step < effect.onset_step or not effect.leads_to(cause, slack)


def _reached(root: Sign, ahead: Mapping[Sign, Sequence[Sign]]) -> tuple[Sign, ...]:
    seen: set[Sign] = set()
    waiting = [root]
    while waiting:
        fresh = [sign for sign in ahead[waiting.pop()] if sign not in seen and sign != root]
        seen.update(fresh)
        waiting += fresh
    return tuple(sorted(seen, key=lambda sign: (sign.onset_step, sign.kind)))
