"""From which norm on a set of tokens stands out of the noise: thresholds of GradLoc, with the loss normaliser explicit.

If the gradients of single tokens were independent noise, the gradient of (1/Z) sum over L tokens would have a norm of
``T sqrt(L) / Z``, where T is the one constant to choose: the threshold for the un-averaged gradient of one token.
Everything published is this with some Z. Source: Tencent-Hunyuan/GradLoc, figure 2 of its README and its released code,
which differ. N response tokens in the step over W ranks with M micro-batches each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def threshold(n_tokens: float, normaliser: float, *, single_token: float) -> float:
    """``T sqrt(L) / Z`` for a set of ``n_tokens`` in a loss whose per-token terms are divided by ``normaliser``.

    ``single_token`` is T, in the unit of the un-averaged gradient of a token. ``normaliser`` is the Z of the gradient
    as it is probed, the mean over ranks included: the response tokens of the whole step for a token mean.

    Raises
    ------
    ValueError
        If ``normaliser`` is not positive.

    >>> threshold(65536, 65536, single_token=640)
    2.5
    """
    if not normaliser > 0:
        raise ValueError(f"a loss is divided by a positive number, got normaliser={normaliser}")
    return single_token * math.sqrt(n_tokens) / normaliser


def single_token(norm: float, n_tokens: float, normaliser: float) -> float:
    """T at which ``norm`` is just the threshold of ``n_tokens``: the inverse of :func:`threshold`.

    From a run's own usual gradient norm it makes the T that corresponds to it.

    Raises
    ------
    ValueError
        If ``n_tokens`` or ``normaliser`` is not positive.
    """
    if not n_tokens > 0:
        raise ValueError(f"the noise of no tokens says nothing, got n_tokens={n_tokens}")
    return norm / threshold(n_tokens, normaliser, single_token=1.0)


@dataclass(frozen=True, slots=True)
class Figure:
    """Thresholds of the published figure: each probe is the token mean of what it probes, Z = L.

    Parameters
    ----------
    single_token
        T.
    tokens
        N, over all ranks.
    micro_batches
        M, of each rank.
    ranks
        W.
    """

    single_token: float
    tokens: int
    micro_batches: int = 1
    ranks: int = 1

    def whole_step(self) -> float:
        """T / sqrt(N)."""
        return self.of_mean(self.tokens)

    def micro_batch(self) -> float:
        """T sqrt(M) / sqrt(N): one micro-batch of every rank."""
        return self.of_mean(self.tokens / self.micro_batches)

    def rank_group(self, active: int) -> float:
        """T sqrt(M W) / sqrt(N l): that micro-batch on ``active`` = l of the ranks."""
        return self.of_mean(self.tokens * active / (self.micro_batches * self.ranks))

    def segment(self, length: int) -> float:
        """T / sqrt(L): ``length`` tokens of one rank."""
        return self.of_mean(length)

    def of_mean(self, n_tokens: float) -> float:
        """Threshold for the mean over ``n_tokens``."""
        return threshold(n_tokens, n_tokens, single_token=self.single_token)


@dataclass(frozen=True, slots=True)
class ReleasedCode:
    """Thresholds of the released code, which probes what FSDP averages over W ranks though only l contribute.

    The factor l / W is right for that average. The factor M of the whole step is not in the figure and makes it less
    sensitive with several micro-batches. Parameters as in :class:`Figure`.
    """

    single_token: float
    tokens: int
    micro_batches: int = 1
    ranks: int = 1

    def whole_step(self) -> float:
        """T M / sqrt(N)."""
        return self.micro_batches * self._figure.whole_step()

    def micro_batch(self) -> float:
        """T sqrt(M) / sqrt(N), although the probed loss carries 1 / M from accumulation."""
        return self._figure.micro_batch()

    def rank_group(self, active: int) -> float:
        """T sqrt(M l) / sqrt(N W)."""
        return self._figure.rank_group(active) * active / self.ranks

    def segment(self, length: int) -> float:
        """T / (sqrt(L) W)."""
        return self._figure.segment(length) / self.ranks

    @property
    def _figure(self) -> Figure:
        return Figure(self.single_token, self.tokens, self.micro_batches, self.ranks)
