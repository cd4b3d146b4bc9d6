"""What a fault needs: a child process to befall, a disk to fill, a receiver to fail, and the account afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from faultchild import Acks, kept_row

from rlwatch.errors import RunNotFoundError
from rlwatch.records import RunInfo, StepRecord
from rlwatch.store.url import open_store

ROOT = Path(__file__).parents[2]
CHILD = Path(__file__).with_name("faultchild.py")
PATIENCE_S = 60.0
"""Longest the laboratory waits for anything: what has not come by then does not come."""


class NotPermittedError(Exception):
    """This machine does not let us make the fault (no root, no loop devices): said, and nothing is claimed."""


@dataclass
class Tally:
    """What trials of one fault came to. ``problems``: each thing that should not have happened, in words."""

    trials: int = 0
    rows: int = 0
    """Calls of ``run.log`` that returned."""
    lost: int = 0
    losing: int = 0
    """Trials that lost a row."""
    oldest_s: float = 0.0
    """Age at its death of the oldest row lost."""
    unsaid: int = 0
    """Rows lost that no counter counted, where the process lived to say so."""
    wrong: int = 0
    """Rows stored twice, out of order, of somebody else or with other bits."""
    judgements: int = 0
    """Findings, forecasts and alerts that an undisturbed run has."""
    unjudged: int = 0
    """Of these, missing."""
    due: int = 0
    """Messages that should have been told."""
    untold: int = 0
    again: int = 0
    """Messages told again under another id."""
    raised: int = 0
    """Exceptions out of rlwatch into the loop, errors replaced, other ends of the process than its own."""
    late: int = 0
    """Ends that took longer than they may."""
    ended_s: float = 0.0
    slowest_s: float = 0.0
    """The longest that ``run.log`` took, where that is the question."""
    problems: list[str] = field(default_factory=list)
    slack: float = 1.0
    """How many times longer than promised things may take: the test suite asserts no seconds on a busy machine."""

    def add(self, other: Tally) -> None:
        for each in fields(self)[:-1]:
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            setattr(self, each.name, max(mine, theirs) if each.name.endswith("_s") else mine + theirs)

    @property
    def failed(self) -> bool:
        return any((self.wrong, self.unsaid, self.untold, self.again, self.raised, self.late)) or bool(self.problems)


class Child:
    """One process of ``faultchild.py``; killed when its ``with`` block ends."""

    def __init__(self, place: Path, *, env: Mapping[str, str] | None = None, **options: Any) -> None:
        name = f"child-{len(list(place.glob('child-*.acks')))}"
        self.options = {"rows": 100, "first": 0, **options}
        self.acks = Acks(place / f"{name}.acks", room=self.options["rows"] + 1)
        self._err = (place / f"{name}.err").open("w+")
        self.events: list[dict[str, Any]] = []
        self._died = 0.0
        self._news = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, CHILD, json.dumps(self.options | {"acks": str(self.acks.path)})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._err,
            env=environment() | dict(env or {}),
            cwd=place,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)
        self._reader.join(5.0)
        for stream in (self._process.stdin, self._process.stdout, self._err):
            with contextlib.suppress(OSError):
                stream.close()

    @property
    def stderr(self) -> str:
        return Path(self._err.name).read_text(errors="replace")

    def _read(self) -> None:
        for line in self._process.stdout:
            with self._news:
                self.events.append(json.loads(line))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def said(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.events if each["event"] == event]

    def wait(self, event: str, count: int = 1, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """The ``count``-th event of that name."""
        with self._news:
            if not self._news.wait_for(lambda: len(self.said(event)) >= count or self._over(), timeout_s):
                raise TimeoutError(f"the child never said {event!r}: {self.events[-3:]} {self.stderr[-800:]}")
        if len(self.said(event)) < count:
            raise RuntimeError(f"the child ended before it said {event!r}: {self.events[-3:]} {self.stderr[-800:]}")
        return self.said(event)[count - 1]

    def _over(self) -> bool:
        return not self._reader.is_alive() or self._process.poll() is not None

    def wait_rows(self, count: int, timeout_s: float = PATIENCE_S) -> None:
        """Until so many calls returned."""
        end = time.monotonic() + timeout_s
        while self.acks.count < count:
            if time.monotonic() > end or self._process.poll() is not None:
                raise RuntimeError(f"only {self.acks.count} of {count} rows: {self.events[-3:]} {self.stderr[-800:]}")
            time.sleep(0.002)

    def go(self) -> None:
        """On, after a stop."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL."""
        self._died = time.monotonic()
        self._process.kill()
        self._process.wait(PATIENCE_S)
        self._reader.join(5.0)

    def terminate(self) -> float:
        self._process.send_signal(signal.SIGTERM)
        return time.monotonic()

    def ended(self, timeout_s: float = PATIENCE_S) -> int | None:
        """The exit status; None if it goes on."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(5.0)
        return code

    @property
    def life(self) -> Life:
        """For the account: which attempt, and what it acknowledged."""
        begun = self.said("begun")
        return Life(begun[0]["attempt"] if begun else 0, self.options["first"], self.acks, self._died)


@dataclass(frozen=True, slots=True)
class Life:
    """One attempt of a run as its process saw it. ``died``: when it was killed, if it was."""

    attempt: int
    first: int
    acks: Acks
    died: float = 0.0


def environment() -> dict[str, str]:
    """Of children: this tree, one thread, a chance of each row to compare, nothing of the shell's own rlwatch."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RLWATCH_")}
    own |= {"PYTHONPATH": f"{ROOT}:{CHILD.parent}", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return own | {"RLWATCH_FORECAST_EVIDENCE": "own"}


# Reading what is there afterwards


def rlwatch(place: Path, *args: object, hook: str = "", timeout_s: float = 90.0) -> subprocess.CompletedProcess[str]:
    """The command, run to its end. A traceback is a problem whoever asked."""
    done = subprocess.run(
        [sys.executable, "-m", "rlwatch.cli", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment() | ({"RLWATCH_WEBHOOK_URL": hook} if hook else {}),
        cwd=place,
        check=False,
    )
    if "Traceback" in done.stderr:
        raise RuntimeError(f"rlwatch {' '.join(map(str, args))}: {done.stderr[-1500:]}")
    return done


def stored(store: Path, run_id: str = "run") -> list[StepRecord]:
    """All records, as a process that was not there reads them; none if the run was never begun."""
    place = open_store(store)
    try:
        return place.records(run_id)
    except RunNotFoundError:
        return []
    finally:
        place.close()


def bits(metrics: Mapping[str, float]) -> dict[str, bytes]:
    return {name: struct.pack("<d", value) for name, value in metrics.items()}


def account(
    tally: Tally,
    records: Sequence[StepRecord],
    lives: Sequence[Life],
    expected: Callable[[int], dict[str, float]] = kept_row,
    since: int = 0,
) -> int:
    """Set what is stored against what was acknowledged: every row there, once, in order, to the bit. Rows lost."""
    seqs = [record.seq for record in records]
    out_of_order = sum(a >= b for a, b in pairwise(seqs))
    if out_of_order:
        tally.wrong += out_of_order
        tally.problems.append(f"{out_of_order} rows out of order")
    lost_of_all = 0
    for life in lives:
        count = life.acks.count
        mine = [record for record in records if record.attempt == life.attempt]
        there = {record.step for record in mine}
        lost = [index for index in range(since, count) if life.first + index not in there]
        twice = len(mine) - len(there)
        foreign = sum(not life.first <= step <= life.first + count for step in there)  # one may be on its way
        changed = sum(not bits(expected(each.step)).items() <= bits(each.metrics).items() for each in mine)
        tally.rows += count - since
        tally.lost += len(lost)
        tally.losing += bool(lost)
        tally.wrong += twice + foreign + changed
        lost_of_all += len(lost)
        if lost and life.died:
            tally.oldest_s = max(tally.oldest_s, life.died - life.acks.when(lost[0]))
        if twice or foreign or changed:
            tally.problems.append(f"{twice} rows twice, {foreign} foreign, {changed} with other bits")
    return lost_of_all


@dataclass(frozen=True)
class Judged:
    """What was judged of a run, as it can be compared with another run of the same rows."""

    findings: frozenset[tuple[object, ...]]
    forecasts: frozenset[tuple[object, ...]]
    alerts: frozenset[tuple[object, ...]]
    ordered: bool

    @classmethod
    def of(cls, store: Path, run_id: str = "run") -> Self:
        place = open_store(store)
        found, forecast, alerts = place.findings(run_id), place.forecasts(run_id), place.alerts(run_id)
        place.close()
        steps = [finding.seq for finding in found]
        return cls(
            frozenset((f.detector, f.kind, f.severity, f.metric, f.step, f.onset_step, f.seq) for f in found),
            frozenset((f.step, f.seq, tuple(sorted(bits(f.metrics).items()))) for f in forecast),
            frozenset((a.alert_id, a.kind, a.severity, a.state, a.onset_step, a.resolved_step) for a in alerts),
            ordered=steps == sorted(steps),
        )

    def __len__(self) -> int:
        return len(self.findings) + len(self.forecasts) + len(self.alerts)


def compare(tally: Tally, got: Judged, wanted: Judged, *, exact: bool = True) -> None:
    """What an undisturbed run found, and this one did not; not ``exact``: count it, and no more."""
    tally.judgements += len(wanted)
    for what in ("findings", "forecasts", "alerts"):
        missing, more = (getattr(wanted, what) - getattr(got, what)), (getattr(got, what) - getattr(wanted, what))
        tally.unjudged += len(missing)
        if exact and (missing or more):
            sample = [str(each)[:110] for each in sorted(missing, key=str)[:2] + sorted(more, key=str)[:2]]
            tally.problems.append(
                f"{len(missing)} {what} missing, {len(more)} that an undisturbed run has not: {'; '.join(sample)}"
            )
    if not got.ordered:
        tally.problems.append("findings out of order")


# Receivers


class Receiver:
    """A webhook receiver whose behaviour may change: ok, 500, hang, trickle, reset or redirect."""

    def __init__(self, behaviour: str = "ok") -> None:
        self.behaviour = behaviour
        self.seen: list[tuple[str, str, dict[str, Any], bool]] = []
        """Message id, event, payload, and whether it was answered as taken."""
        self._news = threading.Condition()
        self._over = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.receiver = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/hook"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()

    def wait(self, count: int, timeout_s: float = PATIENCE_S) -> bool:
        """Until so many requests came, whatever was answered."""
        with self._news:
            return self._news.wait_for(lambda: len(self.seen) >= count, timeout_s)

    def told(self, kind: str = "nonfinite", event: str = "firing") -> list[str]:
        """Ids of the messages taken that tell of such an alert, each as often as it came."""
        return [
            key
            for key, what, payload, taken in self.seen
            if taken and what == event and any(each.get("kind") == kind for each in _alerts(payload))
        ]

    def answer(self, handler: BaseHTTPRequestHandler, headers: Mapping[str, str], payload: dict[str, Any]) -> None:
        behaviour = self.behaviour
        with self._news:
            event = headers.get("x-rlwatch-event", "")
            self.seen.append((headers.get("x-rlwatch-delivery", ""), event, payload, behaviour == "ok"))
            self._news.notify_all()
        getattr(self, f"_{behaviour}")(handler)

    def _ok(self, handler: BaseHTTPRequestHandler, status: int = 204, **headers: str) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    def _500(self, handler: BaseHTTPRequestHandler) -> None:
        self._ok(handler, 500)

    def _redirect(self, handler: BaseHTTPRequestHandler) -> None:
        self._ok(handler, 307, Location=self.url)

    def _hang(self, _: BaseHTTPRequestHandler) -> None:
        self._over.wait(120.0)

    def _trickle(self, handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while not self._over.wait(0.2):
            handler.wfile.write(b".")
            handler.wfile.flush()

    def _reset(self, handler: BaseHTTPRequestHandler) -> None:
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.close()


def _alerts(payload: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [payload.get("alert") or {}, *(payload.get("also") or [])]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    receiver: Receiver

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is not worth a traceback."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.receiver.answer(self, headers, json.loads(body))

    def log_message(self, *_: object) -> None:
        """Quiet."""


# Disks


class Disk:
    """A small file system of its own: a tmpfs, or an ext4 in a loop file, mounted for a ``with`` block."""

    def __init__(self, place: Path, kind: str = "tmpfs", megabytes: int = 6) -> None:
        self.path = place / "disk"
        self._image = place / "disk.img"
        self._kind, self._megabytes = kind, megabytes
        self._filler = self.path / "filler"
        self._frozen = False

    def __enter__(self) -> Self:
        self.path.mkdir()
        if self._kind == "tmpfs":
            _as_root("mount", "-t", "tmpfs", "-o", f"size={self._megabytes}m,mode=0755", "tmpfs", self.path)
            return self
        with self._image.open("wb") as file:
            file.truncate(self._megabytes << 20)
        _as_root("mkfs.ext4", "-q", "-m", "0", self._image)
        _as_root("mount", "-o", "loop", self._image, self.path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._frozen:
            self.thaw()
        _as_root("umount", "-l", self.path)
        self._image.unlink(missing_ok=True)

    @property
    def store(self) -> Path:
        return self.path / "store"

    def fill(self) -> None:
        """To the last byte."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (65536, 4096, 512, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def free(self) -> None:
        self._filler.unlink()

    def freeze(self) -> None:
        """Every write to it waits, as for a network disk that is gone."""
        _as_root("fsfreeze", "-f", self.path)
        self._frozen = True

    def thaw(self) -> None:
        _as_root("fsfreeze", "-u", self.path)
        self._frozen = False

    def abort(self) -> None:
        """Read-only from now on, with files open for writing, as after an error of the device."""
        os.sync()
        _as_root("mount", "-o", "remount,abort", self.path)


def _as_root(*command: object) -> None:
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError as error:
        raise NotPermittedError(f"{command[0]} is not installed here") from error
    if done.returncode:
        raise NotPermittedError(f"{' '.join(map(str, command[:4]))}...: {done.stderr.strip()[:160]}")


_LOCKER = """
import sqlite3, sys, time
db = sqlite3.connect(sys.argv[1], timeout=30.0, isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("held", flush=True)
time.sleep(float(sys.argv[2]))
db.execute("ROLLBACK")
"""


@contextlib.contextmanager
def locked(database: Path, seconds: float) -> Iterator[None]:
    """Another process holds the database's lock; the block begins when it does."""
    holder = subprocess.Popen(
        [sys.executable, "-c", _LOCKER, str(database), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    try:
        if holder.stdout.readline() != "held\n":
            raise RuntimeError(f"{database} could not be locked")
        yield
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


# The laboratory


class Lab:
    """A scratch directory, what trials share, and a place for each of them. ``slack``: see :class:`Tally`."""

    def __init__(self, scratch: Path, slack: float = 1.0) -> None:
        self.scratch, self.slack = scratch, slack
        self._lock = threading.Lock()
        self._long: Path | None = None
        self._twins: dict[str, tuple[Judged, int]] = {}

    @contextlib.contextmanager
    def place(self) -> Iterator[Path]:
        """Of one trial; gone afterwards."""
        path = Path(tempfile.mkdtemp(prefix="trial-", dir=self.scratch))
        path.chmod(0o755)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def long_run(self, store: Path, steps: int = 10_000) -> None:
        """A run of so many steps in ``store``, as if its first attempt had been killed: made once, then copied."""
        with self._lock:
            if self._long is None:
                self._long = self.scratch / "long"
                writer = open_store(self._long).open_run(RunInfo("run", created_at=time.time()))
                for begin in range(0, steps, 1000):
                    writer.write([StepRecord(s, kept_row(s), time.time(), 1) for s in range(begin, begin + 1000)])
                writer.close()
        shutil.copytree(self._long, store)

    def twin(self, **options: Any) -> tuple[Judged, int]:
        """What is judged of the same rows, and how many messages are told, where nothing goes wrong."""
        key = json.dumps(options, sort_keys=True)
        with self._lock:
            if key not in self._twins:
                with self.place() as place, Receiver() as receiver:
                    hook = {"RLWATCH_WEBHOOK_URL": receiver.url}
                    with Child(place, env=hook, store=str(place / "store"), flush=60.0, **options) as child:
                        left = child.wait("left")
                        child.ended()
                    if left["error"]:
                        raise RuntimeError(f"the undisturbed run: {left['error']}")
                    rlwatch(place, "watch", place / "store", "--once", hook=receiver.url)
                    self._twins[key] = Judged.of(place / "store"), len(set(receiver.told()))
            return self._twins[key]


def rng_of(fault: str, trial: int) -> random.Random:
    """The same moments in every run."""
    return random.Random(f"{fault}/{trial}")
