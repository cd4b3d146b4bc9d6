"""What a step of millions of tokens costs the driver of verl: CPU time, memory, and how far what is estimated is off.

    python benchmarks/big_step_cost.py --rows 512 --longest 32768

Columns are made as verl's queue holds them (jagged, one process); the queue's own copying costs 2.2 ns of CPU a byte
on top (measured once with TransferQueue 0.1.11 in verl's environment). Responses differ from each other as much as
tokens within them do, which makes life hard for a sample. Each way runs in a process of its own, for the memory.
"Sampled" is the second such step in a row: 64 workers, whose own cost is not counted here, were asked to measure what
the driver reads no more. Their quantiles are of 1,024 values a rank at most.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from rlwatch.integrations.step_tally import StepTally, encoded_tally, merge_workers
from rlwatch.integrations.verl.batch import RESPONSE_FIELDS, TOKEN_FIELDS, BatchSettings, StepBatch, pieces
from rlwatch.integrations.verl.sampling import EveryResponse, SamplingBudget
from rlwatch.integrations.verl.taps import before_update, compacted
from rlwatch.tensors.observe import observe
from rlwatch.tensors.responses import observe_responses

NANOSECONDS_A_BYTE = 2.2
SMALL_ROWS = 128
READING = BatchSettings(longest=32_768, eos=2)
QUANTILES = ("policy/entropy_p10", "policy/entropy_p90", "policy/kl_ref_p99")
MEANS = (
    "policy/entropy",
    "policy/logp_mean",
    "policy/kl_ref_k3",
    "mismatch/kl",
    "mismatch/k3",
    "mismatch/logp_absdiff",
)
EXTREMES = ("mismatch/logp_absdiff_max", "mismatch/weight_max", "mismatch/weight_min", "policy/kl_ref_max")
EXACT = ("reward/mean", "reward/zero_std_frac", "len/mean", "len/p99", "len/clipped")


class Queue:
    """A step's columns by row, as verl's queue gives them; counts the bytes it gave."""

    def __init__(self, rows: int, longest: int) -> None:
        g = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(longest // 8, longest + 1, (rows,), generator=g).tolist()
        self.keys = [f"u{row // 8}_{row % 8}_0" for row in range(rows)]
        self.row = {key: row for row, key in enumerate(self.keys)}
        self.given = 0
        per_row = torch.rand(rows, generator=g)
        self.columns: dict[str, Any] = {name: [] for name in TOKEN_FIELDS if name != "loss_mask"}
        for row, n in enumerate(self.lengths):
            logp = -torch.rand(n, generator=g) * (0.5 + per_row[row])
            tokens = {
                "responses": torch.randint(3, 32_000, (n,), generator=g),
                "response_mask": torch.ones(n, dtype=torch.int64),
                "old_log_probs": logp,
                "rollout_log_probs": logp + 0.05 * (0.5 + per_row[row]) * torch.randn(n, generator=g),
                "ref_log_prob": logp + 0.1 * (0.5 + per_row[row]) * torch.randn(n, generator=g),
                "entropy": torch.rand(n, generator=g) * (0.5 + per_row[row]),
                "advantages": torch.full((n,), float(per_row[row]) - 0.5),
                "rm_scores": torch.zeros(n).index_fill_(0, torch.tensor([n - 1]), float(row % 3 == 0)),
            }
            for name, values in tokens.items():
                self.columns[name].append(values)
        self.columns |= {"uid": [key.split("_")[0] for key in self.keys], "data_source": ["math"] * rows}

    def fetch(self, keys: Sequence[str], fields: Sequence[str]) -> Mapping[str, Any]:
        """Columns of the rows with these keys."""
        found: dict[str, Any] = {}
        for name in fields:
            if name not in self.columns:
                continue
            rows = [self.columns[name][self.row[key]] for key in keys]
            if isinstance(rows[0], str):
                found[name] = rows
                continue
            ends = torch.tensor([0, *(len(x) for x in rows)]).cumsum(0)
            values = torch.cat(rows)
            self.given += values.nbytes
            found[name] = torch.nested.nested_tensor_from_jagged(values, ends)
        return found


def measured(way: str, rows: int, longest: int, budget_ms: float) -> dict[str, Any]:
    """CPU seconds, extra MB, tokens read, bytes out of the queue and metrics of one step measured in this ``way``."""
    torch.set_num_threads(1)
    if rows > SMALL_ROWS:  # what the first step of a process costs alone, of which there is one
        measured(way, SMALL_ROWS, 1024, 0.0)
    queue = Queue(rows, longest)
    tags = [{"response_len": n, "max_global_steps": 0} for n in queue.lengths]
    names = [*TOKEN_FIELDS, *RESPONSE_FIELDS]
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    chosen = SamplingBudget(budget_ms).rows(queue.lengths, 1) if way == "sampled" else None
    every = None if chosen is None else EveryResponse.read(queue.keys, queue.lengths, queue.fetch, READING)
    which = range(rows) if chosen is None else chosen
    keys = [queue.keys[row] for row in which]
    batch = StepBatch.of(keys, [tags[row] for row in which], queue.fetch(keys, names), 1)
    tally, tokens = StepTally(), batch.token_batch(READING)
    assert tokens is not None
    for piece in pieces(tokens, batch.lengths.tolist()):
        tally.add_batch(piece)
    stats = observe_responses(batch.response_batch(READING))
    if every is not None:
        stats |= observe_responses(every.response_batch(READING))
    tally.add_stats(stats)
    spent, given = time.thread_time() - begin, queue.given
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shares = {} if every is None else shares_of_workers(queue)
    begin = time.thread_time()
    metrics = merge_workers(1, tally, shares, sampled=every is not None).metrics
    spent += time.thread_time() - begin
    read = int(batch.lengths.sum())
    return {
        "tokens": sum(queue.lengths), "read": read, "cpu_s": spent + given * NANOSECONDS_A_BYTE * 1e-9,
        "mb": (peak - before) / 1024, "given_mb": given / 1e6,
        "metrics": {name: metrics[name] for name in (*MEANS, *QUANTILES, *EXTREMES, *EXACT) if name in metrics},
    }  # fmt: skip


def shares_of_workers(queue: Queue, ranks: int = 64) -> dict[int, bytes]:
    """What ``ranks`` workers send of their rows, having been asked to measure the policy before the update."""
    shares = {}
    for rank in range(ranks):
        tally = StepTally()
        for key in queue.keys[rank::ranks]:
            data = queue.fetch([key], TOKEN_FIELDS)
            batch = StepBatch.of([key], [{"max_global_steps": 0}], data, 1).token_batch(READING)
            assert batch is not None
            update = replace(batch, old_logp=batch.logp)
            tally.add_stats(observe(replace(update, ids=None, entropy=None, rollout_logp=None, ref_logp=None)))
            tally.add_stats(before_update(update, full=True))
        tally.stats = compacted(tally.stats)
        shares[rank] = encoded_tally(tally, 1)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--longest", type=int, default=32_768)
    parser.add_argument("--budget-ms", type=float, default=1000.0)
    parser.add_argument("--way", choices=("whole", "sampled"), help="one way only, as JSON")
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measured(args.way, args.rows, args.longest, args.budget_ms)))
        return
    found = {}
    for way in ("whole", "sampled"):
        command = [sys.executable, __file__, "--way", way, "--rows", str(args.rows), "--longest", str(args.longest)]
        command += ["--budget-ms", str(args.budget_ms)]
        found[way] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print("way      tokens      read    CPU s  extra MB  out of the queue, MB")
    for way, got in found.items():
        print(
            f"{way:8} {got['tokens']:>9,} {got['read']:>9,}  {got['cpu_s']:5.2f}  {got['mb']:8.0f}"
            f"  {got['given_mb']:20.0f}"
        )
    whole, part = found["whole"]["metrics"], found["sampled"]["metrics"]
    print("\nmetric                      whole     sampled   off by")
    for name in whole:
        off = abs(part[name] - whole[name]) / max(abs(whole[name]), 1e-12)
        print(f"{name:26} {whole[name]:9.5f}  {part[name]:9.5f}  {100 * off:6.2f} %")


if __name__ == "__main__":
    main()
