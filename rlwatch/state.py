"""The state of a run (healthy, at risk, collapsed ...) and its headline, from which every interface takes its texts.

:func:`verdict_of` returns the state, :func:`explained` the diagnosis that may be shown with it, :func:`headline_of` the
one sentence. List, run page, ``show``, ``scan``, reports, alerts, JSON, notebooks and exit codes use them, so that they
cannot contradict each other. These invariants hold at every row of every run and are tested there:

* A healthy headline has no cause and no advice, and exit code 0.
* A cause begins no later than the failure that it explains, and none is named without an active warning or critical
  finding.
* A forecast is shown only for a run that goes on and has not failed.
* A run is healthy only if it logs a reward and has at least :data:`LEAST_STEPS` steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rlwatch.catalogue import FindingKind, entry
from rlwatch.diagnosis import Action, Cause, Confidence, Diagnosis, Nature
from rlwatch.diagnosis.signs import failure_onset, on_branch
from rlwatch.metrics import foremost, unjudged
from rlwatch.records import CRASH_FORECAST, JSON, Finding, RunInfo, RunState, Severity, Stage
from rlwatch.wording import chance, duration, one_line, plural, step, words

UNDO = "roll-back"
"""The action that is advised only to a failed run that has trained well before."""
LEAST_STEPS = 10
"""Fewest steps from which a run without findings is judged."""
START_STEPS = 10
"""Steps from the first row within which a failure counts as present from the start."""
MATTERS: Mapping[str, frozenset[str]] = {
    "reward": frozenset({"reward/mean"}),
    "entropy": frozenset({"policy/entropy"}),
    "KL": frozenset({"policy/kl_ref", "policy/kl_ref_k1", "policy/kl_ref_k2", "policy/kl_ref_k3", "policy/kl_old"}),
}
"""Quantities that show a failure of training -> the metrics that measure them."""
SUPPORTING: Mapping[str, frozenset[str]] = {"length": frozenset({"len/mean", "len/p50", "len/clipped"})}
"""Further quantities, without which some failures cannot be detected -> the metrics that measure them."""
REWARD = "reward"
REWARD_RULE = "reward"
"""Alert rule of the kinds that mean, while they are active, that the reward is below its best."""
WEIGHT, LEAST_WEIGHT = "weight ", 0.2
"""Prefix of the evidence of :data:`JOINT` with the weight of a metric, and the smallest weight that is named."""
BROKE: Mapping[str, str] = {
    "reward/zero_std_frac": "learning signal fell",
    "reward/": "reward {}",
    "policy/entropy": "entropy {}",
    "policy/kl": "KL rose",
    "policy/": "clipping rose",
    "optim/grad": "gradient norm {}",
    "optim/": "loss {}",
    "len/clipped": "truncation {}",
    "len/": "response length {}",
    "mismatch/": "mismatch grew",
    "ratio/": "importance ratios spread",
    "text/": "broken output rose",
    "critic/": "value loss {}",
    "": "other metrics moved",
}
"""Prefix of a metric's name -> its text in a headline; the first match counts, ``{}`` for ``rose`` or ``fell``."""
REWARD_DROP = "reward_drop"
"""Kind of finding that is only a remark while there are too few rows with a low reward."""
JOINT = "joint_collapse"
"""Kind for several metrics that broke together; the individual kinds are named instead where they are known."""
NAMED = 3
"""Kinds of findings that the detail of a verdict names."""
BROKEN, ROOM = 2, 90
"""Kinds of findings that a headline names, and the characters available: of longer texts it names one."""
NAMES_LISTED = 6
"""Largest number of unread names that a verdict lists."""
LONGEST = 300
"""Largest number of characters of names in a verdict, because a log may use any names."""
HEADLINE = 110
"""Characters up to which a cause and an action are added to a headline."""


