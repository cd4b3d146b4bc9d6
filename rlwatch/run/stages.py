"""Stages of a training step: which one is running, since when, the time of each; and the stacks of a stalled process.

The training thread enters and leaves stages, which takes about a microsecond and never raises. A background thread
checks for stalls, so it continues while training hangs.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain, repeat, takewhile
from operator import attrgetter, call, methodcaller, truth
from pathlib import PurePath
from statistics import median
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple, Self

from rlwatch.control.liveness import FACTOR, FLOOR_S, LONGEST_FACTOR, TAIL, UNKNOWN_S, WAITING
from rlwatch.error_boundary import call_or
from rlwatch.ports import Item
from rlwatch.records import STAGES, STALL_OVER, STALLED, SpikeBatch

PAUSED = "paused"
"""Stage of a trainer that waits because a user paused it: that is no stall."""
WAITS = {"sampling": "responses", "reward": "rewards", "environment": "the environment"}
"""Stage in which the update waits for others -> what it waits for."""
MOST_SPANS = 256
"""Largest number of spans kept of a step; the time of further ones still counts."""
JOINED_S = 0.005
"""Two spans of one stage that are less than so many seconds apart are one."""
COLLECTIVES, COLLECTIVE_FRAMES = "torch/distributed/", 6
"""Part of a path that, among this many innermost frames, shows that a rank waits for the others."""
VARIABLE = "RLWATCH_STALL_S"
"""Environment variable: smallest number of seconds without progress after which a process stores its stacks."""
EARLIER = 0.9
"""Fraction of an alert's patience after which stacks are stored, so that they exist when it is written."""
LEAST_LOOKS = 4
"""Number of samples of a quiet thread after which it is reported whether its stack changes."""
LOOK_S = 1.0
"""Seconds between two samples of a quiet process."""
MOST_FRAMES, MOST_FRAMES_ELSEWHERE, MOST_THREADS = 40, 12, 24
"""Frames of the training thread and of each other one, and threads, in a record of a stall."""
MOST_COMPARED = 256
"""Frames of the training thread that are compared between two samples."""
Caller = tuple[CodeType, int | None, int]
"""Code of a frame, its line, and the index of its instruction."""
_FRAMES: Callable[[], dict[int, FrameType]] = sys._current_frames  # noqa: SLF001  (there is no other way to them)
_PARTS: Callable[[FrameType], Caller] = attrgetter("f_code", "f_lineno", "f_lasti")


class Span(NamedTuple):
    """A stretch of time in one stage: its name, its beginning in Unix seconds, and its length in seconds."""

    stage: str
    begin: float
    seconds: float


class Opened:
    """A stage of a training step that was entered and not left yet: its name, its beginning, and when its own time last
    began to count.

    The time of stages entered within it does not count.
    """

    __slots__ = ("begin", "name", "resumed")

    def __init__(self, name: str, now: float) -> None:
        self.name, self.begin, self.resumed = name, now, now


def _nothing(_error: Exception) -> None:
    """Do nothing, in place of a call that failed."""


