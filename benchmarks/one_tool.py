"""One tool in one fresh process: log 60 scalars a step, paced, and print what it cost as JSON.

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
from typing import Any

Log = Callable[[dict[str, float], int], Any]
NAMES = [f"group{i % 6}/metric_{i}" for i in range(57)] + ["actor/entropy", "actor/grad_norm", "critic/score/mean"]


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
            row = {name: rng.gauss(1.0, 0.1) for name in NAMES}  # as a trainer does: made, then logged
            begin = time.perf_counter()
            log(row, step)
            calls.append(time.perf_counter() - begin)
            due += args.pace_ms / 1e3
            time.sleep(max(0.0, due - time.perf_counter()))
        finish()
    calls.sort()
    result = {
        "tool": args.tool,
        "p50_us": calls[len(calls) // 2] * 1e6,
        "p99_us": calls[int(len(calls) * 0.99)] * 1e6,
        "max_ms": calls[-1] * 1e3,
        "import_and_init_ms": init_s * 1e3,
        "rss_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1024,
        "cpu_s": time.process_time(),
    }
    sys.stderr.flush()
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
