"""Responses shrink to nothing."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, number, rounded
from rlwatch.detectors.reward import RewardWatch
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Hold, Window

SHORT = 0.3
"""Of the length at the start: less is a change of habit (learning a format halves lengths in healthy runs)."""
NOTHING = 0.1
"""Of the length at the start: less is hardly an answer."""
EMPTY = 0.5
"""Share of responses without a token."""
SOON, LONG = 8, 20
"""Steps a warning, and a critical finding, must last."""


class LengthCollapse(BaseDetector):
    """Mean response length, or the share of empty responses, against how the run began.

    Short answers may be good answers: with a reward above its start nothing is said of short ones, and the tiny are a
    warning. Critical only if answers are all but gone and the reward has not risen by it.
    """

    name: ClassVar[str] = "length_collapse"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("len/mean",), ("len/p50",), ("len/empty",))
    reads: ClassVar[tuple[str, ...]] = ("len/mean", "len/p50", "len/empty")

    def __init__(self) -> None:
        super().__init__()
        self._reward = RewardWatch()
        self._base = Baseline()
        self._now, self._empty = (Window(rows=10, steps=15) for _ in range(2))
        self._empty_base = Baseline(floor=0.02)
        self._row, self._short, self._gone = (Hold(forgive=2) for _ in range(3))

    def listen(self, step: ClosedStep) -> None:
        """Follow the reward."""
        self._reward.update(step)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the length of the last rows."""
        length, empty = finite(step, "len/mean", "len/p50"), finite(step, "len/empty")
        if length is not None:
            self._base.update(step.step, abs(length))
            self._now.update(step.step, abs(length))
        if empty is not None:
            self._empty_base.update(step.step, empty)
            self._empty.update(step.step, empty)
        began = self._base.get()
        low = length is not None and began is not None and abs(length) < (1.0 + SHORT) / 2.0 * began
        self._row.update(step.step, low or (empty is not None and empty >= EMPTY / 2.0))
        gone = self._emptied or (self._share is not None and self._share < NOTHING)
        self._gone.update(step.step, gone)
        self._short.update(step.step, gone or self._shrunk)
        if not self._short.lasted(3, SOON):
            return []
        severe = self._gone.lasted(5, LONG) and not self._reward.risen()
        return [self._finding(step, Severity.CRITICAL if severe else Severity.WARNING)]

    @property
    def _share(self) -> float | None:
        """Length now over length at the start."""
        now, began = self._now.get(), self._base.get()
        return None if now is None or not began else now / began

    @property
    def _shrunk(self) -> bool:
        return self._share is not None and self._share < SHORT and not self._reward.risen()

    @property
    def _emptied(self) -> bool:
        now, began = self._empty.get(), self._empty_base.get()
        return now is not None and began is not None and now >= max(EMPTY, 2.0 * began)

    def _finding(self, step: ClosedStep, severity: Severity) -> Finding:
        now, began, empty = self._now.get(), self._base.get(), self._empty.get()
        if self._emptied or now is None or began is None:
            what, metric = f"{empty or 0.0:.0%} of the responses are empty", "len/empty"
        else:
            what, metric = f"responses have shrunk to {number(now)} tokens, {number(began)} at the start", "len/mean"
        share = self._share
        return self.finding(
            step,
            "length_collapse",
            severity,
            what + self._reward.say(),
            onset=self._row.since if self._row.since is not None else self._short.since,
            metric=metric,
            score=min(SHORT / share, 1e6) if share else None,
            baseline=began,
            evidence=rounded(
                {"length": now, "start": began, "share": share, "empty": empty, "reward": self._reward.now}
            ),
        )
