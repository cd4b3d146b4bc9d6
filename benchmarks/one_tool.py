"""One tool in one fresh process: log 60 scalars a step, of verl's names, paced, and print what it cost as JSON.

Run by ``log_call.py``; by hand: ``python benchmarks/one_tool.py rlwatch --steps 300 --pace-ms 10``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Log = Callable[[dict[str, float], int], Any]
LEVELS = {
    "actor/entropy": 0.6, "actor/grad_norm": 0.4, "actor/lr": 1e-6, "actor/pg_loss": 0.02, "actor/pg_clipfrac": 0.01,
    "actor/pg_clipfrac_lower": 0.001, "actor/ppo_kl": 0.002, "actor/kl_loss": 0.03, "actor/kl_coef": 0.001,
    "critic/score/mean": 0.4, "critic/score/max": 1.0, "critic/score/min": 0.1, "critic/rewards/mean": 0.4,
    "critic/rewards/max": 1.0, "critic/rewards/min": 0.1, "critic/advantages/mean": 0.02, "critic/advantages/max": 2.2,
    "critic/advantages/min": -1.8, "critic/returns/mean": 0.4, "critic/returns/max": 1.1, "critic/returns/min": 0.1,
    "critic/values/mean": 0.4, "critic/values/max": 1.1, "critic/values/min": 0.1, "critic/vf_explained_var": 0.6,
    "critic/vf_loss": 0.1, "critic/vf_clipfrac": 0.01, "critic/vpred_mean": 0.4, "critic/grad_norm": 0.8,
    "critic/lr": 1e-5, "response_length/mean": 820.0, "response_length/max": 2000.0, "response_length/min": 90.0,
    "response_length/clip_ratio": 0.03, "prompt_length/mean": 140.0, "prompt_length/max": 500.0,
    "prompt_length/min": 40.0, "prompt_length/clip_ratio": 0.001, "timing_s/gen": 31.0, "timing_s/reward": 2.0,
    "timing_s/old_log_prob": 5.0, "timing_s/ref": 5.0, "timing_s/values": 4.0, "timing_s/adv": 0.2,
    "timing_s/update_critic": 11.0, "timing_s/update_actor": 14.0, "timing_s/step": 73.0,
    "timing_per_token_ms/gen": 0.04, "timing_per_token_ms/update_actor": 0.02, "global_seqlen/mean": 9.6e5,
    "global_seqlen/max": 1.2e6, "global_seqlen/min": 8.1e5, "perf/total_num_tokens": 9.6e6, "perf/time_per_step": 73.0,
    "perf/throughput": 1700.0, "perf/mfu/actor": 0.31, "perf/max_memory_allocated_gb": 61.0,
    "perf/max_memory_reserved_gb": 68.0, "perf/cpu_memory_used_gb": 120.0, "training/epoch": 1.0,
}  # fmt: skip
"""Sixty metrics that verl logs, and a level of each in a run in good order."""


def row(rng: random.Random) -> dict[str, float]:
    """Metrics of a step, made as a trainer makes them: anew."""
    return {name: level * rng.gauss(1.0, 0.03) for name, level in LEVELS.items()}


def rlwatch(directory: str) -> tuple[Log, Callable[[], Any]]:
    import rlwatch as tool

    run = tool.init(project="bench", store=directory, source="verl")
    return run.log, run.finish


def wandb(directory: str) -> tuple[Log, Callable[[], Any]]:
    import wandb as tool

    run = tool.init(project="bench", dir=directory, mode="offline", settings=tool.Settings(console="off"))
    return lambda metrics, step: run.log(metrics, step=step), run.finish


def trackio(directory: str) -> tuple[Log, Callable[[], Any]]:
    os.environ["TRACKIO_DIR"] = directory
    import trackio as tool

    tool.init(project="bench")
    return lambda metrics, step: tool.log(metrics, step=step), tool.finish


def tensorboard(directory: str) -> tuple[Log, Callable[[], Any]]:
    """Its own event writer, one event a step."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(directory)

    def log(metrics: dict[str, float], step: int) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    return log, writer.close


def summarywriter(directory: str) -> tuple[Log, Callable[[], Any]]:
    """The way most trainers write TensorBoard's files: torch's, a call a scalar."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(directory)

    def log(metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


TOOLS = {tool.__name__: tool for tool in (rlwatch, wandb, trackio, tensorboard, summarywriter)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--pace-ms", type=float, default=10.0)
    args = parser.parse_args()
    rng = random.Random(0)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    calls = []
    with tempfile.TemporaryDirectory() as directory:
        started = time.perf_counter()
        log, finish = TOOLS[args.tool](directory)
        init_s = time.perf_counter() - started
        due = time.perf_counter()
        for step in range(args.steps):
            metrics = row(rng)
            begin = time.perf_counter()
            log(metrics, step)
            calls.append(time.perf_counter() - begin)
            due += args.pace_ms / 1e3
            time.sleep(max(0.0, due - time.perf_counter()))
        finishes, busy = time.perf_counter(), time.process_time()
        finish()
        finish_s, finish_cpu_s = time.perf_counter() - finishes, time.process_time() - busy
        size = sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())
    calls.sort()
    result = {
        "tool": args.tool,
        "p50_us": calls[len(calls) // 2] * 1e6,
        "p99_us": calls[int(len(calls) * 0.99)] * 1e6,
        "max_ms": calls[-1] * 1e3,
        "import_and_init_ms": init_s * 1e3,
        "finish_s": finish_s,
        "finish_cpu_s": finish_cpu_s,
        "rss_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1024,
        "cpu_s": time.process_time(),
        "bytes_a_point": size / (args.steps * len(LEVELS)),
    }
    sys.stderr.flush()
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
