"""One task of one tool in a process: ``task.py TOOL TASK PLACE OUT [name=value ...]``; ``__main__.py`` runs it."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import random
import resource
import struct
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from tools import TOOLS, Row, Tool

FAMILIES = {
    "actor": "entropy pg_loss kl_loss ppo_kl pg_clipfrac pg_clipfrac_lower grad_norm lr",
    "critic": "score/mean score/max score/min rewards/mean rewards/max rewards/min advantages/mean advantages/max",
    "response_length": "mean max min clip_ratio",
    "prompt_length": "mean max min clip_ratio",
    "timing_s": "gen reward old_log_prob ref adv update_actor update_weights step",
    "perf": "throughput total_num_tokens time_per_step max_memory_allocated_gb mfu/actor",
    "training": "global_step epoch",
    "custom": " ".join(f"metric_{number}" for number in range(21)),
}
NAMES = tuple(f"{family}/{name}" for family, names in FAMILIES.items() for name in names.split())
"""60 names, 39 of which verl uses."""
Found = dict[str, Any]


def rows(steps: int) -> Iterator[Row]:
    """Rows of a sound run: made, then logged, as a trainer does."""
    noise = random.Random(0)
    for step in range(steps):
        row = {name: 1.0 + noise.gauss(0.0, 0.05) for name in NAMES}
        row["actor/lr"], row["actor/entropy"] = 1e-6, 0.6 - 0.1 * step / max(1, steps) + noise.gauss(0.0, 0.01)
        yield row


def calls(tool: Tool, place: str, steps: int, pace_ms: float) -> Found:
    """What a call costs, with everything the process and its children do beside it."""
    before_mb, begin = peak_mb(), time.perf_counter()
    tool.load()
    tool.begin(place, "run")
    start_ms = 1e3 * (time.perf_counter() - begin)
    cpu, taken, due = time.process_time(), [], time.perf_counter()
    children = cpu_of_children()
    for step, row in enumerate(rows(steps)):
        begin = time.perf_counter()
        tool.log(row, step)
        taken.append(time.perf_counter() - begin)
        due += pace_ms / 1e3
        time.sleep(max(0.0, due - time.perf_counter()))
    children = cpu_of_children() - children
    memory = peak_mb() - before_mb + memory_of_children()
    tool.end()
    cpu = time.process_time() - cpu + max(children, 0.0)
    taken.sort()
    return {
        "p50_us": 1e6 * taken[len(taken) // 2],
        "p99_us": 1e6 * taken[int(0.99 * len(taken))],
        "max_ms": 1e3 * taken[-1],
        "cpu_s": 1e3 * cpu / steps,
        "memory_mb": memory,
        "start_ms": start_ms,
    }


def ingest(tool: Tool, place: str, steps: int, most_s: float) -> Found:
    """How fast points are taken when there is no pause, and stored; and what they take on the disk."""
    tool.load()
    tool.begin(place, "run")
    begin, step = time.perf_counter(), 0
    for step, row in enumerate(rows(steps), start=1):
        tool.log(row, step - 1)
        if step % 50 == 0 and time.perf_counter() - begin > most_s:
            break
    tool.end()
    took = time.perf_counter() - begin
    return {
        "steps": step,
        "points_a_s": step * len(NAMES) / took,
        "bytes_a_point": size_of(place) / (step * len(NAMES)),
    }


def read(tool: Tool, place: str, names: str) -> Found:
    """One series, or all, in a process that has just begun; its imports are not counted."""
    ready(tool)
    begin = time.perf_counter()
    found = tool.read(place, [NAMES[0]] if names == "one" else None)
    took = time.perf_counter() - begin
    return {"ms": 1e3 * took, "points": sum(len(found.get(name, ())) for name in NAMES)}


def ready(tool: Tool) -> None:
    """Import all that it takes to read."""
    tool.load()
    for module in tool.readers:
        import_module(module)


def listing(tool: Tool, place: str) -> Found:
    """All runs that there are."""
    ready(tool)
    begin = time.perf_counter()
    found = tool.runs(place)
    return {"ms": 1e3 * (time.perf_counter() - begin), "runs": len(found)}


def many(tool: Tool, place: str, first: int, last: int) -> Found:
    """Runs of three rows each."""
    tool.load()
    for number in range(first, last):
        tool.begin(place, f"run-{number:04d}")
        for step, row in enumerate(rows(3)):
            tool.log(row, step)
        tool.end()
    return {}


def endless(tool: Tool, place: str, acks: str, pace_ms: float) -> Found:
    """Log until killed; each call that returned is counted where a killed process cannot take it along."""
    tool.load()
    tool.begin(place, "run")
    with open(acks, "r+b") as file, mmap.mmap(file.fileno(), 8) as counted:  # noqa: PTH123
        due = time.perf_counter()
        for step, row in enumerate(rows(100_000)):
            tool.log(row, step)
            counted[:] = struct.pack("<q", step + 1)
            due += pace_ms / 1e3
            time.sleep(max(0.0, due - time.perf_counter()))
    return {}


def whole(tool: Tool, place: str) -> Found:
    """Steps of which every number can be read."""
    tool.load()
    found = tool.read(place, None)
    steps = [{int(step) for step, _ in found.get(name, ())} for name in NAMES]
    return {"steps": sorted(set.intersection(*steps))}


def settled(tool: Tool, place: str) -> Found:
    """What its user has to do before runs can be read."""
    tool.settle(place)
    return {}


def odd(tool: Tool, place: str) -> Found:
    """Numbers that are none."""
    tool.load()
    tool.begin(place, "run")
    errors = []
    for step in range(5):
        try:
            tool.log({"fine": 1.0, "nan": math.nan, "inf": math.inf, "ninf": -math.inf}, step)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}"[:200])
    tool.end()
    return {"errors": errors[:1]}


def odd_kept(tool: Tool, place: str) -> Found:
    """What came of them."""
    tool.load()
    found = tool.read(place, None)
    last = {
        name: found[name][len(found[name]) - 1][1]
        for name in ("fine", "nan", "inf", "ninf")
        if len(found.get(name, ()))
    }
    return {"kept": {name: repr(float(value)) if value is not None else "None" for name, value in last.items()}}


def full(tool: Tool, place: str, steps: int, left: int) -> Found:
    """The disk fills after a while and has room again after another: a third of the rows each."""
    tool.load()
    tool.begin(place, "run")
    time.sleep(1.0)
    errors, slowest = [], 0.0
    filler = Path(place, "filler")
    for step, row in enumerate(rows(steps)):
        if step == steps // 3:
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                room = os.statvfs(place)
                file.write(b"\0" * max(0, room.f_bavail * room.f_frsize - left))
        if step == 2 * steps // 3:
            filler.unlink()
        begin = time.perf_counter()
        try:
            tool.log(row, step)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}"[:200])
        slowest = max(slowest, time.perf_counter() - begin)
        time.sleep(0.005)
    try:
        tool.end()
    except Exception as error:
        errors.append(f"at the end: {type(error).__name__}: {error}"[:200])
    return {"raised": len(errors), "errors": errors[:1], "max_ms": 1e3 * slowest}


# What the process and its children take.


def peak_mb() -> float:
    """Of this program: what getrusage says is that of its parent, too."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return float(status["VmHWM"].split()[0]) / 1024


