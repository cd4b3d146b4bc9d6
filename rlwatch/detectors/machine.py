"""Detectors of the machine under a run: a slow rank, GPUs throttled by heat, memory and disks that run out."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from statistics import median
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, members, rounded
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Hold, Window
from rlwatch.wording import number

FOLLOWED = 1024
"""Most ranks or GPUs that are followed."""
SLOWER = 1.25
"""Factor over the median of the ranks at which waiting for the slow rank costs what more GPUs gained."""
SLOW_ROWS = 5
"""Consecutive rows for which a rank must be slow, each judged by the median of the last twenty: response lengths differ
by rank and step, while a faulty machine stays slow.
"""


class StragglingRank(BaseDetector):
    """Detector of a slow rank: its time for its own part of a step exceeds the median of all ranks for many rows."""

    name: ClassVar[str] = "straggling_rank"
    reads: ClassVar[tuple[str, ...]] = ("time/rank/",)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("time/rank/",),)
    families: ClassVar[tuple[str, ...]] = ("time/rank/",)

    def __init__(self) -> None:
        super().__init__()
        self._ratios: dict[str, Window] = {}
        self._slow: dict[str, Hold] = {}

    def measured(self, step: ClosedStep) -> bool:
        """Return True if the times of at least two ranks are in the row."""
        return len(_times(step)) > 1

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Compare each rank's time in the row ``step`` with the median of all ranks; return a finding for the slowest,
        if any.

        Of two ranks, each is compared with their mean.
        """
        times = _times(step)
        usual = median(times.values())
        if usual <= 0.0:
            return []
        for rank, seconds in times.items():
            if rank not in self._ratios and len(self._ratios) >= FOLLOWED:
                continue
            ratio = self._ratios.setdefault(rank, Window(rows=20, steps=20))
            ratio.update(step.step, min(seconds / usual, 1e6))
            self._slow.setdefault(rank, Hold(forgive=1)).update(step.step, ratio.reaches(SLOWER))
        slow = [rank for rank in times if rank in self._slow and self._slow[rank].lasted(SLOW_ROWS)]
        if not slow:
            return []
        worst = max(slow, key=lambda rank: self._ratios[rank].get() or 0.0)
        factor = self._ratios[worst].get() or 0.0
        return [
            self.finding(
                step,
                self.name,
                Severity.WARNING,
                f"rank {worst} takes {number(times[worst])} s for its part of a step, {number(factor)} times the "
                f"median of {len(times)} ranks: the others wait for it",
                onset=self._slow[worst].since,
                metric=f"time/rank/{worst}",
                score=factor / SLOWER,
                baseline=usual,
                evidence=rounded({"factor": factor, "seconds": times[worst], "median": usual, "ranks": len(times)}),
            )
        ]


def _times(step: ClosedStep) -> dict[str, float]:
    """Return seconds by rank, where they are valid times."""
    found = {name.removeprefix("time/rank/"): finite(step, name) for name in members(step, "time/rank/")}
    return {rank: seconds for rank, seconds in found.items() if seconds is not None and 0.0 <= seconds < 1e9}


HELD_BACK = 0.5
"""Share of the readings with a throttled clock that counts: half of the time is no passing peak."""
HELD_ROWS = 5
"""Consecutive rows for which the clock must be throttled."""


