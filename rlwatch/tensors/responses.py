"""Hold the per-response data of one generation batch in one form for all trainers, and compute its statistics.

A trainer gives what it has, in one call, as tensors, arrays or lists::

    batch = ResponseBatch.of(
        rewards=[1.0, 0.0, None, 1.0],        # None: the reward function gave none
        groups=2,                             # or each prompt's id, if a group may be spread over ranks
        lengths=[120, 340, 80, 512],
        cut=[False, False, False, True],
        tasks=["gsm8k", "gsm8k", "math", "math"],
        answers=["42", "41", None, "7"],      # None: no answer could be extracted
    )
    tally.add_stats(observe_responses(batch))

Pass a quantity once for each step: if a :class:`~rlwatch.tensors.tokens.TokenBatch` has ``cut``, it measures lengths,
and they must not be passed here as well.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from numbers import Integral
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from rlwatch.tensors.degeneration import unended
from rlwatch.tensors.groups import Grouped, agreement, answer_stats, consecutive, reward_stats
from rlwatch.tensors.masked import (
    everywhere,
    keep,
    masked_count,
    masked_max,
    masked_quantile,
    masked_sum,
    reducing_together,
    shared,
    sharing,
    widen,
)
from rlwatch.tensors.mergeable import (
    Correlation,
    Latest,
    Max,
    Mean,
    Min,
    Quantile,
    Stat,
    Stats,
    Std,
    Total,
    joined,
    nonfinite_stats,
    pieces_of,
)
from rlwatch.tensors.padded import Padded, tensor_of
from rlwatch.tensors.tokens import TokenBatch
from rlwatch.tensors.transfer import moved

# Lengths of responses and the long tail of them, which a synchronous batch waits for.
#
# Percentiles need every length, so these are kept (4 bytes a response) until the step ends; a mean of percentiles
# would be no percentile. Lengths of responses that were cut are censored: the tail is longer than it looks.


@dataclass(frozen=True, slots=True)
class Kept(Stat):
    """Base of statistics that need all values at once, such as quantiles: keeps the values of every batch until it is
    read.

    The values are not negative.
    """

    values: tuple[Tensor, ...]
    masks: tuple[Tensor, ...]

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Self:
        """Keep the values ``x`` (B,), one per response, inside ``mask`` (B,)."""
        return cls(masked_count(mask, x), *pieces_of(x, mask))

    @override
    def merge(self, other: Self) -> Self:
        values, masks = self.values + other.values, self.masks + other.masks
        return replace(self, count=self.count + other.count, values=values, masks=masks)

    @override
    def settle(self) -> Latest:
        over, under = self.fraction(joined(self.values), joined(self.masks))
        return Latest(self.count.masked_fill(under == 0, 0.0), over / under)

    @override
    def value(self) -> Tensor:
        return self.settle().value()

    @abstractmethod
    def fraction(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return numerator and denominator (0-d) of the statistic over the values ``x`` inside ``mask``.

        A denominator of 0 means that nothing was measured.
        """


