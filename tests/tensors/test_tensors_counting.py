"""A mask is counted once for all statistics of a batch, and sums of two batches are added together."""

import pytest
import torch

from rlwatch.tensors.masked import difference, masked_count, reducing_together, sharing
from rlwatch.tensors.mergeable import Max, Mean, Min, Total, merge
from rlwatch.tensors.transfer import Transfer

pytestmark = pytest.mark.torch


def test_a_mask_is_counted_once_for_each_shape_and_type():
    """The same tensor comes back, so that it is shipped and added once too."""
    mask, x = torch.tensor([[True, False]]), torch.ones(1, 2)
    with sharing():
        first, again = masked_count(mask, x), masked_count(mask, x + 1)
        double, wider = masked_count(mask, x.double()), masked_count(mask, torch.ones(3, 2))

    assert first is again
    assert (first.item(), double.item(), wider.item()) == (1.0, 1.0, 3.0)
    assert double.dtype == torch.float64


def test_outside_a_batch_nothing_is_remembered():
    """A mask that was changed in place is counted anew."""
    mask, x = torch.tensor([True, False]), torch.ones(2)
    with sharing():
        assert masked_count(mask, x).item() == 1
    mask[1] = True

    assert masked_count(mask, x).item() == 2
    with sharing():
        assert masked_count(mask, x).item() == 2


def test_a_new_mask_in_the_place_of_an_old_one_is_not_mistaken_for_it():
    """Identity is kept for as long as the count is."""
    x = torch.ones(4)
    with sharing():
        counts = [masked_count(torch.arange(4) < n, x).item() for n in (1, 2, 3, 4)]

    assert counts == [1, 2, 3, 4]


def test_sums_of_two_batches_are_added_whatever_else_is_measured():
    """Means, totals and maxima together; a metric of one batch only is kept; NaN stays."""
    mask = torch.tensor([1, 1, 0])
    x = torch.tensor([1.0, 3.0, 9.0])
    with sharing():
        first = {"m": Mean.of(x, mask), "t": Total.of(x, mask), "max": Max.of(x, mask), "one": Mean.of(x, mask)}
    second = {"m": Mean.of(x * 2, torch.ones(3)), "t": Total.of(x * torch.nan, mask), "max": Max.of(x, torch.ones(3))}

    both = merge(first, second)

    assert list(both) == ["m", "t", "max", "one"]
    assert both["m"].value().item() == pytest.approx((1 + 3 + 2 + 6 + 18) / 5)
    assert type(both["t"]) is Total
    assert both["t"].value().isnan()
    assert (both["max"].value().item(), both["one"].value().item()) == (9.0, 2.0)
    assert [both[name].count.item() for name in both] == [5, 4, 5, 2]


def test_tensors_of_different_types_come_back_in_their_order():
    """Joined by type on the way, never mixed up."""
    sent = [
        torch.tensor(1.5), torch.tensor([2, 3]), torch.tensor(4.0, dtype=torch.bfloat16), torch.tensor(True),
        torch.tensor([[5.0], [6.0]], dtype=torch.float64), torch.empty(0), torch.tensor(7.0),
    ]  # fmt: skip

    back = Transfer(sent).read()

    assert [array.tolist() for array in back] == [1.5, [2.0, 3.0], 4.0, 1.0, [[5.0], [6.0]], [], 7.0]


def test_reductions_of_a_batch_are_computed_when_it_ends():
    """Sums, maxima and minima of any masks in a few operations; NaN inside the mask shows, outside it does not."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(4, 6, generator=generator) for _ in range(70)]
    masks = [torch.rand(4, 6, generator=generator) > 0.4 for _ in values]
    values[3][masks[3]] = torch.nan
    values[5][~masks[5]] = torch.nan
    with sharing(), reducing_together(on_cpu=True):
        together = [(Mean.of(x, on), Max.of(x, on), Min.of(x, on)) for x, on in zip(values, masks, strict=True)]
        assert together[-1][0].kept.isnan()

    for stats, x, on in zip(together, values, masks, strict=True):
        for found, alone in zip(stats, (Mean.of(x, on), Max.of(x, on), Min.of(x, on)), strict=True):
            assert found.value().item() == pytest.approx(alone.value().item(), rel=1e-6, nan_ok=True)
            assert found.count.item() == alone.count.item()


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 1), (2, 3, 4)])
def test_values_of_any_shape_are_reduced_together(shape):
    """A single number is one, too."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    every = torch.ones(shape, dtype=torch.bool)
    with reducing_together(on_cpu=True):
        stats = [kind.of(x, every) for kind in (Mean, Max, Min) for _ in range(2)]

    for stat, alone in zip(stats, (x.mean(), x.mean(), x.max(), x.max(), x.min(), x.min()), strict=True):
        assert stat.value().item() == pytest.approx(alone.item(), rel=1e-6)


def test_what_is_shared_is_computed_once_within_a_block():
    """The same tensor comes back for the very same arguments, and nothing is kept afterwards."""
    x, y = torch.randn(3), torch.randn(3)
    with sharing():
        first, again, other = difference(x, y), difference(x, y), difference(x.clone(), y)

    assert first is again
    assert other is not first
    assert difference(x, y) is not first
