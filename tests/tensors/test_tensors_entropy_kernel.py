"""The kernel for entropy from logits on a GPU: its arithmetic, by Triton's interpreter, and what happens without it.

`tests/cuda` compares it with the CPU on a GPU.
"""

import importlib.util
import math
import os
import subprocess
import sys
import types

import pytest
import torch

from rlwatch.tensors.entropy import FusedSums, softmax_of

pytestmark = pytest.mark.torch

without_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="NO TRITON: the kernel for entropy on a GPU is not run by its interpreter here (pip install triton)",
)

INTERPRETED = """
import math, torch
from rlwatch.tensors import softmax_kernel
from rlwatch.tensors.entropy import softmax_of

g = torch.Generator().manual_seed(0)

def same(logits, temperature=1.0):
    got = softmax_kernel.sums_of(logits, temperature, -1e4, collision=True)
    exact = softmax_of(logits.double(), temperature=temperature, collision=True)
    for name, ours, theirs in zip(("entropy", "collision"), got[2:], (exact.entropy, exact.collision), strict=True):
        assert (ours.isnan() == theirs.isnan()).all(), (name, ours, theirs)
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-6, equal_nan=True)
    known = exact.entropy.isfinite()
    torch.testing.assert_close(got[0][known].double(), exact.top[known], rtol=0, atol=0)
    torch.testing.assert_close(got[1][known].double(), exact.log_total[known], rtol=1e-6, atol=1e-6)

wide = 3 * torch.randn(3, 20_001, generator=g)
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    same(wide.to(dtype))
same(wide, temperature=0.7)
same(wide[::2])
same(wide[:, :1].contiguous())
same(wide[:, :37].contiguous(), temperature=2.0)
same(torch.linspace(-80, 80, 20_000).repeat(2, 1))
odd = torch.randn(6, 9_000, generator=g)
odd[0] = -math.inf
odd[1, :8_500] = -math.inf
odd[2, 7], odd[3, 8_999] = math.nan, math.inf
odd[4] *= 1e4
odd[5, 100:] = -math.inf
same(odd)
assert softmax_kernel.sums_of(wide, 1.0, -1e4, collision=False)[3].isnan().all()
assert softmax_kernel.sums_of(wide[:0], 1.0, -1e4, collision=True)[2].shape == (0,)
print("equal")
"""


@without_triton
def test_its_sums_are_those_of_float64():
    """All types, temperatures and sizes, masked beginnings, infinities and NaN."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}

    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False
    )

    assert done.stdout.strip() == "equal", done.stderr


def kernel(change=0.0):
    """A module whose sums are PyTorch's, plus ``change``."""

    def sums_of(rows, temperature, _zero, *, collision):
        exact = softmax_of(rows, temperature=temperature, collision=collision)
        return exact.top, exact.log_total, exact.entropy + change, exact.collision

    return types.SimpleNamespace(sums_of=sums_of)


def test_a_kernel_that_fails_is_not_tried_again(caplog):
    """One warning with the reason, and PyTorch computes."""

    def fails():
        raise RuntimeError("no compiler was found")

    fused, logits = FusedSums(fails), torch.randn(2, 5)

    assert fused.sums_of(logits, 1.0, collision=False) is None
    assert fused.unusable == "RuntimeError: no compiler was found"
    assert not fused.reads(logits)
    assert "no compiler was found" in caplog.text


def test_a_kernel_that_computes_something_else_is_not_used():
    """It is compared with PyTorch before its first result is used."""
    wrong, broken = FusedSums(lambda: kernel(0.01)), FusedSums(lambda: kernel(math.nan))

    assert wrong.sums_of(torch.randn(2, 5), 1.0, collision=False) is None
    assert wrong.unusable == "ArithmeticError: its sums differ from PyTorch's by 0.01"
    assert broken.sums_of(torch.randn(2, 5), 1.0, collision=False) is None


def test_what_the_kernel_returns_is_used():
    """Its fields in the order of those that PyTorch computes."""
    logits, fused = torch.randn(2, 5), FusedSums(kernel)
    exact = softmax_of(logits, collision=True)

    found = fused.sums_of(logits, 1.0, collision=True)

    assert fused.unusable is None
    for ours, theirs in zip(found, (exact.top, exact.log_total, exact.entropy, exact.collision), strict=True):
        assert torch.equal(ours, theirs)


def test_on_a_cpu_it_is_never_asked():
    """Nor imported: PyTorch in tiles is what a CPU has."""
    assert not FusedSums().reads(torch.randn(2, 5))
