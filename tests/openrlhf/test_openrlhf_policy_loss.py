"""What is read of OpenRLHF's own policy loss, against what that loss itself returns."""

import itertools

import pytest
import torch
from openrlhf.models.loss import PolicyLoss, aggregate_loss
from openrlhf.models.utils import compute_approx_kl, masked_mean
from openrlhf.trainer.ppo_trainer import BasePPOTrainer
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

from rlwatch.integrations.compat import lacking
from rlwatch.integrations.openrlhf import compat
from rlwatch.integrations.openrlhf.batch import loss_stats, token_batch
from rlwatch.tensors.observe import observe

B, A, V = 4, 12, 31


def tensors(seed=0, *, wide=1.0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(B, A, generator=generator) > 0.25
    old = -3 * torch.rand(B, A, generator=generator)
    noise = torch.randn(2, B, A, generator=generator) * 0.3 * wide
    return {
        "log_probs": (old + noise[0]) * mask,
        "old_log_probs": old * mask,
        "advantages": torch.randn(B, A, generator=generator),
        "action_mask": mask.long(),
        "rollout_log_probs": (old + noise[1]) * mask,
    }


def read(loss, given, **experience):
    """Our statistics of one call, as numbers."""
    batch = token_batch(loss, given, Experience(sequences=torch.randint(0, V, (B, A + 3)), **experience), None)
    stats = {**observe(batch), **loss_stats(loss, batch)}
    settled = {name: stat.settle() for name, stat in stats.items()}
    return {name: float(stat.value()) for name, stat in settled.items() if float(stat.count) > 0}


def test_this_openrlhf_is_known_and_has_what_we_wrap():
    """The methods and arguments by which we know it."""
    assert compat.unknown() is None
    assert lacking(BasePPOTrainer, compat.OF_DRIVER) is None
    assert lacking(ActorPPOTrainer, compat.OF_ACTOR) is None


@pytest.mark.parametrize(("dual", "level", "seed"), itertools.product([None, 3.0], ["off", "token", "seq"], range(3)))
def test_clip_fraction_and_kl_are_the_loss_own(dual, level, seed):
    """ppo_clip_ratio, ppo_kl and vllm_kl as OpenRLHF logs them, whatever the correction."""
    given = tensors(seed)
    loss = PolicyLoss(0.2, 0.3, dual_clip=dual, is_correction_level=level)
    _, clip_ratio, ppo_kl, vllm_kl, _ = loss(**given)
    ours = read(loss, given)

    assert ours["ratio/clipfrac"] == pytest.approx(float(clip_ratio), abs=1e-6)
    assert ours["policy/kl_old"] == pytest.approx(float(ppo_kl), abs=1e-6)
    if vllm_kl is not None:
        assert ours["mismatch/kl"] == pytest.approx(float(vllm_kl), abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_to_the_reference_is_openrlhfs(estimator):
    """Where KL is a term of the loss, and far from OpenRLHF's clamp at 10."""
    given = tensors(1)
    reference = given["old_log_probs"] + 0.2 * torch.randn(B, A, generator=torch.Generator().manual_seed(9))
    kl = compute_approx_kl(given["log_probs"], reference, kl_estimator=estimator)
    theirs = masked_mean(kl, given["action_mask"], dim=None)
    ours = read(PolicyLoss(), given, base_action_log_probs=reference)

    assert ours[f"policy/kl_ref_{estimator}"] == pytest.approx(float(theirs), abs=1e-6)


def test_gspos_ratio_is_the_loss_own():
    """The geometric mean per response, which its clip goes by."""
    given = tensors(2)
    loss = PolicyLoss(0.01, 0.01, policy_loss_type="gspo")
    mask = given["action_mask"]
    log_ratio = ((given["log_probs"] - given["old_log_probs"]) * mask).sum(-1) / mask.sum(-1)
    ours = read(loss, given)
    value, *_ = loss(**given)
    ratio = log_ratio.exp().unsqueeze(-1)
    surrogate = torch.min(ratio * given["advantages"], ratio.clamp(0.99, 1.01) * given["advantages"])

    assert float(value) == pytest.approx(float(aggregate_loss(-surrogate, mask, token_level_loss=False)), abs=1e-6)
    assert ours["ratio/seq_mean"] == pytest.approx(float(log_ratio.exp().mean()), abs=1e-6)
    assert ours["ratio/seq_max"] == pytest.approx(float(log_ratio.exp().max()), abs=1e-6)
    assert "ratio/clipfrac" not in ours


def test_nan_in_the_log_probs_is_counted_where_openrlhf_spreads_it():
    """Log-probs are multiplied by the mask, so that a NaN outside stays one: it must not be counted."""
    given = tensors(3)
    inside = int(given["action_mask"][0].nonzero()[0])
    outside = int((given["action_mask"][0] == 0).nonzero()[0])
    given["log_probs"][0, inside] = given["log_probs"][0, outside] = float("nan")

    assert read(PolicyLoss(), given)["nonfinite/logp"] == 1


def test_a_batch_without_a_single_action_measures_nothing():
    """Every response masked: no number is made up."""
    given = tensors(4)
    given["action_mask"] = torch.zeros_like(given["action_mask"])
    ours = read(PolicyLoss(), given)

    assert "policy/logp_mean" not in ours
    assert "ratio/mean" not in ours
