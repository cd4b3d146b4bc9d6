"""Why a run is in its state, as one sentence in the order things began."""

from __future__ import annotations

from collections.abc import Sequence

from rlwatch.control.liveness import Pace, silent_for
from rlwatch.records import Alert, AlertState, Finding, RunInfo

from . import format as fmt
from .health import Health, Word, crash_words, silence_words


def clauses(alerts: Sequence[Alert]) -> list[str]:
    """``["responses are garbled from step 4 410", "entropy collapse from step 4 690"]``: what fires."""
    begins: dict[str, int] = {}
    for alert in alerts:
        if alert.state is AlertState.FIRING:
            begins[alert.kind] = min(alert.onset_step, begins.get(alert.kind, alert.onset_step))
    ordered = sorted(begins.items(), key=lambda item: (item[1], item[0]))
    return [f"{fmt.words(kind)} from step {fmt.step(onset)}" for kind, onset in ordered]


def ending(run: RunInfo, health: Health, now: float, pace: Pace) -> str:
    """How the story ends where the run does not go on: the crash, the pause, or the silence; else empty."""
    if health.word is Word.CRASHED:
        return f"crashed at step {fmt.step(run.last_step)}: {crash_words(run)}"
    if health.word in (Word.PAUSED, Word.DEAD):
        return health.why
    if health.word is Word.STALE:
        return silence_words(silent_for(run, pace, now) or 0.0, pace.step_s)
    return ""


def baselines(findings: Sequence[Finding]) -> dict[str, float]:
    """Metric -> the run's own healthy level of it, as the newest finding on it said."""
    return {f.metric: f.baseline for f in findings if f.metric and f.baseline is not None}


def past(alerts: Sequence[Alert]) -> str:
    """What to say when nothing fires: the last alarm and when it was over."""
    over = [a for a in alerts if a.state is AlertState.RESOLVED and a.fired_at is not None]
    if not over:
        return ""
    last = max(over, key=lambda alert: alert.resolved_step or alert.step)
    ended = fmt.step(last.resolved_step if last.resolved_step is not None else last.step)
    return f"{fmt.words(last.kind)} from step {fmt.step(last.onset_step)}, over at step {ended}"
