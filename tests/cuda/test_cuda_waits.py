"""On a GPU: nothing waits for the device, nothing changes, and the numbers are those of the CPU.

Without a CUDA device these are skipped, and pytest's summary says so.
"""

import math
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import warnings
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from tiny_trl import FakeRun, make_trainer

from rlwatch.integrations.step_tally import StepTally
from rlwatch.integrations.trl import watch
from rlwatch.tensors.gradnorm import grad_norms
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import TokenBatch
from rlwatch.tensors.transfer import Transfer

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE: waits on a GPU are not tested here"),
]


def batch(rows=8, width=256, dtype=torch.float32):
    """A batch that measures what a token-level trainer has, on the CPU."""
    g = torch.Generator().manual_seed(5)
    logp = -torch.rand(rows, width, generator=g)

    def near(scale):
        return (logp + scale * torch.randn(rows, width, generator=g)).to(dtype)

    return TokenBatch(
        logp=logp.to(dtype),
        mask=torch.arange(width)[None] < torch.randint(1, width, (rows, 1), generator=g),
        entropy=torch.rand(rows, width, generator=g).to(dtype),
        ids=torch.randint(0, 900, (rows, width), generator=g),
        advantages=torch.randn(rows, generator=g),
        old_logp=near(0.1),
        ref_logp=near(0.2),
        rollout_logp=near(0.05),
        clip=(0.2, 0.28),
        dual_clip=3.0,
        cut=torch.rand(rows, generator=g) > 0.5,
        environment=torch.rand(rows, width, generator=g) > 0.9,
        staleness=torch.randint(0, 3, (rows,), generator=g),
    )


def on(device, of):
    """``of`` with every tensor on ``device``."""
    moved = {f.name: v.to(device) for f in fields(of) if isinstance(v := getattr(of, f.name), torch.Tensor)}
    return replace(of, **moved)


@pytest.fixture
def no_waits():
    """Any operation that makes the CPU wait for the GPU is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_tallied_and_sealed_without_a_wait(no_waits, dtype):
    """Two micro-batches, all statistics, and the copy to the CPU sets out."""
    tally = StepTally()
    torch.cuda.set_sync_debug_mode("default")
    device_batch = on("cuda", batch(dtype=dtype))
    torch.cuda.set_sync_debug_mode("error")

    tally.add_batch(device_batch)
    tally.add_batch(device_batch)
    sealed = tally.seal(1)

    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert sealed.ready()


def test_the_gpu_measures_what_the_cpu_measures():
    """Every statistic, to float32's accuracy; what is not measured on one is not measured on the other."""
    numbers = []
    for device in ("cpu", "cuda"):
        stats = {name: stat.settle() for name, stat in observe(on(device, batch())).items()}
        numbers.append({name: (float(stat.value()), float(stat.count)) for name, stat in stats.items()})
    cpu, cuda = numbers

    assert cpu.keys() == cuda.keys()
    for name, (value, count) in cpu.items():
        assert cuda[name][1] == count, name
        if count > 0:
            assert math.isclose(cuda[name][0], value, rel_tol=2e-4, abs_tol=2e-5) or value != value, name


def test_a_transfer_does_not_wait_for_a_busy_device(no_waits):
    """It is not ready while the device is still at work, and reads the right numbers once it is."""
    torch.cuda.set_sync_debug_mode("default")
    x = torch.arange(5.0, device="cuda")
    torch.cuda.set_sync_debug_mode("error")

    torch.cuda._sleep(400_000_000)
    transfer = Transfer([x * 2, x.sum()])
    early = transfer.ready()

    torch.cuda.set_sync_debug_mode("default")
    doubled, total = transfer.read()
    assert not early
    np.testing.assert_array_equal(doubled, [0, 2, 4, 6, 8])
    assert total == 10


def test_gradient_norms_are_read_without_a_wait(no_waits):
    """Of a model with two layers, as the trainer asks for them before clipping."""
    torch.cuda.set_sync_debug_mode("default")
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))}).cuda()
    sum(layer(torch.ones(3, 8, device="cuda")).square().mean() for layer in model["layers"]).backward()
    torch.cuda.set_sync_debug_mode("error")

    norms = grad_norms(model.named_parameters())
    stats = norms.stats()

    torch.cuda.set_sync_debug_mode("default")
    assert "grad_layer/layers.1" in stats


def train(where, *, watched, **config):
    """Weights after training on the GPU, and how often the CPU waited for it."""
    trainer, run = make_trainer(where, use_cpu=False, max_steps=4, beta=0.1, **config), FakeRun()
    if watched:
        watch(trainer, run=run)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.train()
    torch.cuda.set_sync_debug_mode("default")
    waits = Counter(str(w.filename) for w in seen if "synchroniz" in str(w.message))
    return [p.detach().cpu() for p in trainer.model.parameters()], torch.cuda.get_rng_state(), waits, run


def test_training_on_a_gpu_is_bit_identical_and_waits_no_more_often(tmp_path):
    """GRPO with a reference: the same weights and random state; no file of ours makes the CPU wait."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        plain, plain_rng, plain_waits, _ = train(tmp_path / "a", watched=False)
        seen, seen_rng, seen_waits, run = train(tmp_path / "b", watched=True)
    finally:
        torch.use_deterministic_algorithms(mode=False)

    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert torch.equal(plain_rng, seen_rng)
    assert len(run.taps()) == 4
    assert [name for name in seen_waits if "rlwatch" in name] == []
    assert sum(seen_waits.values()) <= sum(plain_waits.values())
