"""The training of the demo, cut to a few steps: real TRL, the schedule of the recipe, the same every time."""

import random
from dataclasses import replace

import pytest
import torch
import transformers

from rlwatch.demo import Recipe, training
from rlwatch.demo.training import VOCABULARY, build_trainer, character_tokenizer, random_policy, warm_start
from rlwatch.integrations.trl import watch
from rlwatch.store.url import open_store

pytestmark = pytest.mark.torch
SHORT = Recipe(steps=4, batch=16, generations=8, warm_start_steps=2, warm_up_steps=1, settled_step=2, range_test_step=2)


@pytest.fixture(autouse=True)
def _one_thread_and_no_chatter():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def tokenizer():
    return character_tokenizer()


def test_a_character_is_a_token_and_text_comes_back_whole(tokenizer):
    """Nothing merged, nothing unknown."""
    ids = tokenizer("31524=")["input_ids"]

    assert len(ids) == 6
    assert tokenizer.decode(ids) == "31524="
    assert len(tokenizer) == len(VOCABULARY) == 15


def test_the_policy_is_tiny_and_ends_its_answers(tokenizer):
    """Some 75 thousand parameters; the special tokens are the tokenizer's."""
    policy = random_policy(tokenizer)

    assert 50_000 < sum(p.numel() for p in policy.parameters()) < 100_000
    assert policy.config.eos_token_id == tokenizer.eos_token_id


def test_a_warm_start_teaches_the_form_of_an_answer(tokenizer):
    """Below ln 15, the loss of knowing nothing, after a few batches."""
    torch.manual_seed(0)
    policy = random_policy(tokenizer)

    assert warm_start(policy, tokenizer, 10, random.Random(0)) < 2.4


def test_the_reference_begins_as_the_policy(tmp_path):
    """Else KL would not begin at zero."""
    trainer = build_trainer(SHORT, tmp_path)
    ours, theirs = trainer.model.parameters(), trainer.ref_model.parameters()

    assert all(torch.equal(p, r) for p, r in zip(ours, theirs, strict=True))


def test_the_learning_rates_the_trainer_used_are_the_recipes(tmp_path):
    """As logged, one a step; KL begins at zero; the run is watched to its end."""
    trainer = build_trainer(SHORT, tmp_path)
    run = watch(trainer, project="demo", store=tmp_path / "runs")
    trainer.train()
    store = open_store(tmp_path / "runs")
    series = store.series(run.info.run_id, ["learning_rate", "kl", "reward"])

    assert series["learning_rate"].values == pytest.approx(
        [SHORT.learning_rate_at(step) for step in range(SHORT.steps)]
    )
    assert series["kl"].values[0] == pytest.approx(0.0, abs=1e-6)
    assert len(series["reward"].values) == SHORT.steps
    assert store.run(run.info.run_id).config["beta"] == SHORT.beta


def test_the_same_seed_gives_the_same_run(tmp_path):
    """Prompts, warm start, sampling: all from the seed. Another seed gives another run."""

    def rewards(recipe, name):
        trainer = build_trainer(replace(recipe, steps=2), tmp_path / name)
        trainer.train()
        return [(row["reward"], row["entropy"]) for row in trainer.state.log_history if "reward" in row]

    first, again, other = rewards(SHORT, "a"), rewards(SHORT, "b"), rewards(replace(SHORT, seed=1), "c")

    assert first == again
    assert first != other


def test_prompts_carry_their_answers(tmp_path):
    """The column the reward function asks for."""
    rows = build_trainer(SHORT, tmp_path).train_dataset

    assert set(rows.column_names) == {"prompt", "target"}
    assert all(training.answer(row["prompt"]) == row["target"] for row in rows.select(range(50)))
