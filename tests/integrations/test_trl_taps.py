"""What the taps measure in real GRPO and RLOO training."""

import math

import pytest
import torch
from fake_vllm import install
from peft import LoraConfig
from tiny_trl import (
    COMMON,
    FakeRun,
    GRPOTrainer,
    RLOOTrainer,
    dataset,
    digits,
    make_trainer,
    model_on_disk,
    tokenizer,
)

from rlwatch.errors import ConfigError
from rlwatch.integrations.trl import watch
from rlwatch.integrations.trl.batch import raw_advantages
from rlwatch.metrics import LAYER_PREFIX, metric_of, resolve

pytestmark = pytest.mark.torch

ALWAYS = {
    "policy/entropy", "policy/entropy_p10", "policy/entropy_p90", "policy/logp_mean", "policy/logp_min",
    "policy/vocab_size", "policy/kl_coef", "policy/cov", "loss/raw", "nonfinite/loss", "nonfinite/logp",
    "nonfinite/advantage", "nonfinite/grad", "optim/grad_norm", "adv/mean", "adv/std", "adv/max", "adv/min",
    "text/repetition", "text/id0_frac",
}  # fmt: skip
"""Measured in every step."""
SUBJECTS = {
    "reference": {"policy/kl_ref_k1", "policy/kl_ref_k2", "policy/kl_ref_k3", "nonfinite/ref_logp"},
    "old policy": {
        "ratio/mean", "ratio/max", "ratio/min", "ratio/ess", "ratio/chi2", "ratio/clipfrac_low", "ratio/clipfrac_high",
        "policy/kl_old", "nonfinite/old_logp",
    },
    "engine": {
        "mismatch/kl", "mismatch/k3", "mismatch/logp_absdiff", "mismatch/logp_absdiff_max", "mismatch/ess",
        "nonfinite/rollout_logp",
    },
    "generation": {
        "reward/mean", "reward/std", "reward/zero_std_frac", "reward/group_std", "len/mean", "len/max", "len/min",
        "len/clipped", "len/p99",
    },
}  # fmt: skip
"""Measured where their subject exists: a few names that must be there."""
MARKS = {
    "reference": ("policy/kl_ref", "nonfinite/ref"),
    "old policy": ("ratio/", "policy/kl_old", "nonfinite/old", "offpolicy/", "lld/displacement"),
    "engine": ("mismatch/", "nonfinite/rollout", "correction/", "routing/"),
    "generation": ("reward/", "len/m", "len/p", "len/clipped", "len/empty", "len/gini"),
}
"""How every name of a subject begins: none may be there without it."""


def subjects(metrics):
    """Of what a step was measured; fails if a name that must be there is missing."""
    found = {s for s, marks in MARKS.items() if any(name.startswith(marks) for name in metrics)}
    for subject in found:
        assert set(metrics) >= SUBJECTS[subject], subject
    assert set(metrics) >= ALWAYS
    return found


def names(metrics):
    return {name for name in metrics if not name.startswith(LAYER_PREFIX)}


class Recording(GRPOTrainer):
    """A user's subclass that keeps what its loss saw: the taps must agree with it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = {}

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        out = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.forward = out
        return out

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        logp, entropy = self.forward[0].detach(), self.forward[1].detach()
        step = self.state.global_step + 1
        self.seen.setdefault(step, []).append((logp, entropy, inputs))
        return loss


def tokens(batches, pick):
    """All response tokens of a step's micro-batches, as one float64 vector."""
    return torch.cat(
        [pick(logp, entropy, inputs)[inputs["completion_mask"].bool()] for logp, entropy, inputs in batches]
    ).double()


def test_on_policy_steps_report_everything_that_exists_and_nothing_else(watched):
    """No old policy: the ratio is 1 by definition, so no ratio; no engine, no mismatch; no beta, no KL."""
    _, run = watched(max_steps=2)

    assert [subjects(m) for m in run.taps().values()] == [{"generation"}] * 2


