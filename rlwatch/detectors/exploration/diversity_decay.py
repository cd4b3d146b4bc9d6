"""Detect that answers become alike: more samples of a prompt find nothing that a single one does not."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, rounded
from rlwatch.detectors.context import Change, Peak, RewardWatch
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Hold
from rlwatch.wording import number

DRAWS = (64, 32, 16, 8, 4)
"""The k of pass@k that are read, the largest first: with two draws there is little left to find."""
LOST = 0.1
"""Fall of pass@k below its best (a difference of two shares) that prompts of different difficulty do not explain."""
GAP = 0.5
"""Share of the initial gap between pass@k and pass@1 at or below which the gap counts as closed."""
WIDE = 0.1
"""Smallest initial gap between pass@k and pass@1 that can close; smaller ones are not judged."""
FEWER = 0.5
"""Share of the initial share of distinct answers at or below which answers count as alike."""
ROWS, STEPS = 5, 15
"""Rows and steps for which it must last."""
ANSWERS = ("reward/unique_answers", "reward/answer_entropy")


class DiversityDecay(BaseDetector):
    """Detector of lost diversity: pass@k relative to pass@1, and distinct answers of a group, compared with the run's
    start.

    Yue et al. (arXiv 2504.13837) and ProRL's "diminish" regime: pass@1 rises while pass@k falls. The gap also closes in
    healthy runs, because pass@1 rises to pass@k, and right answers to one prompt are equal. So a closed gap counts only
    while pass@1 stalls, and fewer distinct answers only while the reward does.
    """

    name: ClassVar[str] = "diversity_decay"
    reads: ClassVar[tuple[str, ...]] = (*(f"reward/pass_at_{k}" for k in DRAWS), *ANSWERS)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (
        *((f"reward/pass_at_{k}", "reward/pass_at_1") for k in DRAWS),
        *((name,) for name in ANSWERS),
    )
    shares: ClassVar[tuple[str, ...]] = ("_reward",)

    def __init__(self) -> None:
        super().__init__()
        self._reward, self._one = RewardWatch(), Peak()
        self._many, self._gap, self._answers = Peak(), Change(), Change()
        self._lost, self._closed, self._fewer = (Hold(forgive=2) for _ in range(3))
        self._k = 0

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge pass@k, its gap to pass@1, and distinct answers over the last rows; return the loss of diversity, if
        any.
        """
        self._take(step)
        stalls = not self._reward.risen()
        lost = self._many.fallen >= LOST and self._many.dropped and self._one.fallen < LOST / 2.0
        closed = (self._gap.start or 0.0) >= WIDE and self._gap.share <= GAP and self._gap.moved
        self._lost.update(step.step, lost)
        self._closed.update(step.step, closed and self._one.gain < WIDE / 2.0)
        self._fewer.update(step.step, self._answers.share <= FEWER and self._answers.moved and stalls)
        if self._lost.lasted(ROWS, STEPS):
            return [self._pass_lost(step)]
        if self._closed.lasted(ROWS, STEPS):
            return [self._gap_closed(step)]
        return [self._fewer_answers(step)] if self._fewer.lasted(ROWS, STEPS) else []

    def _take(self, step: ClosedStep) -> None:
        one, answers = finite(step, "reward/pass_at_1"), finite(step, *ANSWERS)
        k = next((k for k in DRAWS if finite(step, f"reward/pass_at_{k}") is not None), 0)
        many = finite(step, f"reward/pass_at_{k}") if k else None
        if answers is not None:
            self._answers.update(step.step, answers)
        if one is None or many is None or (self._k and k != self._k):
            return
        self._k = k
        self._one.update(step.step, one)
        self._many.update(step.step, many)
        self._gap.update(step.step, max(many - one, 0.0))

    def _pass_lost(self, step: ClosedStep) -> Finding:
        k = self._k
        what = (
            f"pass@{k} fell from {number(self._many.best or 0.0)} to {number(self._many.now or 0.0)} while pass@1 "
            f"({number(self._one.now or 0.0)}) did not: the policy forgets answers it could find"
        )
        return self._finding(step, what, f"reward/pass_at_{k}", self._lost, self._many)

    def _gap_closed(self, step: ClosedStep) -> Finding:
        what = (
            f"pass@{self._k} is {number(self._gap.now or 0.0)} above pass@1, {number(self._gap.start or 0.0)} at the "
            f"start, and pass@1 stands at {number(self._one.now or 0.0)}: more samples find nothing new"
        )
        return self._finding(step, what, f"reward/pass_at_{self._k}", self._closed, self._gap)

    def _fewer_answers(self, step: ClosedStep) -> Finding:
        metric = next((name for name in ANSWERS if name in step.metrics), ANSWERS[0])
        now, start = self._answers.now or 0.0, self._answers.start or 0.0
        what = f"{metric} is {number(now)}, {number(start)} at the start: responses of a group become alike"
        return self._finding(step, what + self._reward.in_words(), metric, self._fewer, self._answers)

    def _finding(self, step: ClosedStep, what: str, metric: str, held: Hold, change: Change) -> Finding:
        return self.finding(
            step,
            "diversity_decay",
            Severity.WARNING,
            what,
            onset=held.since,
            metric=metric,
            score=min(1.0 / change.share, 1e6) if change.share > 0.0 else None,
            baseline=change.start,
            evidence=rounded(
                {
                    "k": self._k or None,
                    "pass_at_1": self._one.now,
                    "pass_at_k": self._many.now,
                    "pass_at_k_best": self._many.best,
                    "gap_start": self._gap.start,
                    "answers": self._answers.now,
                    "answers_start": self._answers.start,
                    "reward": self._reward.now,
                }
            ),
        )
