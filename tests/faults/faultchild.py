"""The program that faults befall: an ordinary training loop with rlwatch in it, run as a process of its own.

``python faultchild.py '{"store": ..., "acks": ...}'``; what may be said there is in :data:`DEFAULTS`. It acknowledges
each ``run.log`` that returned in a file mapped into memory (:class:`Acks`), which survives SIGKILL, and tells what
else happens as lines of JSON on standard output.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import mmap
import multiprocessing
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

DEFAULTS: dict[str, Any] = {
    "store": "",
    "run_id": "run",
    "acks": "",  # file of Acks
    "first": 0,  # first step
    "rows": 100,
    "rate": 100.0,  # rows a second; 0: as fast as it goes
    "hold": False,  # whether a thread holds the interpreter lock for 1.5 s again and again
    "nan_from": -1,  # from here on gradient norm and loss are NaN
    "bad": [],  # [from, to) steps with NaN in them and a collapsed entropy
    "stops": [],  # steps before which it says so and waits for a line on standard input
    "do": {},  # step -> what befalls it, see HARM
    "end": "with",  # with, exit (nobody finishes the run) or linger (wait to be killed)
    "flush": 0.0,  # how long to wait for the judge before the block ends
    "error": "",  # the block's own error, raised after the last row
    "swallow": False,  # whether the loop goes on after any Exception, as many do
    "own_handler": False,  # whether the trainer has its own SIGTERM handler
    "nobody": False,  # whether to run as the user nobody
}

SPECIAL = (math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308, 0.1 + 0.2, 1 / 3)
SPECIAL_EVERY = 25


PER_TOKEN = {
    "policy/entropy_pos": 0.4,
    "policy/entropy_neg": 0.3,
    "policy/entropy_p10": 0.02,
    "policy/entropy_p90": 1.2,
    "policy/logp_min": -9.0,
    "lld/logp_positive": -0.5,
}
"""Levels of statistics of single tokens: only of logs that have them a chance is stored at every row, and can be lost."""


def row(step: int, nan_from: int = -1, bad: tuple[int, int] = (0, 0)) -> dict[str, float]:
    """What the loop measures at ``step``: always the same, and healthy but for what was asked for."""
    noise = random.Random(step)
    metrics = {
        "reward/mean": 0.5 + noise.gauss(0.0, 0.05),
        "reward/std": 0.3 + noise.gauss(0.0, 0.03),
        "policy/entropy": 0.35 * math.exp(noise.gauss(0.0, 0.08)),
        "policy/kl_ref": 0.05 * math.exp(noise.gauss(0.0, 0.3)),
        "policy/kl_old": abs(noise.gauss(0.0, 1e-3)),
        "optim/grad_norm": 0.5 * math.exp(noise.gauss(0.0, 0.25)),
        "loss/policy": noise.gauss(0.0, 0.02),
        "len/mean": 400.0 + noise.gauss(0.0, 15.0),
        "len/clipped": min(max(noise.gauss(0.1, 0.05), 0.0), 1.0),
        "time/step": 1.0 + noise.gauss(0.0, 0.01),  # else it is taken from the clock, and differs under load
        "mine/exact": step + 1 / 3,
    }
    metrics |= {name: level * math.exp(noise.gauss(0.0, 0.05)) for name, level in PER_TOKEN.items()}
    if 0 <= nan_from <= step:
        metrics |= {"optim/grad_norm": math.nan, "loss/policy": math.nan}
    if bad[0] <= step < bad[1]:
        metrics |= {"optim/grad_norm": math.nan, "policy/entropy": 1e-4, "reward/mean": 0.0}
    return metrics


def kept_row(step: int) -> dict[str, float]:
    """As :func:`row`, and now and then a number that is easily lost on the way."""
    metrics = row(step)
    if step % SPECIAL_EVERY == 0:
        metrics["mine/special"] = SPECIAL[(step // SPECIAL_EVERY) % len(SPECIAL)]
    return metrics


class Acks:
    """Which calls of ``run.log`` returned and when, in memory shared with whoever asks after the process died."""

    HEAD = struct.Struct("<qdqdq")  # returned, slowest call in s, raised, holding the lock since, steps begun
    SIZE = 64

    def __init__(self, path: str | os.PathLike[str], room: int = 0) -> None:
        self.path = Path(path)
        if room:
            with self.path.open("wb") as file:
                file.truncate(self.SIZE + 8 * room)
        with self.path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()

    def returned(self, took: float) -> None:
        """One more call returned; its time is written before it is counted."""
        count = self.count
        struct.pack_into("<d", self._map, self.SIZE + 8 * count, time.monotonic())
        struct.pack_into("<q", self._map, 0, count + 1)
        if took > self.slowest:
            struct.pack_into("<d", self._map, 8, took)

    def raised_one(self) -> None:
        struct.pack_into("<q", self._map, 16, self.raised + 1)

    def holding(self, since: float) -> None:
        struct.pack_into("<d", self._map, 24, since)

    @property
    def count(self) -> int:
        return struct.unpack_from("<q", self._map, 0)[0]

    @property
    def slowest(self) -> float:
        return struct.unpack_from("<d", self._map, 8)[0]

    @property
    def raised(self) -> int:
        return struct.unpack_from("<q", self._map, 16)[0]

    @property
    def held_since(self) -> float:
        return struct.unpack_from("<d", self._map, 24)[0]

    def when(self, index: int) -> float:
        """``time.monotonic()`` of the ``index``-th, the same clock in every process."""
        return struct.unpack_from("<d", self._map, self.SIZE + 8 * index)[0]


def say(event: str, **more: Any) -> None:
    """One line for the laboratory. A pipe that nobody reads any more is no fault of the run."""
    with contextlib.suppress(OSError, MemoryError):
        os.write(1, (json.dumps({"event": event, "at": time.monotonic()} | more) + "\n").encode())


def hold_the_lock(acks: Acks) -> None:
    """A C call that keeps the interpreter lock, as a bad regular expression or a careless extension does."""
    usleep = ctypes.PyDLL(None).usleep
    chance = random.Random(os.getpid())
    while True:
        time.sleep(chance.uniform(0.02, 0.5))
        acks.holding(time.monotonic())
        usleep(1_500_000)
        acks.holding(0.0)


class Harm:
    """What the process does to itself, by name."""

    def __init__(self, store: str) -> None:
        self._store = Path(store)
        self._files: list[int] = []
        self._hog: list[bytearray] = []
        self._offset = 0.0
        self._now = time.time

    def small_files(self, _: float) -> None:
        """EFBIG: no file may grow beyond the largest of the store (SIGXFSZ is ignored by Python)."""
        largest = max((path.stat().st_size for path in self._store.rglob("*") if path.is_file()), default=0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))

    def large_files(self, _: float) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def no_descriptors(self, _: float) -> None:
        try:
            while True:
                self._files.append(os.open("/dev/null", os.O_RDONLY))
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise

    def descriptors(self, _: float) -> None:
        while self._files:
            os.close(self._files.pop())

    def no_memory(self, _: float) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
        for size in (16_384, 4096, 1024):  # what is still free within it; what Python keeps for small objects is left
            with contextlib.suppress(MemoryError):
                while True:
                    self._hog.append(bytearray(size))

    def memory(self, _: float) -> None:
        self._hog.clear()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def clock(self, seconds: float) -> None:
        """The wall clock jumps; the monotonic one does not."""
        self._offset += seconds
        time.time = lambda: self._now() + self._offset  # type: ignore[assignment]

    def clock_end(self, _: float) -> None:
        time.time = self._now

    def suspend(self, seconds: float) -> None:
        """SIGSTOP from outside, as of a scheduler that preempts or a debugger; SIGCONT ``seconds`` later."""
        pid = os.getpid()
        subprocess.Popen(["sh", "-c", f"kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"])

    def truncate(self, _: float) -> None:
        """Another program empties the journal's files under the open run."""
        for path in self._store.glob("*/run.journal-*"):
            os.truncate(path, 0)

    def fork(self, count: float) -> None:
        """Workers as a DataLoader has them: some log, some finish, all outlive the parent for a moment."""
        context = multiprocessing.get_context("fork")
        for number in range(int(count)):
            context.Process(target=forked, args=(number,), daemon=True).start()


