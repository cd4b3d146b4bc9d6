"""A layer that spikes inside a real TRL run: measured, stored, found, named."""

import itertools

import pytest

pytest.importorskip("trl")

import tiny_trl

import rlwatch
from rlwatch.integrations.trl import watch
from rlwatch.store.url import open_store

pytestmark = pytest.mark.torch
STEPS, SPIKE = 30, 26
_names = itertools.count()


def trained(tmp_path, times):
    """Thirty GRPO steps, at step 26 of which the gradient of layer 1 is multiplied; the store and the run's id."""
    trainer = tiny_trl.make_trainer(tmp_path, max_steps=STEPS)
    for parameter in trainer.model.model.layers[1].parameters():
        parameter.register_hook(lambda grad: grad * (times if trainer.state.global_step == SPIKE - 1 else 1.0))
    url = f"memory://layer-spike-{next(_names)}"
    with rlwatch.init(store=url, source="trl/grpo", sigterm=False) as run:
        watch(trainer, run=run)
        trainer.train()
    return open_store(url), run.info.run_id


def layer_findings(store, run_id):
    return [finding for finding in store.findings(run_id) if finding.detector == "layer_spike"]


def test_a_spiking_layer_is_named(tmp_path):
    """Forty times its gradient for one step: the layer, the factor, the step, and the cure."""
    store, run_id = trained(tmp_path, 40.0)

    [finding] = layer_findings(store, run_id)
    series = store.series(run_id, ["layers/rise", "layers/spiking"])

    assert (finding.kind, finding.step) == ("layer_spike", SPIKE)
    assert list(finding.evidence["layers"]) == ["model.layers.1"]
    assert 10.0 < finding.evidence["layers"]["model.layers.1"] < 160.0
    assert "LayerClip" in finding.message
    assert series["layers/rise"].steps[series["layers/rise"].values.argmax()] == SPIKE
    assert series["layers/spiking"].values.tolist() == [float(step == SPIKE) for step in range(21, STEPS + 1)]


def test_the_same_run_without_it_is_silent(tmp_path):
    """And its layers are measured all the same."""
    store, run_id = trained(tmp_path, 1.0)

    assert layer_findings(store, run_id) == []
    names = {name for name in store.metric_names(run_id) if name.startswith("layers/")}
    assert names == {f"layers/{one}" for one in ("heterogeneity", "max_share", "participation", "rise", "spiking")}
