"""What TRL can hand over that is odd: the right number or none, and never an exception in training."""

import math

import pytest
import torch
from tiny_trl import FakeRun, GRPOTrainer, digits, make_trainer, model_on_disk

from rlwatch.integrations.trl import watch
from rlwatch.integrations.trl.batch import correction_stats, sequence_stats, token_batch

pytestmark = pytest.mark.torch


def finite(tap):
    """Metrics that are not a number, but for those of the loss and its gradient."""
    return {n for n, v in tap.items() if not math.isfinite(v) and not n.startswith(("loss", "grad", "optim"))}


def silent(prompts, trainer):
    """A rollout in which the policy wrote nothing in every second response."""
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    own = [[1, 1, 1, 1] if i % 2 else [0, 0, 0, 0] for i in range(len(prompts))]
    said = [[4, 5 + i % 3, 6, 2] for i in range(len(prompts))]
    return {"prompt_ids": ids, "completion_ids": said, "logprobs": [[-2.6] * 4] * len(said), "env_mask": own}


class Silent(GRPOTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, rollout_func=silent, **kwargs)


def test_responses_in_which_the_policy_wrote_nothing_have_length_0_and_no_statistics(watched):
    """They are counted, and no mean over tokens divides by 0."""
    _, run = watched(cls=Silent, max_steps=3, num_iterations=2, beta=0.1, importance_sampling_level="sequence")

    for tap in run.taps().values():
        assert finite(tap) == set()
    tap = run.taps()[1]
    assert (tap["len/mean"], tap["len/min"], tap["len/empty"]) == (2.0, 0.0, 0.5)
    assert tap["tokens/environment_frac"] == 0.5
    assert tap["ratio/geo_max"] == tap["ratio/seq_max"] == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision_are_measured_in_single(tmp_path, dtype):
    """Log-probs come in the model's precision; statistics of them are finite and the trainer's own."""
    trainer = make_trainer(
        tmp_path, model=model_on_disk(tmp_path / "m").to(dtype), num_iterations=2, max_steps=2, learning_rate=1e-5
    )
    run = FakeRun()
    watch(trainer, run=run)
    trainer.train()

    assert run.counters.snapshot() == {}
    for step, tap in run.taps().items():
        row = run.rows()[step]
        assert finite(tap) == set()
        assert tap["policy/entropy"] == pytest.approx(row["entropy"], rel=1e-2)
        assert tap["optim/grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-2)


def of(values):
    """A reward function that gives these, over and over."""

    def reward(completions, **kwargs):
        return [values[i % len(values)] for i in range(len(completions))]

    return reward


def test_a_batch_nobody_rewards_has_no_reward_and_no_nan(watched):
    """Every function returned None: TRL's row says None, which is NaN; ours leaves the mean out."""
    _, run = watched(reward=of([None]), max_steps=2)

    for step, tap in run.taps().items():
        assert math.isnan(run.rows()[step]["reward"])
        assert not any(name.startswith("reward/") and not math.isfinite(value) for name, value in tap.items())
        assert "reward/mean" not in tap
        assert tap["len/mean"] > 0


def test_a_reward_that_is_infinite_is_counted(watched):
    """Not hidden, not averaged away."""
    _, run = watched(reward=of([math.inf, 0.0, 1.0, 0.5]), max_steps=1)

    assert run.taps()[1]["nonfinite/reward"] == 2
    assert run.taps()[1]["reward/mean"] == math.inf


class NaNAdvantages(GRPOTrainer):
    """A subclass whose first advantage is not a number."""

    def _generate_and_score_completions(self, inputs):
        outputs = super()._generate_and_score_completions(inputs)
        outputs["advantages"][0] = math.nan
        return outputs


def test_an_advantage_that_is_no_number_is_counted_and_shows(watched):
    """NaN in, NaN out: a mean that hid it would be wrong."""
    _, run = watched(cls=NaNAdvantages, max_steps=1, num_iterations=2)
    tap = run.taps()[1]

    assert tap["nonfinite/advantage"] == 1
    assert math.isnan(tap["adv/mean"])
    assert math.isfinite(tap["policy/entropy"])
    assert tap["nonfinite/loss"] == 1


class PerToken(GRPOTrainer):
    """TRL lets subclasses give an advantage to every token."""

    def _generate_and_score_completions(self, inputs):
        outputs = super()._generate_and_score_completions(inputs)
        outputs["advantages"] = outputs["advantages"][:, None] * torch.ones_like(outputs["completion_mask"])
        return outputs


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_advantages_of_tokens_are_read_as_such(watched, level):
    """Their mean is over tokens; clip fractions of whole responses are not made up."""
    _, run = watched(cls=PerToken, max_steps=2, num_iterations=2, importance_sampling_level=level)
    tap = run.taps()[2]

    assert finite(tap) == set()
    assert math.isfinite(tap["adv/mean"])
    assert ("ratio/clipfrac" in tap) == (level == "token")


def test_a_ragged_evaluation_is_recorded(watched):
    """Five prompts in batches of eight completions: the last batch is smaller."""
    _, run = watched(
        eval_rows=5, eval_strategy="steps", eval_steps=1, max_steps=1, per_device_eval_batch_size=8,
        num_generations_eval=4,
    )  # fmt: skip

    assert any("eval_reward" in metrics for _, metrics in run.logged)


def inputs(**more):
    return {"completion_ids": torch.tensor([[4, 5], [6, 2]]), "completion_mask": torch.ones(2, 2), **more}


def test_what_is_missing_is_missing(tmp_path):
    """No advantages, entropies, old, reference or engine log-probs: nothing stands in for them."""
    trainer = make_trainer(tmp_path, importance_sampling_level="sequence")
    batch = token_batch(trainer, inputs(), torch.full((2, 2), -1.0), None)
    absent = (batch.entropy, batch.advantages, batch.old_logp, batch.ref_logp, batch.rollout_logp, batch.environment)

    assert absent == (None,) * 6
    assert sequence_stats(trainer, inputs(), batch) == {}
    assert correction_stats(inputs(), batch) == {}


def test_a_batch_of_no_responses_measures_nothing(tmp_path):
    """Counts of 0, which are left out of the record."""
    trainer = make_trainer(tmp_path)
    none = torch.zeros(0, 2)
    given = {"completion_ids": none.long(), "completion_mask": none, "old_logps": none[:, 0]}
    batch = token_batch(trainer, given, none, none)

    assert all(stat.count == 0 for stat in sequence_stats(trainer, given, batch).values())


def test_unequal_rewards_of_ordinary_training_are_finite(watched):
    """The check these tests rely on can pass."""
    _, run = watched(reward=digits, max_steps=2, num_iterations=2, beta=0.1)

    assert all(finite(tap) == set() for tap in run.taps().values())
