"""The names that each trainer really logs, read canonically: none that matters is unknown."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlwatch.importers.assemble import source_of
from rlwatch.metrics import BY_NAME, canonicalise, foremost, resolve, shadowed, unjudged, unread

MATTERS: dict[str, dict[str, str]] = {
    "verl": {
        "critic/score/mean": "reward/mean", "critic/rewards/max": "reward/max", "critic/rewards/min": "reward/min",
        "actor/entropy": "policy/entropy", "actor/kl_loss": "policy/kl_ref", "actor/ppo_kl": "policy/kl_old",
        "actor/pg_clipfrac": "ratio/clipfrac", "actor/grad_norm": "optim/grad_norm", "actor/pg_loss": "loss/policy",
        "response_length/mean": "len/mean", "response_length/clip_ratio": "len/clipped",
        "response_length_non_aborted/mean": "len/mean", "response_length_non_aborted/clip_ratio": "len/clipped",
        "critic/vf_loss": "critic/value_loss", "critic/vf_explained_var": "critic/explained_var",
        "critic/vf_clipfrac": "critic/value_clipfrac", "critic/values/mean": "critic/value_mean",
        "critic/vpred_mean": "critic/value_mean", "critic/values/max": "critic/value_max", "critic/values/min": "critic/value_min",
        "critic/returns/mean": "critic/returns_mean", "critic/returns/max": "critic/returns_max",
        "critic/returns/min": "critic/returns_min", "critic/grad_norm": "critic/grad_norm", "critic/lr": "critic/lr",
        "training/off_policy/trajectory_staleness/mean": "staleness/mean", "training/off_policy/evicted_samples": "staleness/dropped",
        "training/num_turns/mean": "turns/mean",
    },
    "trl/async_grpo": {
        "reward": "reward/mean", "entropy": "policy/entropy", "kl": "mismatch/k3", "ratio": "ratio/mean", "grad_norm": "optim/grad_norm",
        "sample/staleness_mean": "staleness/mean", "sample/staleness_max": "staleness/max",
        "sample/dropped_stale_total": "staleness/dropped", "sample/rollout_queue_size": "staleness/queue",
        "sample/time_in_queue_s": "staleness/queue_wait", "sample/trained_tokens_mean": "len/mean", "perf/step_s": "time/step",
    },
    "trl/ppo": {
        "loss/value_avg": "critic/value_loss", "val/clipfrac_avg": "critic/value_clipfrac", "loss/policy_avg": "loss/policy",
        "policy/approxkl_avg": "policy/kl_old", "policy/clipfrac_avg": "ratio/clipfrac", "policy/entropy_avg": "policy/entropy",
        "objective/scores": "reward/mean", "objective/kl": "policy/kl_ref", "val/ratio": "ratio/mean",
    },
    "trl/online_dpo": {"objective/scores": "reward/mean", "objective/kl": "policy/kl_ref"},
    "openrlhf": {
        "response_clip_ratio": "len/clipped", "score": "reward/mean", "total_length": "len/mean", "critic_loss": "critic/value_loss",
        "values": "critic/value_mean", "critic_lr": "critic/lr", "entropy_loss": "policy/entropy", "kl": "policy/kl_ref",
        "actor_grad_norm": "optim/grad_norm", "ppo_clip_ratio": "ratio/clipfrac", "vllm_kl": "mismatch/kl",
    },
    "slime": {
        "rollout/raw_reward": "reward/mean", "rollout/rewards": "reward/mean", "rollout/advantages": "adv/mean", "rollout/entropy": "policy/entropy",
        "rollout/log_probs": "policy/logp_mean", "rollout/kl": "policy/kl_ref", "rollout/returns": "critic/returns_mean",
        "rollout/values": "critic/value_mean", "train/value_loss": "critic/value_loss", "train/value_clipfrac": "critic/value_clipfrac",
        "train/ois": "ratio/mean", "train/tis": "mismatch/weight_mean", "train/grad_norm": "optim/grad_norm",
        "train/train_rollout_logprob_abs_diff": "mismatch/logp_absdiff", "rollout/response_len/mean": "len/mean",
        "rollout/truncated_ratio": "len/clipped", "rollout/zero_std/count_0.0": "reward/groups_wrong",
    },
    "prime-rl": {
        "reward/all/mean": "reward/mean", "entropy/all/mean": "policy/entropy", "mismatch_kl/all/mean": "mismatch/k3",
        "optim/grad_norm": "optim/grad_norm", "loss/mean": "loss/policy", "loss/nan_count": "nonfinite/loss", "max_vio/mean": "mismatch/moe_max_vio",
        "off_policy/mean": "staleness/mean", "off_policy/max": "staleness/max", "off_policy/dropped": "staleness/dropped",
        "off_policy/in_flight/mean": "staleness/in_flight_mean", "off_policy/in_queue/max": "staleness/in_queue_max",
        "effective/num_turns/mean": "turns/mean", "seq_len/all/mean": "len/mean", "decode_len/all/mean": "len/mean",
        "is_truncated/all/mean": "len/clipped", "solve_all/all": "reward/zero_std_right_frac", "solve_none/all": "reward/zero_std_wrong_frac",
    },
    "nemo-rl": {
        "reward": "reward/mean", "accuracy": "reward/mean", "approx_entropy": "policy/entropy", "kl_penalty": "policy/kl_ref",
        "probs_ratio": "ratio/mean", "probs_ratio_max": "ratio/max", "probs_ratio_min": "ratio/min", "grad_norm": "optim/grad_norm",
        "advantages/mean": "adv/mean", "mean_gen_tokens_per_sample": "len/mean", "gen_kl_error": "mismatch/k3",
        "token_mult_prob_error": "mismatch/mult_prob_error", "sampling_importance_ratio": "mismatch/weight_mean",
        "avg_trajectory_age": "staleness/mean", "max_trajectory_policy_age": "staleness/max", "buffer_size": "staleness/queue",
        "critic/explained_var": "critic/explained_var", "value_loss": "critic/value_loss", "validation/accuracy": "val/score",
    },
    "areal": {
        "ppo_actor/task_reward/avg": "reward/mean", "ppo_actor/update/entropy/avg": "policy/entropy",
        "ppo_actor/update/importance_weight/avg": "ratio/mean", "ppo_actor/update/importance_weight/max": "ratio/max",
        "ppo_actor/update/approx_kl/avg": "policy/kl_old", "ppo_actor/update/clip_ratio/avg": "ratio/clipfrac",
        "ppo_actor/update/dual_clip_ratio/avg": "ratio/clipfrac_dual", "ppo_actor/update/actor_loss/avg": "loss/policy",
        "ppo_actor/update/grad_norm": "optim/grad_norm", "ppo_actor/grad_norm": "optim/grad_norm", "ppo_actor/update/lr": "optim/lr",
        "ppo_actor/update/behave_imp_weight/avg": "mismatch/is_ratio", "ppo_actor/update/behave_approx_kl/avg": "mismatch/kl",
        "ppo_actor/kl_rewards/avg": "policy/kl_ref", "ppo_actor/seq_len/avg": "len/mean", "ppo_actor/advantages/avg": "adv/mean",
        "ppo_critic/update/value_loss/avg": "critic/value_loss",
        "ppo_actor/update/version_stats/sample_staleness_theta_avg": "staleness/mean",
        "ppo_actor/update/version_stats/sample_staleness_theta_max": "staleness/max",
        "ppo_actor/update/version_stats/stale_token_fraction": "staleness/stale_frac",
    },
    "skyrl": {
        "reward/avg_raw_reward": "reward/mean", "loss/avg_final_rewards": "reward/mean", "reward/avg_pass_at_8": "reward/pass_at_8",
        "policy/policy_entropy": "policy/entropy", "policy/policy_kl": "policy/kl_ref", "policy/ppo_clip_ratio": "ratio/clipfrac",
        "policy/loss_metrics/clip_ratio": "ratio/clipfrac", "policy/raw_grad_norm": "optim/grad_norm", "policy/policy_loss": "loss/policy",
        "policy/final_loss": "loss/policy", "policy/response_length": "len/mean", "generate/avg_num_tokens": "len/mean",
        "generate/max_num_tokens": "len/max", "policy/policy_lr": "optim/lr", "loss/avg_raw_advantages": "adv/mean",
        "policy/rollout_train_logprobs_abs_diff_mean": "mismatch/logp_absdiff", "policy/tis_imp_ratio": "mismatch/is_ratio",
        "policy/is_ratio_mean": "mismatch/is_ratio", "critic/critic_loss": "critic/value_loss", "critic/values_mean": "critic/value_mean",
        "critic/values_clipfrac": "critic/value_clipfrac", "async/staleness_mean": "staleness/mean", "async/staleness_max": "staleness/max",
        "async/staleness_ratio": "staleness/stale_frac", "timing/step": "time/step",
    },
    "torchtune": {
        "scores": "reward/mean", "rewards": "reward/mean", "kl": "policy/kl_ref", "kl_loss": "policy/kl_ref",
        "approx_policy_kl": "policy/kl_old", "ratios": "ratio/mean", "clipfrac": "ratio/clipfrac", "response_lengths": "len/mean",
        "policy_loss": "loss/policy", "value_loss": "critic/value_loss",
    },
    "tinker": {
        "env/all/reward/total": "reward/mean", "test/env/all/reward/total": "val/score", "optim/entropy": "policy/entropy",
        "optim/kl_sample_train_v1": "mismatch/kl", "kl_policy_base": "policy/kl_ref", "kl_pre_post_v1": "policy/kl_old", "optim/lr": "optim/lr",
        "env/all/ac_tokens_per_turn": "len/mean", "env/all/turns_per_episode": "turns/mean", "async/staleness_mean": "staleness/mean",
        "env/all/by_group/frac_all_good": "reward/zero_std_right_frac", "env/all/by_group/frac_all_bad": "reward/zero_std_wrong_frac",
    },
}  # fmt: skip
"""Of each trainer the names that a detector or a person wants, and what they are."""
TOLD_BY_NAMES = (
    "verl",
    "trl/async_grpo",
    "slime",
    "prime-rl",
    "nemo-rl",
    "areal",
    "skyrl",
    "tinker",
    "torchtune",
    "openrlhf",
)


LOGGED: dict[str, list[str]] = {
    source: names.split()
    for source, names in tomllib.loads(
        (Path(__file__).parent / "trainer_names.toml").read_text(encoding="utf-8")
    ).items()
}
"""Of each trainer what else it logs."""


@pytest.mark.parametrize("source", LOGGED)
def test_no_name_of_a_trainer_is_unknown(source):
    """Each has a meaning, or is seen and not judged, with the reason."""
    assert [name for name in unread(LOGGED[source], source) if not unjudged(name)] == []


@pytest.mark.torch
def test_no_name_in_the_installed_trl_is_unknown():
    """Read from its sources, as `make nightly` reads those of the newest trainers."""
    script = Path(__file__).parents[1] / "nightly" / "names.py"
    told = subprocess.run([sys.executable, script, "trl"], capture_output=True, text=True, check=False)

    assert int(re.match(r"trl: (\d+) names, ", told.stdout)[1]) > 100, told.stdout + told.stderr
    assert told.returncode == 0, told.stdout


@pytest.mark.parametrize("source", MATTERS)
def test_what_matters_is_known_under_its_own_trainer(source):
    """Not one of them is silently left out."""
    read = {name: resolve(name, source) for name in MATTERS[source]}

    assert {name: found and found.metric.name for name, found in read.items()} == MATTERS[source]


@pytest.mark.parametrize("source", MATTERS)
def test_a_tracker_may_put_train_before_a_name(source):
    """As wandb, TensorBoard and SwanLab show it."""
    read = {name: resolve(f"train/{name}", source) for name in MATTERS[source] if name not in BY_NAME}

    assert {name: found and found.metric.name for name, found in read.items()} == {
        name: metric for name, metric in MATTERS[source].items() if name not in BY_NAME
    }


@pytest.mark.parametrize("source", MATTERS)
def test_underscores_for_slashes_change_nothing(source):
    """A table whose columns allow no slash, a database, MLflow."""
    slashed = {name: metric for name, metric in MATTERS[source].items() if "/" in name and name not in BY_NAME}
    read = {name: resolve(name.replace("/", "_").replace(".", "_"), source) for name in slashed}

    assert {name: found and found.metric.name for name, found in read.items()} == slashed


@pytest.mark.parametrize("source", TOLD_BY_NAMES)
def test_the_names_tell_the_trainer(source):
    """So that what they mean there is what they are read as."""
    assert source_of(MATTERS[source]) == source


def test_a_flat_table_of_verl_is_one_of_verl():
    """Not of OpenRLHF, whose ``actor_grad_norm`` it shares."""
    names = ["actor_grad_norm", "actor_entropy", "actor_pg_loss", "critic_rewards_mean"]

    assert source_of(names) == "verl"
    assert canonicalise(dict.fromkeys(names, 1.0), "verl")[1] == {
        "optim/grad_norm": "actor_grad_norm",
        "policy/entropy": "actor_entropy",
        "loss/policy": "actor_pg_loss",
        "reward/mean": "critic_rewards_mean",
    }


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("rewards_mean", "reward/mean"), ("actor_entropy", "policy/entropy"), ("critic_rewards_mean", "reward/mean"),
        ("rollout/reward", "reward/mean"), ("success_rate", "reward/mean"), ("train/token_entropy", "policy/entropy"),
        ("rollout/avg_response_token_length", "len/mean"), ("vf_loss", "critic/value_loss"), ("policy_lag", "staleness/mean"),
        ("explained_variance", "critic/explained_var"), ("value_clip_fraction", "critic/value_clipfrac"),
    ],
)  # fmt: skip
def test_names_of_loops_of_ones_own_are_read_where_no_trainer_is_known(name, metric):
    """By what they are once written with slashes, or by their words."""
    assert resolve(name).metric.name == metric


def test_a_plain_word_of_one_trainer_is_only_a_guess_elsewhere():
    """OpenRLHF's ``score`` and NeMo-RL's ``accuracy`` are rewards there; in an unknown loop a reward beside them is nearer."""
    assert canonicalise({"accuracy": 0.9, "mean_reward": 0.4})[1] == {"reward/mean": "mean_reward"}
    assert canonicalise({"score": 0.9, "reward_score": 0.4})[1]["reward/mean"] == "reward_score"
    assert resolve("score", "openrlhf").closeness == 1


def test_what_skyrl_calls_a_difference_of_probabilities_is_none():
    """It is the size of their ratio: read as a difference it would be one of 100 %."""
    assert resolve("policy/rollout_train_prob_diff_mean", "skyrl") is None


def test_names_that_sound_like_what_matters_are_told_first():
    """Of those that nothing reads."""
    assert foremost(["apples", "zz_entropy", "my_reward_v2"]) == ["my_reward_v2", "zz_entropy", "apples"]
    assert [unjudged(name) for name in ("my_reward_v2", "apples", "x" * 10_000)] == ["", "", ""]


def test_a_guess_is_shadowed_by_a_closer_name_of_the_run():
    """Not by one as close, nor a trainer's own name by another."""
    assert shadowed(["acc", "avg_reward", "kl"]) == {"acc"}
    assert shadowed(["acc", "kl"]) == set()
    assert shadowed(["critic/score/mean", "critic/rewards/mean"], "verl") == set()
