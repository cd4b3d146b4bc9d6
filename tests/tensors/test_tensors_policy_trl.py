"""The statistics of the update are those TRL 1.16 computes with its own code, where it computes them at all."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from rlwatch.tensors.entropy import token_entropy, token_logp_entropy
from rlwatch.tensors.importance import clip_stats, off_policy_masked, sampling_kl, sequence_log_ratio
from rlwatch.tensors.masked import masked_mean
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import TokenBatch

pytest.importorskip("trl")
from trl import GRPOTrainer
from trl.trainer.utils import entropy_from_logits, selective_log_softmax, selective_log_softmax_and_entropy

pytestmark = pytest.mark.torch
D = torch.float64
SIDED = {
    "clip_ratio/low_mean": "ratio/clipfrac_low",
    "clip_ratio/high_mean": "ratio/clipfrac_high",
    "clip_ratio/region_mean": "ratio/clipfrac",
}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(seed=0, rows=6, width=40):
    """Log-probs of four policies, advantages, and a ragged mask, float64."""
    g = generator(seed)
    logp = -2 * torch.rand(rows, width, dtype=D, generator=g)
    near = lambda scale: logp + scale * torch.randn(rows, width, dtype=D, generator=g)  # noqa: E731
    mask = torch.arange(width)[None] < torch.randint(1, width, (rows, 1), generator=g)
    return TokenBatch(
        logp=logp,
        mask=mask,
        entropy=torch.rand(rows, width, dtype=D, generator=g),
        advantages=torch.randn(rows, dtype=D, generator=g),
        old_logp=near(0.3),
        ref_logp=near(0.4),
        clip=(0.2, 0.28),
    )


def trl_metrics(batch, **settings):
    """What ``GRPOTrainer._compute_loss`` logs of ``batch``: the method itself, on an object that has what it reads."""
    trainer = SimpleNamespace(
        **{
            "_get_per_token_logps_and_entropies": lambda *_args, **_kwargs: (batch.logp, batch.entropy, None),
            "aux_loss_enabled": False,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "get_off_policy_mask": GRPOTrainer.get_off_policy_mask,
            "importance_sampling_level": "token",
            "loss_type": "dapo",
            "beta": 0.1,
            "epsilon_low": 0.2,
            "epsilon_high": 0.28,
            "args": SimpleNamespace(use_bias_correction_kl=True, delta=None, steps_per_generation=1),
            "use_vllm": False,
            "model": SimpleNamespace(training=True),
            "current_gradient_accumulation_steps": 1,
            "_entropy_bonus_enabled": False,
            "accelerator": SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1),
            "_metrics": {"train": defaultdict(list)},
        }
        | settings
    )
    ids = torch.zeros_like(batch.mask, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :0],
        "prompt_mask": ids[:, :0],
        "completion_ids": ids,
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old_logp,
        "ref_per_token_logps": batch.ref_logp,
        "num_items_in_batch": batch.mask.sum(),
    }
    GRPOTrainer._compute_loss(trainer, None, inputs)
    return {name: values[-1] for name, values in trainer._metrics["train"].items()}


def numbers(stats):
    return {name: stat.value().item() for name, stat in stats.items()}


@pytest.mark.parametrize("seed", range(3))
def test_entropy_kl_and_sided_clip_fractions_are_those_a_grpo_step_logs(seed):
    """TRL's ``kl`` is the weighted estimate, and its fractions those of the clip that binds."""
    batch = drawn(seed)
    theirs, ours = trl_metrics(batch), numbers(observe(batch))

    assert ours["policy/entropy"] == pytest.approx(theirs["entropy"], rel=1e-12)
    assert ours["policy/kl_ref_weighted"] == pytest.approx(theirs["kl"], rel=1e-12)
    for name, canonical in SIDED.items():
        assert ours[canonical] == pytest.approx(theirs[name], rel=1e-12)
    assert theirs["clip_ratio/low_mean"] > 0 < theirs["clip_ratio/high_mean"]


