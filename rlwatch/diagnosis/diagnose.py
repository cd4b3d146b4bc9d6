"""Ranking of the likely causes of a run's findings, each with evidence and advice.

Pure functions: the result depends only on the arguments, and never on data after the step of the diagnosis. A *sign* is
one beginning of one kind of finding; a *chain* is a sign that nothing earlier explains, with its known effects.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rlwatch import catalogue
from rlwatch.diagnosis.footprints import guesses
from rlwatch.diagnosis.mismatch_causes import ENGINE, FIRST_ACTIONS, MismatchCause, cause_of, standing_cause, wanted
from rlwatch.diagnosis.signs import Chain, Sign, chains, on_branch, signs, starts_of
from rlwatch.diagnosis.suspects import (
    RESET,
    SOME,
    Action,
    Suspect,
    Trouble,
    advice,
    event_turns,
    knob_of,
    suspects,
    trouble_of,
)
from rlwatch.diagnosis.turns import ChangeSource, KnobChange
from rlwatch.records import CRASH_FORECAST, JSON, LOCALISED, Event, Finding, Severity
from rlwatch.wording import number

PASSED = 3
"""Number of earlier signs of a kind without consequence from which on another one is weak evidence."""


class Confidence(StrEnum):
    """Certainty of a cause: ``strong`` > ``plausible`` > ``weak``."""

    STRONG = "strong"
    PLAUSIBLE = "plausible"
    WEAK = "weak"

    @property
    def rank(self) -> int:
        """Confidence as a number for comparison: 2 for strong, 1 for plausible, 0 for weak."""
        return ("weak", "plausible", "strong").index(self.value)

    @property
    def words(self) -> str:
        """Text for people: ``high confidence``, ``medium confidence`` or ``low confidence``."""
        return ("low confidence", "medium confidence", "high confidence")[self.rank]


class Nature(StrEnum):
    """The kind of answer that a diagnosis gives.

    ``cause``: a changed setting, or a mechanism that can be repaired. ``symptom``: only the first sign is known
    ("entropy rose"), not what caused it. ``unknown``: not even the first sign is clear.
    """

    CAUSE = "cause"
    SYMPTOM = "symptom"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One entry in the timeline of a cause: a finding that began, or an event of the run.

    Parameters
    ----------
    step
        Step at which it began or happened.
    text
        Description for people.
    kind
        Kind of the finding or event, or name of a changed setting.
    severity
        Severity of the finding; None for an event or a setting.
    seen_step
        Step at which the finding was reported; None for others.
    metric, message
        Metric of the finding and its own message.
    """

    step: int
    text: str
    kind: str
    severity: Severity | None = None
    seen_step: int | None = None
    metric: str = ""
    message: str = ""

    def to_dict(self) -> dict[str, JSON]:
        """Return the entry as plain values for JSON."""
        return {
            "step": self.step,
            "text": self.text,
            "kind": self.kind,
            "severity": self.severity.value if self.severity is not None else None,
            "seen_step": self.seen_step,
            "metric": self.metric,
            "message": self.message,
        }


@dataclass(frozen=True, slots=True)
class Cause:
    """A possible cause of a run's failure, or the symptom that came first.

    Parameters
    ----------
    kind
        Kind of the first finding, or the name of the changed setting.
    title
        Name for people.
    onset_step
        Step at which it began, never later than that of an effect.
    sure, why
        Confidence, and the reasons for it.
    summary
        The chain of events in one sentence.
    evidence
        Timeline of findings and events.
    symptoms
        Kinds of the findings that followed.
    actions
        Recommended actions, in order.
    withheld
        Advice that was left out, and the reason; empty if none.
    knob
        Setting that changed, or that usually is behind such a mechanism; empty if none is known.
    nature
        ``cause`` or ``symptom``, never ``unknown``.
    mismatch
        For a mismatch between trainer and rollout engine: its cause as the shape of the gap shows it, or ``not
        separable``; empty for other causes.
    change
        The changed setting; None for other causes.
    """

    kind: str
    title: str
    onset_step: int
    sure: Confidence
    why: str
    summary: str
    evidence: tuple[Evidence, ...]
    symptoms: tuple[str, ...] = ()
    actions: tuple[Action, ...] = ()
    withheld: str = ""
    knob: str = ""
    nature: Nature = Nature.CAUSE
    mismatch: str = ""
    change: KnobChange | None = None

    @property
    def separated(self) -> bool:
        """Return whether this is a mismatch between trainer and rollout engine whose own cause is known."""
        return self.mismatch not in ("", MismatchCause.UNCLEAR)

    def to_dict(self) -> dict[str, JSON]:
        """Return the cause as plain values for JSON."""
        return {
            "kind": self.kind,
            "nature": self.nature.value,
            "knob": self.knob,
            "title": self.title,
            "onset_step": self.onset_step,
            "sure": self.sure.value,
            "why": self.why,
            "summary": self.summary,
            "symptoms": list(self.symptoms),
            "evidence": [evidence.to_dict() for evidence in self.evidence],
            "actions": [action.to_dict() for action in self.actions],
            "withheld": self.withheld,
            "mismatch": self.mismatch,
        }


