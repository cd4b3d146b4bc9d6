"""The pause a run is in, in words."""

from __future__ import annotations

from rlwatch.control.liveness import Pause, pause_of

from . import format as fmt

__all__ = ["Pause", "pause_of", "words"]


def words(pause: Pause, now: float) -> str:
    """``paused at step 480 by ann@lab: look at the samples; goes on by itself in 54 min``."""
    why = f": {fmt.shorten(pause.why, 120)}" if pause.why else ""
    left = fmt.duration(max(0.0, pause.until - now))
    return f"paused at step {fmt.step(pause.step)} by {fmt.shorten(pause.by, 60)}{why}; goes on by itself in {left}"
