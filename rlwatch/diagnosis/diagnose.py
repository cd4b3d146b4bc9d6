"""From the findings of a run to a ranked list of causes. Pure, causal, deterministic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlwatch.diagnosis.causes import Case, Cause, Evidence, Sureness
from rlwatch.diagnosis.chains import Chain, chains
from rlwatch.diagnosis.happenings import happenings
from rlwatch.diagnosis.lacking import lacking
from rlwatch.diagnosis.signs import Sign, on_branch, signs, starts_of
from rlwatch.diagnosis.treatment import treatment
from rlwatch.records import CRASH_FORECAST, JSON, Event, Finding

SLACK = 5
"""Steps by which an onset may be off in a log with a row for each step; two rows in a coarser one."""
MOST = 5
"""Causes told."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What set a run's failure off, as far as its findings tell.

    ``causes``: the most likely first. ``enough``: whether one of them is at least plausible; if not,
    ``why_not`` says what is missing. ``at_step``: the step up to which data were used.
    """

    causes: tuple[Cause, ...] = ()
    enough: bool = False
    why_not: str = ""
    at_step: int | None = None

    @property
    def summary(self) -> str:
        """One line: the first cause, how sure, and its chain; or why no cause can be named."""
        if not self.enough:
            return self.why_not
        first = self.causes[0]
        return f"most likely: {first.title} ({first.sure.value}): {first.summary}"

    def to_dict(self) -> dict[str, JSON]:
        """Plain values, as in ``rlwatch scan --format json``."""
        return {
            "summary": self.summary,
            "enough": self.enough,
            "why_not": self.why_not,
            "at_step": self.at_step,
            "causes": [cause.to_dict() for cause in self.causes],
        }


def diagnose(
    findings: Iterable[Finding],
    *,
    events: Iterable[Event] = (),
    source: str = "",
    at: int | None = None,
    row_steps: int = 1,
    measured: Collection[str] | None = None,
    starts: Mapping[int, int] | None = None,
) -> Diagnosis:
    """Rank what may have set the failure off.

    A finding is explained by an earlier one that is known to lead to it (``leads_to`` in the catalogue); what
    nothing explains is a cause, and ranks by what it explains. The order of ``findings`` does not
    matter, nor does anything after ``at``.

    Parameters
    ----------
    findings, events
        Of one run, of any attempts: steps that a later attempt ran again count there only.
    source
        The trainer (``RunInfo.source``), for the option names of the advice.
    at
        The step up to which to judge; None: all.
    row_steps
        Steps between two rows of the log: onsets cannot be told apart more finely.
    measured
        Canonical names of the metrics the run logs, to say what is missing; None: not known.
    starts
        First step of each attempt, where known better than by findings and events.

    >>> from rlwatch.records import Severity
    >>> def found(kind, onset, level=Severity.CRITICAL):
    ...     return Finding("d", kind, level, onset + 9, onset, "")
    >>> run = [found("reward_drop", 498), found("mismatch_growth", 412), found("entropy_collapse", 455)]
    >>> diagnose(run).summary  # doctest: +NORMALIZE_WHITESPACE
    'most likely: Train-inference mismatch (strong): the trainer-engine mismatch grew from step 412;
     entropy fell from 455; reward fell from 498'
    """
    told = [f for f in findings if at is None or f.step <= at]
    past = [e for e in events if e.step is None or at is None or e.step <= at]
    held = _without_forecasts(on_branch(told, starts_of(told, past) if starts is None else starts))
    if not held:
        return Diagnosis(why_not="nothing was found", at_step=at)
    found = signs(held)
    slack = max(SLACK, 2 * row_steps)
    causes = _causes(found, slack, past, source)
    enough = any(cause.sure is not Sureness.WEAK for cause in causes)
    until = max(f.step for f in held) if at is None else at
    return Diagnosis(causes, enough, "" if enough else lacking(causes, measured), until)


def _without_forecasts(held: list[Finding]) -> list[Finding]:
    """A forecast causes nothing, and follows from nothing yet: it is left out where anything else was found."""
    return [finding for finding in held if finding.kind != CRASH_FORECAST] or held


def _causes(found: Sequence[Sign], slack: int, events: Sequence[Event], source: str) -> tuple[Cause, ...]:
    worst = max(found, key=lambda sign: (sign.severity.rank, sign.entry.undone, sign.onset_step, sign.kind))
    cases = [case for case in _cases(chains(found, slack), worst, slack) if case.bad or not worst.bad]
    made = [(_rank(case, worst), _cause(case, found, events, source)) for case in cases]
    return tuple(cause for _, cause in sorted(made, key=lambda pair: pair[0])[:MOST])


def _cases(found: Sequence[Chain], worst: Sign, slack: int) -> list[Case]:
    """Chains of one cause are one case: the one that explains most stands for it."""
    grouped: dict[str, list[Chain]] = defaultdict(list)
    for chain in found:
        grouped[chain.root.entry.cause].append(chain)
    best = {title: min(group, key=lambda chain: _weight(chain, worst)) for title, group in grouped.items()}
    return [_case(title, best, grouped, worst, slack) for title in best]


def _case(
    title: str, best: Mapping[str, Chain], grouped: Mapping[str, Sequence[Chain]], worst: Sign, slack: int
) -> Case:
    chain = best[title]
    others = [other for other in grouped[title] if other is not chain]
    passed = [o for o in others if not o.effects and o.root.onset_step < chain.root.onset_step - slack]
    together = tuple(o for o in others if abs(o.root.onset_step - chain.root.onset_step) <= chain.root.entry.reach)
    rivals = tuple(
        sorted(
            name
            for name, other in best.items()
            if name != title
            and worst in (other.root, *other.effects)
            and worst in (chain.root, *chain.effects)
            and abs(other.root.onset_step - chain.root.onset_step) <= slack
        )
    )
    return Case(chain, together, len(passed) if chain.effects else 0, rivals, slack)


def _weight(chain: Chain, worst: Sign) -> tuple[bool, int, int]:
    """Smaller is better: explains the worst sign, explains more, began earlier."""
    explains = worst in (chain.root, *chain.effects)
    return (not explains, -sum(1 + 2 * effect.severity.rank for effect in chain.effects), chain.root.onset_step)


def _rank(case: Case, worst: Sign) -> tuple[bool, bool, int, int, int, str]:
    """Smaller is better: what explains the worst sign, then what is surer, explains more, began earlier."""
    sure, _ = case.judged()
    missed, weight, onset = _weight(case.chain, worst)
    return (missed, not case.chain.root.bad, -sure.rank, weight, onset, case.chain.root.kind)


def _cause(case: Case, found: Sequence[Sign], events: Sequence[Event], source: str) -> Cause:
    sure, why = case.judged()
    root = case.chain.root
    shown = _shown(case)
    actions, withheld = treatment(root, shown, found, source)
    about = happenings(events, shown)
    rows = sorted([*map(_evidence, shown), *about], key=lambda e: (e.step, e.severity is not None, e.kind))
    return Cause(
        kind=root.kind,
        title=root.entry.cause,
        onset_step=root.onset_step,
        sure=sure,
        why=why,
        summary=_summary(shown),
        evidence=tuple(rows),
        symptoms=tuple(dict.fromkeys(sign.kind for sign in case.chain.effects)),
        actions=actions,
        withheld=withheld,
    )


def _shown(case: Case) -> list[Sign]:
    """Root and effects in time order, each kind once: from when it first began, in the severest words."""
    among = [case.chain.root, *case.chain.effects, *(sign for o in case.also for sign in (o.root, *o.effects))]
    first: dict[str, Sign] = {}
    for sign in sorted(among, key=lambda sign: (sign.onset_step, sign.kind)):
        known = first.setdefault(sign.kind, sign)
        if sign.severity.rank > known.severity.rank:
            first[sign.kind] = replace(known, severity=sign.severity, message=sign.message)
    return list(first.values())


def _summary(shown: Sequence[Sign]) -> str:
    """The chain in one sentence; of signs of one cause the first."""
    first: dict[str, Sign] = {}
    for sign in shown:
        first.setdefault(sign.entry.cause, sign)
    told = [(sign.entry.happened, sign.onset_step) for sign in first.values()]
    return "; ".join(f"{what} from {'' if place else 'step '}{onset}" for place, (what, onset) in enumerate(told))


def _evidence(sign: Sign) -> Evidence:
    text = f"{sign.entry.happened} from step {sign.onset_step}"
    return Evidence(sign.onset_step, text, sign.kind, sign.severity, sign.seen_step, sign.metric, sign.message)
