"""What rlwatch costs, keeps and survives beside other tools: 60 scalars a row, one call a row, all in one run.

    python benchmarks/peers --peers build/peers                        # all of it: an hour and 3 GB
    python benchmarks/peers --peers build/peers --only wandb,aim --parts calls,kill

Each tool has an environment of its own below ``--peers``, made with pip where it is missing. Every measurement is a new
process; tools are shuffled within each repetition, so that a busy machine hits all alike. A cell is the median, and in
brackets how often it has rlwatch's (``x``): compare ratios, within one table. What is measured is kept in
``--peers/measured.json``, part by part, and a part that is asked for again replaces what was.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from tools import TOOLS, as_process

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OURS = "rlwatch"
RUNS, STEPS, PACE_MS = 1000, 20_000, 5.0
MOST_S = 20.0
"""Seconds a tool may take over the 20,000 rows; what it has by then is what is read."""
Found = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """Where the tools are, and where they write."""

    peers: Path
    scratch: Path

    def python(self, name: str) -> Path:
        """The Python that has the tool; its environment is made if need be."""
        package = TOOLS[name].package
        if not package:
            return Path(sys.executable)
        place = self.peers / package.replace("==", "-")
        if not (place / "bin" / "pip").exists():
            subprocess.run([sys.executable, "-m", "venv", place], check=True)
        if not (place / "made").exists():
            subprocess.run([place / "bin" / "pip", "install", "--quiet", package], check=True)
            (place / "made").touch()
        return place / "bin" / "python"

    def place(self, name: str, part: str) -> Path:
        """An empty directory of this tool."""
        found = self.scratch / part / name.replace(" ", "-").replace(",", "")
        shutil.rmtree(found, ignore_errors=True)
        found.mkdir(parents=True)
        return found

    def started(self, name: str, task: str, place: Path, out: Path, **options: object) -> subprocess.Popen[bytes]:
        command = [str(self.python(name)), str(HERE / "task.py"), name, task, str(place), str(out)]
        command += [f"{key}={value}" for key, value in options.items()]
        environment = as_process(TOOLS[name](), str(place))
        if not TOOLS[name].package:
            environment["PYTHONPATH"] = str(ROOT)
        with (self.scratch / "words").open("ab") as words:
            return subprocess.Popen(
                command, env=environment, cwd=self.scratch, stdout=words, stderr=words, start_new_session=True
            )

    def done(self, name: str, task: str, place: Path, *, patience_s: float = 600.0, **options: object) -> Found:
        """What the task found; ``{"failed": why}`` where it did not end well."""
        out = self.scratch / "found.json"
        out.unlink(missing_ok=True)
        process = self.started(name, task, place, out, **options)
        try:
            code = process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return {"failed": f"hung for {patience_s:.0f} s"}
        finally:
            _kill(process)
        if not out.exists():
            said = (self.scratch / "words").read_text(errors="replace").strip().splitlines()
            return {"failed": f"exit {code}: {said[-1][:160] if said else ''}"}
        found: Found = json.loads(out.read_text())
        return found


def _kill(process: subprocess.Popen[bytes]) -> None:
    """It and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# Parts


def calls(bench: Bench, names: list[str], reps: int) -> dict[str, list[Found]]:
    def one(name: str, _rep: int) -> Found:
        return bench.done(name, "calls", bench.place(name, "calls"), steps=1000, pace_ms=PACE_MS)

    return shuffled(names, reps, one)


def ingest(bench: Bench, names: list[str], reps: int) -> dict[str, list[Found]]:
    def one(name: str, _rep: int) -> Found:
        return bench.done(name, "ingest", bench.place(name, "ingest"), steps=STEPS, most_s=MOST_S)

    return shuffled(names, reps, one)


def reading(bench: Bench, names: list[str], reps: int) -> dict[str, list[Found]]:
    for name in names:
        place = bench.place(name, "reading")
        bench.done(name, "ingest", place, steps=STEPS, most_s=4 * MOST_S)
        settle(bench, name, place)

    def one(name: str, _rep: int) -> Found:
        place = bench.scratch / "reading" / name.replace(" ", "-").replace(",", "")
        single, every = (bench.done(name, "read", place, names=which) for which in ("one", "all"))
        if "failed" in single or "failed" in every:
            return {"failed": single.get("failed") or every["failed"]}
        return {"one_ms": single["ms"], "all_ms": every["ms"], "points": every["points"]}

    return shuffled(names, reps, one)


