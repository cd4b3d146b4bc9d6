"""Statistics of a step are read together: the same numbers as one by one, in a fraction of the operations."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlwatch.tensors.mergeable import Max, Mean, Stats, read
from rlwatch.tensors.observe import observe
from rlwatch.tensors.responses import ResponseBatch, observe_responses
from rlwatch.tensors.tokens import TokenBatch

pytestmark = pytest.mark.torch

RESPONSES, LENGTH = 12, 9


class Operations(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def measured(dtype: torch.dtype = torch.float32) -> Stats:
    """All statistics of a batch that has everything but experts, and of its generation."""
    g = torch.Generator().manual_seed(7)
    drawn = lambda *shape: torch.rand(*shape, dtype=dtype, generator=g)  # noqa: E731
    logp = -drawn(RESPONSES, LENGTH)
    lengths = torch.randint(0, LENGTH + 1, (RESPONSES, 1), generator=g)
    batch = TokenBatch(
        logp=logp, mask=torch.arange(LENGTH) < lengths, entropy=drawn(RESPONSES, LENGTH),
        ids=torch.randint(0, 5, (RESPONSES, LENGTH), generator=g), advantages=drawn(RESPONSES) - 0.5,
        old_logp=logp + drawn(RESPONSES, LENGTH) / 9, ref_logp=logp - drawn(RESPONSES, LENGTH) / 3,
        rollout_logp=logp + drawn(RESPONSES, LENGTH) / 20, clip=(0.2, 0.28), cut=drawn(RESPONSES) > 0.5,
        staleness=torch.arange(RESPONSES) % 3,
    )  # fmt: skip
    rewards = (drawn(RESPONSES) > 0.5).to(dtype)
    return observe(batch) | observe_responses(ResponseBatch.of(rewards=rewards, groups=4, lengths=lengths[:, 0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_together_they_have_the_values_and_counts_that_each_has_alone(dtype):
    """Of every class, among them those that are not measured here."""
    stats = measured(dtype)
    alone = {name: stat.settle() for name, stat in stats.items()}

    found = {
        name: (value, count)
        for one in read(stats)
        for name, value, count in zip(one.names, one.values.tolist(), one.counts.tolist(), strict=True)
    }

    assert sorted(found) == sorted(stats)
    for name, stat in alone.items():
        assert found[name][1] == float(stat.count), name
        if stat.count > 0:
            assert found[name][0] == pytest.approx(float(stat.value()), rel=1e-6, abs=1e-12, nan_ok=True), name


def test_they_are_few_operations_however_many_metrics_there_are():
    """One hundred means are read by as many operations as three."""

    def operations(number: int) -> int:
        stats = {f"m{i}": Mean.of(torch.arange(3.0) + i, torch.ones(3)) for i in range(number)}
        with Operations() as counted:
            (reading,) = read(stats)
        assert reading.values.tolist() == [1.0 + i for i in range(number)]
        return counted.count

    assert operations(100) == operations(3)


def test_nan_stays_with_its_metric():
    """A broken mean neither hides nor spreads."""
    one = torch.ones(2)
    stats = {"whole": Mean.of(one, one), "broken": Mean.of(one * torch.nan, one), "largest": Max.of(one, one)}

    found = {name: value for one in read(stats) for name, value in zip(one.names, one.values.tolist(), strict=True)}

    assert (found["whole"], found["largest"]) == (1.0, 1.0)
    assert found["broken"] != found["broken"]
