"""The statistics of the update are those verl 0.9.1 computes with its own code, where it computes them at all."""

import pytest
import torch

pytest.importorskip("verl")

from verl.trainer.ppo.core_algos import get_policy_loss_fn, kl_penalty
from verl.utils import torch_functional
from verl.workers.config import ActorConfig, PolicyLossConfig

from rlwatch.tensors.entropy import token_entropy, token_logp_entropy
from rlwatch.tensors.importance import clip_stats, sequence_log_ratio
from rlwatch.tensors.masked import masked_mean
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import TokenBatch

pytestmark = pytest.mark.torch
D = torch.float64
LOW, HIGH, DUAL = 0.2, 0.28, 1.5


def config(**settings):
    """An actor's, with the bounds above."""
    bounds = {"clip_ratio": LOW, "clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": DUAL}
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **(bounds | settings))


def drawn(seed=0, rows=6, width=60):
    """Log-probs, a ragged mask, and one advantage a response, as verl's (B, T), float64."""
    g = torch.Generator().manual_seed(seed)
    logp = -2 * torch.rand(rows, width, dtype=D, generator=g)
    mask = torch.arange(width)[None] < torch.randint(1, width, (rows, 1), generator=g)
    advantages = torch.randn(rows, 1, dtype=D, generator=g).expand(rows, width) * mask
    return TokenBatch(
        logp=logp,
        mask=mask,
        advantages=advantages,
        old_logp=logp + 0.3 * torch.randn(rows, width, dtype=D, generator=g),
        ref_logp=logp + 0.5 * torch.randn(rows, width, dtype=D, generator=g),
        clip=(LOW, HIGH),
        dual_clip=DUAL,
    )


def loss_of(name, batch, **settings):
    """(loss, metrics) of verl's registered policy loss ``name``."""
    arguments = (batch.old_logp, batch.logp.clone(), batch.advantages.clone(), batch.mask.long())
    return get_policy_loss_fn(name)(*arguments, config=config(**settings))


def metrics_of(name, batch, **settings):
    return loss_of(name, batch, **settings)[1]


def numbers(stats):
    return {name: stat.value().item() for name, stat in stats.items()}


@pytest.mark.parametrize("seed", range(4))
def test_the_clip_fractions_and_the_kl_of_the_vanilla_loss(seed):
    """``pg_clipfrac``, ``pg_clipfrac_lower`` (the dual clip) and ``ppo_kl``."""
    batch = drawn(seed)
    theirs, ours = metrics_of("vanilla", batch), numbers(observe(batch))

    assert ours["ratio/clipfrac"] == pytest.approx(theirs["actor/pg_clipfrac"], rel=1e-7)
    assert ours["ratio/clipfrac_dual"] == pytest.approx(theirs["actor/pg_clipfrac_lower"], rel=1e-7)
    assert ours["policy/kl_old"] == pytest.approx(theirs["actor/ppo_kl"], rel=1e-7)
    assert theirs["actor/pg_clipfrac"] > 0


def test_the_dual_clip_is_seen_by_both():
    """A batch where it binds at all."""
    assert any(metrics_of("vanilla", drawn(seed))["actor/pg_clipfrac_lower"] > 0 for seed in range(4))


@pytest.mark.parametrize("seed", range(3))
def test_a_response_that_gspo_clips_counts_with_its_tokens(seed):
    """verl's fraction is a token mean of flags that are equal within a response."""
    batch = drawn(seed)
    theirs = metrics_of("gspo", batch, clip_ratio_low=0.01, clip_ratio_high=0.02)
    s = sequence_log_ratio(batch.logp, batch.old_logp, batch.mask, per_token=True).unsqueeze(1)

    ours = numbers(clip_stats(s, batch.advantages[:, :1], batch.mask, low=0.01, high=0.02))

    assert ours["ratio/clipfrac"] == pytest.approx(theirs["actor/pg_clipfrac"], rel=1e-7)
    assert theirs["actor/pg_clipfrac"] > 0


def wide(seed):
    """Log-probs and advantages spread enough for covariances beyond 1."""
    batch = drawn(seed, rows=8, width=400)
    return TokenBatch(
        logp=3 * batch.logp,
        old_logp=3 * batch.logp + 0.1 * (batch.old_logp - batch.logp),
        mask=batch.mask,
        advantages=2 * batch.advantages,
        clip=(LOW, HIGH),
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ratio", [2e-4, 0.02, 1.0])
def test_clip_cov_drops_as_many_tokens_as_there_are_candidates_up_to_its_ratio(seed, ratio):
    """Which ones is random; how many is not: min(candidates, max(1, floor(ratio N))) over N."""
    batch = wide(seed)
    theirs = metrics_of("clip_cov", batch, policy_loss=PolicyLossConfig(clip_cov_ratio=ratio))

    n = int(batch.mask.sum())
    candidates = numbers(observe(batch))["policy/cov_candidates"] * n
    dropped = min(round(candidates), max(1, int(ratio * n)))

    assert candidates == pytest.approx(round(candidates))
    assert dropped / n == pytest.approx(theirs["actor/pg_clipfrac"], rel=1e-6)
    assert dropped > 0


@pytest.mark.parametrize(("name", "canonical"), [("k1", "k1"), ("k2", "k2"), ("low_var_kl", "k3")])
def test_estimators_of_kl_to_the_reference(name, canonical):
    """Token means, where verl clamps nothing."""
    batch = drawn()
    theirs = masked_mean(kl_penalty(batch.logp, batch.ref_logp, name), batch.mask)

    assert numbers(observe(batch))[f"policy/kl_ref_{canonical}"] == pytest.approx(theirs.item(), rel=1e-10)


def test_the_saturated_tokens_are_those_without_a_gradient_of_theirs():
    """Over the whole range of log-ratios."""
    x = torch.linspace(-30, 30, 4001, dtype=D)
    logp = x.clone().requires_grad_()
    kl_penalty(logp, torch.zeros_like(logp), "low_var_kl").sum().backward()
    batch = TokenBatch(logp=x[None], ref_logp=torch.zeros(1, 4001, dtype=D), mask=torch.ones(1, 4001))

    flat = (logp.grad == 0) & (x != 0)
    assert numbers(observe(batch))["policy/kl_ref_saturated"] == pytest.approx(flat.double().mean().item())


def test_log_probs_and_entropy_of_logits_are_theirs():
    """To the rounding of float32, in which verl computes its chunked entropy."""
    logits = 3 * torch.randn(40, 1000, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(40)

    logp, entropy = token_logp_entropy(logits, ids)

    torch.testing.assert_close(logp, torch_functional.logprobs_from_logits(logits, ids), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(entropy, torch_functional.entropy_from_logits(logits), rtol=1e-5, atol=2e-5)
    half = logits.bfloat16()
    torch.testing.assert_close(
        token_entropy(half), torch_functional.entropy_from_logits_with_chunking(half), rtol=1e-5, atol=2e-5
    )