def listing(bench: Bench, names: list[str], reps: int) -> dict[str, list[Found]]:
    places = {name: bench.place(name, "listing") for name in names}
    for name, place in places.items():
        pattern = TOOLS[name].copies
        made = bench.done(name, "many", place, patience_s=1800.0, first=0, last=1 if pattern else RUNS)
        if "failed" in made:
            print(f"  {name}: {made['failed']}", flush=True)
        for run in list(place.glob(pattern)) if pattern else []:
            for number in range(1, RUNS):
                shutil.copytree(run, run.with_name(f"{run.name}-{number}"))
        settle(bench, name, place)
        time.sleep(3.0)
        if name.startswith(OURS):
            bench.done(name, "listing", place)  # the very first, which `series_cost.py` has apart

    return shuffled(names, reps, lambda name, _rep: bench.done(name, "listing", places[name]))


def kill(bench: Bench, names: list[str], reps: int) -> dict[str, list[Found]]:
    def one(name: str, rep: int) -> Found:
        place = bench.place(name, "kill")
        acks = bench.scratch / "acks"
        acks.write_bytes(bytes(8))
        process = bench.started(name, "endless", place, bench.scratch / "none", acks=acks, pace_ms=PACE_MS)
        until = time.monotonic() + 120.0
        while not _counted(acks) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(random.Random(f"{name}{rep}").uniform(2.0, 4.0))
        os.kill(process.pid, signal.SIGKILL)  # the trainer; what it has started may go on for a while
        process.wait()
        time.sleep(3.0)
        _kill(process)
        logged = _counted(acks)
        settle(bench, name, place)
        found = bench.done(name, "whole", place)
        if "failed" in found:
            return {"logged": logged, "lost": logged, "unreadable": 1}
        return {"logged": logged, "lost": len(set(range(logged)) - set(found["steps"])), "unreadable": 0}

    return shuffled(names, reps, one)


def odd(bench: Bench, names: list[str], reps: int) -> dict[str, list[Found]]:  # noqa: ARG001
    def one(name: str, _rep: int) -> Found:
        place = bench.place(name, "odd")
        told = bench.done(name, "odd", place)
        settle(bench, name, place)
        return {**told, **bench.done(name, "odd_kept", place)}

    return shuffled(names, 1, one)


def full(bench: Bench, names: list[str], reps: int) -> dict[str, list[Found]]:  # noqa: ARG001
    def one(name: str, _rep: int) -> Found:
        place = bench.place(name, "full")
        with small_disk(place):
            told = bench.done(name, "full", place, patience_s=120.0, steps=900, left=100_000)
            time.sleep(1.0)
            settle(bench, name, place)
            found = bench.done(name, "whole", place, patience_s=120.0)
        return {**told, "kept": len(found.get("steps", ())), "of": 900}

    return shuffled(names, 1, one)


@contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """A file system of 24 MB; it takes root."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def settle(bench: Bench, name: str, place: Path) -> None:
    """What a tool's user has to do before runs can be read."""
    bench.done(name, "settled", place, patience_s=180.0)


def _counted(acks: Path) -> int:
    return int(struct.unpack("<q", acks.read_bytes())[0])


def shuffled(names: list[str], reps: int, one: Callable[[str, int], Found]) -> dict[str, list[Found]]:
    """``reps`` of each tool, in turn."""
    found: dict[str, list[Found]] = {name: [] for name in names}
    for rep in range(reps):
        for name in random.Random(rep).sample(names, len(names)):
            found[name].append(one(name, rep))
            print(f"  {name}: {json.dumps(found[name][-1])[:200]}", flush=True)
    return found


PARTS = {part.__name__: part for part in (calls, ingest, reading, listing, kill, odd, full)}


# Tables