class State(StrEnum):
    """States of a run, as every interface shows them."""

    NOT_JUDGED = "not judged"
    """No step, too few steps, or no reward that carries information, and no finding."""
    HEALTHY = "healthy"
    NOT_LEARNING = "not learning"
    """The reward never rose, from the first steps on."""
    AT_RISK = "at risk"
    """A warning is active, or a forecast for a run that goes on."""
    FAILING = "failing"
    """A critical finding is active, in a run that goes on."""
    COLLAPSED = "collapsed"
    """The policy is broken, whether the run goes on or not."""
    RECOVERED = "recovered"
    """A critical finding existed, and none is active any more."""
    DAMAGED = "damaged"
    """The run ended clearly below its best, or with a critical finding that is no collapse."""
    KILLED = "killed"
    """The run did not end by itself: an error, a signal, or a process without heartbeat."""
    UNFINISHED = "unfinished"
    """The log ends before its trainer was done."""


SERIOUS = frozenset({State.DAMAGED, State.COLLAPSED, State.KILLED, State.FAILING})
"""States that are critical, whatever finding is active."""
FAILED = frozenset({State.DAMAGED, State.COLLAPSED, State.NOT_LEARNING, State.FAILING})
"""States of a failure that has happened, for which no forecast is shown."""


UNFIT: Mapping[State, frozenset[str]] = {
    State.AT_RISK: frozenset({UNDO}),
    State.NOT_LEARNING: frozenset({UNDO, "lower-lr"}),
}
"""State -> actions that do not fit it, whatever the cause."""


class End(StrEnum):
    """Ways in which the rows of a run end."""

    GOES_ON = "goes on"
    DONE = "done"
    """The trainer finished, or nothing else is known because a log just ends."""
    KILLED = "killed"
    STOPPED = "stopped"
    """A log with fewer steps than its trainer was to run."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Kind, step and reason of the end of a run.

    ``how``: kind of the end. ``at``: last step of the run, if known. ``why``: reason given by its writer or its log.
    """

    how: End = End.DONE
    at: int | None = None
    why: str = ""