class GpuThrottled(BaseDetector):
    """Detector of GPUs throttled by heat or by the power supply for many rows. Their own power limit is no failure."""

    name: ClassVar[str] = "gpu_throttled"
    reads: ClassVar[tuple[str, ...]] = ("system/gpu/",)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("system/gpu/",), ("system/rank/",))
    families: ClassVar[tuple[str, ...]] = ("system/",)

    def __init__(self) -> None:
        super().__init__()
        self._held_back: dict[str, Hold] = {}

    def measured(self, step: ClosedStep) -> bool:
        """Return True if a GPU's throttling is in the row."""
        return bool(_throttled(step))

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the throttling of each GPU; return a finding for the worst."""
        shares = _throttled(step)
        for name, share in shares.items():
            if name in self._held_back or len(self._held_back) < FOLLOWED:
                self._held_back.setdefault(name, Hold(forgive=1)).update(step.step, share >= HELD_BACK)
        lasting = [name for name in shares if name in self._held_back and self._held_back[name].lasted(HELD_ROWS)]
        if not lasting:
            return []
        worst = max(lasting, key=lambda name: shares[name])
        gpu = worst.removeprefix("system/").removesuffix("/throttled")
        heat = finite(step, f"system/{gpu}/temperature")
        hot = "" if heat is None else f" at {number(heat)} °C"
        more = f", and {len(lasting) - 1} more" if len(lasting) > 1 else ""
        return [
            self.finding(
                step,
                self.name,
                Severity.WARNING,
                f"{gpu.replace('/', ' ')} is throttled by heat or its power supply{hot}{more}: the clock is lowered in "
                f"{100.0 * shares[worst]:.0f} % of the readings, and every rank waits for it",
                onset=self._held_back[worst].since,
                metric=worst,
                score=shares[worst] / HELD_BACK,
                evidence=rounded({"share": shares[worst], "temperature": heat, "gpus": len(lasting)}),
            )
        ]


def _throttled(step: ClosedStep) -> dict[str, float]:
    names = [name for name in members(step, "system/") if name.endswith("/throttled")]
    return {name: share for name in names if (share := finite(step, name)) is not None and 0.0 <= share <= 1.0}


# What runs out: memory that leaks, disks that fill.

POINTS = 24
"""Number of readings that a trend is made of."""
APART_S = 60.0
"""Least seconds between two readings: over less than these 24 minutes, normal work looks like a leak."""
STEADY = 0.3
"""The slowest quarter of the window must fall at least at this share of the fastest: a jump is no leak."""
LASTING = 0.75
"""The last quarter must fall at least at this share of the first: what fills at the start of a run slows down."""
CLEAR = 4.0
"""The whole fall must exceed the usual deviation within a quarter by this factor (a straight line has 12, noise about
1).
"""
HOURS = 12.0
"""Hours until memory or disk is exhausted from which the operator is warned: one night."""
CONFIRMED = 6
"""Number of consecutive readings that must confirm it."""
MOST = 1e12
"""Free GiB beyond this are not a valid reading."""


class Depletion:
    """Forecast of when a resource is exhausted, from a free amount that falls steadily."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque(maxlen=POINTS)
        self._hold = Hold(forgive=1)
        self._readings = 0
        self.hours: float | None = None
        """Hours until nothing is left, by the last readings; None where they do not fall steadily."""
        self.since: int | None = None
        """First step of the readings that show it."""

    def update(self, step: int, ts: float, left: float) -> None:
        """Read the free amount ``left`` at a step and time ``ts`` (Unix seconds); a row without a time is ignored."""
        if ts <= 0.0 or not 0.0 <= left <= MOST:
            return
        last = self._points[-1][0] if self._points else -math.inf
        if ts < last:
            self._points.clear()
            self._hold.clear()
        elif ts < last + APART_S:
            return
        self._points.append((ts, left))
        self._readings += 1
        self.hours = self._forecast()
        soon = self.hours is not None and self.hours <= HOURS
        self.since = (self.since if self.since is not None else step) if soon else None
        self._hold.update(self._readings, soon)

    @property
    def lasted(self) -> bool:
        """True if consecutive readings forecast exhaustion within :data:`HOURS`."""
        return self.hours is not None and self._hold.lasted(CONFIRMED)

    def _forecast(self) -> float | None:
        if len(self._points) < POINTS:
            return None
        quarter = POINTS // 4
        parts = [[left for _, left in list(self._points)[i : i + quarter]] for i in range(0, POINTS, quarter)]
        levels = [median(part) for part in parts]
        falls = [before - after for before, after in pairwise(levels)]
        noise = max(median(abs(left - level) for left in part) for part, level in zip(parts, levels, strict=True))
        fall = levels[0] - levels[-1]
        steady = min(falls) > STEADY * max(falls) and falls[-1] >= LASTING * falls[0]
        if min(falls) <= 0.0 or not steady or fall <= CLEAR * noise:
            return None
        times = [ts for ts, _ in self._points]
        seconds = median(times[-quarter:]) - median(times[:quarter])
        return self._points[-1][1] / (fall / seconds) / 3600.0


