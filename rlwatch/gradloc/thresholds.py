"""From which norm on a set of tokens stands out of the noise: thresholds of GradLoc, with the loss normaliser explicit.

If the gradients of single tokens were independent noise, the gradient of (1/Z) sum over L tokens would have a norm of
``T sqrt(L) / Z``, where T is the one constant to choose: the threshold for the un-averaged gradient of one token.
Everything published is this with some Z. Source: Tencent-Hunyuan/GradLoc, figure 2 of its README and its released code,
which differ. N response tokens in the step over W ranks with M micro-batches each.
"""

from __future__ import annotations

import math


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
