"""At every prefix of a log the diagnosis keeps its word: no cause after its effect, none where nothing is wrong."""

from functools import cache
from pathlib import Path

import pytest
from detection import runs

import rlwatch
from rlwatch.diagnosis import KnobTracker, Nature, diagnose, row_steps
from rlwatch.importers import read_log
from rlwatch.metrics import canonicalise
from rlwatch.records import CRASH_FORECAST, Severity

ROOT = Path(__file__).parents[2]
LOGS = sorted(
    path.name for path in (ROOT / "sample_logs").iterdir() if path.suffix in (".log", ".json", ".jsonl", ".csv")
)
CHEAP = ("entropy-explosion-verl.jsonl", "no-signal-long.csv", "nonfinite-trl-console.log", "healthy-trl-console.log")


def said(records, findings, source, every=1):
    """(step, what was found up to it, the diagnosis there), as a monitor would have said it."""
    tracker, names, steps, found = KnobTracker(), set(), [], []
    waiting = sorted(findings, key=lambda finding: finding.step)
    for place, record in enumerate(records):
        row = canonicalise(record.metrics, source)[0]
        names |= row.keys()
        steps.append(record.step)
        tracker.update(record.step, row)
        fresh = [finding for finding in waiting if finding.step == record.step]
        found += fresh
        if not fresh and place % every:
            continue
        told = diagnose(
            found, source=source, row_steps=row_steps(steps), measured=names, starts={1: steps[0]}, turns=tracker.turns
        )
        yield record.step, list(found), told


def breaches(step, found, told):
    """What a person would not believe."""
    bad = [f for f in found if f.severity is not Severity.INFO]
    if not bad:
        return ["a cause, and nothing is wrong"] if told.causes or told.enough else []
    wrong = []
    for cause in told.causes:
        effects = [e.step for e in cause.evidence if e.severity is not None]
        if effects and cause.onset_step > min(effects):
            wrong.append(f"{cause.kind} began at {cause.onset_step}, its effect at {min(effects)}")
        if cause.onset_step > step:
            wrong.append(f"{cause.kind} lies ahead")
        if cause.nature is Nature.SYMPTOM and cause.knob:
            wrong.append(f"the symptom {cause.kind} names the knob {cause.knob}")
    first = told.causes[0]
    worst = max((f.severity for f in bad if f.kind != CRASH_FORECAST), key=lambda s: s.rank, default=Severity.INFO)
    shown = [e.severity.rank for e in first.evidence if e.severity is not None]
    if worst is Severity.CRITICAL and max(shown, default=0) < worst.rank:
        wrong.append(f"the first cause, {first.kind}, explains nothing critical")
    return wrong


def kept(records, findings, source, every=1):
    return {
        step: wrong
        for step, found, told in said(records, findings, source, every)
        if (wrong := breaches(step, found, told))
    }


@cache
def scanned(name):
    [run] = read_log(ROOT / "sample_logs" / name)
    return list(run.records), rlwatch.scan(ROOT / "sample_logs" / name).findings, run.source


@pytest.mark.parametrize("name", CHEAP)
def test_a_sample_log_is_told_of_truly_at_every_finding(name):
    """And at every fifth row beside."""
    assert kept(*scanned(name), every=5) == {}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LOGS)
def test_every_sample_log_is_told_of_truly_at_every_row(name):
    """All of them."""
    assert kept(*scanned(name)) == {}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["real_runs", "real_runs_2"])
def test_so_is_every_public_run(name):
    """At each finding (skipped where ../shared is absent)."""
    if not (ROOT.parent / "shared" / name / "runs.csv.gz").exists():
        pytest.skip(f"../shared/{name} is absent: its runs are NOT checked here")
    for run in runs.named(name):
        findings = rlwatch.scan(run.records, source=run.source).findings
        assert kept(run.records, findings, run.source, every=10**9) == {}, run.run.name
