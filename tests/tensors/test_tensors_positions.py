"""KL and mismatch by position in the response."""

from dataclasses import replace

import pytest
import torch

from rlwatch.metrics import BY_NAME
from rlwatch.metrics.table import POSITIONS as NAMED
from rlwatch.tensors.mergeable import POSITIONS, by_position
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import TokenBatch

KL, GAP = "policy/kl_ref_at_", "mismatch/logp_absdiff_at_"


def batch(length, responses=3, seed=0):
    """Random log-probs of responses of different lengths, float64."""
    draw = torch.Generator().manual_seed(seed)
    logp, ref, rollout = (-torch.rand(responses, length, generator=draw, dtype=torch.float64) for _ in range(3))
    lengths = torch.randint(1, length + 1, (responses, 1), generator=draw)
    return TokenBatch(logp=logp, mask=torch.arange(length) < lengths, ref_logp=ref, rollout_logp=rollout)


@pytest.mark.parametrize("length", [5, 8, 9, 64, 600])
def test_each_stretch_is_the_mean_over_its_counted_tokens(length):
    """Token by token, the slow way; one that no response reaches counts none."""
    one = batch(length)
    got = {name: stat for name, stat in observe(one).items() if name.startswith((KL, GAP))}
    x = one.logp - one.ref_logp
    each = {KL: torch.exp(-x) - 1 + x, GAP: (one.logp - one.rollout_logp).abs()}

    for first, end in zip(POSITIONS, (*POSITIONS[1:], 10**9), strict=True):
        for prefix, values in each.items():
            inside = [
                values[i, t].item() for i in range(3) for t in range(length) if first <= t < end and one.mask[i, t]
            ]
            stat = got[f"{prefix}{first}"]
            assert stat.count.item() == len(inside)
            if inside:
                assert stat.value().item() == pytest.approx(sum(inside) / len(inside))


def test_micro_batches_of_different_lengths_merge_to_the_mean_of_all():
    """A stretch that only one of them has is that one's."""
    short, long = batch(20), replace(batch(100, seed=1), mask=torch.ones(3, 100))
    a, b = observe(short), observe(long)

    assert a[f"{KL}64"].count == 0
    assert a[f"{KL}64"].merge(b[f"{KL}64"]).value() == b[f"{KL}64"].value()
    total = a[f"{KL}8"].merge(b[f"{KL}8"])
    counted = [stat.count.item() for stat in (a[f"{KL}8"], b[f"{KL}8"])]
    values = [stat.value().item() for stat in (a[f"{KL}8"], b[f"{KL}8"])]
    assert total.value().item() == pytest.approx(
        sum(n * v for n, v in zip(counted, values, strict=True)) / sum(counted)
    )


def test_a_nan_shows_in_its_own_stretch_only():
    """It is not hidden, and spoils no other."""
    x = torch.ones(2, 20)
    x[1, 3] = float("nan")
    got = by_position("at_", x, torch.ones(2, 20))

    assert got["at_0"].value().isnan()
    assert got["at_8"].value() == 1.0


def test_without_a_reference_or_an_engine_there_is_none():
    """Absent, not zero."""
    got = observe(TokenBatch(logp=-torch.ones(1, 9), mask=torch.ones(1, 9)))

    assert [name for name in got if name.startswith((KL, GAP))] == []


def test_the_table_names_the_stretches_that_are_measured():
    """Two lists of the same."""
    assert tuple(first for first, _ in NAMED) == POSITIONS
    assert all(f"{prefix}{first}" in BY_NAME for prefix in (KL, GAP) for first in POSITIONS)
