"""Every fault a run must survive: how it is made, how often, and what came of it, on a page.

``python tests/faults/faults.py`` (``make faults``) goes through all of them and writes ``docs/reliability.md``;
``--only kill`` those whose name begins so, ``--quick`` one or two trials of each, ``--resume`` what an interrupted run
has not tried. The exit code is 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from faultchild import kept_row, row
from faultlab import (
    PATIENCE_S,
    ROOT,
    Child,
    Disk,
    Judged,
    Lab,
    NotPermittedError,
    Receiver,
    Tally,
    account,
    compare,
    environment,
    locked,
    rlwatch,
    rng_of,
    stored,
)

from rlwatch.errors import RLWatchError
from rlwatch.records import SHED, Command, RunState
from rlwatch.store.url import open_store

PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "build" / "faults" / "results.json"
END_S = 15.0
"""Longest that an end may take: of the ``with`` block, of the process after SIGTERM."""
CALL_S = 1.0
"""Longest that ``run.log`` may take while the disk does not answer; a busy machine takes a few milliseconds."""

Trial = Callable[[Lab, random.Random, Tally], None]


@dataclass(frozen=True)
class Fault:
    """One line of the table. ``quick`` and ``full``: trials in each tier; ``may_lose``: rows lost must only be counted."""

    name: str
    title: str
    trial: Trial
    quick: int
    full: int
    may_lose: bool = False

    def broken(self, tally: Tally) -> bool:
        return tally.failed or (tally.lost + tally.unjudged > 0 and not self.may_lose)


@dataclass
class Outcome:
    """What became of one fault. ``unmeasured``: why nothing is claimed."""

    tally: Tally = field(default_factory=Tally)
    unmeasured: str = ""
    seconds: float = 0.0

    def add(self, other: Outcome) -> None:
        self.tally.add(other.tally)
        self.unmeasured = self.unmeasured or other.unmeasured
        self.seconds += other.seconds


# Killed: what run.log returned from is there

KILL_WINDOW = {2: 4.0, 10: 3.0, 100: 2.5, 1000: 2.5, 0: 1.5}
ROWS_FOR = {2: 100, 10: 300, 100: 2000, 1000: 10_000, 0: 20_000}


def killed(lab: Lab, rng: random.Random, tally: Tally, *, rate: int, hold: bool = False) -> None:
    """SIGKILL at a random moment; then somebody looks, in one of the ways people look."""
    with lab.place() as place:
        store = place / "store"
        options: dict[str, Any] = {"rate": rate, "rows": ROWS_FOR[rate], "hold": hold, "end": "linger"}
        with Child(place, store=str(store), **options) as child:
            child.wait_rows(1)
            time.sleep(rng.uniform(0.05, KILL_WINDOW[rate]))
            if hold and rng.random() < 0.7:
                _wait_until(lambda: child.acks.held_since > 0.0, 4.0)
                time.sleep(rng.uniform(0.0, 1.2))
            child.kill()
            tally.raised += child.acks.raised
            look(place, store, rng.choice(["read", "show", "next"]))
            account(tally, stored(store), [child.life])


def killed_at_start(lab: Lab, rng: random.Random, tally: Tally) -> None:
    """While the run is begun; the next attempt must find a run, or none, but no half of one."""
    with lab.place() as place:
        store = place / "store"
        with Child(place, store=str(store), rate=0, rows=2000, end="linger") as child:
            child.wait("imported")
            time.sleep(rng.choice([rng.uniform(0.0, 0.4), rng.uniform(0.0, 3.0)]))
            child.kill()
            account(tally, stored(store), [child.life])
            look(place, store, "next")


def killed_resuming(lab: Lab, rng: random.Random, tally: Tally, *, hold: bool = False) -> None:
    """A run resumed at step 10,000 and killed within its first seconds."""
    with lab.place() as place:
        store = place / "store"
        lab.long_run(store)
        with Child(place, store=str(store), first=10_000, rate=20, rows=1000, hold=hold, end="linger") as child:
            child.wait_rows(1)
            time.sleep(rng.uniform(0.2, 5.0))
            child.kill()
            look(place, store, rng.choice(["read", "show"]))
            records = [record for record in stored(store) if record.attempt > 1]
            account(tally, records, [child.life])


def killed_again(lab: Lab, rng: random.Random, tally: Tally) -> None:
    """Three lives of one run, each killed and followed at once by the next, each beginning where it likes."""
    with lab.place() as place:
        store, lives = place / "store", []
        for life in range(3):
            child = Child(place, store=str(store), first=40 * life, rate=200, rows=2000, end="linger")
            with child:
                child.wait_rows(1)
                time.sleep(rng.uniform(0.0, 1.0))
                child.kill()
                lives.append(child.life)
        account(tally, stored(store), lives)


def look(place: Path, store: Path, how: str) -> None:
    """Somebody looks: reads the store, asks the command line, or begins the next attempt."""
    if how == "show":
        done = rlwatch(place, "show", "run", "--store", store, "--format", "json")
        if done.returncode:
            raise RuntimeError(f"rlwatch show: {done.stderr[-500:]}")
    elif how == "next":
        begin_again(place, store)


def begin_again(place: Path, store: Path, hook: str = "", rows: int = 0, first: int = 0) -> None:
    """The next attempt, which must begin and end well."""
    env = {"RLWATCH_WEBHOOK_URL": hook} if hook else None
    with Child(place, env=env, store=str(store), rows=rows, first=first, rate=100, flush=30.0) as child:
        left = child.wait("left")
        if left["error"] or child.ended():
            raise RuntimeError(f"the next attempt: {left['error']} {child.stderr[-500:]}")


# Told: the NaN that killed the run


def nan_killed(lab: Lab, rng: random.Random, tally: Tally, *, who: str) -> None:
    """NaN, then SIGKILL 2 to 18 steps of 20 ms later; ``who`` looks next must tell it, once."""
    with lab.place() as place, Receiver() as receiver:
        store, at = place / "store", rng.randrange(5, 40)
        hook = {"RLWATCH_WEBHOOK_URL": receiver.url}
        with Child(place, env=hook, store=str(store), rate=50, rows=200, nan_from=at, end="linger") as child:
            child.wait_rows(at + 1 + rng.randrange(2, 19))
            child.kill()
            _look_and_tell(who, place, store, receiver)
            mine = [record for record in stored(store) if record.attempt == 1]
            account(tally, mine, [child.life], partial(row, nan_from=at))
        _told_once(tally, receiver)
        _on_record(tally, store)


def nan_hung(lab: Lab, rng: random.Random, tally: Tally, *, who: str = "watch", ahead_s: float = 0.0) -> None:
    """The trainer is killed while the receiver hangs: its message is leased by a dead process."""
    with lab.place() as place, Receiver("hang") as receiver:
        store, at = place / "store", rng.randrange(5, 30)
        do = {"0": [["clock", ahead_s]]} if ahead_s else {}
        hook = {"RLWATCH_WEBHOOK_URL": receiver.url}
        with Child(place, env=hook, store=str(store), rate=50, rows=2000, nan_from=at, end="linger", do=do) as child:
            if not receiver.wait(1):
                tally.problems.append("the trainer did not send")
            time.sleep(rng.uniform(0.0, 1.0))
            child.kill()
        receiver.behaviour = "ok"
        _look_and_tell(who, place, store, receiver)
        _told_once(tally, receiver)


def _look_and_tell(who: str, place: Path, store: Path, receiver: Receiver) -> None:
    """What a person does the next morning."""
    if who == "watch":
        rlwatch(place, "watch", store, "--once", hook=receiver.url)
    elif who == "next":
        begin_again(place, store, hook=receiver.url, rows=30, first=60)
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        dashboard = subprocess.Popen(
            [sys.executable, "-m", "rlwatch.cli", "ui", "--store", str(store), "--port", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment() | {"RLWATCH_WEBHOOK_URL": receiver.url},
            cwd=place,
        )
        try:
            _wait_until(lambda: bool(receiver.told()), 40.0)
            time.sleep(1.0)
        finally:
            dashboard.terminate()
            dashboard.wait(PATIENCE_S)


def _told_once(tally: Tally, receiver: Receiver) -> None:
    ids = set(receiver.told())
    tally.due += 1
    tally.untold += not ids
    tally.again += max(0, len(ids) - 1)


def _on_record(tally: Tally, store: Path) -> None:
    """The finding and the alert are there, one of each kind and onset."""
    place = open_store(store)
    found = [each for each in place.findings("run") if each.kind == "nonfinite"]
    alerts = [each for each in place.alerts("run") if each.kind == "nonfinite"]
    place.close()
    tally.judgements += 2
    tally.unjudged += (not found) + (not alerts)
    if len({(each.seq, each.metric, each.detector) for each in found}) != len(found) or len(alerts) > 1:
        tally.problems.append("a finding or an alert is there twice")


# Disks that are full, gone, read-only, slow

BAD = (90, 150)
JUDGED: dict[str, Any] = {"rows": 240, "rate": 100, "bad": list(BAD)}
STOPS = [80, 160]
OWN_ERROR = "the block's own"


def disturbed(
    lab: Lab,
    tally: Tally,
    place: Path,
    store: Path,
    *,
    begin: Callable[[], None] = lambda: None,
    end: Callable[[], None] = lambda: None,
    heard: bool = True,
    exact: bool = True,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> None:
    """Something is wrong from step 80 to 160, while the run collapses; afterwards all must be as if it had not been."""
    wanted, told = lab.twin(**JUDGED)
    with Receiver() as receiver:
        hook = {"RLWATCH_WEBHOOK_URL": receiver.url, **(env or {})}
        with Child(place, env=hook, store=str(store), stops=STOPS, **(JUDGED | options)) as child:
            child.wait("stop")
            begin()
            child.go()
            child.wait("stop", 2)
            if heard and not _wait_until(lambda: bool(child.said("heard")), 20.0):
                tally.problems.append("listeners did not hear of the NaN while it was so")
            end()
            child.go()
            left = settle(tally, child)
            rlwatch(place, "watch", store, "--once", hook=receiver.url)
            _lost_but_said(tally, store, child, left)
            if tally.lost:  # other rows, other judgements
                return
            compare(tally, Judged.of(store), wanted, exact=exact)
            if not exact:
                return
            ids = set(receiver.told())
            tally.due += told
            tally.untold += max(0, told - len(ids))
            tally.again += max(0, len(ids) - told)


def settle(tally: Tally, child: Child, error: str = "", *, code: int = 0) -> dict[str, Any]:
    """How the child was left: by itself, in time, with nothing but its own error."""
    tally.raised += child.acks.raised
    tally.slowest_s = max(tally.slowest_s, child.acks.slowest)
    try:
        left = child.wait("left")
    except (RuntimeError, TimeoutError) as problem:
        tally.raised += 1
        tally.problems.append(f"it did not end by itself: exit status {child.ended(0.1)}, {problem}"[:400])
        return {"counters": {}}
    got = left["error"] or ""
    if got != (f"RuntimeError: {error}" if error else ""):
        tally.raised += 1
        tally.problems.append(f"out of the with block: {got or 'nothing'}")
    status = child.ended(END_S * tally.slack)
    took = max(left["took"], time.monotonic() - left["at"])
    tally.ended_s = max(tally.ended_s, left["took"])
    tally.late += took > END_S * tally.slack or status is None
    if status not in (code, None):
        tally.raised += 1
        tally.problems.append(f"exit status {status}: {child.stderr[-300:]}")
    return left


def full_then_freed(lab: Lab, rng: random.Random, tally: Tally, *, kind: str = "tmpfs") -> None:
    with lab.place() as place, Disk(place, kind, 6 if kind == "tmpfs" else 24) as disk:
        disturbed(lab, tally, place, disk.store, begin=disk.fill, end=disk.free)


def full_at_the_end(lab: Lab, rng: random.Random, tally: Tally) -> None:
    """Nobody frees it: the block ends as it would have, and what is lost is counted."""
    with lab.place() as place, Disk(place) as disk:
        error = rng.choice(["", OWN_ERROR])
        with Child(place, store=str(disk.store), stops=STOPS[:1], error=error, **JUDGED) as child:
            child.wait("stop")
            disk.fill()
            child.go()
            left = settle(tally, child, error)
            disk.free()
            _lost_but_said(tally, disk.store, child, left)


def full_beyond_the_journal(lab: Lab, rng: random.Random, tally: Tally) -> None:
    """The same with more rows than the journal's own room holds: rows are lost, said by number and step, and the run
    ended as it did.
    """
    with lab.place() as place, Disk(place) as disk:
        rows = rng.randint(12_000, 16_000)
        with Child(place, store=str(disk.store), stops=STOPS[:1], rows=rows, rate=0.0) as child:
            child.wait("stop")
            disk.fill()
            child.go()
            settle(tally, child)
            disk.free()
            _told_at_the_end(tally, disk.store, child)


def _told_at_the_end(tally: Tally, store: Path, child: Child) -> None:
    """By a line of the process, and by events of the run, which ended in good order."""
    lost, source = account(tally, stored(store), [child.life]), open_store(str(store))
    events = [event.body for event in source.events("run") if event.kind == SHED]
    told = sum(body["n"] for body in events if "rows" in body["what"])
    said = re.findall(r"ends without ([\d,]+) rows? of steps? [\d, -]+, which", child.stderr)
    if told != lost or said != [f"{lost:,}"] * bool(lost):
        tally.unsaid += abs(lost - told)
        tally.problems.append(f"{lost} rows are lost; the run tells of {told}, the process of {said}")
    state = source.run("run").state
    if state is not RunState.FINISHED:
        tally.problems.append(f"it ended in good order and is {state.value}")


def _lost_but_said(
    tally: Tally,
    store: Path,
    child: Child,
    left: dict[str, Any],
    since: int = 0,
) -> None:
    """What came from step ``since`` on is there, or was counted."""
    try:
        records = stored(store)
    except RLWatchError:
        records = []
    lost = account(tally, records, [child.life], partial(row, bad=BAD), since=since)
    counted = sum(count for name, count in left["counters"].items() if "dropped" in name or "lost" in name)
    unsaid = max(0, lost - counted)
    tally.unsaid += unsaid
    if unsaid:
        tally.problems.append(f"{unsaid} of {lost} rows were lost and not counted")


def full_at_the_start(lab: Lab, rng: random.Random, tally: Tally) -> None:
    """Loud and early: one clear error of ours, before training begins."""
    with lab.place() as place, Disk(place) as disk:
        disk.fill()
        with Child(place, store=str(disk.store), rows=10) as child:
            _refused(tally, child, "StoreFullError")


def _refused(tally: Tally, child: Child, kind: str) -> None:
    status = child.ended()
    said = child.said("refused")
    if status != 3 or not said or not said[0]["error"].startswith(kind):
        tally.raised += 1
        tally.problems.append(f"wanted {kind}, got exit status {status}, {child.events[-1:]} {child.stderr[-300:]}")


def too_large(lab: Lab, rng: random.Random, tally: Tally) -> None:
    """EFBIG: RLIMIT_FSIZE at the size of the store's largest file, then none again."""
    do = {"80": [["small_files", 0]], "160": [["large_files", 0]]}
    with lab.place() as place:
        disturbed(lab, tally, place, place / "store", do=do)