@dataclass(frozen=True, slots=True)
class TailRatio(Kept):
    """Ratio of the 99th percentile of the values to their median, both with linear interpolation."""

    @override
    def fraction(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return masked_quantile(x, mask, 0.99), masked_quantile(x, mask, 0.5)


@shared
def _largest_and_mean(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return masked_max(x, mask), masked_sum(x, mask) / masked_count(mask, x)


@dataclass(frozen=True, slots=True)
class MaxOverMean(Kept):
    """Ratio of the largest value to the mean, >= 1."""

    @override
    def fraction(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return _largest_and_mean(x, mask)


@dataclass(frozen=True, slots=True)
class Bubble(Kept):
    """1 - mean / largest length: the least share of a batch's slots that idle while its longest response is generated.

    A lower bound that needs no traces of the engines; for 99 responses of 100 tokens and one of 10,000 it is 0.9801.
    """

    @override
    def fraction(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        largest, mean = _largest_and_mean(x, mask)
        return largest - mean, largest


@dataclass(frozen=True, slots=True)
class Gini(Kept):
    """Gini coefficient of the values, sum_i (2 i - n - 1) x_i / (n sum x) over ascending x: 0 all equal, near 1 one has
    all.
    """

    @override
    def fraction(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        ordered, order = torch.where(mask, x, torch.inf).sort()
        n = masked_count(mask, x)
        rank = torch.arange(1, x.shape[0] + 1, device=x.device, dtype=x.dtype)
        return masked_sum((2 * rank - n - 1) * ordered, mask[order]), n * masked_sum(x, mask)


def observe_lengths(batch: TokenBatch) -> Stats:
    """Return :func:`length_stats` of the batch's mask; empty unless ``cut`` is known, as a mask may hide whole
    responses.
    """
    return {} if batch.cut is None else length_stats(batch.mask.bool().sum(-1), batch.cut)


def observe_length_tail(batch: TokenBatch) -> Stats:
    """Return :func:`length_tail_stats` if ``cut`` is known, and the correlation of length and entropy if that is
    known.
    """
    lengths = batch.mask.bool().sum(-1).float()
    stats = {} if batch.cut is None else length_tail_stats(lengths)
    if batch.entropy is not None:
        mean = torch.where(batch.mask.bool(), widen(batch.entropy), 0.0).sum(-1) / lengths
        stats["len/entropy_corr"] = Correlation.of(lengths, mean, lengths > 0)
    return stats


def length_stats(lengths: Tensor, cut: Tensor | None = None) -> Stats:
    """Return ``len/mean``, ``max``, ``min`` (tokens) and ``len/empty`` (share of empty responses) of ``lengths`` (B,).

    ``cut`` (B,): True for responses that were cut at the length limit; if given, also ``len/clipped`` (their share) and
    ``len/terminated_mean`` (mean length of the others).
    """
    every = everywhere(lengths)
    stats: Stats = {
        "len/mean": Mean.of(lengths, every),
        "len/max": Max.of(lengths, every),
        "len/min": Min.of(lengths, every),
        "len/empty": Mean.of(lengths == 0, every),
    }
    if cut is not None:
        stats["len/clipped"] = Mean.of(cut.bool(), every)
        stats["len/terminated_mean"] = Mean.of(lengths, ~cut.bool())
    return stats


def length_tail_stats(lengths: Tensor) -> Stats:
    """Return ``len/p50``, ``p90``, ``p99``, ``tail_ratio``, ``max_over_mean``, ``bubble`` and ``gini`` of ``lengths``
    (B,).

    ``lengths`` are in tokens.
    """
    every = everywhere(lengths)
    return {
        "len/p50": Quantile.of(lengths, every, 0.5),
        "len/p90": Quantile.of(lengths, every, 0.9),
        "len/p99": Quantile.of(lengths, every, 0.99),
        "len/tail_ratio": TailRatio.of(lengths, every),
        "len/max_over_mean": MaxOverMean.of(lengths, every),
        "len/bubble": Bubble.of(lengths, every),
        "len/gini": Gini.of(lengths, every),
    }


# The per-response view of one generation batch.


@dataclass(frozen=True, slots=True)
class ResponseBatch:
    """Detached tensors of B responses on one device; each is ``None`` if the trainer does not have it.

    Parameters
    ----------
    rewards, scored
        (B,) rewards as the advantages are made of; (B,) bool, which responses have one (None: all). A response
        without a reward is left out; a reward that is NaN is not.
    right
        (B,) bool, whether a response is right, for a trainer that judges apart from the reward. Without it a reward
        of 1 is right, of 0 or -1 wrong, and of any other it is not known.
    groups
        (B,) int64: ids of the prompts, at least 0 and the same in all batches and ranks. Ids below 0 are of groups
        that are whole within this batch (:func:`~rlwatch.tensors.groups.consecutive`).
    whole
        True if all groups are whole within this batch: then no values need to be kept for them.
    answers
        (B,) int64, equal for equal answers in all batches; below 0 if no answer was extracted.
    lengths, cut
        (B,) tokens of a response; (B,) bool, whether it was cut at the length limit.
    entropy
        (B,) mean entropy of a response's tokens, nats.
    tasks, task_names
        (B,) index of each response's task or data source in ``task_names``.
    ids, mask, eos
        (B, T) sampled token ids, right-padded; (B, T) which of them the policy sampled; ids that end a sequence.
    retention, spans, budget
        (B,) iterations a response was carried over; (B,) policy versions it was sampled under; response tokens that one
        iteration should have over all ranks.
    """

    rewards: Tensor | None = None
    scored: Tensor | None = None
    right: Tensor | None = None
    groups: Tensor | None = None
    whole: bool = False
    answers: Tensor | None = None
    lengths: Tensor | None = None
    cut: Tensor | None = None
    entropy: Tensor | None = None
    tasks: Tensor | None = None
    task_names: tuple[str, ...] = ()
    ids: Tensor | None = None
    mask: Tensor | None = None
    eos: tuple[int, ...] = ()
    retention: Tensor | None = None
    spans: Tensor | None = None
    budget: float | None = None

    def __post_init__(self) -> None:
        """Check the batch. Raises ``ValueError`` if the tensors have different numbers of responses."""
        sizes = {f.name: x.shape[0] for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"everything in a ResponseBatch must be of the same responses, got numbers {sizes}")

    @classmethod
    def of(
        cls,
        *,
        rewards: Any = None,
        scored: Any = None,
        right: Any = None,
        groups: Any = None,
        answers: Any = None,
        lengths: Any = None,
        cut: Any = None,
        entropy: Any = None,
        tasks: Sequence[object] | None = None,
        task_names: TaskNames | None = None,
        ids: Any = None,
        mask: Any = None,
        eos: Sequence[int] = (),
        retention: Any = None,
        spans: Any = None,
        budget: float | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Make a batch from tensors, arrays or lists; the class documents all arguments but these.

        ``rewards``: in a list, None where a response has none (for a tensor, pass ``scored``).
        ``groups``: number of responses per group, if groups lie one after the other, whole, in this batch; else one
        id per response: integers, or anything that has a text, such as verl's ``uid``.
        ``answers``: one per response, of any type; None where none was extracted.
        ``tasks``, ``task_names``: one name per response; the run's :class:`~rlwatch.tensors.responses.TaskNames`, which
        bounds how many there are.
        ``ids``, ``mask``: (B, T), nested, or lists of rows.
        ``device``: where all tensors go; default: the device of the first given tensor that is not on the CPU.

        Raises ``ValueError`` if the numbers of responses differ or groups do not divide them.
        """
        plain = {"right": right, "lengths": lengths, "cut": cut, "entropy": entropy}
        plain |= {"retention": retention, "spans": spans}
        columns: dict[str, Tensor | None] = {name: None if x is None else as_numbers(x) for name, x in plain.items()}
        columns["rewards"], there = (None, None) if rewards is None else as_optional_numbers(rewards)
        columns["scored"] = there if scored is None else as_numbers(scored)
        columns["answers"] = None if answers is None else codes_of(answers)
        columns |= _tokens(ids, mask)
        names = task_names or TaskNames()
        columns["tasks"] = None if tasks is None else torch.tensor(names.codes(tasks), dtype=torch.int64, device="cpu")
        known = [x for x in columns.values() if x is not None]
        columns["groups"] = None if groups is None else _group_ids(groups, known)
        where = device_of((*known, columns["groups"])) if device is None else torch.device(device)
        return cls(
            **{name: None if x is None else moved(x, where) for name, x in columns.items()},
            whole=isinstance(groups, Integral),
            task_names=() if tasks is None else names.names,
            eos=tuple(eos),
            budget=budget,
        )


def _tokens(ids: Any, mask: Any) -> dict[str, Tensor | None]:
    """Return ids (B, T), and their mask if one is given or the rows have unequal lengths."""
    if ids is None:
        return {"ids": None, "mask": None}
    padded = Padded.of(ids)
    values = torch.zeros(0, 0, dtype=torch.int64, device="cpu") if padded.values.shape == (0,) else padded.values
    if values.dim() != 2:
        raise ValueError(f"ids must be (B, T), got a shape of {tuple(values.shape)}")
    on = torch.ones_like(values, dtype=torch.bool) if padded.valid is None else padded.valid
    return {"ids": values, "mask": on if mask is None else on & Padded.of(mask).values.bool()}


def _group_ids(groups: Any, known: Sequence[Tensor]) -> Tensor:
    if not isinstance(groups, Integral):
        return codes_of(groups)
    if not known:
        raise ValueError("a size of groups was given without any tensor of responses")
    return consecutive(known[0].shape[0], int(groups))


# Columns of a trainer as tensors: numbers, answers, ids of prompts.

CODE_BITS = 52
"""Width of a hash code: it stays exact in a float64, and among 100,000 different values two agree with probability
1e-6.
"""


def as_numbers(x: Any) -> Tensor:
    """Return a tensor (detached), array or list of numbers or booleans as a tensor of the same type of numbers."""
    return x.detach() if isinstance(x, Tensor) else tensor_of(x)


def as_optional_numbers(x: Any) -> tuple[Tensor, Tensor | None]:
    """Return numbers (B,) with NaN for each None, and a mask (B,) of those that are present (None: all)."""
    if isinstance(x, Tensor) or not any(value is None for value in x):
        return as_numbers(x), None
    there = torch.tensor([value is not None for value in x], device="cpu")
    return torch.tensor([float("nan") if value is None else float(value) for value in x], device="cpu"), there


def codes_of(x: Any) -> Tensor:
    """Return int64 codes (B,), equal for equal values in every process; integers map to themselves, None to -1.

    Anything else is hashed by its text, into 52 bits.
    """
    if isinstance(x, Tensor):
        return x.detach().long()
    things = list(x)
    if things and all(isinstance(thing, Integral) for thing in things):
        return torch.tensor([int(thing) for thing in things], device="cpu")
    hashed = [-1 if thing is None else _hash(str(thing)) for thing in things]
    return torch.tensor(hashed, dtype=torch.int64, device="cpu")


def _hash(text: str) -> int:
    digest = blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - CODE_BITS)


def device_of(things: Iterable[Any]) -> torch.device:
    """Return the device of the first tensor among ``things`` that is not on the CPU; the CPU if there is none.

    A copy from another device to the CPU would have to be waited for.
    """
    devices = [thing.device for thing in things if isinstance(thing, Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


# Reward, length and entropy per task or data source, for a bounded number of tasks.

OTHER_TASKS = "other"
"""Name under which all tasks beyond the limit are summarised."""

UNNAMED_TASK = "unnamed"
"""Name of the task of a response that has none."""

LONGEST_TASK_NAME = 80
"""Most characters of a task's name that appear in a metric's name."""


@dataclass(slots=True)
class TaskNames:
    """The tasks of a run that have metrics of their own: at most ``limit``, and :data:`OTHER_TASKS` for all others.

    A task keeps its number (``places``) for the whole run, so that no series changes its meaning; the most frequent
    tasks of the first batch with new tasks come first. Ranks that see different tasks may choose differently beyond
    ``limit``; give all of them the same names then.
    """

    limit: int = 32
    places: dict[str, int] = field(default_factory=dict)

    def codes(self, tasks: Sequence[object]) -> list[int]:
        """Return the number of each task, and add new tasks up to the limit; None counts as :data:`UNNAMED_TASK`.

        Tasks beyond the limit have the highest number, that of :data:`OTHER_TASKS`.
        """
        called = [_called(task) for task in tasks]
        for name, _times in Counter(called).most_common():
            if name not in self.places and name != OTHER_TASKS and len(self.places) < self.limit:
                self.places[name] = len(self.places)
        return [self.places.get(name, len(self.places)) for name in called]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tasks by number, :data:`OTHER_TASKS` last."""
        return (*self.places, OTHER_TASKS)


def _called(task: object) -> str:
    """Return a name of the task that can be part of a metric's name."""
    return (
        UNNAMED_TASK if task is None else ("_".join(str(task).split())[:LONGEST_TASK_NAME].strip("/") or UNNAMED_TASK)
    )


def by_task(prefix: str, x: Tensor, mask: Tensor, codes: Tensor, names: Iterable[str]) -> Stats:
    """Return ``<prefix><task>`` -> mean of ``x`` (B,) inside ``mask`` (B,) over the responses of each task.

    ``codes`` (B,): number of each response's task; ``names``: task names by number.
    """
    names = tuple(names)
    place = codes.long().clamp(0, max(len(names) - 1, 0))
    values = torch.stack([keep(x, mask, 0.0), mask.to(keep(x, mask, 0.0).dtype)], -1)
    sums, counts = values.new_zeros((len(names), 2)).index_add_(0, place, values).unbind(-1)
    return {prefix + name: Mean(n, total) for name, n, total in zip(names, counts, sums, strict=True)}


# All statistics of one generation batch, under their canonical names.


def observe_responses(batch: ResponseBatch) -> Stats:
    """Return metric name -> statistic for all statistics whose inputs ``batch`` has, without waiting for the device.

    Statistics of groups keep one value for each response, so that a group may be spread over several batches, unless
    the batch is marked as holding whole groups.
    """
    with torch.no_grad(), sharing(), reducing_together():
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
        stats |= {**length_stats(batch.lengths, batch.cut), **length_tail_stats(batch.lengths)}
    if batch.lengths is not None and batch.entropy is not None:
        stats["len/entropy_corr"] = Correlation.of(batch.lengths, batch.entropy, batch.lengths > 0)
    if batch.lengths is not None and batch.budget:
        used = widen(batch.lengths) / batch.budget
        stats["len/budget_used"] = Total.of(used, everywhere(used))
    return stats


def _ages(batch: ResponseBatch) -> Stats:
    stats: Stats = {}
    if batch.retention is not None:
        carried, every = batch.retention, everywhere(batch.retention)
        stats["partial/frac"] = Mean.of(carried > 0, every)
        stats["partial/retention_mean"] = Mean.of(carried, every)
        stats["partial/retention_max"] = Max.of(carried, every)
    if batch.spans is not None:
        every = everywhere(batch.spans)
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
            stats |= by_task(prefix, x, everywhere(x), batch.tasks, batch.task_names)
    return stats


def _text(batch: ResponseBatch) -> Stats:
    if batch.ids is None or batch.mask is None or not batch.eos:
        return {}
    missing = unended(batch.ids, batch.mask, batch.eos)
    return {"text/eos_missing": Mean.of(missing, everywhere(missing))}


def _scored(batch: ResponseBatch, like: Tensor) -> Tensor:
    return everywhere(like) if batch.scored is None else batch.scored.bool()
