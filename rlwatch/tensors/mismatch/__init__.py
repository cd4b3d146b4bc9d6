"""Mismatch between the rollout engine and the trainer: the same weights, the same tokens, two sets of log-probs.

With d = log trainer - log rollout: k1 of KL(rollout || trainer) is -d, k3 is exp(d) - d - 1, and the raw weight of
a token is exp(d). Nothing is truncated first: statistics of truncated weights look healthy exactly when
truncation is heavy.

No single number is enough. KL is blind for hundreds of steps while the old log-probs are recomputed, and the share
of tokens that IcePop masks falls while the gap widens (KPop, ringtech.notion.site/kpop): read
``mismatch/icepop_masked`` only beside ``mismatch/logp_absdiff``. So there are the level (:mod:`.gap`), the kind of
divergence (:mod:`.divergences`), where it sits (:mod:`.tails`), what it does to the gradient (:mod:`.advantage`),
how it adds up over a response (:mod:`.responses`), and one cause of it (:mod:`.routing`).

Of what verl reports of its own correction the stream holds what can be merged over micro-batches and does not depend on
a correction the run may not use: perplexities, KL, chi2, raw weights, and the shares that the usual thresholds
(:mod:`.thresholds`) would cut. Statistics of weights after truncation, and of each of the eleven rejection rules,
are verl's own to log.
"""

from __future__ import annotations

from rlwatch.tensors.mismatch.advantage import advantage_stats
from rlwatch.tensors.mismatch.divergences import divergence_stats
from rlwatch.tensors.mismatch.gap import Gap, gap_stats
from rlwatch.tensors.mismatch.observers import core, full
from rlwatch.tensors.mismatch.responses import response_stats
from rlwatch.tensors.mismatch.routing import routing_stats
from rlwatch.tensors.mismatch.tails import tail_stats
from rlwatch.tensors.mismatch.thresholds import Thresholds

__all__ = [
    "Gap",
    "Thresholds",
    "advantage_stats",
    "core",
    "divergence_stats",
    "full",
    "gap_stats",
    "response_stats",
    "routing_stats",
    "tail_stats",
]
