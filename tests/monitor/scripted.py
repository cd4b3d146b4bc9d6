"""Detectors that do exactly what a test says, and items to feed a Monitor."""

from rlwatch.forecast import Forecast, ForecastReason
from rlwatch.records import Event, Finding, Severity, StepRecord


class Threshold:
    """Holds while ``m`` is above 1 (warning) or above 10 (critical); restarts on ``reference_reset``."""

    name = "threshold"
    family = "System"
    kinds = ("high",)
    requires = (("reward/mean",),)

    def __init__(self):
        self.seen, self.noticed = [], []

    def update(self, step):
        self.seen.append((step.step, dict(step.metrics)))
        value = step.get("reward/mean")
        if value is None or not value > 1:
            return []
        severity = Severity.CRITICAL if value > 10 else Severity.WARNING
        return [Finding(self.name, "high", severity, step.step, step.step, f"m is {value}", score=value)]

    def arrival(self, step):
        if step.get("reward/mean") is None or step.get("reward/mean") == step.get("reward/mean"):
            return []
        return [Finding(self.name, "high", Severity.CRITICAL, step.step, step.step, "m is NaN")]

    def notice(self, event):
        self.noticed.append(event.kind)


class Oracle:
    """Forecasts what ``reward/mean`` says: p50 is the reward, an alarm from 0.5; -1: no forecast; below: it raises."""

    def __init__(self):
        self.seen, self.noticed = [], []

    def update(self, step):
        value = step.get("reward/mean")
        self.seen.append((step.step, dict(step.metrics)))
        if value is None or value == -1 or value != value:
            return Forecast(step.step, absent=f"no forecast because there were {len(self.seen)} steps")
        if value < -1:
            raise RuntimeError("this model is not for such data")
        why = (ForecastReason("mismatch/k3", 0.42), ForecastReason("policy/entropy", 0.17))
        return Forecast(
            step.step,
            p20=min(value, 1.0),
            p50=min(value, 1.0),
            p100=1.0,
            risk=2 * value,
            alarm=value >= 0.5,
            limit="ref_kl",
            steps_to=35.2,
            why=why,
        )

    def notice(self, event):
        self.noticed.append(event.kind)


def records(*values, start=0, attempt=1, seq=0, gap=1):
    """One record a step, with consecutive seqs; None leaves the metric out."""
    return [
        StepRecord(
            start + i * gap, {"reward": v} if v is not None else {"my/other": 0.0}, attempt=attempt, seq=seq + i + 1
        )
        for i, v in enumerate(values)
    ]


def reset(step, seq, attempt=1):
    return Event("reference_reset", step, attempt=attempt, seq=seq)


def rollback(step, to, seq, attempt=1):
    """A roll-back as the controller records it."""
    return Event("command", step, {"command": "rollback", "report": {"to_step": to}}, attempt=attempt, seq=seq)


def told(outcome):
    """What a person would have read, in order."""
    return [(f.kind, f.severity.value, f.step) for f in outcome.findings]


def sent(outcome):
    return [(t.reason.value, t.alert.step) for t in outcome.transitions]
