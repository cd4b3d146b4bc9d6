"""Whose token it is: prompt, group, sample, rollout, task and rewards of a culprit, as far as the trainer knows them."""

import json

import numpy as np
import pytest
import torch
from planted import Planted, off_policy
from tiny_loop import FakeRun, fresh_policy, logp_of
from tiny_trl import FakeRun as FakeTRLRun
from tiny_trl import dataset, make_trainer

import rlwatch
from rlwatch.export import culprits_of
from rlwatch.integrations.localising import Localise
from rlwatch.integrations.trl import watch
from rlwatch.integrations.verl.batch import identity_of
from rlwatch.records import CULPRITS

pytestmark = pytest.mark.torch

EVERY_STEP = Localise(threshold=1e-12, share=0.99)
CONFIG = {
    "num_iterations": 2, "max_steps": 4, "max_completion_length": 12, "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
}  # fmt: skip


def worst(run, step):
    batch = next(b for b in run.spikes if b.reason == CULPRITS and b.step == step)
    return culprits_of(batch)[0]


@pytest.mark.parametrize("text", [False, True])
def test_trl_tells_whose_token_it_is(tmp_path, text):
    """Through its shuffle: dataset row, group and sample of the generation, what each reward function gave."""
    columns = {"task": lambda i: f"task {i % 3}"}
    data = dataset(**columns)
    trainer, run = make_trainer(tmp_path, columns=columns, **CONFIG), FakeTRLRun()
    watch(trainer, run=run, localise=EVERY_STEP, text=text)
    planted = Planted(trainer, off_policy(), micro_batch=1)
    seen, original = [], trainer._compute_loss

    def loss(model, inputs):
        if trainer.state.global_step == 3:
            seen.append(inputs["prompt_ids"].clone())
        return original(model, inputs)

    trainer._compute_loss = loss
    trainer.train()
    row = worst(run, 4)
    prompt = trainer.processing_class.decode(seen[1][planted.places[0][0]], skip_special_tokens=True)

    assert data[row["prompt_index"]]["prompt"].replace(" ", "") == prompt.replace(" ", "")
    assert row["task"] == f"task {row['prompt_index'] % 3}"
    assert int(row["rollout"]) // trainer.num_generations == int(row["group"])
    assert int(row["rollout"]) % trainer.num_generations == row["sample"]
    assert row["sampler_version"] == 2
    assert sum(json.loads(row["reward_parts"]).values()) == pytest.approx(row["reward"])
    assert ("prompt" in row) == text
    assert row.get("prompt", prompt).replace(" ", "") == prompt.replace(" ", "")


def test_a_column_that_numbers_the_rows_is_believed(tmp_path):
    """The dataset of the trainer may be a part of another one."""
    trainer, run = make_trainer(tmp_path, columns={"idx": lambda i: 1000 + i}, **CONFIG), FakeTRLRun()
    watch(trainer, run=run, localise=EVERY_STEP)
    trainer.train()

    assert all(row["prompt_index"] >= 1000 for b in run.spikes if b.reason == CULPRITS for row in culprits_of(b))


IDS = torch.randint(1, 9, (6, 7), generator=torch.Generator().manual_seed(3))
GIVEN = {
    "rewards": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "groups": 2, "tasks": ["a", "a", "b", "b", "c", "c"],
    "prompt_index": torch.arange(6) // 2 + 70, "prompts": [f"prompt {i // 2}" for i in range(6)],
}  # fmt: skip


def a_step(generation, observed, rows):
    """One step of a loop that trains on some responses of its last generation, the second planted."""
    policy, run = fresh_policy(), FakeRun()
    watcher = rlwatch.Watcher(policy, run=run, localise=EVERY_STEP, strict=True)
    watcher.rollouts(rewards=[1.0, 2.0])
    watcher.rollouts(**generation)
    logp, _ = watcher.forward(logp_of, policy, IDS[rows])
    weights = torch.ones(len(rows), 6)
    weights[1, 3] = 500.0
    watcher.observe(logp=logp, mask=torch.ones(len(rows), 6), **observed)
    (logp * weights).sum().backward()
    watcher.gradients()
    return worst(run, 1)


@pytest.mark.parametrize("how", ["told", "by ids"])
def test_a_loop_tells_which_responses_it_trains_on(how):
    """Or their ids tell."""
    rows = [5, 3, 0]
    if how == "told":
        row = a_step(GIVEN, {"responses": torch.tensor(rows)}, rows)
    else:
        row = a_step({**GIVEN, "ids": IDS[:, 1:], "mask": torch.ones(6, 6)}, {"ids": IDS[rows][:, 1:]}, rows)

    wanted = {"prompt_index": 71, "task": "b", "group": "1", "sample": 1, "rollout": "5", "reward": 3.0}
    assert {name: row[name] for name in wanted} == wanted
    assert "prompt" not in row


@pytest.mark.parametrize("responses", [[0, 1], torch.tensor([9, 99, -1]), "abc", 3.5, [None, None, None]], ids=str)
def test_numbers_that_are_no_responses_tell_nothing(responses):
    """The culprit is named all the same."""
    row = a_step(GIVEN, {"responses": responses}, [5, 3, 0])

    assert row["position"] == 3
    assert row.get("task") is None
    assert not isinstance(row.get("reward"), float) or np.isnan(row["reward"])


def test_verl_tells_what_it_sends_along():
    """``uid`` is the prompt group, ``extra_info`` has the row; columns of other lengths are none of these."""
    data = {"uid": ["x", "x"], "data_source": np.array(["gsm8k", "math"], dtype=object), "request_id": ["one"]}

    assert identity_of(data | {"extra_info": [{"index": 7}, {}]}, 2) == {
        "group": ["x", "x"],
        "task": ["gsm8k", "math"],
        "prompt_index": [7, None],
    }
