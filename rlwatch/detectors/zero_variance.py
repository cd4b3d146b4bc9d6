"""Groups that teach nothing: all right (too easy) or all wrong (too hard)."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, rounded
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Hold, Window

MOST = 0.7
"""Share of samples in groups that agree from which most of the batch is spent for nothing."""
RISE = 0.2
"""Rise over the run's beginning below which it has always been so."""
SIDE = 2.0 / 3.0
"""Share of the agreeing groups that makes it one-sided."""
FEW = 1.0 / 3.0
"""Groups with a signal, over how many there were at first."""
ROWS, STEPS = 8, 20
"""Rows and steps it must last: a batch of hard data is one row."""


class ZeroVariance(BaseDetector):
    """Share of samples in groups whose rewards agree, risen far above how the run began, and of which kind.

    The reward's spread is meant, not the advantage's: with quantile baselines (QAE, arXiv 2509.22611) four fifths of
    the advantages are 0 in a healthy run. Too easy is ``info``, too hard or unknown a ``warning``; that nothing at
    all is learned is for ``no_signal`` to say. With dynamic sampling such groups are dropped and this stays silent.
    """

    name: ClassVar[str] = "zero_variance"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("reward/zero_std_frac",),
        ("reward/zero_std_right_frac", "reward/zero_std_wrong_frac"),
        ("reward/effective_groups",),
    )
    reads: ClassVar[tuple[str, ...]] = (
        "reward/zero_std_frac",
        "reward/zero_std_right_frac",
        "reward/zero_std_wrong_frac",
        "reward/effective_groups",
    )

    def __init__(self) -> None:
        super().__init__()
        self._share, self._right, self._wrong, self._groups = (Window(rows=20, steps=20, least=5) for _ in range(4))
        self._share_base, self._groups_base = Baseline(floor=0.05), Baseline()
        self._row, self._out = Hold(forgive=2), Hold(forgive=2)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the mean share of the last rows."""
        share = self._take(step)
        now, began = self._share.mean, self._share_base.get()
        limit = MOST if began is None else max(MOST, began + RISE)
        self._row.update(step.step, share is not None and share >= limit)
        self._out.update(step.step, (began is not None and now is not None and now >= limit) or self._few)
        return [self._finding(step, now, began)] if self._out.lasted(ROWS, STEPS) else []

    def _take(self, step: ClosedStep) -> float | None:
        right, wrong = finite(step, "reward/zero_std_right_frac"), finite(step, "reward/zero_std_wrong_frac")
        share = finite(step, "reward/zero_std_frac")
        if share is None and right is not None and wrong is not None:
            share = right + wrong
        groups = finite(step, "reward/effective_groups")
        for window, value in ((self._right, right), (self._wrong, wrong), (self._share, share), (self._groups, groups)):
            if value is not None:
                window.update(step.step, max(value, 0.0))
        if share is not None:
            self._share_base.update(step.step, share)
        if groups is not None:
            self._groups_base.update(step.step, groups)
        return share

    @property
    def _few(self) -> bool:
        """Whether, where only effective groups are logged, few are left."""
        now, began = self._groups.get(), self._groups_base.get()
        return len(self._share) == 0 and now is not None and began is not None and now < FEW * began

    @property
    def side(self) -> str:
        """``"easy"``, ``"hard"``, ``"mixed"`` or, where nobody split them, ``"unknown"``."""
        right, wrong = self._right.mean, self._wrong.mean
        if right is None or wrong is None or right + wrong <= 0.0:
            return "unknown"
        share = right / (right + wrong)
        return "easy" if share >= SIDE else "hard" if share <= 1.0 - SIDE else "mixed"

    def _finding(self, step: ClosedStep, now: float | None, began: float | None) -> Finding:
        groups, groups_began = self._groups.get(), self._groups_base.get()
        if now is not None:
            what = f"{now:.0%} of the samples are in groups whose rewards agree, {began or 0.0:.0%} at the start"
        else:
            what = f"only {groups or 0.0:.0f} groups have rewards that differ, {groups_began or 0.0:.0f} at the start"
        metric = "reward/zero_std_frac" if now is not None else "reward/effective_groups"
        return self.finding(
            step,
            "zero_variance",
            Severity.INFO if self.side == "easy" else Severity.WARNING,
            what + SAYS[self.side],
            onset=self._row.since if self._row.since is not None else self._out.since,
            metric=metric,
            score=None if now is None else now / MOST,
            baseline=began if now is not None else groups_began,
            evidence=rounded({"share": now, "start": began, "right": self._right.mean, "wrong": self._wrong.mean})
            | rounded({"effective_groups": groups, "effective_start": groups_began})
            | {"side": self.side},
        )


SAYS = {
    "easy": "; most of them are all right: the data have become too easy",
    "hard": "; most of them are all wrong: the data are too hard, or the policy has lost what it could",
    "mixed": "; some all right, some all wrong: few prompts are left in between",
    "unknown": "",
}
