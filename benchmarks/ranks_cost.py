"""What several ranks cost: on the training thread, on the wire, and on rank 0's writer thread.

    python benchmarks/ranks_cost.py            # also 64 ranks of 8 x 32,768 tokens, 16.8 million in a step
    python benchmarks/ranks_cost.py --ranks 256

Shapes are those of one rank's micro-batch, 8 responses of 4,096 tokens; at last 64 ranks with one of 32,768 tokens each
are put together on rank 0 (eight different shares, again and again), with the peak of its memory. `seal` is CPU time of
the training thread at the end of a step (on a CPU: on a GPU it only starts the work). What boundaries and the link
itself cost is measured by `link_cost.py`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from rlwatch.integrations.step_tally import SharedStep, StepTally
from rlwatch.tensors.tokens import TokenBatch

ROWS, TOKENS, LONGEST = 8, 4096, 32_768


def batch(seed: int, tokens: int = TOKENS) -> TokenBatch:
    g = torch.Generator().manual_seed(seed)

    def near(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x + scale * torch.randn(ROWS, tokens, generator=g)

    logp = -torch.rand(ROWS, tokens, generator=g)
    return TokenBatch(
        logp=logp,
        mask=torch.arange(tokens) < torch.randint(tokens // 4, tokens + 1, (ROWS, 1), generator=g),
        entropy=torch.rand(ROWS, tokens, generator=g),
        ids=torch.randint(0, 32_000, (ROWS, tokens), generator=g),
        advantages=torch.randn(ROWS, generator=g),
        old_logp=near(logp, 0.1),
        ref_logp=near(logp, 0.1),
        rollout_logp=near(logp, 0.05),
        clip=(0.2, 0.28),
        cut=torch.rand(ROWS, generator=g) < 0.3,
    )


def tally(*, full: bool, micro_batches: int) -> StepTally:
    found = StepTally()
    for seed in range(micro_batches):
        found.add_batch(batch(seed), full=full)
    return found


def milliseconds(work: Callable[[], object], repeat: int = 5) -> float:
    times = []
    for _ in range(repeat):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return 1e3 * statistics.median(times)


def sealing() -> None:
    print("level    micro-batches  seal alone, ms  seal a share, ms  encode, ms  sent, kB  put 8 together, ms")
    for full in (False, True):
        for micro_batches in (1, 8):
            collected = tally(full=full, micro_batches=micro_batches)
            share = collected.seal(1, shared=True)
            assert isinstance(share, SharedStep)
            data = share.encode()
            others = dict.fromkeys(range(1, 8), data)
            print(
                f"{'full' if full else 'tokens':7}  {micro_batches:13}"
                f"  {milliseconds(lambda c=collected: c.seal(1)):14.1f}"
                f"  {milliseconds(lambda c=collected: c.seal(1, shared=True)):16.1f}"
                f"  {milliseconds(share.encode):10.1f}  {len(data) / 1e3:8.0f}"
                f"  {milliseconds(lambda s=share, o=others: s.merged(o), repeat=3):18.1f}"
            )


def together(ranks: int) -> None:
    """A step of many ranks: CPU of a rank's training thread, bytes, CPU and memory of rank 0 beyond its own share."""
    print(f"\n{ranks} ranks, {ROWS} x {LONGEST:,} tokens each")
    print("level   a rank's share, s  encode, ms  received, MB  put together, s  peak, MB")
    for full in (False, True):
        shares, took = [], []
        for seed in range(8):
            begin = time.thread_time()
            collected = StepTally()
            collected.add_batch(batch(seed, LONGEST), full=full)
            share = collected.seal(1, shared=True)
            assert isinstance(share, SharedStep)
            took.append(time.thread_time() - begin)
            shares.append(share)
        encode = milliseconds(shares[0].encode)
        data = [share.encode() for share in shares]
        resident = peak_mb(afresh=True)
        others = {rank: bytes(bytearray(data[rank % 8])) for rank in range(1, ranks)}
        begin = time.thread_time()
        shares[0].merged(others)
        spent = time.thread_time() - begin
        received = sum(map(len, others.values())) / 1e6
        print(
            f"{'full' if full else 'tokens':7}  {statistics.median(took):16.2f}  {encode:10.1f}  {received:12.1f}"
            f"  {spent:15.2f}  {peak_mb() - resident:8.0f}"
        )


def peak_mb(*, afresh: bool = False) -> float:
    """Peak of resident memory; ``afresh``: from now on, and what is resident now."""
    if afresh:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return float(status["VmHWM"].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sealing()
    together(args.ranks)


if __name__ == "__main__":
    main()
