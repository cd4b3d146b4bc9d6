"""What statistics of tokens cost: entropy and log-probs from logits beside TRL's and verl's own code, in one run.

    python benchmarks/token_statistics.py [--rows 128] [--quick] [--devices cuda] [--site DIRECTORY]

A step of 8 x 4096 tokens over 151,936 entries is 10 GB of bfloat16 logits: every function is given the same slice of
``--rows`` tokens, and its time is scaled to the step. Memory is the peak of what a call allocates beyond its input, in
bytes counted by PyTorch's allocator; the error is the largest difference to float64, in nats. Then the statistics of
``observe`` over the 8 x 4096 tokens of a whole step, and what it spares to measure micro-batches together. Times are
the best of several, of the thread on a CPU and of the device on a GPU: compare ratios inside one table. TRL
and verl are left out, and named, where they are not installed; ``--site`` names a directory of packages to look into
last, such as that of another virtual environment with verl.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

VOCABULARY, RESPONSES, LENGTH = 151_936, 8, 4096
TOKENS = RESPONSES * LENGTH


@dataclass(frozen=True)
class Contender:
    """``run(logits, ids)``; ``who`` and ``what`` name it in the table."""

    what: str
    who: str
    run: Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Cost:
    seconds: float
    peak: int


def ours() -> list[Contender]:
    from rlwatch.tensors.entropy import token_entropy, token_logp_entropy

    return [
        Contender("entropy", "rlwatch", lambda logits, _ids: token_entropy(logits)),
        Contender("log-prob and entropy", "rlwatch", token_logp_entropy),
    ]


def of_trl() -> list[Contender]:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax, selective_log_softmax_and_entropy

    return [
        Contender("entropy", "TRL entropy_from_logits", lambda logits, _ids: entropy_from_logits(logits)),
        Contender("log-prob", "TRL selective_log_softmax", selective_log_softmax),
        Contender("log-prob and entropy", "TRL selective_log_softmax_and_entropy", selective_log_softmax_and_entropy),
    ]


def of_verl() -> list[Contender]:
    from verl.utils.torch_functional import (
        entropy_from_logits,
        entropy_from_logits_with_chunking,
        logprobs_from_logits,
    )

    def both(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs_from_logits(logits, ids), entropy_from_logits_with_chunking(logits)

    return [
        Contender("entropy", "verl entropy_from_logits", lambda logits, _ids: entropy_from_logits(logits)),
        Contender("entropy", "verl ..._with_chunking", lambda logits, _ids: entropy_from_logits_with_chunking(logits)),
        Contender("log-prob", "verl logprobs_from_logits", logprobs_from_logits),
        Contender("log-prob and entropy", "verl both of them", both),
    ]


def contenders() -> list[Contender]:
    found = ours()
    for name, add in (("TRL", of_trl), ("verl", of_verl)):
        try:
            found += add()
        except ImportError as why:
            print(f"{name} is left out: {why}")
    return found


def peak_on_cpu(work: Callable[[], object]) -> int:
    """Largest number of bytes allocated at once, beyond what was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def peak_on_gpu(work: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def seconds_on_cpu(work: Callable[[], object]) -> float:
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def seconds_on_gpu(work: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def cost(work: Callable[[], object], device: str, times: int) -> Cost:
    peak, seconds = (peak_on_gpu, seconds_on_gpu) if device == "cuda" else (peak_on_cpu, seconds_on_cpu)
    work()
    return Cost(min(seconds(work) for _ in range(times)), peak(work))


def largest_error(contender: Contender, logits: Tensor, ids: Tensor) -> float:
    """Against log_softmax of the same logits in float64, in nats."""
    exact = logits.double().log_softmax(-1)
    logp, entropy = exact.gather(-1, ids.unsqueeze(-1)).squeeze(-1), -(exact.exp() * exact).sum(-1)
    truth = {"entropy": [entropy], "log-prob": [logp], "log-prob and entropy": [logp, entropy]}[contender.what]
    result = contender.run(logits, ids)
    results = [result] if isinstance(result, Tensor) else list(result)
    return max((got.double() - right).abs().max().item() for got, right in zip(results, truth, strict=True))


def slice_of_logits(rows: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.empty(rows, VOCABULARY, dtype=dtype, device=device).normal_(0, 3, generator=generator)
    return logits, torch.randint(0, VOCABULARY, (rows,), device=device, generator=generator)


def step(device: str) -> object:
    """A batch of a whole step that measures everything a token-level trainer has."""
    from rlwatch.tensors.tokens import TokenBatch

    g = torch.Generator(device).manual_seed(0)
    uniform = lambda *shape: torch.rand(*shape, device=device, generator=g)  # noqa: E731
    logp = -uniform(RESPONSES, LENGTH)
    near = lambda scale: logp + scale * (uniform(RESPONSES, LENGTH) - 0.5)  # noqa: E731
    lengths = torch.randint(LENGTH // 4, LENGTH, (RESPONSES, 1), device=device, generator=g)
    return TokenBatch(
        logp=logp,
        mask=torch.arange(LENGTH, device=device)[None] < lengths,
        entropy=uniform(RESPONSES, LENGTH),
        ids=torch.randint(0, VOCABULARY, (RESPONSES, LENGTH), device=device, generator=g),
        advantages=uniform(RESPONSES) - 0.5,
        old_logp=near(0.1),
        ref_logp=near(0.3),
        rollout_logp=near(0.05),
        clip=(0.2, 0.28),
        dual_clip=3.0,
        cut=uniform(RESPONSES) > 0.5,
        staleness=torch.zeros(RESPONSES, device=device),
    )


def table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        left, *rest = zip(row, widths, strict=True)
        print("  ".join([left[0].ljust(left[1]), rest[0][0].ljust(rest[0][1]), *(c.rjust(w) for c, w in rest[1:])]))


def size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count < 2**30 else f"{count / 2**30:,.1f} GiB"


def from_logits(device: str, dtype: torch.dtype, rows: int, times: int, among: Sequence[Contender]) -> float:
    """Print a table; returns our time for log-probs and entropy of a step, in seconds."""
    logits, ids = slice_of_logits(rows, dtype, device)
    costs = {c: cost(lambda c=c: c.run(logits, ids), device, times) for c in among}
    print(f"\n{device}, {str(dtype).removeprefix('torch.')}, {rows} x {VOCABULARY:,} logits ({size(logits.nbytes)})")
    lines = [("what", "who", "time of 8 x 4096", "to ours", "peak memory", "to ours", "largest error")]
    for c in sorted(among, key=lambda c: c.what):
        mine, own = costs[c], next((costs[o] for o in among if o.who == "rlwatch" and o.what == c.what), None)
        faster = f"{mine.seconds / own.seconds:,.2f} x" if own else ""
        smaller = f"{mine.peak / own.peak:,.1f} x" if own else ""
        error = f"{largest_error(c, logits[:4], ids[:4]):.0e}"
        lines.append((c.what, c.who, f"{mine.seconds * TOKENS / rows:,.2f} s", faster, size(mine.peak), smaller, error))
    table(lines)
    return costs[among[1]].seconds * TOKENS / rows


def of_a_step(device: str, times: int, beside: float) -> None:
    from rlwatch.tensors.histogram import observe_distributions
    from rlwatch.tensors.mergeable import read
    from rlwatch.tensors.observe import observe
    from rlwatch.tensors.tokens import top_tokens

    batch = step(device)
    core = lambda: [name for one in read(observe(batch, full=False)) for name in one.names]  # noqa: E731
    full = lambda: [name for one in read(observe(batch)) for name in one.names]  # noqa: E731
    bins = lambda: [s.bins for s in observe_distributions(batch).values()]  # noqa: E731
    works = {
        "cheap statistics": core,
        "all statistics": full,
        "distributions": bins,
        "extreme tokens": lambda: top_tokens(batch),
    }
    print(f"\n{device}, statistics of the {RESPONSES} x {LENGTH} tokens of a step, results included")
    lines = [("what", "results", "time", "of log-probs and entropy", "peak memory")]
    for what, work in works.items():
        mine, results = cost(work, device, times), work()
        found = str(len(results)) if isinstance(results, list) else ""
        share = f"{mine.seconds / beside:.2%}"
        lines.append((what, found, f"{mine.seconds * 1000:,.2f} ms", share, size(mine.peak)))
    table(lines)


class Operations(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


def of_micro_batches(device: str, times: int, number: int = 32) -> None:
    from rlwatch.integrations import step_tally

    whole = step(device)
    rows = torch.arange(4, device=device)
    tensors = {name: x for name, x in vars_of(whole).items() if isinstance(x, Tensor)}
    part = replace(whole, **{name: x[rows, :512] if x.dim() > 1 else x[rows] for name, x in tensors.items()})
    print(f"\n{device}, {number} micro-batches of 4 x 512 tokens, sealed")
    lines = [("what", "operations", "time")]

    def work() -> None:
        tally = step_tally.StepTally()
        for _ in range(number):
            tally.add_batch(part)
        tally.seal(1)

    for what, pooled in (("one by one", 1), ("together", step_tally.POOLED)):
        step_tally.POOLED = pooled
        mine = cost(work, device, times)
        with Operations() as operations:
            work()
        lines.append((what, f"{operations.count:,}", f"{mine.seconds * 1000:,.0f} ms"))
    table(lines)


def vars_of(batch: object) -> dict[str, object]:
    return {f.name: getattr(batch, f.name) for f in fields(batch)}  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help="tokens whose logits are looked at (CPU: 128, GPU: 4096)")
    parser.add_argument("--quick", action="store_true", help="a few rows, once")
    parser.add_argument("--site", help="a directory of packages to look into last")
    parser.add_argument("--devices", nargs="+", choices=["cpu", "cuda"], help="where (both, if there is a GPU)")
    options = parser.parse_args()
    if options.site:
        sys.path.append(options.site)
    torch.set_num_threads(1)
    among = contenders()
    for device in options.devices or ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        rows = options.rows or (8 if options.quick else 128 if device == "cpu" else LENGTH)
        times = 1 if options.quick else 5
        beside = [from_logits(device, dtype, rows, times, among) for dtype in (torch.bfloat16, torch.float32)]
        of_a_step(device, times, beside[0])
        of_micro_batches(device, times)


if __name__ == "__main__":
    main()