def read_only(lab: Lab, rng: random.Random, tally: Tally) -> None:
    """The file system goes read-only under open files, for good (ext4, remount,abort)."""
    with (
        lab.place() as place,
        Disk(place, "ext4", 24) as disk,
        Child(place, store=str(disk.store), stops=STOPS[:1], **JUDGED) as child,
    ):
        child.wait("stop")
        disk.abort()
        child.go()
        _lost_but_said(tally, disk.store, child, settle(tally, child))


def removed(lab: Lab, rng: random.Random, tally: Tally, *, what: str) -> None:
    with lab.place() as place:
        store = place / "store"
        with Child(place, store=str(store), stops=STOPS[:1], error=rng.choice(["", OWN_ERROR]), **JUDGED) as child:
            child.wait("stop")
            shutil.rmtree(store / "run" if what == "run" else store)
            child.go()
            _lost_but_said(tally, store, child, settle(tally, child, child.options["error"]), since=STOPS[0])


def unwritable(lab: Lab, rng: random.Random, tally: Tally) -> None:
    """The directory of a trainer that is not root becomes somebody else's, and its own again."""
    if os.getuid() != 0:
        raise NotPermittedError("changing owners needs root")

    def give(store: Path, uid: int, mode: int) -> None:
        for path in [store, *store.rglob("*")]:
            os.chown(path, uid, -1)
            path.chmod(mode if path.is_dir() else mode & 0o666)

    with lab.place() as place:
        home = place / "home"
        home.mkdir()
        os.chown(home, 65534, 65534)
        store = home / "store"
        disturbed(
            lab,
            tally,
            place,
            store,
            begin=partial(give, store, 0, 0o555),
            end=partial(give, store, 65534, 0o700),
            nobody=True,
        )


