"""What is compared: each method turns a run into alarms, using only the rows so far."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from detection.runs import Labelled
from detection.score import Alarm, Told

from rlwatch.detectors.joint import JointEvidence
from rlwatch.monitor.forecasting import NoForecasts
from rlwatch.records import Alert, ClosedStep, Finding, Severity
from rlwatch.scanner import Alarm as ScannedAlarm
from rlwatch.scanner import scan

Judge = Callable[[Labelled], Told]
Rows = list[tuple[int, dict[str, float]]]


def ours(run: Labelled) -> Told:
    """rlwatch with its default rules."""
    return _scanned(run)


def without_forecasts(run: Labelled) -> Told:
    """rlwatch without its forecaster, in a third of the time; to try a detector by."""
    return _scanned(run, forecaster=lambda: NoForecasts("not asked for"))


def _scanned(run: Labelled, **options: Callable[[], NoForecasts]) -> Told:
    report = scan(run.records, source=run.source, **options)
    return Told(
        tuple(_alarm(alarm) for alarm in report.alarms),
        any(alert.severity is Severity.CRITICAL for alert in report.firing),
        tuple(_alarm(finding) for finding in report.findings if finding.severity is not Severity.INFO),
        report.view.verdict.state.value,
    )


def _alarm(said: ScannedAlarm | Finding | Alert) -> Alarm:
    return Alarm(said.step, said.severity is Severity.CRITICAL, said.kind, said.onset_step)


def by_row(judge: Callable[[Rows], list[Alarm]]) -> Judge:
    """A rule over the rows: each of its alarms is critical, and stands where it is one of the last row."""

    def told(run: Labelled) -> Told:
        alarms = tuple(judge(run.rows))
        return Told(alarms, bool(alarms) and alarms[-1].step == run.rows[-1][0])

    return told


def static(rows: Rows) -> list[Alarm]:
    """NaN; entropy below 0.2 or above 2 times, gradient norm above 6 times the first rows; KL above 1.5; half cut."""
    alarms = []
    base = {name: _base(rows, name) for name in ("policy/entropy", "optim/grad_norm")}
    for i, (step, row) in enumerate(rows):
        broken = any(
            not math.isfinite(row[n]) for n in ("optim/grad_norm", "policy/entropy", "loss/policy") if n in row
        )
        entropy, norm = row.get("policy/entropy"), row.get("optim/grad_norm")
        low, high = base["policy/entropy"], base["optim/grad_norm"]
        far = i >= 20 and bool(
            (entropy is not None and low and not 0.2 * low <= entropy <= 2 * low)
            or (norm is not None and high and norm > 6 * high)
        )
        limits = row.get("policy/kl_ref", 0.0) > 1.5 or row.get("len/clipped", 0.0) >= 0.5
        if broken or far or limits:
            alarms.append(Alarm(step))
    return alarms


WITNESSES: tuple[tuple[str, Callable[[float, float], bool]], ...] = (
    ("policy/entropy", lambda base, now: now > 2 * base),
    ("len/clipped", lambda base, now: now > base + 0.3),
    ("len/mean", lambda base, now: now < 0.4 * base),
)
"""(metric, whether it says that something broke since the first rows)."""
LARGEST, SMALLEST = "mismatch/logp_absdiff_max", ("mismatch/weight_min", "mismatch/is_ratio_min", "ratio/min")


def two_witnesses(rows: Rows) -> list[Alarm]:
    """The reward, a mean of two rows, is below its best by 3 of its own sigma and 25 %, and one of these agrees in the
    same rows: entropy doubled, clipped share + .3, length below .4, or the largest log-prob difference between sampler
    and trainer tripled while the smallest ratio halved. Written by others with part of the public runs in view.
    """
    alarms = []
    base = {name: _base(rows, name, 8, 4) for name in (LARGEST, *SMALLEST, *(name for name, _ in WITNESSES))}
    seen: list[float] = []
    best = -math.inf
    for i, (step, row) in enumerate(rows):
        value = row.get("reward/mean", math.nan)
        if math.isfinite(value):
            seen.append(value)
        if len(seen) < 8 or not math.isfinite(value):
            continue
        now = statistics.fmean(seen[-2:])
        changes = [b - a for a, b in pairwise(seen[:-2])]
        fallen = best - now
        if fallen > 3 * statistics.pstdev(changes) / math.sqrt(2) and fallen > 0.25 * abs(best):
            last = {name: _mean(rows[i - 1 : i + 1], name) for name in base}
            if any(_says(base[name], last[name], broken) for name, broken in WITNESSES) or (
                _says(base[LARGEST], last[LARGEST], lambda base, now: now > 3 * base)
                and any(_says(base[name], last[name], lambda base, now: now < 0.5 * base) for name in SMALLEST)
            ):
                alarms.append(Alarm(step))
        best = max(best, now)
    return alarms


def _says(base: float | None, now: float | None, broken: Callable[[float, float], bool]) -> bool:
    return base is not None and now is not None and broken(base, now)


def _mean(rows: Rows, name: str) -> float | None:
    values = [row[name] for _, row in rows if name in row and math.isfinite(row[name])]
    return statistics.fmean(values) if values else None


def ewma(rows: Rows) -> list[Alarm]:
    """Loss or gradient norm 6 standard deviations above the mean of the last 128 rows (OLMo-core's spike rule)."""
    alarms = []
    for name in ("optim/grad_norm", "loss/policy"):
        seen: list[float] = []
        for step, row in rows:
            value = row.get(name)
            if value is None:
                continue
            if not math.isfinite(value):
                alarms.append(Alarm(step))
                continue
            window = seen[-128:]
            if len(window) >= 16 and value > statistics.fmean(window) + 6 * max(statistics.pstdev(window), 1e-12):
                alarms.append(Alarm(step))
            seen.append(value)
    return sorted(alarms, key=lambda alarm: alarm.step)


def never(rows: Rows) -> list[Alarm]:  # noqa: ARG001
    """Silence."""
    return []


def clock(rows: Rows) -> list[Alarm]:
    """An alarm at the 40th row, whatever happens."""
    return [Alarm(rows[39][0])] if len(rows) >= 40 else []


Peer = Callable[[Sequence[Labelled]], list[Told]]
LONGEST = 3600.0
"""Seconds that a peer may take for a set: some look at all of a run's past at every check."""


def peer(python: Path, worker: Path, longest: float = LONGEST) -> Peer:
    """A package run by its own code, in its own environment; what it said it does not take back.

    It raises ``subprocess.TimeoutExpired`` after ``longest`` seconds.
    """

    def run_all(runs: Sequence[Labelled]) -> list[Told]:
        given = "".join(json.dumps(run.rows) + "\n" for run in runs)
        command = [python, "-E", worker]  # PYTHONPATH may hold our own package of that name
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=True, timeout=longest)
        told = [
            [Alarm(step, critical, *kind) for step, critical, *kind in json.loads(line)]
            for line in done.stdout.splitlines()
        ]
        return [Told(tuple(alarms), any(alarm.critical for alarm in alarms)) for alarms in told]

    return run_all


