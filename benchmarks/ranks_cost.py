"""What several ranks cost: on the training thread, on the wire, and on rank 0's writer thread.

    python benchmarks/ranks_cost.py

Shapes are those of one rank's micro-batch, 8 responses of 4,096 tokens. `seal` is CPU time of the training thread at
the end of a step (on a CPU: on a GPU it only starts the work). What boundaries and the link itself cost is measured by
`link_cost.py`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from rlwatch.integrations.step_tally import SharedStep, StepTally
from rlwatch.tensors.tokens import TokenBatch

ROWS, TOKENS = 8, 4096


def batch(seed: int) -> TokenBatch:
    g = torch.Generator().manual_seed(seed)

    def near(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x + scale * torch.randn(ROWS, TOKENS, generator=g)

    logp = -torch.rand(ROWS, TOKENS, generator=g)
    return TokenBatch(
        logp=logp,
        mask=torch.arange(TOKENS) < torch.randint(TOKENS // 4, TOKENS + 1, (ROWS, 1), generator=g),
        entropy=torch.rand(ROWS, TOKENS, generator=g),
        ids=torch.randint(0, 32_000, (ROWS, TOKENS), generator=g),
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


def main() -> None:
    torch.set_num_threads(1)
    sealing()


if __name__ == "__main__":
    main()
