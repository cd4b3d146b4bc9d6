"""A first look at every token that needs no further pass: how large its gradient is at the last layer."""

from __future__ import annotations

import torch
from torch import Tensor

from rlwatch.gradloc.passes import LossPass


def score_norm(logp: Tensor, square_sum: Tensor | None = None) -> Tensor:
    """``||onehot - p||``: the norm of d logp / d logits, in [0, sqrt 2], in the shape of ``logp`` (nats).

    Exact where ``square_sum``, the sum of p^2 over the vocabulary, is given:
    ||onehot - p||^2 = 1 - 2 p(y) + sum p^2. Without it, ``1 - p(y)``: with the rest of the probability spread over
    other tokens, the true norm lies in [1 - p(y), sqrt(2) (1 - p(y))].
    """
    wrong = -torch.expm1(logp)
    if square_sum is None:
        return wrong
    others = (square_sum - logp.exp().square()).clamp(min=0)  # rounding may leave less than nothing
    return (wrong.square() + others).sqrt()


def screen(one: LossPass, square_sum: Tensor | None = None) -> Tensor:
    """``|a| ||onehot - p||`` (B, T): each token's gradient with respect to its logits, as :func:`score_norm` has it.

    It finds tokens whose own gradient is large, also where it is nearly orthogonal to that of the step. An entropy
    bonus is not in it. NaN and Inf of a coefficient stay.
    """
    return one.coefficient().abs() * score_norm(one.tokens.logp, square_sum)
