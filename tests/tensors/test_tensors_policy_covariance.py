"""Covariance of log-prob and advantage: exact over micro-batches, and which tokens carry it."""

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.tensors.mergeable import merge
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import TokenBatch

pytestmark = pytest.mark.torch
D = torch.float64


def numbers(stats):
    return {name: stat.value().item() for name, stat in stats.items() if name.startswith("policy/cov")}


def drawn(rows=4, width=500, seed=0):
    g = torch.Generator().manual_seed(seed)
    logp = -3 * torch.rand(rows, width, dtype=D, generator=g)
    advantages = 2 * torch.randn(rows, 1, dtype=D, generator=g)
    return logp, advantages, torch.rand(rows, width, generator=g) > 0.3


def test_the_covariance_by_hand():
    """log p (-1, -3), A (2, 0): deviations (1, -1) and (1, -1), so c = (1, 1); the padding does not exist."""
    batch = TokenBatch(
        logp=torch.tensor([[-1.0, -3.0, math.nan]], dtype=D),
        mask=torch.tensor([[1, 1, 0]]),
        advantages=torch.tensor([[2.0, 0.0, math.nan]], dtype=D),
    )

    got = numbers(observe(batch))

    assert got == {"policy/cov": 1.0, "policy/cov_top": 1.0, "policy/cov_positive": 1.0, "policy/cov_candidates": 0.0}


def test_all_of_it_is_what_numpy_would_say():
    """Mean, mean of the top 0.2 %, and share of positive ones, of all counted tokens together."""
    logp, a, mask = drawn()
    x, y = logp[mask], a.expand_as(logp)[mask]
    c = (x - x.mean()) * (y - y.mean())

    got = numbers(observe(TokenBatch(logp=logp, mask=mask, advantages=a)))

    assert got["policy/cov"] == pytest.approx(c.mean().item())
    assert got["policy/cov_top"] == pytest.approx(c.sort(descending=True).values[: int(0.002 * len(c))].mean().item())
    assert got["policy/cov_positive"] == pytest.approx((c > 0).double().mean().item())
    assert got["policy/cov_candidates"] == pytest.approx(((c > 1) & (c < 5)).double().mean().item())


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(0, 99))
def test_cutting_the_batch_changes_nothing(widths, seed):
    """c_t is centred over the whole step, not over a micro-batch, whatever their shapes."""
    g = torch.Generator().manual_seed(seed)
    pieces = [
        TokenBatch(
            logp=-3 * torch.rand(2, width, dtype=D, generator=g),
            mask=torch.rand(2, width, generator=g) > 0.2,
            advantages=torch.randn(2, dtype=D, generator=g),
            old_logp=-3 * torch.rand(2, width, dtype=D, generator=g),
            clip=(0.2, 0.2),
        )
        for width in widths
    ]
    flat = lambda name: torch.cat([getattr(p, name).flatten() for p in pieces])[None]  # noqa: E731
    whole = TokenBatch(
        logp=flat("logp"),
        mask=flat("mask"),
        advantages=torch.cat([p.token_advantages.expand_as(p.logp).flatten() for p in pieces])[None],
        old_logp=flat("old_logp"),
        clip=(0.2, 0.2),
    )
    merged = observe(pieces[0])
    for piece in pieces[1:]:
        merged = merge(merged, observe(piece))

    for name, stat in observe(whole).items():
        if name.startswith("policy/cov"):
            assert merged[name].count == stat.count
            expected, got = stat.value().item(), merged[name].value().item()
            assert got == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True), name


def test_clipped_tokens_are_no_candidates():
    """PPO holds them already: c = 1.5 twice, once with a ratio beyond the clip."""
    logp = torch.tensor([[-1.0, -1.0, -3.0, -3.0]], dtype=D)
    a = torch.tensor([[1.5, 1.5, -1.5, -1.5]], dtype=D)
    old = torch.tensor([[-2.0, -1.0, -3.0, -3.0]], dtype=D)
    batch = TokenBatch(logp=logp, mask=torch.ones(1, 4), advantages=a, old_logp=old, clip=(0.2, 0.2))

    assert numbers(observe(batch))["policy/cov"] == 1.5
    assert numbers(observe(batch))["policy/cov_candidates"] == 0.75


@pytest.mark.parametrize("broken", ["logp", "advantages"])
def test_a_nan_inside_the_mask_reaches_all_of_it(broken):
    """The means it is centred by are unknown then."""
    columns = {"logp": torch.tensor([[-1.0, -2.0]]), "advantages": torch.tensor([[1.0, -1.0]])}
    columns[broken][0, 1] = math.nan

    assert all(math.isnan(v) for v in numbers(observe(TokenBatch(mask=torch.ones(1, 2), **columns))).values())


