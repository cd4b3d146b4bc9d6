"""Names of tables and loops of one's own, read by their words where no trainer's name fits."""

import math

import pytest

from rlwatch.metrics import BY_NAME, TABLE, canonicalise, resolve
from rlwatch.metrics.reading import everyday, words_of

NAMES = {metric.name: metric.everyday for metric in TABLE if metric.everyday}


def test_every_name_means_one_known_metric():
    """No two lists hold the same words, and what they lead to is a row of the table."""
    listed = [words_of(name) for names in NAMES.values() for name in names]

    assert len(set(listed)) == len(listed)
    assert frozenset() not in listed
    assert set(NAMES) <= set(BY_NAME)


@pytest.mark.parametrize("metric", NAMES)
def test_no_name_contradicts_what_some_trainer_means_by_it(metric):
    """However it is written, it reads as the metric it is listed under, or as a trainer's own name for that."""
    for name in NAMES[metric]:
        for written in (name.replace(" ", "_"), name.replace(" ", "/"), name.title().replace(" ", "")):
            assert resolve(written).metric.name == metric


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("reward_mean", "reward/mean"), ("mean/reward", "reward/mean"), ("avgReward", "reward/mean"),
        ("train/mean_rewards", "reward/mean"), ("GradNorm", "optim/grad_norm"), ("grad", "optim/grad_norm"),
        ("resp_len", "len/mean"), ("completion-lengths.max", "len/max"), ("truncation rate", "len/clipped"),
        ("KL", "policy/kl_ref"), ("importance_ratio_max", "ratio/max"), ("log_ppl_abs_diff", "mismatch/log_ppl_absdiff"),
        ("eval_accuracy", "val/score"), ("ESS", "ratio/ess"), ("adv_std", "adv/std"),
    ],
)  # fmt: skip
def test_order_case_and_common_abbreviations_do_not_matter(name, metric):
    """As people write headers."""
    assert resolve(name).metric.name == metric


@pytest.mark.parametrize(
    "name",
    ["clipped", "clipped_frac", "k3", "diff", "tokens", "prompt_length", "rewards/format/std", "mean", "x", ""],
)
def test_what_may_mean_two_things_stays_unknown(name):
    """Better no metric than a wrong one."""
    assert resolve(name) is None


def test_a_guess_gives_way_to_any_name_that_is_a_trainers():
    """Accuracy stands for the reward only where there is nothing else."""
    both = {"acc": 0.3, "avg_reward": 0.4}

    assert canonicalise(both | {"reward": 0.5})[1] == {"reward/mean": "reward"}
    assert canonicalise(both)[1] == {"reward/mean": "avg_reward"}
    assert canonicalise({"acc": 0.3})[1] == {"reward/mean": "acc"}
    assert resolve("actor/entropy", "verl").guess == 0
    assert resolve("acc").closeness > resolve("avg_reward").closeness > 2


def test_nothing_is_guessed_of_a_trainer_that_has_no_policy():
    """TRL's reward trainer logs a ``mean_reward`` of given pairs, its supervised one an entropy that explores nothing."""
    assert resolve("mean_reward", "trl/reward") is None
    assert resolve("Entropy", "trl/sft") is None
    assert resolve("Entropy").metric.name == "policy/entropy"
    assert everyday("Entropy") == ("policy/entropy", 0)


def test_a_guess_that_the_range_contradicts_is_none():
    """A percentage is no fraction; NaN is a value of anything; a trainer's own number is never doubted."""
    assert canonicalise({"truncation_rate": 30.0})[0] == {}
    assert canonicalise({"truncation_rate": 0.3})[0] == {"len/clipped": 0.3}
    assert set(canonicalise({"truncation_rate": math.nan})[0]) == {"len/clipped"}
    assert canonicalise({"completions/clipped_ratio": 30.0})[0] == {"len/clipped": 30.0}


@pytest.mark.parametrize("source", ["", "verl", "trl/grpo"])
def test_a_row_reads_the_same_whatever_rows_were_read_before(source):
    """What names stand for is known once for all rows that have them; of guesses it hangs on the values of each."""
    rows = [
        {"accuracy": value, "truncation_rate": value, "entropy": 0.5, "actor/entropy": 0.4}
        for value in (0.5, 70.0, 0.5)
    ]
    rows += [{"kl": 0.1, "grad_norm": math.nan, "reward": 0.5, "unheard_of": 1.0}] * 2
    read = [canonicalise(row, source) for row in rows]

    assert read[::-1] == [canonicalise(row, source) for row in reversed(rows)]
    for row, (values, origin) in zip(rows, read, strict=True):
        assert values.keys() == origin.keys()
        assert all(values[name] is row[origin[name]] for name in values)
    assert ["len/clipped" in values for values, _ in read[:3]] == [True, False, True]
