"""The six roles that a verdict hangs on, under the names that people give them, and what only sounds like them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.metrics import TABLE, RowReader, canonicalise, known, like_rewards, resolve, shadowed, taken, unjudged

PLAIN = {
    "reward/mean": [
        "reward",
        "rewards",
        "reward total",
        "overall reward",
        "final reward",
        "R",
        "score",
        "episode return",
    ],
    "policy/entropy": ["entropy", "policy entropy", "token entropy", "entropy per token"],
    "policy/kl_ref": ["kl", "kl div", "kl to ref", "ref kl", "kl divergence"],
    "len/mean": ["response length", "completion len", "gen tokens", "length", "tokens per response"],
    "optim/grad_norm": ["grad norm", "gradient norm", "global grad norm", "total norm", "grad norm before clip"],
    "loss/policy": ["loss", "policy loss", "pg loss", "grpo loss", "total loss", "policy gradient loss"],
}
POISON = [
    "std", "max", "min", "var", "coef", "weight", "target", "threshold", "baseline", "scale", "p95", "best", "clipped by",
    "lr", "time", "count", "reward model", "limit", "previous", "delta", "error", "budget",
]  # fmt: skip


def written(words, style):
    """The words as a name in one of the styles that people write."""
    parts = words.split()
    return {
        "snake": "_".join(parts),
        "slash": "/".join(parts),
        "camel": "".join(part if part.isupper() else part.title() for part in parts),
        "dash": "-".join(parts),
        "spaces": " ".join(parts).title(),
    }[style]


STYLES = st.sampled_from(["snake", "slash", "camel", "dash", "spaces"])
ROLES = st.sampled_from([(role, name) for role, names in PLAIN.items() for name in names])
CONTEXT = st.sampled_from(["", "mean", "avg", "train", "average", "training"])


@given(ROLES, CONTEXT, STYLES, st.booleans(), st.sampled_from(["", "trl/grpo", "verl"]))
def test_a_role_is_read_whatever_the_style_and_the_context(role_and_name, context, style, before, source):
    """Also beside the names of a trainer that is known: loops of one's own use some of them."""
    role, name = role_and_name
    said = f"{context} {name}" if before else f"{name} {context}"

    assert role in known([written(said.strip(), style), "frac_reward_zero_std"], source)


@given(ROLES, st.sampled_from(POISON), STYLES, st.booleans())
def test_a_word_that_changes_the_meaning_is_never_looked_through(role_and_name, poison, style, before):
    """A wrong role is worse than none."""
    role, name = role_and_name
    said = f"{poison} {name}" if before else f"{name} {poison}"

    assert role not in known([written(said, style)])


@pytest.mark.parametrize(
    "name",
    [
        "reward_std", "reward_model_loss", "kl_coef", "max_length", "eval_reward", "best_reward", "reward_kl", "R2",
        "reward_scale", "frac_all_correct", "prompt_length", "critic_loss", "max_grad_norm", "clip_grad_norm",
        "cross_entropy", "entropy_coef", "answer_entropy", "token_accuracy", "mean_token_accuracy", "kl_target",
        "format_accuracy", "num_tokens", "total_tokens", "tokens_per_sec", "sft_loss", "value_loss", "episode_length",
        "reward_by_format", "chosen_reward", "z_score", "f1_score", "successes", "reward_hacking_rate", "correct", "ppo_kl",
    ],
)  # fmt: skip
def test_what_only_sounds_like_a_role_is_none(name):
    """Alone in a file, and beside the real one."""
    roles = {"reward/mean", "policy/entropy", "policy/kl_ref", "len/mean", "optim/grad_norm", "loss/policy"}

    assert known([name]) & roles == set()
    origin = canonicalise({name: 1.0, "mean_reward": 0.5, "avg_kl": 0.1})[1]
    assert (origin["reward/mean"], origin["policy/kl_ref"]) == ("mean_reward", "avg_kl")


@pytest.mark.parametrize(
    ("closer", "further"),
    [
        ("reward", "total_reward"), ("mean_reward", "reward_overall"), ("avg_reward", "accuracy"), ("score", "accuracy"),
        ("final_reward", "success_rate"), ("reward", "R"), ("R", "mean_score"), ("mean_reward", "reward_ema"),
        ("env/reward_mean", "ppo/returns/mean"), ("mean_reward", "avg_reward_last_20"), ("my_reward", "accuracy"), ("reward_mean", "episode_return"), ("policy_loss", "total_loss"), ("reward", "task_reward"),
    ],
)  # fmt: skip
def test_of_two_names_the_plainer_is_read(closer, further):
    """In either order, and the other does not stand in for it elsewhere."""
    for names in ((closer, further), (further, closer)):
        assert set(canonicalise(dict.fromkeys(names, 0.5))[1].values()) == {closer}
    assert shadowed([closer, further]) == ({further} if resolve(further).guess else set())