RUNS: list[Any] = []


def forked(number: int) -> None:
    """In a forked worker, which has the parent's run in its memory: nothing of it may reach the store."""
    run, parent = RUNS[0], os.getppid()
    for step in range(50):
        run.log({"policy/entropy": 9.9}, step=10_000_000 + step)
    run.event("note", step=10_000_000, text="of a forked worker")
    if number % 2:
        run.finish()
    over = time.monotonic() + 20.0
    while os.getppid() == parent and time.monotonic() < over:
        time.sleep(0.05)
    time.sleep(1.0)  # the lock of a dead parent must not live on in us
    if number % 3 == 0:
        os._exit(0)


def paced(rate: float, count: int) -> Iterator[int]:
    """``count`` numbers, ``rate`` of them a second."""
    due = time.monotonic()
    for index in range(count):
        yield index
        if rate:
            due += 1.0 / rate
            time.sleep(max(0.0, due - time.monotonic()))


def loop(run: Any, o: SimpleNamespace, acks: Acks) -> None:
    """The training loop."""
    if o.hold:
        threading.Thread(target=hold_the_lock, args=(acks,), daemon=True).start()
    harm = Harm(o.store)
    judged = bool(o.bad) or o.nan_from >= 0
    steps = range(o.first, o.first + o.rows)
    # made beforehand: what fails below is rlwatch's doing
    rows = [row(s, o.nan_from, tuple(o.bad or (0, 0))) if judged else kept_row(s) for s in steps]
    for index in paced(o.rate, o.rows):
        step = o.first + index
        try:
            if step in o.stops:
                say("stop", step=step)
                sys.stdin.readline()
            for name, value in o.do.get(str(step), []):
                getattr(harm, name)(value)
            began = time.perf_counter()
            run.log(rows[index], step=step)
            acks.returned(time.perf_counter() - began)
        except Exception as error:
            if of_rlwatch(error):
                acks.raised_one()
            say("raised", step=step, error=f"{type(error).__name__}: {error}"[:200])
            if not o.swallow:
                raise
    if o.error:
        raise RuntimeError(o.error)


