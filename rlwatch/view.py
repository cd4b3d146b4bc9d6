"""The one view of a run: verdict, cause, advice, findings, forecast, what was done and what could not be judged.

Every face (terminal, JSON, report, dashboard, alerts) renders a :class:`RunView`, whether the run is stored, live, or a
log that was replayed: all of them say the same of it. Outside the monitor, which diagnoses while a run goes on, nobody
else calls :func:`~rlwatch.diagnosis.diagnose`: its answer depends on how coarsely the run was logged and where its
attempts began, so that two callers who knew different things would disagree.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from rlwatch.catalogue import Kind, entry
from rlwatch.detectors.base import NotRun, not_run
from rlwatch.detectors.registry import registered
from rlwatch.diagnosis import (
    TRACKED,
    Action,
    Cause,
    Diagnosis,
    KnobTracker,
    Sureness,
    Turn,
    config_turns,
    diagnose,
    row_steps,
)
from rlwatch.diagnosis.signs import on_branch
from rlwatch.metrics import canonicalise, foremost, known, resolve, unjudged, unread
from rlwatch.ports import Store
from rlwatch.records import (
    CRASH_FORECAST,
    CULPRITS,
    JSON,
    SHED,
    Alert,
    Command,
    Event,
    Finding,
    ForecastRecord,
    RunInfo,
    RunState,
    Severity,
    SpikeBatch,
    Stage,
    StepRecord,
)
from rlwatch.wording import one_line, step, words

if TYPE_CHECKING:
    from rlwatch.forecast import Forecast

NAMED = 3
"""Kinds of findings that a verdict names."""
NAMES_TOLD = 6
"""Names that nothing reads, of which a verdict tells."""
MATTERS: Mapping[str, frozenset[str]] = {
    "reward": frozenset({"reward/mean"}),
    "entropy": frozenset({"policy/entropy"}),
    "KL": frozenset({"policy/kl_ref", "policy/kl_ref_k1", "policy/kl_ref_k2", "policy/kl_ref_k3", "policy/kl_old"}),
}
"""Facts without any of which a failure of training cannot be seen, and the metrics that tell them."""
BESIDE: Mapping[str, frozenset[str]] = {"length": frozenset({"len/mean", "len/p50", "len/clipped"})}
"""The same of facts without which some failures cannot be seen."""
LONGEST = 300
"""Characters of names in a verdict: a log may call its metrics anything."""
CULPRIT_BATCHES = 8
"""The newest localised steps of which tokens are shown."""


class Word(StrEnum):
    """The word of a verdict, for what became of a run. Only one that goes on is in danger, or healthy so far."""

    HEALTHY = "healthy"
    RECOVERED = "recovered"
    """Something was critical, and is not any more."""
    DAMAGED = "damaged"
    """It ended clearly below its best, or with something critical that is no collapse."""
    COLLAPSED = "collapsed"
    DEAD = "dead from the start"
    """Nothing was ever learnt."""
    KILLED = "killed"
    """It did not end by itself: an error, a signal, or no more sign of its process."""
    UNFINISHED = "unfinished"
    """The log stops before its trainer was done."""
    IN_DANGER = "in danger"
    NOT_JUDGED = "not judged"


SERIOUS = frozenset({Word.DAMAGED, Word.COLLAPSED, Word.DEAD, Word.KILLED, Word.IN_DANGER})
FINE = (Word.HEALTHY, Word.RECOVERED)
DATED = frozenset({Word.COLLAPSED, Word.KILLED})
"""Words that come with their step."""
REWARD_RULE = "reward"
"""Alert rule of kinds that, where they can be a collapse, say while they stand that the reward is below its best."""
START_STEPS = 10
"""Steps from the first row on within which a failure was there from the start."""


class End(StrEnum):
    """Ways in which the rows of a run end."""

    GOES_ON = "goes on"
    DONE = "done"
    """The trainer came to its end, or nobody knows better: a log ends."""
    KILLED = "killed"
    STOPPED = "stopped"
    """A log that holds less than its trainer meant to do."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The way a run ended, at which step, and why, as its writer or its log tells."""

    how: End = End.DONE
    at: int | None = None
    why: str = ""


