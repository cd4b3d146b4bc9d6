"""A first look at every token that needs no further pass: how large its gradient is at the last layer."""

from __future__ import annotations

import torch
from torch import Tensor

from rlwatch.gradloc.passes import LossPass


def score_norm(logp: Tensor) -> Tensor:
    """Lower bound ``1 - p(y)`` of ``||onehot - p||``, the norm of d logp / d logits, in the shape of ``logp`` (nats).

    The norm is sqrt(1 - 2 p(y) + sum p^2) = sqrt((1 - p(y))^2 + sum over the other tokens of p^2). Those squares need
    the whole vocabulary, which is gone by then; they lie between 0 and (1 - p(y))^2, so the true norm lies in
    [1 - p(y), sqrt(2) (1 - p(y))]: near enough to rank candidates.
    """
    return -torch.expm1(logp)


def screen(one: LossPass) -> Tensor:
    """``|a| ||onehot - p||`` (B, T): each token's gradient with respect to its logits, as :func:`score_norm` has it.

    It finds tokens whose own gradient is large, also where it is nearly orthogonal to that of the step. An entropy
    bonus is not in it. NaN and Inf of a coefficient stay.
    """
    return one.coefficient().abs() * score_norm(one.tokens.logp)