def test_reuse_steps_report_ratios_and_no_second_rollout(watched):
    """With two iterations a batch, rewards belong to the step that generated it."""
    _, run = watched(max_steps=4, num_iterations=2, beta=0.1)
    taps = run.taps()

    assert [subjects(taps[s]) for s in (1, 3)] == [{"reference", "old policy", "generation"}] * 2
    assert [subjects(taps[s]) for s in (2, 4)] == [{"reference", "old policy"}] * 2
    shares = {"policy/kl_ref_neg_share", "policy/kl_ref_unlikely_share"}
    assert not set(taps[1]) & shares, "a policy that is still its reference has no KL to share out"
    assert set(taps[2]) >= shares
    assert (taps[1]["ratio/max"], taps[2]["ratio/max"] > 1.0) == (1.0, True)


def test_all_names_are_in_the_metric_table(watched):
    """Canonical names only, beside the gradient norms per layer."""
    _, run = watched(num_iterations=2, beta=0.1, before=install)

    measured = {name for metrics in run.taps().values() for name in metrics}

    own = names(dict.fromkeys(measured))
    assert {name for name in own if metric_of(name) is None and resolve(name).metric.name not in name} == set()
    assert {n for n in measured if n.startswith(LAYER_PREFIX)} == {
        f"grad_layer/model.{x}" for x in ("embed_tokens", "layers.0", "layers.1", "norm")
    }


def test_taps_agree_with_the_trainers_own_numbers(watched):
    """The same quantities by TRL's own code, step by step."""
    _, run = watched(num_iterations=2, beta=0.1, use_bias_correction_kl=False, epsilon=0.02, learning_rate=3e-3)

    for step, row in run.rows().items():
        tap = run.taps()[step]
        close = lambda x: pytest.approx(x, rel=1e-4, abs=1e-6)  # noqa: E731
        assert tap["loss/raw"] == close(row["loss"])
        assert tap["optim/grad_norm"] == close(row["grad_norm"])
        assert tap["policy/entropy"] == close(row["entropy"])
        assert tap["policy/kl_ref_k3"] == close(row["kl"])
        assert tap["ratio/clipfrac_low"] == close(row["clip_ratio/low_mean"])
        assert tap["ratio/clipfrac_high"] == close(row["clip_ratio/high_mean"])
        if "reward" in row:
            assert tap["reward/mean"] == close(row["reward"])
            assert tap["reward/zero_std_frac"] == close(row["frac_reward_zero_std"])
            assert tap["len/mean"] == close(row["completions/mean_length"])
            assert tap["len/clipped"] == close(row["completions/clipped_ratio"])
    assert max(tap["ratio/clipfrac_high"] for tap in run.taps().values()) > 0


def test_micro_batches_of_a_subclass_combine_to_the_statistics_of_all_tokens(watched):
    """Gradient accumulation: not means of means, but the step's tokens as one batch."""
    trainer, run = watched(cls=Recording, gradient_accumulation_steps=3, num_iterations=2, beta=0.1, learning_rate=3e-3)

    for step, tap in run.taps().items():
        batches = trainer.seen[step]
        entropy = tokens(batches, lambda lp, h, i: h)
        logp = tokens(batches, lambda lp, h, i: lp)
        x = tokens(batches, lambda lp, h, i: lp - i["old_per_token_logps"])
        kl = tokens(batches, lambda lp, h, i: lp - i["ref_per_token_logps"])
        w = x.exp()
        advantages = torch.cat([i["advantages"] for _, _, i in batches])
        expected = {
            "policy/entropy": entropy.mean(),
            "policy/entropy_p10": entropy.quantile(0.1),
            "policy/entropy_p90": entropy.quantile(0.9),
            "policy/logp_mean": logp.mean(),
            "policy/logp_min": logp.min(),
            "ratio/mean": w.mean(),
            "ratio/max": w.max(),
            "ratio/min": w.min(),
            "ratio/ess": w.sum() ** 2 / (w.numel() * (w**2).sum()),
            "policy/kl_old": -x.mean(),
            "policy/kl_ref_k1": kl.mean(),
            "policy/kl_ref_k2": (kl**2).mean() / 2,
            "policy/kl_ref_k3": ((-kl).exp() - 1 + kl).mean(),
            "adv/std": advantages.std(),
        }
        assert len(batches) == 3
        assert tap["loss/raw"] == pytest.approx(run.rows()[step]["loss"], rel=1e-4)
        assert {n: tap[n] for n in expected} == pytest.approx(
            {n: v.item() for n, v in expected.items()}, rel=1e-4, abs=1e-6
        )


