"""Responses too far from the policy that sampled them, and how old they are."""

import math

import pytest
import torch

from rlwatch.tensors.advantages import response_advantages
from rlwatch.tensors.importance import off_policy_masked, off_policy_stats, sampling_kl
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import TokenBatch

pytestmark = pytest.mark.torch
D = torch.float64
OLD = torch.tensor([[-0.5, -0.7, -1.0]], dtype=D)
NEW = torch.tensor([[-1.0, -1.0, -1.7]], dtype=D)
ONES = torch.ones(1, 3)


def numbers(stats):
    return {name: stat.value().item() for name, stat in stats.items()}


def test_the_distance_of_the_worked_example():
    """Half a nat per token."""
    assert sampling_kl(NEW, OLD, ONES).item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("kl", "advantage", "delta", "dropped"),
    [(0.5, -1.0, 0.49, 1.0), (0.5, -1.0, 0.5, 0.0), (0.5, 1.0, 0.1, 0.0), (0.5, 0.0, 0.1, 0.0), (-0.5, -1.0, 0.1, 0.0)],
)
def test_only_a_negative_response_beyond_the_threshold_is_dropped(kl, advantage, delta, dropped):
    """At the threshold it is kept; a response that became likelier always is."""
    got = off_policy_masked(torch.tensor([kl], dtype=D), torch.tensor([advantage], dtype=D), delta)

    assert got.tolist() == [dropped]


def rows():
    """Distances 0.5, 0.5, 2, 0 per token; advantages -1, 1, -1, -1."""
    logp = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-3.0, -99.0], [-1.0, -1.0]], dtype=D)
    sampling = torch.tensor([[-0.5, -0.5], [-0.5, -0.5], [-1.0, -1.0], [-1.0, -1.0]], dtype=D)
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1]])
    return {"logp": logp, "mask": mask, "advantages": torch.tensor([-1.0, 1.0, -1.0, -1.0], dtype=D)}, sampling


def test_what_the_mask_drops_of_all_and_of_negative_responses():
    """At 0.4: two of four, two of three; the farthest negative one is 2 nats per token away."""
    columns, sampling = rows()
    got = numbers(off_policy_stats(columns["logp"], sampling, columns["advantages"], columns["mask"], delta=0.4))

    assert got == pytest.approx({"offpolicy/masked": 0.5, "offpolicy/masked_neg": 2 / 3, "offpolicy/kl_neg_max": 2.0})


def test_the_losses_own_threshold_is_used_and_half_a_nat_without_one():
    """0.5 keeps the response that lies just there."""
    columns, sampling = rows()

    assert numbers(observe(TokenBatch(**columns, old_logp=sampling)))["offpolicy/masked"] == 0.25
    own = TokenBatch(**columns, old_logp=sampling, off_policy_delta=0.4)
    assert numbers(observe(own))["offpolicy/masked"] == 0.5


def test_what_the_engine_recorded_counts_before_the_recomputed_policy():
    """So that staleness and mismatch both show."""
    columns, sampling = rows()
    got = numbers(observe(TokenBatch(**columns, old_logp=columns["logp"], rollout_logp=sampling)))

    assert got["offpolicy/kl_neg_max"] == 2.0


def test_without_a_sampling_policy_or_advantages_nothing_is_masked_nor_measured():
    """Absent, not 0."""
    columns, sampling = rows()
    no_advantage = TokenBatch(logp=columns["logp"], mask=columns["mask"], old_logp=sampling)

    for batch in (TokenBatch(**columns), no_advantage):
        assert not {name for name in observe(batch) if name.startswith("offpolicy/")}


def test_a_token_the_engine_could_not_score_adds_nothing():
    """As in TRL: the mean is still over all tokens; a NaN of the trainer shows."""
    unscored = torch.tensor([[-0.5, math.nan, -1.0]], dtype=D)

    assert sampling_kl(NEW, unscored, ONES).item() == pytest.approx(1.2 / 3)
    assert sampling_kl(unscored, OLD, ONES).isnan().all()


def test_a_response_of_which_nothing_was_scored_is_not_measured():
    """Rather than as close as can be."""
    unscored = torch.full((1, 3), math.nan, dtype=D)
    stats = observe(TokenBatch(logp=NEW, rollout_logp=unscored, mask=ONES, advantages=torch.tensor([-1.0])))

    assert {stat.count.item() for name, stat in stats.items() if name.startswith("offpolicy/")} == {0}


def test_a_nan_of_the_trainers_own_old_policy_is_not_an_unscored_token():
    """Only an engine may have left a token out."""
    old = torch.tensor([[-0.5, math.nan, -1.0]], dtype=D)
    got = numbers(observe(TokenBatch(logp=NEW, old_logp=old, mask=ONES, advantages=torch.tensor([-1.0]))))

    assert math.isnan(got["offpolicy/masked"])
    assert math.isnan(got["offpolicy/kl_neg_max"])


@pytest.mark.parametrize("broken", ["logp", "advantages"])
def test_a_broken_response_does_not_pass_for_kept(broken):
    """NaN compares false: the rates are NaN, not low."""
    columns, sampling = rows()
    columns[broken][3] = math.nan

    got = numbers(off_policy_stats(columns["logp"], sampling, columns["advantages"], columns["mask"], delta=0.4))

    assert all(math.isnan(value) for value in got.values())


def test_responses_without_tokens_do_not_count():
    """Neither among all nor among the negative ones; their garbage does not show."""
    columns, sampling = rows()
    columns["mask"][3] = 0
    columns["logp"][3] = math.nan
    stats = off_policy_stats(columns["logp"], sampling, columns["advantages"], columns["mask"], delta=0.4)

    assert {name: stat.count.item() for name, stat in stats.items()} == {
        "offpolicy/masked": 3,
        "offpolicy/masked_neg": 2,
        "offpolicy/kl_neg_max": 2,
    }
    assert numbers(stats)["offpolicy/masked"] == pytest.approx(2 / 3)


def test_a_response_has_the_mean_advantage_of_its_tokens():
    """Or its own, in either shape; masked tokens do not count."""
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    per_token = torch.tensor([[1.0, 3.0, -99.0], [0.0, -1.0, -2.0]], dtype=D)

    assert response_advantages(per_token, mask).tolist() == [2.0, -1.0]
    assert response_advantages(torch.tensor([1.0, -1.0]), mask).tolist() == [1.0, -1.0]
    assert response_advantages(torch.tensor([[1.0], [-1.0]]), mask).tolist() == [1.0, -1.0]
    assert response_advantages(per_token, torch.zeros(2, 3)).isnan().all()


def test_one_token_a_response_is_not_mistaken_for_one_advantage_a_response():
    """Shapes (B, 1) of both kinds agree where the token counts."""
    a = torch.tensor([[1.0], [-2.0]])

    assert response_advantages(a, torch.ones(2, 1)).tolist() == [1.0, -2.0]


def test_staleness_counts_versions_of_responses_with_tokens():
    """Mean and oldest; whole numbers of any type."""
    batch = TokenBatch(
        logp=-torch.ones(3, 2), mask=torch.tensor([[1, 1], [1, 0], [0, 0]]), staleness=torch.tensor([0, 3, 50])
    )
    got = numbers(observe(batch))

    assert (got["staleness/mean"], got["staleness/max"], got["staleness/stale_frac"]) == (1.5, 3.0, 0.5)
