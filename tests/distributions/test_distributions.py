"""Counts of a step against numpy: bins that add up, quantiles in the right bin, what is not finite apart."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.distributions import QUANTITIES, Sparing, batch_of, bin_ends, distributions
from rlwatch.integrations.step_tally import StepTally, decoded_share
from rlwatch.records import DISTRIBUTIONS, SpikeBatch
from rlwatch.tensors.histogram import PREFIX, Histogram, observe_distributions
from rlwatch.tensors.mergeable import merge, merge_ranks
from rlwatch.tensors.tokens import TokenBatch

pytestmark = pytest.mark.torch

SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
values = st.lists(
    st.floats(width=32) | st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-8]), min_size=1, max_size=40
)


def counted(x, name="entropy", mask=None):
    """The distribution that is recorded of ``x``."""
    x = torch.as_tensor(x)
    stat = Histogram.of(x, torch.ones_like(x, dtype=torch.bool) if mask is None else mask, QUANTITIES[name].bits)
    batch = batch_of(3, {name: stat.bins.numpy()})
    return None if batch is None else distributions([batch])[name]


@pytest.mark.parametrize("name", QUANTITIES)
@given(x=values)
def test_every_quantile_lies_in_the_bin_of_the_exact_one(name, x):
    """Whatever is measured; and what is not finite is counted, apart."""
    exact = np.array(x, dtype=np.float32)
    finite = np.sort(exact[np.isfinite(exact)]).astype(np.float64)
    found = counted(torch.from_numpy(exact), name)

    odd = [np.isnan(exact).sum(), (exact == -np.inf).sum(), (exact == np.inf).sum()]

    assert found.broken.tolist() == [odd]
    assert (found.finite.tolist(), found.tokens.tolist()) == ([len(finite)], [len(exact)])
    (got,) = found.quantiles(SHARES)
    if not len(finite):
        assert np.isnan(got).all()
        return
    for share, level in zip(SHARES, got, strict=True):
        want = np.quantile(finite, share, method="lower")
        inside = (found.low <= want) & (want <= found.high) & (found.low <= level) & (level <= found.high)
        width = (found.high - found.low)[inside]
        assert width.min() <= max(2 * QUANTITIES[name].least, 0.5 * abs(want))


def test_usual_values_are_told_to_within_their_bin():
    """A normal log-ratio and an entropy as policies have them, 100,000 tokens: numpy's quantiles."""
    rng = np.random.default_rng(0)
    for name, x, within in (
        ("log_ratio", rng.normal(0, 0.05, 100_000), 0.2),
        ("entropy", rng.gamma(0.4, 1, 100_000), 0.08),
    ):
        got = counted(torch.from_numpy(x), name).quantiles(SHARES[1:-1])[0]
        want = np.quantile(x, SHARES[1:-1])
        assert np.abs(got - want).max() <= max(within * np.abs(want).max(), 2 * QUANTITIES[name].least)


@given(x=values, cut=st.integers(0, 40), hidden=st.data())
def test_parts_merge_to_the_whole_and_padding_does_not_exist(x, cut, hidden):
    """Over micro-batches and over ranks, count by count."""
    x = torch.tensor(x, dtype=torch.float32)
    mask = torch.tensor(hidden.draw(st.lists(st.booleans(), min_size=len(x), max_size=len(x))))
    whole = Histogram.of(x, mask, 2)
    one, two = (Histogram.of(a, b, 2) for a, b in ((x[:cut], mask[:cut]), (x[cut:], mask[cut:])))

    assert torch.equal(whole.bins, Histogram.of(x[mask], mask[mask], 2).bins)
    for merged in (merge({"h": one}, {"h": two}), merge_ranks({"h": one}, {"h": two})):
        assert torch.equal(merged["h"].bins, whole.bins)
        assert merged["h"].count == whole.count == mask.sum()


