"""Compute all statistics of one micro-batch, under rlwatch's metric names.

An observer is a function of this package that takes a :class:`~rlwatch.tensors.tokens.TokenBatch` and returns the
statistics of one subject whose inputs the batch holds. To add one, write it in the module of its subject and add it to
a list below: to ``CORE`` if it takes a pass or two over (B, T), to ``FULL`` if it sorts, groups or compares.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlwatch.tensors.advantages import observe_advantages, observe_displacement, observe_logp
from rlwatch.tensors.control_tokens import observe_control
from rlwatch.tensors.degeneration import observe_degeneration
from rlwatch.tensors.energy import observe_energy
from rlwatch.tensors.entropy import (
    observe_covariance,
    observe_entropy,
    observe_entropy_quantiles,
    observe_top_covariance,
)
from rlwatch.tensors.gap_shape import observe_gap_shape
from rlwatch.tensors.importance import (
    observe_clipping,
    observe_kl,
    observe_kl_quantiles,
    observe_off_policy,
    observe_ratio_quantiles,
    observe_ratios,
)
from rlwatch.tensors.masked import reducing_together, sharing
from rlwatch.tensors.mergeable import Stats
from rlwatch.tensors.mismatch import observe_divergence, observe_mismatch, observe_mismatch_detail
from rlwatch.tensors.responses import observe_length_tail, observe_lengths
from rlwatch.tensors.tokens import TokenBatch, observe_environment
from rlwatch.tensors.turns import observe_turns

Observer = Callable[[TokenBatch], Stats]
"""Function that returns the statistics of one subject for a batch; without those whose inputs the batch lacks.

It does not wait for the device.
"""

CORE: tuple[Observer, ...] = (
    observe_logp,
    observe_entropy,
    observe_covariance,
    observe_ratios,
    observe_clipping,
    observe_off_policy,
    observe_divergence,
    observe_kl,
    observe_mismatch,
    observe_advantages,
    observe_lengths,
    observe_environment,
    observe_control,
    observe_energy,
    observe_turns,
)
"""Observers that cost a pass or two over (B, T) each."""

FULL: tuple[Observer, ...] = (
    observe_entropy_quantiles,
    observe_top_covariance,
    observe_ratio_quantiles,
    observe_kl_quantiles,
    observe_mismatch_detail,
    observe_gap_shape,
    observe_displacement,
    observe_length_tail,
    observe_degeneration,
)
"""Observers that sort, group or compare tokens."""


def observe(batch: TokenBatch, *, full: bool = True) -> Stats:
    """Return metric name -> statistic for all statistics whose inputs ``batch`` has, without waiting for the device.

    ``full``: also compute statistics that sort, group or compare; without it only those that cost a pass or two over
    (B, T).
    """
    with torch.no_grad(), sharing(), reducing_together():
        stats: Stats = {}
        for observer in (*CORE, *FULL) if full else CORE:
            stats |= observer(batch)
        return stats
