"""A rank's share of a step: sent as bytes, put together on rank 0, without a wait on the training thread."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from waits import CountWaits

from rlwatch.integrations.step_tally import (
    MOST_SPIKES,
    SharedStep,
    StepTally,
    decoded_share,
    most_extreme,
    spike_batch,
    texts_of,
)
from rlwatch.records import DISTRIBUTIONS
from rlwatch.tensors.mergeable import Max, Mean, Quantile, Total
from rlwatch.tensors.tokens import SpikeTable, TokenBatch

pytestmark = pytest.mark.torch
COLUMNS = ("sequence", "token_id", "logp")


def stats_of(*values, dtype=torch.float32):
    x = torch.tensor(values, dtype=dtype)
    every = torch.ones(len(values), dtype=torch.bool)
    return {"mean": Mean.of(x, every), "max": Max.of(x, every), "p50": Quantile.of(x, every, 0.5)}


def spikes_of(*rows, columns=COLUMNS):
    return SpikeTable(columns, torch.tensor(rows, dtype=torch.float32).reshape(len(rows), 1 + len(columns)))


def step(stats=None, spikes=None, **numbers):
    return SharedStep.of(7, stats or {}, spikes, numbers)


class Sending:
    """A linked run that keeps what is sent."""

    ranks = None

    def __init__(self):
        self.sent = []

    def send(self, parcel):
        self.sent.append(parcel)


def test_the_shares_of_three_ranks_make_one_step():
    """Rank 0 holds its own; the others came as bytes, one of them empty."""
    others = {1: step(stats_of(4.0, 10.0)).encode(), 2: step().encode()}

    metrics, spikes = step(stats_of(1.0)).merged(others)

    assert metrics == {"mean": 5.0, "max": 10.0, "p50": 4.0}
    assert spikes == []


def test_only_what_some_rank_measured_is_reported():
    """A count of 0 over all ranks is no value; a rank that measured nothing of it takes nothing away."""
    nothing = {"mean": Mean.of(torch.ones(2), torch.zeros(2)), "other": Mean.of(torch.ones(2), torch.zeros(2))}

    metrics, _ = step(nothing).merged({1: step(stats_of(3.0)).encode()})

    assert metrics == {"mean": 3.0, "max": 3.0, "p50": 3.0}


def test_numbers_are_those_of_rank_0():
    """A trainer's own numbers are global already."""
    metrics, _ = step(lr=0.1).merged({1: step(lr=0.9, other=1.0).encode()})

    assert metrics == {"lr": 0.1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_bytes_hold_what_the_tensors_held(dtype):
    """Half precision was widened when it was measured; the journey rounds nothing."""
    share = step(stats_of(0.1, 2.5, -3.25, dtype=dtype), spikes_of([math.inf, 3, 5, math.nan])).encode()

    back = decoded_share(share)

    x = torch.tensor([0.1, 2.5, -3.25], dtype=dtype).double()
    assert back.stats["p50"].values[0].tolist() == x.tolist()
    assert back.stats["p50"].masks[0].dtype == torch.bool
    assert back.columns == COLUMNS
    np.testing.assert_array_equal(back.rows, [[math.inf, 3, 5, math.nan]])


@given(st.lists(st.booleans(), max_size=40))
def test_masks_travel_as_bits(flags):
    """Of any length."""
    mask = torch.tensor(flags, dtype=torch.bool)
    share = step({"q": Quantile.of(torch.ones(len(flags)), mask, 0.5)}).encode()

    assert decoded_share(share).stats["q"].masks[0].tolist() == flags


def test_a_share_is_read_twice_with_the_same_result():
    """Its text may be decoded before it is sent."""
    share = step(stats_of(1.0, 2.0))

    assert share.encode() == share.encode()


def test_extreme_tokens_of_every_rank_come_worst_first_with_their_text():
    """Each rank decodes its own, where its tokenizer is; ordinary tokens are not decoded."""
    ours = step(spikes=spikes_of([1.5, 0, 11, -20], [0.2, 0, 12, -1], [3.0, 1, 13, -30]))
    theirs = step(spikes=spikes_of([math.inf, 4, 21, math.nan], [-math.inf, 0, 0, 0]))
    run, seen = Sending(), []
    for share in (ours, theirs):
        share.deliver(run, lambda ids: seen.extend(ids) or f"<{ids[0]}>")

    _, (first, second) = ours.merged({3: theirs.encode()})

    assert seen == [11, 13, 21]
    assert (first.rank, second.rank) == (0, 3)
    assert list(first.columns["token_id"]) == [13, 11]
    assert first.columns["text"] == ["<13>", "<11>"]
    assert first.reason == "far-out tokens"
    assert second.columns["text"] == ["<21>"]
    assert second.reason == "non-finite tokens"
    assert run.sent == [ours, theirs]


def test_ranks_may_see_different_columns():
    """One of them has no reference, or no spikes at all."""
    bare = step(spikes=spikes_of([2.0, -16], columns=("logp",))).encode()

    _, batches = step(spikes=spikes_of([2.0, 0, 1, -16])).merged({1: bare, 2: step().encode()})

    assert [sorted(batch.columns) for batch in batches] == [["logp", "sequence", "token_id"], ["logp"]]


def test_a_storm_on_every_rank_is_recorded_in_bounded_size():
    """NaN everywhere: the limit is on the step, not on each rank."""
    storm = [[math.inf, i, i, math.nan] for i in range(64)]
    others = {rank: step(spikes=spikes_of(*storm)).encode() for rank in range(1, 5)}

    _, batches = step(spikes=spikes_of(*storm)).merged(others)

    assert sum(len(batch) for batch in batches) == MOST_SPIKES


scores = st.lists(st.lists(st.floats(-10, 10) | st.just(math.inf), max_size=8), min_size=1, max_size=4)


@given(scores, st.integers(0, 12))
def test_the_most_extreme_rows_of_all_tables_keep_their_places(tables, most):
    """What is not among them has no score any more; nothing else changes."""
    given_tables = [np.array([[score, i] for i, score in enumerate(rows)]).reshape(-1, 2) for rows in tables]
    chosen = most_extreme(given_tables, most)
    kept = sorted((row[0] for table in chosen for row in table if row[0] > -np.inf), reverse=True)

    assert kept == sorted((score for rows in tables for score in rows), reverse=True)[:most]
    assert [table[:, 1].tolist() for table in chosen] == [table[:, 1].tolist() for table in given_tables]


def test_an_ordinary_step_has_no_extreme_tokens():
    """None, not an empty record."""
    assert spike_batch(1, np.array([[0.9, 1.0]]), ("logp",)) is None
    assert spike_batch(1, np.empty((0, 2)), ("logp",)) is None


def test_text_needs_ids():
    """Nothing to decode, nothing said."""
    assert texts_of(np.array([[2.0, 1.0]]), ("logp",), str) == []
    assert texts_of(np.array([[2.0, 1.0]]), ("token_id",), None) == []


def tally(rows):
    g = torch.Generator().manual_seed(0)
    found = StepTally()
    logp = -torch.rand(rows, 5, generator=g)
    found.add_batch(TokenBatch(logp=logp, mask=torch.ones(rows, 5, dtype=torch.bool), old_logp=logp - 0.1))
    return found


def test_sealing_a_share_never_waits_for_the_device():
    """Thinning, packing and the copy leave the training thread alone."""
    x = torch.randn(50_000)
    collected = tally(3)
    collected.add_stats({"p99": Quantile.of(x, x > 0, 0.99)})
    with CountWaits() as waits:
        share = collected.seal(1, shared=True)

    assert waits.seen == []
    assert len(decoded_share(share.encode()).stats["p99"].values[0]) <= 16_384


def test_a_share_of_one_rank_alone_is_the_step():
    """Sealed either way, one rank tells the same."""

    class Recording(Sending):
        def log(self, metrics, step):
            self.sent.append(metrics)

        def log_spikes(self, spikes):
            assert spikes.reason == DISTRIBUTIONS, "nothing is extreme here"

    run = Recording()
    tally(3).seal(1).deliver(run)
    alone, _ = tally(3).seal(1, shared=True).merged({})

    assert alone.keys() == run.sent[0].keys()
    assert alone == pytest.approx(run.sent[0], rel=1e-5, abs=1e-7)


def test_a_share_that_makes_no_sense_raises_on_rank_0_only():
    """The writer thread counts it; nobody else notices."""
    with pytest.raises((ValueError, KeyError)):
        decoded_share(b"\x00\x00\x00\x02{}")
    with pytest.raises(ValueError):
        step().merged({1: b"\x00\x00\x00\x01x"})


def test_a_number_summed_over_ranks_is_exact_beyond_single_precision():
    """Two counts of 2^24 + 1 tokens."""
    n = torch.tensor(2.0**24 + 2)
    metrics, _ = step({"tokens": Total(n, n)}).merged({1: step({"tokens": Total(n, n)}).encode()})

    assert metrics == {"tokens": 2**25 + 4}
