"""Tokens the environment wrote (a tool's answer, a user's turn), which no loss may count."""

from __future__ import annotations

from rlwatch.tensors.mergeable import Mean, Stats
from rlwatch.tensors.tokens import TokenBatch


def core(batch: TokenBatch) -> Stats:
    """``tokens/environment_leak``: of the environment's tokens, those with mask 1; ``tokens/environment_frac``.

    A policy that is trained on tokens it did not sample is taught to imitate its tools.
    """
    if batch.environment is None:
        return {}
    theirs, counted = batch.environment.bool(), batch.mask.bool()
    return {
        "tokens/environment_leak": Mean.of(counted, theirs),
        "tokens/environment_frac": Mean.of(theirs, theirs | counted),
    }
