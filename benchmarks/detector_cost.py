"""What judging costs: CPU of the detectors for each step of 300 metrics, and whether their memory stays bounded.

    python benchmarks/detector_cost.py --named --against ../before   # 60 metrics that verl logs, in good order
    python benchmarks/detector_cost.py                       # 5,000 steps
    python benchmarks/detector_cost.py --steps 1000000       # the long one: memory every tenth of the way
    python benchmarks/detector_cost.py --steps 1000000 --metrics 30 --without-forecast   # the same in a few minutes
    python benchmarks/detector_cost.py --metrics 30 --against ../before   # by turns with the rlwatch of another folder

A run with every metric that any detector reads, and others up to 300, all noisy; now and then a NaN, a gap and a spike.
In training this work is done on a thread of its own, not on that of the trainer. Detectors together and one by one,
the forecast (its features, its model), a log that is scanned, the health of 100 layers from their gradient norms, and
the whole Monitor (merging, detectors, forecast, alerts). Thread CPU time, best of three stretches. Where others use the
machine, too, only what two versions take on the same rows, turn by turn, can be compared: the median of the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles

import one_tool

from rlwatch.detectors.base import DetectorSet
from rlwatch.detectors.registry import default_detectors
from rlwatch.forecast import Forecaster
from rlwatch.forecast.features import FeatureStream
from rlwatch.importers.registry import read_log
from rlwatch.layers import LayerHealth
from rlwatch.metrics import BY_NAME
from rlwatch.monitor import Monitor
from rlwatch.monitor.forecasting import Forecasts, NoForecasts
from rlwatch.records import ClosedStep, StepRecord
from rlwatch.scanner import replay

METRICS, LAYERS, SCANNED, METRICS_OF_VERL = 300, 100, 30, 60
STRETCH = 1000


def names(count: int) -> list[str]:
    """Canonical names, evenly over the table, or all of them and then some of a run's own."""
    known = [name for name in BY_NAME if not name.endswith("/")]
    apart = max(len(known) // count, 1)
    return (known[::apart] + [f"own/metric_{i}" for i in range(count)])[:count]


def named_rows(steps: int, seed: int = 0) -> Iterator[dict[str, float]]:
    """Sixty metrics under verl's names, each within a few percent of its level: a run in good order."""
    rng = random.Random(seed)
    return (one_tool.row(rng) for _ in range(steps))


def rows(steps: int, seed: int = 0, metrics: int = METRICS) -> Iterator[dict[str, float]]:
    """Noisy metrics around 0.5; one in 2,000 values is NaN, 10 times as large or missing."""
    draw = random.Random(seed)
    every = names(metrics)
    for _ in range(steps):
        row = {name: 0.5 + 0.05 * draw.random() for name in every}
        if draw.random() < 0.1:
            row[draw.choice(every)] = draw.choice((float("nan"), 5.0))
            row.pop(draw.choice(every))
        yield row


def together(stretch: list[dict[str, float]]) -> float:
    """Microseconds a step of all detectors of a run, which share what several of them follow."""
    panel = DetectorSet(default_detectors())
    return min(_took(panel.update, stretch, part) for part in (0, 1, 2))


def one_by_one(stretch: list[dict[str, float]]) -> list[tuple[float, str]]:
    """Microseconds a step of each detector among the others, the dearest first: what is shared falls to one of them.

    A look at the clock, of half a microsecond, is in each.
    """
    detectors, best = default_detectors(), dict[str, float]()
    for part in (0, 1, 2):
        took = dict.fromkeys([detector.name for detector in detectors], 0.0)
        for step in _steps(stretch, part):
            for detector in detectors:
                begun = time.thread_time()
                detector.update(step)
                took[detector.name] += time.thread_time() - begun
        best = {name: min(cost, best.get(name, cost)) for name, cost in took.items()}
    return sorted(((cost / len(stretch) * 1e6, name) for name, cost in best.items()), reverse=True)


def scanned(stretch: Sequence[dict[str, float]]) -> tuple[float, float]:
    """Microseconds a row of a log of JSON lines: to read it, and to replay it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        steps, lines = len(stretch), (json.dumps({"step": i, **row}) for i, row in enumerate(stretch))
        path.write_text("\n".join(lines) + "\n")
        begun = time.thread_time()
        (run,) = read_log(path)
        read = time.thread_time()
        replay(run)
        return (read - begun) / steps * 1e6, (time.thread_time() - read) / steps * 1e6


def forecasting(stretch: list[dict[str, float]]) -> tuple[float, float]:
    """Microseconds a step of the forecast's features, and of the model that reads them."""
    stream, forecaster = FeatureStream(), Forecaster()
    features = min(_took(lambda step: stream.update(step.step, step.metrics), stretch, at) for at in (0, 1, 2))
    everything = min(_took(forecaster.update, stretch, at) for at in (0, 1, 2))
    return features, everything - features


def layers(count: int) -> float:
    """Microseconds a step of the health of so many layers."""
    draw, health = random.Random(0), LayerHealth()
    stretch = [{f"layers.{i}": draw.lognormvariate(0.0, 0.3) for i in range(count)} for _ in range(STRETCH)]
    return min(_took(lambda step: health.update(step.step, step.metrics), stretch, at) for at in (0, 1, 2))


def _took(call: Callable[[ClosedStep], object], stretch: list[dict[str, float]], part: int) -> float:
    """Thread CPU time of one stretch, microseconds a step."""
    steps = _steps(stretch, part)
    begun = time.thread_time()
    for step in steps:
        call(step)
    return (time.thread_time() - begun) / len(steps) * 1e6


def _steps(stretch: list[dict[str, float]], part: int) -> list[ClosedStep]:
    """The rows of one stretch."""
    return [ClosedStep(part * STRETCH + i, row) for i, row in enumerate(stretch)]


def whole(steps: int, metrics: int, forecaster: Callable[[], Forecasts] | None) -> None:
    """The Monitor over the whole run: cost and memory on the way."""
    monitor, parts = Monitor(run_id="bench", forecaster=forecaster), 10
    done = 0
    for part in range(parts):
        begun = time.thread_time()
        for row in rows(steps // parts, part, metrics):
            done += 1
            monitor.observe(StepRecord(done, row, seq=done))
        took = (time.thread_time() - begun) / (steps // parts) * 1e6
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{done:>10,} steps  {took:8.0f} us a step, rows made too  {held:8.1f} MB at most so far", flush=True)


TURN, TURNS = 1000, 7
"""Rows of a turn, and turns."""


def turns(metrics: int, *, named: bool) -> None:
    """Do what each line of the input names, and print its CPU time, microseconds a row."""
    stretch = list(named_rows(TURN) if named else rows(TURN, metrics=metrics))
    for line in sys.stdin:
        what, source = line.strip(), "verl" if named else ""
        print(sum(scanned(stretch)) if what == SCAN else lived(stretch, source, *LIVE[what]), flush=True)


SCAN = "scanned, reading included"
BLOCK = 8
"""Rows of a fast run that its judge takes together."""
LIVE = {
    "one by one, as live": (False, 1),
    "one by one, with a rescue, whose diagnosis follows the settings": (True, 1),
    f"in blocks of {BLOCK}, as a fast run": (False, BLOCK),
}
"""Ways to judge a run while it goes on: whether settings are followed, and the rows that are judged together."""


def lived(stretch: list[dict[str, float]], source: str, explains: bool, block: int) -> float:
    """Microseconds a step of a whole Monitor that is given ``block`` records after the other."""
    monitor = Monitor(run_id="bench", source=source, explains=explains)
    records = [StepRecord(step, row, seq=step + 1) for step, row in enumerate(stretch)]
    begun = time.thread_time()
    if block == 1:
        for record in records:
            monitor.observe(record)
    else:
        for at in range(0, len(records), block):
            for _ in monitor.observing_all(records[at : at + block]):
                pass
    return (time.thread_time() - begun) / len(stretch) * 1e6


def against(other: Path, metrics: int, *, named: bool) -> None:
    """Print what this version takes of the CPU time of ``other``, a folder that holds rlwatch."""
    own, command = Path(__file__).parents[1], [sys.executable, __file__, "--turns", "--metrics", str(metrics)]
    command += ["--named"] if named else []
    of = [
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(folder.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for folder in (own, other)
    ]
    for what in (*LIVE, SCAN):
        took = [_turn(of, what, i % 2) for i in range(1 + TURNS)][1:]
        low, middle, high = quantiles([own / before for own, before in took], n=4)
        own_us, before_us = (median(each) for each in zip(*took, strict=True))
        print(
            f"a row of {METRICS_OF_VERL if named else metrics} metrics, {what}: {own_us:.0f} us, "
            f"{before_us:.0f} before: {middle:.2f} of the CPU ({low:.2f} to {high:.2f})",
            flush=True,
        )
    for process in of:
        process.communicate()


def _turn(of: list[subprocess.Popen[str]], what: str, first: int) -> tuple[float, float]:
    """CPU time of both, of which the second begins where ``first`` is 1."""
    took = [0.0, 0.0]
    for i in (first, 1 - first):
        to, back = of[i].stdin, of[i].stdout
        assert to is not None
        assert back is not None
        print(what, file=to, flush=True)
        took[i] = float(back.readline())
    return took[0], took[1]


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--metrics", type=int, default=METRICS, help="in each row")
    parser.add_argument("--without-forecast", action="store_true", help="the Monitor's detectors alone")
    parser.add_argument("--against", type=Path, help="folder that holds another rlwatch: compare with it by turns")
    parser.add_argument(
        "--named", action="store_true", help="with --against: 60 metrics that verl logs, under its names"
    )
    parser.add_argument("--turns", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turns:
        turns(args.metrics, named=args.named)
        return
    if args.against:
        against(args.against, args.metrics, named=args.named)
        return
    stretch = list(rows(STRETCH, metrics=args.metrics))
    each = one_by_one(stretch)
    print(f"{len(each)} detectors, {args.metrics} metrics a step: {together(stretch):.0f} us a step")
    for cost, name in each:
        print(f"  {cost:8.1f} us  {name}")
    features, model = forecasting(stretch)
    print(f"forecast: {features:.0f} us a step for its features, {model:.0f} us for its model")
    read, replayed = scanned(list(rows(args.steps, metrics=SCANNED)))
    print(
        f"scan of a log of {args.steps:,} rows of {SCANNED} metrics: {read:.0f} us a row to read, {replayed:.0f} us to "
        f"replay: {1e6 / (read + replayed):.0f} rows a CPU second"
    )
    print(f"layer health: {layers(LAYERS):.0f} us a step of {LAYERS} layers")
    whole(args.steps, args.metrics, (lambda: NoForecasts("not asked for")) if args.without_forecast else None)


if __name__ == "__main__":
    main()
