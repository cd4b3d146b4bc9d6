"""Twins of failures that people reported, where no other test plants one; ``benchmarks/threads.py`` lists all of them."""

import random
import sys
from pathlib import Path

import pytest
import torch
from found import found, happened

import rlwatch
from rlwatch.diagnosis.diagnose import diagnose
from rlwatch.integrations.canaries import Canaries, Canary
from rlwatch.store.url import open_store
from rlwatch.view import stored_diagnosis


@pytest.mark.torch
def test_an_agent_that_writes_the_file_of_its_reward_is_given_away_by_a_canary(tmp_path):
    """OpenEnv 1199: the verifier reads a file that the agent can write. From the step at which it does."""
    verdicts = tmp_path / "reward.txt"

    def graded(answers):
        if verdicts.exists():
            return [float(verdicts.read_text())] * len(answers)
        return [float(answer == "42") for answer in answers]

    known = Canaries([Canary(["42"], right=True), Canary(["41"], right=False)], every=1)
    with rlwatch.Watcher(store=tmp_path / "runs", name="agent") as watcher:
        reward = watcher.verifier("graded", graded, canaries=known)
        for step in range(1, 25):
            if step == 12:
                verdicts.write_text("1.0")
            watcher.rollouts(rewards=reward(["42", "41", "40", "42"]), groups=4)
            watcher.step(step, loss=0.3)
    store = open_store(str(tmp_path / "runs"))
    (stored,) = store.runs()
    first = stored_diagnosis(store, stored).causes[0]

    assert (first.kind, first.knob) == ("verifier_changed", "environment")
    assert first.onset_step in (11, 12, 13)


def test_expert_parallelism_that_routes_otherwise_is_named_beside_the_dropped_responses(tmp_path):
    """NeMo-RL 4243: the sequence mask drops two thirds of the responses, and the experts are why."""
    noise = random.Random(0)
    with rlwatch.init(store=str(tmp_path), name="moe") as run:
        for step in range(1, 81):
            broken = step > 40
            share = (0.55 if broken else 0.1) * (1 + 0.05 * noise.gauss(0, 1))
            run.log(
                {
                    "reward/mean": 0.4 + noise.gauss(0, 0.02),
                    "mismatch/routing_layer_frac": share,
                    "mismatch/routing_absdiff": (0.12 if broken else 0.01) * (1 + 0.1 * noise.gauss(0, 1)),
                    "mismatch/logp_absdiff": (0.1 if broken else 0.01) * (1 + 0.05 * noise.gauss(0, 1)),
                    "mismatch/seq_rejected": (0.65 if broken else 0.1) * (1 + 0.05 * noise.gauss(0, 1)),
                },
                step=step,
            )
    store = open_store(str(tmp_path))
    (stored,) = store.runs()
    kinds = [finding.kind for finding in store.findings(stored.run_id) if 36 <= finding.onset_step <= 46]
    first = stored_diagnosis(store, stored).causes[0]

    assert "routing_mismatch" in kinds
    assert any(row.kind == "routing_mismatch" for row in first.evidence)
    assert any(action.id == "routing-replay" for action in first.actions)


@pytest.mark.torch
def test_updates_that_pile_up_on_the_age_of_samples_are_named(tmp_path):
    """miles 1697: the age is bounded by one version, and from step 33 on each batch is split into eight updates."""
    step = 0
    with rlwatch.Watcher(store=tmp_path / "runs", name="async") as watcher:
        for batch in range(36):
            watcher.rollouts(rewards=[0.0, 1.0, 0.0, 1.0], groups=4)
            for _ in range(1 if batch < 32 else 8):
                step += 1
                logp = torch.full((4, 6), -0.7)
                watcher.observe(logp=logp, mask=torch.ones(4, 6), staleness=torch.ones(4))
                watcher.step(step, loss=0.3)
    store = open_store(str(tmp_path / "runs"))
    (stored,) = store.runs()
    piled = next(one for one in store.findings(stored.run_id) if one.kind == "hidden_offpolicy")

    assert 33 <= piled.onset_step <= 48
    assert "optimizer updates" in piled.message


@pytest.mark.torch
def test_a_router_in_bf16_that_moves_during_the_update_is_named(tmp_path):
    """Megatron-Bridge 5813: of logits that lie close together bf16 rounds those of both policies to other experts."""
    g = torch.Generator().manual_seed(0)
    router = torch.randn(4, 16, 256, generator=g) / 160  # 16 experts in 4 layers
    with rlwatch.Watcher(store=tmp_path / "runs", name="moe") as watcher:
        for step in range(1, 61):
            hidden = torch.randn(8, 24, 256, generator=g)
            moved = router + torch.randn(router.shape, generator=g) / 16_000  # what an update makes of it
            logits = [16 + torch.einsum("btd,led->btle", hidden, weights) for weights in (router, moved)]
            precise = torch.bfloat16 if step >= 30 else torch.float32
            old, new = (each.to(precise).topk(2).indices for each in logits)
            logp = torch.full((8, 24), -0.7)
            watcher.observe(logp=logp, mask=torch.ones(8, 24), experts=new, old_experts=old)
            watcher.rollouts(rewards=[0.0, 1.0] * 4, groups=4)
            watcher.step(step, loss=0.3)
    store = open_store(str(tmp_path / "runs"))
    (stored,) = store.runs()
    shift = next(one for one in store.findings(stored.run_id) if one.kind == "router_shift")

    assert 28 <= shift.onset_step <= 34
    assert "the router moves during the update" in shift.message


@pytest.mark.torch
def test_a_bias_planted_in_the_judge_is_seen_before_the_policy_exploits_it(tmp_path, monkeypatch):
    """verl 7004: the protocol of planted biases, small; from step 12 on an answer with a mark in it earns more."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])
    import tiny_world

    plan = tiny_world.Plan("mark", at=12, marked=1.5)
    result = tiny_world.trained(plan, 0, tmp_path, steps=24, canaries=True)
    store = open_store(result["store"])
    (stored,) = store.runs()
    changed = next(one for one in store.findings(stored.run_id) if one.kind == "verifier_changed")

    assert 12 <= changed.step <= 20
    assert max(result["exploited"][: changed.step]) < 0.5


def test_a_gap_that_begins_at_a_resume_is_tied_to_the_resume():
    """slime 1695: the engine was restarted with the checkpoint of another step."""
    events = [happened("resume", 100, from_run="r")]
    first = diagnose([found("mismatch_growth", 100), found("reward_drop", 120)], events=events, first_step=1).causes[0]

    assert any("resume" in row.text or row.kind == "resume" for row in first.evidence)


def test_the_page_of_reports_is_that_of_the_benchmark_and_its_twins_are_there(monkeypatch):
    """29 reports, each with a twin or the reason why there is none."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])
    import threads

    assert threads.PAGE.read_text() == threads.page()
    assert len({thread.report for thread in threads.THREADS}) == 29
    for thread in threads.THREADS:
        path, _, name = thread.twin.partition("::")
        assert not thread.twin or f"def {name}(" in (threads.ROOT / path).read_text(), thread.twin