def of_another_user(lab: Lab, rng: random.Random, tally: Tally) -> None:
    """A store that this user may not write: loud and early."""
    if os.getuid() != 0:
        raise NotPermittedError("becoming another user needs root")
    with lab.place() as place:
        begin_again(place, place / "store", rows=3)
        with Child(place, store=str(place / "store"), nobody=True, rows=3, first=3) as child:
            _refused(tally, child, "StoreError")


def held(lab: Lab, rng: random.Random, tally: Tally, *, file: str, seconds: float) -> None:
    """Another process holds the database's lock for so long."""
    with lab.place() as place:
        store, holders = place / "store", []

        def begin() -> None:
            if file == "control.db":
                other = open_store(store)
                other.submit(Command("c1", "run", "note", why="so that there is a control.db", created_at=time.time()))
                other.close()
            holders.append(locked(store / "run" / file, seconds))
            holders[0].__enter__()

        try:
            disturbed(lab, tally, place, store, begin=begin, heard=False)
        finally:
            for holder in holders:
                holder.__exit__(None, None, None)
        _not_slowed(tally)


def _not_slowed(tally: Tally, stall_s: float = 0.0) -> None:
    """No call waited; of a disk that hangs for ``stall_s`` at a time, one may wait for that, once."""
    if tally.slowest_s > CALL_S * tally.slack + 2 * stall_s:
        tally.late += 1
        tally.problems.append(f"run.log took {tally.slowest_s:.1f} s")


