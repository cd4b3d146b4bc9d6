"""Snapshots of the training state during a run: when they are taken, which are kept, and which are good to return to.

A :class:`SnapshotKeeper` is called at every safe boundary. It takes a snapshot when one is due and the budgets of
memory and time allow it. It marks an older one as good once the run's rows up to it have been judged as sound
(:mod:`rlwatch.monitor.step_judge`).

With several ranks each keeps its own part. Rank 0 decides for all when one is taken, which are kept and which are good
(:class:`SnapshotPlan`). All ranks take a snapshot at the same boundary, or none does (:class:`TakeTogether`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlwatch.control.commands import LAST_GOOD, TAKE_SNAPSHOT
from rlwatch.error_boundary import ErrorBoundary, log_message
from rlwatch.errors import ConfigError, RLWatchError
from rlwatch.integrations.snapshot_state import (
    Fence,
    Holdings,
    SideCopier,
    SnapshotFile,
    StateCopy,
    check_fits,
    plain_of,
    put_back,
    read_snapshot,
    tensors_of,
    writable,
    write_snapshot,
)
from rlwatch.records import JSON, SNAPSHOTS, Command
from rlwatch.run.machine import container_memory

GIB = float(1 << 30)
DEFAULT_PART = 0.5
"""Default memory budget, as a part of the memory that is free at the first snapshot, if ``memory_gb`` is not given."""
UNJUDGED = "the rows up to it have not been judged"
BESIDE_GOOD = 3
"""Number of snapshots kept in addition to the good ones: the first, the newest, and one that is not judged yet."""


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Settings of snapshots of the training state: how often, how many, and at what cost.

    Parameters
    ----------
    every
        Steps between two snapshots, an integer >= 1. A snapshot is taken at the next safe boundary (between rollouts).
    keep
        Good snapshots that are kept in addition to the first and the newest one, an integer >= 3.
    memory_gb
        Host memory that all snapshots of this process may take, in GiB, > 0. None: half of what is free at the first
        snapshot.
    share
        Part of the training thread's time that taking snapshots may cost, in (0, 1]. If one takes longer, they become
        rarer. 1: no limit.
    where
        Directory to which good snapshots are also written, on a background thread. Written ones leave the memory first.
        None: nothing is written.

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
        """Return the settings for ``wish``: None for False, the defaults for True, and ``Snapshots`` objects unchanged.

        Raises ``ConfigError`` for any other value.
        """
        if isinstance(wish, cls):
            return wish
        if isinstance(wish, bool):
            return cls() if wish else None
        raise ConfigError(f"snapshots must be True, False or Snapshots(...), got {wish!r}")


# One snapshot, and which of several are kept.


@dataclass(slots=True)
class Snapshot:
    """One snapshot: the training state after ``step``, in memory (``kept``), on disk (``file``) or both.

    ``good`` is True if the run was sound up to it, False if not (``why_not`` has the reason), and None while the rows
    up to it are not judged. ``fence`` marks the end of a copy that a device is still making.
    """

    step: int
    kept: StateCopy | None
    fence: Fence = field(default_factory=Fence)
    good: bool | None = None
    why_not: str = UNJUDGED
    file: SnapshotFile | None = None
    writing: bool = False
    unwritable: bool = False
    dropped: bool = False

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory that the snapshot occupies, 0 if it is only on disk."""
        return 0 if self.kept is None else self.kept.nbytes

    def state(self) -> StateCopy:
        """Return the copied state, from memory or else from the file.

        Raises ``RLWatchError`` if the file is damaged, or if the snapshot is neither in memory nor on disk.
        """
        self.fence.wait()
        if self.kept is not None:
            return self.kept
        if self.file is None:
            raise RLWatchError(f"the snapshot of step {self.step} is neither in memory nor on disk")
        return read_snapshot(self.file)


