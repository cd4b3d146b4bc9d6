"""On a GPU: LayerClip scales what it would on the CPU, waits for nothing, and goes on after a resume.

Without a CUDA device these are skipped, and pytest's summary says so.
"""

import copy

import pytest
import torch
from torch import nn

from rlwatch.clipping import LayerClip, LayerMaxNorm
from rlwatch.clipping.rules import RULES

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE: LayerClip on a GPU is not tested here"),
]


def net(device):
    torch.manual_seed(0)
    return nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])}).to(device)


def backward(model, step):
    """Gradients that are the same on every device, to the bit; those of layer 1 are large now and then."""
    g = torch.Generator().manual_seed(step)
    for name, p in model.named_parameters():
        p.grad = (torch.randn(p.shape, generator=g) * (50.0 if step % 4 == 3 and "layers.1" in name else 1.0)).to(p)


def factors(rule, device, steps=12, clip=None):
    model = net(device)
    clip = LayerClip(model, rule, max_norm=1.0) if clip is None else clip
    clip.model = model
    found = []
    for step in range(steps):
        backward(model, step)
        done = clip()
        found.append([*done.scales.tolist(), float(done.total), float(done.coefficient)])
    return found, [p.grad.cpu() for p in model.parameters()], clip


@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_gpu_scales_what_the_cpu_scales(rule):
    """Factors, norms and what is left of the gradients."""
    cpu, here, _ = factors(rule, "cpu")
    cuda, there, _ = factors(rule, "cuda")

    for mine, theirs in zip(cuda, cpu, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    for mine, theirs in zip(there, here, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("nonfinite", ["keep", "zero"])
def test_nothing_waits_for_the_device(rule, nonfinite):
    """From the second call on: the first brings its tables there."""
    model = net("cuda")
    clip = LayerClip(model, rule, max_norm=1.0, nonfinite=nonfinite)
    backward(model, 0)
    clip()
    backward(model, 1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        clip().metrics()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_state_kept_on_the_cpu_goes_on_on_the_device():
    """As if it had never stopped."""
    straight, _, _ = factors("layer-median", "cuda", steps=12)
    _, _, first = factors("layer-median", "cuda", steps=6)
    model = net("cuda")
    resumed = LayerClip(model, "layer-median", max_norm=1.0)
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    found = []
    for step in range(6, 12):
        backward(model, step)
        done = resumed()
        found.append([*done.scales.tolist(), float(done.total), float(done.coefficient)])

    assert found == straight[6:]


def test_a_model_over_two_devices_is_clipped_as_one():
    """Norms meet on the first device, factors go to each."""
    apart, together = net("cpu"), net("cpu")
    apart["layers"][1].cuda()
    for model in (apart, together):
        backward(model, 3)
        LayerClip(model, LayerMaxNorm(each=2.0), max_norm=3.0)()

    for mine, theirs in zip(apart.parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-5, atol=1e-7)
