"""On a device that is not the CPU a loop is told, kept and resumed as on the CPU, and nothing mixes the two.

Tensors of that device only pretend to be elsewhere: see ``elsewhere.py`` of the room ``localising``. On a real GPU the
same is tested by ``tests/cuda``.
"""

import copy
from threading import Timer

import pytest
import torch
from elsewhere import elsewhere, moved_there
from planted_loop import Policy
from tiny_loop import FakeRun

import rlwatch
from rlwatch.clipping import LayerClip
from rlwatch.clipping.rules import RULES

pytestmark = pytest.mark.torch


def pair(seed=0):
    """A policy and a reference that has moved away from it, both elsewhere."""
    torch.manual_seed(seed)
    policy = Policy()
    reference = copy.deepcopy(policy).requires_grad_(False)
    with torch.no_grad():
        for weight in reference.parameters():
            weight.add_(0.1)
    return moved_there(policy), moved_there(reference)


def weights(model):
    return [p.detach().cpu() for p in model.parameters()]


def test_a_reference_is_reset_to_a_policy_elsewhere():
    """Exactly, and the answer says so."""
    with elsewhere():
        policy, reference = pair()
        run = FakeRun()
        watcher = rlwatch.Watcher(policy, torch.optim.SGD(policy.parameters(), lr=0.1), ref_model=reference, run=run)
        run.send(optimizer="keep")
        watcher.obey()
        (event,) = [event for event in run.events if event.kind == "reference_reset"]

        assert [answer.status for answer in run.answers] == ["done"]
        assert event.body["exact"]
        assert all(map(torch.equal, weights(policy), weights(reference)))


def test_a_rate_is_lowered_and_a_pause_ends_there():
    """As anywhere."""
    with elsewhere():
        policy, reference = pair()
        run = FakeRun()
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.4)
        watcher = rlwatch.Watcher(policy, optimizer, ref_model=reference, run=run)
        run.send("lower-lr", scale=0.5)
        watcher.obey()
        run.send("pause", minutes=5)
        Timer(0.2, run.send, ["resume"]).start()
        watcher.obey()
        before = weights(policy)
        for weight in policy.parameters():
            weight.grad = torch.ones_like(weight)
        optimizer.step()

        assert [answer.status for answer in run.answers] == ["done"] * 3
        for now, then in zip(weights(policy), before, strict=True):
            torch.testing.assert_close(now, then - 0.2)


def test_what_a_reset_left_is_resumed_there(tmp_path):
    """The reference of another process, from its checkpoint."""
    with elsewhere():
        policy, reference = pair()
        run = FakeRun()
        watcher = rlwatch.Watcher(policy, torch.optim.SGD(policy.parameters(), lr=0.1), ref_model=reference, run=run)
        run.send(optimizer="keep")
        watcher.obey()
        watcher.saved(tmp_path)
        state, kept = watcher.state_dict(), weights(reference)

        other, later = pair(seed=5)
        again = rlwatch.Watcher(other, torch.optim.SGD(other.parameters(), lr=0.1), ref_model=later, run=FakeRun())
        again.load_state_dict(state)
        again.resumed(tmp_path)

        assert all(map(torch.equal, weights(later), kept))


def test_layers_partly_elsewhere_are_clipped_as_one():
    """Norms meet where nobody has to wait for them: a copy to the CPU would be read before it was there."""
    apart, together = Policy(), Policy()
    together.load_state_dict(apart.state_dict())
    for model in (apart, together):
        for number, p in enumerate(model.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    LayerClip(together, "max-norm", max_norm=1.0)()
    with elsewhere():
        given = [p.grad for p in apart.layers[1].parameters()]
        moved_there(apart.layers[1])
        for p, grad in zip(apart.layers[1].parameters(), given, strict=True):
            p.grad = grad.to("meta")
        clipped = LayerClip(apart, "max-norm", max_norm=1.0)()

        assert clipped.total.device.type == "meta"
        for mine, theirs in zip(apart.parameters(), together.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("nonfinite", ["keep", "zero"])
def test_layers_are_clipped_elsewhere_as_here(rule, nonfinite):
    """Also from a state that was kept on the CPU, and with a gradient that is not finite."""
    found = []
    for move in (lambda model: model, moved_there):
        with elsewhere():
            model = move(Policy())
            clip, steps = LayerClip(model, rule, max_norm=1.0, nonfinite=nonfinite), []
            for step in range(6):
                g = torch.Generator().manual_seed(step)
                for name, p in model.named_parameters():
                    grad = torch.randn(p.shape, generator=g) * (50.0 if step == 3 and "layers.1" in name else 1.0)
                    if step == 4 and name.endswith("head.bias"):
                        grad[0] = torch.inf
                    p.grad = grad.to(p.device)
                steps.append([*clip().scales.cpu().tolist(), *(float(p.grad.cpu().norm()) for p in model.parameters())])
                state, clip = clip.state_dict(), LayerClip(model, rule, max_norm=1.0, nonfinite=nonfinite)
                clip.load_state_dict(state)
        found.append(steps)

    for here, there in zip(*found, strict=True):
        assert there == pytest.approx(here, rel=1e-5, nan_ok=True)
