"""What is said of a run at every row of it: states, headlines and causes, judged like alarms.

:func:`told_of` replays a log row by row and keeps what would be said at each row, of the run as it goes on and of the
log if it ended there. :func:`broken` lists the invariants of :mod:`rlwatch.state` that a sentence breaks;
:func:`scored` compares the sentences at the end and at the first alarm with the label of the run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from detection.runs import Labelled

from rlwatch.diagnosis import Diagnosis
from rlwatch.metrics import known, unread
from rlwatch.monitor.engine import Monitor
from rlwatch.monitor.forecasting import NoForecasts
from rlwatch.records import Finding, Severity, StepRecord
from rlwatch.state import (
    LEAST_STEPS,
    TITLES,
    End,
    Ending,
    State,
    Verdict,
    explained,
    forecast_allowed,
    headline_of,
    verdict_of,
)
from rlwatch.view import diagnosis_of, failed, logged_knobs

MOST = 120
"""Characters of a headline."""
_SHARE = re.compile(r"(\d+(?:\.\d+)?) ?% of (?:the|all)|share (?:is |of )?(\d+(?:\.\d+)?) ?%")


@dataclass(frozen=True)
class Sentence:
    """What is said of a run after the row at ``step``; ``alarmed``: something critical was found by then."""

    step: int
    verdict: Verdict
    diagnosis: Diagnosis
    headline: str
    findings: tuple[Finding, ...]
    alarmed: bool
    rows: int

    @property
    def cause(self) -> str:
        """Kind of the cause that is named; empty: none is."""
        return self.diagnosis.causes[0].kind if self.diagnosis.enough and self.diagnosis.causes else ""


def told_of(records: Sequence[StepRecord], source: str = "", *, forecasts: bool = False) -> Iterator[Sentence]:
    """Yield what is said after each row of a run that goes on, and at last of the log that ended there."""
    monitor = Monitor(
        run_id="r", source=source, forecaster=None if forecasts else lambda: NoForecasts("not asked for here")
    )
    told: list[Finding] = []
    steps: list[int] = []
    names: set[str] = set()
    diagnosis, at = Diagnosis(), -1
    for place, record in enumerate(records):
        steps += [record.step] if not steps or record.step != steps[-1] else []
        names.update(record.metrics)
        outcome = monitor.observe(record)
        told += [*outcome.findings, *outcome.recoveries]
        if len(told) != at:
            diagnosis, at = _diagnosed(told, steps, records[: place + 1], names, source), len(told)
        yield _said(told, steps, names, source, diagnosis, Ending(End.GOES_ON, record.step))
    outcome = monitor.close()
    told += [*outcome.findings, *outcome.recoveries]
    diagnosis = _diagnosed(told, steps, records, names, source)
    yield _said(told, steps, names, source, diagnosis, Ending(at=steps[-1] if steps else None))


def _diagnosed(
    told: Sequence[Finding], steps: Sequence[int], records: Sequence[StepRecord], names: set[str], source: str
) -> Diagnosis:
    findings = [finding for finding in told if not finding.stage.better]
    if not failed(findings):
        return Diagnosis()
    knobs = logged_knobs(records, names, source)
    metrics = known(names, source)
    return diagnosis_of(findings, {1: sorted(set(steps))}, source=source, metrics=metrics, knobs=knobs)


def _said(
    told: Sequence[Finding], steps: Sequence[int], names: set[str], source: str, diagnosis: Diagnosis, ending: Ending
) -> Sentence:
    count = len(set(steps))
    bounds = {1: (min(steps), max(steps))} if steps else {}
    verdict = verdict_of(told, bounds, known(names, source), unread(names, source), ending, count=count)
    shown = explained(diagnosis, verdict)
    critical = any(finding.severity is Severity.CRITICAL for finding in told)
    return Sentence(
        steps[-1] if steps else 0, verdict, shown, headline_of(verdict, shown), tuple(told), critical, count
    )


def broken(sentence: Sentence) -> list[str]:
    """Return the invariants that a sentence breaks, in words; empty: none."""
    verdict, causes = sentence.verdict, sentence.diagnosis.causes
    wrong = [
        *_of_health(sentence),
        *_of_causes(sentence),
        *_of_shares(sentence.findings),
    ]
    if forecast_allowed(verdict) and (verdict.failed or not verdict.ongoing):
        wrong.append("a forecast is shown though the failure is there, or the run ended")
    if not sentence.headline.startswith(TITLES[verdict.state]):
        wrong.append(f"the headline does not begin with the state: {sentence.headline!r}")
    document = verdict.to_dict()
    if {document["state"], document["word"]} != {verdict.state.value} or not verdict.name.startswith(verdict.state):
        wrong.append("two states are said at once")
    if len(sentence.headline) > MOST and not verdict.missing:
        wrong.append(f"the headline is {len(sentence.headline)} characters long: {sentence.headline!r}")
    if causes and verdict.since is not None and verdict.at is not None and verdict.at > sentence.step:
        wrong.append("the collapse is dated after the last row")
    return wrong


def _of_health(sentence: Sentence) -> Iterator[str]:
    verdict = sentence.verdict
    if verdict.state is State.HEALTHY:
        if sentence.diagnosis.causes or "cause" in sentence.headline:
            yield "a healthy run has a cause"
        if verdict.exit_code != 0 or verdict.urgency is not None:
            yield f"a healthy run has exit code {verdict.exit_code} and urgency {verdict.urgency}"
        if sentence.rows < LEAST_STEPS or "reward" in verdict.missing:
            yield "a run that could not be judged is called healthy"
    if verdict.state is State.RECOVERED and verdict.standing is not None:
        yield "a run recovered while something stands"


def _of_causes(sentence: Sentence) -> Iterator[str]:
    verdict, causes = sentence.verdict, sentence.diagnosis.causes
    if causes and verdict.standing not in (Severity.WARNING, Severity.CRITICAL):
        yield "a cause is named though nothing stands"
    if causes and verdict.since is not None and causes[0].onset_step > verdict.since:
        yield f"the cause begins at {causes[0].onset_step}, after the failure at {verdict.since}"


def _of_shares(findings: Iterable[Finding]) -> Iterator[str]:
    for finding in findings:
        for match in _SHARE.finditer(finding.message):
            if float(match[1] or match[2]) > 100.0:
                yield f"a share beyond 100 %: {finding.message}"


# Scoring against labels.

STATES = {
    "healthy": {State.HEALTHY},
    "transient": {State.RECOVERED, State.HEALTHY, State.AT_RISK},
    "dead": {State.NOT_LEARNING},
    "crash": {State.COLLAPSED, State.DAMAGED, State.NOT_LEARNING},
    "instability": {State.COLLAPSED, State.DAMAGED, State.AT_RISK},
}
"""Label -> states that are right at the end of the log; a run that was not judged is counted apart."""
NEAR = 10
"""Steps, or two rows if that is more, within which an onset is right."""


@dataclass(frozen=True)
class Score:
    """How the sentences of labelled runs fared: (label, state) counted, onsets and contradictions."""

    states: Counter[tuple[str, str]]
    right: int
    judged: int
    dated: int
    to_date: int
    contradicted: tuple[tuple[str, int, str], ...]
    ends: tuple[tuple[str, str, str], ...]


def scored(labelled: Iterable[Labelled], *, forecasts: bool = False) -> Score:
    """Score the sentence at the end, the onset it gives, and the invariants at every row, of each labelled run."""
    states: Counter[tuple[str, str]] = Counter()
    right = judged = dated = to_date = 0
    contradicted: list[tuple[str, int, str]] = []
    ends: list[tuple[str, str, str]] = []
    for one in labelled:
        last: Sentence | None = None
        for last in told_of(one.records, one.source, forecasts=forecasts):
            contradicted += [(one.run.name, last.step, wrong) for wrong in broken(last)]
        if last is None:
            continue
        label, state = one.run.severity, last.verdict.state
        states[label, state.value] += 1
        began = "" if one.run.onset is None else f" (began at {one.run.onset})"
        ends.append((one.run.name, f"{label}{began}", last.headline))
        if label in STATES and not one.run.doubt and state is not State.NOT_JUDGED:
            judged += 1
            right += state in STATES[label]
        if one.run.onset is not None and last.verdict.since is not None and label in ("crash", "instability"):
            to_date += 1
            rows = one.run.steps
            apart = (rows[-1] - rows[0]) / max(len(rows) - 1, 1)
            dated += abs(last.verdict.since - one.run.onset) <= max(NEAR, 2 * apart)
    return Score(states, right, judged, dated, to_date, tuple(contradicted), tuple(ends))


def lines_of(score: Score) -> list[str]:
    """Return the confusion table and the counts as lines of text."""
    labels = sorted({label for label, _ in score.states})
    columns = [state.value for state in State if any(s == state.value for _, s in score.states)]
    lines = ["| label | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    lines += [f"| {each} | " + " | ".join(str(score.states[each, c] or "") for c in columns) + " |" for each in labels]
    lines.append(f"state right {score.right} of {score.judged}; onset right {score.dated} of {score.to_date}")
    lines.append(f"sentences that contradict themselves: {len(score.contradicted)}")
    return lines
