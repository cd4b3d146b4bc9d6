"""What is measured of a generation: groups, lengths, tasks and text, and the completions that are kept."""

import math

import numpy as np
import pytest
import torch
from tiny_trl import FakeRun, GRPOTrainer, digits, make_trainer

from rlwatch.integrations.completions import KeepCompletions, prompt_id, repetition
from rlwatch.integrations.trl import watch
from rlwatch.integrations.trl.attach import RolloutStepCallback
from rlwatch.integrations.trl.batch import as_text, tasks_of, total_rewards

pytestmark = pytest.mark.torch


class Generating(GRPOTrainer):
    """Keeps what every generation was: the ids as lists, the rewards of all functions."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.generations = []

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.generations.append((rewards, completions, completion_ids_list))
        return rewards


def test_groups_and_lengths_are_those_of_the_generation(watched):
    """Against numpy, from what the trainer itself held, step by step."""
    trainer, run = watched(cls=Generating, max_completion_length=8)

    for (rewards, _, ids), tap in zip(trainer.generations, run.taps().values(), strict=True):
        lengths = np.array([len(one) for one in ids])
        groups = rewards[:, 0].double().numpy().reshape(-1, 4)
        assert tap["reward/mean"] == pytest.approx(groups.mean())
        assert tap["reward/std"] == pytest.approx(groups.std(ddof=1))
        assert tap["reward/group_std"] == pytest.approx(groups.std(axis=1, ddof=1).mean())
        assert tap["reward/zero_std_frac"] == np.mean(np.ptp(groups, axis=1) < 1e-6)
        assert tap["len/mean"] == pytest.approx(lengths.mean())
        assert tap["len/p99"] == pytest.approx(np.quantile(lengths, 0.99))
        assert tap["len/clipped"] == np.mean([one[-1] not in (0, 2) for one in ids])


def test_a_group_of_rewards_that_differ_by_rounding_only_is_silent(watched):
    """0.1 + 0.2 is not 0.3: TRL's own fraction compares a standard deviation with zero and may miss it."""

    def reward(completions, **kwargs):
        return [(0.1 + 0.2) + 1e-8 * (i % 2) for i in range(len(completions))]

    _, run = watched(reward=reward, max_steps=1)

    assert run.taps()[1]["reward/zero_std_frac"] == 1.0


def test_rewards_are_distinguished_by_the_datasets_task_column(watched):
    """Means per task, which recombine to the whole."""
    tasks = {"data_source": lambda row: "math" if row % 2 else "code/py"}
    _, run = watched(columns=tasks, max_steps=2, per_device_train_batch_size=16)

    for tap in run.taps().values():
        assert {n for n in tap if n.startswith("reward/by_task/")} <= {"reward/by_task/math", "reward/by_task/code/py"}
        assert {n for n in tap if n.startswith("len/by_task/")} <= {"len/by_task/math", "len/by_task/code/py"}
    assert any("reward/by_task/math" in tap for tap in run.taps().values())


def test_no_text_leaves_the_trainer_unless_asked_for(watched):
    """Measures of text are numbers."""
    _, run = watched(max_steps=2)

    assert run.completions == []


def test_completions_are_kept_with_their_rewards_and_advantages(watched):
    """As TRL logged them: the text, the weighted reward, the advantage, the length."""
    trainer, run = watched(
        cls=Generating, watching={"completions": KeepCompletions(every=2, rows=3)}, max_steps=4, columns={"task": str}
    )

    assert [batch.step for batch in run.completions] == [1, 3]
    for batch, (rewards, texts, ids) in zip(run.completions, trainer.generations[::2], strict=True):
        assert len(batch) == 3
        for row in range(3):
            at = texts.index(batch.columns["completion"][row])
            same = [i for i, text in enumerate(texts) if text == texts[at]]
            assert batch.columns["reward"][row] == pytest.approx(rewards[at, 0].item())
            assert batch.columns["length"][row] in {len(ids[i]) for i in same}
            assert batch.columns["repetition"][row] == pytest.approx(repetition(ids[at]))
            assert batch.columns["prompt_id"][row] == prompt_id(batch.columns["prompt"][row])
        assert np.array_equal(batch.columns["reward"], batch.columns[f"reward/{trainer.reward_func_names[0]}"])
        assert set(batch.columns) == {
            "prompt", "completion", "prompt_id", "chars", "generated", "repetition", "reward", "advantage", "length",
            "group", "task", f"reward/{trainer.reward_func_names[0]}",
        }  # fmt: skip


@pytest.mark.parametrize(("kind", "more"), [("grpo", {"num_iterations": 2}), ("rloo", {})])
def test_the_kl_of_a_completion_is_kept_where_there_is_a_reference(watched, kind, more):
    """In nats a token; the reference is the policy itself at the first step."""
    _, run = watched(kind=kind, beta=0.1, max_steps=3, watching={"completions": KeepCompletions(every=1)}, **more)

    first, last = run.completions[0], run.completions[-1]
    assert first.columns["kl"] == pytest.approx(np.zeros(len(first)), abs=1e-6)
    assert np.isfinite(last.columns["kl"]).all()


