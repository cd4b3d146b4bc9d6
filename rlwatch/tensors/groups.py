"""Statistics of groups of responses to one prompt: their rewards, pass@k, answers and first actions.

The statistic of a group needs all its responses, so these statistics keep one value for each response until the step
ends. Groups have int64 ids; an id below 0 is valid only within its own batch, so that the groups of two batches remain
separate (:func:`consecutive`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from rlwatch.tensors.masked import ascending, keep, masked_count, shared, widen
from rlwatch.tensors.mergeable import Mean, Stat, Total, cat


def consecutive(n: int, size: int, device: torch.device | None = None) -> Tensor:
    """Return ids (n,) for ``n`` responses that lie in consecutive groups of ``size``, all complete in this batch.

    Ids are negative, which means that no group continues in another batch. ``device``: of the result. Raises
    ``ValueError`` if groups of ``size`` do not divide ``n`` responses.

    >>> consecutive(4, 2).tolist()
    [-1, -1, -2, -2]
    """
    if size < 1 or n % size:
        raise ValueError(f"{n} responses do not divide into groups of {size}")
    return -1 - torch.arange(n, device=device) // size


@dataclass(frozen=True, slots=True)
class Grouping:
    """Partition of N responses into groups: ``labels`` (N,) in [0, N), equal within a group."""

    labels: Tensor

    @classmethod
    def of(cls, ids: Tensor) -> Self:
        """Return the partition of responses by the ``ids`` (N,) of their groups."""
        ordered, order = ids.sort()
        fresh = torch.ones_like(ordered, dtype=torch.bool)
        fresh[1:] = ordered[1:] != ordered[:-1]
        return cls(torch.empty_like(order).scatter_(0, order, fresh.cumsum(0) - 1))

    def total(self, x: Tensor) -> Tensor:
        """Return the sums of ``x`` (N, ...) within each group, by label, (N, ...); 0 for a label that no response
        has.
        """
        return torch.zeros_like(x).index_add_(0, self.labels, x)

    def largest(self, x: Tensor) -> Tensor:
        """Return the maxima of ``x`` (N,) float within each group, by label, (N,); -inf for a label that no response
        has.
        """
        return torch.full_like(x, -torch.inf).scatter_reduce_(0, self.labels, x, "amax")


@dataclass(frozen=True, slots=True)
class Grouped(Stat):
    """Base of statistics over groups of responses, which keep their inputs until they are read.

    A group may continue in another batch, so ``values`` (B, ...), ``groups`` (B,) and ``masks`` of every batch are
    kept. ``count``: number of values kept. :meth:`settle` computes the statistic; its count is that of the values
    measured.
    """

    values: tuple[Tensor, ...]
    groups: tuple[Tensor, ...]
    masks: tuple[Tensor, ...]

    @classmethod
    def of(cls, values: Tensor, groups: Tensor, mask: Tensor) -> Self:
        """Keep copies of the values inside ``mask``, (B,) or shaped as ``values``, because a trainer may reuse its
        memory.

        ``groups`` (B,): ids of the groups.
        """
        return cls(masked_count(mask, mask), (values.detach().clone(),), _copied(groups), _copied(mask.bool()))

    @override
    def merge(self, other: Self) -> Self:
        return replace(
            self,
            count=self.count + other.count,
            values=self.values + other.values,
            groups=self.groups + other.groups,
            masks=self.masks + other.masks,
        )

    def reduce(self) -> Stat:
        """Return the statistic computed, without the values kept so far, which only a group that continues would need.

        To be called if no group of this batch continues in another.
        """
        return self.over(joined(self.values), joined(self.masks), grouped_by(self.groups))

    @abstractmethod
    def over(self, values: Tensor, mask: Tensor, grouping: Grouping) -> Stat:
        """Compute the statistic of the ``values`` (N, ...) of all batches inside ``mask``.

        ``grouping``: partition of the N responses into groups.
        """

    @override
    def settle(self) -> Stat:
        return self.reduce().settle()

    @override
    def value(self) -> Tensor:
        return self.settle().value()


@shared
def _copied(x: Tensor) -> tuple[Tensor]:
    """Return a copy as the only piece; statistics of one batch share that of its groups, and what is computed of it."""
    return (x.detach().clone(),)


@shared
def joined(pieces: tuple[Tensor, ...]) -> Tensor:
    """Return the ``pieces``, one tensor (B, ...) per batch, as one tensor (N, ...).

    Many statistics keep the very same tensors, so that they share the result, and what is computed from it.
    """
    return cat(pieces)


@shared
def grouped_by(pieces: tuple[Tensor, ...]) -> Grouping:
    """Return the partition of the responses of all batches by group; ``pieces``: group ids (B,) of each batch.

    An id below 0 counts within its batch: equal negative ids of different batches are different groups.
    """
    apart, seen = [], 0
    for ids in pieces:
        apart.append(torch.where(ids < 0, ids - seen, ids))
        seen += ids.shape[0]
    return Grouping.of(cat(apart))


# Rewards of groups: those that teach nothing because all are equal, their spread, pass@k.
#
# A group is measured if at least two of its responses were scored and all their rewards are finite. All of it is of
# ``scores`` (B, 2): the reward, and 1 for a right response, 0 for a wrong one, NaN where that is not known.

EQUAL_RELATIVE, EQUAL_ABSOLUTE = 1e-6, 1e-8
"""Relative and absolute difference up to which rewards are equal: sums of parts in float32 differ by their rounding."""

PASS_AT = (1, 2, 4, 8, 16, 32, 64)
"""Values of k for which pass@k and all-correct@k are reported."""


def scores(rewards: Tensor, right: Tensor | None = None) -> Tensor:
    """Return scores (B, 2): the ``rewards`` (B,), and 1 for a right, 0 for a wrong response, NaN if that is not known.

    ``right`` (B,) bool: given if the trainer judges separately from the reward. Without it a reward of 1 is right, one
    of 0 or -1 wrong, and any other unknown.
    """
    r = widen(rewards)
    if right is not None:
        return torch.stack([r, right.to(r.dtype)], -1)
    minus, zero, one = near(r, _whole_numbers((-1, 0, 1), r.device).unsqueeze(-1)).unbind()
    # 1 for a right one, 0 for a wrong one, and 0 / 0 for any other.
    right_or_wrong = one.to(r.dtype)
    return torch.stack([r, right_or_wrong / (one | zero | minus)], -1)


def near(x: Tensor, y: Tensor) -> Tensor:
    """Return a mask, True where ``x`` and ``y`` are equal up to rounding; False where either is not finite."""
    return (x - y).abs() <= EQUAL_RELATIVE * torch.maximum(x.abs(), y.abs()) + EQUAL_ABSOLUTE


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Results of judging groups by their rewards, each (N,) by group label.

    ``size``: responses scored; ``rights``: of these right. ``measured``: the group has at least two scored responses,
    all finite. ``flat``: all rewards are equal; ``right``, ``wrong``: flat, and all responses are right, or all wrong.
    ``unknown`` (0-d): number of responses of which it is not known whether they are right.
    """

    size: Tensor
    rights: Tensor
    measured: Tensor
    flat: Tensor
    right: Tensor
    wrong: Tensor
    unknown: Tensor

    @property
    def other(self) -> Tensor:
        """Mask of groups with equal rewards that are neither all right nor all wrong."""
        return self.flat & ~self.right & ~self.wrong

    @property
    def effective(self) -> Tensor:
        """Mask of measured groups with unequal rewards, which have a learning signal."""
        return self.measured & ~self.flat