def test_a_second_engine_is_compared_with_the_trainer_through_trls_own_path(watched):
    """A noisy sampler: our raw statistics beside TRL's, which are taken after its correction."""
    _, run = watched(before=lambda t: install(t, noise=0.02), max_steps=2)

    for step, row in run.rows().items():
        tap = run.taps()[step]
        assert "engine" in subjects(tap)
        assert tap["mismatch/logp_absdiff"] == pytest.approx(row["sampling/sampling_logp_difference/mean"], rel=1e-4)
        assert tap["mismatch/logp_absdiff_max"] == pytest.approx(row["sampling/sampling_logp_difference/max"], rel=1e-4)
        assert tap["mismatch/k3"] > 1e-5
        assert 0.5 < tap["mismatch/ess"] < 1.0


def test_an_engine_with_the_same_weights_shows_no_mismatch(watched):
    """Float noise only."""
    _, run = watched(before=install, max_steps=2)

    for tap in run.taps().values():
        assert tap["mismatch/logp_absdiff_max"] < 1e-4
        assert tap["mismatch/ess"] == pytest.approx(1.0, abs=1e-4)


def test_tokens_the_engine_did_not_score_are_counted_and_shown(watched):
    """NaN from the sampler: counted, listed as spikes, and the mean of the others stays a number."""
    _, run = watched(before=lambda t: install(t, unscored=True), max_steps=1)
    tap = run.taps()[1]

    assert tap["nonfinite/rollout_logp"] == 8
    assert math.isfinite(tap["mismatch/kl"])
    assert len(run.spikes[0]) == 8
    assert set(run.spikes[0].columns["position"]) == {0}


def test_rloo_reports_tokens_and_ratios_of_whole_responses(watched):
    """RLOO's ratio is per response, and so is its clip, which takes all tokens of a response."""
    _, run = watched(kind="rloo", num_iterations=2, beta=0.05, gradient_accumulation_steps=2, max_steps=4)
    taps, rows = run.taps(), run.rows()

    assert set(taps[2]) >= ALWAYS
    of_ratios = {name for name in taps[2] if name.startswith(MARKS["old policy"])}
    clipped = {"ratio/clipfrac", "ratio/clipfrac_low", "ratio/clipfrac_high"}
    assert of_ratios == {"ratio/seq_mean", "ratio/seq_max", "ratio/seq_ess", "policy/kl_old", *clipped}
    assert not any(name.startswith((*MARKS["reference"], *MARKS["generation"])) for name in taps[2])
    assert set(taps[1]) >= SUBJECTS["generation"]
    assert taps[1]["ratio/seq_max"] == pytest.approx(1.0)
    assert taps[2]["ratio/seq_max"] > 1.0
    for step in taps:
        assert taps[step]["loss/raw"] == pytest.approx(rows[step]["loss"], rel=1e-4, abs=1e-6)
        assert taps[step]["policy/entropy"] == pytest.approx(rows[step]["entropy"], rel=1e-3)