class _RunsOut(BaseDetector):
    """Base of detectors of exhaustion: one forecast a metric, of which the soonest is reported."""

    families: ClassVar[tuple[str, ...]] = ("system/",)

    def __init__(self) -> None:
        super().__init__()
        self._depletions: dict[str, Depletion] = {}

    def left(self, step: ClosedStep) -> dict[str, float]:
        """Return the free GiB of each resource in this row, by metric."""
        raise NotImplementedError

    def words(self, step: ClosedStep, metric: str, left: float, hours: str) -> str:
        """Return the finding's message, given the resource's metric, its free GiB, and the hours left in words."""
        raise NotImplementedError

    def measured(self, step: ClosedStep) -> bool:
        """Return True if a free amount is in the row."""
        return bool(self.left(step))

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the trend of each resource; return a finding for the one that is exhausted first."""
        lefts = self.left(step)
        for metric, left in lefts.items():
            if metric in self._depletions or len(self._depletions) < FOLLOWED:
                self._depletions.setdefault(metric, Depletion()).update(step.step, step.ts, left)
        ending = {m: trend for m, trend in self._depletions.items() if m in lefts and trend.lasted}
        if not ending:
            return []
        metric = min(ending, key=lambda name: ending[name].hours or 0.0)
        hours = ending[metric].hours or 0.0
        return [
            self.finding(
                step,
                self.kinds[0],
                Severity.WARNING,
                self.words(step, metric, lefts[metric], f"{hours:.1f} h" if hours < 10.0 else f"{hours:.0f} h"),
                onset=ending[metric].since,
                metric=metric,
                score=HOURS / max(hours, 0.1),
                evidence=rounded({"hours": hours, "left": lefts[metric]}),
            )
        ]


class MemoryLeak(_RunsOut):
    """Detector of leaking memory: available memory of a machine falls steadily; once exhausted, the kernel kills the
    run.
    """

    name: ClassVar[str] = "memory_leak"
    reads: ClassVar[tuple[str, ...]] = ("system/memory/free",)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("system/memory/free",), ("system/rank/",))

    def left(self, step: ClosedStep) -> dict[str, float]:
        """Return the available memory of each machine in the row ``step``, in GiB, by metric name."""
        return _of(step, "/memory/free")

    def words(self, step: ClosedStep, metric: str, left: float, hours: str) -> str:
        """Return the message about a machine: memory left, time until it is used up, and memory of the training
        process.

        ``metric``: name of the machine's metric. ``left``: available GiB. ``hours``: time left, in words.
        """
        own = finite(step, metric.removesuffix("free") + "process")
        having = "" if own is None else f"; the training process has {number(own)} GiB"
        return f"memory falls steadily: {number(left)} GiB are left, and gone in about {hours}{having} ({metric})"


class DiskFullAhead(_RunsOut):
    """Detector of disks that fill up: a checkpoint that cannot be written ends the run, and may spoil the one
    before.
    """

    name: ClassVar[str] = "disk_full_ahead"
    reads: ClassVar[tuple[str, ...]] = ("system/disk/checkpoints/free", "system/disk/store/free")
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("system/disk/checkpoints/free",),
        ("system/disk/store/free",),
        ("system/rank/",),
    )

    def left(self, step: ClosedStep) -> dict[str, float]:
        """Return the free space of each disk in the row ``step``, in GiB, by metric name."""
        return {name: left for name, left in _of(step, "/free").items() if "/disk/" in name}

    def words(self, step: ClosedStep, metric: str, left: float, hours: str) -> str:  # noqa: ARG002
        """Return the message about a disk: its name, its free space and the time until it is full.

        ``metric``: name of the disk's metric. ``left``: free GiB. ``hours``: time left, in words.
        """
        disk = metric.removesuffix("/free").rpartition("/")[2]
        return f"the disk of the {disk} fills up: {number(left)} GiB are left, and full in about {hours} ({metric})"


def _of(step: ClosedStep, end: str) -> dict[str, float]:
    names = [name for name in members(step, "system/") if name.endswith(end)]
    return {name: left for name in names if (left := finite(step, name)) is not None and 0.0 <= left <= MOST}