def ending_of(run: RunInfo, *, gone: bool = False) -> Ending:
    """Tell how a stored run ended. ``gone``: it says that it runs, but there is no sign of its process any more."""
    if run.state is RunState.CRASHED:
        return Ending(End.KILLED, run.last_step, run.state_reason or "the trainer ended with an error")
    if run.state is RunState.UNFINISHED:
        return Ending(End.STOPPED, run.last_step, run.state_reason)
    if run.state is RunState.FINISHED:
        return Ending(End.DONE, run.last_step)
    if gone:
        return Ending(End.KILLED, run.last_step, "there is no sign of its process any more")
    return Ending(End.GOES_ON, run.last_step)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The state of a run in one line.

    ``word``: what became of it, ``at`` which step where the word has one. ``level``: the worst severity observed and
    not run again since, also of what is over; None: nothing. ``standing``: the same of what is not over. ``missing``:
    what matters and nothing tells (see :data:`MATTERS` and :data:`BESIDE`).
    """

    level: Severity | None
    text: str
    missing: tuple[str, ...] = ()
    word: Word = Word.HEALTHY
    at: int | None = None
    standing: Severity | None = None

    @property
    def name(self) -> str:
        """The word with its step: ``collapsed@198``."""
        return self.word.value if self.at is None else f"{self.word.value}@{self.at}"

    @property
    def judged(self) -> bool:
        """False where nothing that matters is told: then that nothing was found says nothing."""
        return not _blind(self.missing)

    @property
    def bad(self) -> bool:
        """Worse than a remark."""
        return self.level in (Severity.WARNING, Severity.CRITICAL) or self.urgency is not None

    @property
    def urgency(self) -> Severity | None:
        """As bad as it is now: critical where the run is lost, hurt or in danger; None where all is well."""
        if self.word in SERIOUS:
            return Severity.CRITICAL
        if self.word is Word.HEALTHY:
            return Severity.WARNING if self.standing is Severity.WARNING else None
        return Severity.WARNING

    def to_dict(self) -> dict[str, JSON]:
        """Plain values."""
        level = None if self.level is None else self.level.value
        urgency = None if self.urgency is None else self.urgency.value
        named = {"name": self.name, "word": self.word.value, "at": self.at, "urgency": urgency}
        return named | {"level": level, "text": self.text, "judged": self.judged, "missing": list(self.missing)}


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as every face shows it.

    Parameters
    ----------
    steps
        Attempt -> the steps it has records of.
    metrics
        Canonical names of what it logs, sorted.
    unread
        Names of what it logs that are no metric of ours.
    findings, events, forecasts, alerts, commands
        In order of arrival; a log that was replayed has neither alerts nor commands.
    recoveries
        Of the findings, that they eased or are over.
    ending
        How it ended, if it did.
    culprits
        Tokens that localisation blames, the newest step first.
    not_judged
        Detectors, and the forecaster, that lacked their metrics.
    """

    run_id: str
    name: str = ""
    source: str = ""
    steps: Mapping[int, Sequence[int]] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    forecasts: tuple[ForecastRecord, ...] = ()
    events: tuple[Event, ...] = ()
    alerts: tuple[Alert, ...] = ()
    commands: tuple[Command, ...] = ()
    culprits: tuple[SpikeBatch, ...] = ()
    not_judged: tuple[NotRun, ...] = ()
    recoveries: tuple[Finding, ...] = ()
    ending: Ending = Ending()

    @property
    def verdict(self) -> Verdict:
        """The word for what became of the run, by what was found on the branch that counts and how it ended."""
        return verdict_of(self.told, self.steps, self.metrics, self.unread, self.ending)

    @property
    def told(self) -> tuple[Finding, ...]:
        """Findings and recoveries, in order of arrival."""
        return tuple(sorted((*self.findings, *self.recoveries), key=arrival))

    @property
    def explanation(self) -> Diagnosis:
        """The diagnosis as people are told it: beside a verdict that asks for none, none."""
        return explained(self.diagnosis, self.verdict)

    @property
    def cause(self) -> Cause | None:
        """The likeliest cause, where one is at least plausible and asked for."""
        return self.explanation.causes[0] if self.explanation.enough else None

    @property
    def sureness(self) -> Sureness | None:
        """Sureness of the cause."""
        return None if self.cause is None else self.cause.sure

    @property
    def onset_step(self) -> int | None:
        """The step at which the cause began, looking back."""
        return None if self.cause is None else self.cause.onset_step

    @property
    def advice(self) -> tuple[Action, ...]:
        """Actions against the cause, in order."""
        return () if self.cause is None else self.cause.actions

    @property
    def shed(self) -> tuple[str, ...]:
        """Sentences, one a kind, for what was recorded no more because there was no room for it."""
        return shed_lines(self.events)

    @property
    def forecast(self) -> Forecast | None:
        """The newest; it may be without a number, and then says why."""
        from rlwatch.forecast.forecast import forecast_of

        return forecast_of(self.forecasts[-1]) if self.forecasts else None


