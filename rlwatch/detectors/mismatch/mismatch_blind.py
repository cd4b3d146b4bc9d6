"""Detect a mismatch that KL does not show: its mean is flat and tiny while the tail grows or the reward falls."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, rounded
from rlwatch.detectors.context import RewardWatch
from rlwatch.detectors.mismatch.mismatch_growth import SCALES
from rlwatch.detectors.rise import Rise, RiseLimit, odds
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Hold, Window
from rlwatch.wording import number

QUIET = ("mismatch/k3", "mismatch/kl")
"""Estimates of KL between trainer and engine that stay flat."""
FLAT = 1.5
"""Factor over the start up to which an estimate counts as flat."""
TAILS = (
    RiseLimit("mismatch/logp_absdiff_p99", 0.1, 2.0),
    RiseLimit("mismatch/logp_absdiff_max", 3.0, 2.0),
    RiseLimit("mismatch/prob_absdiff_max", 0.75, 4.0, odds),
    RiseLimit("mismatch/factor2_frac", 0.002, 3.0),
    RiseLimit("mismatch/overconfident_frac", 1e-4, 3.0),
)
"""Limits of metrics that show single tokens. The largest difference of probability is 0.15 to 0.45 in healthy runs."""
EXTREME = 0.9
"""Median, over rows, of a batch's largest difference of probability that confirms a falling reward.

It counts even if the median has been so large since the start.
"""


class MismatchBlind(BaseDetector):
    """Detector of a mismatch between trainer and rollout engine in the tails, while the KL estimates stay flat.

    With recomputed old log-probs, k1 and k3 between trainer and engine stayed flat for 700 steps of a collapse, while
    the mean difference was tiny and the largest near 1 (VeXact, arXiv 2605.14220). Two tails, or a tail and a falling
    reward, are reported: one alone may be a few odd tokens.
    """

    name: ClassVar[str] = "mismatch_blind"
    reads: ClassVar[tuple[str, ...]] = tuple(tail.metric for tail in TAILS)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((mean, tail.metric) for mean in QUIET for tail in TAILS)
    shares: ClassVar[tuple[str, ...]] = ("_reward",)

    def __init__(self) -> None:
        super().__init__()
        self._reward = RewardWatch()
        self._tails = [Rise(tail) for tail in TAILS]
        self._means = {name: (Window(rows=20, steps=20), Baseline()) for name in QUIET}
        self._extreme = Window(rows=20, steps=20, least=5)
        self._hold = Hold(forgive=2)

    def listen(self, step: ClosedStep) -> None:
        """Read the mean reward and the estimates of KL between trainer and rollout engine from the row ``step``."""
        self._reward.update(step)
        for name, (now, base) in self._means.items():
            value = finite(step, name)
            if value is not None:
                now.update(step.step, abs(value))
                base.update(step.step, abs(value))

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the tails; return the mismatch if they have grown while the estimates are flat."""
        for tail in self._tails:
            tail.update(step.step, finite(step, tail.limit.metric))
        largest = finite(step, "mismatch/prob_absdiff_max")
        if largest is not None:
            self._extreme.update(step.step, largest)
        loud = [tail for tail in self._tails if tail.lasted]
        fallen = self._reward.fallen()
        enough = len(loud) >= 2 or (fallen and (bool(loud) or (self._extreme.get() or 0.0) >= EXTREME))
        self._hold.update(step.step, enough and self._flat())
        return [self._finding(step, loud)] if self._hold.lasted(3) else []

    def _flat(self) -> bool:
        """Return whether an estimate is measured, and each measured one is flat and below a severe level."""
        levels = [(name, now.get(), base.get()) for name, (now, base) in self._means.items()]
        known = [(name, now, then) for name, now, then in levels if now is not None and then is not None]
        return bool(known) and all(
            now < SCALES[name].severe and now <= FLAT * max(then, SCALES[name].noise / 10.0)
            for name, now, then in known
        )

    def _finding(self, step: ClosedStep, loud: list[Rise]) -> Finding:
        means = {name: now.get() for name, (now, _) in self._means.items() if now.get() is not None}
        tails = {tail.limit.metric: tail.level for tail in loud}
        if not tails:
            tails = {"mismatch/prob_absdiff_max": self._extreme.get()}
        flat = " and ".join(f"{name} {number(level or 0.0)}" for name, level in means.items())
        grown = ", ".join(f"{name} {number(level or 0.0)}" for name, level in tails.items())
        return self.finding(
            step,
            "mismatch_blind",
            Severity.WARNING,
            f"{flat} look unchanged, yet single tokens differ ever more between trainer and engine ({grown})"
            f"{self._reward.in_words()}: the KL does not see this mismatch",
            onset=min((tail.since for tail in loud if tail.since is not None), default=self._hold.since),
            metric=next(iter(tails)),
            score=max((tail.score for tail in loud), default=1.0),
            evidence=rounded({**means, **tails, "reward": self._reward.now, "reward_best": self._reward.best}),
        )
