"""Layers of their own: one that spikes while the global norm looks fine, and all that fall apart."""

import math

import numpy as np
import pytest

from rlwatch.detectors.optimisation.grad_spike import LayerSpike
from rlwatch.metrics import canonicalise
from rlwatch.monitor.engine import Monitor
from rlwatch.records import ClosedStep, Severity, StepRecord


def rows(length, *, layers=20, seed=0, common=0.3, own=0.1, every=1):
    """Closed steps of layer norms; layer ``i`` has level (1 + i)."""
    draw = np.random.default_rng(seed)
    table = (1.0 + np.arange(layers)) * np.exp(
        common * draw.normal(size=(length, 1)) + own * draw.normal(size=(length, layers))
    )
    return [
        ClosedStep(
            step=(s + 1) * every,
            seq=s + 1,
            metrics={f"grad_layer/model.layers.{i}": float(x) for i, x in enumerate(row)},
        )
        for s, row in enumerate(table)
    ]


def scaled(step, layers, times):
    return ClosedStep(
        step=step.step,
        seq=step.seq,
        metrics={k: v * (times if int(k.rpartition(".")[2]) in layers else 1.0) for k, v in step.metrics.items()},
    )


def said(steps, kind, detector=None):
    detector = detector or LayerSpike()
    return [f for step in steps for f in detector.update(step) if f.kind == kind]


def test_a_small_layer_spikes_while_the_global_norm_looks_fine():
    """Layer 1 of 20 (0.1 % of the squared norm) at 25 times its norm: named, with numbers and the cure."""
    steps = rows(100)
    steps[69] = scaled(steps[69], {1}, 25.0)

    [finding] = said(steps, "layer_spike")

    assert (finding.step, finding.onset_step, finding.severity) == (70, 70, Severity.WARNING)
    assert "layer model.layers.1 is" in finding.message
    assert "while the global norm looks usual" in finding.message
    assert "LayerClip" in finding.message
    assert list(finding.evidence["layers"]) == ["model.layers.1"]
    assert finding.evidence["layers"]["model.layers.1"] == pytest.approx(25.0, rel=0.5)
    assert finding.evidence["usual"] == pytest.approx(finding.evidence["norm"] / 25.0, rel=0.5)
    assert finding.evidence["global_times"] < 3.0
    assert finding.score == pytest.approx(25.0 / 6.0, rel=0.5)


def test_a_large_layer_takes_the_global_norm_with_it_and_the_message_says_so():
    """Then the global norm spikes as well: that it is one layer's doing is still what to know."""
    steps = rows(100)
    steps[69] = scaled(steps[69], {19}, 50.0)

    [finding] = said(steps, "layer_spike")

    assert "and the global norm with it" in finding.message


def test_few_layers_are_named_and_the_rest_counted():
    """Five of twenty, worst first; all of them in the evidence."""
    steps = rows(100, own=0.02)
    steps[69] = scaled(scaled(steps[69], {2, 3, 4, 5}, 20.0), {1}, 40.0)

    [finding] = said(steps, "layer_spike")

    assert "layers model.layers.1, " in finding.message
    assert "and 2 more are up to" in finding.message
    assert len(finding.evidence["layers"]) == finding.evidence["spiking"] == 5


def test_half_the_layers_are_no_matter_of_single_layers():
    """Nine of twenty at twenty times: another detector's business."""
    steps = rows(100)
    steps[69] = scaled(steps[69], set(range(9)), 20.0)

    assert said(steps, "layer_spike") == []


@pytest.mark.parametrize("seed", range(3))
def test_healthy_layers_say_nothing(seed):
    """Noise of each layer and of all, global spikes, and a batch without a gradient every seventh step."""
    steps = rows(400, seed=seed, own=0.3)
    steps[200] = scaled(steps[200], set(range(20)), 100.0)
    steps = [scaled(step, set(range(20)), 0.0) if i % 7 == 0 else step for i, step in enumerate(steps)]
    detector = LayerSpike()

    assert [f for step in steps for f in detector.update(step)] == []


def test_a_global_spike_is_not_a_layers():
    """All twenty layers at 100 times their norm."""
    steps = rows(100)
    steps[69] = scaled(steps[69], set(range(20)), 100.0)

    assert said(steps, "layer_spike") == []


