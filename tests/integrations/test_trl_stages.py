"""Stages of real TRL and Hugging Face trainers, and a reward function that never returns."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
from preloaded import Program
from tiny_trainer import make_trainer as make_plain_trainer
from tiny_trl import make_trainer

from rlwatch.control.liveness import stack_of, stalls_now
from rlwatch.integrations.transformers import RLWatchCallback
from rlwatch.integrations.transformers import watch as watch_plain
from rlwatch.integrations.trl import watch
from rlwatch.records import STAGES, STALLED
from rlwatch.store.url import open_store

pytestmark = pytest.mark.torch

DEADLINE_S = 300.0


def stages_of(store, run_id):
    """Step -> stages in their order."""
    return {batch.step: list(batch.columns["stage"]) for batch in store.spikes(run_id, reason=STAGES)}


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_each_step_has_its_stages_in_order(tmp_path, kind, monkeypatch):
    """Sampling, then rewards and log-probs within it, then the update; checkpoint and evaluation where they come.

    And a healthy run does not stall, however short the patience.
    """
    monkeypatch.setenv("RLWATCH_STALL_S", "20")
    trainer = make_trainer(
        tmp_path, kind=kind, beta=0.1, eval_rows=8, eval_strategy="steps", eval_steps=2, save_strategy="steps",
        save_steps=2,
    )  # fmt: skip
    run = watch(trainer, store=f"memory://stages-{kind}", run_id="tiny", system=False)
    trainer.train()
    store = open_store(f"memory://stages-{kind}")
    found, names = stages_of(store, "tiny"), store.metric_names("tiny")

    assert list(found) == [1, 2, 3]
    for step in found:
        assert set(found[step]) >= {"sampling", "reward", "logprobs", "update"}
    first = list(dict.fromkeys(stage for stage in found[1] if stage != "update"))
    assert first.index("sampling") < first.index("reward")
    assert {"evaluation", "checkpoint"} <= set(found[3])
    assert {f"time/stage/{stage}" for stage in ("sampling", "reward", "logprobs", "update")} <= set(names)
    assert run.stages.running() == []
    assert [event.kind for event in store.events("tiny") if event.kind == STALLED] == []


def test_weights_are_bit_for_bit_those_of_training_without_stages(tmp_path):
    """Against a trainer that nobody watches."""
    weights = []
    for watched in (False, True):
        trainer = make_trainer(tmp_path / str(watched), beta=0.1, num_iterations=2)
        if watched:
            watch(trainer, store="memory://stages-identity", run_id="same", system=False)
        trainer.train()
        weights.append([p.detach().clone() for p in trainer.model.parameters()])

    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert stages_of(open_store("memory://stages-identity"), "same")


@pytest.mark.parametrize("how", ["watch", "callback"])
def test_any_trainer_shows_its_updates_and_evaluations(tmp_path, how):
    """With its methods timed, or by its callbacks alone."""
    trainer = make_plain_trainer(tmp_path, eval_strategy="steps", eval_steps=2)
    store = f"memory://stages-plain-{how}"
    if how == "watch":
        watch_plain(trainer, store=store, run_id="plain", system=False)
    else:
        trainer.add_callback(RLWatchCallback(store=store, run_id="plain", system=False))
    trainer.train()
    found = stages_of(open_store(store), "plain")

    assert {"update", "evaluation"} <= {stage for stages in found.values() for stage in stages}
    assert "time/stage/update" in open_store(store).metric_names("plain")


HANGS = """
import os, sys, time
from pathlib import Path
from tiny_trl import digits, make_trainer
from rlwatch.integrations.trl import watch

calls = []
def judge_that_never_answers(completions, **kwargs):
    calls.append(1)
    if len(calls) == 3:
        print("hangs", flush=True)
        time.sleep(3600)
    return digits(completions)

trainer = make_trainer(Path(sys.argv[1]), reward=judge_that_never_answers, max_steps=10)
watch(trainer, run_id="hangs", system=False)
trainer.train()
"""


def test_a_reward_function_that_blocks_is_named_from_another_process(tmp_path):
    """The stage, since when, and the function, in the stack of the training thread."""
    env = {**os.environ, "RLWATCH_STORE": str(tmp_path / "store"), "RLWATCH_STALL_S": "1"}
    env["PYTHONPATH"] = str(Path(__file__).parent)
    begun = time.time()
    with Program(HANGS, tmp_path, env=env, stdout=subprocess.PIPE) as program:
        assert program.stdout.readline() == "hangs\n"
        store, end = open_store(str(tmp_path / "store")), time.monotonic() + DEADLINE_S
        while not (stalls := stalls_now(store.run("hangs"), store.events("hangs"))) and time.monotonic() < end:
            time.sleep(0.1)
        run = store.run("hangs")
    [stall] = stalls

    assert (stall.step, stall.body["stage"], stall.body["what"], stall.body["rank"]) == (2, "reward", "starved", 0)
    assert stall.body["within"] == ["sampling", "update"]
    assert begun < stall.body["since"] < time.time()
    assert stack_of(stall)[-1].startswith("judge_that_never_answers (")
    assert (run.stage, run.stage_since) == ("reward", pytest.approx(stall.body["since"], abs=0.01))
