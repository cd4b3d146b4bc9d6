"""Divergences between rollout engine and trainer that KL(rollout || trainer) does not show.

The tokens were sampled by the rollout engine, so each is an estimate of its kind, not its exact value.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlwatch.tensors.kl import k3
from rlwatch.tensors.mergeable import Mean, Stats
from rlwatch.tensors.mismatch.gap import Gap

_EDGE = 1e-6
"""Probabilities are kept this far from 0 and 1 in the binary KL, as OpenRLHF 0.11 does."""


def jensen_shannon(d: Tensor) -> Tensor:
    """NeMo-RL's estimate per token, nats, >= 0; symmetric in trainer and rollout.

    (k3(trainer || m) + k3(rollout || m)) / 2 with the mixture m of both. That is log cosh(d / 2), and written so it is
    accurate near 0 and never overflows.
    """
    half = d.abs() / 2
    near = torch.log1p(2 * torch.sinh(half.clamp(max=20.0) / 2).square())
    return torch.where(half > 20.0, half - math.log(2), near)


def binary_kl(rollout_logp: Tensor, trainer_logp: Tensor) -> Tensor:
    """KL between "this token" and "any other", rollout || trainer, per token, nats, >= 0.

    p log(p/q) + (1-p) log((1-p)/(1-q)): the exact divergence of what one sampled token can tell. It is the trust
    region of DPPO (arXiv 2602.04879) and of OpenRLHF's ``is_correction_gating="binary_kl"``.
    """
    p, q = (logp.exp().clamp(_EDGE, 1 - _EDGE) for logp in (rollout_logp, trainer_logp))
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def reverse_kl(d: Tensor) -> Tensor:
    """Per token, nats, >= 0, in expectation KL(trainer || rollout) although the rollout engine sampled.

    k3 of the other direction under the weight w = exp(d): w d - w + 1, which tends to 1 where the trainer finds the
    token impossible. The two signs of d are written apart, so that neither overflows nor loses its digits near 0.
    """
    below, above = d.clamp(-100.0, 0.0), d.clamp(min=0.0)
    return below.exp() * below - torch.expm1(below) + above.exp() * k3(above)


def divergence_stats(gap: Gap) -> Stats:
    """Token means, nats per token.

    ``k3_reverse`` is NeMo-RL's ``policy_kl_error``: k3 with the roles exchanged and no weight. It estimates nothing
    exactly, but a token the trainer finds impossible (-5 against -15 nats) makes it 22,015 where k3 is 9.
    """
    return {
        "mismatch/k3_reverse": Mean.of(k3(gap.d), gap.scored),
        "mismatch/kl_reverse": Mean.of(reverse_kl(gap.d), gap.scored),
        "mismatch/js": Mean.of(jensen_shannon(gap.d), gap.scored),
        "mismatch/binary_kl": Mean.of(binary_kl(gap.rollout, gap.trainer), gap.scored),
    }