def test_layers_that_no_longer_move_together_are_told_with_the_baseline():
    """Correlation .9, from step 150 on nothing in common: told within a window and a half, for as long as it lasts."""
    steps = [*rows(150, common=0.5, own=0.15), *rows(150, common=0.0, own=0.5, seed=1)]
    steps = [ClosedStep(step=i + 1, seq=i + 1, metrics=step.metrics) for i, step in enumerate(steps)]

    found = said(steps, "layer_heterogeneity")

    assert 150 < found[0].step <= 225
    assert 150 < found[0].onset_step <= found[0].step - 14
    assert found[-1].step == 300
    assert found[0].severity is Severity.WARNING
    assert found[0].baseline < 0.2 < 0.55 < found[0].evidence["heterogeneity"]
    assert "LayerClip" in found[0].message


def rewarded(steps, reward):
    """The same steps with the reward that ``reward(step)`` says."""
    return [
        ClosedStep(step=step.step, seq=step.seq, metrics={**step.metrics, "reward/mean": reward(step.step)})
        for step in steps
    ]


@pytest.mark.parametrize(("gain", "told"), [(0.6, False), (0.0, True)])
def test_what_tied_layers_together_while_the_reward_took_off_is_not_their_usual(gain, told):
    """Groups that teach nothing pull all layers down alike; once most teach, each layer has a course of its own."""
    steps = [*rows(110, common=0.5, own=0.15), *rows(190, common=0.0, own=0.5, seed=1)]
    steps = [ClosedStep(step=i + 1, seq=i + 1, metrics=step.metrics) for i, step in enumerate(steps)]
    took_off = rewarded(steps, lambda s: 0.02 + gain * min(max((s - 60) / 60, 0.0), 1.0))

    assert bool(said(took_off, "layer_heterogeneity")) is told


def test_layers_unrelated_from_the_start_are_no_break():
    """What a run has always been like is its normal."""
    assert said(rows(300, common=0.0), "layer_heterogeneity") == []


def test_coarse_logs_are_judged_by_rows():
    """A run logged every tenth step has as many rows to learn of as it has rows."""
    steps = rows(100, every=10)
    steps[69] = scaled(steps[69], {1}, 25.0)

    assert [f.step for f in said(steps, "layer_spike")] == [700]


def test_a_non_finite_layer_is_passed_over():
    """NaN has a detector of its own; here it neither fires nor blinds."""
    steps = rows(100)
    for i in range(40, 60):
        steps[i].metrics["grad_layer/model.layers.3"] = math.nan
        steps[i].metrics["grad_layer/model.layers.4"] = math.inf
    steps[69] = scaled(steps[69], {1}, 25.0)

    assert [f.step for f in said(steps, "layer_spike")] == [70]


def test_it_says_when_it_cannot_run():
    """A run without layer norms: named with what is missing. One with a single layer's: not."""
    monitor = Monitor()
    monitor.observe(StepRecord(1, {"optim/grad_norm": 1.0}, seq=1))
    monitor.close()
    lacking = {n.name: n.reason for n in monitor.not_run()}

    monitor.observe(StepRecord(2, {"grad_layer/model.layers.0": 1.0}, seq=2))
    monitor.close()

    assert lacking["layer_spike"] == "needs grad_layer/, which this run has not logged"
    assert "layer_spike" not in {n.name for n in monitor.not_run()}


def test_a_resumed_run_says_what_an_uninterrupted_one_does():
    """Its levels are relearnt from the rows of the branch it continues."""
    steps = rows(100)
    steps[69] = scaled(steps[69], {1}, 25.0)
    first = [StepRecord(s.step, s.metrics, seq=s.seq) for s in steps[:60]]
    second = [StepRecord(s.step, s.metrics, seq=s.seq, attempt=2) for s in steps[60:]]
    monitor = Monitor(history=lambda attempt, before: first)
    outcome = [f for record in [*first, *second] for f in monitor.observe(record).findings]

    assert [(f.kind, f.step) for f in outcome] == [("layer_spike", 70)]


def test_names_of_layers_pass_through_the_reading():
    """Whatever the trainer, layer norms keep their names."""
    metrics = {"grad_layer/model.layers.0": 1.0, "grad_norm": 2.0}

    assert canonicalise(metrics, "verl")[0] == {"grad_layer/model.layers.0": 1.0, "optim/grad_norm": 2.0}
