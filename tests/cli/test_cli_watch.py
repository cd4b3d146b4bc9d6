"""watch: a growing log, a store, each once and for as long as wanted."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_helpers import NOW, Inbox, Invoke, record_run, write_log

import rlwatch
from rlwatch.cli import watch, watch_log
from rlwatch.cli.import_log import NamedLog, log_id
from rlwatch.cli.watch import StoreWatch
from rlwatch.clock import ManualClock
from rlwatch.importers.wandb_runs import WandbTail
from rlwatch.records import (
    Alert,
    AlertState,
    Finding,
    OutboxMessage,
    OutboxStatus,
    RunInfo,
    RunState,
    Severity,
    StepRecord,
)
from rlwatch.store.url import open_store

HEALTHY = {"loss": 0.1, "grad_norm": 0.5, "entropy": 1.2, "reward": 0.3, "kl": 0.01}
BROKEN = HEALTHY | {"grad_norm": math.nan, "entropy": math.nan, "kl": math.nan}
ROOT = Path(rlwatch.__file__).parent.parent


def _rows(first: int, last: int, row: dict[str, float] = HEALTHY) -> list[dict[str, Any]]:
    return [
        row | {"step": step, "epoch": step / 100, "reward": 0.3 + step % 7 / 100} for step in range(first, last + 1)
    ]


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("a") as log:
        log.writelines(f"{row}\n" for row in rows)


def test_a_log_once_is_recorded_judged_and_answered_like_a_scan(tmp_path: Path, invoke: Invoke) -> None:
    """0 while all is well, 1 from the first critical alert on."""
    log, runs = write_log(tmp_path / "train.log", _rows(1, 60)), tmp_path / "runs"
    healthy = invoke("watch", log, "--once", "--store", runs)
    _append(log, _rows(61, 70, BROKEN))
    broken = invoke("watch", log, "--once", "--store", runs)
    again = invoke("watch", log, "--once", "--store", runs)

    assert (healthy.exit_code, broken.exit_code, again.exit_code) == (0, 1, 1)
    assert "60 new records" in healthy.stdout
    assert "10 new records" in broken.stdout
    assert "critical  nonfinite" in broken.stdout
    assert "ALERT firing" in broken.stdout
    assert "0 new records" in again.stdout


def test_watching_a_log_again_goes_on_where_the_last_watch_ended(tmp_path: Path, invoke: Invoke) -> None:
    """As the next attempt of the same run; nothing is stored twice."""
    log, runs = write_log(tmp_path / "train.log", _rows(1, 40)), tmp_path / "runs"
    invoke("watch", log, "--once", "--store", runs, "--name", "seed3", "--project", "math")
    _append(log, _rows(41, 60))
    invoke("watch", log, "--once", "--store", runs)

    store = open_store(runs)
    (run,) = store.runs()
    assert (run.run_id, run.name, run.project) == (log_id(log), "seed3", "math")
    assert (run.attempt, run.state, run.last_step) == (2, RunState.FINISHED, 60)
    assert [(r.seq, r.step) for r in store.records(run.run_id)] == [(step, step) for step in range(1, 61)]


def test_findings_do_not_depend_on_how_often_the_log_was_watched(tmp_path: Path, invoke: Invoke) -> None:
    """Once at the end, or three times on the way."""
    rows = [*_rows(1, 60), *_rows(61, 70, BROKEN)]
    whole = write_log(tmp_path / "whole.log", rows)
    invoke("watch", whole, "--once", "--store", tmp_path / "a")
    pieces = write_log(tmp_path / "pieces.log", rows[:30])
    for until in (30, 62, 70):
        write_log(pieces, rows[:until])
        invoke("watch", pieces, "--once", "--store", tmp_path / "b")

    once, often = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    told = [(f.kind, f.severity, f.step, f.seq) for f in once.findings(log_id(whole))]
    assert told == [(f.kind, f.severity, f.step, f.seq) for f in often.findings(log_id(pieces))]
    assert told
    assert len(once.alerts()) == len(often.alerts()) == 1


def test_without_a_store_a_log_is_only_judged(tmp_path: Path, invoke: Invoke) -> None:
    """Nothing is written anywhere."""
    log = write_log(tmp_path / "train.log", [*_rows(1, 60), *_rows(61, 70, BROKEN)])

    result = invoke("watch", log, "--once", "--no-store")

    assert result.exit_code == 1
    assert "critical  nonfinite" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.log"]


@pytest.mark.parametrize("content", ["", "no metrics here\n"])
def test_a_log_that_holds_nothing_cannot_be_judged_once(content: str, tmp_path: Path, invoke: Invoke) -> None:
    """Exit code 2, as scan's."""
    log = tmp_path / "train.log"
    log.write_text(content)

    result = invoke("watch", log, "--once", "--store", tmp_path / "runs")

    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")


