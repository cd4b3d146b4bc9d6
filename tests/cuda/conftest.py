"""Fixtures of the tests that run again on a GPU, and the two ways of turning a device on for them."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch


def _of_integrations():
    """The fixtures over tiny trainers; a second ``conftest`` cannot be imported by name."""
    spec = spec_from_file_location(
        "fixtures_of_integrations", Path(__file__).parent.parent / "integrations/conftest.py"
    )
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


watched, behind = (getattr(_of_integrations(), name) for name in ("watched", "behind"))


@pytest.fixture
def repeatable():
    """Kernels that add up in one order, as far as there are any."""
    enabled, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, False
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(mode=False)
    torch.backends.cudnn.enabled = enabled


@pytest.fixture
def trainers_on_the_gpu(monkeypatch, repeatable):
    """The tiny trainers of ``transformers`` and TRL train there."""
    import tiny_trainer
    import tiny_trl

    monkeypatch.setitem(tiny_trl.COMMON, "use_cpu", False)
    monkeypatch.setattr(tiny_trainer, "TrainingArguments", _elsewhere(tiny_trainer.TrainingArguments))


def _elsewhere(arguments):
    return lambda *args, **kwargs: arguments(*args, **{**kwargs, "use_cpu": False})


@pytest.fixture
def loops_on_the_gpu(request, monkeypatch, repeatable):
    """A loop makes everything there; what is on its way to the CPU is waited for, since tests look at once."""
    if "behind" not in request.fixturenames:
        monkeypatch.setattr(torch.cuda.Event, "query", arrived)
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


def arrived(event):
    """Wait for the event."""
    event.synchronize()
    return True
