"""All statistics of one generation batch, under their canonical names."""

from __future__ import annotations

import torch
from torch import Tensor

from rlwatch.tensors.finite import nonfinite_stats
from rlwatch.tensors.group_agreement import agreement
from rlwatch.tensors.group_answers import answer_stats
from rlwatch.tensors.group_rewards import reward_stats
from rlwatch.tensors.groups import Grouped
from rlwatch.tensors.lengths import extent, tail
from rlwatch.tensors.masked import counting_once, widen
from rlwatch.tensors.mergeable import Max, Mean, Min, Stats, Total
from rlwatch.tensors.paired import Correlation
from rlwatch.tensors.responses import ResponseBatch
from rlwatch.tensors.spread import Std
from rlwatch.tensors.tasks import by_task
from rlwatch.tensors.text import unended


def observe_responses(batch: ResponseBatch) -> Stats:
    """What ``batch`` can tell; what it does not hold is absent. Waits for nothing.

    Statistics of groups keep one value a response, so that a group may be spread over several batches, unless the
    batch says that its groups are whole.
    """
    with torch.no_grad(), counting_once():
        stats: Stats = {}
        for observer in (_rewards, _groups, _lengths, _ages, _tasks, _text):
            stats |= observer(batch)
        return stats


def _rewards(batch: ResponseBatch) -> Stats:
    if batch.rewards is None:
        return {}
    rewards, scored = batch.rewards, _scored(batch, batch.rewards)
    return {
        "reward/mean": Mean.of(rewards, scored),
        "reward/std": Std.of(rewards, scored),
        "reward/max": Max.of(rewards, scored),
        "reward/min": Min.of(rewards, scored),
        **nonfinite_stats("reward", rewards, scored),
    }


def _groups(batch: ResponseBatch) -> Stats:
    if batch.groups is None:
        return {}
    stats: dict[str, Grouped] = {}
    if batch.rewards is not None:
        stats |= reward_stats(batch.rewards, batch.groups, _scored(batch, batch.rewards), batch.right)
    if batch.answers is not None:
        stats |= answer_stats(batch.answers, batch.groups)
    if batch.ids is not None and batch.mask is not None:
        stats["text/group_agreement"] = agreement(batch.ids, batch.mask, batch.groups)
    return {name: stat.reduce() if batch.whole else stat for name, stat in stats.items()}


def _lengths(batch: ResponseBatch) -> Stats:
    stats: Stats = {}
    if batch.lengths is not None:
        stats |= {**extent(batch.lengths, batch.cut), **tail(batch.lengths)}
    if batch.lengths is not None and batch.entropy is not None:
        stats["len/entropy_corr"] = Correlation.of(batch.lengths, batch.entropy, batch.lengths > 0)
    if batch.lengths is not None and batch.budget:
        used = widen(batch.lengths) / batch.budget
        stats["len/budget_used"] = Total.of(used, torch.ones_like(used))
    return stats


def _ages(batch: ResponseBatch) -> Stats:
    stats: Stats = {}
    if batch.retention is not None:
        carried, every = batch.retention, torch.ones_like(batch.retention, dtype=torch.bool)
        stats["partial/frac"] = Mean.of(carried > 0, every)
        stats["partial/retention_mean"] = Mean.of(carried, every)
        stats["partial/retention_max"] = Max.of(carried, every)
    if batch.spans is not None:
        every = torch.ones_like(batch.spans, dtype=torch.bool)
        stats["staleness/spans_mean"] = Mean.of(batch.spans, every)
        stats["staleness/spans_max"] = Max.of(batch.spans, every)
    return stats


def _tasks(batch: ResponseBatch) -> Stats:
    if batch.tasks is None:
        return {}
    stats: Stats = {}
    if batch.rewards is not None:
        scored = _scored(batch, batch.rewards)
        stats |= by_task("reward/by_task/", batch.rewards, scored, batch.tasks, batch.task_names)
    for prefix, x in (("len/by_task/", batch.lengths), ("policy/entropy_by_task/", batch.entropy)):
        if x is not None:
            stats |= by_task(prefix, x, torch.ones_like(x, dtype=torch.bool), batch.tasks, batch.task_names)
    return stats


def _text(batch: ResponseBatch) -> Stats:
    if batch.ids is None or batch.mask is None or not batch.eos:
        return {}
    missing = unended(batch.ids, batch.mask, batch.eos)
    return {"text/eos_missing": Mean.of(missing, torch.ones_like(missing))}


def _scored(batch: ResponseBatch, like: Tensor) -> Tensor:
    return torch.ones_like(like, dtype=torch.bool) if batch.scored is None else batch.scored.bool()
