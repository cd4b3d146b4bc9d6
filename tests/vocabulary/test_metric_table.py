"""The metric table: what trainers log, read canonically and never rescaled."""

import pytest

from rlwatch.metrics import (
    BY_NAME,
    OPEN,
    TABLE,
    Family,
    Relation,
    canonicalise,
    family_of,
    known,
    metric_of,
    resolve,
)


def test_canonical_names_are_unique_and_slashed():
    """One row a metric."""
    assert len(BY_NAME) == len(TABLE)
    assert [m.name for m in TABLE if "/" not in m.name or "." in m.name] == []


def test_every_family_has_metrics():
    """Every panel of the app can have something in it."""
    assert {metric.family for metric in TABLE} == set(Family)


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("entropy", "trl/grpo", "policy/entropy"),
        ("actor/entropy", "verl", "policy/entropy"),
        ("entropy_loss", "openrlhf", "policy/entropy"),
        ("kl", "trl/grpo", "policy/kl_ref"),
        ("actor/kl_loss", "verl", "policy/kl_ref"),
        ("actor/ppo_kl", "verl", "policy/kl_old"),
        ("rollout_corr/k3_kl", "verl", "mismatch/k3"),
        ("vllm_kl", "openrlhf", "mismatch/kl"),
        ("sampling/sampling_logp_difference/mean", "trl/grpo", "mismatch/logp_absdiff"),
        ("training/rollout_probs_diff_mean", "verl", "mismatch/prob_absdiff"),
        ("grad_norm", "", "optim/grad_norm"),
        ("actor/grad_norm", "verl", "optim/grad_norm"),
        ("critic/score/mean", "verl", "reward/mean"),
        ("frac_reward_zero_std", "trl/grpo", "reward/zero_std_frac"),
        ("completions/mean_length", "trl/grpo", "len/mean"),
        ("response_length/clip_ratio", "verl", "len/clipped"),
        ("train/grad_norm", "", "optim/grad_norm"),
        ("policy.entropy", "", "policy/entropy"),
        ("opt.grad_norm", "", "optim/grad_norm"),
        ("timing_s/step", "verl", "time/step"),
    ],
)
def test_trainer_names_read_canonically(name, source, expected):
    """The aliases of INTEGRATION's table, one each of what matters most."""
    assert resolve(name, source).metric.name == expected


def test_probability_and_logprob_differences_are_never_merged():
    """verl logs |p - p|, TRL |log p - log p|: two metrics."""
    values, _ = canonicalise({"training/rollout_probs_diff_mean": 0.1, "sampling/sampling_logp_difference/mean": 0.2})

    assert values == {"mismatch/prob_absdiff": 0.1, "mismatch/logp_absdiff": 0.2}


def test_the_same_name_means_different_things_in_different_trainers():
    """RLOO's kl is k1 measured at generation: a proxy, where GRPO's k3 is the quantity itself."""
    assert resolve("kl", "trl/grpo").alias.estimator == "k3"
    assert resolve("kl", "trl/rloo").alias.relation is Relation.PROXY
    assert resolve("kl", "trl/async_grpo").metric.name == "mismatch/k3"


@pytest.mark.parametrize(
    ("name", "source", "metric"),
    [
        ("kl", "trl/kto", "policy/kl_ref"),
        ("clip_ratio/region_mean", "trl/rloo", "ratio/clipfrac"),
        ("clip_ratio/low_mean", "trl/rloo", "ratio/clipfrac_low"),
        ("frac_reward_zero_std", "trl/rloo", "reward/zero_std_frac"),
        ("rewards/chosen", "trl/dpo", "reward/mean"),
    ],
)
def test_what_another_trl_trainer_means_by_a_name_is_a_proxy(name, source, metric):
    """Of responses instead of tokens, of pairs that do not belong together, of log-ratios instead of rewards."""
    reading = resolve(name, source)

    assert (reading.metric.name, reading.closeness) == (metric, 2)
    assert reading.alias.aggregator


@pytest.mark.parametrize("source", ["trl/sft", "trl/dpo", "trl/kto"])
def test_entropy_of_given_tokens_is_no_exploration(source):
    """It falls while a dataset is learnt: a detector of collapse must not see it."""
    assert resolve("entropy", source) is None
    assert canonicalise({"entropy": 0.1, "train/entropy": 0.1}, source) == ({}, {})
    assert resolve("entropy", "trl/grpo").metric.name == "policy/entropy"
    assert resolve("entropy").metric.name == "policy/entropy"