def test_bins_are_what_floats_have_in_common():
    """Their ends meet, from the most negative number to the largest, and halves of octaves are 1 and 1.5 times 2^k."""
    low, high = bin_ends(1)
    order = np.argsort(low[np.isfinite(low)], kind="stable")
    low, high = low[np.isfinite(low)][order], high[np.isfinite(high)][order]

    assert (low[0], high[-1]) == (-np.finfo(np.float32).max, np.finfo(np.float32).max)
    assert np.array_equal(low[1:], high[:-1])
    assert {1.0, 1.5, 2.0, 3.0, -1.5} <= set(low)


def tokens(rows, seed=0):
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, 6, generator=g)
    return TokenBatch(
        logp=old + 0.1 * torch.randn(rows, 6, generator=g),
        old_logp=old,
        rollout_logp=old + 0.01 * torch.randn(rows, 6, generator=g),
        entropy=torch.rand(rows, 6, generator=g),
        mask=torch.rand(rows, 6, generator=g) > 0.3,
    )


class Recording:
    """A run that remembers."""

    def __init__(self):
        self.spikes, self.metrics = [], {}

    def log(self, metrics, step):
        self.metrics = metrics

    def log_spikes(self, batch):
        self.spikes.append(batch)


def plain(batches):
    found = distributions(batches)
    return {name: [getattr(one, of).tolist() for of in one.__slots__[1:]] for name, one in found.items()}


def test_a_step_is_recorded_whole_whether_one_rank_measured_it_or_three():
    """Micro-batches of one rank, and shares sent as bytes: the same record; no histogram is a metric."""
    parts = [tokens(3, 1), tokens(5, 2), tokens(2, 3)]
    alone, shares = StepTally(), []
    for part in parts:
        alone.add_batch(part)
        own = StepTally()
        own.add_batch(part)
        shares.append(own.seal(7, shared=True))
    run = Recording()
    alone.seal(7).deliver(run)
    metrics, spikes = shares[0].merged({rank: share.encode() for rank, share in enumerate(shares[1:], 1)})

    tokens_of_all = int(sum(part.mask.sum() for part in parts))
    assert plain(run.spikes) == plain(spikes)
    assert {name: one.tokens.tolist() for name, one in distributions(spikes).items()} == {
        name: [tokens_of_all] for name in QUANTITIES
    }
    assert not [name for name in {*run.metrics, *metrics} if name.startswith(PREFIX)]
    assert any(name.startswith(PREFIX) for name in decoded_share(shares[1].encode()).stats)


def test_what_the_batch_does_not_hold_is_not_counted():
    """Log-probs alone have no distribution here; of what the engine did not score nothing is told."""
    logp = torch.tensor([[-1.0, -2.0]])
    assert observe_distributions(TokenBatch(logp=logp, mask=torch.ones(1, 2))) == {}
    one = TokenBatch(logp=logp, rollout_logp=torch.tensor([[-1.0, math.nan]]), mask=torch.ones(1, 2))
    assert observe_distributions(one)[f"{PREFIX}logp_difference"].bins.sum() == 1
    assert batch_of(1, {"entropy": np.zeros(2048)}) is None


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"quantity": ["entropy"], "bin": np.zeros(1), "count": np.ones(1)},
        {"quantity": np.zeros(1), "bin": np.zeros(1)},
        {"quantity": np.array([99, 0, 0, 0]), "bin": np.array([1, -1, 9999, 1]), "count": np.array([1, 1, 1, -1])},
    ],
)
def test_a_record_that_makes_no_sense_is_left_out(columns):
    """Nothing raises where it is read."""
    assert distributions([SpikeBatch(1, columns, DISTRIBUTIONS), SpikeBatch(1, {"logp": np.zeros(1)})]) == {}


def test_a_long_run_keeps_ever_fewer_steps_and_all_of_its_first():
    """Of 100,000 steps some five thousand, the newest within a thousandth of the run."""
    sparing = Sparing()
    kept = [step for step in range(1, 100_001) if sparing.due()]

    assert kept[: Sparing.WHOLE] == list(range(1, Sparing.WHOLE + 1))
    assert len(kept) < Sparing.WHOLE * (1.5 + math.log(100_000 / Sparing.WHOLE))
    assert max(np.diff(kept)) <= 100_000 / Sparing.WHOLE
