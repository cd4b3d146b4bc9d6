"""The driver's batch, read from what verl's TransferQueue gives back; here without verl, from jagged tensors."""

import math
from types import SimpleNamespace

import pytest
import torch

from rlwatch.integrations.verl.batch import BatchSettings, StepBatch, finals
from rlwatch.tensors.observe import observe
from rlwatch.tensors.responses import observe_responses

EOS = 2
READING = BatchSettings(longest=4, eos=EOS)


def jagged(*rows, dtype=None):
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def queue(**changes):
    """Two prompts with two responses each, of 2, 4, 3 and 4 tokens."""
    given = {
        "responses": jagged([5, EOS], [5, 6, 7, 8], [5, 6, EOS], [5, 6, 7, EOS]),
        "response_mask": jagged([1, 1], [1, 1, 1, 1], [1, 0, 1], [1, 1, 1, 1]),
        "loss_mask": jagged([1, 1], [1, 1, 1, 1], [1, 0, 1], [1, 1, 1, 1]),
        "old_log_probs": jagged([-1.0, -2.0], [-1.0] * 4, [-1.0] * 3, [-1.0] * 4),
        "rollout_log_probs": jagged([-1.0, -2.5], [-1.0] * 4, [-1.0] * 3, [-1.0] * 4),
        "ref_log_prob": jagged([-1.5, -2.0], [-1.0] * 4, [-1.0] * 3, [-1.0] * 4),
        "entropy": jagged([0.5, 1.5], [1.0] * 4, [1.0] * 3, [1.0] * 4),
        "advantages": jagged([1.0, 1.0], [-1.0] * 4, [0.0] * 3, [0.0] * 4),
        "rm_scores": jagged([0.0, 1.0], [0.0] * 4, [0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]),
        "uid": ["a", "a", "b", "b"],
        "data_source": ["gsm8k", "gsm8k", "math", "math"],
    }
    return {name: column for name, column in {**given, **changes}.items() if column is not None}


def meta(rows=4, *, padding=(), keys=None, versions=None):
    tags = [{"is_padding": row in padding, "max_global_steps": (versions or [6] * rows)[row]} for row in range(rows)]
    keys = keys or [f"{'ab'[row // 2]}_{row % 2}_0" for row in range(rows)]
    return keys, tags


def metrics(stats):
    settled = {name: stat.settle() for name, stat in stats.items()}
    return {name: stat.value().item() for name, stat in settled.items() if stat.count > 0}


def tokens(batch, reading=READING):
    return metrics(observe(batch.token_batch(reading)))


def responses(batch, reading=READING):
    return metrics(observe_responses(batch.response_batch(reading)))


def test_tokens_are_those_of_the_response_mask():
    """12 of 13 tokens count: mismatch and KL of the two that differ, averaged over 12."""
    got = tokens(StepBatch.of(*meta(), queue(), step=7))

    assert got["mismatch/kl"] == pytest.approx(-0.5 / 12)
    assert got["mismatch/logp_absdiff"] == pytest.approx(0.5 / 12)
    assert got["policy/kl_ref_k1"] == pytest.approx(0.5 / 12)
    assert got["policy/entropy"] == pytest.approx(1.0)
    assert got["policy/logp_mean"] == pytest.approx(-13 / 12)


def test_padding_rows_do_not_exist():
    """verl pads a batch to the number of workers with rows of its own."""
    full, cut = StepBatch.of(*meta(), queue(), 7), StepBatch.of(*meta(padding=(3,)), queue(), 7)

    assert len(cut.keys) == 3
    assert responses(cut)["reward/mean"] == pytest.approx(2 / 3)
    assert responses(full)["reward/mean"] == pytest.approx(3 / 4)
    assert cut.named["uid"] == ["a", "a", "b"]


def test_rewards_groups_and_tasks():
    """The first group disagrees, the second is all right: it teaches nothing."""
    got = responses(StepBatch.of(*meta(), queue(), 7))

    assert got["reward/mean"] == pytest.approx(0.75)
    assert got["reward/zero_std_frac"] == pytest.approx(0.5)
    assert got["reward/zero_std_right_frac"] == pytest.approx(0.5)
    assert got["reward/by_task/gsm8k"] == pytest.approx(0.5)
    assert got["reward/by_task/math"] == pytest.approx(1.0)


def test_lengths_count_every_token_and_cut_means_without_an_end():
    """Of two responses of the greatest length only the one that does not end with EOS was cut."""
    got = responses(StepBatch.of(*meta(), queue(), 7))

    assert got["len/mean"] == pytest.approx(13 / 4)
    assert got["len/max"] == 4
    assert got["len/clipped"] == pytest.approx(0.25)


def test_tokens_of_the_environment_are_known_by_the_first_mask():
    """Masked from the start: a tool wrote them. Rejected later: a loss that does not count them."""
    rejected = jagged([0, 0], [1, 1, 1, 1], [1, 0, 1], [1, 1, 1, 1])
    batch = StepBatch.of(*meta(), queue(response_mask=rejected), 7)

    environment = batch.token_batch(READING).environment

    assert environment.nonzero().tolist() == [[2, 1]]