class Stage:
    """Context manager of one stage of a training step: ``with run.stage("sampling"):``.

    ``clock``: records its time. ``name``: name of the stage.
    """

    __slots__ = ("_clock", "_name", "_open")

    def __init__(self, clock: StageClock, name: str) -> None:
        self._clock, self._name = clock, name
        self._open: Opened | None = None

    def __enter__(self) -> Self:
        self._open = self._clock.enter(self._name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clock.leave(self._open)


class StageClock:
    """Measures the time of the stages of a training process. A stage within another stops the time of the outer one.

    >>> clock = StageClock()
    >>> with clock.stage("sampling"), clock.stage("reward"):
    ...     clock.running()[0].stage
    'reward'
    >>> sorted({span.stage for span in clock.take()})
    ['reward', 'sampling']
    """

    def __init__(self) -> None:
        self._base = time.time() - time.perf_counter()
        self._open: dict[int, list[Opened]] = {}
        self._spans: list[Span] = []
        self._beyond: dict[str, float] = {}
        self._moved = time.perf_counter()
        self._step: int | None = None
        self._gaps: deque[float] = deque(maxlen=TAIL)
        self._stepped = 0.0
        self.used = False
        """Whether any stage was ever entered, or any step ended."""
        self.tapped = False
        """Whether the integration that ends the trainer's steps takes the spans, so its log does not."""
        self.by_rows = False
        """Whether the spans are added to the rows of ``run.log``, because no integration ends steps."""

    def stage(self, name: str) -> Stage:
        """Return a context manager for the stage ``name`` of a training step, which measures the time in it."""
        return Stage(self, name)

    def enter(self, name: str) -> Opened | None:
        """Enter the stage ``name`` on this thread; return an object for :meth:`leave`, or None if that failed."""
        return call_or(partial(self._enter, name), _nothing)

    def _enter(self, name: str) -> Opened:
        now = time.perf_counter()
        self._moved, self.used = now, True
        stack = self._open.setdefault(threading.get_ident(), [])
        if stack:
            self._close(stack[-1], now)
        opened = Opened(str(name), now)
        stack.append(opened)
        return opened

    def within(self, name: str) -> bool:
        """Return whether the innermost stage of this thread is ``name``."""
        stack = self._open.get(threading.get_ident())
        return bool(stack) and stack[-1].name == name  # type: ignore[index]

    def leave(self, opened: Opened | None) -> None:
        """Leave the stage ``opened`` that :meth:`enter` returned, and those entered within it that are still open;
        nothing for None.
        """
        call_or(partial(self._leave, opened), _nothing)

    def _leave(self, opened: Opened | None) -> None:
        now, ident = time.perf_counter(), threading.get_ident()
        stack = self._open.get(ident)
        if opened is None or not stack or opened not in stack:
            return
        self._moved = now
        self._close(stack[-1], now)
        del stack[stack.index(opened) :]
        if stack:
            stack[-1].resumed = now
        else:
            del self._open[ident]

    def _close(self, opened: Opened, now: float) -> None:
        begin, took = self._base + opened.resumed, now - opened.resumed
        last = self._spans[-1] if self._spans else None
        if last is not None and last.stage == opened.name and 0.0 <= begin - last.begin - last.seconds < JOINED_S:
            self._spans[-1] = Span(last.stage, last.begin, begin + took - last.begin)
        elif len(self._spans) < MOST_SPANS:
            self._spans.append(Span(opened.name, begin, took))
        else:
            self._beyond[opened.name] = self._beyond.get(opened.name, 0.0) + took

    def take(self) -> list[Span]:
        """Return the spans of time spent in stages since the last call.

        A stage that is still open is cut in two. Spans beyond a limit are merged into one for each stage.
        """
        now = time.perf_counter()
        for stack in list(self._open.values()):
            if stack:
                self._close(stack[-1], now)
                stack[-1].resumed = now
        spans, self._spans = self._spans, []
        beyond, self._beyond = self._beyond, {}
        return spans + [Span(name, self._base + now - took, took) for name, took in beyond.items()]

    def end_step(self, step: int) -> list[Span]:
        """Note that ``step`` has ended, and return the times of its stages. Never raises."""
        self.ended(step)
        return call_or(self.take, _nothing) or []

    def ended(self, step: int) -> None:
        """Note that ``step`` has ended, from which the usual time of a step is learnt."""
        now = time.perf_counter()
        self._moved = now
        if not self.begins(step):
            return
        if self.used and self._step is not None:
            self._gaps.append(now - self._stepped)
        self._step, self._stepped, self.used = step, now, True

    def begins(self, step: int) -> bool:
        """Return whether ``step`` is higher than the last step that ended."""
        return self._step is None or step > self._step

    @property
    def step(self) -> int | None:
        """Last step that ended; None before the first."""
        return self._step

    @property
    def progress(self) -> float:
        """Time of the last sign of progress (a step ended or the stage changed), in seconds of
        ``time.perf_counter``.
        """
        return self._moved

    @property
    def patience_s(self) -> float:
        """Number of seconds without progress that are not a stall yet: a multiple of the usual time of a step.

        The same rule applies to rows in :mod:`rlwatch.control.liveness`.
        """
        floor = _floor()
        gaps = list(self._gaps)
        if not gaps:
            return EARLIER * (UNKNOWN_S if floor is None else floor)
        least = FLOOR_S if floor is None else floor
        return EARLIER * max(least, FACTOR * median(gaps), LONGEST_FACTOR * max(gaps))

    def running(self) -> list[Span]:
        """Return the open stages of the training thread, innermost first, each with the seconds since it began."""
        now = time.perf_counter()
        _, stack = self._training()
        return [Span(one.name, self._base + one.begin, now - one.begin) for one in reversed(stack)]

    def now(self) -> tuple[str, float | None]:
        """Return the innermost open stage and its beginning (Unix seconds); an empty text and None without a stage."""
        stages = self.running()
        return (stages[0].stage, stages[0].begin) if stages else ("", None)

    def thread(self) -> int:
        """Return the id of the training thread: the main thread, unless only another one is in a stage."""
        return self._training()[0]

    def _training(self) -> tuple[int, list[Opened]]:
        main = threading.main_thread().ident or 0
        stacks = {ident: list(stack) for ident, stack in list(self._open.items()) if stack}
        if not stacks or main in stacks:
            return main, stacks.get(main, [])
        return max(stacks.items(), key=lambda item: item[1][-1].begin)


def _floor() -> float | None:
    try:
        return max(0.0, float(os.environ[VARIABLE]))
    except (KeyError, ValueError):
        return None


def seconds_of(spans: Sequence[Span]) -> dict[str, float]:
    """Return metric ``time/stage/<stage>`` -> seconds, summed over the spans of each stage.

    >>> seconds_of([Span("reward", 0.0, 1.0), Span("update", 1.0, 2.0), Span("reward", 3.0, 0.5)])
    {'time/stage/reward': 1.5, 'time/stage/update': 2.0}
    """
    found: dict[str, float] = {}
    for span in spans:
        name = f"time/stage/{span.stage}"
        found[name] = found.get(name, 0.0) + span.seconds
    return found


def batch_of_spans(step: int, spans: Sequence[Span], rank: int = 0) -> SpikeBatch | None:
    """Return the times of the stages of ``step`` (``spans``) as a record for the store; None if there are none."""
    if not spans:
        return None
    import numpy as np  # loaded by now wherever a stage was entered; `import rlwatch` does without

    columns: dict[str, np.ndarray | Sequence[str]] = {
        "stage": [span.stage for span in spans],
        "begin": np.array([span.begin for span in spans], np.float64),
        "seconds": np.array([span.seconds for span in spans], np.float64),
    }
    return SpikeBatch(step, columns, STAGES, rank=rank)


# A stall: the process is alive, but no step ends and the stage does not change.


class StallWatch:
    """Checks on a background thread whether a training process stalls, and reports each stall once.

    A stall: the process is alive, but no step ends and the stage does not change.

    Parameters
    ----------
    clock
        Stage clock of the process.
    rank
        Rank of the process.
    report
        Called with the kind of the event, the last step, and the body.
    """

    def __init__(
        self, clock: StageClock, rank: int, report: Callable[[str, int | None, dict[str, Any]], object]
    ) -> None:
        self._clock, self._rank, self._report = clock, rank, report
        self._look_at = 0.0
        self._progress = 0.0
        self._seen: list[Caller] = []
        self._looks = 0
        self._moves = False
        self._since: float | None = None

    def look(self) -> None:
        """Check for a stall, at most once a second. May raise."""
        now = time.perf_counter()
        if now < self._look_at:
            return
        clock = self._clock
        patience, progress, stages = clock.patience_s, clock.progress, clock.running()
        quiet = time.perf_counter() - progress
        self._look_at = now + min(LOOK_S, patience / 8)
        if progress != self._progress or any(one.stage == PAUSED for one in stages):
            self._over(now)
            self._progress, self._seen, self._looks, self._moves = progress, [], 0, False
        if not clock.used or quiet < patience / 2 or any(one.stage == PAUSED for one in stages):
            return
        seen = callers_of(clock.thread(), MOST_COMPARED)
        self._moves = self._moves or (self._looks > 0 and seen != self._seen)
        self._seen, self._looks = seen, self._looks + 1
        if quiet >= patience and self._looks >= LEAST_LOOKS and self._since is None:
            self._since = progress
            self._report(STALLED, clock.step, stall(stages, quiet, self._rank, clock.thread(), moves=self._moves))

    def _over(self, now: float) -> None:
        if self._since is not None:
            took, self._since = now - self._since, None
            self._report(STALL_OVER, self._clock.step, {"rank": self._rank, "seconds": round(took, 1)})


class StallSink:
    """Sink of the writer thread that checks for a stall of the training process between two batches."""

    def __init__(self, watch: StallWatch) -> None:
        self._watch = watch

    def write(self, batch: Sequence[Item]) -> None:
        """Do nothing: this sink takes no rows."""

    def tick(self) -> None:
        """Check if a stage of the training step takes too long, and report a stall if so."""
        self._watch.look()

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def stall(stages: Sequence[Span], quiet_s: float, rank: int, thread: int, *, moves: bool) -> dict[str, Any]:
    """Return the body of an event that reports a stall: its stage and beginning, the kind of stall, and all threads'
    stacks.

    Parameters
    ----------
    stages
        Open stages, innermost first.
    quiet_s
        Seconds since the last sign of progress.
    rank, thread
        Rank of the process, and the id of its training thread.
    moves
        Whether the stack of that thread changed while it was quiet.
    """
    name = stages[0].stage if stages else ""
    since = stages[0].begin if stages else time.time() - quiet_s
    stacks = stacks_of_threads(thread)
    place = stacks[0]["stack"][-1] if stacks and stacks[0]["stack"] else ""
    what = "starved" if name in WAITS else "slow" if moves else "wedged"
    if stacks and any(COLLECTIVES in line for line in stacks[0]["stack"][-COLLECTIVE_FRAMES:]):
        what = WAITING
    return {
        "stage": name,
        "within": [one.stage for one in stages[1:]],
        "since": round(since, 3),
        "quiet_s": round(quiet_s, 1),
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "what": what,
        "says": _sentence(what, name, rank, since, place),
        "threads": stacks,
    }


def _sentence(what: str, name: str, rank: int, since: float, place: str) -> str:
    at = f" since {time.strftime('%H:%M:%S', time.gmtime(since))} UTC"
    where = f"rank {rank} is in stage {name}" if name else f"rank {rank} is between stages"
    why = {
        "starved": f"starved: it waits for {WAITS.get(name, name)}, and none arrive",
        "wedged": "wedged: its Python stack does not change",
        "slow": "slow: its Python stack still changes",
        WAITING: "waiting for the other ranks in a collective",
    }[what]
    return f"{where}{at}, {why}{f'; at {place}' if place else ''}"


def _without_collection(work: Callable[[], object]) -> None:
    """Call ``work``, a function in C, without a garbage collection and without another thread in between.

    Python 3.11 collects wherever an object is made. A collection may run a finaliser, and that lets another thread run.
    While the threads' frames are read under a lock, the other thread may wait for that lock for good (CPython issue
    106883). While the caller of a frame is read, the other thread may return from that caller: Python then writes into
    memory that is used anew, and the process dies. The calls are made by one loop in C, so that no thread sees
    collections switched off.
    """
    calls: tuple[Callable[[], Any], ...] = (gc.isenabled, gc.disable, work)
    collects = True
    try:
        collects, _, _ = map(call, calls)
    finally:
        if collects:
            gc.enable()


def callers_of(thread: int, most: int) -> list[Caller]:
    """Return the frames of a thread, innermost first, at most ``most``; nothing for a thread that has ended.

    ``thread``: id of the thread. No frame is kept, so none lives longer for it.
    """
    frame = map(methodcaller("get", thread), map(call, [_FRAMES]))
    frames = takewhile(truth, accumulate(chain(frame, repeat("f_back", most - 1)), getattr))
    found: list[Caller] = []
    _without_collection(partial(found.extend, map(_PARTS, frames)))
    return found


def _threads() -> list[int]:
    """Return the id of each thread, also of those that Python did not start."""
    found: list[int] = []
    _without_collection(partial(found.extend, chain.from_iterable(map(call, [_FRAMES]))))
    return found


def stacks_of_threads(first: int) -> list[dict[str, Any]]:
    """Return ``name`` and ``stack`` of each thread except rlwatch's, the thread ``first`` before the others.

    A stack is a list of texts, outermost frame first.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident in sorted(_threads(), key=lambda one: one != first):
        name = names.get(ident, f"thread {ident}")
        if ident != first and name.startswith("rlwatch-"):
            continue
        most = MOST_FRAMES if ident == first else MOST_FRAMES_ELSEWHERE
        found.append({"name": name, "stack": _stack(ident, most)})
    return found[:MOST_THREADS]


def _stack(thread: int, most: int) -> list[str]:
    callers = callers_of(thread, most + 1)
    lines = [f"{code.co_name} ({_short(code.co_filename)}:{line})" for code, line, _ in callers[:most]]
    return [*(["..."] if len(callers) > most else []), *lines[::-1]]


def _short(path: str) -> str:
    """Return the last three parts of a path.

    >>> _short("/tmp/a.py"), _short("/home/ann/math/rewards/judge.py")
    ('/tmp/a.py', 'math/rewards/judge.py')
    """
    parts = PurePath(path).parts
    return path if len(parts) <= 3 else "/".join(parts[-3:])
