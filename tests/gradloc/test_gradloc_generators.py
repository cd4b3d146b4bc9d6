"""Generators of any accelerator are kept and given back, each its own; where there is none, the CPU's is all."""

from types import SimpleNamespace

import pytest
import torch

from rlwatch.gradloc import passes
from rlwatch.gradloc.passes import RandomState

pytestmark = pytest.mark.torch


class Accelerator:
    """An accelerator of two devices as a plugin brings it, under a name of its own."""

    def __init__(self, states):
        self.states = [torch.tensor([value], dtype=torch.uint8) for value in states]

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def get_rng_state(self, device=0):
        return self.states[device].clone()

    def get_rng_state_all(self):
        return [state.clone() for state in self.states]

    def set_rng_state_all(self, states):
        self.states = [state.clone() for state in states]


class OneDevice:
    """As MPS: one device, which says nothing of being initialized."""

    def __init__(self, value):
        self.state = torch.tensor([value], dtype=torch.uint8)

    def is_available(self):
        return True

    def get_rng_state(self):
        return self.state.clone()

    def set_rng_state(self, state):
        self.state = state.clone()


@pytest.fixture
def plugged(monkeypatch):
    """``plugged(module)``: as if that were the accelerator in use."""

    def plug(module):
        monkeypatch.setattr(torch, "newdevice", module, raising=False)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: SimpleNamespace(type="newdevice"))
        return module

    return plug


def lying_on(index):
    """All that is asked of a tensor."""
    return SimpleNamespace(device=SimpleNamespace(type="newdevice", index=index))


def test_states_of_every_device_come_back(plugged):
    """And a draw on the second one is seen."""
    module = plugged(Accelerator([1, 2]))
    before = RandomState.now()
    module.states[1] += 5

    assert not before.same(RandomState.now())
    before.restore()
    assert [int(state) for state in module.states] == [1, 2]
    assert before.same(RandomState.now())


def test_each_device_draws_from_its_own(plugged):
    """One is set, the other is left."""
    module = plugged(Accelerator([1, 2]))
    passes.set_state_of(lying_on(1), torch.tensor([9], dtype=torch.uint8))

    assert [int(state) for state in module.states] == [1, 9]
    assert int(passes.state_of(lying_on(0))) == 1
    assert int(passes.state_of(lying_on(1))) == 9


def test_a_device_that_is_the_only_one(plugged):
    """It has no list of states."""
    module = plugged(OneDevice(3))
    before = RandomState.now()
    module.set_rng_state(torch.tensor([4], dtype=torch.uint8))
    before.restore()

    assert int(module.state) == 3
    assert int(passes.state_of(lying_on(None))) == 3


def test_where_there_is_no_accelerator_the_generator_is_that_of_the_cpu(plugged):
    """Also for a device that draws from nothing we know of, and one that is not used so far."""
    idle = plugged(Accelerator([1]))
    idle.is_initialized = lambda: False

    assert passes.device_states() == ()
    assert torch.equal(passes.state_of(lying_on(0)), torch.get_rng_state())
    assert torch.equal(passes.state_of(torch.zeros(1)), torch.get_rng_state())