def of_rlwatch(error: BaseException) -> bool:
    """Whether it came out of rlwatch, and is not the loop's own."""
    frames = traceback.walk_tb(error.__traceback__)
    return any("/rlwatch/" in frame.f_code.co_filename for frame, _ in frames)


def everything_imported() -> None:
    """Python itself may lie where the user nobody cannot read."""
    import importlib
    import pkgutil
    import tempfile

    import rlwatch

    for room in (
        "store",
        "alerts",
        "notify",
        "monitor",
        "detectors",
        "diagnosis",
        "forecast",
        "run",
        "recorder",
        "control",
    ):
        package = importlib.import_module(f"rlwatch.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"rlwatch.{room}."):
            if ".training" not in module.name:
                importlib.import_module(module.name)
    hook = os.environ.pop("RLWATCH_WEBHOOK_URL", None)
    with (
        tempfile.TemporaryDirectory() as scratch,
        rlwatch.init(store=scratch, webhook_url="http://127.0.0.1:9/") as run,
    ):
        for step in range(30):
            run.log(row(step, nan_from=20), step=step)
        run.flush()
        time.sleep(0.5)
    if hook:
        os.environ["RLWATCH_WEBHOOK_URL"] = hook


def listening(outcome: Any) -> None:
    """A listener, as actions are: it must hear of what is found although it cannot be stored."""
    if any(finding.kind == "nonfinite" for finding in outcome.findings):
        say("heard")


def linger() -> None:
    say("lingers")
    parent = os.getppid()
    while os.getppid() == parent:  # a laboratory that was killed leaves nobody behind
        time.sleep(0.05)


def body(begin: Callable[[], Any], o: SimpleNamespace, acks: Acks) -> None:
    """Begin the run, train, and end as asked; tell how it was left."""
    if o.end != "with":
        run = begin()
        RUNS.append(run)
        say("begun", attempt=run.info.attempt)
        loop(run, o, acks)
        if o.end == "linger":
            linger()
        say("left", error=None)
        return
    error, left, run = None, time.monotonic(), None
    try:
        with begin() as run:
            RUNS.append(run)
            if o.bad:
                run.listen(listening)
            say("begun", attempt=run.info.attempt)
            try:
                loop(run, o, acks)
                if o.flush:
                    run.flush(o.flush)
            finally:
                left = time.monotonic()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"[:300]
    counters = {} if run is None else dict(run.counters.snapshot())
    say("left", error=error, took=time.monotonic() - left, counters=counters)


def main() -> int:
    o = SimpleNamespace(**DEFAULTS | json.loads(sys.argv[1]))
    acks = Acks(o.acks)
    if o.nobody:
        everything_imported()
        os.setgid(65534)
        os.setuid(65534)
    say("importing")
    import rlwatch

    if o.own_handler:
        signal.signal(signal.SIGTERM, lambda *_: (say("own handler"), os._exit(7)))
    say("imported")

    def begin() -> Any:
        try:
            return rlwatch.init(store=o.store, run_id=o.run_id)
        except rlwatch.RLWatchError as error:
            say("refused", error=f"{type(error).__name__}: {error}"[:300])
            raise SystemExit(3) from None

    body(begin, o, acks)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
