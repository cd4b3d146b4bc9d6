"""Micro-batches that are measured together measure what they measure one by one, and cost fewer operations."""

import math
from dataclasses import fields, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlwatch.integrations.step_tally import POOLED, StepTally
from rlwatch.tensors.histogram import observe_distributions
from rlwatch.tensors.mergeable import Mean, merge
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import TokenBatch

pytestmark = pytest.mark.torch


def micro_batch(seed, rows, width, *, advantages="response", **more):
    g = torch.Generator().manual_seed(seed)
    logp = -torch.rand(rows, width, generator=g)

    def near(scale):
        return logp + scale * torch.randn(rows, width, generator=g)

    every = torch.randn(rows, width, generator=g)
    return TokenBatch(
        logp=logp, mask=torch.arange(width) < torch.randint(0, width + 1, (rows, 1), generator=g),
        entropy=torch.rand(rows, width, generator=g), ids=torch.randint(0, 9, (rows, width), generator=g),
        advantages={"response": every[:, 0], "column": every[:, :1], "token": every}[advantages], old_logp=near(0.1),
        ref_logp=near(0.2), rollout_logp=near(0.05), clip=(0.2, 0.28), dual_clip=3.0,
        cut=torch.rand(rows, generator=g) > 0.5, environment=torch.rand(rows, width, generator=g) > 0.9,
        staleness=torch.randint(0, 3, (rows,), generator=g), **more,
    )  # fmt: skip


def one_by_one(batches):
    stats = {}
    for batch in batches:
        stats = merge(stats, observe(batch) | observe_distributions(batch))
    return stats


def numbers(stats):
    """Value and count of each; of a distribution its bins."""
    found = {}
    for name, stat in stats.items():
        if hasattr(stat, "bins"):
            found[name] = stat.bins.tolist()
        else:
            settled = stat.settle()
            found[name] = (float(settled.value()), float(settled.count))
    return found


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), name


