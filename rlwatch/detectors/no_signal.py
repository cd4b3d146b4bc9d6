"""No learning signal: all samples of a group get one reward, so nothing pushes the policy any more."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, number, rounded
from rlwatch.detectors.company import DETERMINISTIC, Company, silent_share
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Hold, Window

SOLVED = 0.95
"""Mean reward on the common 0..1 scale from which agreeing groups mean a solved task."""
DEGENERATE = 0.1
"""Entropy over its start from which agreement means a collapsed policy, not a solved task."""


class NoSignal(BaseDetector):
    """Share of samples without gradient near one, with the gradient norm as witness.

    Groups also agree when the task is solved. That is told as ``info`` while the reward is above its
    start or at its maximum and the policy has not degenerated.
    """

    name: ClassVar[str] = "no_signal"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("reward/zero_std_frac",),
        ("reward/std",),
        ("adv/min", "adv/max"),
        ("optim/grad_norm", "reward/mean"),
    )
    reads: ClassVar[tuple[str, ...]] = ("reward/zero_std_frac", "reward/std", "adv/max", "optim/grad_norm")

    def __init__(self) -> None:
        super().__init__()
        self._company = Company()
        self._entropy = Window(rows=10, steps=10)
        self._entropy_base = Baseline()
        self._row = Hold(forgive=2)
        self._mute = Hold(forgive=2)
        self._unsolved = Hold(forgive=2)
        self._counted = False

    def listen(self, step: ClosedStep) -> None:
        """Follow the corroborating metrics."""
        self._company.update(step)
        entropy = finite(step, "policy/entropy")
        if entropy is not None:
            self._entropy.update(step.step, abs(entropy))
            self._entropy_base.update(step.step, abs(entropy))

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge whether anything still pushes the policy."""
        share = silent_share(step)
        self._row.update(step.step, share is not None and share >= 0.75)
        mute = self._company.mute() or self._still()
        self._mute.update(step.step, mute)
        self._unsolved.update(step.step, mute and not self._good())
        self._counted = self._counted or "reward/zero_std_frac" in step.metrics or "adv/max" in step.metrics
        if not self._mute.lasted(3, 5):
            return []
        if self._unsolved.lasted(8, 15) and (self._counted or self._witnessed()):
            return [self._finding(step, Severity.CRITICAL)]
        return [self._finding(step, Severity.WARNING if self._unsolved.lasted(3) else Severity.INFO)]

    def _witnessed(self) -> bool:
        """One group a row is thin evidence: ask reward, gradient and entropy as well."""
        still = self._company.grad is not None and self._company.grad <= 1e-7
        return self._company.reward.fallen() or self._degenerate() or still

    def _still(self) -> bool:
        """A gradient of exactly nothing under a reward that does not move."""
        norm = self._company.grad
        return norm is not None and norm <= 1e-7 and self._company.reward.still

    def _good(self) -> bool:
        reward, now = self._company.reward, self._company.reward.now
        if self._degenerate() or self._company.truncated or reward.fallen() or now is None:
            return False
        return reward.risen() or SOLVED <= now <= 1.0

    def _degenerate(self) -> bool:
        now, first, level = self._entropy.get(), self._entropy_base.first, self._entropy_base.get()
        if now is None or first is None or level is None:
            return False
        if self._company.log_vocab is not None and now < DETERMINISTIC * self._company.log_vocab:
            return True
        return now < DEGENERATE * max(first, level)

    def _finding(self, step: ClosedStep, severity: Severity) -> Finding:
        company = self._company
        share, norm, reward = company.silent, company.grad, company.reward.now
        what = "the gradient is zero" if share is None else f"{share:.0%} of the samples are in groups that agree"
        message = f"no learning signal: {what}"
        if reward is not None:
            message += f", reward stands at {number(reward)}"
        if norm is not None and share is not None:
            message += f", gradient norm {number(norm)}"
        if severity is Severity.INFO:
            message += "; the reward is good, so the data may simply be solved"
        onset = self._row.since if self._row.since is not None else self._mute.since
        return self.finding(
            step,
            "no_signal",
            severity,
            message,
            onset=onset,
            metric="reward/zero_std_frac" if share is not None else "optim/grad_norm",
            score=None if share is None else share / 0.75,
            evidence=rounded(
                {
                    "silent_share": share,
                    "grad_norm": norm,
                    "grad_ratio": company.grad_ratio,
                    "reward": reward,
                    "reward_start": company.reward.start,
                    "entropy": self._entropy.get(),
                }
            ),
        )