def shed_lines(events: Iterable[Event]) -> tuple[str, ...]:
    """Sentences for what the events say was shed, one a kind, with the newest reason.

    >>> said = {"what": "token records", "n": 12031, "first_step": 120, "last_step": 300, "why": "the disk is full"}
    >>> shed_lines([Event("shed", 300, said)])
    ('12,031 token records were shed between step 120 and 300, because the disk is full',)
    """
    sums: dict[str, tuple[int, int, int, str]] = {}
    for event in events:
        if event.kind != SHED:
            continue
        n, first, last = (int(event.body.get(name) or 0) for name in ("n", "first_step", "last_step"))
        what, why = str(event.body.get("what", "records")), str(event.body.get("why", "there was no room"))
        if what in sums:
            n, first, last = n + sums[what][0], min(first, sums[what][1]), max(last, sums[what][2])
        sums[what] = (n, first, last, why)
    return tuple(
        f"{n:,} {what} were shed between step {step(first)} and {step(last)}, because {one_line(why, most=300)}"
        for what, (n, first, last, why) in sums.items()
    )


def view_of_run(store: Store, run: RunInfo, *, gone: bool = False) -> RunView:
    """A stored run; ``gone`` as for :func:`ending_of`. Raises ``StoreError`` where it cannot be read."""
    run_id = run.run_id
    names, steps = store.metric_names(run_id), store.steps(run_id)
    metrics = tuple(sorted(known(names, run.source)))
    findings, events = tuple(store.findings(run_id)), tuple(store.events(run_id))
    recoveries = tuple(store.recoveries(run_id))
    culprits = store.spikes(run_id, last=CULPRIT_BATCHES, reason=CULPRITS)
    return RunView(
        run_id=run_id,
        name=run.name,
        source=run.source,
        steps=steps,
        metrics=metrics,
        unread=tuple(unread(names, run.source)),
        findings=findings,
        diagnosis=diagnosis_of(
            findings,
            steps,
            events=events,
            source=run.source,
            metrics=metrics,
            knobs=stored_knobs(store, run, names) if failed(findings) else None,
        ),
        forecasts=tuple(store.forecasts(run_id)),
        events=events,
        alerts=tuple(store.alerts(run_id)),
        commands=tuple(store.commands(run_id)),
        culprits=tuple(sorted(culprits, key=lambda batch: -batch.step)),
        not_judged=tuple(not_run(registered(), frozenset(metrics))) if metrics else (),
        recoveries=recoveries,
        ending=ending_of(run, gone=gone),
    )


def stored_diagnosis(store: Store, run: RunInfo, *, at: int | None = None) -> Diagnosis:
    """Diagnose the findings of a stored run, up to the step ``at``. Raises ``StoreError``."""
    findings = store.findings(run.run_id)
    if not findings:
        return Diagnosis(why_not="nothing was found", at_step=at)
    names = store.metric_names(run.run_id)
    return diagnosis_of(
        findings,
        store.steps(run.run_id),
        events=store.events(run.run_id),
        source=run.source,
        metrics=known(names, run.source),
        knobs=stored_knobs(store, run, names) if failed(findings) else None,
        at=at,
    )


def stored_verdict(store: Store, run: RunInfo, *, gone: bool = False) -> Verdict:
    """The verdict on a stored run, without the rest of its view. Raises ``StoreError``."""
    findings = store.findings(run.run_id)
    troubled = failed(findings)
    names = store.metric_names(run.run_id)
    steps = store.spans(run.run_id) if findings and (run.attempt > 1 or troubled) else {}  # ends of each will do
    told = (*findings, *store.recoveries(run.run_id)) if troubled else findings
    return verdict_of(told, steps, known(names, run.source), unread(names, run.source), ending_of(run, gone=gone))


