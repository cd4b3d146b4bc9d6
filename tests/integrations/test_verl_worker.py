"""A worker of verl measures its micro-batches together, and what is asked of it from one update to the next."""

from types import SimpleNamespace

import pytest
import torch

from rlwatch.error_boundary import ErrorBoundary
from rlwatch.integrations.level import Level
from rlwatch.integrations.step_tally import BEFORE, everything
from rlwatch.integrations.verl.taps import WorkerTaps, before_update, compacted
from rlwatch.tensors.mergeable import merge
from rlwatch.tensors.tokens import TokenBatch

pytestmark = pytest.mark.torch


def policy_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None):
    ratio = (log_prob - old_log_prob).exp()
    return -(ratio * advantages * response_mask).sum() / response_mask.sum(), {}


@pytest.fixture
def worker():
    """Its taps, and a function that makes one update of three micro-batches, which it returns."""
    registry = {"mine": policy_loss}
    actor = SimpleNamespace(engine=SimpleNamespace(optimizer_step=lambda: torch.tensor(1.0)))
    taps = WorkerTaps(actor, registry, ErrorBoundary(), Level.FULL)
    taps.attach()

    def update(seed):
        g, batches = torch.Generator().manual_seed(seed), []
        for rows in (3, 4, 2):
            logp = -torch.rand(rows, 6, generator=g)
            batch = TokenBatch(
                logp, torch.ones(rows, 6, dtype=torch.bool), advantages=torch.randn(rows, 6, generator=g),
                old_logp=logp + 0.1 * torch.randn(rows, 6, generator=g),
            )  # fmt: skip
            registry["mine"](batch.old_logp, batch.logp.clone().requires_grad_(), batch.advantages, batch.mask)
            batches.append(batch)
        return batches

    return taps, update


def numbers(stats):
    return {name: float(stat.settle().value()) for name, stat in stats.items() if not hasattr(stat, "bins")}


def test_micro_batches_are_measured_as_they_would_be_one_by_one(worker):
    """And nothing of the policy before the update, which nobody asked for."""
    taps, update = worker
    expected = {}
    for batch in update(1):
        expected = merge(expected, everything(batch))
    found = taps.take().stats

    assert found.keys() == expected.keys()
    assert numbers(found) == pytest.approx(numbers(expected), rel=1e-4, abs=1e-6, nan_ok=True)


def test_what_is_asked_counts_from_the_next_update_on(worker):
    """Micro-batches that wait are measured by what was asked when they came."""
    taps, update = worker
    update(1)
    first = taps.take(before=True).stats
    batches = update(2)
    second = taps.take().stats
    update(3)
    third = taps.take().stats
    expected = {}
    for batch in batches:
        expected = merge(expected, before_update(batch, full=True))
    found = {name: stat for name, stat in second.items() if name.startswith(BEFORE)}

    assert not [name for name in (*first, *third) if name.startswith(BEFORE)]
    assert numbers(found) == pytest.approx(numbers(compacted(expected)), rel=1e-4, abs=1e-6, nan_ok=True)
