"""Snapshots of training while it runs: when they are taken, which are kept, and which are good to return to.

A :class:`SnapshotKeeper` looks at every safe boundary. It takes a snapshot when one is due and the budgets of memory
and time allow it, and calls an older one good once the rows up to it have been judged
(:mod:`rlwatch.monitor.step_judge`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlwatch.control.commands import LAST_GOOD
from rlwatch.error_boundary import ErrorBoundary, say
from rlwatch.errors import ConfigError, RLWatchError
from rlwatch.integrations.snapshot_files import SnapshotFile, read_snapshot, writable, write_snapshot
from rlwatch.integrations.snapshot_state import (
    INSTEAD,
    Fence,
    Holdings,
    SideCopier,
    StateCopy,
    check_fits,
    plain_of,
    put_back,
    tensors_of,
)
from rlwatch.run.machine import container_memory

GIB = float(1 << 30)
DEFAULT_PART = 0.5
"""Part of the memory that is free at the first snapshot, which snapshots may take unless ``memory_gb`` is given."""
BESIDE_GOOD = 3
"""Snapshots that are kept beside the good ones: the first, the newest, and one that is not judged yet."""


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Settings of snapshots: how often, how many, and at what price.

    Parameters
    ----------
    every
        Steps between two snapshots, an integer >= 1; taken at the next safe boundary.
    keep
        Good snapshots that are kept beside the first and the newest one, an integer >= 3.
    memory_gb
        Host memory that all snapshots of this process may take, GiB, > 0. None: half of what is free at the first.
    share
        Part of the training time that taking them may cost this thread, in (0, 1]: if one takes longer, they become
        rarer. 1: no limit.
    where
        Directory to which good snapshots are written besides, on a thread of their own. Written ones leave the memory
        first. None: nothing is written.

    Raises
    ------
    ConfigError
        For a value out of range.
    """

    every: int = 10
    keep: int = 3
    memory_gb: float | None = None
    share: float = 0.01
    where: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("keep", 3)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"snapshots: {name} must be an integer of at least {least}, got {value!r}")
        for name, most in (("memory_gb", float("inf")), ("share", 1.0)):
            value = getattr(self, name)
            if value is None and name == "memory_gb":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
                limit = "" if most > 1 else " and at most 1"
                raise ConfigError(f"snapshots: {name} must be a number above 0{limit}, got {value!r}")
        if self.where is not None and not isinstance(self.where, str | os.PathLike):
            raise ConfigError(f"snapshots: where must be a directory, got {self.where!r}")

    @classmethod
    def of(cls, wish: bool | Snapshots) -> Snapshots | None:
        """None for False, the defaults for True, else ``wish`` itself. Raises ``ConfigError`` for anything else."""
        if isinstance(wish, cls):
            return wish
        if isinstance(wish, bool):
            return cls() if wish else None
        raise ConfigError(f"snapshots must be True, False or Snapshots(...), got {wish!r}")


# One snapshot, and which of several are kept.


