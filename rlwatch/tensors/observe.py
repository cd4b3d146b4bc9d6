"""All statistics of one micro-batch, under their canonical names.

A subject is a module of this room with a function ``core`` (a pass or two over (B, T)), a function ``full``
(sorts, groups, compares), or both; each takes a :class:`~rlwatch.tensors.tokens.TokenBatch` and returns what
the batch holds about its subject. To add a subject, add its functions to the lists below.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlwatch.tensors import (
    advantages,
    clipping,
    covariance,
    entropy,
    environment,
    importance,
    kl,
    lengths,
    likelihood,
    logprobs,
    mismatch,
    offpolicy,
    text,
)
from rlwatch.tensors.masked import counting_once
from rlwatch.tensors.mergeable import Stats
from rlwatch.tensors.tokens import TokenBatch

Observer = Callable[[TokenBatch], Stats]
"""Tells what a batch holds about one subject; absent where the batch does not hold it. Waits for nothing."""

CORE: tuple[Observer, ...] = (
    logprobs.core,
    entropy.core,
    covariance.core,
    importance.core,
    clipping.core,
    offpolicy.core,
    kl.core,
    mismatch.core,
    advantages.core,
    lengths.core,
    environment.core,
)
"""Each costs a pass or two over (B, T)."""

FULL: tuple[Observer, ...] = (
    entropy.full,
    covariance.full,
    importance.full,
    kl.full,
    mismatch.full,
    likelihood.full,
    lengths.full,
    text.full,
)
"""Each sorts, groups or compares."""


def observe(batch: TokenBatch, *, full: bool = True) -> Stats:
    """What ``batch`` can tell; what it does not hold is absent. Waits for nothing.

    Without ``full`` only what costs a pass or two over (B, T); with it also what sorts, groups or compares more.
    """
    with torch.no_grad(), counting_once():
        stats: Stats = {}
        for observer in (*CORE, *FULL) if full else CORE:
            stats |= observer(batch)
        return stats