def ending_of(run: RunInfo, *, gone: bool = False) -> Ending:
    """Return how a stored run ended, by the state that its writer recorded.

    ``gone``: the recorded state is running, but its process has sent no heartbeat for so long that it must be dead.
    """
    if run.state is RunState.CRASHED:
        return Ending(End.KILLED, run.last_step, run.state_reason or "the trainer ended with an error")
    if run.state is RunState.UNFINISHED:
        return Ending(End.STOPPED, run.last_step, run.state_reason)
    if run.state is RunState.FINISHED:
        return Ending(End.DONE, run.last_step)
    if gone:
        return Ending(End.KILLED, run.last_step, "its process no longer responds")
    return Ending(End.GOES_ON, run.last_step)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The state of a run with the sentence that describes it.

    Attributes
    ----------
    level
        Worst severity of all findings, past ones included, without steps that were run again; None: no finding.
    text
        The state with its detail: findings, those that are over, and quantities that could not be judged.
    missing
        Quantities that are not logged, or carry no information (see :data:`MATTERS` and :data:`SUPPORTING`).
    state
        The state.
    at
        Step of the collapse, or at which the run was killed; None in other states.
    standing
        Worst severity of the active findings; None without any.
    since
        Step at which the first finding behind the state began; None where nothing is wrong.
    brief
        The state and what broke, without cause and action.
    ongoing
        Whether the run goes on.
    early
        Whether the failure began within :data:`START_STEPS` steps: there is no good state to go back to.
    """

    level: Severity | None
    text: str
    missing: tuple[str, ...] = ()
    state: State = State.HEALTHY
    at: int | None = None
    standing: Severity | None = None
    since: int | None = None
    brief: str = ""
    ongoing: bool = False
    early: bool = False

    @property
    def name(self) -> str:
        """The state with its step, such as ``collapsed@198``."""
        return _named_at(self.state, self.at)

    @property
    def judged(self) -> bool:
        """Return False where too little was logged to judge the run, so that the absence of findings proves nothing."""
        return self.state is not State.NOT_JUDGED and not _blind(self.missing)

    @property
    def bad(self) -> bool:
        """Return whether the run has, or ever had, a warning or a critical finding, or is in a bad state now."""
        return self.level in (Severity.WARNING, Severity.CRITICAL) or self.urgency is not None

    @property
    def urgency(self) -> Severity | None:
        """Severity of the present state: critical where the run failed, warning where it is at risk; None where it is
        healthy.
        """
        if self.state in SERIOUS:
            return Severity.CRITICAL
        if self.state is State.HEALTHY:
            return None
        return Severity.CRITICAL if self.standing is Severity.CRITICAL else Severity.WARNING

    @property
    def failed(self) -> bool:
        """Return whether a failure has already happened, so that no forecast is shown."""
        return self.state in FAILED or self.standing is Severity.CRITICAL

    @property
    def explains(self) -> bool:
        """Return whether a cause may be named: a warning or a critical finding is active."""
        return self.since is not None and self.standing in (Severity.WARNING, Severity.CRITICAL)

    @property
    def exit_code(self) -> int:
        """Exit code of commands that judge a run: 1 if anything is or was critical, 3 if the run was not judged, else
        0.
        """
        if self.level is Severity.CRITICAL or self.urgency is Severity.CRITICAL:
            return 1
        return 3 if self.state is State.NOT_JUDGED else 0

    def to_dict(self) -> dict[str, JSON]:
        """Return the verdict as plain values for JSON; ``word`` repeats ``state`` under its earlier name."""
        level = None if self.level is None else self.level.value
        urgency = None if self.urgency is None else self.urgency.value
        named = {"name": self.name, "state": self.state.value, "word": self.state.value, "at": self.at}
        return named | {
            "since": self.since,
            "urgency": urgency,
            "level": level,
            "brief": self.brief,
            "text": self.text,
            "judged": self.judged,
            "missing": list(self.missing),
        }


# Diagnosis, forecast and headline that fit a state.


def explained(diagnosis: Diagnosis, verdict: Verdict) -> Diagnosis:
    """Return ``diagnosis`` (the likely causes) restricted to what may be shown with the state ``verdict``.

    It is empty without an active warning or critical finding. Causes that began after the failure, and actions that do
    not fit the state, are left out.
    """
    if not verdict.explains or verdict.since is None:
        if not diagnosis.causes:
            return diagnosis
        return Diagnosis(why_not="what was found is over", at_step=diagnosis.at_step, gap=diagnosis.gap)
    kept = tuple(_advised(cause, verdict) for cause in diagnosis.causes if cause.onset_step <= verdict.since)
    if kept == diagnosis.causes:
        return diagnosis
    if len(kept) == len(diagnosis.causes):
        return replace(diagnosis, causes=kept)
    enough = bool(kept) and kept[0].sure is not Confidence.WEAK
    lacks = "what began before it is only a hint" if kept else "nothing that was found began before the failure"
    why_not = "" if enough else f"no cause is known: {lacks}"
    return replace(diagnosis, causes=kept, enough=enough, why_not=why_not)


def _advised(cause: Cause, verdict: Verdict) -> Cause:
    """Return the cause with only those actions that fit the state.

    A run that has not failed, or never was good, is not advised to roll back; a policy that never learnt needs no lower
    rate.
    """
    unfit = UNFIT.get(verdict.state, frozenset[str]()) | ({UNDO} if verdict.early else set[str]())
    return replace(cause, actions=tuple(action for action in cause.actions if action.id not in unfit))


def forecast_allowed(verdict: Verdict) -> bool:
    """Return whether a forecast may be shown for a run in this state: the run goes on and has not failed."""
    return verdict.ongoing and not verdict.failed and verdict.state is not State.KILLED


def headline_of(verdict: Verdict, diagnosis: Diagnosis) -> str:
    """Return the one sentence about a run: its state, what broke, the cause if there is one, and the next action.

    ``diagnosis`` must come from :func:`explained`. Cause and action are left out where the sentence would be longer
    than :data:`HEADLINE` characters; interfaces show them below it.
    """
    text = verdict.brief or verdict.text
    cause = diagnosis.causes[0] if diagnosis.enough and diagnosis.causes else None
    if cause is None:
        return f"{text}."
    named = cause.nature is Nature.CAUSE and cause.sure is not Confidence.WEAK and _names_more(cause, verdict)
    parts = [f"cause: {_cause_words(cause)}"] if named else []
    parts += [_lowered(cause.actions[0].name)] if cause.actions else []
    for part in parts:
        if len(text) + len(part) + 2 <= HEADLINE:
            text = f"{text}; {part}"
    return f"{text}."


def next_action(diagnosis: Diagnosis) -> Action | None:
    """Return the first action against the likeliest cause of a diagnosis; None where no cause is named."""
    cause = diagnosis.causes[0] if diagnosis.enough and diagnosis.causes else None
    return cause.actions[0] if cause is not None and cause.actions else None


def _names_more(cause: Cause, verdict: Verdict) -> bool:
    """Return whether the cause adds information: it is no finding that the headline names already."""
    if cause.separated:
        return True
    broke = entry(cause.kind).happened if cause.kind != cause.knob else ""
    return not broke or broke not in verdict.brief


def _cause_words(cause: Cause) -> str:
    """Return the title of a cause as part of a sentence, without text in brackets; of a mismatch, the title of its
    cause.
    """
    title = (cause.mismatch if cause.separated else cause.title).split(" (", 1)[0]
    return _lowered(one_line(title, 60))


def _lowered(text: str) -> str:
    """Return ``text`` with a small first letter, unless its first word is an abbreviation."""
    return text if text[1:2].isupper() or not text else text[0].lower() + text[1:]


# Spans of findings, and the state that follows from them.


@dataclass(slots=True)
class FindingSpan:
    """One failure of a run from its beginning to its end, with all findings of its kind between them.

    Parameters
    ----------
    finding
        The first finding.
    onset
        Step at which the failure began, in retrospect.
    worst, now
        Worst severity so far, and the present one.
    over
        Finding that reports the end; None while the failure lasts.
    """

    finding: Finding
    onset: int
    worst: Severity
    now: Severity
    over: Finding | None = None

    @property
    def entry(self) -> FindingKind:
        """Entry of the catalogue of failures for the kind of this failure."""
        return entry(self.finding.kind)

    @property
    def active(self) -> bool:
        """Return whether the failure is not over, and is more than a remark (severity info)."""
        return self.over is None and self.now is not Severity.INFO

    @property
    def forecast(self) -> bool:
        """Return whether this is a forecast and not a failure that has happened."""
        return self.finding.kind == CRASH_FORECAST


def arrival(found: Finding) -> tuple[int, int, bool]:
    """Return a key that sorts findings and recoveries in their order of arrival."""
    return (found.attempt, found.seq, found.stage.better)


def spans_of(findings: Iterable[Finding]) -> list[FindingSpan]:
    """Group findings and recoveries into failures from beginning to end, sorted by the step at which each began.

    ``findings``: without those of steps that a later attempt ran again. A failure that began as a remark is dated by
    its first warning: two rows with a low reward at step 8 are not the fall at step 220.
    """
    found: list[FindingSpan] = []
    open_: dict[tuple[str, str], FindingSpan] = {}
    for finding in sorted(findings, key=arrival):
        key = (finding.detector, finding.kind)
        span = open_.get(key)
        if finding.stage is Stage.RESOLVED:
            if span is not None:
                span.now, span.over = Severity.INFO, finding
                del open_[key]
        elif finding.stage is Stage.EASED:
            if span is not None:
                span.now = finding.severity
        elif span is None:
            found.append(FindingSpan(finding, finding.onset_step, finding.severity, finding.severity))
            open_[key] = found[-1]
        else:
            remark = span.worst is Severity.INFO and finding.severity is not Severity.INFO
            span.onset = finding.onset_step if remark else min(span.onset, finding.onset_step)
            span.worst, span.now = _worse(span.worst, finding.severity), _worse(span.now, finding.severity)
    return sorted(found, key=lambda span: span.onset)


def _worse(one: Severity, other: Severity) -> Severity:
    return one if one.rank >= other.rank else other


@dataclass(frozen=True, slots=True)
class VerdictEvidence:
    """Everything on which the state of a run is based.

    Parameters
    ----------
    spans
        Failures from beginning to end.
    first
        First step of the run; None without steps.
    absent
        Quantities (reward, entropy, KL, length) that are not logged.
    unread
        Logged names that no metric is read from.
    logged
        Whether the logged names are known at all.
    steps
        Number of distinct steps; None: enough.
    ending
        How the run ended.
    unjudged_from
        First step whose rows were not searched for failures yet; None: all were.
    """

    spans: Sequence[FindingSpan]
    first: int | None
    absent: tuple[str, ...]
    unread: Collection[str]
    logged: bool
    steps: int | None
    ending: Ending
    unjudged_from: int | None = None

    @property
    def hidden(self) -> list[FindingSpan]:
        """Active remarks that a quantity is logged but carries no information."""
        return [span for span in self.spans if span.over is None and span.entry.hides]

    @property
    def missing(self) -> tuple[str, ...]:
        """Quantities (reward, entropy, KL, length) that cannot be judged: not logged, or without information."""
        gone = {*self.absent, *(span.entry.hides for span in self.hidden)}
        return tuple(fact for fact in (*MATTERS, *SUPPORTING) if fact in gone)

    @property
    def standing(self) -> list[FindingSpan]:
        """Failures that are active now; forecasts count only while the run goes on."""
        return [span for span in self.spans if span.active and (not span.forecast or self.ongoing)]

    @property
    def hard(self) -> list[FindingSpan]:
        """Failures that are active now, without forecasts."""
        return [span for span in self.standing if not span.forecast]

    @property
    def ongoing(self) -> bool:
        """Return whether the run goes on."""
        return self.ending.how is End.GOES_ON

    @property
    def unsearched(self) -> bool:
        """Return whether no step was searched for failures yet."""
        return self.unjudged_from is not None and (self.first is None or self.unjudged_from <= self.first)

    def early(self, onset: int) -> bool:
        """Return whether a failure that began at the step ``onset`` was present from the start of the run."""
        return self.first is None or onset < self.first + START_STEPS


def verdict_of(
    findings: Iterable[Finding],
    steps: Mapping[int, Sequence[int]],
    metrics: Collection[str] = (),
    unread_names: Collection[str] = (),
    ending: Ending = Ending(),
    *,
    count: int | None = None,
    since_s: float | None = None,
    unjudged_from: int | None = None,
) -> Verdict:
    """Return the state of a run with its sentence. This is the only function that decides the state, for every
    interface.

    Parameters
    ----------
    findings
        Findings and recoveries; those of steps that a later attempt ran again do not count.
    steps
        Attempt (process of the run) -> its steps, or only the first and the last of them.
    metrics, unread_names
        Canonical names of the logged metrics, and logged names that no metric is read from. Both empty: not known.
    ending
        How the run ended.
    count
        Number of distinct steps of the run; None: enough.
    since_s
        Seconds since the collapse, of a run that goes on.
    unjudged_from
        First step whose rows are stored and were not searched for failures yet; None: all were.

    >>> found = [Finding("d", "entropy_collapse", Severity.CRITICAL, 40, 31, "")]
    >>> verdict_of(found, {1: range(50)}).brief
    'Collapsed at step 31: entropy fell'
    """
    everything = list(findings)
    held = on_branch(everything, starts_of_attempts(steps))
    evidence = VerdictEvidence(
        spans=spans_of(held),
        first=min((own[0] for own in steps.values() if own), default=None),
        absent=_missing(metrics) if metrics or unread_names else (),
        unread=unread_names,
        logged=bool(metrics or unread_names),
        steps=count,
        ending=ending,
        unjudged_from=unjudged_from,
    )
    state, at = _state(evidence)
    level = max((finding.severity for finding in held), key=lambda severity: severity.rank, default=None)
    standing = max((span.now for span in evidence.standing), key=lambda severity: severity.rank, default=None)
    broken = _broken(state, evidence)
    since = failure_onset((span.entry, span.onset) for span in broken)
    brief = _brief(state, at, since, broken, evidence)
    if state is State.COLLAPSED and evidence.ongoing:
        brief += f"; still running {_lasting(since_s)} later" if since_s else "; still running"
    undone = "" if len(held) == len(everything) else "; findings of re-run steps are left out"
    text = f"{_detail(state, brief, broken, evidence)}{undone}"
    early = since is not None and evidence.first is not None and evidence.early(since)
    verdict = Verdict(level, text, evidence.missing, state, at, standing, since, brief, evidence.ongoing, early)
    return verdict if ending.how in (End.DONE, End.GOES_ON) else _with_ending(verdict, ending)


def _state(evidence: VerdictEvidence) -> tuple[State, int | None]:
    """Return the state by findings and logged metrics, and the step of a collapse or None."""
    hard = evidence.hard
    critical = [span for span in hard if span.now is Severity.CRITICAL]
    if any(span.entry.mute and span.now is span.entry.severity and evidence.early(span.onset) for span in hard):
        return State.NOT_LEARNING, None
    collapsed = [span.onset for span in critical if span.entry.collapse and not span.entry.outside]
    if collapsed:
        return State.COLLAPSED, min(collapsed)
    if critical:
        return (State.FAILING if evidence.ongoing else State.DAMAGED), None
    if not evidence.ongoing and any(span.entry.collapse and span.entry.rule == REWARD_RULE for span in hard):
        return State.DAMAGED, None
    if evidence.standing:
        return State.AT_RISK, None
    if any(span.worst is Severity.CRITICAL and not span.forecast for span in evidence.spans):
        return State.RECOVERED, None
    return (State.NOT_JUDGED if _too_little(evidence) else State.HEALTHY), None


def _too_little(evidence: VerdictEvidence) -> bool:
    """Return whether too little is logged to call the run healthy."""
    few = evidence.steps is not None and evidence.steps < LEAST_STEPS
    return few or REWARD in evidence.missing or evidence.unsearched


def _broken(state: State, evidence: VerdictEvidence) -> list[FindingSpan]:
    """Return the failures on which the state is based."""
    if state in (State.HEALTHY, State.RECOVERED, State.NOT_JUDGED):
        return []
    if state is State.NOT_LEARNING:
        return [span for span in evidence.hard if span.entry.mute]
    standing = evidence.standing if state is State.AT_RISK else evidence.hard
    worst = max((span.now.rank for span in standing), default=0)
    found = [span for span in standing if span.now.rank == worst]
    return sorted(found, key=lambda span: not span.entry.collapse) if state is State.COLLAPSED else found


# Sentences.

TITLES: Mapping[State, str] = {state: state.value.capitalize() for state in State}


def _named_at(state: State, at: int | None) -> str:
    return state.value if at is None else f"{state.value}@{at}"


def _brief(
    state: State, at: int | None, since: int | None, broken: Sequence[FindingSpan], evidence: VerdictEvidence
) -> str:
    """Return a short text with the state, the step since when, and what broke."""
    title = TITLES[state]
    if state is State.NOT_JUDGED:
        return f"{title}: {_unjudged(evidence)}"
    judged = "" if evidence.unjudged_from is None else f" before step {step(evidence.unjudged_from)}"
    if state is State.HEALTHY:
        at_end = f" at step {step(evidence.ending.at)}" if evidence.ongoing and evidence.ending.at is not None else ""
        where = judged or at_end
        if (remark := _last_rows(evidence)) is not None:
            return f"{title}{where}, but {remark.entry.happened} from step {step(remark.onset)}: too few rows to judge"
        return f"{title}{where}: no failure was found{_only_reward(evidence)}{_later(evidence)}"
    if state is State.RECOVERED:
        past = list(dict.fromkeys(map(_past, _critical_once(evidence))))
        text = f"{title}{judged}: {_some(past, BROKEN)}"
        text = text if len(text) < HEADLINE else f"{title}{judged}: {_some(past[-1:] + past[:-1], 1)}"
        return f"{text}{_later(evidence)}"
    if state is State.COLLAPSED:
        return f"{title} at step {step(at)}: {_broke(broken)}"
    if state is State.NOT_LEARNING:
        return f"{title}: {_broke(broken)}"
    return f"{title} since step {step(since)}: {_broke(broken)}{_reward_unread(evidence)}"


def _broke(broken: Sequence[FindingSpan]) -> str:
    """Return what broke, by onset; a joint finding adds only what is not named yet."""
    texts = list(dict.fromkeys(_happened(span) for span in broken if span.finding.kind != JOINT))
    for span in broken:
        if span.finding.kind == JOINT and len(texts) < BROKEN:
            texts += [each for each in _together(span) if each not in texts]
    text = _some(texts, BROKEN)
    return text if len(text) <= ROOM else _some(texts, 1)


def _happened(span: FindingSpan) -> str:
    """Return the text of a span in a headline; for a forecast its chance: ``failure risk 51% within 50 steps``."""
    p50 = span.finding.evidence.get("p50") if span.forecast else None
    return f"failure risk {chance(p50)} within 50 steps" if isinstance(p50, float) else span.entry.happened


def _together(span: FindingSpan) -> list[str]:
    """Return the parts of a joint failure, the heaviest first: ``reward fell``, ``truncation rose``."""
    weights = {name.removeprefix(WEIGHT): weight for name, weight in span.finding.evidence.items() if WEIGHT in name}
    heavy = sorted((name for name, weight in weights.items() if weight >= LEAST_WEIGHT), key=lambda n: -weights[n])
    moved = [next(texts for start, texts in BROKE.items() if name.startswith(start)) for name in heavy]
    verbs = ["rose" if name.endswith(" up") else "fell" for name in heavy]
    texts = [each.format(verb) for each, verb in zip(moved, verbs, strict=True)]
    return list(dict.fromkeys(texts)) or [span.entry.happened]


def _critical_once(evidence: VerdictEvidence) -> list[FindingSpan]:
    return [span for span in evidence.spans if span.worst is Severity.CRITICAL and not span.forecast]


def _detail(state: State, brief: str, broken: Sequence[FindingSpan], evidence: VerdictEvidence) -> str:
    """Return the state with all of its details in one line."""
    parts = [brief]
    if state in (State.HEALTHY, State.RECOVERED, State.AT_RISK):
        past = [_past(span) for span in evidence.spans if span.worst is Severity.WARNING and not span.active]
        past += [_past(s) for s in _critical_once(evidence) if not s.active] if state is State.AT_RISK else []
        remarks = _dated([span for span in evidence.spans if span.worst is Severity.INFO])
        parts += [f"earlier: {_some(list(dict.fromkeys(past)))}"] if past else []
        parts += [f"remarks: {remarks}"] if remarks and len(parts) == 1 and state is State.HEALTHY else []
    if broken:
        parts.append(_dated(broken))
    if evidence.missing and state is not State.NOT_JUDGED:
        parts.append(f"not judged: {_gap(evidence)}")
    return "; ".join(parts)


def _with_ending(verdict: Verdict, ending: Ending) -> Verdict:
    """Return the verdict with the run's ending: a kill precedes any state that the run could have survived."""
    ended = State.KILLED if ending.how is End.KILLED else State.UNFINISHED
    why = one_line(ending.why, LONGEST)
    brief, text = verdict.brief, verdict.text
    if verdict.state in (State.COLLAPSED, State.NOT_LEARNING):
        last = f"; {ended.value}" + ("" if ending.at is None else f" at step {step(ending.at)}")
        return replace(verdict, brief=brief + last, text=text + last + (f": {why}" if why else ""))
    at = ending.at if ended is State.KILLED else None
    title = TITLES[ended] if at is None else f"{TITLES[ended]} at step {step(at)}"
    short = f"{title}: {one_line(why, 60)}" if why else title
    return replace(
        verdict,
        state=ended,
        at=at,
        brief=f"{short}; until then {_lowered(brief)}",
        text=f"{title}: {why + '; ' if why else ''}until then {_lowered(text)}",
    )


