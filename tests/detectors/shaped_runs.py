"""Runs with one shape each: a healthy run in which some metrics follow given curves."""

import random
from dataclasses import replace

from rlwatch.records import ClosedStep, Severity
from rlwatch.testing.healthy_runs import healthy_run, mean_metrics


def run(curves, *, length=200, every=1, seed=0, only=None):
    """``curves``: metric -> f(step, noise) replacing its value (None: missing). ``only``: metrics to keep."""
    noise = random.Random(seed + 1000)
    rows = []
    for row in healthy_run(seed, length=length):
        metrics = {k: v for k, v in row.metrics.items() if only is None or k in only}
        for name, curve in curves.items():
            value = curve(row.step, noise)
            if value is None:
                metrics.pop(name, None)
            else:
                metrics[name] = value
        rows.append(replace(row, metrics=metrics))
    return rows if every == 1 else coarse(rows, every)


def coarse(rows, every):
    """Logged every ``every`` steps, as the mean over them."""
    chunks = [rows[i : i + every] for i in range(0, len(rows) - every + 1, every)]
    return [
        ClosedStep(step=c[-1].step, metrics=mean_metrics([r.metrics for r in c]), seq=i) for i, c in enumerate(chunks)
    ]


def ramp(before, after, start, end, jitter=0.05):
    """A curve: ``before`` until ``start``, ``after`` from ``end``, geometric between, multiplicative jitter."""

    def curve(step, noise):
        share = min(max((step - start) / (end - start), 0.0), 1.0)
        level = before * (after / before) ** share
        return level * (1.0 + noise.gauss(0.0, jitter))

    return curve


def flat(level, jitter=0.05):
    """A curve: a level with multiplicative jitter."""
    return lambda step, noise: level * (1.0 + noise.gauss(0.0, jitter))


def findings(detector, rows):
    """All findings over a run, in order."""
    return [f for row in rows for f in detector.update(row)]


def firsts(detector, rows):
    """The first finding of each severity."""
    found = {}
    for finding in findings(detector, rows):
        found.setdefault(finding.severity, finding)
    return found


def warned_then_confirmed(detector, rows, *, begins, within):
    """The usual course: a warning, later critical, both within ``within`` steps of ``begins``, and an
    onset that looks back to it. Returns the critical finding.
    """
    found = firsts(detector, rows)
    critical = found[Severity.CRITICAL]
    # In a log with a row every ten steps the row that warns may be the one that is sure.
    coarse = len(rows) > 1 and rows[1].step - rows[0].step >= 10
    warning = found.get(Severity.WARNING, critical) if coarse else found[Severity.WARNING]
    assert begins <= warning.step <= critical.step <= begins + within
    assert coarse or warning.step < critical.step
    assert abs(critical.onset_step - begins) <= within
    assert critical.onset_step <= critical.step
    return critical


def worst(detector, rows):
    """The worst severity ever said, or None."""
    return max((f.severity for f in findings(detector, rows)), key=lambda s: s.rank, default=None)
