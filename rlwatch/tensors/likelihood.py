"""Likelihood displacement: updates that make the very responses less likely that they reward.

Deng et al., arXiv 2512.04220, which describes three phases: stagnation; a slow fall of the likelihood of right
responses while the reward still rises (visible here first); a sharp fall with a surge of the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlwatch.tensors.masked import keep, masked_sum, widen
from rlwatch.tensors.mergeable import Mean, Min, ShareStat, Stats, nonfinite_stats
from rlwatch.tensors.tokens import TokenBatch

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
    """1.0 where below, 0.0 elsewhere, NaN where ``x`` is."""
    return torch.where(x.isnan(), x, (x < limit).to(x.dtype))


# Log-probs of the sampled tokens under the policy being updated.


def observe_logp(batch: TokenBatch) -> Stats:
    """``policy/logp_mean`` and ``policy/logp_min``, nats, and how many are not finite."""
    return {
        "policy/logp_mean": Mean.of(batch.logp, batch.mask),
        "policy/logp_min": Min.of(batch.logp, batch.mask),
        **nonfinite_stats("logp", batch.logp, batch.mask),
    }
