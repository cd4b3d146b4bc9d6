"""Softmax sums over the vocabulary on a GPU, in one pass over the logits: a Triton kernel.

A row is read once, block by block. Each block raises the row's largest logit so far, and what was summed is scaled to
it, as in online softmax. Sums are float32 and one for each place of a block, added up once at the end, so that none has
more than a few dozen terms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None  # comes with PyTorch for GPUs, and is not needed elsewhere

BLOCK = 4096
"""Vocabulary entries of a block."""
WARPS = 8
TYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Types of logits that the kernel reads; float64 keeps its digits only elsewhere."""


def _sums(  # noqa: PLR0917
    logits: Any,
    top: Any,
    log_total: Any,
    entropy: Any,
    collision: Any,
    stride: int,
    vocabulary: int,
    temperature: float,
    ZERO: tl.constexpr,  # noqa: N803  (constants of a kernel, by Triton's custom)
    BLOCK: tl.constexpr,  # noqa: N803
    COLLIDE: tl.constexpr,  # noqa: N803
) -> None:
    """Sum one row; the first arguments are pointers to the logits and to one result for each row."""
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * stride
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocabulary, BLOCK):
        place = first + tl.arange(0, BLOCK)
        x = tl.load(begin + place, mask=place < vocabulary, other=float("-inf")).to(tl.float32)
        now = tl.maximum(largest, tl.max(x, 0))
        # A row may begin with tokens that cannot be sampled: nothing is summed yet, and -inf - -inf would be NaN.
        origin = tl.where(now == float("-inf"), 0.0, now)
        moved = tl.where(largest == float("-inf"), 0.0, (largest - origin) / temperature)
        scale = tl.exp(moved)
        t = (x - origin) / temperature
        t = tl.where(t < ZERO, ZERO, t)  # not a maximum, which would make a number of NaN
        weight = tl.exp(t)
        moment = scale * (moment + moved * total) + t * weight
        total = scale * total + weight
        if COLLIDE:
            squares = scale * scale * squares + weight * weight
        largest = now
    z = tl.sum(total, 0)
    log_z = tl.log(z)
    tl.store(top + row, largest)
    tl.store(log_total + row, log_z)
    tl.store(entropy + row, log_z - tl.sum(moment, 0) / z)
    if COLLIDE:
        tl.store(collision + row, tl.sum(squares, 0) / (z * z))


_KERNEL: Any = None if triton is None else triton.jit(_sums)


def sums_of(rows: Tensor, temperature: float, zero: float, *, collision: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the largest logit, log sum exp(t), entropy and collision of each of ``rows`` (n, V), (n,) each, float32.

    t = (logit - largest) / ``temperature``, and not below ``zero``. The collision is NaN unless it is requested.
    Entries of a row must lie side by side in memory. Raises ``ImportError`` if Triton is not installed.
    """
    if _KERNEL is None:
        raise ImportError("Triton is not installed")
    n = rows.shape[0]
    results = torch.full((4, n), torch.nan, dtype=torch.float32, device=rows.device)
    top, log_total, entropy, met = results.unbind()
    if n:
        with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
            _KERNEL[(n,)](
                rows, top, log_total, entropy, met, rows.stride(0), rows.shape[1], temperature,
                ZERO=zero, BLOCK=BLOCK, COLLIDE=collision, num_warps=WARPS,
            )  # fmt: skip
    return top, log_total, entropy, met