ALARMED = 0.03
"""Share of healthy runs that may be alarmed."""


def held_out(runs: Sequence[Labelled]) -> list[Told]:
    """rlwatch's joint evidence alone, critical beyond what healthy runs of the *other* projects of a set show.

    The limit is conformal: of n healthy runs elsewhere no more than 3 % of n + 1 reach it. What the evidence is made of
    was chosen with all of them in view; the limit was not.
    """
    series = [_evidence(run) for run in runs]
    told = []
    for run, scores in zip(runs, series, strict=True):
        calm = sorted(
            max((score for _, score in others), default=0.0)
            for other, others in zip(runs, series, strict=True)
            if other.run.severity == "healthy" and other.run.project != run.run.project
        )
        above = int(ALARMED * (len(calm) + 1))
        limit = calm[len(calm) - 1 - above] if above < len(calm) else math.inf
        rising = [b for a, b in pairwise([(0, 0.0), *scores]) if b[1] > limit >= a[1]]
        told.append(Told(tuple(Alarm(step) for step, _ in rising), bool(scores) and scores[-1][1] > limit))
    return told


def _evidence(run: Labelled) -> list[tuple[int, float]]:
    detector, scores = JointEvidence(), []
    for seq, (step, metrics) in enumerate(run.rows):
        detector.update(ClosedStep(step, metrics, seq=seq))
        scores.append((step, detector.score))
    return scores


def _base(rows: Rows, name: str, first: int = 20, least: int = 5) -> float | None:
    """Median of a metric over the first rows; None where fewer than ``least`` of them have it."""
    values = [row[name] for _, row in rows[:first] if name in row and math.isfinite(row[name])]
    return statistics.median(values) if len(values) >= least else None