@dataclass(frozen=True, slots=True)
class CauseCase:
    """The evidence for one possible cause: its chains of findings, and facts that weigh for or against it.

    Parameters
    ----------
    chain
        First finding and its effects, where the cause explains most.
    also
        Further chains of the same cause that began at about the same time.
    passed
        Number of earlier signs of this cause that no effect followed.
    rivals
        Titles of other causes that also explain one of its effects and began at about the same time.
    slack
        Error of the steps at which findings begin, in steps.
    """

    chain: Chain
    also: tuple[Chain, ...]
    passed: int
    rivals: tuple[str, ...]
    slack: int

    @property
    def bad(self) -> bool:
        """Return whether any finding of the chain is more than a remark (severity info)."""
        return any(sign.bad for sign in (self.chain.root, *self.chain.effects))

    @property
    def clear(self) -> list[Sign]:
        """Effects of severity warning or critical that began later than the first finding by more than the error of
        onsets.
        """
        return [e for e in self.chain.effects if e.bad and e.onset_step > self.chain.root.onset_step + self.slack]

    def judged(self) -> tuple[Confidence, str]:
        """Return the confidence in this cause, and the reasons for it in one sentence."""
        root, clear = self.chain.root, self.clear
        if root.entry.symptom:
            return (
                Confidence.WEAK,
                f"{root.entry.title.lower()} is usually a symptom, and no earlier finding explains it",
            )
        sure, why = self._by_order(root, clear)
        if self.passed >= PASSED and sure is not Confidence.WEAK:
            return Confidence.WEAK, f"{why}; but {self.passed} earlier findings of this kind had no effect"
        if self.rivals and sure is Confidence.STRONG:
            return (
                Confidence.PLAUSIBLE,
                f"{why}; other candidates began at about the same time: {', '.join(self.rivals)}",
            )
        if sure is Confidence.STRONG and not root.entry.mechanism:
            return Confidence.PLAUSIBLE, why
        return sure, why

    def _by_order(self, root: Sign, clear: Sequence[Sign]) -> tuple[Confidence, str]:
        kinds, critical = {sign.kind for sign in clear}, root.severity is Severity.CRITICAL
        first = f"{self._place()}, {clear[0].onset_step - root.onset_step} steps before the next" if clear else ""
        if clear and not root.bad:
            return Confidence.WEAK, f"{first}; but its own severity is only info"
        if len(kinds) >= 2 or (clear and critical):
            return Confidence.STRONG, f"{first}; {_effects(clear)}"
        if clear:
            return Confidence.PLAUSIBLE, f"{first}; a single effect can be chance"
        return self._alone(root, critical=critical)

    def _alone(self, root: Sign, *, critical: bool) -> tuple[Confidence, str]:
        """Return the confidence in a cause without an effect that came clearly later."""
        if root.bad and any(effect.bad for effect in self.chain.effects):
            return Confidence.PLAUSIBLE, "its effects began at about the same time, so the order is uncertain"
        if critical:
            return Confidence.PLAUSIBLE, "critical, with no other finding before or after it"
        level = "a warning" if root.bad else "info"
        return Confidence.WEAK, f"only {level}, with no effect so far"

    def _place(self) -> str:
        """Return ``earliest finding``, if no effect began within the error of onsets; else what began
        at the same time.
        """
        near = [e for e in self.chain.effects if e.bad and abs(e.onset_step - self.chain.root.onset_step) <= self.slack]
        return f"began at about the same time as {near[0].entry.title.lower()}" if near else "earliest finding"


def _effects(clear: Sequence[Sign]) -> str:
    kinds = list(dict.fromkeys(sign.kind for sign in clear))
    return f"{len(kinds)} known effects followed" if len(kinds) > 1 else "a known effect followed"


# Events of a run around the beginning of its failure: resets, commands, resumes, localised gradients.

BEFORE = 60
"""Steps before the first sign within which an event may be related to it."""
AFTER = 20
"""Steps after the last sign within which an event is still shown."""
MOST_EVENTS = 12
"""Largest number of events shown with a cause: the first ones."""
TEXTS = {
    "reference_reset": "the reference was reset",
    "reference_restored": "the reference was restored from a checkpoint",
    "resume": "the run was resumed",
    "step_skipped": "the update of a culprit batch was skipped",
}


