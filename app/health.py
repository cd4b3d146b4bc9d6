"""The health of a run in one word, with its colour and shape: the same on every page.

Only shapes carry colour (Okabe-Ito, safe for colour-blind eyes); words are text-coloured, so that they
read on light and dark alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlwatch.control.liveness import Pace, Pause, dead_since, silent_for
from rlwatch.records import Alert, AlertState, RunInfo, RunState, Severity

from . import format as fmt
from . import pauses

RECENT_S = 24 * 3600.0
"""A crash or silence older than this no longer asks for a person."""


class Word(StrEnum):
    """What one can say of a run, most urgent first."""

    DANGER = "danger"
    CRASHED = "crashed"
    DEAD = "dead"
    WATCH = "watch"
    STALE = "stale"
    PAUSED = "paused"
    HEALTHY = "healthy"
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
    Word.FINISHED: Look("✓", GREY),
}

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
    run: RunInfo, alerts: Sequence[Alert], now: float, pace: Pace | None = None, pause: Pause | None = None
) -> Health:
    """Health of ``run`` at ``now`` (Unix seconds), from its alerts and its pace.

    What the writer said last wins (crashed, finished); then a pause, then that its process is gone, then silence; then
    the worst firing alert.
    """
    worst = firing(alerts)
    if run.state is RunState.CRASHED:
        return Health(Word.CRASHED, crash_words(run) + _before(worst), run.last_step, _recent(run, now))
    if run.state is RunState.FINISHED:
        return Health(Word.FINISHED, run.state_reason)
    if pause is not None:
        return Health(Word.PAUSED, pauses.words(pause, now) + _before(worst), pause.step)
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
    """How the trainer ended."""
    return run.state_reason or "the trainer ended with an error"


def _before(worst: Alert | None) -> str:
    return "" if worst is None else f"; before that {fmt.words(worst.kind)} since step {fmt.step(worst.onset_step)}"


def _recent(run: RunInfo, now: float) -> bool:
    return now - max(run.last_ts or 0.0, run.heartbeat_at or 0.0, run.created_at) < RECENT_S
