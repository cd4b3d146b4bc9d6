"""Measure the realised energy of tokens: how hard a token pushes the logits, from the forward pass alone.

The gradient of log p of a sampled token is, with respect to the logits, the one-hot vector of the token less the
distribution. Its squared norm is w = 1 - 2 p + sum_v p_v^2. Times the squared advantage (and ratio) it is the part of
the squared gradient norm that no weight of the model changes (Optimal Token Baseline, arXiv 2602.07078). It is known at
every step without a backward pass. The sum over a response is its realised energy W.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlwatch.tensors.masked import difference, keep, widen
from rlwatch.tensors.mergeable import Max, Mean, Stats
from rlwatch.tensors.tokens import TokenBatch, screen


def token_energy(logp: Tensor, collision: Tensor) -> Tensor:
    """Return the energy w = 1 - 2 p + sum_v p_v^2 of each token, in [0, 2], in the shape of the arguments.

    ``logp``: log p of the sampled tokens, nats. ``collision``: sum_v p_v^2 over the vocabulary.

    >>> round(token_energy(torch.tensor(0.5).log(), torch.tensor(0.5)).item(), 4)
    0.5
    """
    return screen(logp, torch.ones_like(logp), None, collision).square()


def observe_energy(batch: TokenBatch) -> Stats:
    """Return statistics of the energy w of tokens; empty if the batch has no ``collision``.

    ``policy/energy``: mean of w over tokens. ``policy/energy_pushed``: mean of (A r)^2 w, r the importance ratio.
    ``policy/energy_response`` and ``energy_response_max``: sum of w over a response, mean and largest.
    """
    if batch.collision is None:
        return {}
    w = token_energy(batch.logp, batch.collision)
    some, whole = batch.mask.bool().any(-1), keep(w, batch.mask, 0.0).sum(-1)
    stats: Stats = {
        "policy/energy": Mean.of(w, batch.mask),
        "policy/energy_response": Mean.of(whole, some),
        "policy/energy_response_max": Max.of(whole, some),
    }
    if batch.token_advantages is not None:
        push = widen(batch.token_advantages).square()
        if batch.old_logp is not None:
            push = push * (2 * (difference(batch.logp, batch.old_logp))).exp()
        stats["policy/energy_pushed"] = Mean.of((push * w).expand_as(w), batch.mask)
    return stats
