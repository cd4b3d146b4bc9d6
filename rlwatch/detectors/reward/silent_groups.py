"""Detect groups without a learning signal, as all their rewards are equal: many groups, or nearly all."""

from __future__ import annotations

import math
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, Stretch, finite, rounded
from rlwatch.detectors.context import (
    CUT,
    DETERMINISTIC,
    NEARLY,
    NOTHING,
    SOLVED,
    AnswerCount,
    RunContext,
    silent_share,
)
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Hold, Window
from rlwatch.wording import number

MOST, HALF = 0.7, 0.55
"""Shares of samples in groups with equal rewards: most of the batch is wasted, and more than half of it is."""
RISE, LARGE_RISE = 0.2, 0.3
"""Rise over the run's beginning; a smaller one is normal for the run. The larger one applies to ``HALF``."""
SIDE = 2.0 / 3.0
"""Share of the groups with equal rewards that must be all right, or all wrong, to be one-sided."""
FEW = 1.0 / 3.0
"""Groups with a signal, over their number at first, below which there are few."""
ROWS, STEPS = 8, 20
"""Rows and steps for which it must last: a batch of hard data is one row."""


class ZeroVariance(BaseDetector):
    """Detector of many groups with equal rewards: their share of the samples has risen far above how the run began.

    It uses the spread of the reward, not of the advantage: with quantile baselines (QAE, arXiv 2509.22611) four fifths
    of the advantages are 0 in a healthy run. Too easy data are ``info``, too hard or unknown a ``warning``;
    ``no_signal`` reports that nothing at all is learned. Dynamic sampling drops such groups, so this detector is then
    silent.
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
        self._reward = Window(rows=20, steps=20, least=5)
        self._answers = AnswerCount()

    def listen(self, step: ClosedStep) -> None:
        """Read the mean reward from the row ``step``: it shows whether groups with equal rewards agree on right or
        wrong answers.
        """
        reward = finite(step, "reward/mean")
        if reward is not None:
            self._reward.update(step.step, reward)
            self._answers.update(reward)

    def listen_over(self, rows: Stretch) -> bool:
        """Read the mean rewards of all ``rows`` at once."""
        rewards = rows.column("reward/mean")
        if rewards:
            self._reward.extend(rows.steps, rewards)
            for reward in rewards if self._answers.few else ():
                self._answers.update(reward)
        return True

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the mean share of groups with equal rewards over the last rows; return a finding if it is high."""
        share = self._take(step)
        now, began = self._share.mean, self._share_base.get()
        limit = MOST if began is None else min(max(MOST, began + RISE), max(HALF, began + LARGE_RISE))
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
        """Return whether only effective groups are logged, and few are left."""
        now, began = self._groups.get(), self._groups_base.get()
        return len(self._share) == 0 and now is not None and began is not None and now < FEW * began

    @property
    def side(self) -> str:
        """``"easy"``, ``"hard"`` or ``"mixed"`` data, or ``"unknown"`` without a logged split or a conclusive reward.

        If a row has few answers, groups agree by chance, and the share of right answers bounds how many in such groups
        can be right.
        """
        right, wrong = self._right.mean, self._wrong.mean
        if right is None or wrong is None or right + wrong <= 0.0:
            share, reward = self._share.mean, self._reward.mean
            if not share or reward is None or self._answers.error == 0.0:
                return "unknown"
            fewest, most = (reward - (1.0 - share)) / share, reward / share
            return "easy" if fewest >= SIDE else "hard" if most <= 1.0 - SIDE else "unknown"
        share = right / (right + wrong)
        return "easy" if share >= SIDE else "hard" if share <= 1.0 - SIDE else "mixed"

    def _finding(self, step: ClosedStep, now: float | None, began: float | None) -> Finding:
        groups, groups_began = self._groups.get(), self._groups_base.get()
        if now is not None:
            what = f"{now:.0%} of the samples are in zero-variance groups, {began or 0.0:.0%} at the start"
        else:
            what = f"only {groups or 0.0:.0f} groups have reward variance, {groups_began or 0.0:.0f} at the start"
        metric = "reward/zero_std_frac" if now is not None else "reward/effective_groups"
        return self.finding(
            step,
            "zero_variance",
            Severity.INFO if self.side == "easy" else Severity.WARNING,
            what + REASONS[self.side],
            onset=self._row.since if self._row.since is not None else self._out.since,
            metric=metric,
            score=None if now is None else now / MOST,
            baseline=began if now is not None else groups_began,
            evidence=rounded({"share": now, "start": began, "right": self._right.mean, "wrong": self._wrong.mean})
            | rounded({"effective_groups": groups, "effective_start": groups_began})
            | {"side": self.side},
        )


REASONS = {
    "easy": "; most are all correct: the data have become too easy",
    "hard": "; most are all wrong: the data are too hard, or the policy got worse",
    "mixed": "; some are all correct, some all wrong: few prompts are in between",
    "unknown": "",
}


# No learning signal: all samples of a group get one reward, so there is no gradient.

SILENT = 0.75
"""Share of samples without gradient from which hardly any learning signal is left."""
DEGENERATE = 0.1
"""Ratio of entropy to its start from which equal rewards indicate a collapsed policy, not a solved task."""


