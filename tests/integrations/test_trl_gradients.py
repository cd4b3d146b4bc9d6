"""Gradient norms as the taps read them: unclipped, unscaled, whole."""

import math

import pytest
import torch
from tiny_trl import digits

from rlwatch.metrics import LAYER_PREFIX

pytestmark = pytest.mark.torch


def test_gradients_are_read_before_clipping(watched):
    """A tight clip does not show in the norms, and layers combine to the total."""
    _, run = watched(max_grad_norm=1e-3, max_steps=2)

    for step, tap in run.taps().items():
        layers = [v for n, v in tap.items() if n.startswith(LAYER_PREFIX)]
        assert math.hypot(*layers) == pytest.approx(tap["optim/grad_norm"], rel=1e-4)
        assert tap["optim/grad_norm"] > 0.1
        assert tap["optim/grad_norm"] == pytest.approx(run.rows()[step]["grad_norm"], rel=1e-6)


def test_without_clipping_gradients_are_read_all_the_same(watched):
    """max_grad_norm=0: the trainer never clips, so the step callback looks."""
    _, run = watched(max_grad_norm=0, max_steps=2)

    for step, tap in run.taps().items():
        assert tap["optim/grad_norm"] == pytest.approx(run.rows()[step]["grad_norm"], rel=1e-4)


def scaler(trainer, **kwargs):
    """A float16 loss scaler on the CPU, as accelerate has one on a GPU."""
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", **kwargs)
    trainer.accelerator.native_amp = True


def test_a_loss_scale_does_not_show_in_the_norms(watched):
    """Layers are read while gradients are scaled, and reported as they are without."""
    _, plain = watched(max_steps=2, fp16=True, before=lambda t: scaler(t, init_scale=1.0))
    _, scaled = watched(max_steps=2, fp16=True, before=lambda t: scaler(t, init_scale=1024.0))

    for step, tap in scaled.taps().items():
        layers = {n: v for n, v in plain.taps()[step].items() if n.startswith((LAYER_PREFIX, "optim/grad_norm"))}
        assert len(layers) == 5
        assert {n: tap[n] for n in layers} == pytest.approx(layers, rel=1e-3)
        assert tap["optim/step_skipped"] == 0
        assert "nonfinite/grad" not in tap


def test_a_scaler_in_search_of_its_scale_is_no_broken_gradient(watched):
    """The scale overflows, the step is skipped, and no infinite norm is reported for it."""
    huge = {"reward": lambda completions, **kwargs: [1e3 * r for r in digits(completions)], "scale_rewards": "none"}
    overflow = {"init_scale": 1e38, "backoff_factor": 1e-36}
    _, run = watched(max_steps=3, fp16=True, before=lambda t: scaler(t, **overflow), **huge)
    skipped = [tap["optim/step_skipped"] for tap in run.taps().values()]

    assert skipped == [1, 0, 0]
    assert not any(n.startswith((LAYER_PREFIX, "optim/grad", "nonfinite/grad")) for n in run.taps()[1])
    assert "grad_norm" not in run.rows()[1]
    assert "grad_norm" in run.rows()[2]


def test_sharded_gradients_are_left_to_the_engine(watched, monkeypatch):
    """Where the engine has taken the gradients away, only the trainer's own total is recorded."""
    monkeypatch.setattr("rlwatch.integrations.transformers.taps.sharding_engine", lambda trainer: "DEEPSPEED")
    _, run = watched(max_steps=1)

    assert run.taps()[1]["optim/grad_norm"] == pytest.approx(run.rows()[1]["grad_norm"])
    assert not any(n.startswith(LAYER_PREFIX) for n in run.taps()[1])


def test_gradients_of_micro_batches_are_compared_and_control_tokens_are_counted(watched):
    """Of two micro-batches to a step; one alone has nothing to agree with."""
    _, several = watched(max_steps=2, gradient_accumulation_steps=2)
    _, alone = watched(max_steps=2, gradient_accumulation_steps=1)

    for tap in several.taps().values():
        assert -1 <= tap["optim/grad_agreement"] <= 1
        assert 0 <= tap["text/control_share"] <= 1
    assert not any("optim/grad_agreement" in tap for tap in alone.taps().values())