def happenings(events: Sequence[Event], shown: Sequence[Sign]) -> list[Evidence]:
    """Return the events of a run near the findings ``shown``, in order of step, as entries of a timeline.

    Of the events of gradient localisation only those with a message are included.
    """
    low = min(sign.onset_step for sign in shown) - BEFORE
    high = max(sign.seen_step for sign in shown) + AFTER
    near = [event for event in events if event.step is not None and low <= event.step <= high]
    known = [evidence for event in sorted(near, key=_order) if (evidence := _happening(event)) is not None]
    return known[:MOST_EVENTS]


def _order(event: Event) -> tuple[int, int, int, str]:
    return (event.step or 0, event.attempt, event.seq, event.kind)


def _happening(event: Event) -> Evidence | None:
    text = _text(event)
    return None if text is None else Evidence(event.step or 0, f"{text} at step {event.step}", event.kind)


def _text(event: Event) -> str | None:
    body = event.body
    if event.kind == LOCALISED:
        return str(body["message"]) if body.get("message") else None
    if event.kind == "command":
        return f"the command {body.get('command', '')} was carried out"
    if event.kind == "setting":
        return f"{body.get('option', '')} was changed from {body.get('before')} to {body.get('after')}"
    if event.kind == "exception":
        return f"training ended with {str(body.get('error', 'an exception'))[:200]}"
    return TEXTS.get(event.kind)


# Why the findings do not suffice for a cause, and what would have to be measured.

WANTED = {
    "trainer-engine mismatch": "mismatch/",
    "entropy": "policy/entropy",
    "gradient norm": "optim/grad_norm",
    "importance ratios": "ratio/",
    "response length": "len/",
}
"""Quantities that distinguish the usual causes -> the prefix of the metrics that show them."""


def lacking(causes: Sequence[Cause], measured: Collection[str] | None) -> str:
    """Return one or two sentences on why the findings do not suffice to name a cause, and which quantities would help.

    ``causes``: weak candidates, the likeliest first. ``measured``: canonical names of the logged metrics; None:
    unknown.
    """
    first = causes[0]
    text = f"cause unknown: {first.summary}; {first.why}"
    missing = [] if measured is None else [name for name, prefix in WANTED.items() if not _any(measured, prefix)]
    return f"{text}. Not measured: {', '.join(missing)}" if missing else text


