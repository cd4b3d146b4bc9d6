"""Tensors at the edges: nothing in the batch, nothing in the mask, half precision, masks that broadcast."""

import math

import pytest
import torch

from rlwatch.tensors.masked import masked_count, masked_max, masked_mean, masked_min, masked_quantile, masked_sum
from rlwatch.tensors.mergeable import Latest, Max, Mean, Min, Quantile, Std, Total, merge
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import TokenBatch, top_tokens
from rlwatch.tensors.transfer import Transfer

pytestmark = pytest.mark.torch
LOG_PROBS = ("logp", "old_logp", "ref_logp", "rollout_logp")


def batch(rows=3, width=5, *, seed=0, dtype=torch.float32, **change):
    """A batch that measures everything, advantages per token; the last row is one token short."""
    g = torch.Generator().manual_seed(seed)
    uniform = lambda: torch.rand(rows, width, generator=g).to(dtype)  # noqa: E731
    mask = torch.ones(rows, width)
    if mask.numel():
        mask[-1, -1] = 0
    whole = {name: -3 * uniform() for name in LOG_PROBS} | {
        "mask": mask,
        "entropy": uniform(),
        "ids": torch.randint(0, 4, (rows, width), generator=g),
        "advantages": uniform() - 0.5,
        "clip": (0.2, 0.28),
        "cut": torch.arange(rows) % 2 == 0,
    }
    return TokenBatch(**(whole | change))


def numbers(stats):
    """name -> (count, value)."""
    return {name: (stat.count.item(), stat.value().item()) for name, stat in stats.items()}


def same(left, right):
    """Equal numbers, where NaN equals NaN; values of nothing do not count."""
    assert left.keys() == right.keys()
    for name, (count, value) in left.items():
        assert right[name][0] == count, name
        assert count <= 0 or right[name][1] == pytest.approx(value, rel=1e-6, abs=1e-7, nan_ok=True), name


@pytest.mark.parametrize(("rows", "width"), [(0, 5), (3, 0), (0, 0)])
def test_a_batch_without_tokens_measures_nothing_and_raises_nothing(rows, width):
    """No responses, or none with a token: every token statistic has a count of nothing, and travels."""
    stats = observe(batch(rows, width))
    spikes = top_tokens(batch(rows, width))

    measured = {name for name, (count, _) in numbers(stats).items() if count > 0}
    assert {name for name in measured if not name.startswith("len/")} == set()
    assert spikes.rows.shape == (0, 1 + len(spikes.names))
    assert len(Transfer([stat.value() for stat in stats.values()] + [spikes.rows]).read()) == len(stats) + 1


@pytest.mark.parametrize("nothing", [batch(0, 5), batch(2, 5, mask=torch.zeros(2, 5), cut=None)])
def test_a_micro_batch_of_nothing_changes_no_statistic(nothing):
    """Merged before or after, whether it holds no rows or only masked ones."""
    whole = observe(batch(cut=None if nothing.cut is None else batch().cut))
    nothing = observe(nothing)

    same(numbers(merge(whole, nothing)), numbers(whole))
    same(numbers(merge(nothing, whole)), numbers(whole))