def test_staleness_is_counted_from_the_weights_of_the_step():
    """As verl does: at step 7 the weights of step 6 are fresh."""
    batch = StepBatch.of(*meta(versions=[6, 5, 6, 4]), queue(), 7)

    assert batch.staleness.tolist() == [0, 1, 0, 2]
    assert StepBatch.of(*meta(versions=[6, None, 6, 6]), queue(), 7).staleness is None


def test_only_the_last_output_of_a_session_has_the_reward():
    """Agents answer in several outputs; verl copies the reward to each of them."""
    assert finals(["u_0_0", "u_0_1", "u_1_0", "v_0_2", "v_0_1"]) == [False, True, True, True, False]
    assert finals(["one", "one_two", "a_b_c"]) == [True, True, True]

    keys = ["a_0_0", "a_0_1", "b_0_0", "b_1_0"]
    assert responses(StepBatch.of(*meta(keys=keys), queue(), 7))["reward/mean"] == pytest.approx(2 / 3)


def test_bypass_mode_knows_no_log_probs_of_the_trainer():
    """Old log-probs are the rollout engine's then: a mismatch of 0 would be a lie. Rewards are known all the same."""
    batch = StepBatch.of(*meta(), queue(), 7)
    reading = BatchSettings(longest=4, eos=EOS, bypass=True)

    assert batch.token_batch(reading) is None
    assert responses(batch, reading)["reward/mean"] == pytest.approx(0.75)


@pytest.mark.parametrize(
    "absent",
    ["rollout_log_probs", "ref_log_prob", "entropy", "advantages", "rm_scores", "uid", "data_source", "loss_mask"],
)
def test_what_is_missing_is_absent(absent):
    """Every optional field, one at a time: nothing is made up, nothing else is lost."""
    batch = StepBatch.of(*meta(), queue(**{absent: None}), 7)
    got = {**tokens(batch), **responses(batch)}
    prefix = {
        "rollout_log_probs": "mismatch/", "ref_log_prob": "policy/kl_ref", "entropy": "policy/entropy",
        "advantages": "adv/", "rm_scores": "reward/", "uid": "reward/zero_std", "data_source": "reward/by_task",
        "loss_mask": "tokens/environment",
    }[absent]  # fmt: skip

    assert not [name for name in got if name.startswith(prefix)]
    assert "policy/logp_mean" in got
    assert "len/mean" in got


def test_without_old_log_probs_there_are_no_tokens():
    """A critic warm-up, an unusual trainer."""
    batch = StepBatch.of(*meta(), queue(old_log_probs=None), 7)

    assert batch.token_batch(READING) is None
    assert "len/mean" in responses(batch)


def test_nan_is_counted_inside_the_mask_only():
    """In an observation's place it is harmless; in a response's it is told, by name."""
    outside = queue(old_log_probs=jagged([-1.0, -2.0], [-1.0] * 4, [-1.0, math.nan, -1.0], [-1.0] * 4))
    inside = queue(ref_log_prob=jagged([math.nan, -2.0], [-1.0] * 4, [-1.0] * 3, [-1.0] * 4))

    assert tokens(StepBatch.of(*meta(), outside, 7))["nonfinite/logp"] == 0
    got = tokens(StepBatch.of(*meta(), inside, 7))
    assert got["nonfinite/ref_logp"] == 1
    assert got["nonfinite/logp"] == 0
    assert math.isnan(got["policy/kl_ref_k3"])


def test_a_nan_reward_is_a_nan_reward():
    """Not 0, and not dropped."""
    got = responses(StepBatch.of(*meta(), queue(rm_scores=jagged([0.0, math.nan], [0.0] * 4, [0.0] * 3, [0.0] * 4)), 7))

    assert math.isnan(got["reward/mean"])
    assert got["nonfinite/reward"] == 1


def test_half_precision_is_read_as_it_is():
    """verl's columns may be bf16."""
    columns = {name: queue()[name].to(torch.bfloat16) for name in ("old_log_probs", "rollout_log_probs", "entropy")}

    assert tokens(StepBatch.of(*meta(), queue(**columns), 7))["policy/entropy"] == pytest.approx(1.0)


def test_a_batch_of_padding_alone_is_empty():
    """No rows: nothing is measured, and nothing breaks."""
    batch = StepBatch.of(*meta(padding=range(4)), queue(), 7)

    assert tokens(batch) == {}
    assert "reward/mean" not in responses(batch)


def config(**correction):
    algorithm = {"rollout_correction": correction or None}
    return SimpleNamespace(
        algorithm=algorithm, actor_rollout_ref=SimpleNamespace(rollout={"response_length": 128, "n": 4})
    )


def test_the_configuration_says_how_to_read():
    """The greatest length, the end of a response, the weight at which verl truncates, the mode."""
    tokenizer = SimpleNamespace(eos_token_id=9)

    plain = BatchSettings.of(config(), tokenizer)
    assert (plain.longest, plain.eos, plain.truncation, plain.bypass) == (128, 9, None, False)
    assert BatchSettings.of(config(rollout_is="token", rollout_is_threshold=3), tokenizer).truncation == 3.0
    assert BatchSettings.of(config(rollout_is="token", rollout_is_threshold="0.5_5"), tokenizer).truncation is None
    assert BatchSettings.of(config(rollout_is="sequence", rollout_is_threshold=3), tokenizer).truncation is None
    assert BatchSettings.of(config(bypass_mode=True), tokenizer).bypass
