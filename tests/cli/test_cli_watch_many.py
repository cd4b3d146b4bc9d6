"""watch of a directory: many logs at once, each its own run, none in another's way."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Invoke
from test_cli_watch import BROKEN, Steps, _append, _rows, write_log

from rlwatch.cli import watch_many
from rlwatch.cli import watch_many as fleets
from rlwatch.cli.import_log import NamedLog, log_id
from rlwatch.cli.watch_log import LogWatch
from rlwatch.cli.watch_many import LogDirectory
from rlwatch.clock import ManualClock
from rlwatch.importers import read_log
from rlwatch.importers.registry import PATTERNS
from rlwatch.records import RunState
from rlwatch.store.url import open_store


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    directory = tmp_path / "logs"
    (directory / "b").mkdir(parents=True)
    write_log(directory / "a.log", _rows(1, 8))
    write_log(directory / "b" / "train.log", _rows(1, 6))
    return directory


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(time.time())


def _follow(
    logs: Path, clock: ManualClock, *happenings: Callable[[], Any], patterns: Any = PATTERNS, **bounds: int
) -> Any:
    """Follow while these happen, ten seconds apart; the store afterwards."""

    def later(happening: Callable[[], Any]) -> Callable[[], Any]:
        def step() -> None:
            clock.advance(fleets.DISCOVER_S)
            happening()

        return step

    steps = Steps(*map(later, happenings))
    watch_many.follow(NamedLog(logs), patterns, str(logs.parent / "runs"), None, steps, clock=clock, **bounds)
    return open_store(logs.parent / "runs")


def _nothing() -> None:
    """Happens."""


def test_every_log_is_a_run_also_those_that_come_later(logs: Path, clock: ManualClock, capsys: Any) -> None:
    """Named by its place in the directory; its lines begin with that name."""
    store = _follow(
        logs,
        clock,
        lambda: (_append(logs / "a.log", _rows(9, 10)), write_log(logs / "b" / "new.log", _rows(1, 4))),
        lambda: _append(logs / "b" / "train.log", _rows(7, 60)),
        lambda: _append(logs / "b" / "train.log", _rows(61, 64, BROKEN)),
        _nothing,
    )
    told = capsys.readouterr()

    assert {(run.name, run.last_step, run.state) for run in store.runs()} == {
        ("a.log", 10, RunState.FINISHED),
        ("b/new.log", 4, RunState.FINISHED),
        ("b/train.log", 64, RunState.FINISHED),
    }
    assert "b/train.log  step 61  critical  nonfinite" in told.out
    assert f"a.log: run {log_id(logs / 'a.log')} (trl-console)" in told.out
    assert told.err == ""


def test_a_log_that_is_gone_ends_its_run_and_may_come_back(logs: Path, clock: ManualClock, capsys: Any) -> None:
    """It goes on where it was, as the next attempt."""
    ended = []
    away = logs.parent / "away"
    store = _follow(
        logs,
        clock,
        lambda: (logs / "a.log").rename(away),
        lambda: ended.append(open_store(logs.parent / "runs").run(log_id(logs / "a.log")).state_reason),
        lambda: (_append(away, _rows(9, 9)), away.rename(logs / "a.log")),
        _nothing,
    )

    assert ended == ["the log is gone"]
    assert [r.step for r in store.records(log_id(logs / "a.log"))] == list(range(1, 10))
    assert "a.log: the log is gone; its run ends" in capsys.readouterr().out


def test_a_broken_log_is_reported_in_one_line_and_stops_no_other(logs: Path, clock: ManualClock, capsys: Any) -> None:
    """Once, however often it is tried again; when it is whole it is read."""
    bad = logs / "bad.jsonl"
    bad.write_text('{"step": 1, "loss": 0.5}\n{"step": -1, "loss": 0.5}\n')
    store = _follow(
        logs,
        clock,
        *[lambda: clock.advance(fleets.RETRY_S)] * 3,
        lambda: _append(logs / "a.log", _rows(9, 12)),
        lambda: (bad.write_text('{"step": 1, "loss": 0.5}\n'), clock.advance(fleets.RETRY_S)),
        _nothing,
    )
    (line,) = capsys.readouterr().err.splitlines()

    assert line.startswith("bad.jsonl: ")
    assert "bad.jsonl:2" in line
    assert store.run(log_id(logs / "a.log")).last_step == 12
    assert store.run(log_id(bad)).last_step == 1


def test_a_run_that_somebody_else_writes_is_left_to_them(logs: Path, clock: ManualClock, capsys: Any) -> None:
    """Another watch, say; the others are recorded."""
    store = open_store(logs.parent / "runs")
    writer = store.open_run(NamedLog(logs / "a.log").info("a", "", 0.0))
    _follow(logs, clock, _nothing)
    writer.close()

    assert capsys.readouterr().err.startswith("a.log: ")
    assert store.run(log_id(logs / "b" / "train.log")).last_step == 6
    assert store.records(log_id(logs / "a.log")) == []


def test_logs_of_long_ago_are_read_and_their_runs_ended_at_once(logs: Path, clock: ManualClock) -> None:
    """Until they grow again."""
    old = clock.now() - 2 * fleets.OLD_S
    os.utime(logs / "a.log", (old, old))
    states = []
    runs = logs.parent / "runs"
    store = _follow(
        logs,
        clock,
        lambda: states.append({run.name: run.state.value for run in open_store(runs).runs()}),
        lambda: _append(logs / "a.log", _rows(9, 10)),
        lambda: states.append(open_store(runs).run(log_id(logs / "a.log")).state.value),
    )

    assert states == [{"a.log": "finished", "b/train.log": "running"}, "running"]
    assert store.run(log_id(logs / "a.log")).last_step == 10


def test_open_files_and_runs_are_bounded(logs: Path, clock: ManualClock) -> None:
    """The silent ones give way; nothing is lost."""
    bounds = {"most_open": 3, "most_live": 5}
    for number in range(12):
        write_log(logs / f"c{number:02}.log", _rows(1, 3))
    open_files, alive = [], []

    def counted() -> None:
        targets = [fd.readlink() for fd in Path("/proc/self/fd").iterdir() if fd.exists()]
        open_files.append(sum(target.parent == logs for target in targets))
        alive.append(sum(run.state is RunState.RUNNING for run in open_store(logs.parent / "runs").runs()))

    store = _follow(logs, clock, counted, lambda: _append(logs / "c00.log", _rows(4, 5)), counted, counted, **bounds)

    assert max(open_files) <= 3
    assert max(alive) <= 5
    assert store.run(log_id(logs / "c00.log")).last_step == 5
    assert len(store.runs()) == 14


def test_once_answers_for_all_of_them(logs: Path, invoke: Invoke) -> None:
    """0, 1 once any has been critical, 2 if none can be read."""
    runs = logs.parent / "runs"
    healthy = invoke("watch", logs, "--once", "--store", runs)
    _append(logs / "a.log", [*_rows(9, 40), *_rows(41, 45, BROKEN)])
    broken = invoke("watch", logs, "--once", "--store", runs)
    nothing = invoke("watch", logs, "--once", "--store", runs, "--logs", "*.nothing")
    named = invoke("watch", logs, "--once", "--store", runs, "--run-id", "x")

    assert (healthy.exit_code, broken.exit_code, nothing.exit_code, named.exit_code) == (0, 1, 2, 2)
    assert "2 runs of 2 logs" in healthy.stdout
    assert "no file in it or below is called *.nothing" in nothing.stderr
    assert "each its own run" in named.stderr


def test_a_directory_that_is_a_store_or_a_run_is_no_directory_of_logs(tmp_path: Path, invoke: Invoke) -> None:
    """Event files of TensorBoard: one run; runs of rlwatch: a store, whatever else lies there."""
    import binary_logs

    board = tmp_path / "seed3"
    board.mkdir()
    rows = [(step, {"train/loss": 0.5 + step % 3, "train/grad_norm": 1.0}) for step in range(1, 9)]
    (board / "events.out.tfevents.1.host").write_bytes(binary_logs.event_file(rows))
    one = invoke("watch", board, "--once", "--store", tmp_path / "runs")
    (tmp_path / "runs" / "note.log").write_text("")
    store = invoke("watch", tmp_path / "runs", "--once")
    many = invoke("watch", tmp_path, "--once", "--store", tmp_path / "other")

    assert "8 new records" in one.stdout
    assert store.exit_code == 0
    assert "1 runs of 1 logs" in many.stdout
    assert [run.name for run in open_store(tmp_path / "runs").runs()] == ["seed3"]


def test_trainings_of_one_tensorboard_directory_are_runs_also_when_it_is_watched_again(
    tmp_path: Path, invoke: Invoke
) -> None:
    """As a scan reads them; what goes on goes on in its own run, and what begins anew later is another."""
    import binary_logs

    board, runs = tmp_path / "board", tmp_path / "runs"
    board.mkdir()

    def trained(file: int, first: int, last: int) -> None:
        rows = [(step, {"train/reward": file + step % 3, "train/entropy": 1.0}) for step in range(first, last + 1)]
        (board / f"events.out.tfevents.{file}.host").write_bytes(binary_logs.event_file(rows))

    def recorded() -> dict[str, list[int]]:
        with closing(open_store(runs)) as store:
            return {run.name: [record.step for record in store.records(run.run_id)] for run in store.runs()}

    trained(1, 1, 5)
    trained(2, 1, 4)
    both = invoke("watch", board, "--once", "--store", runs)
    assert recorded() == {"board": [1, 2, 3, 4, 5], "board#2": [1, 2, 3, 4]}
    trained(3, 5, 6)
    trained(4, 1, 2)
    more = invoke("watch", board, "--once", "--store", runs)
    again = invoke("watch", tmp_path, "--once", "--store", runs)

    assert recorded() == {"board": [1, 2, 3, 4, 5], "board#2": [1, 2, 3, 4, 5, 6], "board#3": [1, 2]}
    assert ["9 new" in both.stdout, "4 new" in more.stdout, again.exit_code] == [True, True, 0]
    assert [(run.name, len(run.records)) for run in read_log(board)] == [("board", 5), ("board#2", 6), ("board#3", 2)]


def test_the_summary_counts_logs_by_what_they_do(logs: Path, clock: ManualClock, capsys: Any) -> None:
    """And names the one heard last."""
    (logs / "bad.jsonl").write_text('{"step": -1, "loss": 0.5}\n')
    (logs / "empty.log").touch()
    store = open_store(logs.parent / "runs")
    from rlwatch.run.alerting import Alerting

    fleet = watch_many.fleet_of(NamedLog(logs), PATTERNS, store, Alerting(), clock)
    none = watch_many.summary(fleet)
    fleet.look()
    clock.advance(1)
    _append(logs / "b" / "train.log", _rows(7, 7))
    fleet.look()
    told = watch_many.summary(fleet)
    with watch_many.status_line(fleet) as show:
        show()
    fleet.end("done")

    assert none == "0 logs: none yet"
    assert told == "4 logs: 2 live, 1 silent, 1 not readable; last seen: b/train.log"
    assert len(capsys.readouterr().err.splitlines()) == 1


def _read_so_far() -> int:
    """Bytes this process has read of whatever it has open."""
    said = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(said["rchar"])


@pytest.mark.thorough
def test_fifty_growing_logs_cost_little(tmp_path: Path) -> None:
    """A look reads what came to each since the last one, however long they have become."""
    logs = [tmp_path / f"run{number:02}.jsonl" for number in range(50)]

    def grow(step: int, said: str = "") -> None:
        for log in logs:
            with log.open("a") as file:
                file.write(json.dumps({"step": step, "loss": 0.5, "entropy": 1.0 + step % 5, "said": said}) + "\n")

    grow(0)
    from rlwatch.run.alerting import Alerting

    store, clock = open_store(tmp_path / "runs"), ManualClock(time.time())
    fleet: LogDirectory = watch_many.fleet_of(NamedLog(tmp_path), ["*.jsonl"], store, Alerting(), clock)

    def look() -> int:
        before = _read_so_far()
        clock.advance(2.0)
        fleet.look()
        return _read_so_far() - before

    fleet.look()
    grow(1, said="x" * 50_000)
    long = look()
    grow(2)
    short = look()
    assert {member.watch.records for member in fleet.runs if isinstance(member.watch, LogWatch)} == {3}
    fleet.end("done")

    assert short < 50 * 50_000 / 10 < long


def test_a_log_made_to_hurt_ends_no_other(logs: Path, invoke: Invoke) -> None:
    """What of it can be read is; what was left out is named and counted."""
    good = '{"step": 1, "loss": 0.5, "kl": 0.1}\n'
    (logs / "deep.jsonl").write_text(good + '{"step": 2, "loss": ' + "[" * 200_000 + "\n" + good.replace("1,", "3,", 1))
    (logs / "many.csv").write_text("run_id,step,metric,value\n" + "".join(f"r{i},1,loss,1\n" for i in range(3000)))
    (logs / "notes.log").write_text("remember the milk\n")
    (logs / "line\nend\x1b[31m.log").write_text("remember the milk\n")
    os.mkfifo(logs / "pipe.log")
    (logs / "round").symlink_to(logs)
    found = invoke("watch", logs, "--once", "--store", logs.parent / "runs")
    told = found.stderr.splitlines()

    assert found.exit_code == 0
    assert "3 runs of 6 logs" in found.stdout
    assert "deep.jsonl: skipped: 1 x a JSON line that is nested too deeply" in found.stdout
    assert [line.split(": ")[0] for line in told] == [
        "many.csv",
        "line end\N{REPLACEMENT CHARACTER}[31m.log",
        "notes.log",
    ]
    assert "holds several runs" in told[0]
    assert "no known format" in told[1]


def test_what_nobody_foresaw_in_one_log_ends_no_other(
    logs: Path, clock: ManualClock, capsys: Any, monkeypatch: Any
) -> None:
    """Told once by its type; tried again."""
    real, failing = LogWatch.look, [True]

    def look(self: LogWatch) -> int:
        if failing[0] and self.log.path.name == "a.log":
            raise RecursionError("maximum recursion depth exceeded")
        return real(self)

    monkeypatch.setattr(LogWatch, "look", look)
    store = _follow(
        logs,
        clock,
        *[lambda: clock.advance(fleets.RETRY_S)] * 2,
        lambda: _append(logs / "b" / "train.log", _rows(7, 9)),
        lambda: (failing.clear(), failing.append(False), clock.advance(fleets.RETRY_S)),
        _nothing,
    )

    assert capsys.readouterr().err.splitlines() == [
        "a.log: unexpected RecursionError: maximum recursion depth exceeded"
    ]
    assert store.run(log_id(logs / "b" / "train.log")).last_step == 9
    assert store.run(log_id(logs / "a.log")).last_step == 8


def test_a_log_that_fails_slowly_is_tried_again_late(logs: Path, clock: ManualClock, monkeypatch: Any) -> None:
    """It must not keep the watch from the others."""
    real, tries = LogWatch.look, []

    def look(self: LogWatch) -> int:
        if self.log.path.name == "a.log":
            tries.append(clock.monotonic())
            clock.advance(10.0)
            raise ValueError("slow")
        return real(self)

    monkeypatch.setattr(LogWatch, "look", look)
    _follow(logs, clock, *[lambda: clock.advance(fleets.RETRY_S)] * 12)

    assert len(tries) > 2
    assert all(b - a >= fleets.RETRY_FACTOR * 10.0 for a, b in pairwise(tries))


def test_why_a_file_is_not_followed_is_reported_when_it_has_been_silent(
    logs: Path, clock: ManualClock, capsys: Any
) -> None:
    """Not while its trainer may still be loading; an empty one may become anything."""
    write = [lambda: (logs / "notes.log").write_text("remember the milk\n"), (logs / "empty.log").touch]
    _follow(logs, clock, *write)
    assert capsys.readouterr().err == ""
    _follow(logs, clock, *[lambda: clock.advance(fleets.RETRY_S)] * 3)
    (line,) = capsys.readouterr().err.splitlines()

    assert line.startswith("notes.log: no known format")


def test_a_directory_that_cannot_be_searched_is_reported(
    logs: Path, clock: ManualClock, capsys: Any, monkeypatch: Any
) -> None:
    """Once, with the reason; the logs that were found before are followed."""
    real = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    refuse = partial(monkeypatch.setattr, os, "scandir", scandir)
    store = _follow(logs, clock, refuse, _nothing, lambda: _append(logs / "b" / "train.log", _rows(7, 9)), _nothing)
    (line,) = capsys.readouterr().err.splitlines()

    assert "cannot be searched for logs" in line
    assert "Permission denied" in line
    assert store.run(log_id(logs / "b" / "train.log")).last_step == 9


@pytest.mark.parametrize("what", ["empty", "unknown", "other names", "store without runs", "damaged run", "pipe"])
def test_once_never_passes_on_nothing(tmp_path: Path, invoke: Invoke, what: str) -> None:
    """Exit code 2 and why, so that a check in CI fails."""
    there, runs, url = tmp_path / "there", tmp_path / "runs", ""
    there.mkdir()
    if what == "unknown":
        (there / "a.log").write_text("remember the milk\n")
        (there / "b.out").write_text("")
    elif what == "other names":
        (there / "metrics.txt").write_text('{"step": 1, "loss": 0.5}\n')
    elif what == "store without runs":
        url = f"sqlite://{runs}"
    elif what == "damaged run":
        (there / "run1").mkdir()
        (there / "run1" / "run.db").write_bytes(b"no database" * 1000)
    elif what == "pipe":
        os.mkfifo(there / "pipe")
    found = invoke("watch", url or (there / "pipe" if what == "pipe" else there), "--once", "--store", runs)
    why = {
        "empty": "holds nothing to watch",
        "unknown": "none of its 2 logs could be read",
        "other names": "no log called *.log",
        "store without runs": "holds no run that can be read",
        "damaged run": "run1: cannot be read",
        "pipe": "is not a regular file",
    }

    assert found.exit_code == 2
    assert why[what] in found.stderr
    if what == "unknown":
        assert "a.log: no known format" in found.stderr
        assert "b.out: the file is empty" in found.stderr


def test_a_directory_with_nothing_yet_is_said_to_be_waited_for(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """As a store: nobody learns otherwise that logs which come later are not followed."""
    from rlwatch.cli import watch

    monkeypatch.setattr(watch, "follow_store", lambda *_: None)
    watch.watch(str(tmp_path))

    assert "holds nothing to watch" in capsys.readouterr().err


def test_what_names_were_read_as_is_said_once_for_logs_alike(tmp_path: Path, invoke: Invoke) -> None:
    """As for one log; a name that only another log has is said of that."""
    directory = tmp_path / "logs"
    directory.mkdir()
    for name, also in (("a", {}), ("b", {}), ("c", {"H": 1.0})):
        rows = [{"step": step, "reward": 0.5, "avg_kl": 0.1, **also} for step in range(3)]
        (directory / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    told = invoke("watch", directory, "--once", "--store", tmp_path / "runs").stdout.splitlines()

    assert [line for line in told if "read" in line or "known" in line] == [
        "a.jsonl: read as: reward as reward/mean; guessed: avg_kl as policy/kl_ref",
        "c.jsonl: unknown metrics, not used: H",
    ]