@pytest.mark.parametrize("source", ["", "trl/grpo", "verl", "openrlhf"])
def test_no_name_of_one_trainer_is_guessed_to_be_something_else_in_the_log_of_another(source):
    """``actor/ppo_kl`` is no KL to the reference there either."""
    meant = {}
    for metric in TABLE:
        for alias in metric.aliases:
            meant.setdefault(alias.name, set()).add(metric.name)
    read = {name: resolve(name, source) for name in meant}

    assert [
        name for name, found in read.items() if found and found.guess and found.metric.name not in meant[name]
    ] == []


@pytest.mark.parametrize("source", ["trl/reward", "trl/sft", "trl/dpo"])
def test_no_role_is_guessed_of_a_trainer_that_has_no_policy(source):
    """Their rewards are of given pairs, their entropy is that of given tokens."""
    assert not known(["mean_reward", "avg_entropy"], source) & {"reward/mean", "policy/entropy"}


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("charts/episodic_return", "reward/mean"), ("losses/policy_loss", "loss/policy"), ("losses/entropy", "policy/entropy"),
        ("losses/value_loss", "critic/value_loss"), ("env/reward_mean", "reward/mean"), ("solve%", "reward/mean"),
        ("tokens/responses_len_mean", "len/mean"), ("reward_avg100", "reward/mean"), ("kl_to_init", "policy/kl_ref"),
        ("valid_reward", "val/score"), ("grad_norm_pre_clip", "optim/grad_norm"), ("pass@1", "reward/mean"),
    ],
)  # fmt: skip
def test_the_groups_and_abbreviations_of_common_loops_are_looked_through(name, metric):
    """As CleanRL's and the older TRL's scripts have them, and those that were made of them."""
    assert known([name]) == {metric}


def test_a_reward_of_another_name_is_read_where_it_is_the_only_one():
    """Not one of several, not a part or a condition, not beside a plain one; and its statistics are none."""
    assert canonicalise({"wordle_reward": 0.5, "wordle_reward_std": 0.1})[1] == {"reward/mean": "wordle_reward"}
    assert canonicalise({"maze_reward": 0.5, "reward_kl": 1.0, "reward_model_loss": 2.0})[1] == {
        "reward/mean": "maze_reward"
    }
    for names in (["attack_reward", "defend_reward"], ["format_reward"], ["reward_on_win"], ["maze_reward_1"]):
        assert "reward/mean" not in known(names)
    assert canonicalise({"wordle_reward": 0.5, "reward": 0.4})[1] == {"reward/mean": "reward"}


def test_a_run_is_read_by_all_its_names_so_far():
    """Row by row, as it comes: a guess does not stand in where what is closer was seen before."""
    reader = RowReader()

    assert reader.canonicalise({"accuracy": 0.3})[0] == {"reward/mean": 0.3}
    assert reader.canonicalise({"mean_reward": 0.5, "accuracy": 0.4})[0] == {"reward/mean": 0.5}
    assert reader.canonicalise({"accuracy": 0.3})[0] == {}
    assert RowReader().canonicalise({"maze_reward": 0.1})[0] == {"reward/mean": 0.1}


def test_a_part_of_the_reward_is_called_one_only_where_its_whole_is_read():
    """Else nobody judged anything of it."""
    reason = "part of the reward"

    assert unjudged("reward_of_tests") == reason
    assert unjudged("reward_of_tests", whole=False) == ""
    assert [each.why for each in taken(["reward_of_tests", "reward"]) if not each.metric] == [reason]
    assert "whole" not in "".join(each.why for each in taken(["reward_of_tests", "reward_of_style"]))


def test_candidates_for_a_reward_that_is_not_read_are_named():
    """Those that sound like one, rewards first."""
    names = ["loss", "tests_reward", "style_reward", "reward_std", "eval_score", "quality_score"]

    assert like_rewards(names) == ["style_reward", "tests_reward", "quality_score"]


def test_an_accuracy_beside_a_loss_is_a_reward_only_where_there_is_a_policy():
    """Else it is that of labels, or, as LLaMA-Factory logs it of DPO, of preference pairs."""
    pairs = ["loss", "accuracy", "lr", "epoch", "percentage", "total_steps"]

    assert "reward/mean" not in known(pairs)
    assert canonicalise(dict.fromkeys(pairs, 0.5))[1] == {"loss/policy": "loss", "optim/lr": "lr"}
    assert {each.name: each.why for each in taken(pairs)}["accuracy"].startswith("accuracy on labels")
    assert like_rewards(pairs) == ["accuracy"]
    for more in ("kl", "entropy", "response_length", "reward_std"):
        assert canonicalise(dict.fromkeys([*pairs, more], 0.5))[1]["reward/mean"] == "accuracy"
    assert "reward/mean" not in known(["accuracy", "reward_model_loss", "kl_coef", "eval_reward"])