def frozen(lab: Lab, rng: random.Random, tally: Tally, *, on_s: float, off_s: float, times: int) -> None:
    """Every write waits: once for seconds, or again and again."""
    with lab.place() as place, Disk(place, "ext4", 24) as disk:

        def pulses() -> None:
            for _ in range(times):
                disk.freeze()
                time.sleep(on_s)
                disk.thaw()
                time.sleep(off_s)

        pulse = threading.Thread(target=pulses)

        def begin() -> None:
            pulse.start()
            time.sleep(0.05)

        try:
            disturbed(lab, tally, place, disk.store, begin=begin, end=pulse.join, heard=False)
        finally:
            if pulse.is_alive():
                pulse.join()
        _not_slowed(tally, on_s)


def suspended(lab: Lab, rng: random.Random, tally: Tally) -> None:
    """Stopped for seconds, twice, once in the collapse; the clock of the machine goes on."""
    do = {"80": [["suspend", rng.uniform(2.0, 8.0)]], "120": [["suspend", rng.uniform(2.0, 8.0)]]}
    with lab.place() as place:
        disturbed(lab, tally, place, place / "store", do=do, heard=False)


def truncated(lab: Lab, rng: random.Random, tally: Tally) -> None:
    """Another process empties the journal; the run goes on, and loses nothing."""
    do = {str(step): [["truncate", 0]] for step in (80, 100, rng.randrange(101, 159))}
    with lab.place() as place:
        disturbed(lab, tally, place, place / "store", do=do)


def truncated_and_killed(lab: Lab, rng: random.Random, tally: Tally) -> None:
    """The same, and a kill later: what was logged a second after the journal was emptied is there."""
    with lab.place() as place:
        store = place / "store"
        options: dict[str, Any] = {"rate": 100, "rows": 2000, "end": "linger", "do": {"80": [["truncate", 0]]}}
        with Child(place, store=str(store), **options) as child:
            child.wait_rows(180)
            time.sleep(rng.uniform(0.0, 1.0))
            child.kill()
            tally.raised += child.acks.raised
            look(place, store, rng.choice(["read", "show", "next"]))
            mine = [record for record in stored(store) if record.attempt == 1]
            account(tally, mine, [child.life])


def pressed(lab: Lab, rng: random.Random, tally: Tally) -> None:
    """The page cache is written back and dropped over and over, while another program fills it."""
    if os.getuid() != 0:
        raise NotPermittedError("dropping the page cache needs root")
    over = threading.Event()

    def press(file: Path) -> None:
        while not over.is_set():
            with file.open("wb") as filler:
                for _ in range(32):
                    filler.write(os.urandom(1 << 20))
                os.fsync(filler.fileno())
            Path("/proc/sys/vm/drop_caches").write_text("3")

    with lab.place() as place:
        presses = threading.Thread(target=press, args=(place / "filler",))

        def end() -> None:
            over.set()
            if presses.is_alive():
                presses.join()

        try:
            disturbed(lab, tally, place, place / "store", begin=presses.start, end=end)
        finally:
            end()
        _not_slowed(tally)


def no_descriptors(lab: Lab, rng: random.Random, tally: Tally) -> None:
    do = {"80": [["no_descriptors", 0]], "160": [["descriptors", 0]]}
    with lab.place() as place:
        disturbed(lab, tally, place, place / "store", do=do, heard=False)


def no_memory(lab: Lab, rng: random.Random, tally: Tally) -> None:
    do = {"80": [["no_memory", 0]], "155": [["memory", 0]]}
    with lab.place() as place:
        one_heap = {"MALLOC_ARENA_MAX": "1"}  # else each thread has room set aside that no limit takes away
        disturbed(lab, tally, place, place / "store", do=do, swallow=True, env=one_heap, heard=False, exact=False)


# SIGTERM: it always arrives