def test_of_several_runs_in_a_log_one_must_be_chosen(tmp_path: Path, invoke: Invoke) -> None:
    """Then it is recorded under its own id."""
    log = tmp_path / "runs.csv"
    rows = [f"{run},{step},entropy,1.0\n" for run in ("a", "b") for step in range(5)]
    log.write_text("run_id,step,metric,value\n" + "".join(rows))

    both = invoke("watch", log, "--once", "--store", tmp_path / "runs")
    one = invoke("watch", log, "--once", "--store", tmp_path / "runs", "--run", "a")

    assert both.exit_code == 2
    assert "--run" in both.stderr
    assert one.exit_code == 0
    assert [run.run_id for run in open_store(tmp_path / "runs").runs()] == [log_id(log, "a")]


def test_a_source_that_is_nothing_is_refused(tmp_path: Path, invoke: Invoke) -> None:
    """Neither file nor run: both are said."""
    result = invoke("watch", "trian.log", "--once", "--store", tmp_path / "runs")

    assert result.exit_code == 2
    assert "there is no file or directory 'trian.log'" in result.stderr


class Steps:
    """Stands for the pause between two looks: each time something happens, at the end Ctrl-C."""

    def __init__(self, *happenings: Any) -> None:
        self.left = list(happenings)

    def __call__(self) -> None:
        if not self.left:
            raise KeyboardInterrupt
        self.left.pop(0)()


def test_a_followed_log_is_judged_as_it_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that were there have no time; those that come while we look are stamped."""
    log = write_log(tmp_path / "train.log", [row | {"epoch": 0.5} for row in _rows(1, 60)])
    told: list[str] = []
    steps = Steps(
        lambda: told.append(capsys.readouterr().out),
        lambda: _append(log, _rows(61, 65, BROKEN)),
        lambda: told.append(capsys.readouterr().out),
    )

    watch_log.follow(NamedLog(log), str(tmp_path / "runs"), None, steps, ManualClock(NOW))

    store = open_store(tmp_path / "runs")
    run = store.run(log_id(log))
    assert "nonfinite" not in told[0]
    assert "ALERT firing" in told[1]
    assert (run.state, run.last_step, run.source) == (RunState.FINISHED, 65, "trl")
    assert {record.ts for record in store.records(run.run_id)} == {0.0, NOW}


def test_a_log_that_is_still_empty_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its format shows with the first row; until then it is said, once, what is waited for."""
    log = tmp_path / "train.log"
    log.touch()

    steps = Steps(lambda: None, lambda: _append(log, _rows(1, 5)), lambda: None)
    watch_log.follow(NamedLog(log), str(tmp_path / "runs"), None, steps)

    assert open_store(tmp_path / "runs").run(log_id(log)).last_step == 5
    assert capsys.readouterr().err == "waiting: the file is empty\n"