class Counting(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("advantages", ["response", "column", "token"])
@pytest.mark.parametrize("widths", [(7, 7, 7), (9, 6, 8, 1), (30, 2, 3, 28)])
def test_together_they_measure_what_they_measure_alone(widths, advantages):
    """Every statistic, of responses of any length; what would be much padding is not put together."""
    batches = [micro_batch(k, 3 + k, width, advantages=advantages) for k, width in enumerate(widths)]
    tally = StepTally()
    for batch in batches:
        tally.add_batch(batch)

    assert_same(numbers(tally.stats), numbers(one_by_one(batches)))


def test_extreme_tokens_keep_their_places():
    """Responses are counted over the step, positions within the response."""
    batches = [micro_batch(k, 2, width) for k, width in enumerate((8, 5, 8))]
    batches[1].mask[1, 3] = True
    batches[1].logp[1, 3] = -math.inf
    tally = StepTally()
    for batch in batches:
        tally.add_batch(batch)
    names = list(tally.spikes.names)
    worst = tally.spikes.rows[tally.spikes.rows[:, 0].argmax(), 1:]

    assert (int(worst[names.index("sequence")]), int(worst[names.index("position")])) == (3, 3)


@pytest.mark.parametrize(
    "other",
    [
        lambda b: replace(b, ref_logp=None),
        lambda b: replace(b, clip=(0.1, 0.1)),
        lambda b: replace(b, advantages=b.advantages.double()),
        lambda b: replace(b, advantages=b.advantages[:, None].expand(b.logp.shape)),
        lambda b: replace(b, experts=torch.zeros(*b.logp.shape, 2, 1, dtype=torch.int64)),
    ],
)
def test_micro_batches_that_differ_in_kind_are_measured_apart(other):
    """Nothing is lost or made up, whatever one of them lacks."""
    batches = [micro_batch(0, 3, 6), other(micro_batch(1, 3, 6)), micro_batch(2, 3, 6)]
    tally = StepTally()
    for batch in batches:
        tally.add_batch(batch)

    assert_same(numbers(tally.stats), numbers(one_by_one(batches)))


def test_the_cost_of_a_step_does_not_grow_with_its_micro_batches():
    """In operations, which is what a device waits for."""

    def operations(micro_batches):
        batches = [micro_batch(k, 4, 16) for k in range(micro_batches)]
        with Counting() as counting:
            tally = StepTally()
            for batch in batches:
                tally.add_batch(batch)
            tally.seal(1)
        return counting.count

    one, eight = operations(1), operations(8)
    fields_of_it = len(fields(TokenBatch))

    assert eight < one + 8 * 4 * fields_of_it


def test_what_is_kept_is_bounded():
    """Where the next one would be too much, or one alone is, they are measured at once."""
    looked = []

    def looking(batch):
        looked.append(len(batch.logp))
        return {}

    tally, fourth = StepTally(), POOLED // 4 // 64
    for rows in (fourth, fourth, 3 * fourth, 5 * fourth, 1):
        tally.add_batch(micro_batch(0, rows, 64), by=looking)

    assert looked == [2 * fourth, 3 * fourth, 5 * fourth]
    tally.measure()
    assert looked[3:] == [1]


def test_what_holds_experts_is_neither_kept_nor_copied():
    """They are hundreds of numbers a token."""
    seen = []

    def looking(batch):
        seen.append(batch.experts)
        return {}

    batch = micro_batch(0, 3, 6, experts=torch.zeros(3, 6, 4, 2, dtype=torch.int64))
    tally = StepTally()
    tally.add_batch(micro_batch(1, 3, 6), by=looking)
    tally.add_batch(batch, by=looking)

    assert seen[0] is None
    assert seen[1] is batch.experts


def test_a_loop_may_write_over_its_tensors():
    """What is kept are copies."""
    batch = micro_batch(0, 3, 6)
    expected = numbers(one_by_one([batch]))
    tally = StepTally()
    tally.add_batch(batch)
    for name in ("logp", "old_logp", "entropy", "advantages"):
        getattr(batch, name).zero_()

    assert_same(numbers(tally.stats), expected)


def test_what_a_trainer_knows_better_takes_the_place_of_ours():
    """Of all micro-batches, measured together or not."""
    tally = StepTally()
    for k in range(2):
        value = torch.tensor([float(k)])
        known = Mean.of(value, torch.ones(1, dtype=torch.bool))
        tally.add_batch(micro_batch(k, 3, 6), instead={"policy/entropy": known})

    assert numbers(tally.stats)["policy/entropy"] == (0.5, 2.0)


def test_a_micro_batch_that_cannot_be_measured_costs_itself_only():
    """It raises once; the others are measured, and what else is known of the step is recorded."""

    def particular(batch):
        if (batch.logp > 0).any():
            raise RuntimeError("a log-prob above 0")
        return observe(batch)

    batches = [micro_batch(k, 3, 6) for k in range(3)]
    tally = StepTally()
    tally.add_number("time/step", 1.0)
    for k, batch in enumerate(batches):
        tally.add_batch(replace(batch, logp=-batch.logp) if k == 1 else batch, by=particular)
    with pytest.raises(RuntimeError, match="above 0"):
        tally.measure()
    found = {name: stat for name, stat in tally.stats.items() if not hasattr(stat, "bins")}
    expected = merge(observe(batches[0]), observe(batches[2]))

    assert_same(numbers(found), numbers(expected))


def test_who_adds_micro_batches_says_what_is_measured_of_them():
    """Once of all that are kept; of those that are measured otherwise, apart."""
    looked = []

    def first(batch):
        looked.append(("first", len(batch.logp)))
        return {}

    def second(batch):
        looked.append(("second", len(batch.logp)))
        return {}

    tally = StepTally()
    for by in (first, first, second):
        tally.add_batch(micro_batch(0, 3, 6), by=by)
    tally.measure()

    assert looked == [("first", 6), ("second", 3)]
