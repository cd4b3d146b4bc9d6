"""``rlwatch.scan``: what rlwatch would have said of a log, had it watched."""

import json
import math

import pytest
from scripted import Oracle

import rlwatch
from rlwatch.errors import ImportFormatError
from rlwatch.records import Event, Severity, StepRecord
from rlwatch.scanner import branch, scan_all
from rlwatch.store.url import open_store


def rows(steps=60, crash=40, every=1):
    """A verl-like run that turns to NaN at ``crash``."""
    for step in range(0, steps, every):
        bad = step >= crash
        yield (
            step,
            {
                "actor/entropy": math.nan if bad else 0.5 - step * 1e-3,
                "actor/grad_norm": math.nan if bad else 1.0,
                "actor/pg_loss": math.nan if bad else 0.01,
                "critic/score/mean": -1.0 if bad else 0.4 + step * 7 % 11 / 500,
            },
        )


def console(path, **kwargs):
    lines = [
        f"(TaskRunner pid=7) step:{step} - " + " - ".join(f"{k}:{v}" for k, v in metrics.items())
        for step, metrics in rows(**kwargs)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_crash_is_found_at_its_step(tmp_path):
    """Format sniffed, onset and alarm where they belong, healthy before."""
    report = rlwatch.scan(console(tmp_path / "train.log"))

    assert not report.ok
    assert (report.steps, report.metrics) == (
        60,
        ("loss/policy", "optim/grad_norm", "policy/entropy", "reward/mean"),
    )
    first = report.findings[0]
    assert (first.kind, first.severity.value, first.onset_step) == ("nonfinite", "critical", 40)
    assert (report.alarms[0].step, report.alarms[0].kind, report.alarms[0].severity.value) == (
        40,
        "nonfinite",
        "critical",
    )


def test_a_healthy_log_is_ok_and_silent(tmp_path):
    """Nothing to say is a good answer."""
    report = rlwatch.scan(console(tmp_path / "train.log", crash=1000))

    assert report.ok
    assert report.findings == report.alarms == ()


def test_the_report_is_the_object_scripts_read(tmp_path):
    """Keys of the documented JSON, parts that are not built say why."""
    report = rlwatch.scan(console(tmp_path / "train.log")).to_dict()

    assert {"source", "format", "steps", "metrics", "findings", "alarms", "forecast", "not_run", "diagnosis"} <= set(
        report
    )
    assert {"detector", "kind", "severity", "onset_step", "step", "message", "evidence"} <= set(report["findings"][0])
    assert {"step", "kind", "severity", "reason"} <= set(report["alarms"][0])
    assert "forecasts" not in report
    assert {"summary", "nature", "enough", "why_not", "at_step", "gap", "causes"} == set(report["diagnosis"])
    assert {"kind", "title", "sure", "evidence", "actions"} <= set(report["diagnosis"]["causes"][0])
    assert "mismatch_growth" in {part["name"] for part in report["not_run"]}


def test_a_coarse_log_is_judged_too(tmp_path):
    """One row every ten steps, as TRL logs by default."""
    report = rlwatch.scan(console(tmp_path / "train.log", steps=400, crash=300, every=10))

    told = [finding for finding in report.findings if finding.severity is not Severity.INFO]
    assert told[0].onset_step == 300


def test_a_log_of_several_runs_asks_which_one(tmp_path):
    """And names them; scan_all takes them all."""
    path = tmp_path / "runs.csv"
    lines = ["run_id,step,metric,value"]
    for run, crash in (("good", 1000), ("bad", 30)):
        lines += [f"{run},{step},{name},{value}" for step, m in rows(crash=crash) for name, value in m.items()]
    path.write_text("\n".join(lines) + "\n")

    with pytest.raises(ImportFormatError, match="'good', 'bad'"):
        rlwatch.scan(path)
    assert rlwatch.scan(path, run="good").ok
    assert {report.run: report.ok for report in scan_all(path)} == {"good": True, "bad": False}


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "empty"), ("hello\nworld\n", "train.log"), ("step:1 - my/own:0.5\n", "my/own")],
)
def test_what_cannot_be_judged_is_one_clear_error(tmp_path, content, message):
    """Empty, unknown, without any known metric."""
    path = tmp_path / "train.log"
    path.write_text(content)

    with pytest.raises(ImportFormatError, match=message):
        rlwatch.scan(path)


def test_a_missing_log_is_one_clear_error(tmp_path):
    """Not a traceback."""
    with pytest.raises(ImportFormatError, match="no-such"):
        rlwatch.scan(tmp_path / "no-such.log")