def terminated(
    lab: Lab,
    rng: random.Random,
    tally: Tally,
    *,
    rate: int = 100,
    trouble: str = "",
    hold: bool = False,
    own_handler: bool = False,
) -> None:
    """SIGTERM into a loop that swallows every Exception, in ``trouble`` or without."""
    options: dict[str, Any] = {"rate": rate, "rows": ROWS_FOR[rate], "hold": hold, "swallow": True}
    if trouble == "hung":
        options["bad"] = [10, 30]
    with ExitStack() as stack:
        place = stack.enter_context(lab.place())
        receiver = stack.enter_context(Receiver("hang" if trouble == "hung" else "ok"))
        store, wrong = _trouble(stack, trouble, place)
        if trouble == "resuming":
            lab.long_run(store)
            options["first"] = 10_000
        if wrong:
            options["stops"] = [40]
        hook = {"RLWATCH_WEBHOOK_URL": receiver.url}
        child = stack.enter_context(Child(place, env=hook, store=str(store), own_handler=own_handler, **options))
        child.wait_rows(5)
        if wrong:
            child.wait("stop")
            wrong()
            child.go()
        if trouble == "hung" and not receiver.wait(1):
            tally.problems.append("the trainer did not send")
        if trouble == "finishing":
            child.wait_rows(options["rows"])
        time.sleep(rng.uniform(0.0, 1.5 if rate else 0.2))
        _terminate(tally, child, 7 if own_handler else -15)
        if wrong or own_handler:  # what is lost is the other faults' question
            return
        expected = partial(row, bad=(10, 30)) if trouble == "hung" else kept_row
        records = [record for record in stored(store) if record.attempt == child.life.attempt]
        account(tally, records, [child.life], expected)


def _trouble(stack: ExitStack, trouble: str, place: Path) -> tuple[Path, Callable[[], object] | None]:
    """Where the store is, and what goes wrong with it."""
    store = place / "store"
    if trouble == "full":
        disk = stack.enter_context(Disk(place))
        return disk.store, disk.fill
    if trouble == "removed":
        return store, partial(shutil.rmtree, store)
    if trouble == "held":
        return store, partial(stack.enter_context, locked(store / "run" / "run.db", 40.0))
    return store, None


def _terminate(tally: Tally, child: Child, code: int = -15) -> None:
    at = child.terminate()
    status = child.ended(END_S * tally.slack + 5.0)
    took = time.monotonic() - at
    tally.ended_s = max(tally.ended_s, took)
    tally.raised += child.acks.raised
    if status is None:
        tally.late += 1
        tally.problems.append(
            f"SIGTERM was ignored for {took:.0f} s; it raised {child.acks.raised} times into the loop"
        )
    elif status != code:
        tally.raised += 1
        tally.problems.append(f"exit status {status}, not {code}: {child.stderr[-300:]}")
    elif took > END_S * tally.slack:
        tally.late += 1
        tally.problems.append(f"it took {took:.1f} s")


def terminated_at_start(lab: Lab, rng: random.Random, tally: Tally) -> None:
    with lab.place() as place, Child(place, store=str(place / "store"), rate=0, rows=20_000, end="linger") as child:
        child.wait("imported")
        time.sleep(rng.uniform(0.0, 0.4))
        _terminate(tally, child)
        account(tally, stored(place / "store"), [child.life])


# Clocks, two writers, forks, receivers


def clock_jumps(lab: Lab, rng: random.Random, tally: Tally, *, by_s: float) -> None:
    """While a message waits to be tried again; the trainer lives on, and tells within its usual patience."""
    with lab.place() as place, Receiver("500") as receiver:
        hook = {"RLWATCH_WEBHOOK_URL": receiver.url}
        options: dict[str, Any] = {"rate": 50, "rows": 400, "bad": [10, 30], "stops": [60], "end": "linger"}
        with Child(place, env=hook, store=str(place / "store"), do={"60": [["clock", by_s]]}, **options) as child:
            child.wait("stop")
            if not receiver.wait(1):
                tally.problems.append("the trainer did not send")
            receiver.behaviour = "ok"
            child.go()
            _wait_until(lambda: bool(receiver.told()), 45.0)
            _told_once(tally, receiver)
            child.wait_rows(400)
            _terminate(tally, child)
            account(tally, stored(place / "store"), [child.life], partial(row, bad=(10, 30)))


def two_writers(lab: Lab, rng: random.Random, tally: Tally) -> None:
    """The second is told at once and harms nothing; when the first is dead it may begin."""
    with lab.place() as place:
        store = place / "store"
        with Child(place, store=str(store), rate=100, rows=2000, end="linger") as first:
            first.wait_rows(20)
            with Child(place, store=str(store), rate=100, rows=50) as second:
                _refused(tally, second, "RunLockedError")
            time.sleep(rng.uniform(0.0, 0.5))
            first.kill()
            begin_again(place, store)
            account(tally, stored(store), [first.life])


def forked(lab: Lab, rng: random.Random, tally: Tally) -> None:
    """Four DataLoader-like workers log and finish in their copy of the run; then the parent is killed beside them."""
    with lab.place() as place:
        store = place / "store"
        with Child(place, store=str(store), rate=200, rows=2000, do={"60": [["fork", 4]]}, end="linger") as child:
            child.wait_rows(80)
            time.sleep(rng.uniform(0.2, 1.5))
            tally.raised += child.acks.raised
            child.kill()
            begin_again(place, store)  # at once: no lock lives on in the workers
            account(tally, stored(store), [child.life])
        time.sleep(1.5)  # the workers are gone, too: nothing of theirs came after
        account(Tally(), stored(store), [])


def receiver_fails(lab: Lab, rng: random.Random, tally: Tally, *, how: str) -> None:
    """While the run collapses and ends; when the receiver answers again, whoever watches tells it."""
    with lab.place() as place, Receiver(how) as receiver:
        store = place / "store"
        hook = {"RLWATCH_WEBHOOK_URL": receiver.url}
        with Child(place, env=hook, store=str(store), **JUDGED) as child:
            settle(tally, child)
            account(tally, stored(store), [child.life], partial(row, bad=BAD))
            _not_slowed(tally)
        receiver.behaviour = "ok"
        if how == "redirect":  # not followed and not tried again, which the log says
            return
        over = time.monotonic() + 45.0
        while not receiver.told() and time.monotonic() < over:
            rlwatch(place, "watch", store, "--once", hook=receiver.url)
            time.sleep(2.0)
        _told_once(tally, receiver)