def test_a_wholly_masked_response_of_garbage_changes_no_token_statistic():
    """NaN and infinities in every column of a row without a single token."""
    clean = batch(cut=None)
    junk = torch.tensor([[math.nan, math.inf, -math.inf, 1e30, -1e30]])
    dirty = {name: torch.cat([getattr(clean, name), junk]) for name in (*LOG_PROBS, "entropy", "advantages")} | {
        "mask": torch.cat([clean.mask, torch.zeros(1, 5)]),
        "ids": torch.cat([clean.ids, torch.zeros(1, 5).long()]),
    }

    same(numbers(observe(TokenBatch(clip=clean.clip, **dirty))), numbers(observe(clean)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_input_gives_the_numbers_of_its_widened_values(dtype):
    """No statistic is computed, summed or compared in half precision."""
    half = batch(4, 300, dtype=dtype)
    wide = TokenBatch(
        **{
            name: x.float() if isinstance(x, torch.Tensor) and x.dtype is dtype else x
            for name in TokenBatch.__dataclass_fields__
            for x in [getattr(half, name)]
        }
    )

    left, right = observe(half), observe(wide)

    assert {stat.value().dtype for stat in left.values()} <= {torch.float32, torch.float64}
    same(numbers(left), numbers(right))
    torch.testing.assert_close(top_tokens(half, k=5).rows, top_tokens(wide, k=5).rows)


def test_double_precision_stays_double():
    """Also its counts: more than 2**24 tokens are counted exactly."""
    x = torch.tensor([1.0, 3.0], dtype=torch.float64)

    assert {s.value().dtype for s in (Mean.of(x, x), Std.of(x, x), Max.of(x, x))} == {torch.float64}
    assert masked_count(torch.ones(1, dtype=torch.bool).expand(2**24 + 1), x[0].expand(2**24 + 1)) == 2**24 + 1


def test_a_mask_may_broadcast():
    """One flag a response stands for all its tokens, in the count as in the sum."""
    x, mask = torch.tensor([[1.0, 2.0, 6.0], [9.0, 9.0, math.nan]]), torch.tensor([[1], [0]])

    assert masked_mean(x, mask) == 3.0
    assert masked_quantile(x, mask, 0.5) == 2.0
    assert (masked_max(x, mask), masked_min(x, mask), masked_sum(x, mask)) == (6.0, 1.0, 9.0)
    assert Std.of(x, mask).value().item() == pytest.approx(math.sqrt(7))
    assert Quantile.of(x, mask, 0.5).value() == 2.0
    assert Mean.of(torch.tensor([[1.0], [2.0]]), torch.ones(2, 3)).value() == 1.5


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_a_mask_may_be_of_any_type(kind):
    """Loss masks come as all of these."""
    mask = torch.tensor([1, 0, 1]).to(kind)

    assert masked_mean(torch.tensor([1.0, math.nan, 4.0]), mask) == 2.5


@pytest.mark.parametrize(
    ("reduce", "nothing"), [(masked_sum, 0.0), (masked_mean, math.nan), (masked_max, -math.inf), (masked_min, math.inf)]
)
@pytest.mark.parametrize("size", [0, 3])
def test_reductions_of_nothing_are_their_neutral_elements(reduce, nothing, size):
    """So that merging with them changes nothing; a mean of nothing is no number."""
    x = torch.ones(size)

    assert reduce(x, torch.zeros(size)).item() == pytest.approx(nothing, nan_ok=True)
    assert masked_quantile(x, torch.zeros(size), 0.5).isnan()


def test_infinities_inside_the_mask_show():
    """-inf as the smallest, inf as the mean; the quantile of a run of infinities is one of them."""
    x = torch.tensor([-math.inf, 1.0, math.inf, math.inf, math.inf])

    assert (masked_min(x, x.isfinite() | (x < 0)), masked_max(x, torch.ones(5))) == (-math.inf, math.inf)
    assert masked_mean(x[1:], torch.ones(4)) == math.inf
    assert masked_quantile(x, torch.ones(5), 0.75) == math.inf
    assert masked_quantile(x, torch.ones(5), 0.0) == -math.inf


def test_one_value_has_no_spread_but_two_have():
    """Degrees of freedom count."""
    one, two = torch.tensor([5.0]), torch.tensor([1.0, 3.0])
    every = torch.ones(2)

    assert Std.of(one, every[:1]).count == 0
    assert (Std.of(two, every).count, Std.of(two, every).value().item()) == (1, pytest.approx(math.sqrt(2)))
    assert Std.of(one, every[:1]).merge(Std.of(two, every)).value().item() == pytest.approx(2.0)


def test_totals_add_and_extremes_stay():
    """Over two micro-batches."""
    x, y, every = torch.tensor([1.0, -2.0]), torch.tensor([4.0, 0.5]), torch.ones(2)
    merged = {kind: kind.of(x, every).merge(kind.of(y, every)) for kind in (Total, Mean, Max, Min)}

    assert [s.value().item() for s in merged.values()] == [3.5, 0.875, 4.0, -2.0]
    assert {s.count.item() for s in merged.values()} == {4}


def test_the_latest_measurement_stands_for_the_step():
    """Also where it says that nothing was measured."""
    one, on, off = torch.tensor(1.0), torch.tensor(True), torch.tensor(False)
    first, second = Latest.of(one, on), Latest.of(2 * one, on)

    assert first.merge(second).value() == 2.0
    assert first.merge(Latest.of(one, off)).count == 0


def test_a_transfer_loses_no_digit_of_a_double_nor_of_a_large_integer():
    """Both would not fit in float32; beside them float32 travels unharmed."""
    sent = [torch.tensor(2**24 + 1), torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.1)]

    assert [float(x) for x in Transfer(sent).read()] == [2**24 + 1, 0.1, float(sent[2])]
    assert float(Transfer(sent[1:2]).read()[0]) == 0.1
    assert float(Transfer(sent[:1]).read()[0]) == 2**24 + 1
