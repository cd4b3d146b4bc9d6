"""All statistics of one micro-batch, under their canonical names."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlwatch.tensors.entropy import entropy_stats
from rlwatch.tensors.finite import nonfinite_stats
from rlwatch.tensors.importance import clip_stats, ratio_stats
from rlwatch.tensors.kl import kl_ref_stats
from rlwatch.tensors.mergeable import Max, Mean, Min, Stats
from rlwatch.tensors.mismatch import mismatch_stats
from rlwatch.tensors.spread import Std
from rlwatch.tensors.text import text_stats
from rlwatch.tensors.tokens import TokenBatch

Observer = Callable[[TokenBatch], Stats]
"""Tells what a batch holds about one subject; absent where the batch does not hold it. Waits for nothing."""


def observe(batch: TokenBatch, *, full: bool = True) -> Stats:
    """What ``batch`` can tell; what it does not hold is absent. Waits for nothing.

    Without ``full`` only what costs a pass or two over (B, T); with it also what sorts, groups or compares more.
    """
    with torch.no_grad():
        stats: Stats = {}
        for observer in (*CORE, *FULL) if full else CORE:
            stats |= observer(batch)
        return stats


def _policy(batch: TokenBatch) -> Stats:
    entropy = {} if batch.entropy is None else entropy_stats(batch.entropy, batch.mask)
    return {
        **entropy,
        "policy/logp_mean": Mean.of(batch.logp, batch.mask),
        "policy/logp_min": Min.of(batch.logp, batch.mask),
        **nonfinite_stats("logp", batch.logp, batch.mask),
    }


def _ratios(batch: TokenBatch) -> Stats:
    """Without a measured old policy the ratio is 1 by definition: nothing to report."""
    if batch.old_logp is None:
        return {}
    stats = {
        **ratio_stats(batch.logp, batch.old_logp, batch.mask),
        **nonfinite_stats("old_logp", batch.old_logp, batch.mask),
    }
    advantages = batch.token_advantages
    if batch.clip is not None and advantages is not None:
        low, high = batch.clip
        stats |= clip_stats(batch.logp, batch.old_logp, advantages, batch.mask, low=low, high=high)
    return stats


def _reference(batch: TokenBatch) -> Stats:
    if batch.ref_logp is None:
        return {}
    return {
        **kl_ref_stats(batch.logp, batch.ref_logp, batch.mask),
        **nonfinite_stats("ref_logp", batch.ref_logp, batch.mask),
    }


def _mismatch(batch: TokenBatch) -> Stats:
    if batch.rollout_logp is None:
        return {}
    return {
        **mismatch_stats(batch.trainer_logp, batch.rollout_logp, batch.mask),
        **nonfinite_stats("rollout_logp", batch.rollout_logp, batch.mask),
    }


def _advantages(batch: TokenBatch) -> Stats:
    if batch.advantages is None:
        return {}
    a = batch.advantages
    every = batch.mask if a.shape == batch.mask.shape else torch.ones_like(a, dtype=torch.bool)
    return {
        "adv/mean": Mean.of(a, every),
        "adv/std": Std.of(a, every),
        "adv/max": Max.of(a, every),
        "adv/min": Min.of(a, every),
        **nonfinite_stats("advantage", a, every),
    }


def _lengths(batch: TokenBatch) -> Stats:
    """Only where it is known which responses were cut: a mask alone may hide whole responses."""
    if batch.cut is None:
        return {}
    length, every = batch.mask.bool().sum(-1).float(), torch.ones_like(batch.cut, dtype=torch.bool)
    return {
        "len/mean": Mean.of(length, every),
        "len/max": Max.of(length, every),
        "len/min": Min.of(length, every),
        "len/clipped": Mean.of(batch.cut.float(), every),
    }


def _text(batch: TokenBatch) -> Stats:
    return {} if batch.ids is None else text_stats(batch.ids, batch.mask)


CORE: tuple[Observer, ...] = (_policy, _ratios, _reference, _mismatch, _advantages, _lengths)
FULL: tuple[Observer, ...] = (_text,)
