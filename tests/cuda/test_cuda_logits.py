"""On a GPU: log-probs and entropy from logits are the CPU's, in bounded memory, and nobody waits."""

import pytest
import torch

from rlwatch.tensors.entropy import DEVICE_TILE, FUSED, softmax_of, token_logp_entropy

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE: logits on a GPU are not tested here"),
]


def drawn(rows, vocabulary=151936):
    g = torch.Generator().manual_seed(0)
    return (3 * torch.randn(rows, vocabulary, generator=g)).bfloat16(), torch.randint(
        0, vocabulary, (rows,), generator=g
    )


def test_the_numbers_are_those_of_the_cpu():
    """To the rounding of float32."""
    logits, ids = drawn(16)

    for ours, theirs in zip(
        token_logp_entropy(logits.cuda(), ids.cuda()), token_logp_entropy(logits, ids), strict=True
    ):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)


def test_nobody_waits():
    """Nor where ids are none."""
    logits, ids = (x.cuda() for x in drawn(16))
    ids[0] = -100
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        token_logp_entropy(logits, ids, temperature=0.7)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_only_a_few_tiles_are_ever_allocated():
    """Far less than the logits, however many there are."""
    logits = torch.zeros(4096, 151936, dtype=torch.bfloat16, device="cuda")
    ids = torch.zeros(4096, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    token_logp_entropy(logits, ids)

    assert torch.cuda.max_memory_allocated() - before < 5 * 4 * DEVICE_TILE < logits.nbytes / 3


def test_the_kernel_computes_them_and_agrees_with_float64():
    """Triton's, in one pass: of each type of logits, with a temperature, and with tokens that cannot be sampled."""
    logits, _ = drawn(8)
    logits[0, :100_000] = -torch.inf
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        ours = softmax_of(logits.to("cuda", dtype), temperature=0.7, collision=True)
        exact = softmax_of(logits.to(dtype).double(), temperature=0.7, collision=True)
        for name in ("top", "log_total", "entropy", "collision"):
            torch.testing.assert_close(
                getattr(ours, name).cpu().double(), getattr(exact, name), rtol=1e-5, atol=1e-5, msg=f"{name}, {dtype}"
            )

    assert FUSED.unusable is None