@shared
def verdicts_of(values: Tensor, mask: Tensor, grouping: Grouping) -> Verdicts:
    """Judge each group by the scores ``values`` (N, 2) inside ``mask`` (N,); all statistics of the same tensors share
    the result.
    """
    reward, right = values.unbind(-1)
    size, broken, rights, wrongs = grouping.total(
        torch.stack([mask, mask & (reward - reward != 0), mask & (right == 1), mask & (right == 0)], -1).float()
    ).unbind(-1)
    high = grouping.largest(keep(reward, mask, -torch.inf))
    low = -grouping.largest(-keep(reward, mask, torch.inf))
    measured = (size > 1) & (broken == 0)
    flat = measured & near(high, low)
    unknown = (mask & right.isnan()).sum().float()
    return Verdicts(size, rights, measured, flat, flat & (rights == size), flat & (wrongs == size), unknown)


KINDS = ("measured", "flat", "right", "wrong", "other", "effective")
"""Verdicts that groups are counted by: names of attributes of :class:`Verdicts`."""


@shared
def totals_of(values: Tensor, mask: Tensor, grouping: Grouping) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return for each of :data:`KINDS` the number of responses in groups of this kind, and that of the groups, 0-d.

    All statistics of the same tensors share the result; the arguments are those of :func:`verdicts_of`.
    """
    verdicts = verdicts_of(values, mask, grouping)
    flags = torch.stack([getattr(verdicts, kind) for kind in KINDS]).to(verdicts.size.dtype)
    responses, groups = torch.stack([flags * verdicts.size, flags]).sum(-1).unbind()
    return dict(zip(KINDS, responses.unbind(), strict=True)), dict(zip(KINDS, groups.unbind(), strict=True))


@dataclass(frozen=True, slots=True)
class ResponsesIn(Grouped):
    """Fraction of the responses in measured groups whose group is ``kind``: the name of an attribute of
    :class:`Verdicts`.
    """

    kind: str = "flat"

    @override
    def over(self, values: Tensor, mask: Tensor, grouping: Grouping) -> Mean:
        sums, _ = totals_of(values, mask, grouping)
        return Mean(sums["measured"], sums[self.kind])


@dataclass(frozen=True, slots=True)
class GroupsThat(Grouped):
    """Number of measured groups of which a verdict is true, such as that not all rewards are equal.

    ``kind``: name of the verdict, an attribute of :class:`Verdicts`.
    """

    kind: str = "effective"

    @override
    def over(self, values: Tensor, mask: Tensor, grouping: Grouping) -> Total:
        _, counts = totals_of(values, mask, grouping)
        return Total(counts["measured"], counts[self.kind])


@dataclass(frozen=True, slots=True)
class GroupStd(Grouped):
    """Standard deviation (ddof 1) of the rewards of a response's group, mean over the responses in measured groups."""

    @override
    def over(self, values: Tensor, mask: Tensor, grouping: Grouping) -> Mean:
        verdicts = verdicts_of(values, mask, grouping)
        reward, size = keep(values[:, 0], mask, 0.0), verdicts.size
        # Two passes, about the group's own mean, like the normalisation of GRPO; ddof 1 as torch.std, which verl uses.
        gap = reward - (grouping.total(reward) / size.clamp(min=1))[grouping.labels]
        std = (grouping.total(keep(gap, mask, 0.0).square()) / (size - 1).clamp(min=1)).sqrt()
        # In order of size: verl's groups come in the order of random ids, and a sum is rounded as its order is.
        sums, _ = totals_of(values, mask, grouping)
        return Mean(sums["measured"], keep(size * std, verdicts.measured, 0.0).sort().values.sum())


