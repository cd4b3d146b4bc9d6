"""However a step is cut into micro-batches, the merged statistics of the update are those of the whole."""

import math
from dataclasses import fields, replace
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.metrics import BY_NAME
from rlwatch.tensors.advantages import observe_logp
from rlwatch.tensors.entropy import (
    observe_covariance,
    observe_entropy,
    observe_entropy_quantiles,
    observe_top_covariance,
)
from rlwatch.tensors.importance import (
    observe_clipping,
    observe_kl,
    observe_kl_quantiles,
    observe_off_policy,
    observe_ratio_quantiles,
    observe_ratios,
)
from rlwatch.tensors.mergeable import merge
from rlwatch.tensors.tokens import TokenBatch

pytestmark = pytest.mark.torch
D = torch.float64
OBSERVERS = (
    *(
        observe_logp,
        observe_entropy,
        observe_covariance,
        observe_ratios,
        observe_clipping,
        observe_off_policy,
        observe_kl,
    ),
    *(observe_entropy_quantiles, observe_top_covariance, observe_ratio_quantiles, observe_kl_quantiles),
)


def statistics(batch):
    """All of this family, cheap and costly."""
    return reduce(merge, (observer(batch) for observer in OBSERVERS), {})


def drawn(rows, width, seed, dtype=D):
    """A batch that measures everything; the masks have holes and empty rows."""
    g = torch.Generator().manual_seed(seed)
    logp = -3 * torch.rand(rows, width, dtype=D, generator=g)
    near = lambda scale: (logp + scale * torch.randn(rows, width, dtype=D, generator=g)).to(dtype)  # noqa: E731
    return TokenBatch(
        logp=logp.to(dtype),
        mask=(torch.rand(rows, width, generator=g) > 0.3) & (torch.rand(rows, 1, generator=g) > 0.2),
        entropy=torch.rand(rows, width, dtype=D, generator=g).to(dtype),
        advantages=torch.randn(rows, dtype=D, generator=g).sign().to(dtype),
        old_logp=near(0.3),
        ref_logp=near(0.6),
        rollout_logp=near(0.3),
        clip=(0.2, 0.28),
        dual_clip=1.5,
        staleness=torch.randint(0, 4, (rows,), generator=g),
    )


def cut(batch, sizes):
    """Micro-batches of ``sizes`` responses."""
    columns = {f.name: v.split(sizes) for f in fields(batch) if isinstance(v := getattr(batch, f.name), torch.Tensor)}
    return [replace(batch, **{name: parts[i] for name, parts in columns.items()}) for i in range(len(sizes))]


def agree(left, right):
    """The same statistics exist on both sides, and are equal."""
    assert left.keys() == right.keys()
    for name in left:
        a, b = left[name].settle(), right[name].settle()
        assert (a.count > 0) == (b.count > 0), name
        if a.count > 0:
            assert a.value().item() == pytest.approx(b.value().item(), rel=1e-7, abs=1e-10, nan_ok=True), name


cuts = st.lists(st.integers(0, 4), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(cuts, st.integers(0, 9), st.integers(0, 2**20))
def test_merged_micro_batches_say_what_the_whole_batch_says(sizes, width, seed):
    """Of any number of responses each, none included, with masks that leave some without a token."""
    batch = drawn(sum(sizes), width, seed)

    agree(reduce(merge, map(statistics, cut(batch, sizes))), statistics(batch))


@settings(deadline=None, max_examples=20)
@given(cuts, st.integers(0, 2**20))
def test_the_order_of_micro_batches_does_not_matter(sizes, seed):
    """Ranks may be gathered in any order."""
    pieces = [statistics(piece) for piece in cut(drawn(sum(sizes), 5, seed), sizes)]

    agree(reduce(merge, pieces), reduce(merge, pieces[::-1]))


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 8), st.integers(0, 2**20), st.integers(1, 5))
def test_padding_a_micro_batch_further_changes_nothing(rows, seed, more):
    """As when another micro-batch holds a longer response; the padding may be anything."""
    batch = drawn(rows, 6, seed)
    junk = torch.full((rows, more), math.nan, dtype=D)
    wider = {
        n: torch.cat([getattr(batch, n), junk], 1) for n in ("logp", "old_logp", "ref_logp", "rollout_logp", "entropy")
    }
    mask = torch.cat([batch.mask, torch.zeros(rows, more, dtype=torch.bool)], 1)

    agree(statistics(replace(batch, mask=mask, **wider)), statistics(batch))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_columns_are_read_as_their_widened_values(dtype):
    """Every statistic, cheap or costly."""
    half = drawn(6, 40, 3, dtype=dtype)
    wide = {f.name: v.float() for f in fields(half) if getattr(v := getattr(half, f.name), "dtype", None) is dtype}

    agree(statistics(half), statistics(replace(half, **wide)))


def test_columns_need_not_be_contiguous():
    """Slices and transposes of larger tensors, as trainers make them."""
    batch = drawn(6, 7, 4)
    strided = {
        f.name: v.T.contiguous().T
        for f in fields(batch)
        if isinstance(v := getattr(batch, f.name), torch.Tensor) and v.dim() == 2
    }

    assert not strided["logp"].is_contiguous()
    agree(statistics(replace(batch, **strided)), statistics(batch))


def test_every_one_of_them_is_documented():
    """Name, unit, meaning and range in the table; values lie within the range."""
    stats = statistics(drawn(12, 60, 5))

    assert len(stats) > 40
    for name, stat in stats.items():
        row, value = BY_NAME[name], stat.value().item()
        assert row.meaning, name
        if not float(stat.settle().count):
            continue  # nothing lies at these positions
        assert row.low is None or value >= row.low, name
        assert row.high is None or value <= row.high, name


@pytest.mark.parametrize("column", ["logp", "old_logp", "ref_logp", "advantages", "entropy"])
def test_a_nan_that_is_counted_never_leaves_a_healthy_looking_number(column):
    """What a column takes part in is NaN as soon as one counted value of it is; the rest stays as it was."""
    clean = drawn(6, 30, 6)
    mask = clean.mask.clone()
    mask[0, 0] = True
    clean = replace(clean, mask=mask, rollout_logp=None)
    broken = getattr(clean, column).clone()
    broken[(0, 0) if broken.dim() == 2 else 0] = math.nan
    before, after = (statistics(b) for b in (clean, replace(clean, **{column: broken})))

    for name in before:
        if name.startswith(("nonfinite/", "staleness/")):
            continue
        was, now = before[name].value().item(), after[name].value().item()
        assert math.isnan(now) or now == was, name
    assert sum(stat.value().isnan().item() for stat in after.values()) >= 3