def test_a_reward_function_that_judges_only_some_rows_leaves_the_others_out(watched):
    """None is no reward: neither 0 nor NaN enters the mean."""

    def some(completions, **kwargs):
        return [None if i % 4 == 0 else 1.0 for i in range(len(completions))]

    _, run = watched(reward=some, max_steps=1, watching={"completions": True})
    tap = run.taps()[1]

    assert tap["reward/mean"] == 1.0
    assert "nonfinite/reward" not in tap or tap["nonfinite/reward"] == 0
    assert math.isnan(run.completions[0].columns["reward"][0])


def test_evaluation_generations_are_neither_measured_nor_kept(watched):
    """Only what is trained on."""
    trainer, run = watched(
        cls=Generating, watching={"completions": KeepCompletions(every=1)},
        eval_rows=8, eval_strategy="steps", eval_steps=1, max_steps=2,
    )  # fmt: skip

    assert len(trainer.generations) > 2
    assert [batch.step for batch in run.completions] == [1, 2]


def test_text_is_measured_off_the_training_thread_with_a_tokenizer_of_its_own(tmp_path):
    """The ids of this character tokenizer survive decoding; the report comes with a later step."""
    trainer, run = make_trainer(tmp_path, max_steps=1), FakeRun()
    watch(trainer, run=run)
    steps = next(c for c in trainer.callback_handler.callbacks if isinstance(c, RolloutStepCallback))
    probe = steps.taps.sampled.probe
    trainer.train()
    late = probe.take(wait=True)
    measured = {**run.taps()[1], **late}

    assert measured["text/retok_exact"] == 1.0
    assert probe.tokenizer is not trainer.processing_class


def test_rloo_generations_are_measured_too(watched):
    """Both trainers compute rewards by the same method."""
    _, run = watched(kind="rloo", max_steps=1, watching={"completions": True})

    assert {"reward/group_std", "len/p99"} <= set(run.taps()[1])
    assert len(run.completions) == 1


def test_several_reward_functions_add_up_as_the_trainer_adds_them(watched):
    """Weighted; the mean is TRL's own."""

    def length(completions, **kwargs):
        return [float(len(text)) for text in completions]

    _, run = watched(reward=[digits, length], reward_weights=[1.0, 0.5], max_steps=2, watching={"completions": True})

    for step, row in run.rows().items():
        assert run.taps()[step]["reward/mean"] == pytest.approx(row["reward"], rel=1e-5)
    kept = run.completions[0].columns
    assert len(kept["reward"]) == 8
    assert np.mean(kept["reward"]) == pytest.approx(run.rows()[1]["reward"], rel=1e-5)


def test_a_row_no_function_rewards_has_no_reward():
    """All NaN is NaN, some NaN is the sum of the others: TRL's rule."""
    rewards = torch.tensor([[1.0, 2.0], [math.nan, 2.0], [math.nan, math.nan]])

    assert total_rewards(rewards, torch.tensor([1.0, 0.5])).tolist()[:2] == [2.0, 1.0]
    assert total_rewards(rewards, torch.tensor([1.0, 0.5]))[2].isnan()


def test_conversations_read_as_their_messages():
    """Text parts only; images and nulls are passed over."""
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "2+2?"}, {"type": "image"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": "4"},
    ]

    assert as_text(chat) == "user: 2+2? \nassistant: \nassistant: 4"
    assert as_text("plain") == "plain"
    assert as_text(["odd", 3]) == "odd\n3"


def test_a_dataset_without_a_task_column_has_no_tasks():
    """Guessing one would make a metric for every prompt."""
    assert tasks_of([{"prompt": "a"}]) is None
    assert tasks_of([]) is None
    assert tasks_of([{"task": "x", "data_source": "y"}, {"task": "x"}]) == ["y", None]


def with_tools(prompts, trainer):
    """A rollout whose third and fourth of six tokens an environment wrote; every second response is cut."""
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    said = [[4, 5, 14, 14, 6 + i % 3, 2 if i % 2 else 5] for i in range(len(prompts))]
    own = [[1, 1, 0, 0, 1, 1] if i % 4 else [1, 1, 0, 0, 0, 1] for i in range(len(prompts))]
    return {"prompt_ids": ids, "completion_ids": said, "logprobs": [[-2.6] * 6] * len(said), "env_mask": own}


class Acting(GRPOTrainer):
    """Samples with :func:`with_tools`, as an agent's trainer does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, rollout_func=with_tools, **kwargs)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "truncated ones masked"])
def test_tokens_an_environment_wrote_are_no_part_of_a_response(watched, masked):
    """Lengths are TRL's: of what the policy wrote, whether or not the loss leaves out what was cut."""
    _, run = watched(
        cls=Acting, max_steps=2, mask_truncated_completions=masked, watching={"completions": KeepCompletions(every=1)}
    )

    for step, tap in run.taps().items():
        row = run.rows()[step]
        lengths = [row[f"completions/{kind}_length"] for kind in ("mean", "max", "min")]
        assert [tap["len/mean"], tap["len/max"], tap["len/min"]] == lengths == [3.75, 4.0, 3.0]
        assert tap["len/clipped"] == row["completions/clipped_ratio"] == 0.5
        assert tap["tokens/environment_leak"] == 0
        assert tap["tokens/environment_frac"] == pytest.approx(2 / 6 if masked else 2.25 / 6)
        assert tap["mismatch/logp_absdiff"] > 0
    assert sorted(set(run.completions[0].columns["length"])) == [3.0, 4.0]