class NoSignal(BaseDetector):
    """Detector of a lost learning signal: nearly all samples have no gradient, confirmed by the gradient norm.

    Groups also agree if the task is solved. That is ``info`` while the reward is above its start or at its maximum and
    the policy has not degenerated; such rows do not date a loss of signal. A policy without entropy that keeps the
    reward it rose to has stopped learning, but nothing is broken: a warning.
    """

    name: ClassVar[str] = "no_signal"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("reward/zero_std_frac",),
        ("reward/std",),
        ("adv/min", "adv/max"),
        ("optim/grad_norm", "reward/mean"),
    )
    reads: ClassVar[tuple[str, ...]] = ("reward/zero_std_frac", "reward/std", "adv/max", "optim/grad_norm")
    shares: ClassVar[tuple[str, ...]] = ("_context",)

    def __init__(self) -> None:
        super().__init__()
        self._context = RunContext()
        self._entropy = Window(rows=10, steps=10)
        self._entropy_base = Baseline()
        self._row = Hold(forgive=2)
        self._wrong = Hold(forgive=2)
        self._mute = Hold(forgive=2)
        self._unsolved = Hold(forgive=2)
        self._counted = False

    def listen(self, step: ClosedStep) -> None:
        """Read mean reward, gradient norm and entropy from the row ``step``."""
        self._context.update(step)
        entropy = finite(step, "policy/entropy")
        if entropy is not None:
            self._entropy.update(step.step, abs(entropy))
            self._entropy_base.update(step.step, abs(entropy))

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if each has groups with different rewards and a gradient above 0; otherwise return
        False.
        """
        holds = (self._row, self._wrong, self._mute, self._unsolved)
        shares = [share for row in rows.rows if (share := silent_share(row)) is not None]
        if any(hold.since is not None for hold in holds) or max(shares, default=0.0) >= NEARLY * SILENT:
            return False
        if not self._context.teaches(min(map(abs, rows.column("optim/grad_norm")), default=math.inf), SILENT):
            return False
        for hold in holds:
            hold.miss(rows.steps)
        entropies = list(map(abs, rows.column("policy/entropy")))
        if entropies:
            self._entropy.extend(rows.steps, entropies)
            self._entropy_base.extend(rows.steps, entropies)
        self._counted = self._counted or not rows.metrics.isdisjoint(("reward/zero_std_frac", "adv/max"))
        return True

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge whether there still is a learning signal; return its loss as a finding, if there is none."""
        share, value = silent_share(step), finite(step, "reward/mean")
        silent = share is not None and share >= SILENT
        self._row.update(step.step, silent)
        cut = (finite(step, "len/clipped") or 0.0) >= CUT
        right = value is not None and self._context.reward.right(value, cut=cut)
        self._wrong.update(step.step, silent and not right)
        mute = self._context.mute() or self._still()
        self._mute.update(step.step, mute)
        self._unsolved.update(step.step, mute and not self._good())
        self._counted = self._counted or "reward/zero_std_frac" in step.metrics or "adv/max" in step.metrics
        if not self._mute.lasted(3, 5):
            return []
        if (
            self._unsolved.lasted(8, 15)
            and not self._paid()
            and ((self._counted and not self._context.has_learning_signal) or self._witnessed())
        ):
            return [self._finding(step, Severity.CRITICAL)]
        return [self._finding(step, Severity.WARNING if self._unsolved.lasted(3) else Severity.INFO)]

    def _witnessed(self) -> bool:
        """Return whether other metrics confirm the loss of the learning signal: with one group per row it is weak
        evidence.
        """
        still = (
            self._context.grad is not None and self._context.grad <= NOTHING and not self._context.has_learning_signal
        )
        return self._context.reward.fallen() or self._degenerate() or still

    def _still(self) -> bool:
        """Return whether the gradient is exactly zero under a reward that does not move."""
        norm = self._context.grad
        return norm is not None and norm <= NOTHING and self._context.reward.still

    def _good(self) -> bool:
        reward = self._context.reward
        if self._degenerate() or reward.fallen() or reward.now is None:
            return False
        if self._context.truncated:
            # Cut from the first row on, the task may be solved within the limit; without a rise answers may be empty.
            return reward.risen() and not self._context.newly_truncated
        return reward.risen() or reward.holds(SOLVED)

    def _paid(self) -> bool:
        """Return whether the reward rose from more than zero, and stays."""
        reward = self._context.reward
        return reward.risen() and reward.visible() and not reward.fallen(0.1)

    def _degenerate(self) -> bool:
        now, first, level = self._entropy.get(), self._entropy_base.first, self._entropy_base.get()
        if now is None or first is None or level is None:
            return False
        if self._context.log_vocab is not None and now < DETERMINISTIC * self._context.log_vocab:
            return True
        return now < DEGENERATE * max(first, level)

    def _onset(self, severity: Severity) -> int | None:
        """Return the step since which groups agree; where that is a loss, since when they agree without being right."""
        holds = (self._row, self._mute) if severity is Severity.INFO else (self._wrong, self._unsolved, self._mute)
        return next((hold.since for hold in holds if hold.since is not None), None)

    def _finding(self, step: ClosedStep, severity: Severity) -> Finding:
        context = self._context
        share, norm, reward = context.silent, context.grad, context.reward.now
        what = "the gradient is zero" if share is None else f"zero-variance groups: {share:.0%} of the samples"
        message = f"no learning signal: {what}"
        if reward is not None:
            message += f", reward {number(reward)}"
        if norm is not None and share is not None:
            message += f", gradient norm {number(norm)}"
        if severity is Severity.INFO:
            message += "; the reward is high, so the data may be solved"
        return self.finding(
            step,
            "no_signal",
            severity,
            message,
            onset=self._onset(severity),
            metric="reward/zero_std_frac" if share is not None else "optim/grad_norm",
            score=None if share is None else share / SILENT,
            evidence=rounded(
                {
                    "silent_share": share,
                    "grad_norm": norm,
                    "grad_ratio": context.grad_ratio,
                    "reward": reward,
                    "reward_start": context.reward.start,
                    "entropy": self._entropy.get(),
                }
            ),
        )