def _unjudged(evidence: VerdictEvidence) -> str:
    """Return why the run was not judged."""
    if evidence.steps == 0:
        return "there is no training step"
    if evidence.steps is not None and evidence.steps < LEAST_STEPS:
        return f"only {plural(evidence.steps, 'step')}, at least {LEAST_STEPS} are needed"
    if evidence.unsearched:
        return "its rows were not searched for failures yet"
    return _gap(evidence)


def _last_rows(evidence: VerdictEvidence) -> FindingSpan | None:
    """Return the remark on the newest rows of the reward: they may be the beginning of a failure."""
    newest = [span for span in evidence.spans if span.over is None and span.finding.kind == REWARD_DROP]
    return newest[-1] if newest and "mix" not in newest[-1].finding.evidence else None


def _only_reward(evidence: VerdictEvidence) -> str:
    """Return a note that only the reward was judged, if so."""
    others = {*MATTERS, *SUPPORTING} - {REWARD}
    return " in the reward, and nothing else is logged" if evidence.logged and others <= set(evidence.missing) else ""


def _later(evidence: VerdictEvidence) -> str:
    return "" if evidence.unjudged_from is None else ", later steps are not judged yet"


def _reward_unread(evidence: VerdictEvidence) -> str:
    return "; no reward was read" if REWARD in evidence.absent else ""


