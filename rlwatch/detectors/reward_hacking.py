"""The reward rises while other evidence says the policy has not become better."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, number, rounded
from rlwatch.detectors.hacking_signs import MODERATE, NAMES, STRONG, Sign, Signs
from rlwatch.detectors.reward import RewardWatch
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Hold

ENOUGH = 2
"""Weight of the signs from which it is said at all: one weak sign is what learning looks like."""
MUCH = 5
"""Weight from which it is a warning without a held-out score."""
MOST = 3
"""Signs the message names."""
ROWS, STEPS = 5, 20
"""Rows and steps the signs must last together."""


class RewardHacking(BaseDetector):
    """Training reward clearly above its start, against a held-out score and what good answers do not need.

    A suspicion, and it says how sure: ``hint`` (info), ``likely`` (warning: a held-out score fell, or many signs of
    two kinds). Never critical: such signs tell afterwards what happened, but warn early only with many false alarms;
    a person has to read completions.
    """

    name: ClassVar[str] = "reward_hacking"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple(
        ("reward/mean", name) for name in ("val/score", "val-core/", *NAMES)
    )
    reads: ClassVar[tuple[str, ...]] = ("reward/mean",)

    def __init__(self) -> None:
        super().__init__()
        self._reward = RewardWatch()
        self._signs = Signs()
        self._lasting = Hold(forgive=2)

    def listen(self, step: ClosedStep) -> None:
        """Follow reward, held-out scores and proxies: evaluations come on rows of their own."""
        self._reward.update(step)
        self._signs.update(step, self._reward.now)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Weigh what speaks against the reward."""
        good = self._reward.risen() and not self._reward.fallen()
        signs = self._signs.now() if good else []
        weight = sum(sign.weight for sign in signs)
        self._lasting.update(step.step, weight >= ENOUGH)
        if not self._lasting.lasted(ROWS, STEPS) or not signs:
            return []
        return [self._finding(step, signs, weight)]

    def _finding(self, step: ClosedStep, signs: list[Sign], weight: int) -> Finding:
        strongest = signs[0].weight
        likely = strongest >= STRONG or (weight >= MUCH and strongest >= MODERATE)
        sure = "likely" if likely else "hint"
        how = "likely" if likely else "a hint, no more"
        reward = self._reward
        return self.finding(
            step,
            "reward_hacking",
            Severity.WARNING if likely else Severity.INFO,
            f"reward rose from {number(reward.start or 0.0)} to {number(reward.now or 0.0)}, but "
            f"{'; '.join(sign.says for sign in signs[:MOST])}: the reward may be gamed ({how})",
            onset=self._lasting.since,
            metric="reward/mean",
            score=weight / ENOUGH,
            baseline=reward.start,
            evidence=rounded({"reward": reward.now, "reward_start": reward.start, "weight": weight})
            | {"sure": sure, "signs": [sign.metric for sign in signs]},
        )
