"""The health of a run in one word, with its colour and shape, and in one sentence: the same on every page.

Only shapes carry colour (Okabe-Ito, safe for colour-blind eyes); words are text-coloured, so that they
read on light and dark alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlwatch.control.liveness import Pace, Pause, dead_since, pause_of, silent_for
from rlwatch.records import Alert, AlertState, Finding, RunInfo, RunState, Severity
from rlwatch.view import Verdict
from rlwatch.view import Word as Became

from . import format as fmt

__all__ = ["Pause", "pause_of", "pause_words"]


def pause_words(pause: Pause, now: float) -> str:
    """``paused at step 480 by ann@lab: look at the samples; goes on by itself in 54 min``."""
    why = f": {fmt.shorten(pause.why, 120)}" if pause.why else ""
    left = fmt.duration(max(0.0, pause.until - now))
    return f"paused at step {fmt.step(pause.step)} by {fmt.shorten(pause.by, 60)}{why}; goes on by itself in {left}"


RECENT_S = 24 * 3600.0
"""A crash or silence older than this no longer asks for a person."""


class Word(StrEnum):
    """Words for the state of a run, most urgent first."""

    DANGER = "danger"
    CRASHED = "crashed"
    DEAD = "dead"
    WATCH = "watch"
    STALE = "stale"
    PAUSED = "paused"
    HEALTHY = "healthy"
    COLLAPSED = "collapsed"
    LEARNT_NOTHING = "dead from the start"
    DAMAGED = "damaged"
    UNFINISHED = "unfinished"
    RECOVERED = "recovered"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Look:
    """Shape and colour (``#rrggbb``) of a word."""

    shape: str
    colour: str


VERMILLION, AMBER, BLUE, GREY = "#D55E00", "#E69F00", "#0072B2", "#8A8A8A"

LOOKS: dict[Word, Look] = {
    Word.DANGER: Look("■", VERMILLION),
    Word.CRASHED: Look("✕", GREY),
    Word.DEAD: Look("⊘", GREY),
    Word.WATCH: Look("▲", AMBER),
    Word.STALE: Look("◌", GREY),
    Word.PAUSED: Look("‖", BLUE),
    Word.HEALTHY: Look("●", BLUE),
    Word.COLLAPSED: Look("▼", VERMILLION),
    Word.LEARNT_NOTHING: Look("□", VERMILLION),
    Word.DAMAGED: Look("◆", AMBER),
    Word.UNFINISHED: Look("◍", GREY),
    Word.RECOVERED: Look("↗", GREY),
    Word.FINISHED: Look("✓", GREY),
}

ENDED: dict[Became, Word] = {
    Became.COLLAPSED: Word.COLLAPSED,
    Became.DEAD: Word.LEARNT_NOTHING,
    Became.DAMAGED: Word.DAMAGED,
    Became.UNFINISHED: Word.UNFINISHED,
    Became.RECOVERED: Word.RECOVERED,
}
"""Words of the verdict on a run that ended, where it did not just finish."""

SEVERITY_WORD: dict[Severity, Word] = {
    Severity.CRITICAL: Word.DANGER,
    Severity.WARNING: Word.WATCH,
    Severity.INFO: Word.HEALTHY,
}
"""A severity looks like the word it turns a run into."""


@dataclass(frozen=True, slots=True)
class Health:
    """The word, why in a short phrase, and since which step (None where no step is meant).

    ``needs_you``: a person should look now.
    """

    word: Word
    why: str = ""
    since: int | None = None
    needs_you: bool = False

    @property
    def look(self) -> Look:
        """Shape and colour of the word."""
        return LOOKS[self.word]

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: those who need a person first, then by urgency."""
        return (0 if self.needs_you else 1, list(Word).index(self.word))


def judge(
    run: RunInfo,
    alerts: Sequence[Alert],
    now: float,
    pace: Pace | None = None,
    pause: Pause | None = None,
    *,
    verdict: Verdict | None = None,
) -> Health:
    """Health of ``run`` at ``now`` (Unix seconds), from its alerts and its pace; of one that ended, by its ``verdict``.

    What the writer said last wins (crashed, finished); then a pause, then that its process is gone, then silence; then
    the worst firing alert.
    """
    worst = firing(alerts)
    if run.state is RunState.CRASHED:
        return Health(Word.CRASHED, crash_words(run) + _before(worst), run.last_step, _recent(run, now))
    if run.state is not RunState.RUNNING:
        return _ended(run, verdict)
    if pause is not None:
        return Health(Word.PAUSED, pause_words(pause, now) + _before(worst), pause.step)
    if (since := dead_since(run, now)) is not None:
        return Health(Word.DEAD, dead_words(since, now) + _before(worst), run.last_step, _recent(run, now))
    pace = pace or Pace()
    silence = silent_for(run, pace, now)
    if silence is not None:
        why = silence_words(silence, pace.step_s) + _before(worst)
        return Health(Word.STALE, why, run.last_step, _recent(run, now))
    if worst is None:
        return Health(Word.HEALTHY)
    word = SEVERITY_WORD[worst.severity]
    why = since_words(worst, run.last_step) + _others(alerts, worst)
    return Health(word, why, worst.onset_step, word is not Word.HEALTHY)


def _ended(run: RunInfo, verdict: Verdict | None) -> Health:
    """A run that ended by itself: what became of it; where that is well or unknown, also how its writer ended it."""
    if verdict is None or verdict.word not in ENDED:
        why = "; ".join(filter(None, (verdict.text if verdict is not None else "", run.state_reason)))
        return Health(Word.UNFINISHED if run.state is RunState.UNFINISHED else Word.FINISHED, why)
    _, _, why = verdict.text.partition(": ")
    return Health(ENDED[verdict.word], why, verdict.at)


def firing(alerts: Sequence[Alert]) -> Alert | None:
    """The worst alert that fires now; among equals the one that began first."""
    now_firing = [a for a in alerts if a.state is AlertState.FIRING]
    return min(now_firing, key=lambda a: (-a.severity.rank, a.onset_step), default=None)


def since_words(alert: Alert, last_step: int | None) -> str:
    """``entropy collapse since step 4 690 (122 steps)``."""
    began = f"{fmt.words(alert.kind)} since step {fmt.step(alert.onset_step)}"
    lasted = (last_step or 0) - alert.onset_step
    return f"{began} ({fmt.plural(lasted, 'step')})" if lasted > 0 else began


def _others(alerts: Sequence[Alert], worst: Alert) -> str:
    kinds = {alert.kind for alert in alerts if alert.state is AlertState.FIRING} - {worst.kind}
    return f", and {len(kinds)} more" if kinds else ""


def silence_words(seconds: float, step_s: float | None) -> str:
    """``no step for 41 min (usually 38 s)``."""
    usual = "" if step_s is None else f" (usually {fmt.duration(step_s)})"
    return f"no step for {fmt.duration(seconds)}{usual}"


def dead_words(since: float, now: float) -> str:
    """``no sign of its process for 3 min: it was killed, or its machine is gone``."""
    return f"no sign of its process for {fmt.duration(now - since)}: it was killed, or its machine is gone"


def crash_words(run: RunInfo) -> str:
    """Reason for the trainer's end."""
    return run.state_reason or "the trainer ended with an error"


def _before(worst: Alert | None) -> str:
    return "" if worst is None else f"; before that {fmt.words(worst.kind)} since step {fmt.step(worst.onset_step)}"


def _recent(run: RunInfo, now: float) -> bool:
    return now - max(run.last_ts or 0.0, run.heartbeat_at or 0.0, run.created_at) < RECENT_S


# Reasons for a run's state, as one sentence in the order things began.


def firing_clauses(alerts: Sequence[Alert]) -> list[str]:
    """``["responses are garbled from step 4 410", "entropy collapse from step 4 690"]``: what fires."""
    begins: dict[str, int] = {}
    for alert in alerts:
        if alert.state is AlertState.FIRING:
            begins[alert.kind] = min(alert.onset_step, begins.get(alert.kind, alert.onset_step))
    ordered = sorted(begins.items(), key=lambda item: (item[1], item[0]))
    return [f"{fmt.words(kind)} from step {fmt.step(onset)}" for kind, onset in ordered]


def ending_words(run: RunInfo, health: Health, now: float, pace: Pace) -> str:
    """End of the sentence where the run does not go on: the crash, the pause, or the silence; else empty."""
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


def last_alarm_words(alerts: Sequence[Alert]) -> str:
    """Last alarm of a run on which nothing fires, and the step at which it was over."""
    over = [a for a in alerts if a.state is AlertState.RESOLVED and a.fired_at is not None]
    if not over:
        return ""
    last = max(over, key=lambda alert: alert.resolved_step or alert.step)
    ended = fmt.step(last.resolved_step if last.resolved_step is not None else last.step)
    return f"{fmt.words(last.kind)} from step {fmt.step(last.onset_step)}, over at step {ended}"
