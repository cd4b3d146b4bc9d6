"""Metrics that a run logs: rlwatch's own statistics of its tensors, under their canonical names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from rlwatch.tensors.advantages import observe_advantages, observe_displacement, observe_logp
from rlwatch.tensors.degeneration import distinct
from rlwatch.tensors.entropy import observe_covariance, observe_entropy, observe_entropy_quantiles
from rlwatch.tensors.gradnorm import GradNorms, grad_norms
from rlwatch.tensors.groups import GroupStd, ResponsesIn, consecutive, scores
from rlwatch.tensors.importance import (
    observe_clipping,
    observe_kl,
    observe_kl_quantiles,
    observe_off_policy,
    observe_ratios,
)
from rlwatch.tensors.masked import indicator
from rlwatch.tensors.mergeable import Latest, Max, Mean, Quantile, Stats, Std, nonfinite
from rlwatch.tensors.mismatch import LogProbGap, observe_mismatch, response_gap_stats
from rlwatch.tensors.responses import observe_lengths
from rlwatch.tensors.tokens import TokenBatch
from rlwatch.tensors.transfer import Transfer

OBSERVERS = (
    *(observe_logp, observe_entropy, observe_entropy_quantiles, observe_covariance, observe_ratios, observe_clipping),
    *(observe_kl, observe_kl_quantiles, observe_mismatch, observe_advantages, observe_lengths, observe_displacement),
    observe_off_policy,
)
"""Those of :func:`rlwatch.tensors.observe.observe` that are affordable where a step takes 20 ms."""

KEPT = (
    *(f"reward/{name}" for name in ("mean", "std", "group_std", "zero_std_frac")),
    *("reward/zero_std_right_frac", "reward/zero_std_wrong_frac"),
    *(f"policy/{name}" for name in ("entropy", "entropy_pos", "entropy_neg", "entropy_p10", "entropy_p90", "cov")),
    *(f"policy/{name}" for name in ("logp_mean", "logp_min", "kl_old", "kl_ref_k1", "kl_ref_k3", "kl_ref_max")),
    *(f"lld/{name}" for name in ("logp_positive", "displacement", "displaced_frac", "negative_push")),
    *(f"ratio/{name}" for name in ("mean", "min", "max", "ess", "clipfrac_low", "clipfrac_high")),
    *(f"mismatch/{name}" for name in ("kl", "k3", "logp_absdiff", "logp_absdiff_max", "logp_absdiff_p99")),
    *(f"mismatch/{name}" for name in ("prob_absdiff", "prob_absdiff_max", "prob_corr", "weight_max", "ess")),
    *(f"mismatch/{name}" for name in ("tis_truncated", "icepop_masked", "log_ppl_absdiff", "log_ppl_diff")),
    *(f"mismatch/{name}" for name in ("ppl_ratio", "seq_weight_max", "seq_ess", "factor2_frac")),
    *("adv/min", "adv/max", "adv/std", "len/mean", "len/max", "len/clipped", "text/repetition"),
    *("staleness/mean", "optim/grad_norm", "optim/grad_norm_max", "optim/step_skipped", "loss/raw"),
    *("nonfinite/logp", "nonfinite/advantage", "nonfinite/loss", "nonfinite/grad"),
    *("grad_layer/embed", "grad_layer/layers.0", "grad_layer/lm_head"),
)
"""Columns of a run's table that come from its tensors."""


def joined(batches: Sequence[TokenBatch]) -> TokenBatch:
    """All micro-batches of a step in one: their statistics are those of the parts, merged."""
    first = batches[0]
    if len(batches) == 1:
        return first
    many = {f.name: [getattr(batch, f.name) for batch in batches] for f in fields(first)}
    return replace(first, **{name: torch.cat(x) for name, x in many.items() if isinstance(x[0], Tensor)})


def of_tokens(batch: TokenBatch) -> Stats:
    """Of the tokens of a step."""
    stats: Stats = {}
    for observer in OBSERVERS:
        stats |= observer(batch)
    if batch.rollout_logp is not None:
        gap = LogProbGap.of(batch.trainer_logp, batch.rollout_logp, batch.mask)
        distance = gap.d.abs()
        stats |= response_gap_stats(gap)
        stats["mismatch/logp_absdiff_p99"] = Quantile.of(distance, gap.scored, 0.99)
        stats["mismatch/factor2_frac"] = Mean.of(indicator(distance > math.log(2), distance), gap.scored)
    if batch.ids is not None:
        trigrams, measured = distinct(batch.ids, batch.mask, 3)
        stats["text/repetition"] = Mean.of(1 - trigrams, measured)
    return stats


def of_rewards(rewards: Tensor, right: Tensor | None, group: int) -> Stats:
    """Of the rewards (B,) of whole groups."""
    scored = torch.ones_like(rewards, dtype=torch.bool)
    kept = GroupStd.of(scores(rewards, right), consecutive(len(rewards), group), scored)
    state = (kept.count, kept.values, kept.groups, kept.masks)
    return {
        "reward/mean": Mean.of(rewards, scored),
        "reward/std": Std.of(rewards, scored),
        "reward/group_std": kept,
        "reward/zero_std_frac": ResponsesIn(*state, "flat"),
        "reward/zero_std_right_frac": ResponsesIn(*state, "right"),
        "reward/zero_std_wrong_frac": ResponsesIn(*state, "wrong"),
    }


def of_gradients(model: nn.Module) -> GradNorms:
    """Of the gradients ``model`` holds."""
    norms = grad_norms(model.named_parameters())
    assert norms is not None
    return norms


def of_updates(norms: Sequence[GradNorms], losses: Sequence[Tensor], skipped: int) -> Stats:
    """Of the optimizer steps of a step; norms of layers are the last one's."""
    loss, each = torch.stack(list(losses)), torch.ones(len(losses), dtype=torch.bool)
    largest = torch.stack([norm.total for norm in norms])
    return norms[-1].stats() | {
        "optim/grad_norm_max": Max.of(largest, each),
        "loss/raw": Mean.of(loss, each),
        "nonfinite/loss": Latest.of(nonfinite(loss).sum(), each.any()),
        "optim/step_skipped": Latest.of(torch.tensor(skipped / len(losses)), each.any()),
    }


def settled(*parts: Stats) -> dict[str, float]:
    """The kept ones that were measured, as numbers."""
    stats: dict[str, Any] = {name: stat.settle() for part in parts for name, stat in part.items() if name in KEPT}
    numbers = Transfer([*(s.value() for s in stats.values()), *(s.count for s in stats.values())]).read()
    values, counts = numbers[: len(stats)], numbers[len(stats) :]
    return {name: float(x) for name, x, count in zip(stats, values, counts, strict=True) if count > 0}
