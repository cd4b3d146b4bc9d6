"""Turns of a conversation with tools or an environment, separated by the tokens that these wrote."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlwatch.tensors.masked import widen
from rlwatch.tensors.mergeable import Mean, Stats
from rlwatch.tensors.tokens import TokenBatch

MOST = 8
"""Turns that are measured apart; later ones are counted as the last of them."""
ENTROPY, ABSDIFF = "turns/entropy/", "turns/absdiff/"


def turn_of(environment: Tensor) -> Tensor:
    """Return the turn of each token (B, T), from 0: how many times the environment has answered before it.

    ``environment`` (B, T): the tokens that tools and users wrote. They belong to the turn that follows.

    >>> turn_of(torch.tensor([[0, 0, 1, 1, 0, 1, 0]])).tolist()
    [[0, 0, 1, 1, 1, 2, 2]]
    """
    written = environment.bool()
    begins = written.clone()
    begins[:, 1:] &= ~written[:, :-1]
    return begins.long().cumsum(-1)


def observe_turns(batch: TokenBatch) -> Stats:
    """Return mean entropy and mean |log trainer - log rollout| of the policy's own tokens in each turn, nats per token.

    The metrics are ``turns/entropy/<n>`` and ``turns/absdiff/<n>``, n from 1 to ``MOST``. Empty if ``batch`` does not
    mark which tokens the environment wrote.
    """
    if batch.environment is None or not batch.environment.shape[1]:
        return {}
    turn, own = turn_of(batch.environment).clamp(max=MOST - 1), batch.mask.bool() & ~batch.environment.bool()
    measured: Mapping[str, tuple[Tensor, Tensor]] = {
        **({} if batch.entropy is None else {ENTROPY: (widen(batch.entropy), own)}),
        **({} if batch.rollout_logp is None else {ABSDIFF: _gap(batch, batch.rollout_logp, own)}),
    }
    return {
        f"{name}{n + 1}": Mean.of(values, inside & (turn == n))
        for name, (values, inside) in measured.items()
        for n in range(MOST)
    }


def _gap(batch: TokenBatch, rollout_logp: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Return |d| of each token, and the own tokens that the engine could score."""
    rollout = widen(rollout_logp)
    return (widen(batch.trainer_logp) - rollout).abs(), own & ~torch.isnan(rollout)
