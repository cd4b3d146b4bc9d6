"""What the taps of a worker measure, on verl's real engine, loss and registry of losses."""

import logging
import math

import numpy as np
import pytest
import tiny_verl as tiny
import torch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss

from rlwatch.distributions import distributions
from rlwatch.integrations.verl.batch import Clipping
from rlwatch.integrations.verl.taps import TAPPED


@pytest.fixture(scope="module")
def worker(policy):
    worker = tiny.make_worker(policy)
    tiny.attach(worker)
    yield worker
    tiny.untap()


@pytest.fixture(autouse=True)
def nothing_left(worker):
    """Each test begins with an empty tally."""
    tiny.measured(worker)


def test_one_update_on_policy_measures_what_verl_logs(worker):
    """One micro-batch, one mini-batch: verl's own numbers are of the same tokens, so they are equal."""
    data = tiny.batch_of(1)

    theirs = tiny.update(worker, data, mini_batch_size=8, global_batch_size=8, micro_batch_size_per_gpu=8)
    ours = tiny.measured(worker).metrics

    assert ours["policy/kl_old"] == pytest.approx(theirs["actor/ppo_kl"][0], abs=1e-6)
    assert ours["ratio/clipfrac"] == pytest.approx(theirs["actor/pg_clipfrac"][0], abs=1e-6)
    assert ours["ratio/clipfrac_dual"] == pytest.approx(theirs["actor/pg_clipfrac_lower"][0], abs=1e-6)
    assert ours["optim/grad_norm"] == pytest.approx(theirs["grad_norm"][0], rel=1e-6)


def test_the_clip_of_dual_clip_ppo_is_seen_where_it_binds(worker):
    """Old log-probs so low that ratios are huge: every token with A < 0 is beyond clip_ratio_c = 3."""
    rows = [torch.full((4,), -8.0) for _ in range(8)]
    advantages = [torch.tensor([1.0, -1.0, -1.0, -1.0]) for _ in range(8)]

    theirs = tiny.update(worker, tiny.batch_of(2, lengths=[4] * 8, old_log_probs=rows, advantages=advantages))
    ours = tiny.measured(worker).metrics

    assert ours["ratio/clipfrac_dual"] == pytest.approx(0.75)
    assert np.mean(theirs["actor/pg_clipfrac_lower"]) == pytest.approx(0.75)
    assert ours["ratio/clipfrac_high"] == pytest.approx(0.25)


def test_ragged_micro_batches_weigh_tokens_not_batches(worker):
    """The exact token mean over all micro- and mini-batches: verl's mean of means is another number."""
    data = tiny.batch_of(3, lengths=[1, 1, 1, 1, 6, 6, 6, 6])
    old, advantages = data["old_log_probs"].values(), data["advantages"].values()

    theirs = tiny.update(worker, data)
    ours = tiny.measured(worker).metrics

    assert ours["adv/mean"] == pytest.approx(advantages.mean().item(), abs=1e-6)
    assert ours["policy/kl_old"] == pytest.approx(old.mean().item() - ours["policy/logp_mean"], abs=1e-5)
    assert abs(ours["policy/kl_old"] - np.mean(theirs["actor/ppo_kl"])) > 1e-3


def test_each_step_of_several_counts(worker):
    """Two mini-batches are two optimizer steps: the last norm, the largest, and the share that was skipped."""
    theirs = tiny.update(worker, tiny.batch_of(4))
    ours = tiny.measured(worker).metrics

    assert ours["optim/grad_norm"] == pytest.approx(theirs["grad_norm"][-1], rel=1e-6)
    assert ours["optim/grad_norm_max"] == pytest.approx(max(theirs["grad_norm"]), rel=1e-6)
    assert ours["optim/step_skipped"] == 0.0


def test_layers_recombine_to_the_unclipped_norm(worker):
    """Read before the engine clips at 1.0: the squares of all layers add up to the norm it returns."""
    theirs = tiny.update(worker, tiny.batch_of(5, advantages=[50 * torch.randn(4) for _ in range(8)], lengths=[4] * 8))
    ours = tiny.measured(worker).metrics
    layers = [value for name, value in ours.items() if name.startswith("grad_layer/")]

    assert {"grad_layer/model.layers.0", "grad_layer/model.layers.1"} <= ours.keys()
    assert math.sqrt(sum(value**2 for value in layers)) == pytest.approx(theirs["grad_norm"][-1], rel=1e-5)
    assert theirs["grad_norm"][-1] > 1.0


def test_a_pass_without_gradients_is_no_update(worker):
    """Recomputing old log-probs runs the same engine, and is not measured."""
    tiny.log_probs(worker)
    tiny.log_probs(worker, ref=True)
    with torch.no_grad():
        row = torch.zeros(1, 3)
        POLICY_LOSS_REGISTRY["vanilla"](row, row, row, row + 1, config=worker.loss_fn.keywords["config"])

    assert tiny.measured(worker).metrics == {}