def diagnosis_of(
    findings: Sequence[Finding],
    steps: Mapping[int, Sequence[int]],
    *,
    events: Iterable[Event] = (),
    source: str = "",
    metrics: Iterable[str] = (),
    knobs: KnobRows | None = None,
    at: int | None = None,
) -> Diagnosis:
    """Diagnose ``findings`` of a run that has records of ``steps`` (by attempt), and of its ``knobs`` what is known."""
    reached = {attempt: [s for s in own if at is None or s <= at] for attempt, own in steps.items()}
    return diagnose(
        findings,
        events=events,
        source=source,
        at=at,
        row_steps=row_steps(sorted({s for own in reached.values() for s in own})),
        measured=frozenset(metrics),
        starts=_starts(reached),
        turns=() if knobs is None else knobs.turns(_starts(reached), source, _until(findings, at)),
    )


def explained(diagnosis: Diagnosis, verdict: Verdict) -> Diagnosis:
    """``diagnosis`` as it is told beside ``verdict``: no cause of warnings that are over, of which nothing came."""
    if verdict.level is Severity.WARNING and verdict.standing is None:
        return Diagnosis(why_not="what was found was never critical, and is over", at_step=diagnosis.at_step)
    return diagnosis


def _until(findings: Sequence[Finding], at: int | None) -> int:
    """The last step that matters: what was done after the last finding has caused none."""
    last = max((finding.step for finding in findings), default=0)
    return last if at is None else min(at, last)


# The rows that tell of knobs, of a store and of a log alike.

MOST_ROWS = 20_000
"""Rows looked at: the newest before the last finding."""


@dataclass(frozen=True, slots=True)
class KnobRows:
    """Rows as they were logged, of the metrics that tell of knobs, and the configurations of the attempts.

    ``rows``: (attempt, step) -> source name -> value, the last one logged.
    """

    rows: Mapping[tuple[int, int], Mapping[str, float]]
    configs: Mapping[int, Mapping[str, JSON]] = field(default_factory=dict)

    def turns(self, starts: Mapping[int, int], source: str, until: int) -> list[Turn]:
        """Knobs that were turned on the branch that counts, up to the step ``until``."""
        tracker = KnobTracker()
        for attempt, step_ in sorted(place for place in self.rows if place[1] <= until)[-MOST_ROWS:]:
            if all(step_ < start for other, start in starts.items() if other > attempt):
                row = dict(sorted(self.rows[attempt, step_].items()))
                tracker.update(step_, canonicalise(row, source)[0])
        return [*tracker.turns, *config_turns(self.configs, starts)]


def failed(findings: Iterable[Finding]) -> bool:
    """True where more than remarks was found: then knobs are asked for."""
    return any(finding.severity is not Severity.INFO for finding in findings)


def knob_names(names: Iterable[str], source: str) -> list[str]:
    """Those of ``names`` (as logged) that tell of knobs."""
    read = ((name, resolve(name, source)) for name in names)
    return [name for name, reading in read if reading is not None and reading.metric.name in TRACKED]


def stored_knobs(store: Store, run: RunInfo, names: Iterable[str]) -> KnobRows:
    """Rows of a stored run, which logs ``names``, that tell of its knobs. Raises ``StoreError``."""
    rows: dict[tuple[int, int], dict[str, float]] = {}
    for name, series in store.series(run.run_id, knob_names(names, run.source)).items():
        places = zip(series.attempts.tolist(), series.steps.tolist(), strict=True)
        for place, value in zip(places, series.values.tolist(), strict=True):
            rows.setdefault(place, {})[name] = value
    return KnobRows(rows, store.configs(run.run_id))


def logged_knobs(records: Iterable[StepRecord], names: Iterable[str], source: str) -> KnobRows:
    """The same of a log that was read."""
    wanted = knob_names(names, source)
    rows: dict[tuple[int, int], dict[str, float]] = {}
    for record in records:
        found = {name: record.metrics[name] for name in wanted if name in record.metrics}
        if found:
            rows.setdefault((record.attempt, record.step), {}).update(found)
    return KnobRows(rows)


# Lives of what was found, and the one word for what became of the run.


