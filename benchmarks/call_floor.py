"""What the least of a durable call costs, and ``run.log`` beside it; and why the journal is no memory map.

    python benchmarks/call_floor.py            # calls in turn, every 10 ms, beside a live writer and judge
    python benchmarks/call_floor.py --mapped   # a mapped file that is truncated, and one whose disk dies (needs root)

One process, so that all share caches and load: each tick is the next of the calls. ``write`` packs 60 numbers and
appends them with the C library's ``write``; ``map`` packs them into a mapped, touched file; ``os.write`` gives up the
interpreter lock meanwhile. Compare ratios inside one run.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from one_tool import row

ROW = struct.Struct("<4sIBQqdI60d4s")
ROOM = 4 << 20
Call = Callable[[dict[str, float], int], object]


def packed(values: dict[str, float], step: int) -> bytes:
    return ROW.pack(b"mark", 0, 1, step, step, 1.0, 0, *values.values(), b"end!")


def calls_in(directory: str, log: Call) -> dict[str, Call]:
    """Call by name."""
    write = ctypes.PyDLL(None).write
    flags = os.O_CREAT | os.O_RDWR | os.O_APPEND
    one, two = (os.open(f"{directory}/{name}", flags, 0o600) for name in ("one", "two"))
    three = os.open(f"{directory}/three", os.O_CREAT | os.O_RDWR, 0o600)
    os.posix_fallocate(three, 0, ROOM)
    touched, at = mmap.mmap(three, ROOM), 0
    touched[:] = bytes(ROOM)

    def mapped(values: dict[str, float], step: int) -> None:
        nonlocal at
        ROW.pack_into(touched, at, b"mark", 0, 1, step, step, 1.0, 0, *values.values(), b"end!")
        at = (at + ROW.size) % (ROOM - ROW.size)

    return {
        "run.log": log,
        "write": lambda values, step: write(one, packed(values, step), ROW.size),
        "os.write": lambda values, step: os.write(two, packed(values, step)),
        "map": mapped,
        "nothing": lambda *_: None,
    }


def in_turn(ticks: int, pace_s: float) -> None:
    """Print the table."""
    import rlwatch

    rng, over = random.Random(0), threading.Event()
    with tempfile.TemporaryDirectory() as directory:
        run = rlwatch.init(project="bench", store=directory, source="verl")

        def feed() -> None:
            step = 1 << 40
            while not over.wait(pace_s):
                run.log(row(rng), step := step + 1)

        feeding = threading.Thread(target=feed)
        feeding.start()
        calls = calls_in(directory, run.log)
        took: dict[str, list[float]] = {name: [] for name in calls}
        due = time.perf_counter()
        for tick in range(ticks):
            name, values = list(calls)[tick % len(calls)], row(rng)
            call, begin = calls[name], time.perf_counter()
            call(values, tick)
            took[name].append((time.perf_counter() - begin) * 1e6)
            due += pace_s
            time.sleep(max(0.0, due - time.perf_counter()))
        over.set()
        feeding.join()
        run.finish()
    floor = statistics.median(took["write"])
    print("| call | p50 us | p99 us | max us | p50 / write |\n|---|---|---|---|---|")
    for name, times in took.items():
        times.sort()
        half, most = statistics.median(times), times[int(0.99 * len(times))]
        print(f"| {name} | {half:.1f} | {most:.0f} | {times[-1]:.0f} | {half / floor:.2f} |")


TRUNCATED = """
import mmap, os, sys, time
file = os.open(sys.argv[1], os.O_RDWR)
size, end = os.fstat(file).st_size, time.monotonic() + 5.0
mapped, at = mmap.mmap(file, size), 0
while time.monotonic() < end:
    if os.fstat(file).st_size >= size:
        mapped[at : at + 480] = bytes(480)
        at = (at + 480) % (size - 480)
"""
DEAD = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
mapped = mmap.mmap(file, 1 << 20)
mapped[:] = bytes(1 << 20)
print(flush=True)
sys.stdin.readline()
try:
    for at in range(0, 1 << 20, 512):
        if sys.argv[2] == "map":
            mapped[at : at + 3] = b"row"
        else:
            os.pwrite(file, b"row", at)
except OSError as error:
    print(error.strerror)
else:
    print("took every row")
"""


def truncated(trials: int) -> None:
    """A mapped file whose size is looked at before every store, truncated once by somebody else."""
    died = 0
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "file")
        for _ in range(trials):
            path.write_bytes(bytes(1 << 20))
            with subprocess.Popen([sys.executable, "-c", TRUNCATED, str(path)]) as child:
                time.sleep(0.2)
                os.truncate(path, 0)
                time.sleep(0.1)
                child.kill()
            died += child.returncode == -signal.SIGBUS
    print(f"truncated once, its size looked at before every store: SIGBUS in {died} of {trials}")


def dead_disk() -> None:
    """A disk (ext4) that stops taking writes under a mapped file, and under one that is written."""
    for how in ("map", "write"):
        with tempfile.TemporaryDirectory() as directory:
            image, disk = Path(directory, "image"), Path(directory, "disk")
            image.write_bytes(b"")
            os.truncate(image, 32 << 20)
            disk.mkdir()
            for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, disk]):
                subprocess.run(command, check=True)
            try:
                path = disk / "file"
                path.write_bytes(bytes(1 << 20))
                command = [sys.executable, "-c", DEAD, str(path), how]
                child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                assert child.stdout is not None
                child.stdout.readline()
                subprocess.run(["mount", "-o", "remount,abort", disk], check=True)
                print(f"a disk that died, by {how}: {child.communicate(chr(10))[0].strip()}")
            finally:
                subprocess.run(["umount", "-l", disk], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ticks", type=int, default=3000)
    parser.add_argument("--pace-ms", type=float, default=10.0)
    parser.add_argument("--mapped", action="store_true", help="how a memory map fails, instead")
    asked = parser.parse_args()
    if asked.mapped:
        truncated(40)
        dead_disk()
    else:
        in_turn(asked.ticks, asked.pace_ms / 1e3)


if __name__ == "__main__":
    main()
