"""What else the run says: the metrics a detector asks before it believes its own."""

from __future__ import annotations

import math

from rlwatch.detectors.base import finite
from rlwatch.detectors.reward import RewardWatch
from rlwatch.records import ClosedStep
from rlwatch.stats import Baseline, Window, quantile

DETERMINISTIC = 1e-3
"""Share of log V below which a language model is as good as deterministic."""
STIFF = 0.1
"""Range of the mean rewards of the last rows, over that of the first rows, below which every batch ends the same."""
AGREE = 1e-6
"""Spread of rewards, relative to their size, below which a group agrees."""


def silent_share(step: ClosedStep) -> float | None:
    """Share of samples without gradient at this row, by the best measure there is; None if there is none.

    The trainer's own count, else whether the reward did not vary at all, else whether all advantages
    were zero.
    """
    share = finite(step, "reward/zero_std_frac")
    if share is not None:
        return min(max(share, 0.0), 1.0)
    spread = finite(step, "reward/std")
    if spread is not None:
        size = abs(finite(step, "reward/mean") or 0.0)
        return float(abs(spread) <= AGREE * max(size, 1.0))
    low, high = finite(step, "adv/min"), finite(step, "adv/max")
    if low is not None and high is not None:
        return float(max(abs(low), abs(high)) <= AGREE)
    return None


class Company:
    """Reward, share of silent samples and gradient norm of a run, each against its own beginning.

    ``log_vocab`` is the entropy of uniform noise in nats, the ceiling; None if no vocabulary size is known.
    """

    def __init__(self) -> None:
        self.reward = RewardWatch()
        self._silent = Window(rows=20, steps=20, least=5)
        self._grad = Window(rows=20, steps=20, least=5)
        self._grad_base = Baseline()
        self._means = Window(rows=20, steps=20, least=10)
        self._means_base = Baseline()
        self._clipped = Window(rows=10, steps=15)
        self.log_vocab: float | None = None

    def update(self, step: ClosedStep) -> None:
        """Take notice of a row."""
        self.reward.update(step)
        share, mean = silent_share(step), finite(step, "reward/mean")
        if share is not None:
            self._silent.update(step.step, share)
        if mean is not None:
            self._means.update(step.step, mean)
            self._means_base.update(step.step, mean)
        norm = finite(step, "optim/grad_norm")
        if norm is not None:
            self._grad.update(step.step, abs(norm))
            self._grad_base.update(step.step, abs(norm))
        clipped = finite(step, "len/clipped")
        if clipped is not None:
            self._clipped.update(step.step, clipped)
        vocab = finite(step, "policy/vocab_size")
        if vocab is not None and vocab > 1.0:
            self.log_vocab = math.log(vocab)

    @property
    def silent(self) -> float | None:
        """Mean share of samples without gradient over the last rows."""
        return self._silent.mean

    @property
    def grad(self) -> float | None:
        """Median gradient norm of the last rows."""
        return self._grad.get()

    @property
    def grad_ratio(self) -> float | None:
        """That over the upper quartile of the run's first rows; None if unknown."""
        now, then = self._grad.get(), self._grad_base.upper()
        if now is None or then is None:
            return None
        return now / then if then > 0.0 else (0.0 if now == 0.0 else None)

    @property
    def truncated(self) -> bool:
        """Whether nearly all responses are cut at the length limit."""
        clipped = self._clipped.get()
        return clipped is not None and clipped >= 0.95

    @property
    def stiff(self) -> bool:
        """Whether batches, which used to differ, all earn about the same: between the deciles, as values repeat."""
        now, low, high = self._means, self._means_base.upper(0.1), self._means_base.upper(0.9)
        if len(now) < now.least or low is None or high is None or not self._means_base.done:
            return False
        return quantile(now.values, 0.9) - quantile(now.values, 0.1) < STIFF * (high - low)

    def mute(self) -> bool:
        """Whether hardly any sample brings a gradient: by count, or by count and one witness.

        The gradient norm is the witness; where none is logged, that every batch ends the same.
        """
        share, ratio = self.silent, self.grad_ratio
        if share is None:
            return False
        return share >= 0.9 or (share >= 0.75 and (self.stiff if ratio is None else ratio <= 0.05))