@dataclass(slots=True)
class Life:
    """One episode of a failure: as bad as it was, as bad as it is, and what is told of its end."""

    finding: Finding
    onset: int
    worst: Severity
    now: Severity
    over: Finding | None = None

    @property
    def entry(self) -> Kind:
        """The catalogue's entry of its kind."""
        return entry(self.finding.kind)

    @property
    def stands(self) -> bool:
        """True if it is not over, and more than a remark."""
        return self.over is None and self.now is not Severity.INFO


def arrival(told: Finding) -> tuple[int, int, bool]:
    """Key that sorts findings and recoveries as they came."""
    return (told.attempt, told.seq, told.stage.better)


def lives(told: Iterable[Finding]) -> list[Life]:
    """Episodes of what was told of a run, recoveries included, on the branch that counts; those that began first."""
    found: list[Life] = []
    open_: dict[tuple[str, str], Life] = {}
    for finding in sorted(told, key=arrival):
        key = (finding.detector, finding.kind)
        life = open_.get(key)
        if finding.stage is Stage.RESOLVED:
            if life is not None:
                life.now, life.over = Severity.INFO, finding
                del open_[key]
        elif finding.stage is Stage.EASED:
            if life is not None:
                life.now = finding.severity
        elif life is None:
            found.append(Life(finding, finding.onset_step, finding.severity, finding.severity))
            open_[key] = found[-1]
        else:
            life.onset = min(life.onset, finding.onset_step)
            life.worst, life.now = _worse(life.worst, finding.severity), _worse(life.now, finding.severity)
    return sorted(found, key=lambda life: life.onset)


def _worse(one: Severity, other: Severity) -> Severity:
    return one if one.rank >= other.rank else other


def verdict_of(
    told: Iterable[Finding],
    steps: Mapping[int, Sequence[int]],
    metrics: Collection[str] = (),
    unread_names: Collection[str] = (),
    ending: Ending = Ending(),
) -> Verdict:
    """Say what became of a run, in a word and a line: the one place that says so, for every face and every kind of run.

    ``told``: its findings and recoveries; what a later attempt ran again no longer counts. ``metrics`` and
    ``unread_names``: what the run logs, known and not. Where none of the known ones matters the verdict is that nothing
    was judged, not that nothing was found; where some do, it says beside what was found what was not judged.

    >>> verdict_of([Finding("d", "entropy_collapse", Severity.CRITICAL, 40, 31, "")], {1: range(50)}).text
    'collapsed@31: entropy collapse from step 31'
    """
    everything = list(told)
    held = on_branch(everything, _starts(steps))
    level = max((finding.severity for finding in held), key=lambda severity: severity.rank, default=None)
    undone = "" if len(held) == len(everything) else "; what was found in steps that were run again is left out"
    missing = _missing(metrics) if metrics or unread_names else ()
    blind = _blind(missing)
    found = lives(held)
    standing = max((life.now for life in found if life.stands), key=lambda severity: severity.rank, default=None)
    word, at = (Word.NOT_JUDGED, None) if blind and not failed(held) else _became(found, steps)
    if word is Word.NOT_JUDGED:
        said = f"NOT JUDGED: {_gap(missing, unread_names)}"
    else:
        said = f"{_titled(word, at)}: {_said(word, found)}{undone}"
        beyond = "beyond that " if blind else ""
        said += f"; {beyond}not judged: {_gap(missing, unread_names)}" if blind or (missing and word in FINE) else ""
    if ending.how is End.DONE:
        return Verdict(level, said, missing, word, at, standing)
    if ending.how is End.GOES_ON:
        return replace(_so_far(level, said, missing, word, found), standing=standing)
    ended = Word.KILLED if ending.how is End.KILLED else Word.UNFINISHED
    why = one_line(ending.why, LONGEST)
    if word in (Word.COLLAPSED, Word.DEAD):
        when = "" if ending.at is None else f" at step {step(ending.at)}"
        return Verdict(level, f"{said}; {ended.value}{when}" + (f": {why}" if why else ""), missing, word, at, standing)
    at = ending.at if ended is Word.KILLED else None
    text = f"{_titled(ended, at)}: {why + '; ' if why else ''}until then {said}"
    return Verdict(level, text, missing, ended, at, standing)


def _titled(word: Word, at: int | None) -> str:
    return word.value if at is None else f"{word.value}@{at}"


