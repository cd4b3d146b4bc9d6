"""TRL's GRPO and RLOO with a rollout server: TRL's own client, by HTTP, against a server that speaks vLLM's protocol."""

import pytest
import torch
from peft import LoraConfig
from test_trl_harmless import same, train
from test_trl_reset import KL, After
from tiny_trl import FakeRun, fresh_model, make_trainer
from vllm_server import serving

from rlwatch.integrations.trl import watch
from rlwatch.run.engines import Engines

pytestmark = pytest.mark.torch
RATIO = "sampling/importance_sampling_ratio/"
SYNC = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
CORRECTED = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1e6}
"""RLOO has no such correction."""
PLAIN = {"use_vllm": True, "vllm_mode": "server", "beta": 0.1, "max_steps": 4, "learning_rate": 3e-3}
CONFIG = {**PLAIN, **CORRECTED}


def trained(tmp_path, monkeypatch, *, before=None, server=None, **config):
    """Train with a server; returns trainer, run and server as they are in the end."""
    with serving(monkeypatch, fresh_model(seed=5), **(server or {})) as engine:
        trainer = make_trainer(tmp_path, vllm_server_base_url=engine.url, **{**CONFIG, **config})
        run = FakeRun()
        if before is not None:
            before(trainer, run)
        watch(trainer, run=run)
        trainer.train()
        assert run.counters.snapshot() == {}
        return trainer, run, engine


@pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=pytest.mark.thorough)])
def test_watching_changes_no_bit_and_no_request(tmp_path, monkeypatch, kind):
    """Weights, optimizer and random states, what was rewarded, and what the server was asked, in order."""
    results = []
    for name, watched in (("plain", False), ("watched", True)):
        with serving(monkeypatch, fresh_model(seed=5), noise=0.02) as engine:
            base = CONFIG if kind == "grpo" else PLAIN
            config = {**base, "num_iterations": 2, "kind": kind, "vllm_server_base_url": engine.url}
            results.append((*train(tmp_path / name, watched=watched, **config), engine.asked))

    (weights, left, rewarded, _, asked), (weights_w, left_w, rewarded_w, run, asked_w) = results
    assert same(weights, weights_w)
    assert same(left, left_w)
    assert rewarded == rewarded_w
    assert asked == asked_w
    assert asked.count("/update_weights") == asked.count("/v1/completions") == 2, "one for each two steps"
    assert sorted(run.taps()) == [1, 2, 3, 4]


def test_a_server_with_the_policys_weights_agrees_with_the_trainer(tmp_path, monkeypatch):
    """It began with other weights: that they agree is the work of the first update."""
    _, run, engine = trained(tmp_path, monkeypatch)

    assert engine.asked == ["/init_weight_transfer_engine", *([*SYNC, "/v1/completions"] * 4)]
    for tap in run.taps().values():
        assert tap["mismatch/logp_absdiff_max"] < 1e-4
        assert tap["mismatch/weight_max"] == pytest.approx(1.0, abs=1e-4)


def test_an_update_that_did_not_arrive_shows_as_mismatch_in_its_step(tmp_path, monkeypatch):
    """The third update is lost: step 3 is sampled by the weights of step 2; the fourth repairs it."""
    _, run, _ = trained(tmp_path, monkeypatch, server={"deaf": (2,)}, learning_rate=1e-2)
    seen = {step: tap["mismatch/logp_absdiff"] for step, tap in run.taps().items()}

    assert seen[3] > 1e-3
    assert max(seen[1], seen[2], seen[4]) < 1e-4


def test_what_is_measured_of_the_mismatch_is_what_trl_logs(tmp_path, monkeypatch):
    """With a server whose weights are a little off."""
    _, run, _ = trained(tmp_path, monkeypatch, server={"noise": 0.02}, max_steps=2)

    for step, row in run.rows().items():
        tap = run.taps()[step]
        assert tap["mismatch/weight_mean"] == pytest.approx(row[RATIO + "mean"], rel=1e-4)
        assert tap["mismatch/weight_max"] == pytest.approx(row[RATIO + "max"], rel=1e-4)
        assert tap["mismatch/logp_absdiff"] == pytest.approx(row["sampling/sampling_logp_difference/mean"], rel=1e-4)
        assert tap["mismatch/weight_max"] > 1.01


def lora():
    return LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", init_lora_weights=False)


@pytest.mark.parametrize("adapter", [None, lora], ids=["whole policy", "adapter"])
def test_a_reset_reference_leaves_the_updates_of_the_server_as_they_were(tmp_path, monkeypatch, adapter):
    """KL is 0 in the next step, the server is sent what it would have been, and goes on to agree."""

    def ordered(trainer, run):
        trainer.add_callback(After(2, run.send))

    config = {"peft_config": adapter()} if adapter else {}
    _, plain, without = trained(tmp_path / "a", monkeypatch, **config)
    _, run, engine = trained(
        tmp_path / "b", monkeypatch, before=ordered, **({"peft_config": adapter()} if adapter else {})
    )
    taps = run.taps()

    assert [answer.status.value for answer in run.answers] == ["done"]
    assert max(abs(taps[3][name]) for name in KL) < 1e-6 < max(abs(plain.taps()[3][name]) for name in KL)
    assert engine.asked == without.asked
    assert all(tap["mismatch/logp_absdiff_max"] < 1e-4 for tap in taps.values())
    assert engine.updates == 4


def test_the_servers_weights_are_the_policys_to_the_bit(tmp_path, monkeypatch):
    """At the last update; the step after it moved the policy on."""
    sent = {}

    def look(trainer, run):
        generate = trainer.vllm_generation.generate

        def looking(*args, **kwargs):
            sent.update({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
            return generate(*args, **kwargs)

        trainer.vllm_generation.generate = looking

    _, _, engine = trained(tmp_path, monkeypatch, before=look, max_steps=2)

    assert all(torch.equal(p, sent[name]) for name, p in engine.model.named_parameters())


def test_its_metrics_are_read_where_the_trainer_generates(tmp_path, monkeypatch):
    """At ``/metrics`` of the server's address, which is what ``engines=`` is given."""
    with serving(monkeypatch, fresh_model()) as engine:
        assert Engines([f"{engine.url}/metrics"]).read() == {"engine/running": 0.0, "engine/down": 0.0}


@pytest.mark.parametrize("adapter", [None, lora], ids=["whole policy", "adapter"])
def test_what_is_sent_to_the_server_is_compared_with_the_policy(tmp_path, monkeypatch, adapter):
    """From the third update on the weights of a layer are those of the second: a partial update."""

    def partial(trainer, run):
        original, kept, syncs = trainer.vllm_generation._iter_named_params, {}, [0]

        def stale():
            syncs[0] += 1
            for name, tensor in original():
                first = kept.setdefault(name, tensor.clone())
                yield name, first if ".layers.1." in name and syncs[0] > 3 else tensor

        trainer.vllm_generation._iter_named_params = stale

    config = {"peft_config": adapter()} if adapter else {}
    _, sound, _ = trained(tmp_path / "a", monkeypatch, **config)
    _, run, _ = trained(tmp_path / "b", monkeypatch, before=partial, **({"peft_config": adapter()} if adapter else {}))
    event = next(event for event in run.events if event.kind == "engine_weights")

    assert [tap["mismatch/weights_differ"] for tap in sound.taps().values()] == [0.0] * 4
    assert all(tap["mismatch/weights_compared"] == 1.0 for tap in sound.taps().values())
    assert run.taps()[4]["mismatch/weights_differ"] > 0
    assert event.body["layers"] == ["model.layers.1"]