def test_a_run_on_a_wandb_server_is_followed_and_its_silences_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store knows which rows it has; a server that is away is one line."""
    rows = [{"_step": n, "train/global_step": n, "train/loss": 0.5 + n % 3} for n in range(6)]
    clock, down = ManualClock(NOW), [False]

    def scan(min_step: int) -> Iterator[dict[str, Any]]:
        if down[0]:
            raise ConnectionError("away")
        yield from (row for row in rows if row["_step"] >= min_step)

    api = SimpleNamespace(run=lambda _path: SimpleNamespace(scan_history=scan))
    log = NamedLog(Path("me/math/x1"), run_id="x1")
    for more in (0, 2):
        rows += [rows[-1] | {"_step": len(rows) + n, "train/global_step": len(rows) + n} for n in range(more)]
        down[0] = False
        tail = WandbTail("me/math/x1", api=lambda: api, clock=clock)
        steps = Steps(lambda: down.__setitem__(0, True), lambda: clock.advance(60), lambda: clock.advance(60))
        watch_log.follow(log, str(tmp_path / "runs"), None, steps, clock, tail=tail)

    assert [r.step for r in open_store(tmp_path / "runs").records("x1")] == list(range(8))
    assert capsys.readouterr().err == "waiting: wandb does not answer for me/math/x1: away\n" * 2


def test_a_log_nothing_ever_came_to_leaves_no_run(tmp_path: Path) -> None:
    """Ctrl-C before the first row."""
    log = tmp_path / "train.log"
    log.touch()

    watch_log.follow(NamedLog(log), str(tmp_path / "runs"), None, Steps())

    assert open_store(tmp_path / "runs").runs() == []


def test_a_trainer_that_starts_again_in_the_same_log_is_a_new_attempt(tmp_path: Path) -> None:
    """Steps 31 and on are trained a second time."""
    log = write_log(tmp_path / "train.log", _rows(1, 40))

    watch_log.follow(
        NamedLog(log), str(tmp_path / "runs"), None, Steps(lambda: _append(log, _rows(31, 50)), lambda: None)
    )

    store = open_store(tmp_path / "runs")
    run = store.run(log_id(log))
    assert (run.attempt, run.last_step) == (2, 50)
    assert [record.attempt for record in store.records(run.run_id)] == [1] * 40 + [2] * 20


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_watch_tidily(end: signal.Signals, tmp_path: Path) -> None:
    """Exit code 0, and the run is finished."""
    log = write_log(tmp_path / "train.log", _rows(1, 20))
    command = [sys.executable, "-u", "-m", "rlwatch.cli", "watch", str(log), "--store", str(tmp_path / "runs")]
    command = ["env", "--default-signal=INT", *command]  # background jobs ignore it, and so would their children
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("run "):
            break

    process.send_signal(end)
    _, errors = process.communicate(timeout=600)

    assert (process.returncode, errors) == (0, "")
    assert open_store(tmp_path / "runs").run(log_id(log)).state is RunState.FINISHED


def test_ctrl_c_while_the_run_is_being_made_ends_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes when the run is in the store and nobody holds it yet."""
    original = watch_log._recording

    def interrupted(*args: Any, **options: Any) -> Any:
        made = original(*args, **options)
        signal.raise_signal(signal.SIGINT)
        return made

    monkeypatch.setattr(watch_log, "_recording", interrupted)
    log = write_log(tmp_path / "train.log", _rows(1, 5))
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        watch_log.follow(NamedLog(log), str(tmp_path / "runs"), None, lambda: None)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)

    assert open_store(tmp_path / "runs").run(log_id(log)).state is RunState.FINISHED


def test_alerts_of_a_watched_log_reach_the_webhook_once(inbox: Inbox, tmp_path: Path, invoke: Invoke) -> None:
    """Watching again tells nobody again."""
    log = write_log(tmp_path / "train.log", [*_rows(1, 60), *_rows(61, 70, BROKEN)])

    first = invoke("watch", log, "--once", "--store", tmp_path / "runs")
    invoke("watch", log, "--once", "--store", tmp_path / "runs")

    assert "alerts 1 delivered" in first.stdout
    assert [(m["event"], m["alert"]["kind"], m["run"]["id"]) for m in inbox.received] == [
        ("firing", "nonfinite", log_id(log))
    ]


def _alert(run: str, state: AlertState = AlertState.FIRING, severity: Severity = Severity.CRITICAL) -> Alert:
    return Alert(f"alert-{run}", run, "entropy", "entropy_collapse", severity, state, 3, 4, "entropy fell")