def _any(measured: Collection[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in measured)


# The advice for a cause: undo first in a collapse, and never a reference reset then.

UNDO = ("roll-back", "lower-lr")
"""First actions in every collapse: in measurements, only undoing and only repairing both failed."""
CRASH = "reward_drop"
"""Kind of finding with the general texts for undoing."""


def treatment(
    root: Sign, chain: Sequence[Sign], found: Sequence[Sign], source: str, *, undo: bool = True
) -> tuple[tuple[Action, ...], str]:
    """Return the recommended actions against a cause in order, and the advice that was left out with its reason.

    Parameters
    ----------
    root
        First finding of the cause.
    chain
        The first finding and its effects.
    found
        All findings of the run: a reference is not reset while another failure is present.
    source
        The trainer, for its option names.
    undo
        Whether a lost policy is rolled back before anything else; a fault outside training is repaired first.
    """
    known = advice(root.kind, source)
    actions = known.actions if known is not None else ()
    if undo and any(sign.entry.undone and sign.bad for sign in chain):
        actions = _undo_first(actions, source)
    trouble = [sign for sign in found if sign.bad and sign.kind != root.kind and _at_that_time(sign, root)]
    if trouble and any(action.id == RESET for action in actions):
        kept = tuple(action for action in actions if action.id not in (RESET, "warm-up"))
        return (
            kept,
            f"no reference reset: {trouble[-1].entry.title.lower()} at the same time (it would become the anchor)",
        )
    return actions, ""


def _at_that_time(sign: Sign, root: Sign) -> bool:
    """Return whether the finding was active until at most shortly before the root began."""
    return sign.seen_step >= root.onset_step - sign.entry.reach


def _undo_first(actions: Sequence[Action], source: str) -> tuple[Action, ...]:
    """Return the actions with rolling back and a lower learning rate first, in the cause's own texts if it has any."""
    general = advice(CRASH, source)
    own = {action.id: action for action in (*(general.actions if general else ()), *actions)}
    return (*(own[id_] for id_ in UNDO), *(action for action in actions if action.id not in UNDO))


# The ranking.

UNEXPLAINED = "trigger unknown"
SLACK = 5
"""Error in steps of the step at which a finding began, for a log with a row each step; in a coarser
log it is two rows.
"""
MOST_CAUSES = 5
"""Largest number of causes that are returned."""


@dataclass(frozen=True, slots=True)
class SmallGap:
    """A gap between trainer and rollout engine that is too small for a finding, but shows its cause.

    ``cause``: as in :attr:`Cause.mismatch`. ``step``: first step at which it was seen. ``text``: description with the
    numbers that show it.
    """

    cause: str
    step: int
    text: str

    def to_dict(self) -> dict[str, JSON]:
        """Return the gap as plain values for JSON."""
        return {"cause": self.cause, "step": self.step, "text": self.text}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The likely causes of a run's failure; none if nothing worse than a remark was found.

    Parameters
    ----------
    causes
        Possible causes, the most likely first.
    enough
        Whether one of them is at least plausible.
    why_not
        Reason why no cause is named, where ``enough`` is False.
    at_step
        Step up to which data were used; None: nothing was found.
    gap
        Cause of a gap between trainer and rollout engine that is too small for a finding; None without such a gap.
    """

    causes: tuple[Cause, ...] = ()
    enough: bool = False
    why_not: str = ""
    at_step: int | None = None
    gap: SmallGap | None = None

    @property
    def nature(self) -> Nature:
        """``cause`` if one is named, ``symptom`` if only the first sign of the failure is known,
        ``unknown`` otherwise.
        """
        return self.causes[0].nature if self.enough else Nature.UNKNOWN

    @property
    def summary(self) -> str:
        """One line with the likeliest cause, its confidence and its effects; or with the first symptom; or why there
        is no cause.
        """
        if not self.enough:
            return self.why_not
        first = self.causes[0]
        if first.nature is Nature.SYMPTOM:
            return f"{UNEXPLAINED}; {first.summary}"
        return f"most likely: {first.title} ({first.sure.words}): {first.summary}"

    def to_dict(self) -> dict[str, JSON]:
        """Return the diagnosis as plain values, as in ``rlwatch scan --format json``."""
        return {
            "summary": self.summary,
            "nature": self.nature.value,
            "enough": self.enough,
            "why_not": self.why_not,
            "at_step": self.at_step,
            "gap": None if self.gap is None else self.gap.to_dict(),
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
    turns: Iterable[KnobChange] = (),
    first_step: int | None = None,
) -> Diagnosis:
    """Rank the possible causes of a run's failure.

    A finding is explained by an earlier one that is known to lead to it (``leads_to`` in the catalogue). An unexplained
    finding came first, and ranks by what it explains: it is a cause if it is a mechanism, otherwise a symptom of
    unknown cause. A setting that changed before the first finding is a cause of its own, and ranks by how much such a
    change is known to hurt. Causes that began after the failure rank last. The result depends neither on the order of
    ``findings`` nor on anything after ``at``.

    Parameters
    ----------
    findings, events
        Of one run, all attempts (processes); steps that a later attempt ran again count only there.
    source
        The trainer (``RunInfo.source``), for the option names of the advice.
    at
        Last step to use; None: all.
    row_steps
        Number of steps between two rows of the log: the resolution of onsets.
    measured
        Canonical names of the metrics that the run logs, to name what is missing; None: unknown.
    starts
        First step of each attempt, where more is known than findings and events show.
    turns
        Changes of settings during the run: logged ones, and those inferred from metrics that they move.
    first_step
        First step of the run; None: the smallest of ``starts``. A state that was present in the first two rows explains
        nothing that began later.

    >>> from rlwatch.records import Severity
    >>> def found(kind, onset, level=Severity.CRITICAL):
    ...     return Finding("d", kind, level, onset + 9, onset, "")
    >>> run = [found("reward_drop", 498), found("mismatch_growth", 412), found("entropy_collapse", 455)]
    >>> diagnose(run).summary  # doctest: +NORMALIZE_WHITESPACE
    'most likely: Train-inference mismatch (high confidence): the trainer-engine mismatch grew from step 412;
     entropy fell from 455; reward fell from 498'
    """
    past = [e for e in events if e.step is None or at is None or e.step <= at]
    held = _held(findings, past, at, starts)
    found = signs(held, begun=_begun(first_step, starts, row_steps))
    turns = tuple(turns)
    gap = _small_gap(turns, at)
    if not any(sign.bad for sign in found):
        why_not = "no finding above info severity" if found else "nothing was found"
        return Diagnosis(why_not=why_not if gap is None else f"{why_not}; {gap.text}", at_step=at, gap=gap)
    given = Circumstances(found, max(SLACK, 2 * row_steps), past, source)
    turned = _changed_settings(turns, at, given, measured)
    causes = with_knobs(_causes(given), turned, given)
    causes = tuple(_with_mismatch(cause, turned, given, row_steps, measured) for cause in causes)
    enough = any(cause.sure is not Confidence.WEAK for cause in causes)
    last = max(f.step for f in held) if at is None else at
    gap = None if any(cause.mismatch for cause in causes) else gap
    return Diagnosis(causes, enough, "" if enough else lacking(causes, measured), last, gap)


def _small_gap(turns: Sequence[KnobChange], at: int | None) -> SmallGap | None:
    """Return the cause of the gap between trainer and rollout engine up to step ``at``; None where it shows none."""
    turn = standing_cause(turn for turn in turns if at is None or turn.step <= at)
    if turn is None:
        return None
    text = f"the gap between trainer and rollout engine is too small for a finding; it shows {turn.name}: {turn.text}"
    return SmallGap(turn.name, turn.step, text)


def _held(
    findings: Iterable[Finding], past: Sequence[Event], at: int | None, starts: Mapping[int, int] | None
) -> list[Finding]:
    """Return the findings up to step ``at`` that no later attempt ran again, without those of forecasts."""
    reported = [f for f in findings if not f.stage.better and (at is None or f.step <= at)]
    return _without_forecasts(on_branch(reported, starts_of(reported, past) if starts is None else starts))


def _begun(first_step: int | None, starts: Mapping[int, int] | None, row_steps: int) -> float:
    """Return the step of the second row, up to which a state explains nothing that began later; -inf if unknown."""
    first_step = min((starts or {}).values(), default=None) if first_step is None else first_step
    return -math.inf if first_step is None else first_step + row_steps


def _changed_settings(
    turns: Iterable[KnobChange], at: int | None, given: Circumstances, measured: Collection[str] | None
) -> list[KnobChange]:
    """Return the changes of settings up to step ``at``: logged, of the run's events, and inferred from metrics."""
    turned = [
        turn
        for turn in (*turns, *event_turns(given.events))
        if (at is None or turn.step <= at) and _shows(turn, given.found)
    ]
    trouble = given.trouble
    return turned if trouble is None else [*turned, *guesses(turned, given.found, trouble.first, given.slack, measured)]


def _shows(turn: KnobChange, found: Sequence[Sign]) -> bool:
    """Return False for a setting that is large from the start if none of its known effects was found."""
    if turn.source is not ChangeSource.STANDING:
        return True
    return any(sign.bad and sign.kind in catalogue.knobs()[turn.knob].large["shows"] for sign in found)


def _without_forecasts(held: list[Finding]) -> list[Finding]:
    """Return the findings without forecasts, which neither cause nor follow anything, if there are others."""
    return [finding for finding in held if finding.kind != CRASH_FORECAST] or held


def _causes(given: Circumstances) -> tuple[Cause, ...]:
    worst = given.worst
    cases = [case for case in _cases(chains(given.found, given.slack), worst, given.slack) if case.bad]
    made = [(_rank(case, worst), _cause(case, given)) for case in cases]
    return tuple(cause for _, cause in sorted(made, key=lambda pair: pair[0])[:MOST_CAUSES])


def _cases(found: Sequence[Chain], worst: Sign, slack: int) -> list[CauseCase]:
    """Group the chains by their cause; the chain that explains most represents its group."""
    grouped: dict[str, list[Chain]] = defaultdict(list)
    for chain in found:
        grouped[chain.root.entry.cause].append(chain)
    best = {title: min(group, key=lambda chain: _weight(chain, worst)) for title, group in grouped.items()}
    return [_case(title, best, grouped, slack) for title in best]


def _case(title: str, best: Mapping[str, Chain], grouped: Mapping[str, Sequence[Chain]], slack: int) -> CauseCase:
    chain = best[title]
    others = [other for other in grouped[title] if other is not chain]
    passed = [o for o in others if not o.effects and o.root.onset_step < chain.root.onset_step - slack]
    together = tuple(o for o in others if abs(o.root.onset_step - chain.root.onset_step) <= chain.root.entry.reach)
    rivals = tuple(
        sorted(
            name
            for name, other in best.items()
            if name != title
            and any(sign.bad for sign in {other.root, *other.effects} & {chain.root, *chain.effects})
            and abs(other.root.onset_step - chain.root.onset_step) <= slack
        )
    )
    return CauseCase(chain, together, len(passed) if chain.effects else 0, rivals, slack)


def _weight(chain: Chain, worst: Sign) -> tuple[bool, int, int]:
    """Return a sort key, smaller is better: explains the worst sign, explains more, began earlier."""
    explains = worst in (chain.root, *chain.effects)
    return (not explains, -sum(1 + 2 * effect.severity.rank for effect in chain.effects), chain.root.onset_step)


def _rank(case: CauseCase, worst: Sign) -> tuple[bool, bool, int, int, int, str]:
    """Return a sort key, smaller is better: explains the worst sign, is more certain, explains more, began earlier."""
    sure, _ = case.judged()
    missed, weight, onset = _weight(case.chain, worst)
    return (missed, not case.chain.root.bad, -sure.rank, weight, onset, case.chain.root.kind)


def _cause(case: CauseCase, given: Circumstances) -> Cause:
    sure, why = case.judged()
    root = case.chain.root
    shown = _shown(case)
    mechanism = root.entry.mechanism
    knob = catalogue.knobs().get(knob_of(root.kind)) if mechanism else None
    inside = knob is None or not knob.outside
    actions, withheld = treatment(root, shown, given.found, given.source, undo=inside)
    about = happenings(given.events, shown)
    rows = sorted([*map(_evidence, shown), *about], key=lambda e: (e.step, e.severity is not None, e.kind))
    return Cause(
        kind=root.kind,
        title=root.entry.cause if mechanism else f"{_capital(root.entry.happened)}; {UNEXPLAINED}",
        onset_step=min(sign.onset_step for sign in shown),
        sure=sure,
        why=why,
        summary=_summary(shown),
        evidence=tuple(rows),
        symptoms=tuple(dict.fromkeys(sign.kind for sign in case.chain.effects)),
        actions=actions,
        withheld=withheld,
        knob="" if knob is None else knob.name,
        nature=Nature.CAUSE if mechanism else Nature.SYMPTOM,
    )


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _shown(case: CauseCase) -> list[Sign]:
    """Return the first finding and its effects in time order, each kind once, with findings of parallel chains not
    earlier.
    """
    own = [case.chain.root, *case.chain.effects]
    since = min(sign.onset_step for sign in own)
    parallel = [sign for other in case.also for sign in (other.root, *other.effects) if sign.onset_step >= since]
    return _once([*own, *parallel])


def _once(among: Sequence[Sign]) -> list[Sign]:
    """Return each kind of finding once, from its first onset, with its most severe text, in time order."""
    first: dict[str, Sign] = {}
    for sign in sorted(among, key=lambda sign: (sign.onset_step, sign.kind)):
        known = first.setdefault(sign.kind, sign)
        if sign.severity.rank > known.severity.rank:
            first[sign.kind] = replace(known, severity=sign.severity, message=sign.message)
    return list(first.values())


def _summary(shown: Sequence[Sign]) -> str:
    """Return the chain in one sentence; of several findings with the same cause only the first."""
    first: dict[str, Sign] = {}
    for sign in shown:
        first.setdefault(sign.entry.cause, sign)
    links = [(sign.entry.happened, sign.onset_step) for sign in first.values()]
    return "; ".join(f"{what} from {'' if place else 'step '}{onset}" for place, (what, onset) in enumerate(links))


def _evidence(sign: Sign) -> Evidence:
    text = f"{sign.entry.happened} from step {sign.onset_step}"
    return Evidence(sign.onset_step, text, sign.kind, sign.severity, sign.seen_step, sign.metric, sign.message)


# Changed settings among the causes, ranked by weight together with unexplained signs.

MECHANISM, SYMPTOM, NEXT_KIND = 1.0, 0.5, 0.9
"""Weight of a known mechanism without a changed setting; then of a symptom; and the factor from each
cause to the next.
"""
BROKEN = 1.6
"""Factor on the weight of non-finite values, which are certain evidence."""
RIVAL = 0.65
"""Share of the first cause's weight from which on another cause is a rival."""
MOST_TURNS = 4
"""Largest number of changes of one setting that are given as evidence."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Everything that is known about a failure apart from its causes.

    ``found``: the findings as signs, one for each beginning. ``slack``: error of their onsets, in steps. ``events``:
    events of the run. ``source``: the trainer.
    """

    found: Sequence[Sign]
    slack: int
    events: Sequence[Event]
    source: str

    @property
    def trouble(self) -> Trouble | None:
        """Time span of the failure: the stretch of findings with the largest weight; None where there
        are only remarks.
        """
        return trouble_of(self.found, self.slack)

    @property
    def worst(self) -> Sign:
        """The finding to explain: the first of the most severe, preferably one after which training must be rolled
        back.
        """
        bad = [sign for sign in self.found if sign.bad]
        trouble = self.trouble
        if trouble is not None:
            bad = [sign for sign in bad if trouble.began <= sign.onset_step <= trouble.last]
        return min(bad, key=lambda sign: (-sign.severity.rank, sign.onset_step, not sign.entry.undone, sign.kind))


def with_knobs(causes: Sequence[Cause], turns: Sequence[KnobChange], given: Circumstances) -> tuple[Cause, ...]:
    """Return the causes together with causes for settings that changed, the heaviest first, at most
    :data:`MOST_CAUSES`.

    Without a changed setting ``causes`` are returned unchanged.

    Parameters
    ----------
    causes
        Causes that follow from the findings, the likeliest first.
    turns
        Changes of settings during the run.
    given
        Findings, events and trainer.
    """
    trouble = given.trouble
    suspected = {} if trouble is None else {suspect.knob.name: suspect for suspect in suspects(turns, trouble)}
    if trouble is None or not suspected:
        return tuple(causes)
    weighed: list[tuple[float, Cause]] = []
    shown: set[str] = set()
    for place, cause in enumerate(causes):
        suspect = suspected.get(cause.knob)
        if suspect is not None and not suspect.inferred and cause.kind in suspect.knob.shows:
            continue  # the sign is an effect of the changed setting
        named = cause.nature is Nature.CAUSE and cause.sure is not Confidence.WEAK
        weight = (MECHANISM if named else SYMPTOM) * NEXT_KIND**place
        weight *= BROKEN if cause.kind == "nonfinite" else 1.0
        if suspect is not None and suspect.inferred and cause.knob not in shown:
            shown.add(cause.knob)
            weighed.append((max(weight, suspect.weight), _with_footprint(cause, suspect)))
        else:
            weighed.append((weight, cause))
    left = (suspect for name, suspect in suspected.items() if name not in shown)
    made = ((suspect.weight, _knob_cause(suspect, trouble, given)) for suspect in left)
    weighed += [(weight, cause) for weight, cause in made if cause is not None]
    late = trouble.first
    ordered = sorted(weighed, key=lambda pair: (pair[1].onset_step > late, -pair[0]))[:MOST_CAUSES]
    return tuple(_among(cause, weight, ordered) for weight, cause in ordered)


def _with_footprint(cause: Cause, suspect: Suspect) -> Cause:
    turn = suspect.turn
    row = Evidence(turn.step, f"{turn.text} from step {turn.step}", suspect.knob.name)
    return replace(cause, evidence=tuple(sorted((*cause.evidence, row), key=lambda e: e.step)))


def _titled(knob: catalogue.Knob, words: str, *, stated: bool) -> str:
    """Return the title of a cause; a change of something other than the setting itself is in brackets."""
    if knob.outside:
        return f"{knob.title} ({words})"
    return f"{knob.title}: {words}" if stated else f"{knob.title} {words}"


MISMATCH = catalogue.entry("mismatch_growth").cause
"""Title of the causes that may be refined by a :class:`MismatchCause`."""


def _with_mismatch(
    cause: Cause, turned: Sequence[KnobChange], given: Circumstances, row_steps: int, measured: Collection[str] | None
) -> Cause:
    """Return the cause; for a mismatch, add the cause that the shape of the gap shows, and the actions against it.

    An observed change of an engine setting is a better answer, and is kept.
    """
    turned_engine = {turn.source for turn in turned if turn.knob == ENGINE} - {ChangeSource.MEASURED}
    inferred = cause.kind == ENGINE and turned_engine <= {ChangeSource.INFERRED}
    if cause.title != MISMATCH and not inferred:
        return cause
    turn = cause_of(turned, cause.onset_step, given.slack, row_steps)
    if turn is None and measured is None:
        return cause
    if turn is None or turn.name == MismatchCause.UNCLEAR:
        text = f"why they differ is not separable with what is logged: log {wanted(measured)}"
        row = Evidence(cause.onset_step, text, ENGINE)
        return replace(
            cause, why=f"{cause.why}; {text}", evidence=_in_order(cause, row), mismatch=MismatchCause.UNCLEAR.value
        )
    row = Evidence(turn.step, f"{turn.name} from step {turn.step}: {turn.text}", ENGINE)
    known = advice(ENGINE, given.source)
    own = {action.id: action for action in (*(known.actions if known is not None else ()), *cause.actions)}
    ahead = [own[id_] for id_ in FIRST_ACTIONS[MismatchCause(turn.name)] if id_ in own]
    undo = [action for action in cause.actions[: len(UNDO)] if action.id in UNDO]
    first = [*undo, *(action for action in ahead if action not in undo)]
    return replace(
        cause,
        title=f"{cause.title}: {turn.name}",
        why=f"{cause.why}; {turn.text}",
        evidence=_in_order(cause, row),
        actions=(*first, *(action for action in cause.actions if action not in first)),
        mismatch=turn.name,
    )


def _in_order(cause: Cause, row: Evidence) -> tuple[Evidence, ...]:
    return tuple(sorted((*cause.evidence, row), key=lambda e: e.step))


def _knob_cause(suspect: Suspect, trouble: Trouble, given: Circumstances) -> Cause | None:
    """Return the cause for a changed setting; None where nothing bad followed.

    Onsets have an error, changes have none: an effect dated a little earlier began with the change.
    """
    turn, knob = suspect.turn, suspect.knob
    since = turn.step - trouble.slack
    effects = _once([sign for sign in given.found if sign.onset_step >= since and sign.kind in knob.leads_to])
    if not any(sign.bad for sign in effects):
        return None
    words = turn.words(trouble.first)
    root = Sign(knob.name, turn.step, turn.step, Severity.INFO, words)
    actions, withheld = treatment(root, [root, *effects], given.found, given.source, undo=not knob.outside)
    found = [(t.step, t.words(trouble.first)) for t in suspect.turns[:MOST_TURNS]]
    rows = [Evidence(at, text if knob.outside else f"{knob.title} {text}", knob.name) for at, text in found]
    rows += [*map(_evidence, effects), *happenings(given.events, [root, *effects])]
    sure, why = _judged(suspect, effects, trouble)
    name = knob.title.lower() if knob.title.istitle() else knob.title
    return Cause(
        kind=knob.name,
        title=_titled(knob, words, stated=bool(turn.text)),
        onset_step=min(turn.step, *(sign.onset_step for sign in effects)),
        sure=sure,
        why=why,
        summary=f"{name}{':' if turn.text and not knob.outside else ''} {words}; {_summary(effects)}",
        evidence=tuple(sorted(rows, key=lambda e: (e.step, e.severity is not None, e.kind))),
        symptoms=tuple(dict.fromkeys(sign.kind for sign in effects)),
        actions=actions,
        withheld=withheld,
        knob=knob.name,
        change=turn,
    )


def _judged(suspect: Suspect, effects: Sequence[Sign], trouble: Trouble) -> tuple[Confidence, str]:
    """Return confidence and reasons for a changed setting.

    Strong: the change was logged, in time, large enough, and followed by a critical finding.
    """
    turn, lag = suspect.turn, trouble.first - suspect.turn.step
    steps = "1 step" if abs(lag) == 1 else f"{abs(lag)} steps"
    when = f"{steps} before the first symptom" if lag > 0 else "at about the time of the first symptom"
    what = f"{_turned(turn, trouble.first)}, {when}"
    if -lag > trouble.slack:
        return Confidence.WEAK, f"{_turned(turn, trouble.last)} {steps} after the first symptom"
    if turn.warming:
        return Confidence.PLAUSIBLE, "still in warm-up at the first symptom"
    if turn.why:
        return Confidence.PLAUSIBLE, turn.why if turn.source is ChangeSource.STANDING else f"{when}; {turn.why}"
    if suspect.inferred:
        return Confidence.PLAUSIBLE, f"inferred from the metrics it moves, {when}; the change was not logged"
    if suspect.weight < 1:
        sure = Confidence.PLAUSIBLE if suspect.weight >= SOME else Confidence.WEAK
        return sure, f"{what}: smaller than changes known to break runs"
    if any(sign.severity is Severity.CRITICAL for sign in effects):
        return Confidence.STRONG, f"{what}"
    return Confidence.PLAUSIBLE, f"{what}; nothing critical followed"


def _turned(turn: KnobChange, step: int) -> str:
    """Return the change in a few words: ``raised 12x``, ``lowered 3x``, ``changed``."""
    factor = turn.factor(max(step, turn.step))
    if factor is None:
        return "changed"
    return f"raised {number(factor, 2)}x" if factor >= 1 else f"lowered {number(1 / factor, 2)}x"


def _among(cause: Cause, weight: float, all_of_them: Sequence[tuple[float, Cause]]) -> Cause:
    """Return the cause, less certain where another setting has about the same weight."""
    known = catalogue.knobs()
    rivals = [c.title for size, c in all_of_them if c is not cause and size >= RIVAL * weight and c.knob in known]
    if cause.sure is not Confidence.STRONG or not rivals:
        return cause
    return replace(cause, sure=Confidence.PLAUSIBLE, why=f"{cause.why}; other candidate: {rivals[0]}")