@dataclass(frozen=True, slots=True)
class Unless(Mean):
    """A mean that is not measured if anything was counted ``against`` it."""

    against: Tensor

    @override
    def merge(self, other: Self) -> Self:
        against = self.against + other.against
        return replace(self, count=self.count + other.count, kept=self.kept + other.kept, against=against)

    @override
    def settle(self) -> Mean:
        return Mean(self.count.masked_fill(self.against > 0, 0.0), self.kept)


@dataclass(frozen=True, slots=True)
class PassAt(Grouped):
    """Unbiased chance that of ``k`` responses to a prompt one is right (or, with ``every``, all are), mean over groups.

    Chen et al., arXiv 2107.03374: 1 - C(n - c, k) / C(n, k) for c right ones of n, over the groups with n >= k. Not
    measured if for any scored response of the step it is not known whether it was right.
    """

    k: int = 1
    every: bool = False

    @override
    def over(self, values: Tensor, mask: Tensor, grouping: Grouping) -> Unless:
        verdicts = verdicts_of(values, mask, grouping)
        groups, one_right, all_right = chances_of(values, mask, grouping)
        k = PASS_AT.index(self.k)
        return Unless(groups[k], (all_right if self.every else one_right)[k], verdicts.unknown)


@dataclass(frozen=True, slots=True)
class StarvationMargin(Grouped):
    """Mean pass rate over the pass rate at which half of the groups are expected to be all wrong, given the groups'
    sizes.

    (1 - p)^g > 1/2 below p* = 1 - 2^(-1/g) (arXiv 2606.18487). Not measured if for any scored response it is not known
    whether it was right.
    """

    @override
    def over(self, values: Tensor, mask: Tensor, grouping: Grouping) -> Unless:
        verdicts = verdicts_of(values, mask, grouping)
        n, c = verdicts.size, verdicts.rights
        several = n > 1
        limit = -torch.expm1(-math.log(2.0) / n.clamp(min=1))
        passed = keep(c / n.clamp(min=1), several, 0.0).sum()
        return Unless(keep(limit, several, 0.0).sum(), passed, verdicts.unknown)