@pytest.mark.parametrize("adapted", [False, True], ids=["whole model", "adapter"])
def test_rloo_kl_is_read_where_its_responses_are_scored(watched, adapted):
    """RLOO's KL is a part of the reward: k1 is its own, and the other estimators are there too."""
    peft = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM") if adapted else None
    _, run = watched(kind="rloo", num_iterations=2, beta=0.05, max_steps=4, learning_rate=1e-2, peft_config=peft)
    taps, rows = run.taps(), run.rows()

    assert [set(SUBJECTS["reference"]) <= set(tap) for tap in taps.values()] == [True, False, True, False]
    assert taps[3]["policy/kl_ref_k1"] == pytest.approx(rows[3]["kl"], rel=1e-4)
    assert taps[3]["policy/kl_ref_k3"] > 1e-5
    assert (taps[3]["nonfinite/old_logp"], taps[3]["nonfinite/ref_logp"]) == (0, 0)


def test_rloo_without_a_reference_has_no_kl(watched):
    """beta is 0, so nothing is compared; the policy that sampled is looked at all the same."""
    _, run = watched(kind="rloo", beta=0.0, max_steps=1)

    assert not any(name.startswith(MARKS["reference"]) for name in run.taps()[1])
    assert run.taps()[1]["nonfinite/old_logp"] == 0


class KeepingRLOO(RLOOTrainer):
    """Keeps log-ratios of responses, their advantages and masks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = {}

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self.forward = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return self.forward

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        mask = inputs["completion_mask"]
        log_ratio = (self.forward[0].detach() * mask).sum(1) - inputs["old_logps"]
        self.seen[self.state.global_step + 1] = (log_ratio, inputs["advantages"], mask)
        return loss


def test_a_clip_of_whole_responses_is_counted_in_tokens(watched):
    """RLOO: the tokens of the responses its own fraction counts."""
    trainer, run = watched(kind="rloo", cls=KeepingRLOO, num_iterations=2, max_steps=2, learning_rate=1e-2)
    log_ratio, advantages, mask = trainer.seen[2]
    high = (log_ratio.exp() > 1.2) & (advantages > 0)
    low = (log_ratio.exp() < 0.8) & (advantages < 0)
    tap, row = run.taps()[2], run.rows()[2]

    assert high.float().mean().item() == pytest.approx(row["clip_ratio/high_mean"])
    assert tap["ratio/clipfrac_high"] == pytest.approx((mask.sum(1) * high).sum().item() / mask.sum().item())
    assert tap["ratio/clipfrac_low"] == pytest.approx((mask.sum(1) * low).sum().item() / mask.sum().item())
    assert tap["ratio/clipfrac"] == pytest.approx(tap["ratio/clipfrac_low"] + tap["ratio/clipfrac_high"])
    assert tap["ratio/clipfrac"] > 0


def test_steps_are_measured_one_by_one_where_the_log_averages(watched):
    """logging_steps=3: one row of the trainer, three of the taps."""
    _, run = watched(max_steps=3, logging_steps=3)

    assert list(run.rows()) == [3]
    assert list(run.taps()) == [1, 2, 3]
    assert all("reward/mean" in tap for tap in run.taps().values())


def test_a_steps_tensors_are_recorded_before_its_log_row(watched):
    """A step is one stretch of the stream, so that it can close."""
    _, run = watched(max_steps=3)

    assert [step for step, _ in run.logged] == [1, 1, 2, 2, 3, 3]


def test_evaluation_is_recorded_but_not_tapped(watched):
    """Rows of eval_ names at the step; no token of evaluation in a step's statistics."""
    trainer, run = watched(cls=Recording, eval_rows=8, eval_strategy="steps", eval_steps=1, max_steps=2)
    evaluations = [metrics for _, metrics in run.logged if "eval_reward" in metrics]

    training_only = trainer.seen[2][-1:]  # what came before in step 2 is the evaluation after step 1

    assert len(evaluations) == 2
    assert len(trainer.seen[2]) > 1
    assert list(run.taps()) == [1, 2]
    assert run.taps()[2]["policy/entropy"] == pytest.approx(tokens(training_only, lambda lp, h, i: h).mean().item())