def test_a_nan_is_counted_where_it_is_and_the_skipped_step_too(worker):
    """A NaN advantage makes loss and gradient NaN; verl skips the step, and its clip fraction looks healthy."""
    rows = [torch.zeros(4) for _ in range(8)]
    rows[0][1] = torch.nan
    before = tiny.weights_of(worker)

    theirs = tiny.update(worker, tiny.batch_of(6, lengths=[4] * 8, advantages=rows))
    ours = tiny.measured(worker).metrics

    assert ours["nonfinite/advantage"] == 1
    assert ours["nonfinite/loss"] == 1
    assert ours["nonfinite/logp"] == 0
    assert ours["nonfinite/grad"] > 0
    assert ours["optim/step_skipped"] == 0.5
    assert math.isnan(ours["adv/mean"])
    assert math.isnan(ours["optim/grad_norm_max"])
    assert np.isfinite(theirs["actor/pg_clipfrac"]).all()
    assert any(not torch.equal(before[n], w) for n, w in tiny.weights_of(worker).items()), "the other step was made"


def test_masked_tokens_do_not_exist(worker):
    """What lies outside the response mask is not measured, be it NaN; an all-masked row has no tokens."""
    masks = [torch.tensor([1, 1, 0, 0]) for _ in range(7)] + [torch.zeros(4, dtype=torch.long)]
    data = tiny.batch_of(7, lengths=[4] * 8, masks=masks)
    data["old_log_probs"].values().view(8, 4)[:, 2:] = torch.nan
    inside = data["advantages"].values().view(8, 4)[:7, :2]

    tiny.update(worker, data)
    ours = tiny.measured(worker).metrics

    assert ours["nonfinite/old_logp"] == 0
    assert math.isfinite(ours["policy/kl_old"])
    assert ours["adv/mean"] == pytest.approx(inside.mean().item(), abs=1e-6)


def test_a_micro_batch_without_any_token_measures_nothing(worker):
    """Every response masked away: no ratio exists, and none is made up."""
    nothing = [torch.zeros(4, dtype=torch.long) for _ in range(8)]

    tiny.update(worker, tiny.batch_of(8, lengths=[4] * 8, masks=nothing))
    ours = tiny.measured(worker).metrics

    assert "ratio/mean" not in ours
    assert "policy/kl_old" not in ours


def test_extreme_tokens_carry_their_ids(worker):
    """The loss function is given the responses: a token far out is found by id, row and position."""
    old = [torch.full((4,), -2.8) for _ in range(8)]
    old[2][3] = -9.0
    data = tiny.batch_of(9, lengths=[4] * 8, old_log_probs=old)

    tiny.update(worker, data, mini_batch_size=8, global_batch_size=8, micro_batch_size_per_gpu=8)
    spikes, ratios = tiny.measured(worker).spikes

    assert distributions([ratios])["log_ratio"].tokens.tolist() == [32]
    assert (spikes.columns["sequence"][0], spikes.columns["position"][0]) == (2, 3)
    assert spikes.columns["token_id"][0] == data["responses"].unbind()[2][3]
    assert spikes.columns["ratio"][0] > 100
    assert "rollout_logp" in spikes.columns


def test_every_loss_of_the_registry_is_tapped(worker):
    """And so is one that is registered later, from the next step on."""
    taps = worker.rlwatch.taps
    assert all(getattr(loss, TAPPED) is taps for loss in POLICY_LOSS_REGISTRY.values())

    @register_policy_loss("late")
    def late(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, **kwargs):
        return POLICY_LOSS_REGISTRY["vanilla"](
            old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, **kwargs
        )

    tiny.measured(worker)
    assert getattr(POLICY_LOSS_REGISTRY["late"], TAPPED) is taps