@shared
def chances_of(values: Tensor, mask: Tensor, grouping: Grouping) -> tuple[tuple[Tensor, ...], ...]:
    """Return for each k of :data:`PASS_AT` the number of groups of at least k responses, and two sums over them.

    They are of the chances that one of k responses is right, and that all are. ``values`` (N, 2) are scores inside
    ``mask`` (N,); all statistics of the same tensors share the result.
    """
    verdicts = verdicts_of(values, mask, grouping)
    n, c = verdicts.size, verdicts.rights
    among = all_among(torch.stack([n - c, c]), n, PASS_AT)
    chance = torch.cat([1 - among[:1], among[1:]])
    large = n >= _whole_numbers(PASS_AT, n.device).unsqueeze(-1)
    one_right, all_right = torch.where(large, chance, 0.0).sum(-1).unbind()
    return large.sum(-1).to(n.dtype).unbind(), one_right.unbind(), all_right.unbind()


def all_among(some: Tensor, n: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the chance that k of ``n``, drawn without replacement, are all among ``some``, C(some, k) / C(n, k), for
    each k of ``sizes``, (..., K, N).

    ``some`` is (..., N), ``n`` (N,).
    """
    # As the product of (some - i) / (n - i), i < k: binomials of 30 and more exceed the 24 bits of float32, while these
    # factors are within [0, 1].
    # A factor is 0 from i = some on, so that fewer than k give 0.
    drawn = torch.arange(max(sizes), device=n.device, dtype=n.dtype).unsqueeze(-1)
    left = (some.unsqueeze(-2) - drawn).clamp(min=0)
    until = (left / (n - drawn).clamp(min=1)).cumprod(-2)
    return until.index_select(-2, _whole_numbers(tuple(k - 1 for k in sizes), n.device))


def _whole_numbers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return ``numbers`` as a tensor on ``device``."""
    return _on_cpu(numbers).to(device, non_blocking=True)


@lru_cache(maxsize=16)
def _on_cpu(numbers: tuple[int, ...]) -> Tensor:
    with torch.inference_mode(False):  # it outlives the mode of the first call
        return torch.tensor(numbers, device="cpu")


def reward_stats(rewards: Tensor, groups: Tensor, scored: Tensor, right: Tensor | None) -> dict[str, Grouped]:
    """Return metric name -> statistic of the rewards of groups; all arguments are (B,).

    ``groups``: ids of the groups. ``scored``: True for responses that have a reward. ``right``: whether a response is
    right, or None.
    """
    kept = GroupStd.of(scores(rewards, right), groups, scored)
    state = (kept.count, kept.values, kept.groups, kept.masks)
    return {
        "reward/group_std": kept,
        "reward/zero_std_frac": ResponsesIn(*state, "flat"),
        "reward/zero_std_right_frac": ResponsesIn(*state, "right"),
        "reward/zero_std_wrong_frac": ResponsesIn(*state, "wrong"),
        "reward/zero_std_other_frac": ResponsesIn(*state, "other"),
        "reward/groups_right": GroupsThat(*state, "right"),
        "reward/groups_wrong": GroupsThat(*state, "wrong"),
        "reward/effective_groups": GroupsThat(*state, "effective"),
        "reward/starvation_margin": StarvationMargin(*state),
        **{f"reward/pass_at_{k}": PassAt(*state, k) for k in PASS_AT},
        **{f"reward/all_correct_at_{k}": PassAt(*state, k, every=True) for k in PASS_AT[1:]},
    }


# Answers of groups: how many are different, and how far a group agrees on one.
#
# Answers are int64 codes, equal for equal answers; a negative one means that no answer could be extracted, which
# leaves the response out. Groups with fewer than two answers are not measured.


@dataclass(frozen=True, slots=True)
class AnswerStat(Grouped):
    """Mean over groups of a statistic of their answers; groups with fewer than two answers are not measured.

    ``kind``: ``unique``, number of different answers over the number of answers; ``majority``, share of the most
    frequent answer; ``entropy`` of the answers, in nats.
    """

    kind: str = "unique"

    @override
    def over(self, values: Tensor, mask: Tensor, grouping: Grouping) -> Mean:
        given = mask & (values >= 0)
        times = occurrences(torch.where(given, values, -1), grouping.labels)
        n = grouping.total(given.float())
        measured = n > 1
        per_group = self._per_group(given, times, grouping, n)
        return Mean(measured.sum().float(), torch.where(measured, per_group, 0.0).sum())

    def _per_group(self, given: Tensor, times: Tensor, grouping: Grouping, n: Tensor) -> Tensor:
        """Return the statistic of each group; ``times`` is the number m of responses with the same answer."""
        # The sum over responses of 1 / m counts each distinct answer once, and the mean of -log(m / n) is the entropy.
        if self.kind == "majority":
            return grouping.largest(torch.where(given, times, 0.0)) / n
        share = times / n[grouping.labels]
        each = 1 / times if self.kind == "unique" else -share.log()
        return grouping.total(torch.where(given, each, 0.0)) / n


def occurrences(values: Tensor, labels: Tensor) -> Tensor:
    """Return how often each response's value (``values`` (N,)) occurs within its group (``labels`` (N,)); floats
    (N,).
    """
    # Sorted by value, then stably by label: equal (label, value) pairs lie together, and numbering these runs makes a
    # grouping of its own. No pair of int64 would fit one sortable key, and nothing here may wait for the device.
    order = values.argsort(stable=True)
    order = order[labels[order].argsort(stable=True)]
    value, label = values[order], labels[order]
    fresh = torch.ones_like(value, dtype=torch.bool)
    fresh[1:] = (value[1:] != value[:-1]) | (label[1:] != label[:-1])
    same = Grouping(torch.empty_like(order).scatter_(0, order, fresh.cumsum(0) - 1))
    return same.total(torch.ones_like(values, dtype=torch.float32))[same.labels]


def answer_stats(answers: Tensor, groups: Tensor) -> dict[str, Grouped]:
    """Return ``reward/unique_answers``, ``reward/majority_share`` and ``reward/answer_entropy`` (nats).

    ``answers`` (B,): int64 codes, equal for equal answers, negative if no answer was extracted. ``groups`` (B,): ids of
    the groups.
    """
    kept = AnswerStat.of(answers, groups, answers >= 0)
    state = (kept.count, kept.values, kept.groups, kept.masks)
    return {
        "reward/unique_answers": kept,
        "reward/majority_share": AnswerStat(*state, "majority"),
        "reward/answer_entropy": AnswerStat(*state, "entropy"),
    }


# Agreement of the responses to one prompt in their first tokens: similar first actions with opposite rewards drive
# likelihood displacement (arXiv 2512.04220).

FIRST_ACTION = 64
"""Number of first token positions that are compared."""

_BASE = 2**21
"""Larger than any vocabulary."""


@dataclass(frozen=True, slots=True)
class Agreement(Grouped):
    """Fraction of equal tokens, over all pairs of responses of a group and all positions where both have a token.

    Counted without forming pairs: m equal tokens at one position of a group are m (m - 1) / 2 pairs that agree.
    """

    @override
    def over(self, values: Tensor, mask: Tensor, grouping: Grouping) -> Mean:
        # One key for (group, token): sorted along each position, equal keys lie together, and each agrees with as many
        # as stand before it in its run: 0 + 1 + ... + (m - 1) = m (m - 1) / 2.
        key = ascending(torch.where(mask, grouping.labels.unsqueeze(-1) * _BASE + values, -1).T)
        fresh = torch.ones_like(key, dtype=torch.bool)
        fresh[:, 1:] = key[:, 1:] != key[:, :-1]
        place = torch.arange(key.shape[1], device=key.device).expand_as(key)
        earlier = place - torch.where(fresh, place, 0).cummax(-1).values if key.numel() else place
        agreeing = torch.where(key >= 0, earlier, 0).sum()
        n = grouping.total(mask.long())
        return Mean((n * (n - 1)).sum().float() / 2, agreeing.float())


def agreement(ids: Tensor, mask: Tensor, groups: Tensor) -> Agreement:
    """Return how far the responses of a group agree in their first :data:`FIRST_ACTION` tokens.

    ``ids`` (B, T), ``mask`` (B, T), ``groups`` (B,): ids of the groups.
    """
    short = max(0, FIRST_ACTION - ids.shape[1])
    return Agreement.of(
        pad(ids[:, :FIRST_ACTION].long(), (0, short)), groups, pad(mask[:, :FIRST_ACTION].bool(), (0, short))
    )