def test_truncated_responses_that_are_masked_away_leave_gaps_not_nans(watched):
    """All responses cut and masked: nothing was measured, which is neither NaN nor 0."""
    _, run = watched(mask_truncated_completions=True, max_completion_length=1, max_steps=1)
    tap = run.taps()[1]

    assert {"policy/entropy", "policy/logp_min", "text/repetition"}.isdisjoint(tap)
    assert (tap["len/mean"], tap["len/clipped"]) == (1.0, 1.0)
    assert not any(math.isnan(v) for n, v in tap.items() if not n.startswith(("grad", "optim", "loss")))


def test_losses_without_a_clip_report_no_clip_fraction(watched):
    """A clip fraction of 0 would be a claim."""
    _, run = watched(loss_type="sapo", num_iterations=2, max_steps=2)

    assert not any("clipfrac" in name for tap in run.taps().values() for name in tap)
    assert "ratio/max" in run.taps()[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_float_reads_as_the_infinity_it_was(dtype):
    """Of either sign and in any precision; everything else is left alone."""
    a = torch.tensor([math.inf, -math.inf, math.nan, 2.0], dtype=dtype)

    assert raw_advantages(a.nan_to_num(nan=0.0)).tolist() == [math.inf, -math.inf, 0.0, 2.0]


def test_infinite_rewards_show_although_trl_rewrites_their_advantages(watched):
    """nan_to_num turns an infinity into the largest float; the taps turn it back."""

    def reward(completions, **kwargs):
        return [math.inf if i == 0 else float(i) for i in range(len(completions))]

    _, run = watched(reward=reward, max_steps=1, scale_rewards="none")

    assert run.taps()[1]["nonfinite/advantage"] >= 1


def test_gspo_reports_the_ratio_its_loss_uses(watched):
    """Sequence level: geometric means beside the token ratios, and what their clip binds."""
    _, run = watched(
        importance_sampling_level="sequence", num_iterations=2, max_steps=2, learning_rate=3e-3, loss_type="grpo",
        epsilon=0.01,
    )  # fmt: skip
    tap, row = run.taps()[2], run.rows()[2]

    assert 1.0 < tap["ratio/seq_max"] < tap["ratio/max"]
    assert tap["ratio/seq_ess"] > tap["ratio/ess"]
    assert row["clip_ratio/region_mean"] > 0.25
    assert tap["ratio/clipfrac"] == pytest.approx(row["clip_ratio/region_mean"], abs=0.2)
    assert "ratio/clipfrac_low" in tap


def test_cispo_reports_what_its_cap_binds_and_no_lower_bound(watched):
    """TRL's own fraction of tokens; below there is no bound, so nothing is claimed."""
    _, run = watched(loss_type="cispo", epsilon_high=1.1, num_iterations=2, max_steps=2, learning_rate=1e-2)
    tap, row = run.taps()[2], run.rows()[2]

    assert tap["ratio/clipfrac_high"] == tap["ratio/clipfrac"] == pytest.approx(row["cispo_clip_ratio"])
    assert tap["ratio/clipfrac"] > 0
    assert not {"ratio/clipfrac_low", "ratio/clipfrac_dual"} & set(tap)


def test_gmpo_clips_log_ratios(tmp_path):
    """Its own bounds, beside its own numbers."""
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    config = {**COMMON, "num_iterations": 2, "max_steps": 2, "learning_rate": 3e-2, "epsilon": 0.3}
    model, args = model_on_disk(tmp_path / "policy"), GMPOConfig(**{**config, "output_dir": str(tmp_path)})
    trainer = GMPOTrainer(model, digits, args=args, train_dataset=dataset(), processing_class=tokenizer())
    run = FakeRun()
    watch(trainer, run=run)
    trainer.train()
    tap, row = run.taps()[2], run.rows()[2]

    assert tap["ratio/clipfrac_low"] == pytest.approx(row["clip_ratio/low_mean"], rel=1e-4)
    assert tap["ratio/clipfrac_high"] == pytest.approx(row["clip_ratio/high_mean"], rel=1e-4)
    assert tap["ratio/clipfrac"] > 0


def test_two_sided_clipping_shows_the_tokens_beyond_its_cap(watched):
    """delta: tokens of negative advantage whose ratio left it; a cap below the clip's bound is the bound."""
    large = {"num_iterations": 2, "max_steps": 2, "learning_rate": 3e-2, "epsilon": 0.2}
    _, two = watched(delta=1.25, **large)
    _, tight = watched(delta=1.1, cls=Recording, **large)
    trainer, _ = watched(delta=1.1, cls=Recording, **large)
    ratio = tokens(trainer.seen[2], lambda lp, h, i: (lp - i["old_per_token_logps"]).exp())
    sign = tokens(trainer.seen[2], lambda lp, h, i: i["advantages"][:, None].expand_as(lp))

    assert two.taps()[2]["ratio/clipfrac_dual"] == pytest.approx(((ratio > 1.25) & (sign < 0)).double().mean().item())
    assert two.taps()[2]["ratio/clipfrac_high"] == pytest.approx(two.rows()[2]["clip_ratio/high_mean"], rel=1e-4)
    assert tight.taps()[2]["ratio/clipfrac_high"] == pytest.approx(((ratio > 1.1) & (sign > 0)).double().mean().item())


@pytest.mark.usefixtures("behind")
def test_a_slow_copy_is_waited_for_before_the_next_step_begins(watched):
    """As on a GPU: the copy is not there when the step ends, and still every step is recorded in order."""
    _, run = watched(max_steps=3)

    assert [("loss/raw" in metrics, step) for step, metrics in run.logged] == [
        (False, 1), (True, 1), (False, 2), (True, 2), (False, 3), (True, 3),
    ]  # fmt: skip


def test_what_a_failed_attempt_left_half_measured_is_forgotten(tmp_path):
    """Training again after an exception starts with an empty step."""
    trainer, run = make_trainer(tmp_path, max_steps=1, gradient_accumulation_steps=2, cls=Recording), FakeRun()
    watch(trainer, run=run)
    backward, calls = trainer.accelerator.backward, []

    def once(loss, **kwargs):
        calls.append(loss)
        if len(calls) == 2:
            raise InterruptedError
        backward(loss, **kwargs)

    trainer.accelerator.backward = once
    with pytest.raises(InterruptedError):
        trainer.train()
    trainer.model.zero_grad()
    trainer.seen.clear()
    trainer._step, trainer._buffered_inputs = 0, None
    trainer.train()

    entropy = tokens(trainer.seen[1], lambda lp, h, i: h)
    assert run.logged[-2][1]["policy/entropy"] == pytest.approx(entropy.mean().item(), rel=1e-5)


def test_the_level_decides_how_closely_it_is_watched(watched):
    """Each level measures what the one before does, and more."""
    measured = {}
    for level in ("scalars", "tokens", "gradients", "full"):
        _, run = watched(max_steps=1, watching={"level": level})
        measured[level] = set().union(*(metrics for _, metrics in run.logged))

    assert "reward" in measured["scalars"]
    assert "policy/entropy" not in measured["scalars"]
    assert not any(name.startswith(("policy/entropy_p", "adv/", "grad_layer/")) for name in measured["scalars"])
    assert measured["scalars"] < measured["tokens"] < measured["gradients"] < measured["full"]
    assert "policy/entropy" in measured["tokens"] - measured["scalars"]
    assert "grad_layer/model.norm" in measured["gradients"] - measured["tokens"]
    assert "policy/entropy_p90" in measured["full"] - measured["gradients"]


def test_an_unknown_level_is_refused_before_training(watched):
    """Naming those there are."""
    with pytest.raises(ConfigError, match="level must be one of scalars, tokens, gradients, full, got 'all'"):
        watched(watching={"level": "all"})