@pytest.mark.parametrize("mode", ["late", "gspo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "sapo", "dppo_tv"])
def test_each_loss_is_measured_once_per_token(worker, mode, monkeypatch):
    """A loss that calls another of the registry is one loss; the clip fraction is told where there is that clip."""
    config = worker.loss_fn.keywords["config"]
    object.__setattr__(config.policy_loss, "loss_mode", mode)
    try:
        tiny.update(worker, tiny.batch_of(10))
    finally:
        object.__setattr__(config.policy_loss, "loss_mode", "vanilla")
    once = tiny.measured(worker)
    tokens = int(tiny.batch_of(10)["response_mask"].values().sum())

    assert once.metrics["ratio/mean"] > 0
    assert tokens == counted(once)
    assert ("ratio/clipfrac" in once.metrics) == (mode == "clip_cov")


def counted(whole):
    """Tokens behind ``adv/mean``: from mean and sum, which the test knows."""
    data = tiny.batch_of(10)
    return round(data["advantages"].values().sum().item() / whole.metrics["adv/mean"])


@pytest.mark.parametrize(
    ("mode", "clip", "dual"),
    [("vanilla", (0.1, 0.3), 3.0), ("clip_cov", (0.1, 0.3), None), ("gspo", None, None), ("no such", None, None)],
)
def test_the_clip_is_read_as_the_loss_reads_it(worker, mode, clip, dual):
    """Low and high ends apart; None where the loss has no clip of token ratios."""
    config = worker.loss_fn.keywords["config"]
    given = dict(config)
    given = type("Config", (), {**given, "clip_ratio_low": 0.1, "clip_ratio_high": 0.3})()

    assert Clipping.of(mode, given) == Clipping(clip, dual)


def test_one_end_of_the_clip_may_be_left_out():
    """verl then takes ``clip_ratio``."""
    given = type("Config", (), {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": 0.28})()

    assert Clipping.of("vanilla", given).clip == (0.2, 0.28)
    assert Clipping.of("vanilla", None) == Clipping()


@pytest.fixture
def another(policy, worker):
    """A worker of its own: its taps may fail for good."""
    other = tiny.make_worker(policy)
    tiny.attach(other)
    yield other
    tiny.measured(worker)  # takes the registry of losses back


def test_what_our_tap_raises_never_reaches_training(another, monkeypatch, caplog):
    """Training goes on with the same numbers; one warning, and after three errors the tap is off."""
    monkeypatch.setattr("rlwatch.integrations.verl.taps.loss_batch", broken)
    with caplog.at_level(logging.WARNING, "rlwatch"):
        theirs = tiny.update(another, tiny.batch_of(11))

    assert np.isfinite(theirs["grad_norm"]).all()
    assert caplog.text.count("could not read policy loss (training goes on)") == 1
    assert not another.rlwatch.taps.error_boundary.works("policy loss")
    assert another.rlwatch_collect(1)["errors"] == 3


def broken(*args):
    raise RuntimeError("a bug of ours")


def test_a_loss_with_another_signature_goes_unmeasured_but_works(another, caplog):
    """A user's loss need not name its arguments as verl does."""

    def unusual(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights):
        return (log_prob * 0).sum() + log_prob.mean(), {}

    def stranger(**everything):
        return unusual(**everything)

    POLICY_LOSS_REGISTRY["stranger"] = stranger
    tiny.measured(another)
    config = another.loss_fn.keywords["config"]
    object.__setattr__(config.policy_loss, "loss_mode", "stranger")
    try:
        tiny.update(another, tiny.batch_of(12))
    finally:
        object.__setattr__(config.policy_loss, "loss_mode", "vanilla")

    assert tiny.measured(another).metrics["nonfinite/loss"] == 0


def test_what_nobody_asks_for_is_thrown_away(another, caplog):
    """A driver that never collects must not fill the worker's memory."""
    another.rlwatch.taps.uncollected = 8
    with caplog.at_level(logging.WARNING, "rlwatch"):
        theirs = tiny.update(another, tiny.batch_of(13))

    assert np.isfinite(theirs["grad_norm"]).all()
    assert "nobody asks for what is measured" in caplog.text
    assert another.rlwatch.taps.tokens < int(tiny.batch_of(13)["response_mask"].values().sum())


def test_a_rank_with_the_same_tokens_tells_of_its_gradients_only(worker, monkeypatch):
    """Sequence parallelism: tokens would count twice, but its shards of the gradients are its own."""
    tiny.update(worker)
    monkeypatch.setattr(worker.actor.engine, "is_mp_src_rank_with_outputs", lambda: False)

    names = tiny.measured(worker).metrics.keys()

    assert {"grad_layer/model.layers.0", "nonfinite/grad"} & names
    assert not {"ratio/mean", "adv/mean", "optim/grad_norm", "optim/step_skipped"} & names


def test_other_engines_tell_their_total_norm_only(policy, worker):
    """Megatron has no gradients per parameter; automodel's become what is clipped within its step."""
    other = tiny.make_worker(policy)
    other.config.actor.strategy = "automodel"
    tiny.attach(other)
    try:
        theirs = tiny.update(other)
        ours = tiny.measured(other).metrics
    finally:
        tiny.measured(worker)  # takes the registry of losses back

    assert ours["optim/grad_norm"] == pytest.approx(theirs["grad_norm"][-1], rel=1e-6)
    assert ours["ratio/mean"] > 0
    assert not [name for name in ours if name.startswith("grad_layer/")]


def test_weights_that_a_sync_sends_are_compared_with_those_that_are_trained(policy):
    """Of FSDP2's shards on this rank, after the cast to what is sent; a layer of the second sync is that of the first."""
    other = tiny.make_worker(policy)
    engine, kept = other.actor.engine, {}
    original = engine.get_per_tensor_param

    def partial(**kwargs):
        pairs, adapter = original(**kwargs)
        old = {name: kept.setdefault(name, tensor.clone()) for name, tensor in pairs if ".layers.1." in name}
        return ((name, old.get(name, tensor)) for name, tensor in original(**kwargs)[0]), adapter

    engine.get_per_tensor_param = partial
    tiny.attach(other)
    seen = []
    for _ in range(2):
        list(engine.get_per_tensor_param()[0])
        seen.append(tiny.measured(other).metrics)
        tiny.update(other, tiny.batch_of(1))
        tiny.measured(other)

    assert seen[0]["mismatch/weights_differ"] == 0.0
    assert seen[0]["mismatch/weights_compared"] == 1.0
    assert seen[1]["mismatch/weights_differ"] > 0.0
    wrong = {name for name, value in seen[1].items() if name.startswith("mismatch/weights_differ/") and value > 0}
    assert wrong == {"mismatch/weights_differ/model.layers.1"}