def test_a_live_run_and_the_scan_of_its_rows_say_the_same(tmp_path):
    """The reason a scan can be trusted, with a real store in between."""
    with rlwatch.init(store=str(tmp_path / "runs"), source="verl", run_id="live") as run:
        for step, metrics in rows():
            run.log(metrics, step=step)
    store = open_store(str(tmp_path / "runs"))

    report = rlwatch.scan(store.records("live"), source="verl")

    assert [(f.kind, f.severity, f.step, f.message) for f in report.findings] == [
        (f.kind, f.severity, f.step, f.message) for f in store.findings("live")
    ]
    assert report.findings


class Diary:
    """A detector that finds nothing and writes down in which order it heard what."""

    name, family, kinds, requires = "diary", "System", (), (("policy/entropy",),)

    def __init__(self):
        self.entries = []

    def update(self, step):
        self.entries.append(step.step)
        return []

    def arrival(self, step):
        return []

    def notice(self, event):
        self.entries.append(event.kind)


def test_events_are_heeded_where_they_came_between_the_records():
    """A reset starts a baseline anew, in a replay as in the live run."""
    diary = Diary()
    records = [StepRecord(step, {"entropy": 0.5}) for step in range(4)]

    report = rlwatch.scan([*records[:2], Event("reference_reset", 2), *records[2:]], detectors=lambda: [diary])

    assert diary.entries == [0, "reference_reset", 1, 2, 3]  # step 1 closes when step 2 begins
    assert report.steps == 4


def test_events_after_the_last_record_change_nothing():
    """They have nothing to be heeded by."""
    records = [StepRecord(step, {"entropy": 0.5}) for step in range(30)]

    assert rlwatch.scan([*records, Event("note", 30)]).findings == rlwatch.scan(records).findings


def test_a_resumed_log_is_judged_along_its_last_branch(tmp_path):
    """Attempt 1 crashed at 40 and is forgotten by attempt 2, which resumed from 20 and was fine."""
    path = tmp_path / "log.jsonl"
    lines = [json.dumps({"step": step, "data": metrics}) for step, metrics in rows(steps=50)]
    lines += [
        json.dumps({"step": step, "data": metrics}) for step, metrics in rows(steps=120, crash=1000) if step >= 20
    ]
    path.write_text("\n".join(lines) + "\n")

    report = rlwatch.scan(path)

    told = {(f.kind, f.attempt) for f in report.findings if f.severity is not Severity.INFO}
    assert told == {("nonfinite", 1), ("joint_collapse", 1)}


def test_a_branch_follows_each_attempt_to_where_the_next_began():
    """Attempt 3 resumed before attempt 2 began: of attempt 1 only what lies below."""
    steps = {1: range(10), 2: range(5, 12), 3: range(3, 6)}
    records = [StepRecord(s, {"m": 0.0}, attempt=a) for a, span in steps.items() for s in span]

    assert [(r.attempt, r.step) for r in branch(records, 3, 3)] == [(1, 0), (1, 1), (1, 2)]
    assert [(r.attempt, r.step) for r in branch(records, 2, 5)] == [(1, s) for s in range(5)]


def test_each_step_has_its_forecast_and_alarms_come_where_it_fired(tmp_path):
    """Numbers a script can score; what the replay says of a step needs nothing after it."""
    log = [StepRecord(step, {"reward": 0.1 if step < 20 else 0.8}, seq=step + 1) for step in range(40)]
    report = rlwatch.scan(log, forecaster=Oracle)
    part = rlwatch.scan(log[:25], forecaster=Oracle)

    document = report.to_dict()
    assert document["forecast"] == report.forecast
    assert report.forecast[20] == {
        "step": 20,
        "p20": 0.8,
        "p50": 0.8,
        "p100": 1.0,
        "risk": 1.6,
        "alarm": True,
        "limit": "ref_kl",
    }
    assert [row["step"] for row in report.forecast] == list(range(40))
    assert [(a.kind, a.step, a.onset_step) for a in report.alarms] == [("crash_forecast", 22, 20)]
    assert part.forecast == report.forecast[:25]
    assert part.alarms == report.alarms


def test_a_run_too_short_for_a_forecast_says_why(tmp_path):
    """No row without a number among the forecasts."""
    report = rlwatch.scan([StepRecord(step, {"reward": -1.0}) for step in range(3)], forecaster=Oracle)

    assert report.forecast == []
    assert ("forecast", "no forecast because there were 3 steps") in {(n.name, n.reason) for n in report.not_run}


def test_forecasts_of_a_resumed_log_come_once_each():
    """The new attempt relives the branch it continues."""
    rows = [StepRecord(s, {"reward": 0.1}, attempt=1, seq=s + 1) for s in range(6)]
    rows += [StepRecord(s, {"reward": 0.2}, attempt=2, seq=s + 3) for s in range(4, 8)]

    assert [(f.step, f.attempt) for f in rlwatch.scan(rows, forecaster=Oracle).forecasts] == [
        *((step, 1) for step in range(5)),  # the last step of attempt 1 never closed
        *((step, 2) for step in range(4, 8)),
    ]
