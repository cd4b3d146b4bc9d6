"""On a device that is not the CPU localisation names the same tokens, and nothing of it mixes the two.

Tensors of that device only pretend to be elsewhere: see ``elsewhere.py``. On a real GPU the same is tested by
``tests/cuda/test_cuda_localising.py``.
"""

from contextlib import nullcontext
from functools import cache

import pytest
import torch
from elsewhere import elsewhere, moved_there
from planted_loop import PLANTS, SPIKE_AT, assert_same_runs, culprits, ratio, train
from torch import nn

from rlwatch.clipping import SkipOnSpike

pytestmark = pytest.mark.torch


@cache
def on_the_cpu(plant, entropy_bonus):
    """What is found where all tensors are on the CPU: each once for the tests that compare with it."""
    return train("cpu", plant, entropy_bonus=entropy_bonus)


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("entropy_bonus", [0.0, 0.01])
def test_the_same_tokens_are_named_with_the_same_words(plant, entropy_bonus):
    """Of every step: culprits, causes, shares and what the event says; NaN is traced to where it came from."""
    expected = on_the_cpu(plant, entropy_bonus)
    with elsewhere():
        found = train("meta", plant, entropy_bonus=entropy_bonus, move=moved_there)

    assert culprits(expected) or plant is None
    assert_same_runs(found, expected)


@pytest.mark.parametrize("plant", PLANTS)
def test_a_default_device_of_the_loop_is_not_ours(plant):
    """Tables on the CPU are made there, whatever ``torch.set_default_device`` says while the gradient is looked at."""
    expected = on_the_cpu(plant, 0.01)
    found = train("cpu", plant, entropy_bonus=0.01, around=lambda: torch.device("meta"))

    assert_same_runs(found, expected)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_batch_with_a_culprit_can_be_left_out(device):
    """The optimizer's step of it is none."""
    with elsewhere() if device == "meta" else nullcontext():
        run = train(device, ratio, move=moved_there if device == "meta" else nn.Module.to, skip=SkipOnSpike(share=0.5))

    assert [event.step for event in run.events if event.kind == "step_skipped"] == [SPIKE_AT]


def test_the_pretended_device_refuses_what_a_gpu_refuses():
    """Otherwise the tests above would prove nothing."""
    with elsewhere():
        there, here = torch.arange(6.0).view(2, 3).to("meta"), torch.ones(2, 3)

        for mixing in (
            lambda: there + here,
            lambda: torch.cat([there, here]),
            lambda: here[there > 2],
            lambda: torch.where(there > 2, here, there),
            there.numpy,
        ):
            with pytest.raises((RuntimeError, TypeError)):
                mixing()
        assert (there + 1).cpu().tolist() == (there[torch.tensor([0, 1])] + torch.tensor(1.0)).tolist()
        assert torch.zeros(2, device=there.device).cpu().tolist() == [0.0, 0.0]
        assert there.sum().item() == 15.0
