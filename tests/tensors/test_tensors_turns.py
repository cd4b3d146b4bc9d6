"""Entropy and mismatch of each turn: oracle in float64, micro-batches and ranks."""

import dataclasses
import math

import pytest
import torch

from rlwatch.tensors.mergeable import merge, merge_ranks
from rlwatch.tensors.tokens import TokenBatch
from rlwatch.tensors.turns import MOST, observe_turns

pytestmark = pytest.mark.torch
D = torch.float64
TENSORS = ("logp", "mask", "entropy", "rollout_logp", "environment")


def batch(rows=9, width=40, seed=0):
    g = torch.Generator().manual_seed(seed)
    logp = -2 * torch.rand(rows, width, generator=g, dtype=D)
    rollout = logp + 0.1 * torch.randn(rows, width, generator=g, dtype=D)
    inside = torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=g)
    environment = inside & (torch.rand(rows, width, generator=g) < 0.35)
    return TokenBatch(
        logp=logp,
        mask=inside & ~environment,
        entropy=torch.rand(rows, width, generator=g, dtype=D),
        rollout_logp=rollout.masked_fill(torch.rand(rows, width, generator=g) < 0.05, math.nan),
        environment=environment,
    )


def by_hand(b):
    """Token by token: a run of the environment's tokens begins the next turn."""
    entropy, gaps = {}, {}
    for i in range(len(b.mask)):
        turn, before = 0, False
        for j in range(b.mask.shape[1]):
            written = bool(b.environment[i, j])
            turn += written and not before
            before = written
            place = min(turn, MOST - 1) + 1
            if b.mask[i, j]:
                entropy.setdefault(place, []).append(float(b.entropy[i, j]))
                if not math.isnan(float(b.rollout_logp[i, j])):
                    gaps.setdefault(place, []).append(abs(float(b.logp[i, j] - b.rollout_logp[i, j])))
    mean = lambda found: math.fsum(found) / len(found)  # noqa: E731
    return {
        **{f"turns/entropy/{n}": mean(found) for n, found in entropy.items()},
        **{f"turns/absdiff/{n}": mean(found) for n, found in gaps.items()},
    }


def values(stats):
    return {name: stat.value().item() for name, stat in stats.items() if stat.count > 0}


def part(whole, rows):
    return dataclasses.replace(whole, **{name: getattr(whole, name)[rows] for name in TENSORS})


@pytest.mark.parametrize("seed", range(3))
def test_each_turn_is_that_of_a_loop_over_tokens(seed):
    """Up to the last that is measured apart, in which all later ones are."""
    whole = batch(seed=seed)
    exact = by_hand(whole)

    assert values(observe_turns(whole)) == pytest.approx(exact, rel=1e-9)
    assert f"turns/entropy/{MOST}" in exact


@pytest.mark.parametrize("together", [merge, merge_ranks])
def test_micro_batches_and_ranks_give_what_the_whole_batch_gives(together):
    """Turns that one of them lacks are those of the other."""
    whole = batch(seed=7)
    parts = (observe_turns(part(whole, rows)) for rows in (slice(0, 2), slice(2, None)))

    assert values(together(*parts)) == pytest.approx(by_hand(whole), rel=1e-9)


def test_nothing_is_measured_where_the_environment_is_unknown():
    """Turns are not guessed."""
    assert observe_turns(dataclasses.replace(batch(), environment=None)) == {}
