"""Statistics of advantages, of the two sides of a policy gradient, and of likelihood displacement.

The sides are the tokens that an update makes more likely and less likely. Likelihood displacement means that updates
lower the likelihood of the responses that they reward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlwatch.tensors.masked import keep, masked_sum, widen
from rlwatch.tensors.mergeable import Max, Mean, Min, ShareStat, Stats, Std, nonfinite_stats
from rlwatch.tensors.tokens import TokenBatch


@dataclass(frozen=True, slots=True)
class Sides:
    """Tokens of ``positive`` and of ``negative`` advantage inside the mask, (B, T) bool.

    A token whose advantage is NaN is in both, and :meth:`known` makes it NaN, so that no side looks whole.
    """

    positive: Tensor
    negative: Tensor
    broken: Tensor

    @classmethod
    def of(cls, advantages: Tensor, mask: Tensor) -> Sides:
        """Split ``advantages`` (B, T) or (B, 1) inside ``mask`` (B, T)."""
        broken, on = advantages.isnan(), mask.bool()
        return cls(on & ((advantages > 0) | broken), on & ((advantages < 0) | broken), broken)

    def known(self, x: Tensor) -> Tensor:
        """``x`` (B, T), NaN where the side is not known."""
        return widen(x).masked_fill(self.broken, torch.nan)


def response_advantages(advantages: Tensor, mask: Tensor) -> Tensor:
    """The advantage of each response, (B,): its own, or the mean over its tokens of ``mask`` (B, T).

    ``advantages`` (B,), (B, 1) or (B, T). NaN for a response without tokens where it is a mean.
    """
    if advantages.dim() == 1:
        return widen(advantages)
    if advantages.shape != mask.shape:
        return widen(advantages).squeeze(1)
    return keep(advantages, mask, 0.0).sum(-1) / mask.bool().sum(-1)


# Advantages as the loss gets them.


def observe_advantages(batch: TokenBatch) -> Stats:
    """``adv/mean``, ``std``, ``max``, ``min``: over tokens if they differ between tokens, else over responses."""
    if batch.advantages is None:
        return {}
    a = batch.advantages
    every = batch.mask if a.shape == batch.mask.shape else torch.ones_like(a, dtype=torch.bool)
    return {
        "adv/mean": Mean.of(a, every),
        "adv/std": Std.of(a, every),
        "adv/max": Max.of(a, every),
        "adv/min": Min.of(a, every),
        **nonfinite_stats("advantage", a, every),
    }


# Likelihood displacement: updates that make the very responses less likely that they reward.
#
# Deng et al., arXiv 2512.04220, which describes three phases: stagnation; a slow fall of the likelihood of right
# responses while the reward still rises (visible here first); a sharp fall with a surge of the gradient.


NOISE = 1e-4
"""Nats per token: a response that lost less than this on average was not displaced, it was computed anew."""


def observe_displacement(batch: TokenBatch) -> Stats:
    """Likelihood displacement, as far as the batch has its inputs: advantages, and the old log-probs."""
    a = batch.token_advantages
    if a is None:
        return {}
    a, mask = widen(a).expand_as(batch.logp), batch.mask.bool()
    stats: Stats = {
        "lld/logp_positive": Mean.of(batch.logp, mask & (a > 0)),
        "lld/negative_push": push_down(batch.logp, a, mask),
    }
    if batch.old_logp is not None:
        stats |= displacement_stats(batch.logp, batch.old_logp, a, mask)
    return stats


def push_down(logp: Tensor, advantages: Tensor, mask: Tensor) -> ShareStat:
    """Share of the sum of |A| (1 - p) that tokens with A < 0 hold; all (B, T). Not measured where the sum is 0.

    |A| (1 - p) is how hard a token's gradient pushes on its own logit: unlikely tokens are pushed hardest.
    """
    # d log p / d z_y = 1 - p of the token's own logit y; -expm1(log p) is 1 - p without cancellation as p approaches 1.
    push = advantages.abs() * -torch.expm1(widen(logp))
    return ShareStat.of(push.masked_fill(advantages > 0, 0.0), push, mask)


def displacement_stats(logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor) -> Stats:
    """``lld/displacement``, ``lld/displaced_frac``, ``lld/penalty``; all (B, T). A response's A is its tokens' mean."""
    gain = widen(logp) - widen(old_logp)
    tokens = mask.sum(-1)
    response_gain = keep(gain, mask, 0.0).sum(-1) / tokens
    response_advantage = keep(advantages, mask, 0.0).sum(-1) / tokens
    preserve = mask & (response_advantage >= 0).unsqueeze(-1)
    lost = actions_lost(-gain, mask)
    return {
        "lld/displacement": Mean.of(gain, mask & (advantages > 0)),
        "lld/displaced_frac": Mean.of(_below(response_gain, -NOISE), response_advantage > 0),
        "lld/penalty": Mean(preserve.sum().to(lost.dtype), masked_sum(lost, preserve)),
    }


def actions_lost(loss: Tensor, mask: Tensor) -> Tensor:
    """max(0, loss) of tokens whose whole action lost likelihood, else 0; (B, T), all arguments too.

    ``loss`` is old less new log-prob. An action is a run of tokens inside the mask: what the policy wrote between
    two texts of the environment. LLDS, action gate (the paper's second version); the penalty of the batch divides
    by the tokens of the responses that are to be preserved, those with A >= 0.
    """
    begins = mask.clone()
    begins[:, 1:] &= ~mask[:, :-1]
    # Tokens are numbered by the action they are in, and the losses of each action summed by that number, row by row.
    action = begins.long().cumsum(-1)  # 0 before the first, so one place more than tokens
    kept = keep(loss, mask, 0.0)
    sums = kept.new_zeros((loss.shape[0], loss.shape[1] + 1)).scatter_add_(1, action, kept)
    whole = sums.gather(1, action)
    # Not `whole > 0`: the sum of an action with a NaN is NaN, and must pass the gate to be seen.
    return torch.where(mask & ~(whole <= 0), kept.clamp(min=0), 0.0)


def _below(x: Tensor, limit: float) -> Tensor:
    """Return 1.0 where below, 0.0 elsewhere, NaN where ``x`` is NaN."""
    return torch.where(x.isnan(), x, (x < limit).to(x.dtype))


# Log-probs of the sampled tokens under the policy being updated.


def observe_logp(batch: TokenBatch) -> Stats:
    """``policy/logp_mean`` and ``policy/logp_min``, nats, and how many are not finite."""
    return {
        "policy/logp_mean": Mean.of(batch.logp, batch.mask),
        "policy/logp_min": Min.of(batch.logp, batch.mask),
        **nonfinite_stats("logp", batch.logp, batch.mask),
    }
