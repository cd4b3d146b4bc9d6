"""What a killed trainer leaves behind: rows whose ``log`` call returned, and rows that can be read after SIGKILL.

    python benchmarks/durability.py                       # with the peers that are installed
    python benchmarks/durability.py --peers build/peers   # with trackio, installed there

A process logs 10 scalars a step at a pace, notes in shared memory each call that returned, and is killed at a random
moment; another process then reads what the tool kept, a few seconds later (a tool may have a process of its own that
goes on). ``oldest``: how old the oldest row lost was when the process died; rows that came before it are safe.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "faults"))
from faultchild import Acks

TOOLS = ("rlwatch", "wandb", "trackio", "tensorboard")
PEER = "trackio==0.43.0"
RATES = (2, 10, 100, 1000, 0)
ROWS = 20_000
GRACE_S = 3.0
NAMES = [f"group/{i}" for i in range(9)] + ["policy/entropy"]
"""The last is one that rlwatch's reader of the peers' files knows: it refuses logs of which it knows nothing."""
RESULTS = Path("build/faults/durability.json")


def begun(tool: str, place: str) -> Callable[[dict[str, float], int], Any]:
    """Begin a run of the tool in the directory; how to log a row."""
    if tool == "rlwatch":
        import rlwatch

        run = rlwatch.init(store=place, run_id="run")
        return lambda row, step: run.log(row, step=step)
    if tool == "wandb":
        import wandb

        # offline: the run's own file, as a trainer without network has it
        logged = wandb.init(project="kept", dir=place, mode="offline", settings=wandb.Settings(console="off"))
        return lambda row, step: logged.log(row, step=step)
    if tool == "trackio":
        os.environ["TRACKIO_DIR"] = place
        import trackio

        trackio.init(project="kept")
        return lambda row, step: trackio.log(row, step=step)
    from tensorboard.summary import Writer

    writer = Writer(place)

    def log(row: dict[str, float], step: int) -> None:
        for name, value in row.items():
            writer.add_scalar(name, value, step)

    return log


def steps_kept(tool: str, place: Path) -> set[int]:
    """Steps of which every number can be read."""
    if tool == "rlwatch":
        from rlwatch.store.url import open_store

        return {record.step for record in open_store(place).records("run")}
    if tool == "trackio":
        found = set()
        for file in place.rglob("kept.db"):
            with contextlib.closing(sqlite3.connect(file)) as db:
                found |= {int(step) for (step,) in db.execute("SELECT step FROM metrics")}
        return found
    from rlwatch.errors import ImportFormatError
    from rlwatch.importers import read_log

    logs = [*place.rglob("*.wandb"), *place.rglob("events.out.tfevents.*")]
    runs = []
    for log in logs:
        with contextlib.suppress(ImportFormatError):  # nothing in it yet
            runs += read_log(log)
    return {record.step for run in runs for record in run.records if set(NAMES) <= set(record.metrics)}


def train(tool: str, place: str, acks: str, rate: int) -> None:
    """The process that is killed."""
    noted, noise = Acks(acks), random.Random(0)
    log = begun(tool, place)
    rows = [{name: noise.gauss(1.0, 0.1) for name in NAMES} for _ in range(100)]
    due = time.monotonic()
    for step in range(ROWS):
        log(rows[step % 100], step)
        noted.returned(0.0)
        if rate:
            due += 1.0 / rate
            time.sleep(max(0.0, due - time.monotonic()))
    time.sleep(60.0)


@dataclass
class Kept:
    """All trials of one tool at one rate."""

    tool: str
    rate: int
    trials: int = 0
    logged: int = 0
    lost: int = 0
    oldest_s: list[float] = field(default_factory=list)

    @property
    def line(self) -> str:
        pace = f"{self.rate:,}" if self.rate else "tight loop"
        ages = [age for age in self.oldest_s if age]
        age = f"{statistics.median(ages):.2f} s, at most {max(ages):.2f} s" if ages else "-"
        return f"| {self.tool} | {pace} | {self.trials} | {self.logged:,} | {self.lost:,} | {age} |"


HEAD = "| tool | rows/s | kills | rows logged | lost | oldest lost, median |\n|---|---:|---:|---:|---:|---|"


def killed(tool: str, python: Path, rate: int, seed: int) -> tuple[int, int, float]:
    """One kill: rows logged, rows lost, age of the oldest."""
    chance = random.Random(f"{tool}/{rate}/{seed}")
    with tempfile.TemporaryDirectory(prefix="rlwatch-kept-") as scratch, Acks(f"{scratch}/acks", room=ROWS + 1) as acks:
        place = Path(scratch, "runs")
        place.mkdir()
        command = [str(python), __file__, "--train", tool, str(place), str(acks.path), str(rate)]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, env=os.environ | {"WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"}, **silent)
        try:
            until = time.monotonic() + 60.0
            while not acks.count:
                if time.monotonic() > until or process.poll() is not None:
                    raise RuntimeError(f"{tool} did not begin within 60 s, or ended: {process.returncode}")
                time.sleep(0.01)
            time.sleep(chance.uniform(0.5, 4.0))
            died = time.monotonic()
            process.kill()
        finally:
            process.kill()
            process.wait()
        if tool != "rlwatch":
            time.sleep(GRACE_S)
        kept = steps_kept(tool, place)
        lost = [step for step in range(acks.count) if step not in kept]
        return acks.count, len(lost), died - acks.when(lost[0]) if lost else 0.0


def pythons(peers: Path | None) -> dict[str, Path]:
    """Tool -> the Python that has it."""
    found = {tool: Path(sys.executable) for tool in TOOLS if importlib.util.find_spec(tool)}
    if peers is not None:
        place = peers / PEER.replace("==", "-")
        if not (place / "bin" / "python").exists():
            subprocess.run([sys.executable, "-m", "venv", place], check=True)
            subprocess.run([place / "bin" / "pip", "install", "--quiet", PEER], check=True)
        found["trackio"] = place / "bin" / "python"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6, help="for each tool at each rate")
    parser.add_argument("--peers", type=Path, help="folder for the environment of trackio; made if it is not there")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--train", nargs=4, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.train:
        tool, place, acks, rate = asked.train
        return train(tool, place, acks, int(rate))
    have = pythons(asked.peers)
    kept = [Kept(tool, rate) for tool in TOOLS if tool in have for rate in RATES]
    print(HEAD)
    with ThreadPoolExecutor(asked.jobs) as pool:
        trials = [
            (each, [pool.submit(killed, each.tool, have[each.tool], each.rate, n) for n in range(asked.kills)])
            for each in kept
        ]
        for each, futures in trials:
            for logged, lost, oldest in (future.result() for future in futures):
                each.trials += 1
                each.logged += logged
                each.lost += lost
                each.oldest_s.append(oldest)
            print(each.line, flush=True)
    missing = sorted(set(TOOLS) - set(have))
    if missing:
        print(f"not installed, left out: {', '.join(missing)}")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"head": HEAD, "lines": [e.line for e in kept], "kept": [asdict(e) for e in kept]}))
    return None


if __name__ == "__main__":
    main()
