"""The state of a run as one word with a colour and shape, and as one sentence, for every page.

Only shapes are coloured (Okabe-Ito, safe for colour-blind readers); words have the text colour, so that they are
legible on light and dark themes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlwatch.control.liveness import Pace, Pause, dead_since, pause_of, silent_for
from rlwatch.records import Alert, AlertState, Finding, RunInfo, RunState, Severity
from rlwatch.state import State, Verdict

from . import format as fmt

__all__ = ["Pause", "pause_of", "pause_words"]


def pause_words(pause: Pause, now: float) -> str:
    """Describe a pause: ``paused at step 480 by ann@lab: look at the samples; resumes by itself in 54 min``.

    ``now`` is in Unix seconds.
    """
    why = f": {fmt.shorten(pause.why, 120)}" if pause.why else ""
    left = fmt.duration(max(0.0, pause.until - now))
    return f"paused at step {fmt.step(pause.step)} by {fmt.shorten(pause.by, 60)}{why}; resumes by itself in {left}"


RECENT_S = 24 * 3600.0
"""Age in seconds after which a crash or silence no longer needs attention."""


class Word(StrEnum):
    """States of a run as shown on the pages: those of :mod:`rlwatch.state` and those of live runs only, most urgent
    first.
    """

    FAILING = State.FAILING.value
    COLLAPSED = State.COLLAPSED.value
    NOT_LEARNING = State.NOT_LEARNING.value
    KILLED = State.KILLED.value
    AT_RISK = State.AT_RISK.value
    STALE = "stale"
    """The run has logged no step for long, though its process is alive."""
    PAUSED = "paused"
    DAMAGED = State.DAMAGED.value
    UNFINISHED = State.UNFINISHED.value
    NOT_JUDGED = State.NOT_JUDGED.value
    RECOVERED = State.RECOVERED.value
    HEALTHY = State.HEALTHY.value


@dataclass(frozen=True, slots=True)
class WordStyle:
    """Shape and colour (``#rrggbb``) that mark a state."""

    shape: str
    colour: str


VERMILLION, AMBER, BLUE, GREY = "#D55E00", "#E69F00", "#0072B2", "#8A8A8A"

LOOKS: dict[Word, WordStyle] = {
    Word.FAILING: WordStyle("■", VERMILLION),
    Word.COLLAPSED: WordStyle("▼", VERMILLION),
    Word.NOT_LEARNING: WordStyle("□", VERMILLION),
    Word.KILLED: WordStyle("✕", GREY),
    Word.AT_RISK: WordStyle("▲", AMBER),
    Word.STALE: WordStyle("◌", GREY),
    Word.PAUSED: WordStyle("‖", BLUE),
    Word.DAMAGED: WordStyle("◆", AMBER),
    Word.UNFINISHED: WordStyle("◍", GREY),
    Word.NOT_JUDGED: WordStyle("?", GREY),
    Word.RECOVERED: WordStyle("↗", GREY),
    Word.HEALTHY: WordStyle("●", BLUE),
}
FINISHED = WordStyle("✓", GREY)
"""Style of a healthy run that ended."""
SEVERITY_WORD: dict[Severity, Word] = {
    Severity.CRITICAL: Word.FAILING,
    Severity.WARNING: Word.AT_RISK,
    Severity.INFO: Word.HEALTHY,
}
"""State whose style each severity has."""
CALLING = frozenset({Word.FAILING, Word.COLLAPSED, Word.NOT_LEARNING, Word.AT_RISK})
"""States of live runs that need attention now."""


@dataclass(frozen=True, slots=True)
class StatusWord:
    """State of a run in one word, the reason in a short phrase, and the step since when (None: no particular step).

    ``needs_you``: the run needs attention now. ``ended``: the run is over.
    """

    word: Word
    why: str = ""
    since: int | None = None
    needs_you: bool = False
    ended: bool = False

    @property
    def look(self) -> WordStyle:
        """Shape and colour that mark the state."""
        return FINISHED if self.ended and self.word is Word.HEALTHY else LOOKS[self.word]

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: runs that need attention first, live before ended ones, then by urgency."""
        over = self.ended and self.word is not Word.KILLED
        return (0 if self.needs_you else 1, int(over), list(Word).index(self.word))


def judge(
    run: RunInfo, verdict: Verdict, now: float, pace: Pace | None = None, pause: Pause | None = None
) -> StatusWord:
    """Return the state of ``run`` at ``now`` (Unix seconds), which is that of its ``verdict``.

    A pause, and a silence of a run that has not failed, take precedence over the verdict. ``pace`` is the usual time
    between steps.
    """
    word, why = Word(verdict.state.value), reason_of(verdict)
    since = verdict.at if verdict.at is not None else verdict.since
    gone = dead_since(run, now)
    if run.state is not RunState.RUNNING or gone is not None:
        recent = word is Word.KILLED and _recent(run, now)
        return StatusWord(word, why, since, recent, ended=True)
    if pause is not None:
        return StatusWord(Word.PAUSED, pause_words(pause, now) + _before(verdict), pause.step)
    silence = silent_for(run, pace or Pace(), now)
    if silence is None:
        return StatusWord(word, why, since, word in CALLING)
    silent = silence_words(silence, (pace or Pace()).step_s)
    if verdict.failed:
        return StatusWord(word, f"{why}; {silent}", since, _recent(run, now))
    return StatusWord(Word.STALE, silent + _before(verdict), run.last_step, _recent(run, now))


def reason_of(verdict: Verdict) -> str:
    """Return the reason for a run's state, as ``entropy fell from step 4 690``; empty for a healthy run."""
    if verdict.state is State.HEALTHY:
        return ""
    _, _, reason = verdict.brief.partition(": ")
    dated = verdict.state in (State.AT_RISK, State.FAILING, State.DAMAGED) and verdict.since is not None
    return f"{reason} from step {fmt.step(verdict.since)}" if dated else reason


def firing(alerts: Sequence[Alert]) -> Alert | None:
    """Return the most severe firing alert, of equal ones the one that began first; None if none fires."""
    now_firing = [a for a in alerts if a.state is AlertState.FIRING]
    return min(now_firing, key=lambda a: (-a.severity.rank, a.onset_step), default=None)


def since_words(alert: Alert, last_step: int | None) -> str:
    """Return the kind and onset of an alert, and the steps up to ``last_step``: ``entropy collapse since step 4 690
    (122 steps)``.
    """
    began = f"{fmt.words(alert.kind)} since step {fmt.step(alert.onset_step)}"
    lasted = (last_step or 0) - alert.onset_step
    return f"{began} ({fmt.plural(lasted, 'step')})" if lasted > 0 else began


def _others(alerts: Sequence[Alert], worst: Alert) -> str:
    kinds = {alert.kind for alert in alerts if alert.state is AlertState.FIRING} - {worst.kind}
    return f", and {len(kinds)} more" if kinds else ""


def silence_words(seconds: float, step_s: float | None) -> str:
    """Describe how long a run has been silent: ``no step for 41 min (usually 38 s)``. Arguments are in seconds."""
    usual = "" if step_s is None else f" (usually {fmt.duration(step_s)})"
    return f"no step for {fmt.duration(seconds)}{usual}"


def _before(verdict: Verdict) -> str:
    return f"; before that {reason_of(verdict)}" if verdict.since is not None else ""


def _recent(run: RunInfo, now: float) -> bool:
    return now - max(run.last_ts or 0.0, run.heartbeat_at or 0.0, run.created_at) < RECENT_S


# Reasons for a run's state, as one sentence in order of onset.


def firing_clauses(alerts: Sequence[Alert]) -> list[str]:
    """Return a phrase for each kind of firing alert: ``["responses are garbled from step 4 410", "entropy collapse
    from step 4 690"]``.
    """
    begins: dict[str, int] = {}
    for alert in alerts:
        if alert.state is AlertState.FIRING:
            begins[alert.kind] = min(alert.onset_step, begins.get(alert.kind, alert.onset_step))
    ordered = sorted(begins.items(), key=lambda item: (item[1], item[0]))
    return [f"{fmt.words(kind)} from step {fmt.step(onset)}" for kind, onset in ordered]


def ending_words(run: RunInfo, health: StatusWord, now: float, pace: Pace) -> str:
    """Return a phrase on the pause or silence of a run for the end of its summary; "" if it has neither.

    ``pace`` is the usual time between steps, ``now`` in Unix seconds.
    """
    if health.word is Word.PAUSED:
        return health.why
    if health.word is Word.STALE:
        return silence_words(silent_for(run, pace, now) or 0.0, pace.step_s)
    return ""


def baselines(findings: Sequence[Finding]) -> dict[str, float]:
    """Return the healthy baseline of each metric, from its newest finding."""
    return {f.metric: f.baseline for f in findings if f.metric and f.baseline is not None}


def last_alarm_words(alerts: Sequence[Alert]) -> str:
    """Describe the last resolved alarm of a run, with the steps from which and at which it was resolved; "" without
    one.
    """
    over = [a for a in alerts if a.state is AlertState.RESOLVED and a.fired_at is not None]
    if not over:
        return ""
    last = max(over, key=lambda alert: alert.resolved_step or alert.step)
    ended = fmt.step(last.resolved_step if last.resolved_step is not None else last.step)
    return f"{fmt.words(last.kind)} from step {fmt.step(last.onset_step)}, resolved at step {ended}"
