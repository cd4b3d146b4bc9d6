"""ZClip: a norm that is an outlier by its z-score is clipped towards the mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlwatch.clipping.grouping import By
from rlwatch.clipping.rule import State, positive, within_one

EPSILON = 1e-6
"""Added to the standard deviation, as in the released code."""


@dataclass(frozen=True, slots=True)
class ZClip:
    """Clipping by z-score (arXiv 2504.02507; defaults of bluorion-com/ZClip, mode ``zscore``, adaptive scaling).

    z = (n - mu) / (sigma + 1e-6). Where z > ``threshold`` the norm n is clipped to mu + threshold sigma / (z /
    threshold), the further out the closer to the mean. Mean and variance are those of the first ``warmup`` norms, which
    are not clipped; then mu = alpha mu + (1 - alpha) n' and variance = alpha variance + (1 - alpha)(n' - mu)^2 with the
    clipped norm n' and the new mu.

    Mean and variance are no robust statistics: a spike within the warm-up widens what is allowed for about
    1 / (1 - alpha) steps.

    Parameters
    ----------
    threshold
        Of z.
    alpha
        Of the averages, in [0, 1).
    warmup
        Norms of a group before it is clipped, >= 1.
    feed_spikes
        Whether a clipped norm enters the averages (the released code: yes, unless ``skip_update_on_spike``).
    by
        What is clipped as one; published: everything (``By.ALL``).
    """

    threshold: float = 2.5
    alpha: float = 0.97
    warmup: int = 25
    feed_spikes: bool = True
    by: By = By.LAYER

    def __post_init__(self) -> None:
        positive("ZClip", threshold=self.threshold, warmup=self.warmup)
        within_one("ZClip", alpha=self.alpha)

    def start(self, like: Tensor) -> State:
        """Nothing counted."""
        zeros = torch.zeros_like(like)
        return {"mean": zeros, "variance": zeros.clone(), "count": zeros.to(torch.int64)}

    def scales(self, norms: Tensor, seen: Tensor, state: State) -> tuple[Tensor, State]:
        """See :class:`~rlwatch.clipping.rule.ClipRule`."""
        mean, variance, count = state["mean"], state["variance"], state["count"]
        sigma = variance.sqrt()
        z = (norms - mean) / (sigma + EPSILON)
        spiked = (count >= self.warmup) & (z > self.threshold)
        limit = mean + self.threshold**2 * sigma / torch.where(spiked, z, 1.0)
        clipped = torch.where(spiked, limit, norms)
        new_mean, new_variance = self._averages(clipped, state)
        fed = seen if self.feed_spikes else seen & ~spiked
        return clipped / norms, {
            "mean": torch.where(fed, new_mean, mean),
            "variance": torch.where(fed, new_variance, variance),
            "count": count + seen,
        }

    def _averages(self, x: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Plain mean and (population) variance while the warm-up lasts, moving ones after it."""
        mean, variance, count = state["mean"], state["variance"], state["count"]
        keep = torch.where(count < self.warmup, count.to(x) / (count.to(x) + 1), self.alpha)
        new_mean = keep * mean + (1 - keep) * x
        plain = keep * variance + (1 - keep) * (x - mean) * (x - new_mean)
        moving = keep * variance + (1 - keep) * (x - new_mean).square()
        return new_mean, torch.where(count < self.warmup, plain, moving)