def _past(span: FindingSpan) -> str:
    began = f"{words(span.finding.kind)} from step {step(span.onset)}"
    return f"{began}, resolved at step {step(span.over.step)}" if span.over is not None else f"{began}, eased"


def _missing(metrics: Collection[str]) -> tuple[str, ...]:
    return tuple(fact for fact, names in {**MATTERS, **SUPPORTING}.items() if names.isdisjoint(metrics))


def _blind(missing: Collection[str]) -> bool:
    return MATTERS.keys() <= set(missing)


def _gap(evidence: VerdictEvidence) -> str:
    """Return a text on the quantities that cannot be judged: those without information, and those not logged."""
    hidden = list(dict.fromkeys(span.entry.happened for span in evidence.hidden))
    return "; ".join((*hidden, *([_absent(evidence.absent, evidence.unread)] if evidence.absent else [])))


def _absent(missing: Sequence[str], unread_names: Collection[str]) -> str:
    names = foremost(name for name in unread_names if not unjudged(name, whole=REWARD not in missing))
    more = f" and {len(names) - NAMES_LISTED} more" if len(names) > NAMES_LISTED else ""
    listed = f"; unknown names: {one_line(', '.join(names[:NAMES_LISTED]), LONGEST)}{more}" if names else ""
    facts = " or ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
    return f"no {facts} is {'known' if names else 'logged'}{listed}"


def _dated(found: Iterable[FindingSpan]) -> str:
    """Return a text with each kind of failure and the step at which it first began."""
    onsets: dict[str, int] = {}
    for span in found:
        onsets.setdefault(span.finding.kind, span.onset)
    return _some([f"{words(kind)} from step {step(onset)}" for kind, onset in onsets.items()])


def _lasting(seconds: float) -> str:
    """Return a duration such as ``1.2 h``; from an hour on with a decimal, because it is a cost."""
    return f"{seconds / 3600.0:.1f}\u202fh" if 3600.0 <= seconds < 86400.0 else duration(seconds)


def _some(parts: Sequence[str], most: int = NAMED) -> str:
    more = len(parts) - most
    return ", ".join(parts[:most]) + (f", and {more} more" if more > 0 else "")


def starts_of_attempts(steps: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Return attempt (process of the run) -> its first step; attempts without steps are left out."""
    return {attempt: min(own) for attempt, own in steps.items() if own}