def test_equal_advantages_have_no_covariance():
    """Nothing to learn: 0 everywhere, no candidate."""
    got = numbers(observe(TokenBatch(logp=-torch.rand(2, 3), mask=torch.ones(2, 3), advantages=torch.ones(2))))

    assert set(got.values()) == {0.0}


def test_without_advantages_it_is_absent_and_without_tokens_not_measured():
    """Neither is 0."""
    assert numbers(observe(TokenBatch(logp=-torch.rand(2, 3), mask=torch.ones(2, 3)))) == {}
    empty = observe(TokenBatch(logp=torch.zeros(0, 3), mask=torch.zeros(0, 3), advantages=torch.zeros(0)))
    assert {stat.count.item() for name, stat in empty.items() if name.startswith("policy/cov")} == {0}


def large(seed, rows=20, width=5000):
    logp, a, mask = drawn(rows, width, seed)
    return TokenBatch(logp=logp, mask=mask, advantages=a, old_logp=logp - 0.1 * (a > 2), clip=(0.2, 0.05))


def compacted(batch, most):
    return {n: s.compact(most) for n, s in observe(batch).items() if n.startswith("policy/cov")}


def test_what_is_sent_to_another_rank_is_small_and_says_nearly_the_same():
    """Of 100,000 tokens 4,000: the order of c is kept evenly, so fractions and the mean of a tail hardly move."""
    batch = large(0)
    whole, small = numbers(observe(batch)), compacted(batch, 4000)

    kept = sum(x.numel() for x in (*small["policy/cov_top"].logp, *small["policy/cov_top"].advantages))
    assert kept <= 2 * 4000
    assert small["policy/cov_top"].count == batch.mask.sum()
    got = numbers(small)
    assert got["policy/cov"] == whole["policy/cov"]
    assert got["policy/cov_top"] == pytest.approx(whole["policy/cov_top"], rel=0.05)
    assert got["policy/cov_positive"] == pytest.approx(whole["policy/cov_positive"], abs=5e-4)
    assert got["policy/cov_candidates"] == pytest.approx(whole["policy/cov_candidates"], rel=0.05)
    assert whole["policy/cov_candidates"] > 0.05


def test_a_large_rank_and_a_small_one_weigh_by_their_tokens():
    """One sends a tenth of its pairs, the other all of them."""
    big, little = large(1), large(2, rows=1)
    alone = merge(observe(big), observe(little))

    sent = numbers(merge(compacted(big, 10_000), compacted(little, 10_000)))

    assert sent["policy/cov_positive"] == pytest.approx(numbers(alone)["policy/cov_positive"], abs=5e-3)
    assert sent["policy/cov_top"] == pytest.approx(numbers(alone)["policy/cov_top"], rel=0.05)


def test_a_compact_pair_counts_as_those_it_stands_for():
    """As if all were written out: of two ranks that thinned theirs by different numbers and of one that did not."""
    parts = [compacted(large(5), 10_000), compacted(large(6), 700), observe(large(7, rows=1))]
    for name in ("policy/cov_top", "policy/cov_positive", "policy/cov_candidates"):
        thin = parts[0][name].merge(parts[1][name]).merge(parts[2][name])
        assert sorted(thin.every) == [1, 7, 101]  # of the tokens inside the mask
        kept = [field.name for field in fields(thin) if field.name not in ("count", "means", "every")]
        columns = {
            field: tuple(
                piece.expand_as(logp).flatten().repeat_interleave(n)
                for piece, logp, n in zip(getattr(thin, field), thin.logp, thin.every, strict=True)
            )
            for field in kept
        }
        written = replace(thin, **columns, every=(1, 1, 1))

        assert thin.value().item() == pytest.approx(written.value().item(), rel=1e-5)


def test_few_pairs_are_sent_as_they_are_and_a_nan_is_never_left_behind():
    """Exact below the limit; above it a single NaN is still everything's."""
    few, broken = observe(large(3))["policy/cov_top"], large(3)
    broken.logp[0, broken.mask[0].nonzero()[0]] = math.nan

    assert few.compact(100_000) is few
    assert all(math.isnan(value) for value in numbers(compacted(broken, 100)).values())


def test_nothing_stays_nothing_however_small_it_is_made():
    """All masked out: a count of 0, also on the other rank."""
    batch = large(4)
    nothing = compacted(
        TokenBatch(logp=batch.logp, mask=torch.zeros_like(batch.mask), advantages=batch.advantages), 100
    )
    whole = observe(batch)

    for name, stat in nothing.items():
        assert stat.count == 0
        assert stat.merge(whole[name]).value().item() == pytest.approx(whole[name].value().item())
