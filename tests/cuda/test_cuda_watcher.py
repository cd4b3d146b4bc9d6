"""On a GPU: a plain loop is watched without a wait, comes out as it would unwatched, and is measured as on the CPU.

Without a CUDA device these are skipped, and pytest's summary says so.
"""

import pytest
import torch
from tiny_loop import CLIP, EOS, FakeRun, train

import rlwatch

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE: the watcher on a GPU is not tested here"),
]
LOOKING = ("rollouts", "observe", "gradients", "step")


@pytest.fixture(autouse=True)
def on_the_device():
    """The loop makes everything on the GPU; without cuDNN, whose recurrent layers are not reproducible."""
    torch.set_default_device("cuda")
    enabled, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, False
    yield
    torch.backends.cudnn.enabled = enabled
    torch.set_default_device(None)


def watched(policy, optimizer, reference, **kwargs):
    given = {"ref_model": reference, "clip": CLIP, "eos": EOS, "run": FakeRun(), **kwargs}
    return rlwatch.Watcher(policy, optimizer, **given)


class Impatient(rlwatch.Watcher):
    """Fails where one of its looks makes the CPU wait for the device; the error boundary counts it."""


def impatient(name):
    original = getattr(rlwatch.Watcher, name)

    def method(self, *args, **kwargs):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(self, *args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return method


for looking in LOOKING:
    setattr(Impatient, looking, impatient(looking))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_looking_never_waits_for_the_device(accumulate):
    """Not one synchronising call in rollouts, observe, gradients or step; everything is recorded in the end."""

    def make(policy, optimizer, reference):
        return Impatient(policy, optimizer, ref_model=reference, clip=CLIP, eos=EOS, run=FakeRun())

    watcher = train(make, steps=3, accumulate=accumulate).watcher
    watcher.finish()

    assert watcher.run.counters.snapshot() == {}
    assert list(watcher.run.steps) == [1, 2, 3]
    assert all("policy/entropy_p90" in metrics for metrics in watcher.run.steps.values())


def test_training_is_bit_identical_to_training_unwatched():
    """Parameters, optimizer state and rollouts, as far as the loop itself can be repeated on this device."""
    plain, again, seen = train(None, accumulate=2), train(None, accumulate=2), train(watched, accumulate=2)
    same = [torch.equal(a, b) for a, b in zip(plain.policy.parameters(), again.policy.parameters(), strict=True)]
    if not all(same):
        pytest.skip("this device does not repeat the loop itself to the bit")

    assert all(torch.equal(a, b) for a, b in zip(plain.policy.parameters(), seen.policy.parameters(), strict=True))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(plain.batches, seen.batches, strict=True))
    for ours, theirs in zip(plain.optimizer.state.values(), seen.optimizer.state.values(), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_numbers_are_those_of_the_cpu():
    """One micro-batch, whole and jagged, on both."""
    generator = torch.Generator("cpu").manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, device="cpu")  # noqa: E731
    lengths = torch.tensor([5, 3, 1, 0], device="cpu")
    inputs = {name: -draw(4, 5).abs() for name in ("logp", "old_logp", "ref_logp", "rollout_logp")}
    inputs |= {
        "mask": torch.arange(5, device="cpu") < lengths[:, None],
        "advantages": draw(4),
        "logits": draw(4, 5, 11),
    }
    inputs |= {"ids": torch.randint(0, 11, (4, 5), generator=generator, device="cpu")}
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), lengths.cumsum(0)])

    def jagged(x):
        rows = torch.cat([row[:n] for row, n in zip(x, lengths.tolist(), strict=True)])
        return torch.nested.nested_tensor_from_jagged(rows.cuda(), offsets.cuda(), max_seqlen=5)

    ragged = {name: jagged(x) if x.dim() > 1 else x.cuda() for name, x in inputs.items() if name != "mask"}
    measured = []
    for given in (inputs, {name: x.cuda() for name, x in inputs.items()}, ragged):
        run = FakeRun()
        watcher = rlwatch.Watcher(run=run, clip=CLIP)
        watcher.observe(**given)
        watcher.step(1)
        watcher.finish()
        assert run.counters.snapshot() == {}
        measured.append({name: value for name, value in run.steps[1].items() if not name.startswith("time/")})

    assert measured[1] == pytest.approx(measured[0], rel=1e-4, abs=1e-6, nan_ok=True)
    assert measured[2] == pytest.approx(measured[0], rel=1e-4, abs=1e-6, nan_ok=True)


def test_a_jagged_tensor_that_would_have_to_be_asked_is_refused():
    """With the way out; nothing waits."""
    run = FakeRun()
    watcher = Impatient(run=run)
    watcher.observe(logp=torch.nested.nested_tensor_from_jagged(torch.zeros(4), torch.tensor([0, 1, 4])))

    assert run.counters.snapshot() == {"refused": 1}