def _children() -> list[Path]:
    """Processes below this one that are still there."""
    parents: dict[str, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parents[entry.name] = (entry / "stat").read_text().rpartition(")")[2].split()[1]
    mine, found = {str(os.getpid())}, []
    for _ in range(4):
        below = [name for name, parent in parents.items() if parent in mine and name not in mine]
        found += below
        mine |= set(below)
    return [Path("/proc", name) for name in found]


def cpu_of_children() -> float:
    """CPU seconds of those that are there and of those that ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = 0
    for place in _children():
        with contextlib.suppress(OSError):
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ended.ru_utime + ended.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def memory_of_children() -> float:
    """Resident MB of those that are there."""
    total = 0
    for place in _children():
        with contextlib.suppress(OSError):
            total += int((place / "statm").read_text().split()[1])
    return total * resource.getpagesize() / 2**20


def size_of(place: str) -> int:
    """Bytes on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in Path(place).rglob("*") if path.is_file())


TASKS = {
    task.__name__: task for task in (calls, ingest, read, listing, many, endless, whole, settled, odd, odd_kept, full)
}


def main() -> None:
    name, task, place, out, *given = sys.argv[1:]
    options: dict[str, Any] = {}
    for text in given:
        key, _, value = text.partition("=")
        options[key] = value if key in {"names", "acks"} else json.loads(value)
    found = TASKS[task](TOOLS[name](), place, **options)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