@dataclass(slots=True)
class Snapshot:
    """The state after ``step``. ``good``: True, False, or None while the rows up to it are not judged."""

    step: int
    kept: StateCopy | None
    fence: Fence = field(default_factory=Fence)
    good: bool | None = None
    why_not: str = "the rows up to it have not been judged"
    file: SnapshotFile | None = None
    writing: bool = False
    unwritable: bool = False
    dropped: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it holds."""
        return 0 if self.kept is None else self.kept.nbytes

    def state(self) -> StateCopy:
        """Return its content, read from its file if need be. Raises ``RLWatchError`` if that is damaged."""
        self.fence.wait()
        if self.kept is not None:
            return self.kept
        if self.file is None:
            raise RLWatchError(f"the snapshot of step {self.step} is neither in memory nor on disk")
        return read_snapshot(self.file)


def to_drop(snapshots: Sequence[Snapshot]) -> Snapshot | None:
    """Return the one that is missed least: a bad one, else one not judged yet, else a good one close to others.

    The first, the newest, the newest good one and the oldest of those not judged, which is judged next, are never
    dropped. The older snapshots are, the farther apart they may lie: an alarm may come late.
    """
    ordered = sorted(snapshots, key=lambda snapshot: snapshot.step)
    newest_good = max((one.step for one in ordered if one.good), default=None)
    next_judged = next((one.step for one in ordered if one.good is None), None)
    free = [one for one in ordered[1:-1] if one.step not in (newest_good, next_judged) and not one.writing]
    bad = next((one for one in free if one.good is False), None)
    if bad is not None or not free:
        return bad
    free = [one for one in free if one.good is None] or free
    newest = ordered[-1].step
    steps = [one.step for one in ordered]

    def crowded(one: Snapshot) -> float:
        at = steps.index(one.step)
        return (steps[at + 1] - steps[at - 1]) / (newest - one.step)

    return min(free, key=crowded)


def free_bytes() -> float:
    """Return the memory that this process may still take, in bytes; infinite where that is not known."""
    try:
        free = float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        free = next((1024.0 * float(line.split()[1]) for line in text.splitlines() if "MemAvailable" in line), free)
    except (OSError, ValueError):
        free = float("inf")
    limit = container_memory()
    return free if limit is None else min(free, limit[1])


class SnapshotKeeper:
    """Takes, judges, keeps and gives back the snapshots of one process. All is called on the training thread.

    Parameters
    ----------
    settings
        The user's wishes.
    find
        The objects to copy, as they are now. May raise ``RLWatchError``.
    seam
        Where the run's health is asked and events go.
    available
        Bytes of memory that may still be taken.
    seconds
        A monotonic clock.
    """

    def __init__(
        self,
        settings: Snapshots,
        find: Callable[[], Holdings],
        seam: ErrorBoundary,
        *,
        available: Callable[[], float] = free_bytes,
        seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.settings = settings
        self.taken: list[Snapshot] = []
        """The snapshots that are kept, by step."""
        self._find = find
        self._seam = seam
        self._available = available
        self._seconds = seconds
        self._copier = SideCopier(seam)
        self._budget: float | None = None
        self._last: tuple[int, float] | None = None
        self._cost_s = 0.0
        self._said: set[str] = set()
        self._disk = threading.Lock()

    @property
    def last_good(self) -> Snapshot | None:
        """The newest snapshot that was judged good."""
        return next((one for one in reversed(self.taken) if one.good), None)

    def begin(self, step: int) -> None:
        """Training begins, or begins again, after ``step``: what was taken later is of another training."""
        self.forget_after(step - 1)
        self._last = None
        self.look(step)

    def newest_good(self) -> int | None:
        """Return the step of the newest snapshot that is known to be good by now; None if there is none."""
        self._judge()
        return None if self.last_good is None else self.last_good.step

    def look(self, step: int) -> None:
        """Judge what can be judged, and take a snapshot if one is due, at a safe boundary after ``step``."""
        if self._last is not None and step < self._last[0]:
            self.begin(step)
            return
        self._judge()
        if self._due(step):
            self._take(step)

    def find(self, to: str) -> Snapshot:
        """Return the last good snapshot, or that of a step. Raises ``RLWatchError`` naming those that are kept."""
        self._judge()
        if to == LAST_GOOD:
            good = self.last_good
            if good is None:
                raise RLWatchError(f"no snapshot is known to be good; kept: {self.described()}")
            return good
        found = next((one for one in self.taken if str(one.step) == to), None)
        if found is None:
            raise RLWatchError(f"no snapshot of step {to} is kept; kept: {self.described()}")
        return found

    def described(self) -> str:
        """Return the steps that are kept and what is known of each, in words."""
        words = {True: "good", False: "not good", None: "not judged"}
        return ", ".join(f"{one.step} ({words[one.good]})" for one in self.taken) or "none"

    def fits(self, snapshot: Snapshot) -> StateCopy:
        """Return the content of ``snapshot``. Raises ``RLWatchError`` if it cannot be put back now."""
        kept = snapshot.state()
        check_fits(self._find(), kept)
        if not kept.finite:
            raise RLWatchError(f"the weights in the snapshot of step {snapshot.step} are not finite")
        return kept

    def now(self, step: int) -> Snapshot:
        """Return a copy of the state now, outside the ring. Raises ``RLWatchError`` where memory does not suffice."""
        held = self._find()
        needed = sum(tensor.nbytes for tensor in tensors_of(held).values())
        if needed > self._copier.spare_bytes and needed > self._available():
            raise RLWatchError(f"a copy of the state of now needs {needed / GIB:.2f} GiB of memory, which is not free")
        kept, fence = self._copier.copy(held)
        fence.wait()
        return Snapshot(step, kept, fence)

    def put_back(self, kept: StateCopy, before: StateCopy, *, generators: bool) -> None:
        """Make the state what ``kept`` holds; see :func:`~rlwatch.integrations.snapshot_state.put_back`."""
        put_back(self._find(), kept, before, generators=generators)

    def forget_after(self, step: int) -> None:
        """Drop the snapshots after ``step``."""
        for one in [one for one in self.taken if one.step > step]:
            self._drop(one)

    def rolled_back(self, to: Snapshot, undone: Snapshot) -> None:
        """Keep ``undone``, the state that was there, in place of the snapshots after ``to``; count from there on."""
        self.forget_after(to.step)
        self.taken.append(undone)
        self._last = (undone.step, self._seconds())

    # Taking one.

    def _due(self, step: int) -> bool:
        run = self._seam.run
        if run is None or not run.measures:
            return False
        if self._last is None:
            return True
        last_step, last_at = self._last
        if step - last_step < self.settings.every:
            return False
        share = self.settings.share
        if share == 1 or self._seconds() - last_at >= self._cost_s / share:
            return True
        self._say(
            "time",
            f"snapshots become rarer than every {self.settings.every} steps: one takes {1e3 * self._cost_s:.0f} ms of "
            f"this thread, and share={share:g} of the time may go into them",
        )
        return False

    def _take(self, step: int) -> None:
        began = self._seconds()
        held = self._find()
        needed = sum(tensor.nbytes for tensor in tensors_of(held).values())
        if not self._room(needed):
            self._last = (step, began)
            return
        kept, fence = self._copier.copy(held)
        first = not self.taken
        self.taken.append(Snapshot(step, kept, fence))
        self.taken.sort(key=lambda one: one.step)
        while len(self.taken) > self.settings.keep + BESIDE_GOOD and (least := to_drop(self.taken)) is not None:
            self._drop(least)
        ended = self._seconds()
        self._last, self._cost_s = (step, ended), ended - began
        if first and self._seam.run is not None:
            settings = self.settings
            body = {"every": settings.every, "keep": settings.keep, "where": str(settings.where or "")}
            self._seam.run.event("snapshots", step, bytes=needed, **body)

    def _room(self, needed: int) -> bool:
        """Make room for ``needed`` bytes within the budget; False, with one line, if there is none."""
        if self._budget is None:
            given = self.settings.memory_gb
            self._budget = DEFAULT_PART * self._available() if given is None else given * GIB
        while self._held() + needed > self._budget:
            written = next((one for one in self.taken[:-1] if one.file is not None and one.kept is not None), None)
            if written is not None:
                self._release(written)
                continue
            least = to_drop(self.taken) if len(self.taken) > 2 else None
            if least is None:
                self._say(
                    "memory",
                    f"no snapshot is taken: it needs {needed / GIB:.3g} GiB beside the {self._held() / GIB:.3g} GiB of "
                    f"those kept, and memory_gb allows {self._budget / GIB:.3g} GiB",
                )
                return False
            self._drop(least)
        return True

    def _held(self) -> int:
        return sum(one.nbytes for one in self.taken)

    def _release(self, snapshot: Snapshot) -> None:
        kept, snapshot.kept = snapshot.kept, None
        if kept is not None:
            self._copier.give_back(kept)

    def _drop(self, snapshot: Snapshot) -> None:
        self.taken.remove(snapshot)
        snapshot.dropped = True
        snapshot.fence.wait()
        if snapshot.writing:  # its thread still reads the buffers
            return
        self._release(snapshot)
        if snapshot.file is not None:
            self._seam.attempt("snapshot", snapshot.file.remove)

    # Judging them, and writing down the good ones.

    def _judge(self) -> None:
        run = self._seam.run
        if run is None:
            return
        health = run.health()
        for one in self.taken:
            if one.good is None and (why_not := health.unsound_after(one.step)) is not None:
                one.good, one.why_not = not why_not, why_not
            if one.good and self.settings.where is not None and not (one.file or one.writing or one.unwritable):
                self._write(one, Path(self.settings.where))

    def _write(self, snapshot: Snapshot, where: Path) -> None:
        run, kept = self._seam.run, snapshot.kept
        if run is None or kept is None:
            return
        path = where / run.info.run_id / f"snapshot-{snapshot.step}-rank{run.rank}.pt"
        snapshot.writing = True
        threading.Thread(
            target=self._seam.guard_background,
            args=("snapshot on disk", self._written, snapshot, kept, path),
            name="rlwatch-snapshot",
            daemon=True,
        ).start()

    def _written(self, snapshot: Snapshot, kept: StateCopy, path: Path) -> None:
        with self._disk:
            try:
                snapshot.fence.wait()
                if not writable(kept):
                    snapshot.unwritable = True
                    self._say("file", "snapshots are not written: a scheduler keeps what no plain file holds")
                    return
                snapshot.file = write_snapshot(path, kept, snapshot.step)
                if snapshot.dropped:
                    snapshot.file.remove()
            except OSError as error:
                snapshot.unwritable = True
                self._say("disk", f"the snapshot of step {snapshot.step} is not written (training goes on): {error}")
            finally:
                snapshot.writing = False

    def _say(self, what: str, words: str) -> None:
        if what not in self._said:
            self._said.add(what)
            say(logging.WARNING, "rlwatch: %s", words)


def keeper_of(settings: Snapshots | None, find: Callable[[], Holdings], seam: ErrorBoundary) -> SnapshotKeeper | None:
    """Return the keeper of a run; None where no snapshots are wished for."""
    return None if settings is None else SnapshotKeeper(settings, find, seam)


def checked(settings: Snapshots | None, find: Callable[[], Holdings], world_size: int = 1) -> None:
    """Raise ``ConfigError`` if snapshots are wished for and cannot be taken here, or their directory cannot be made."""
    if settings is None:
        return
    try:
        reason = find().obstacle()
        plain_of(find())
    except RLWatchError as error:
        reason = str(error)
    if world_size > 1 and reason is None:
        reason = f"this training has {world_size} ranks, and only one process is supported; {INSTEAD}"
    if reason is not None:
        raise ConfigError(f"snapshots cannot be taken: {reason}")
    if settings.where is not None:
        try:
            Path(settings.where).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"snapshots: where={str(settings.where)!r} cannot be made: {error}") from None