def test_without_the_correction_their_kl_is_k3():
    """The same name means another number then."""
    batch = drawn()
    theirs = trl_metrics(batch, args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1))

    assert numbers(observe(batch))["policy/kl_ref_k3"] == pytest.approx(theirs["kl"], rel=1e-12)


def test_a_response_that_is_clipped_as_a_whole_counts_once():
    """GSPO: geometric means, one flag a response."""
    batch = drawn()
    theirs = trl_metrics(
        batch, loss_type="grpo", importance_sampling_level="sequence", epsilon_low=3e-3, epsilon_high=4e-3
    )
    s = sequence_log_ratio(batch.logp, batch.old_logp, batch.mask, per_token=True).unsqueeze(1)

    ours = numbers(clip_stats(s, batch.token_advantages, torch.ones(6, 1), low=3e-3, high=4e-3))

    assert {name: ours[canonical] for name, canonical in SIDED.items()} == pytest.approx(
        {name: theirs[name] for name in SIDED}
    )
    assert theirs["clip_ratio/region_mean"] > 0


def test_the_capped_weight_of_cispo():
    """epsilon_high is the cap itself there."""
    batch = drawn()
    theirs = trl_metrics(batch, loss_type="cispo", epsilon_high=1.3)
    x = batch.logp - batch.old_logp

    ours = numbers(clip_stats(x, batch.token_advantages, batch.mask, low=float("inf"), high=0.3))

    assert ours["ratio/clipfrac"] == pytest.approx(theirs["cispo_clip_ratio"], rel=1e-12)
    assert theirs["cispo_clip_ratio"] > 0


@pytest.mark.parametrize("delta", [-0.1, 0.0, 0.02])
@pytest.mark.parametrize("seed", range(3))
def test_the_off_policy_mask_drops_the_same_responses(seed, delta):
    """Also where the engine could not score some tokens."""
    batch = drawn(seed, rows=30)
    sampling = torch.where(torch.rand(batch.logp.shape, generator=generator(9)) < 0.05, torch.nan, batch.old_logp)
    keep = GRPOTrainer.get_off_policy_mask(batch.token_advantages, batch.logp, sampling, batch.mask.long(), delta)

    dropped = off_policy_masked(sampling_kl(batch.logp, sampling, batch.mask), batch.advantages, delta)

    assert torch.equal(dropped, 1.0 - keep.squeeze(1).float())
    assert 0 < dropped.sum() < 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_probs_and_entropy_of_logits_are_theirs(dtype):
    """To the rounding of the type."""
    logits = (3 * torch.randn(4, 5, 1000, dtype=D, generator=generator())).to(dtype)
    ids = torch.randint(0, 1000, (4, 5), generator=generator())

    logp, entropy = token_logp_entropy(logits, ids)

    tolerance = {"rtol": 1e-5, "atol": 2e-5} if dtype is torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(logp, selective_log_softmax(logits, ids), **tolerance)
    torch.testing.assert_close(entropy, entropy_from_logits(logits), **tolerance)
    torch.testing.assert_close(entropy, token_entropy(logits))
    theirs = selective_log_softmax_and_entropy(logits, ids, temperature=0.7)
    for got, expected in zip(token_logp_entropy(logits, ids, temperature=0.7), theirs, strict=True):
        torch.testing.assert_close(got, expected, **tolerance)


def test_of_half_precision_logits_ours_are_closer_to_the_truth():
    """TRL rounds to bfloat16 on the way (off its fused kernel); here nothing is."""
    logits = (3 * torch.randn(4, 5000, dtype=D, generator=generator())).bfloat16()
    truth = entropy_from_logits(logits.double())

    ours = (token_entropy(logits).double() - truth).abs().max()
    theirs = (entropy_from_logits(logits).double() - truth).abs().max()

    assert ours < 1e-5
    assert theirs > 1000 * ours


def test_a_masked_mean_is_a_mean_over_tokens_in_both():
    """Not over responses: the longest counts most."""
    batch = drawn()

    assert masked_mean(batch.entropy, batch.mask).item() == pytest.approx(trl_metrics(batch)["entropy"], rel=1e-12)