def _became(found: Sequence[Life], steps: Mapping[int, Sequence[int]]) -> tuple[Word, int | None]:
    """The word for a run that ends here."""
    standing = [life for life in found if life.stands and life.finding.kind != CRASH_FORECAST]
    critical = [life for life in standing if life.now is Severity.CRITICAL]
    first = min((own[0] for own in steps.values() if own), default=None)
    early = math.inf if first is None else first + START_STEPS
    if any(life.entry.mute and life.now is life.entry.severity and life.onset < early for life in standing):
        return Word.DEAD, None
    collapsed = [life.onset for life in critical if life.entry.collapse]
    if collapsed:
        return Word.COLLAPSED, min(collapsed)
    if critical or any(life.entry.collapse and life.entry.rule == REWARD_RULE for life in standing):
        return Word.DAMAGED, None
    was_critical = any(life.worst is Severity.CRITICAL and life.finding.kind != CRASH_FORECAST for life in found)
    return (Word.RECOVERED if was_critical else Word.HEALTHY), None


def _so_far(level: Severity | None, said: str, missing: tuple[str, ...], word: Word, found: Sequence[Life]) -> Verdict:
    """The same of a run that goes on: nothing is lost yet, and nothing is won."""
    critical = any(life.stands and life.now is Severity.CRITICAL for life in found)
    if critical or word is Word.DEAD:
        return Verdict(level, f"{Word.IN_DANGER.value}: {_said(Word.IN_DANGER, found)}", missing, Word.IN_DANGER)
    if word is Word.NOT_JUDGED:
        return Verdict(level, said, missing, word)
    return Verdict(level, said.replace(word.value, f"{word.value} so far", 1), missing, word)


def _said(word: Word, found: Sequence[Life]) -> str:
    """The failures that a word rests on."""
    if word in FINE:
        over = {_past(life): life for life in found if life.worst is Severity.CRITICAL and not life.stands}
        over |= {_past(life): life for life in found if life.worst is Severity.CRITICAL and life.stands}
        standing = _named([life for life in found if life.stands and life.worst is not Severity.CRITICAL])
        past = [_past(life) for life in found if life.worst is Severity.WARNING and not life.stands]
        parts = [_some(list(over))] if over else [f"no{'thing critical' if standing or past else ' failure'} was found"]
        parts += [f"warnings: {standing}"] if standing else []
        parts += [f"over by now: {_some(past)}"] if past else []
        remarks = _named([life for life in found if life.worst is Severity.INFO])
        parts += [f"remarks: {remarks}"] if remarks and len(parts) == 1 and not over else []
        return "; ".join(parts)
    standing_ = [life for life in found if life.stands]
    worst = max((life.now for life in standing_), key=lambda severity: severity.rank, default=None)
    return _named([life for life in standing_ if life.now is worst])


def _past(life: Life) -> str:
    began = f"{words(life.finding.kind)} from step {step(life.onset)}"
    return f"{began}, over at step {step(life.over.step)}" if life.over is not None else f"{began}, eased"


def _missing(metrics: Collection[str]) -> tuple[str, ...]:
    return tuple(fact for fact, telling in {**MATTERS, **BESIDE}.items() if telling.isdisjoint(metrics))


def _blind(missing: Collection[str]) -> bool:
    return MATTERS.keys() <= set(missing)


def _gap(missing: Sequence[str], unread_names: Collection[str]) -> str:
    """Facts that are not known, and the names that may be them."""
    names = foremost(name for name in unread_names if not unjudged(name, whole="reward" not in missing))
    more = f" and {len(names) - NAMES_TOLD} more" if len(names) > NAMES_TOLD else ""
    told = f"; unknown names: {one_line(', '.join(names[:NAMES_TOLD]), LONGEST)}{more}" if names else ""
    facts = " or ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
    return f"no {facts} is {'known' if names else 'logged'}{told}"


def _named(found: Iterable[Life]) -> str:
    """Each kind with its first onset."""
    onsets: dict[str, int] = {}
    for life in found:
        onsets.setdefault(life.finding.kind, life.onset)
    return _some([f"{words(kind)} from step {step(onset)}" for kind, onset in onsets.items()])


def _some(parts: Sequence[str]) -> str:
    more = len(parts) - NAMED
    return ", ".join(parts[:NAMED]) + (f", and {more} more" if more > 0 else "")


def _starts(steps: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """The first step of each attempt."""
    return {attempt: min(own) for attempt, own in steps.items() if own}
