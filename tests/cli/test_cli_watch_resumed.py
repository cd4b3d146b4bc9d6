"""A watch that was killed, and logs that change while nobody watches: every row once."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Invoke

import rlwatch
from rlwatch.cli import console, watch_log
from rlwatch.cli.import_log import NamedLog, log_id
from rlwatch.cli.watch_log import Positions
from rlwatch.clock import ManualClock
from rlwatch.importers import LogTail, Position
from rlwatch.ports import Store
from rlwatch.records import StepRecord
from rlwatch.store.url import open_store

ROOT = Path(rlwatch.__file__).parent.parent


def _lines(first: int, last: int) -> str:
    return "".join(
        json.dumps({"step": step, "data": {"actor/grad_norm": 0.5 + step % 7 / 10}}) + "\n"
        for step in range(first, last + 1)
    )


def _write(log: Path, text: str, mode: str = "a") -> None:
    with log.open(mode) as file:
        file.write(text)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    log = tmp_path / "train.jsonl"
    log.write_text(_lines(1, 10))
    return log


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "runs")


def _steps(store: Store, log: Path) -> list[int]:
    return [record.step for record in store.records(log_id(log))]


def _once(log: Path, invoke: Invoke) -> None:
    assert invoke("watch", log, "--once", "--store", log.parent / "runs").exit_code == 0


def test_a_log_written_anew_between_two_watches_is_the_next_attempt(log: Path, store: Store, invoke: Invoke) -> None:
    """Its rows are not taken for those of before, though they have the same places in the file."""
    _once(log, invoke)
    log.write_text(_lines(6, 12))
    _once(log, invoke)
    _once(log, invoke)

    assert _steps(store, log) == [*range(1, 11), *range(6, 13)]
    assert {record.attempt for record in store.records(log_id(log), after_seq=10)} == {2}


def test_a_log_rotated_between_two_watches_loses_nothing(log: Path, store: Store, invoke: Invoke) -> None:
    """Neither the rest of the old file nor the new one."""
    _once(log, invoke)
    _write(log, _lines(11, 13))
    log.rename(log.with_name("train.jsonl.1"))
    log.write_text(_lines(14, 15))
    _once(log, invoke)

    assert _steps(store, log) == list(range(1, 16))


def test_an_end_that_is_still_being_written_is_left_for_the_next_watch(log: Path, store: Store) -> None:
    """A CSV's last line would be taken for whole; after half a minute of silence it is."""
    log = log.with_suffix(".csv")
    log.write_text("step,loss,reward\n1,0.5,1.25\n2,0.25,1.")
    clock = ManualClock(log.stat().st_mtime + 1)
    for _ in range(2):
        watch_log.follow(NamedLog(log), store.url, None, _stop, clock)
    early = [dict(record.metrics) for record in store.records(log_id(log))]
    _write(log, "75\n3,0.5,")
    clock.advance(watch_log.QUIET_S + log.stat().st_mtime)
    watch_log.follow(NamedLog(log), store.url, None, _stop, clock)

    assert early == [{"loss": 0.5, "reward": 1.25}]
    assert [r.metrics.get("reward") for r in store.records(log_id(log))][:2] == [1.25, 1.75]


def _stop() -> None:
    raise KeyboardInterrupt


class Interrupting(LogTail):
    """Somebody presses Ctrl-C while four records are being read."""

    def poll(self, most: int | None = None) -> list[StepRecord]:
        signal.raise_signal(signal.SIGINT)
        return super().poll(4)


def test_ctrl_c_is_heard_between_two_lots_of_a_backlog(log: Path, store: Store) -> None:
    """What was begun is finished, the run is ended, and the rest is there for the next watch."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        watch_log.follow(NamedLog(log), store.url, None, _stop, ManualClock(), tail=Interrupting(log))
    finally:
        signal.signal(signal.SIGINT, before)
    run = store.run(log_id(log))

    assert (_steps(store, log), run.state.value) == ([1, 2, 3, 4], "finished")
    watch_log.follow(NamedLog(log), store.url, None, _stop, ManualClock())
    assert _steps(store, log) == list(range(1, 11))


KILLED = """
import os, signal, sys
from pathlib import Path
from rlwatch.cli import watch_log
from rlwatch.cli.import_log import NamedLog
from rlwatch.cli.watch_log import LogRecording

watch_log.MOST, left, take = 7, int(sys.argv[3]), LogRecording.take

def killed(self, records):
    global left
    left -= 1
    if left == 0 and sys.argv[4] == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    take(self, records)
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

LogRecording.take = killed
watch_log.follow(NamedLog(Path(sys.argv[1])), sys.argv[2], None, lambda: sys.exit(3))
"""


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.thorough), "after"])
def test_a_watch_that_was_killed_goes_on_where_it_was(when: str, log: Path, store: Store) -> None:
    """Killed four times, at a lot before or after it was stored; meanwhile the log grows, restarts and is rotated."""
    _write(log, _lines(11, 40))
    changes = [
        lambda: _write(log, _lines(41, 60)),
        lambda: _write(log, _lines(31, 70), "w"),
        lambda: (log.rename(log.with_name("train.jsonl.1")), _write(log, _lines(71, 90), "w")),
        lambda: _write(log, _lines(91, 95)),
    ]
    for left, change in zip((6, 4, 7, 2), changes, strict=True):
        command = [sys.executable, "-c", KILLED, str(log), store.url, str(left), when]
        killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        assert killed.returncode in (-signal.SIGKILL, 3), killed.stderr
        if killed.returncode == -signal.SIGKILL and change is changes[1]:
            watch_log.follow(NamedLog(log), store.url, None, _stop, ManualClock())
        change()
    watch_log.follow(NamedLog(log), store.url, None, _stop, ManualClock())
    records = store.records(log_id(log))

    assert [record.step for record in records] == [*range(1, 61), *range(31, 96)]
    assert [record.seq for record in records] == list(range(1, len(records) + 1))


def test_positions_are_kept_beside_the_runs_and_never_fail(tmp_path: Path, store: Store) -> None:
    """What is damaged, or cannot be written, counts as unknown."""
    positions, place = Positions(store), Position("train.log", 3, 100, "abc")
    writer = store.open_run(NamedLog(tmp_path / "train.log", run_id="a").info("a", "", 0.0))
    positions.save("a", place)
    kept = positions.load("a")
    (file,) = (tmp_path / "runs" / ".watch").iterdir()
    file.write_text("{")
    damaged = positions.load("a")
    file.parent.rename(tmp_path / "away")
    file.parent.write_text("no directory")
    positions.save("a", place)
    writer.close()

    assert (kept, damaged, positions.load("a"), positions.load("b")) == ((place, 0), (None, 0), (None, 0), (None, 0))
    assert [run.run_id for run in store.runs()] == ["a"]
    assert Positions(open_store("memory://positions")).load("a") == (None, 0)


def test_a_large_backlog_is_shown_on_terminals_only(log: Path, monkeypatch: Any) -> None:
    """A bar of bytes on a terminal, nothing in a script."""
    tail = LogTail(log)
    with console.backlog(tail) as show:
        show()
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with console.backlog(tail, worth=1) as show:
        tail.poll()
        show()

    assert "catching up" in screen.getvalue()