COSTS = {
    "call, p50, us": ("calls", "p50_us"),
    "p99, us": ("calls", "p99_us"),
    "max, ms": ("calls", "max_ms"),
    "CPU s a 1,000 rows": ("calls", "cpu_s"),
    "memory, MB": ("calls", "memory_mb"),
    "import and begin, ms": ("calls", "start_ms"),
    "points/s stored": ("ingest", "points_a_s"),
    "bytes a point": ("ingest", "bytes_a_point"),
    "one series of 20k, ms": ("reading", "one_ms"),
    "60 series, ms": ("reading", "all_ms"),
    "list 1,000 runs, ms": ("listing", "ms"),
}
Measured = Mapping[str, Mapping[str, list[Found]]]


def costs(measured: Measured) -> str:
    """The table of what is a number."""
    lines = ["| tool | " + " | ".join(COSTS) + " |", "|---" * (len(COSTS) + 1) + "|"]
    for name in TOOLS:
        cells = []
        for part, key in COSTS.values():
            own, its = (median(measured.get(part, {}).get(who, []), key) for who in (OURS, name))
            cells.append(cell(its, own) if name != OURS else cell(its, None))
            cells[-1] += fewer(part, measured.get(part, {}).get(name, []))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def median(found: Iterable[Found], key: str) -> float | None:
    values = [one[key] for one in found if key in one]
    return statistics.median(values) if values else None


def cell(value: float | None, own: float | None) -> str:
    """The number, and how often it has ours."""
    if value is None:
        return "-"
    shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    ratio = value / own if own else 0.0
    return f"{shown} ({f'{ratio:,.0f}' if ratio >= 10 else f'{ratio:.2g}'}x)" if own else shown


def fewer(part: str, found: Iterable[Found]) -> str:
    """How much there was to read, where a tool did not get through all of it in the time it had."""
    if part == "reading":
        rows = max((one.get("points", 0) // 60 for one in found), default=STEPS)
        return f" of {rows:,} rows" if rows < STEPS else ""
    runs = max((one.get("runs", 0) for one in found), default=RUNS) if part == "listing" else RUNS
    return f" of {runs:,}" if runs < RUNS else ""


def survival(measured: Measured) -> str:
    """The table of what is lost."""
    head = (
        "killed: rows lost",
        "NaN, Inf, -Inf read back as",
        "disk full for a third of 900 rows: kept",
        "raised into training",
    )
    lines = ["| tool | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    for name in TOOLS:
        kills = measured.get("kill", {}).get(name, [])
        lost = sorted(one["lost"] for one in kills)
        unread = sum(one["unreadable"] for one in kills)
        killed = f"{statistics.median(lost):.0f} [{lost[0]}-{lost[-1]}]" if lost else "-"
        killed += f", {unread} of {len(kills)} unreadable" if unread else ""
        (strange,) = measured.get("odd", {}).get(name, [{}]) or [{}]
        kept = strange.get("kept", {})
        words = ", ".join(kept.get(which, "nothing") for which in ("nan", "inf", "ninf")) if kept else "-"
        (filled,) = measured.get("full", {}).get(name, [{}]) or [{}]
        raised = filled.get("failed") or (f"{filled['raised']} times" if filled.get("raised") else "nothing")
        lines.append(f"| {name} | {killed} | {words} | {filled.get('kept', '-')} | {raised if filled else '-'} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers", type=Path, default=Path("build/peers"), help="environments of the tools; made if missing"
    )
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--only", help="tools whose names begin so, with commas between them")
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas between them")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else [""]
    names = [name for name in TOOLS if any(name.startswith(start) for start in wanted)]
    args.peers.mkdir(parents=True, exist_ok=True)
    kept = args.peers / "measured.json"
    measured: dict[str, dict[str, list[Found]]] = json.loads(kept.read_text()) if kept.exists() else {}
    with tempfile.TemporaryDirectory(prefix="rlwatch-peers-") as scratch:
        bench = Bench(args.peers.absolute(), Path(scratch))
        for name in names:
            bench.python(name)
        for part in args.parts.split(",") if args.parts else []:
            print(part, flush=True)
            measured.setdefault(part, {}).update(PARTS[part](bench, names, args.reps))
            kept.write_text(json.dumps(measured))
    print(f"\n{costs(measured)}\n\n{survival(measured)}")


if __name__ == "__main__":
    main()