def test_the_score_of_what_online_dpo_sampled_is_its_reward():
    """Whatever order it logs in: beside it stands the log-ratio that DPO calls a reward."""
    names = ["rewards/chosen", "objective/scores"]
    for order in (names, names[::-1]):
        assert canonicalise(dict.fromkeys(order, 1.0), "trl/online_dpo")[1] == {"reward/mean": "objective/scores"}


def test_the_quantity_itself_wins_over_a_proxy_whatever_the_order():
    """verl logs both the driver's entropy and the update pass's."""
    for names in (("actor/entropy", "actor/entropy_loss"), ("actor/entropy_loss", "actor/entropy")):
        values, origin = canonicalise({name: float(i) for i, name in enumerate(names)}, "verl")
        assert origin["policy/entropy"] == "actor/entropy"
        assert values["policy/entropy"] == float(names.index("actor/entropy"))


def test_a_canonical_name_wins_over_every_alias():
    """Our own taps are nearer to the tensors than the trainer's log."""
    _, origin = canonicalise({"grad_norm": 1.0, "optim/grad_norm": 2.0}, "trl/grpo")

    assert origin["optim/grad_norm"] == "optim/grad_norm"


def test_nan_and_infinity_pass_unchanged():
    """Reading canonically never cleans up."""
    values, _ = canonicalise({"entropy": float("nan"), "grad_norm": float("inf")})

    assert values["policy/entropy"] != values["policy/entropy"]
    assert values["optim/grad_norm"] == float("inf")


def test_unknown_names_are_left_out_and_layers_pass():
    """Detectors never see a name the table does not vouch for, except per-layer norms."""
    values, _ = canonicalise({"my/own": 1.0, "grad_layer/3": 2.0})

    assert values == {"grad_layer/3": 2.0}
    assert known(["my/own"]) == set()


@pytest.mark.parametrize(
    ("name", "family"),
    [("val-core/gsm8k/acc/mean@1", Family.REWARD), ("grad_layer/0", Family.OPTIMISATION), ("my/own", Family.SYSTEM)],
)
def test_every_name_has_a_family(name, family):
    """Unknown metrics still find a panel."""
    assert family_of(name) is family


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("grad_layer/model.layers.3", Family.OPTIMISATION),
        ("reward/by_task/openai/gsm8k", Family.REWARD),
        ("len/by_task/other", Family.ROLLOUTS),
        ("policy/entropy_by_task/math.algebra", Family.EXPLORATION),
    ],
)
def test_members_of_open_families_have_a_row_without_standing_in_the_table(name, family):
    """A run names its own layers and tasks; they read as what they are and pass through."""
    row = metric_of(name)

    assert (row.name, row.family, family_of(name)) == (name, family, family)
    assert canonicalise({name: 1.0}) == ({name: 1.0}, {name: name})
    assert name not in BY_NAME


@pytest.mark.parametrize("name", ["reward/by_task/", "by_task/gsm8k", "my/own"])
def test_what_only_looks_like_an_open_family_has_no_row(name):
    """A prefix alone names nothing."""
    assert metric_of(name) is None
    assert canonicalise({name: 1.0}) == ({}, {})


def test_open_families_hold_no_name_of_the_table():
    """Else a metric would have two rows."""
    assert [m.name for m in TABLE if any(m.name.startswith(row.name) for row in OPEN)] == []
    assert all(row.name.endswith("/") for row in OPEN)


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("group_reward_std", "openrlhf", "reward/group_std"),
        ("rollout/zero_std/count_1.0", "slime", "reward/groups_right"),
        ("rollout/zero_std/count_0", "slime", "reward/groups_wrong"),
        ("passrate/pass@8", "slime", "reward/pass_at_8"),
        ("rollout/response_len/median", "slime", "len/p50"),
        ("rollout/repetition_frac", "slime", "text/repetition_frac"),
        ("response/aborted_ratio", "verl", "len/empty"),
        ("fully_async/partial/partial_ratio", "verl", "partial/frac"),
        ("training/off_policy/trajectory_spans/mean", "verl", "staleness/spans_mean"),
        ("sample/staleness_max", "trl/async_grpo", "staleness/max"),
        ("num_turns/mean", "verl", "turns/mean"),
    ],
)
def test_what_trainers_say_of_groups_and_lengths_reads_canonically(name, source, expected):
    """The same quantities, computed by the trainer itself."""
    assert (resolve(name, source).metric.name, resolve(name, source).closeness) == (expected, 1)
