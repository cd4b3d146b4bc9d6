"""Runs without noise: levels that change at one step, so that thresholds and dates can be met exactly."""

from rlwatch.records import ClosedStep


def exact(curves, *, length=60, every=1):
    """``length`` rows, ``every`` steps apart; ``curves``: metric -> f(step), None where it is not measured."""
    rows = []
    for i in range(length):
        measured = {name: curve(i * every) for name, curve in curves.items()}
        metrics = {name: value for name, value in measured.items() if value is not None}
        rows.append(ClosedStep(step=i * every, metrics=metrics, seq=i + 1))
    return rows


def then(before, after, at):
    """A curve: ``before``, and ``after`` from step ``at`` on."""
    return lambda step: before if step < at else after


def always(level):
    """A curve: the same at every step."""
    return lambda step: level


def swinging(level, after, at, by):
    """A level that swings by ``by`` down and up from row to row, and changes at ``at`` (even)."""
    return lambda step: (level if step < at else after) + (by if step % 2 else -by)


def alarms(detector, rows, kind=None):
    """Severity -> the first finding of it."""
    found = {}
    for row in rows:
        for finding in detector.update(row):
            if kind in (None, finding.kind):
                found.setdefault(finding.severity.value, finding)
    return found


def when(detector, rows, kind=None):
    """Severity -> the step at which it was first said."""
    return {severity: finding.step for severity, finding in alarms(detector, rows, kind).items()}


def worst(detector, rows, kind=None):
    """The worst severity that was ever said, or None."""
    found = alarms(detector, rows, kind)
    return next((severity for severity in ("critical", "warning", "info") if severity in found), None)