def to_drop(snapshots: Sequence[Snapshot]) -> Snapshot | None:
    """Return the least useful of ``snapshots``, or None: a bad one, else one not judged yet, else a good one close to
    others.

    Never dropped are the first, the newest, the newest good one and the oldest that is not judged, which is judged
    next. The older snapshots are, the farther apart they may lie, because a failure may be detected late.
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
    """Return the memory that this process may still take, in bytes; infinite if it is not known."""
    try:
        free = float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        free = next((1024.0 * float(line.split()[1]) for line in text.splitlines() if "MemAvailable" in line), free)
    except (OSError, ValueError):
        free = float("inf")
    limit = container_memory()
    return free if limit is None else min(free, limit[1])


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """A decision of rank 0 that all ranks execute: take a snapshot, keep some of the older ones, and adopt the
    verdicts.

    Attributes
    ----------
    step
        The step that has ended, after which the snapshot is taken.
    keep
        Steps of the older snapshots to keep.
    known
        Verdicts on older snapshots: step, True if it is good, and the reason if it is not.
    """

    step: int
    keep: tuple[int, ...] = ()
    known: tuple[tuple[int, bool, str], ...] = ()

    def plain(self) -> dict[str, JSON]:
        """Return the plan as JSON values, for the arguments of a command."""
        return {"step": self.step, "keep": list(self.keep), "known": [list(one) for one in self.known]}

    @classmethod
    def of(cls, args: Mapping[str, JSON]) -> SnapshotPlan:
        """Return the plan that :meth:`plain` wrote into ``args``."""
        given: Mapping[str, Any] = args
        known = tuple((int(step), bool(good), str(why)) for step, good, why in given["known"])
        return cls(int(given["step"]), tuple(int(step) for step in given["keep"]), known)


@dataclass(frozen=True, slots=True)
class SnapshotsToRemove:
    """Snapshots to remove in order to free memory: ``release`` are on disk and leave the memory, ``drop`` are
    deleted.
    """

    release: list[Snapshot] = field(default_factory=list)
    drop: list[Snapshot] = field(default_factory=list)


def processes_here() -> int:
    """Return how many ranks share this machine's memory, from the launcher's environment variables; 1 without them."""
    count = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("RAY_LOCAL_WORLD_SIZE") or "1"
    return max(1, int(count)) if count.isdigit() else 1


class SnapshotKeeper:
    """Owner of the snapshots of one process, which takes, judges, keeps and returns them on the training thread.

    Parameters
    ----------
    settings
        The user's settings.
    find
        Returns the trainer's current objects to copy. May raise ``RLWatchError``.
    error_boundary
        Error boundary that leads to the run, its health and its events.
    available
        Returns the bytes of memory that are still free.
    seconds
        Monotonic clock, in seconds.
    owner
        Returns run id and rank for the names of files; by default those of the run.
    """

    def __init__(
        self,
        settings: Snapshots,
        find: Callable[[], Holdings],
        error_boundary: ErrorBoundary,
        *,
        available: Callable[[], float] = free_bytes,
        seconds: Callable[[], float] = time.perf_counter,
        owner: Callable[[], tuple[str, int]] | None = None,
    ) -> None:
        self._owner = owner or self._run_and_rank
        self.settings = settings
        self.taken: list[Snapshot] = []
        """The kept snapshots, ordered by step."""
        self._find = find
        self._error_boundary = error_boundary
        self._available = available
        self._seconds = seconds
        self._copier = SideCopier(error_boundary)
        self._budget: float | None = None
        self._last: tuple[int, float] | None = None
        self._cost_s = 0.0
        self._said: set[str] = set()
        self._disk = threading.Lock()
        self._planned_at: float | None = None
        self._made: Snapshot | None = None

    @property
    def last_good(self) -> Snapshot | None:
        """Return the newest snapshot that was judged good, or None."""
        return next((one for one in reversed(self.taken) if one.good), None)

    def begin(self, step: int) -> None:
        """Begin to take snapshots after ``step``, at the start of training or after a return to an earlier step.

        Snapshots of later steps belong to another training and are dropped.
        """
        self.forget_after(step - 1)
        self._last = None
        self._judge()
        if self._due(step):
            self._take(step)

    def newest_good(self) -> int | None:
        """Judge the snapshots that are not judged yet, and return the step of the newest good one, or None."""
        self._judge()
        return None if self.last_good is None else self.last_good.step

    def look(self, step: int) -> None:
        """Judge snapshots, and take one if it is due. Call it after ``step``, at a point of training at which commands
        may be executed.

        With several ranks :class:`TakeTogether` takes the snapshot.
        """
        if self._last is not None and step < self._last[0]:
            self.begin(step)
            return
        self._judge()
        if not self._together and self._due(step):
            self._take(step)

    # Several ranks.

    def plan(self, step: int) -> SnapshotPlan | None:
        """Return the plan of a snapshot that all ranks take after ``step``, or None.

        Only rank 0 of a run with several ranks returns a plan, and only if a snapshot is due and there is memory for
        it.
        """
        if not self._together or not self._records or not self._due(step):
            return None
        room = self._room(self._needed(), step)
        if room is None:
            self._last = (step, self._seconds())
            return None
        gone = {one.step for one in room.drop}
        known = [(one.step, one.good, one.why_not) for one in self.taken if one.good is not None]
        keep = tuple(one.step for one in self.taken if one.step not in gone)
        return SnapshotPlan(step, keep, tuple(one for one in known if one[0] in keep))

    def allows(self, plan: SnapshotPlan) -> None:
        """Raise ``RLWatchError`` if this rank has not enough memory for the snapshot in ``plan``. Changes nothing."""
        self._planned_at = self._seconds()
        if any(one.step == plan.step for one in self.taken):
            raise RLWatchError(f"there is a snapshot of step {plan.step} already")
        needed = self._needed()
        held = sum(one.nbytes for one in self.taken if one.step in plan.keep and one.file is None)
        if held + needed > self._allowed():
            raise RLWatchError(self._full(needed, held))

    def carry_out(self, plan: SnapshotPlan) -> None:
        """Execute ``plan`` on this rank: drop snapshots, adopt the verdicts, and take the new snapshot.

        Raises ``RLWatchError`` if there is no memory for it.
        """
        for one in [one for one in self.taken if one.step not in plan.keep]:
            self._drop(one)
        judged = {step: (good, why_not) for step, good, why_not in plan.known}
        for one in self.taken:
            if one.good is None and one.step in judged:
                one.good, one.why_not = judged[one.step]
        self._write_good()
        self._take(plan.step)
        self._made = next((one for one in self.taken if one.step == plan.step), None)
        if self._made is None:
            raise RLWatchError("there is no memory for a snapshot")

    def settled(self, plan: SnapshotPlan, refusal: str | None) -> None:
        """Keep the snapshot of ``plan`` if all ranks have taken it (``refusal`` is None); drop it if a rank refused."""
        ended = self._seconds()
        self._last, self._cost_s = (plan.step, ended), ended - (self._planned_at or ended)
        made, self._made = self._made, None
        if refusal is not None:
            if made is not None:
                self._drop(made)
            known = any(one.step == plan.step for one in self.taken)  # from a roll-back at this boundary
            if self._records and not known:
                self._say("ranks", f"no snapshot was taken after step {plan.step}: {refusal}")

    def _needed(self) -> int:
        """Return the bytes that a snapshot would need now."""
        return sum(tensor.nbytes for tensor in tensors_of(self._find()).values())

    def _run_and_rank(self) -> tuple[str, int]:
        run = self._error_boundary.run
        return ("", 0) if run is None else (run.info.run_id, run.rank)

    @property
    def _together(self) -> bool:
        run = self._error_boundary.run
        return run is not None and run.world_size > 1

    @property
    def _records(self) -> bool:
        run = self._error_boundary.run
        return run is not None and run.rank == 0

    def find(self, to: str) -> Snapshot:
        """Return the snapshot that a command names: the last good one for ``"last-good"``, else that of the step
        ``to``.

        Raises ``RLWatchError`` with a list of the kept snapshots if there is no such snapshot.
        """
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
        """Return the steps of the kept snapshots and the verdicts on them, as text for messages."""
        words = {True: "good", False: "not good", None: "not judged"}
        return ", ".join(f"{one.step} ({words[one.good]})" for one in self.taken) or "none"

    def fits(self, snapshot: Snapshot) -> StateCopy:
        """Return the state in ``snapshot`` after checking that it can be restored now and that its weights are finite.

        Raises ``RLWatchError`` with the reason if it cannot.
        """
        kept = snapshot.state()
        check_fits(self._find(), kept)
        if not kept.finite:
            raise RLWatchError(f"the weights in the snapshot of step {snapshot.step} are not finite")
        return kept

    def now(self, step: int) -> Snapshot:
        """Return a snapshot of the current state after ``step``, without adding it to the kept ones.

        Raises ``RLWatchError`` if there is not enough memory.
        """
        held = self._find()
        needed = sum(tensor.nbytes for tensor in tensors_of(held).values())
        if needed > self._copier.spare_bytes and needed > self._available():
            raise RLWatchError(f"a copy of the state of now needs {needed / GIB:.2f} GiB of memory, which is not free")
        kept, fence = self._copier.copy(held)
        fence.wait()
        return Snapshot(step, kept, fence)

    def put_back(self, kept: StateCopy, before: StateCopy, *, generators: bool) -> None:
        """Restore the state ``kept`` into the trainer; restore ``before`` if that fails, and raise the error.

        ``generators``: restore the random generators, too. See :func:`~rlwatch.integrations.snapshot_state.put_back`.
        """
        put_back(self._find(), kept, before, generators=generators)

    def forget_after(self, step: int) -> None:
        """Drop the snapshots that were taken after ``step``."""
        for one in [one for one in self.taken if one.step > step]:
            self._drop(one)

    def rolled_back(self, to: Snapshot, undone: Snapshot) -> None:
        """Record a roll-back to the snapshot ``to``: drop the later snapshots, and add ``undone``, the state before the
        roll-back.

        The next snapshot is due ``every`` steps after the roll-back.
        """
        self.forget_after(to.step)
        self.taken.append(undone)
        self._last = (undone.step, self._seconds())

    # Taking one.

    def _due(self, step: int) -> bool:
        run = self._error_boundary.run
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
        room = self._room(needed, step)
        if room is None:
            self._last = (step, began)
            return
        for one in room.release:
            self._release(one)
        for one in room.drop:
            self._drop(one)
        kept, fence = self._copier.copy(held)
        first = not self.taken
        self.taken.append(Snapshot(step, kept, fence))
        self.taken.sort(key=lambda one: one.step)
        ended = self._seconds()
        self._last, self._cost_s = (step, ended), ended - began
        if first:
            self._tell(step, needed)

    def _tell(self, step: int, needed: int) -> None:
        if self._error_boundary.run is not None:
            settings = self.settings
            body = {"every": settings.every, "keep": settings.keep, "where": str(settings.where or "")}
            self._error_boundary.run.event(SNAPSHOTS, step, bytes=needed, **body)

    def _room(self, needed: int, step: int) -> SnapshotsToRemove | None:
        """Return how to free ``needed`` bytes after ``step``; None, with one log line, if that is impossible."""
        room, kept = SnapshotsToRemove(), list(self.taken)
        while sum(one.nbytes for one in kept if one not in room.release) + needed > self._allowed():
            here = [one for one in kept[:-1] if one.file is not None and one.kept is not None]
            written = next((one for one in here if one not in room.release), None)
            if written is not None:
                room.release.append(written)
                continue
            least = to_drop(kept) if len(kept) > 2 else None
            if least is None:
                self._say("memory", f"no snapshot is taken: {self._full(needed, sum(one.nbytes for one in kept))}")
                return None
            kept.remove(least)
            room.drop.append(least)
        kept.append(Snapshot(step, None))
        while len(kept) > self.settings.keep + BESIDE_GOOD and (least := to_drop(kept)) is not None:
            kept.remove(least)
            room.drop.append(least)
        return room

    def _full(self, needed: int, held: int) -> str:
        return (
            f"it needs {needed / GIB:.3g} GiB beside the {held / GIB:.3g} GiB of those kept, and memory_gb allows "
            f"{self._allowed() / GIB:.3g} GiB"
        )

    def _allowed(self) -> float:
        """Return the memory budget of this process in bytes, by default its share of the free memory."""
        if self._budget is None:
            given = self.settings.memory_gb
            share = DEFAULT_PART * self._available() / processes_here() if given is None else given * GIB
            self._budget = share
        return self._budget

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
            self._error_boundary.attempt("snapshot", snapshot.file.remove)

    # Judging snapshots, and writing the good ones to disk.

    def _judge(self) -> None:
        run = self._error_boundary.run
        if run is None:
            return
        health = run.health()
        for one in self.taken if self._records else ():
            if one.good is None and (why_not := health.unsound_after(one.step)) is not None:
                one.good, one.why_not = not why_not, why_not
        self._write_good()

    def _write_good(self) -> None:
        for one in self.taken:
            if one.good and self.settings.where is not None and not (one.file or one.writing or one.unwritable):
                self._write(one, Path(self.settings.where))

    def _write(self, snapshot: Snapshot, where: Path) -> None:
        (run_id, rank), kept = self._owner(), snapshot.kept
        if not run_id or kept is None:
            return
        path = where / run_id / f"snapshot-{snapshot.step}-rank{rank}.pt"
        snapshot.writing = True
        threading.Thread(
            target=self._error_boundary.guard_background,
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
            log_message(logging.WARNING, "rlwatch: %s", words)


class TakeTogether:
    """Handler of the internal command to take a snapshot on all ranks at the same point of training.

    If one rank fails, no rank keeps the snapshot.
    """

    kind: str = TAKE_SNAPSHOT

    def __init__(self, keeper: SnapshotKeeper) -> None:
        self._keeper = keeper

    def due(self, step: int) -> Command | None:
        """Return the command to take a snapshot after ``step``, on rank 0 if one is due; else None."""
        plan = self._keeper.plan(step)
        return None if plan is None else Command(uuid.uuid4().hex[:16], "", self.kind, plan.plain())

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` if this rank has not enough memory for the snapshot."""
        self._keeper.allows(SnapshotPlan.of(command.args))

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Take the snapshot on this rank."""
        self._keeper.carry_out(SnapshotPlan.of(command.args))
        return {}

    def settled(self, command: Command, refusal: str | None) -> None:
        """Keep the snapshot if all ranks took it (``refusal`` is None); drop it if a rank failed."""
        self._keeper.settled(SnapshotPlan.of(command.args), refusal)


def keeper_of(
    settings: Snapshots | None, find: Callable[[], Holdings], error_boundary: ErrorBoundary
) -> SnapshotKeeper | None:
    """Return the snapshot keeper of a run, or None if ``settings`` is None (snapshots are off).

    ``find`` returns the trainer's objects to copy, ``error_boundary`` is the run's error boundary.
    """
    return None if settings is None else SnapshotKeeper(settings, find, error_boundary)


def checked(settings: Snapshots | None, find: Callable[[], Holdings]) -> None:
    """Raise ``ConfigError`` if snapshots are on but not possible for this trainer, or if their directory cannot be
    created.

    ``find`` returns the trainer's objects to copy. None as ``settings`` means that snapshots are off.
    """
    if settings is None:
        return
    try:
        reason = find().obstacle()
        plain_of(find())
    except RLWatchError as error:
        reason = str(error)
    if reason is not None:
        raise ConfigError(f"snapshots cannot be taken: {reason}")
    if settings.where is not None:
        try:
            Path(settings.where).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"snapshots: where={str(settings.where)!r} cannot be made: {error}") from None
