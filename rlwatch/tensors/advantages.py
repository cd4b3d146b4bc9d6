"""Statistics of advantages, of tokens by the sign of their advantage, and of likelihood displacement.

The two sides are the tokens that an update makes more likely and less likely. Likelihood displacement means that
updates lower the likelihood of the very responses that they reward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlwatch.tensors.masked import difference, everywhere, keep, masked_sum, widen
from rlwatch.tensors.mergeable import Max, Mean, Min, ShareStat, Stats, Std, nonfinite_stats
from rlwatch.tensors.tokens import TokenBatch, tokens_of


@dataclass(frozen=True, slots=True)
class Sides:
    """Masks (B, T) bool of the tokens with ``positive`` and with ``negative`` advantage inside a batch's mask.

    A token whose advantage is NaN (``broken``) is in both, and :meth:`known` makes its value NaN, so that the
    statistics of both sides show it.
    """

    positive: Tensor
    negative: Tensor
    broken: Tensor

    @classmethod
    def of(cls, advantages: Tensor, mask: Tensor) -> Sides:
        """Split the tokens inside ``mask`` (B, T) by the sign of their ``advantages`` (B, T) or (B, 1)."""
        broken, on = advantages.isnan(), mask.bool()
        return cls(on & ((advantages > 0) | broken), on & ((advantages < 0) | broken), broken)

    def known(self, x: Tensor) -> Tensor:
        """Return ``x`` (B, T) with NaN at tokens whose advantage is NaN."""
        return widen(x).masked_fill(self.broken, torch.nan)


def response_advantages(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return the advantage of each response, (B,): its own, or the mean over its tokens inside ``mask`` (B, T).

    ``advantages`` (B,), (B, 1) or (B, T). The mean of a response without tokens is NaN.
    """
    if advantages.dim() == 1:
        return widen(advantages)
    if advantages.shape != mask.shape:
        return widen(advantages).squeeze(1)
    return keep(advantages, mask, 0.0).sum(-1) / mask.bool().sum(-1)


# Advantages as the loss gets them.


def observe_advantages(batch: TokenBatch) -> Stats:
    """Return ``adv/mean``, ``std``, ``max``, ``min``, and the number of advantages that are not finite.

    They are taken over tokens if advantages differ between tokens, else over responses. Empty if the batch has no
    advantages.
    """
    if batch.advantages is None:
        return {}
    a = batch.advantages
    every = batch.mask if a.shape == batch.mask.shape else everywhere(a)
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
"""Nats per token. A response whose log-prob fell by less than this on average was not displaced: recomputation alone
changes log-probs that much.
"""


def observe_displacement(batch: TokenBatch) -> Stats:
    """Return the statistics of likelihood displacement whose inputs the batch has: advantages, and the old log-probs.

    ``lld/logp_positive`` is the mean log-prob (nats) of tokens with A > 0; see :func:`push_down` and
    :func:`displacement_stats` for the others.
    """
    a, tokens = batch.token_advantages, tokens_of(batch)
    of_tokens = tokens.token_advantages
    if a is None or of_tokens is None:
        return {}
    stats: Stats = {
        "lld/logp_positive": Mean.of(tokens.logp, tokens.mask.bool() & (of_tokens > 0)),
        "lld/negative_push": push_down(tokens.logp, of_tokens, tokens.mask),
    }
    if batch.old_logp is not None:
        stats |= displacement_stats(batch.logp, batch.old_logp, widen(a).expand_as(batch.logp), batch.mask.bool())
    return stats


def push_down(logp: Tensor, advantages: Tensor, mask: Tensor) -> ShareStat:
    """Return the share of the sum of |A| (1 - p) that comes from tokens with A < 0; not measured where the sum is 0.

    ``logp`` (nats), ``advantages`` and ``mask`` are (B, T). |A| (1 - p) is how hard a token's gradient pushes on its
    own logit: unlikely tokens are pushed hardest.
    """
    # d log p / d z_y = 1 - p of the token's own logit y; -expm1(log p) is 1 - p without cancellation as p approaches 1.
    push = advantages.abs() * -torch.expm1(widen(logp))
    return ShareStat.of(push.masked_fill(advantages > 0, 0.0), push, mask)


def displacement_stats(logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor) -> Stats:
    """Return statistics of how updates changed the likelihood of responses; all arguments are (B, T), log-probs in
    nats.

    ``lld/displacement``: mean change of log-prob of tokens with A > 0. ``lld/displaced_frac``: share of responses with
    A > 0 that lost more than ``NOISE`` per token. ``lld/penalty``: mean of :func:`actions_lost` over tokens of
    responses with A >= 0. A response's A is the mean of its tokens' advantages.
    """
    gain = difference(logp, old_logp)
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
    """Return the log-prob that tokens lost, as far as the action they belong to lost likelihood as a whole, else 0; (B,
    T).

    ``loss`` (B, T) is old minus new log-prob in nats; negative losses count as 0. An action is a run of tokens inside
    ``mask`` (B, T): what the policy wrote between two texts of the environment. This is the action gate of LLDS (the
    paper's second version); the penalty of the batch divides by the tokens of the responses that are to be preserved,
    those with A >= 0.
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
    """Return 1.0 where ``x`` is below ``limit``, 0.0 elsewhere, and NaN where ``x`` is NaN."""
    return torch.where(x.isnan(), x, (x < limit).to(x.dtype))


# Log-probs of the sampled tokens under the policy being updated.


def observe_logp(batch: TokenBatch) -> Stats:
    """Return ``policy/logp_mean`` and ``policy/logp_min`` (nats), and the number of log-probs that are not finite."""
    batch = tokens_of(batch)
    return {
        "policy/logp_mean": Mean.of(batch.logp, batch.mask),
        "policy/logp_min": Min.of(batch.logp, batch.mask),
        **nonfinite_stats("logp", batch.logp, batch.mask),
    }
