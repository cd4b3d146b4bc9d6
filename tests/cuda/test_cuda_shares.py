"""On a GPU: one rank's share of a step is sealed without a wait, and tells what the CPU would have told.

Without a CUDA device these are skipped, and pytest's summary says so.
"""

import pytest
import torch

from rlwatch.integrations.step_tally import StepTally
from rlwatch.tensors.gradnorm import grad_norms
from rlwatch.tensors.mergeable import Quantile
from rlwatch.tensors.tokens import TokenBatch

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="NO CUDA DEVICE: shares sealed on a GPU are not tested here"
    ),
]


def tally_on(device):
    g = torch.Generator().manual_seed(3)
    logp = -torch.rand(8, 4096, generator=g)
    old = logp + 0.1 * torch.randn(8, 4096, generator=g)
    mask = torch.arange(4096) < torch.randint(1, 4096, (8, 1), generator=g)
    model = torch.nn.Linear(64, 64)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g))
    model = model.to(device)
    model(torch.ones(3, 64, device=device)).square().mean().backward()
    batch = TokenBatch(logp=logp.to(device), mask=mask.to(device), old_logp=old.to(device), clip=(0.2, 0.28))
    return model, batch


def sealed_on(device, check=lambda mode: None):
    model, batch = tally_on(device)
    collected = StepTally()
    check("error")
    collected.add_batch(batch)
    collected.add_stats({"ratio/p99": Quantile.of(batch.logp, batch.mask, 0.99)})
    collected.add_stats(grad_norms(model.named_parameters()).stats())
    share = collected.seal(1, shared=True)
    check("default")
    return share


def test_a_share_is_sealed_without_a_wait_and_holds_what_the_cpus_holds():
    """Statistics, thinned quantiles and squares of gradients."""
    torch.cuda.synchronize()
    share = sealed_on("cuda", torch.cuda.set_sync_debug_mode)
    here, _ = share.merged({1: share.encode()})
    there, _ = (cpu := sealed_on("cpu")).merged({1: cpu.encode()})

    assert here.keys() == there.keys()
    assert here == pytest.approx(there, rel=2e-4, abs=2e-5, nan_ok=True)