def _message(run: str) -> OutboxMessage:
    return OutboxMessage(
        f"m-{run}", run, f"alert-{run}", "webhook", {"event": "firing", "text": "t"}, created_at=time.time()
    )


def test_alerts_of_a_trainer_that_died_are_delivered_from_its_store(
    inbox: Inbox, tmp_path: Path, invoke: Invoke
) -> None:
    """Of every run, with what it could not say itself: that it is gone. The exit code says that one is critical."""
    store = open_store(tmp_path / "runs")
    for run in ("a", "b"):
        record_run(store, run, state=None)
    store.put_alerts([_alert("a"), _alert("b", AlertState.RESOLVED)], [_message("a"), _message("b")])

    result = invoke("watch", tmp_path / "runs", "--once")

    assert result.exit_code == 1
    told = sorted((m["event"], m["alert"]["kind"] if "alert" in m else m["text"]) for m in inbox.received)
    assert told == [
        ("firing", "run_silent"),
        ("firing", "run_silent"),
        ("firing", "t"),
        ("firing", "t"),
        ("resolved", "entropy_collapse"),
    ]
    assert {message.status for message in store.outbox()} == {OutboxStatus.SENT}
    assert "alerts 5 delivered" in result.stdout
    assert "ALERT firing" in result.stdout


def test_one_run_of_a_store_is_answered_for_itself(tmp_path: Path, invoke: Invoke) -> None:
    """By name; a resolved or pending alert is no danger."""
    store = open_store(tmp_path / "runs")
    for run, name in (("a", "seed1"), ("b", "seed2")):
        record_run(store, run, name=name)
    store.put_alerts([_alert("a"), _alert("b", AlertState.RESOLVED)], [])

    assert invoke("watch", "seed1", "--once", "--store", tmp_path / "runs").exit_code == 1
    assert invoke("watch", "seed2", "--once", "--store", tmp_path / "runs").exit_code == 0


def _finding(step: int) -> Finding:
    return Finding("gradients", "grad_spike", Severity.WARNING, step, step, f"spike at {step}", seq=step)


def test_a_store_watch_tells_each_finding_and_each_change_of_an_alert_once(tmp_path: Path) -> None:
    """Also of runs that begin while it looks."""
    store = open_store(tmp_path / "runs")
    writer = store.open_run(RunInfo("a"))
    writer.write([StepRecord(1, {"entropy": 1.0}), _finding(1)])
    watch = StoreWatch(store)

    assert [finding.step for _, finding in watch.findings()] == [1]
    assert list(watch.findings()) == []
    writer.write([StepRecord(2, {"entropy": 1.0}, ts=5.0), _finding(2)])
    other = store.open_run(RunInfo("b"))
    other.write([StepRecord(1, {"entropy": 1.0}), _finding(7)])
    assert {(run.run_id, finding.step) for run, finding in watch.findings()} == {("a", 2), ("b", 7)}

    store.put_alerts([_alert("a", AlertState.PENDING)], [])
    assert list(watch.alerts()) == []
    store.put_alerts([_alert("a")], [])
    assert [alert.state for alert in watch.alerts()] == [AlertState.FIRING]
    assert list(watch.alerts()) == []
    store.put_alerts([_alert("a", AlertState.RESOLVED)], [])
    assert [alert.state for alert in watch.alerts()] == [AlertState.RESOLVED]
    for open_writer in (writer, other):
        open_writer.close()


def test_a_followed_store_shows_only_what_is_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And says how much it left out."""
    store = open_store(tmp_path / "runs")
    writer = store.open_run(RunInfo("a", name="seed1"))
    writer.write([StepRecord(1, {"entropy": 1.0}), _finding(1)])

    watch.follow_store(
        str(tmp_path / "runs"),
        None,
        None,
        Steps(lambda: writer.write([StepRecord(2, {"entropy": 1.0}), _finding(2)])),
    )
    writer.close()

    output = capsys.readouterr().out
    assert "older findings and alerts not shown: 1" in output
    assert "spike at 1" not in output
    assert "seed1  step 2  warning  grad_spike: spike at 2" in output
    assert output.rstrip().endswith("stopped")