def _wait_until(holds: Callable[[], bool], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


# Into training: hostile values and failures injected into every hook and thread, which have tests of their own

INTO_TRAINING = ROOT / "tests" / "faults" / "test_into_training.py"


def into_training(lab: Lab, rng: random.Random, tally: Tally) -> None:
    """Each test is one trial; one that fails is something that reached training, or was lost and not counted."""
    if not INTO_TRAINING.exists():
        raise NotPermittedError("tests/faults/test_into_training.py is not there")
    with lab.place() as place:
        report = place / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        subprocess.run([*command, str(INTO_TRAINING)], capture_output=True, env=environment(), cwd=ROOT, check=False)
        cases = list(ET.parse(report).getroot().iter("testcase"))
        bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
        tally.trials += len(cases) - 1
        tally.raised += len(bad)
        tally.problems.extend(str(case.get("name")) for case in bad)


def _kills() -> list[Fault]:
    out = []
    for rate in (2, 10, 100, 1000, 0):
        for hold in (False, True):
            pace = f"{rate:,} rows/s" if rate else "a tight loop"
            quick = 1 if (rate, hold) == (100, False) else 0
            out.append(
                Fault(
                    f"kill-{rate or 'tight'}{'-hold' if hold else ''}",
                    f"at {pace}" + (", a thread holding the interpreter lock for 1.5 s" if hold else ""),
                    partial(killed, rate=rate, hold=hold),
                    quick,
                    13,
                )
            )
    return out


GROUPS: dict[str, list[Fault]] = {
    "kill -9": [
        *_kills(),
        Fault("kill-start", "while the run is begun", killed_at_start, 1, 30),
        Fault("kill-resume", "in the first 5 s of a resume at step 10,000", killed_resuming, 0, 12),
        Fault(
            "kill-resume-hold",
            "the same, a thread holding the interpreter lock",
            partial(killed_resuming, hold=True),
            0,
            8,
        ),
        Fault("kill-again", "three lives in a row, each killed", killed_again, 0, 10),
    ],
    "The NaN that killed the run": [
        Fault(
            "nan-watch",
            "killed 2-18 steps after a NaN, then `rlwatch watch --once`",
            partial(nan_killed, who="watch"),
            1,
            30,
        ),
        Fault("nan-next", "the same, then the next attempt", partial(nan_killed, who="next"), 0, 12),
        Fault("nan-ui", "the same, then `rlwatch ui`", partial(nan_killed, who="ui"), 0, 4),
        Fault("nan-hung", "killed while the webhook hangs, then `rlwatch watch --once`", nan_hung, 0, 8),
        Fault("nan-hung-next", "the same, then the next attempt", partial(nan_hung, who="next"), 0, 4),
        Fault(
            "nan-hung-ahead",
            "the same, the dead trainer's clock an hour ahead",
            partial(nan_hung, ahead_s=3600.0),
            0,
            4,
        ),
    ],
    "Disks": [
        Fault("full-freed", "full for 80 steps, then freed (tmpfs)", full_then_freed, 1, 8),
        Fault("full-freed-ext4", "the same on ext4", partial(full_then_freed, kind="ext4"), 0, 4),
        Fault(
            "full-end",
            "full to the end, rows that fit the 1 MB of the journal, the block with and without an error of its own",
            full_at_the_end,
            1,
            8,
            may_lose=True,
        ),
        Fault("full-beyond", "full to the end, more rows than that", full_beyond_the_journal, 0, 4, may_lose=True),
        Fault("full-start", "full before the run begins", full_at_the_start, 0, 3),
        Fault("too-large", "no file may grow (EFBIG), then may again", too_large, 0, 6),
        Fault("read-only", "read-only for good under open files (ext4)", read_only, 0, 4, may_lose=True),
        Fault(
            "removed-run",
            "the run's directory is removed",
            partial(removed, what="run"),
            1,
            6,
            may_lose=True,
        ),
        Fault(
            "removed-store",
            "the store's directory is removed",
            partial(removed, what="store"),
            0,
            6,
            may_lose=True,
        ),
        Fault("unwritable", "the directory becomes another user's, then its own again", unwritable, 0, 4),
        Fault(
            "foreign",
            "the store is another user's from the start",
            of_another_user,
            1,
            3,
        ),
        Fault("held-3s", "`run.db` locked by another process for 3 s", partial(held, file="run.db", seconds=3.0), 1, 4),
        Fault("held-8s", "`run.db` locked for 8 s", partial(held, file="run.db", seconds=8.0), 0, 4),
        Fault("held-control", "`control.db` locked for 8 s", partial(held, file="control.db", seconds=8.0), 0, 4),
        Fault(
            "frozen",
            "every write waits for 3 s (ext4, frozen)",
            partial(frozen, on_s=3.0, off_s=0.0, times=1),
            0,
            4,
        ),
        Fault(
            "slow",
            "every write waits for 0.4 s, ten times",
            partial(frozen, on_s=0.4, off_s=0.1, times=10),
            0,
            3,
        ),
        Fault(
            "pressed",
            "the page cache is written back, dropped and filled by another program, over and over",
            pressed,
            0,
            4,
        ),
        Fault("truncated", "another program empties the journal three times", truncated, 1, 6),
        Fault(
            "truncated-kill", "the journal is emptied, and the run killed a second later", truncated_and_killed, 0, 8
        ),
        Fault("descriptors", "no file descriptor is left for 80 steps", no_descriptors, 0, 6),
        Fault("memory", "no memory is left for 80 steps (RLIMIT_AS)", no_memory, 1, 6, may_lose=True),
    ],
    "SIGTERM": [
        Fault("term", "at 100 rows/s", terminated, 1, 8),
        Fault("term-tight", "in a tight loop", partial(terminated, rate=0), 0, 10),
        Fault(
            "term-finish",
            "while the `with` block finishes after a tight loop",
            partial(terminated, rate=0, trouble="finishing"),
            0,
            6,
        ),
        Fault("term-hold", "a thread holding the interpreter lock for 1.5 s", partial(terminated, hold=True), 0, 6),
        Fault("term-hung", "while the webhook hangs", partial(terminated, trouble="hung"), 0, 6),
        Fault("term-full", "on a full disk", partial(terminated, trouble="full"), 0, 8),
        Fault("term-removed", "after the store was removed", partial(terminated, trouble="removed"), 0, 4),
        Fault("term-held", "while another process locks `run.db`", partial(terminated, trouble="held"), 0, 4),
        Fault(
            "term-resume",
            "in the first 1.5 s of a resume at step 10,000",
            partial(terminated, trouble="resuming"),
            0,
            6,
        ),
        Fault("term-start", "while the run is begun", terminated_at_start, 0, 12),
        Fault("term-own", "with a handler of the trainer's own", partial(terminated, own_handler=True), 1, 3),
    ],
    "Clocks, processes": [
        Fault(
            "clock-back",
            "the clock goes back an hour while a message waits to be tried again",
            partial(clock_jumps, by_s=-3600.0),
            0,
            4,
        ),
        Fault("clock-on", "the clock goes on an hour", partial(clock_jumps, by_s=3600.0), 0, 4),
        Fault("suspended", "stopped for 2 to 8 s, twice (SIGSTOP)", suspended, 0, 6),
        Fault("two-writers", "a second process writes the same run", two_writers, 1, 8),
        Fault("fork", "four forked workers log and finish, the parent is killed", forked, 1, 8),
    ],
    "Receivers of alerts": [
        Fault(f"receiver-{how}", what, partial(receiver_fails, how=how), quick, 3)
        for how, what, quick in (
            ("hang", "takes the request and never answers", 1),
            ("trickle", "answers a byte every 0.2 s for ever", 0),
            ("reset", "resets the connection", 0),
            ("500", "answers 500", 0),
            ("redirect", "redirects to itself for ever", 0),
        )
    ],
    "Into training": [
        Fault("into-training", "hostile values, failures injected into every hook and thread", into_training, 0, 1),
    ],
}
FAULTS = [fault for group in GROUPS.values() for fault in group]

# Running them


def trial_of(fault: Fault, number: int, lab: Lab) -> Outcome:
    """One trial; whatever goes wrong in it is told, not raised."""
    began, tally = time.monotonic(), Tally(trials=1, slack=lab.slack)
    try:
        fault.trial(lab, rng_of(fault.name, number), tally)
    except NotPermittedError as error:
        return Outcome(Tally(), f"not permitted on this machine: {error}")
    except Exception as error:
        tally.problems.append(f"trial {number}: {type(error).__name__}: {error}"[:1200])
    return Outcome(tally, seconds=time.monotonic() - began)


def run(
    faults: Sequence[Fault], lab: Lab, *, quick: bool, jobs: int, until: float = math.inf
) -> Iterator[tuple[Fault, Outcome]]:
    """All trials, so many at a time; each fault as soon as it is done. What has not begun by ``until`` is left out."""

    def one(fault: Fault, number: int) -> Outcome:
        return Outcome(unmeasured="out of time") if time.monotonic() > until else trial_of(fault, number, lab)

    with ExitStack() as stack:
        pool = ThreadPoolExecutor(jobs)
        stack.callback(pool.shutdown, cancel_futures=True)
        trials = [(f, [pool.submit(one, f, n) for n in range(f.quick if quick else f.full)]) for f in faults]
        for fault, futures in trials:
            if futures:
                whole = Outcome()
                for each in futures:
                    whole.add(each.result())
                yield fault, whole


def lost_words(tally: Tally) -> str:
    """What was at stake, and lost."""
    words = [f"{tally.lost:,} of {tally.rows:,} rows"] if tally.rows else []
    if tally.judgements:
        words.append(f"{tally.unjudged} of {tally.judgements} judgements")
    if tally.due:
        words.append(f"{tally.untold} of {tally.due} messages")
    return ", ".join(words) or "nothing at stake"


def bound_words(fault: Fault, tally: Tally) -> str:
    """What remains, as measured."""
    words = []
    if tally.losing and tally.oldest_s:
        words.append(f"in {tally.losing} trials, the oldest row lost {tally.oldest_s:.2f} s old")
    if tally.lost and fault.may_lose:
        words.append("all counted" if not tally.unsaid else f"{tally.unsaid:,} not counted")
    if tally.wrong:
        words.append(f"{tally.wrong:,} rows twice or changed")
    if tally.again:
        words.append(f"{tally.again} told again")
    if tally.late:
        words.append(f"{tally.late} late")
    if tally.ended_s:
        words.append(f"ended within {tally.ended_s:.1f} s")
    if fault.name.startswith(("held", "frozen", "slow", "pressed", "receiver")):
        words.append(f"`run.log` {tally.slowest_s * 1e3:.0f} ms at most")
    return "; ".join(words) or "none"


def page(outcomes: dict[str, Outcome], command: str, machine: str, peers: str = "") -> str:
    """``docs/reliability.md``; ``peers``: the table of ``benchmarks/durability.py``."""
    kills = sum(each.tally.trials for name, each in outcomes.items() if name.startswith("kill"))
    kills += 2 * outcomes.get("kill-again", Outcome()).tally.trials  # of three lives
    lines = [
        "# Fault tests: what survives what",
        "",
        f"Written by `{command}` ({machine}); do not edit. Processes, disks and sockets are real, and "
        f"`tests/faults/faults.py` defines each fault. {kills} runs were killed with SIGKILL at random moments. Another "
        "process then checked every row whose `run.log` had returned: to the bit, once, in order.",
        "",
        "* **lost**: rows whose `run.log` had returned; findings, forecasts and alerts that an undisturbed run of the "
        "same rows has; messages that were due and not sent exactly once.",
        "* **raised**: exceptions out of rlwatch into the program, errors of the program replaced, and processes that ended "
        "differently from without rlwatch.",
        "* **bound**: the remaining delay, as measured; an end (of the `with` block, or after SIGTERM) may take "
        f"{END_S:.0f} s.",
    ]
    for group, faults in GROUPS.items():
        lines += ["", f"## {group}", "", "| fault | trials | lost | raised | bound |", "|---|---:|---|---:|---|"]
        for fault in faults:
            outcome = outcomes.get(fault.name, Outcome(unmeasured="not run"))
            tally = outcome.tally
            if not tally.trials:
                lines.append(f"| {fault.title} | 0 | not measured: {outcome.unmeasured or 'not run'} | | |")
                continue
            mark = " **broken**" if fault.broken(tally) else ""
            cells = (f"{tally.trials}", lost_words(tally), f"{tally.raised}", bound_words(fault, tally) + mark)
            lines.append(f"| {fault.title} | {' | '.join(cells)} |")
    if peers:
        lines += [
            "",
            "## Compared with other tools",
            "",
            "Rows logged before SIGKILL and not readable afterwards (`benchmarks/durability.py`): 10 scalars a step, each tool as "
            "installed, wandb offline. `oldest lost` is the age of the oldest of them, over the kills that lost any.",
            "",
            peers,
        ]
    return "\n".join([*lines, ""])


def peers_table() -> str:
    """What ``benchmarks/durability.py`` came to last; nothing if it was not run."""
    found = RESULTS.with_name("durability.json")
    if not found.exists():
        return ""
    told = json.loads(found.read_text())
    return "\n".join([told["head"], *told["lines"]])


def machine_words() -> str:
    """Where it was measured."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return (
        f"{os.cpu_count()} cores of {cpu}, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Befall runs with every fault, and write docs/reliability.md.")
    parser.add_argument("--only", default="", help="faults whose name begins so (commas: several); writes no page")
    parser.add_argument("--quick", action="store_true", help="the few trials of the test suite; writes no page")
    parser.add_argument("--jobs", type=int, default=4, help="trials at a time")
    parser.add_argument("--minutes", type=float, default=20.0, help="after so long the rest is left out, and said so")
    parser.add_argument("--resume", action="store_true", help="leave out faults whose figures an interrupted run kept")
    parser.add_argument("--page", action="store_true", help="try nothing: write the page of the figures kept last")
    asked = parser.parse_args(arguments)
    if asked.page:
        PAGE.write_text(page(_known(), "make faults` in parts, with `faults.py --page", machine_words(), peers_table()))
        return 0
    chosen = [f for f in FAULTS if f.name.startswith(tuple(asked.only.split(",")))]
    if asked.resume:
        chosen = [f for f in chosen if not _measured(f, _known())]
    elif not asked.only and not asked.quick:
        RESULTS.unlink(missing_ok=True)
    outcomes: dict[str, Outcome] = {}
    end = time.monotonic() + 60.0 * asked.minutes
    with tempfile.TemporaryDirectory(prefix="rlwatch-faults-") as scratch:
        Path(scratch).chmod(0o755)
        for fault, outcome in run(chosen, Lab(Path(scratch)), quick=asked.quick, jobs=asked.jobs, until=end):
            outcomes[fault.name] = outcome
            _tell(chosen.index(fault) + 1, len(chosen), fault, outcome)
            if not asked.quick:
                _keep({fault.name: outcome})
    if not asked.only and not asked.quick:
        command = "make faults` in parts, with `faults.py --resume" if asked.resume else "make faults"
        PAGE.write_text(page(_known(), command, machine_words(), peers_table()))
    broken = [f.name for f in chosen if f.name in outcomes and f.broken(outcomes[f.name].tally)]
    unmeasured = [f"{name} ({each.unmeasured})" for name, each in outcomes.items() if each.unmeasured]
    print(f"\n{len(outcomes)} faults, {len(broken)} broken: {', '.join(broken) or 'none'}")
    if unmeasured:
        print(f"NOT MEASURED: {'; '.join(unmeasured)}")
    return int(bool(broken))


def _tell(number: int, of: int, fault: Fault, outcome: Outcome) -> None:
    tally = outcome.tally
    verdict = "NOT MEASURED" if outcome.unmeasured else "BROKEN" if fault.broken(tally) else "ok"
    print(
        f"[{number:>2}/{of}] {fault.name:<18} {verdict:<7} {tally.trials:>3} trials  lost {lost_words(tally)}; "
        f"raised {tally.raised}; {bound_words(fault, tally)}  ({outcome.seconds:.0f} s)",
        flush=True,
    )
    for problem in [*dict.fromkeys(tally.problems)][:4] + ([outcome.unmeasured] if outcome.unmeasured else []):
        print(f"        {problem}", flush=True)


def _keep(outcomes: dict[str, Outcome]) -> None:
    """Add figures to those of other faults, each as soon as it is tried: an interrupted run goes on with ``--resume``."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    known = {name: asdict(outcome) for name, outcome in (_known() | outcomes).items()}
    new = RESULTS.with_suffix(".new")
    new.write_text(json.dumps(known, indent=1))
    new.replace(RESULTS)


def _measured(fault: Fault, known: Mapping[str, Outcome]) -> bool:
    """Whether all trials of the fault are among the figures kept, or nothing can be tried here."""
    kept = known.get(fault.name, Outcome(unmeasured="not run"))
    return kept.tally.trials >= fault.full or kept.unmeasured.startswith("not permitted")


def _known() -> dict[str, Outcome]:
    """The figures kept last, of every fault that was tried."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {name: Outcome(Tally(**each.pop("tally")), **each) for name, each in known.items()}


if __name__ == "__main__":
    raise SystemExit(main())
