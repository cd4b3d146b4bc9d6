"""The real command, ``openrlhf.cli.train_ppo_ray``, on Ray with DeepSpeed: watched, unwatched, and told to stop.

Only vLLM and flash-attn are stand-ins, and ``torch.cuda`` says that its device is the CPU.
"""

import ast
import hashlib
import re
import threading
import time

import pytest
from run import Cluster
from world import make

import rlwatch
from rlwatch.control.commands import request

STEPS = 3
SMALL = {
    "rollout__batch_size": 1,
    "rollout__n_samples_per_prompt": 8,
    "train__batch_size": 8,
    "data__max_samples": STEPS,
}
"""One prompt a step: samples then come back in one order, so that two trainings can be compared bit by bit."""


@pytest.fixture(scope="module")
def cluster():
    with Cluster() as ray:
        yield ray


def steps_of(store, run_id):
    merged = {}
    for record in store.records(run_id):
        merged.setdefault(record.step, {}).update(record.metrics)
    return merged


def console_rows(output):
    """Global step -> OpenRLHF's own numbers, without what takes time."""
    rows = {}
    for step, row in re.findall(r"Global step (\d+): (\{.*\})", output):
        rows[int(step)] = {k: v for k, v in ast.literal_eval(row).items() if not k.startswith("timing/")}
    return rows


def weights(where):
    return hashlib.sha256((where / "final" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def trainings(cluster, tmp_path_factory):
    """The same training unwatched and watched: (output, directory) of each, and the store."""
    plain, seen = (make(tmp_path_factory.mktemp(name)) for name in ("plain", "seen"))
    store = str(seen / "runs")
    outputs = [
        cluster.train(plain, rlwatch=None, steps=STEPS, **SMALL),
        cluster.train(seen, rlwatch=["--rlwatch.store", store, "--rlwatch.run_id", "seen"], steps=STEPS, **SMALL),
    ]
    return {"plain": (outputs[0], plain), "seen": (outputs[1], seen), "store": rlwatch.open_store(store)}


def test_training_is_bit_identical_to_training_unwatched(trainings):
    """Final weights, and every number of OpenRLHF's own console rows."""
    rows = {name: console_rows(trainings[name][0]) for name in ("plain", "seen")}

    assert sorted(rows["plain"]) == list(range(1, STEPS + 1))
    assert rows["plain"] == rows["seen"]
    assert weights(trainings["plain"][1]) == weights(trainings["seen"][1])


def test_the_run_holds_every_step_openrlhfs_names_and_ours(trainings):
    """Under OpenRLHF's project, finished with training; nothing of ours shows in its console."""
    output, store = trainings["seen"][0], trainings["store"]
    (info,) = store.runs()
    steps = steps_of(store, "seen")

    assert (info.source, info.project, info.state) == ("openrlhf", "openrlhf_train_ppo", "finished")
    assert sorted(steps) == list(range(1, STEPS + 1))
    assert info.config["actor"]["eps_clip_low_high"] == [0.2, 0.2]
    for step, row in console_rows(output).items():
        assert row.items() <= steps[step].items()
    assert "rlwatch/parcel" not in output


SAME = {
    "mismatch/kl": "vllm_kl",
    "policy/kl_old": "ppo_kl",
    "ratio/clipfrac": "ppo_clip_ratio",
    "policy/kl_ref_k1": "logprobs_diff",
    "reward/mean": "rollout/reward_mean",
    "reward/std": "rollout/reward_std",
    "reward/group_std": "group_reward_std",
    "len/mean": "rollout/response_length_mean",
    "len/clipped": "rollout/truncated_rate",
}


@pytest.mark.parametrize("ours", SAME)
def test_what_we_measure_is_what_openrlhf_reports(trainings, ours):
    """Every step, through its real actors, DeepSpeed engine and Ray."""
    for step, row in steps_of(trainings["store"], "seen").items():
        assert row[ours] == pytest.approx(row[SAME[ours]], abs=2e-6), step


def test_tokens_nobody_else_shows_are_measured(trainings):
    """Entropy, the extremes of the mismatch, effective sample sizes."""
    row = steps_of(trainings["store"], "seen")[STEPS]

    assert 0 < row["policy/entropy"] <= 2.7081  # the logarithm of 15 tokens
    assert row["policy/vocab_size"] == 15
    assert 0 < row["mismatch/ess"] <= 1
    assert row["nonfinite/logp"] == row["nonfinite/loss"] == 0
    assert row["policy/kl_coef"] == 0.01


def ordered_to_stop(store_url, run_id, orders):
    """Sends a live run orders as soon as it can be found."""
    deadline = time.monotonic() + 600
    store = rlwatch.open_store(store_url)
    while time.monotonic() < deadline:
        if any(run.last_step for run in store.runs()):
            break
        threading.Event().wait(0.2)
    for kind, args in orders:
        request(store, run_id, kind, args=args, why="test", by="test")


@pytest.fixture(scope="module")
def told(cluster, tmp_path_factory):
    """A training of two policy actors that a person steers: (output, directory, store)."""
    where = make(tmp_path_factory.mktemp("told"))
    store = str(where / "runs")
    orders = [("reset-reference", {}), ("set-kl-coef", {"value": 0.02}), ("stop", {"save": "yes"})]
    two = {"actor__num_gpus_per_node": 2, "ref__num_gpus_per_node": 2, "vllm__num_engines": 2, "ckpt__save_hf": None}
    person = threading.Thread(target=ordered_to_stop, args=(store, "told", orders))
    person.start()
    ours = ["--rlwatch.store", store, "--rlwatch.run_id", "told"]
    output = cluster.train(where, rlwatch=ours, steps=64, **{**SMALL, **two, "data__max_samples": 64})
    person.join()
    return output, where, rlwatch.open_store(store)


def test_a_live_training_saves_and_stops_on_command_and_refuses_what_it_cannot(told):
    """Long before its last step, in good order: the final model is saved."""
    output, where, store = told
    last = max(console_rows(output))
    answers = {command.kind: command for command in store.commands("told")}

    assert last < 64
    assert store.run("told").state == "finished"
    assert (where / "final" / "model.safetensors").exists()
    assert (where / "checkpoints" / f"global_step{last}_hf").is_dir()
    assert answers["stop"].status == "done"
    assert answers["set-kl-coef"].status == "done"
    assert answers["reset-reference"].status == "rejected"
    assert "only load weights from a directory" in answers["reset-reference"].result


def test_the_shares_of_several_policy_actors_are_put_together_exactly(told):
    """OpenRLHF reduces its numbers over the actors by itself: ours must be the same."""
    for step, row in steps_of(told[2], "told").items():
        for ours in ("mismatch/kl", "policy/kl_old", "policy/kl_ref_k1", "len/mean"):
            assert row[ours] == pytest.approx(row[SAME[ours]], abs=2e-6), (step, ours)


def test_a_training_that_dies_is_recorded_with_its_cause(cluster, tmp_path):
    """The reward function raises, in vLLM's actor: OpenRLHF has no rewards then, and its trainer dies of that."""
    where = make(tmp_path / "world")
    (where / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n    raise ValueError('no such reward')\n"
    )
    store = str(tmp_path / "runs")
    with pytest.raises(RuntimeError):
        cluster.train(where, rlwatch=["--rlwatch.store", store, "--rlwatch.run_id", "died"], steps=1, **SMALL)
    opened = rlwatch.open_store(store)
    info = opened.run("died")
    (event,) = [e for e in opened.events("died") if e.kind == "exception"]

    assert info.state == "crashed"
    assert info.state_reason == event.body["error"] != ""
