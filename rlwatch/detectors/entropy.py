"""What collapse and explosion of entropy share: its level now, how the run began, and who else says so."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite
from rlwatch.detectors.company import Company
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Hold, Window


class EntropyDetector(BaseDetector):
    """Median token entropy of the last rows against the run's beginning, in the company of its reward.

    A subclass says which level counts as the beginning, weighs each row (feeding the three holds) and words
    the finding. ``_moved`` dates it, ``_warned`` and ``_confirmed`` make it a warning and critical.
    """

    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("policy/entropy",),)
    reads: ClassVar[tuple[str, ...]] = ("policy/entropy",)

    def __init__(self, base: Baseline, now: Window) -> None:
        super().__init__()
        self._company = Company()
        self._base = base
        self._now = now
        self._moved = Hold(forgive=3)
        self._warned = Hold(forgive=1)
        self._confirmed = Hold(forgive=1)

    def listen(self, step: ClosedStep) -> None:
        """Follow the corroborating metrics."""
        self._company.update(step)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the level of the last rows."""
        entropy = abs(finite(step, *self.reads) or 0.0)
        self._base.update(step.step, entropy)
        self._now.update(step.step, entropy)
        now, level, first = self._now.get(), self._base.get(), self._base.first
        if now is None or level is None or first is None:
            return []
        start = self.beginning(level, first)
        if start <= 0.0:
            return []
        self.weigh(step, entropy, now, start)
        if not self._warned.lasted(3):
            return []
        severity = Severity.CRITICAL if self._confirmed.lasted(3, 2) else Severity.WARNING
        return [self.told(step, now, start, severity)]

    @abstractmethod
    def beginning(self, level: float, first: float) -> float:
        """What to compare with, from the level of the warm-up and that of the very first rows, nats."""

    @abstractmethod
    def weigh(self, step: ClosedStep, entropy: float, now: float, start: float) -> None:
        """Feed the holds: this row's ``entropy``, the level ``now`` and the ``start`` in nats."""

    @abstractmethod
    def told(self, step: ClosedStep, now: float, start: float, severity: Severity) -> Finding:
        """The finding in words and numbers."""

    @property
    def onset(self) -> int | None:
        """Since when single rows, or else their median, have been out."""
        return self._warned.since if self._moved.since is None else self._moved.since
