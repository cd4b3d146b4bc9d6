"""scan and import: a log judged, a log kept."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Invoke, strict, write_log

from rlwatch.alerts.rules import AlertingConfig
from rlwatch.cli import console
from rlwatch.cli.import_log import plain_id
from rlwatch.monitor.watchman import Watchman
from rlwatch.records import RunState, StepRecord
from rlwatch.store.url import open_store

HEALTHY = {"loss": 0.1, "grad_norm": 0.5, "entropy": 1.2, "reward": 0.3, "kl": 0.01}
BROKEN = HEALTHY | {"grad_norm": math.nan, "entropy": math.nan, "kl": math.nan}


def _rows(healthy: int = 60, broken: int = 0) -> list[dict[str, Any]]:
    rows = [
        HEALTHY | {"entropy": 1.2 + 0.01 * (step % 3), "reward": 0.3 + 0.01 * (step % 4), "step": step}
        for step in range(1, healthy + 1)
    ]
    return rows + [BROKEN | {"step": healthy + extra} for extra in range(1, broken + 1)]


@pytest.fixture
def healthy_log(tmp_path: Path) -> Path:
    """Sixty steps of nothing special."""
    return write_log(tmp_path / "healthy.log", _rows())


@pytest.fixture
def broken_log(tmp_path: Path) -> Path:
    """Sixty good steps, then NaN everywhere."""
    return write_log(tmp_path / "broken.log", _rows(broken=10))


@pytest.fixture
def two_runs(tmp_path: Path) -> Path:
    """A table of two runs, of which the second breaks."""
    lines = ["run_id,step,metric,value"]
    for run, rows in (("good", _rows()), ("bad", _rows(broken=10))):
        for row in rows:
            lines += [f"{run},{row['step']},{name},{value}" for name, value in row.items() if name != "step"]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_of_many_unknown_names_a_few_are_shown(tmp_path: Path, invoke: Invoke) -> None:
    """And how many more there are."""
    names = [f"odd_{i:02}" for i in range(16)]
    log = tmp_path / "wide.csv"
    log.write_text("\n".join([",".join(["step", "reward", *names]), *(f"{i}" + ",1" * 17 for i in range(9))]) + "\n")

    (line,) = [line for line in invoke("scan", "-v", log).stdout.splitlines() if line.startswith("unknown metrics")]

    assert line.endswith("odd_10, odd_11 and 4 more")


def test_a_log_of_which_nothing_that_matters_is_known_is_not_called_ok(tmp_path: Path, invoke: Invoke) -> None:
    """That nothing was found there says nothing; the names that may be what matters are told first, also in JSON."""
    log = tmp_path / "own.jsonl"
    row = {"apples": 1.0, "my_reward_v2": 0.5, "train_step_ms": 3.0, "timing_s/gen": 2.0, "grad_norm": 1.0}
    log.write_text("".join(json.dumps({"step": step, **row}) + "\n" for step in range(40)))

    result = invoke("scan", log)
    verdict = json.loads(invoke("scan", log, "--format", "json").stdout)["verdict"]

    assert result.exit_code == 3
    text = "Not judged: no reward, entropy, KL or length is known; unknown names: my_reward_v2, apples"
    missing = ["reward", "entropy", "KL", "length"]
    assert " ".join(result.stdout.split()).startswith(text)
    said = {"name": "not judged", "state": "not judged", "word": "not judged", "at": None, "urgency": "warning"}
    assert verdict == said | {
        "since": None, "level": None, "brief": text, "text": text, "judged": False, "missing": missing
    }  # fmt: skip


def test_a_failure_is_told_also_where_nothing_that_matters_is_known(tmp_path: Path, invoke: Invoke) -> None:
    """With how little was looked at."""
    log = tmp_path / "own.jsonl"
    rows = [{"step": step, "grad_norm": 1.0 if step < 30 else float("nan"), "mine": 1.0} for step in range(40)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))

    result = invoke("scan", "-v", log)

    assert result.exit_code == 1
    assert result.stdout.startswith("Collapsed at step 30: ")
    assert "not judged: no reward, entropy, KL or length is known; unknown names: mine" in " ".join(
        result.stdout.split()
    )


def test_what_is_known_and_not_judged_is_counted_by_reason(tmp_path: Path, invoke: Invoke) -> None:
    """Names of trainers that tell nothing of a failure are not called unknown."""
    log = tmp_path / "run.jsonl"
    row = {"reward": 0.5, "timing_s/gen": 2.0, "timing_s/step": 3.0, "timing_s/ref": 1.0, "perf/mfu/actor": 0.4}
    log.write_text("".join(json.dumps({"step": step, **row}) + "\n" for step in range(40)))

    result, report = invoke("scan", "-v", log), json.loads(invoke("scan", log, "--format", "json").stdout)

    assert "3 metrics recognised but not used: speed" in result.stdout
    assert (report["unknown"], sorted(report["unjudged"])) == ([], ["perf/mfu/actor", "timing_s/gen", "timing_s/ref"])
    assert report["verdict"]["missing"] == ["entropy", "KL", "length"]
    assert report["verdict"]["judged"]


def test_a_healthy_log_exits_0_and_says_so(healthy_log: Path, invoke: Invoke) -> None:
    """With how much was read, and which detectors lacked their metrics."""
    result = invoke("scan", healthy_log)

    assert result.exit_code == 0
    assert "trl-console, 60 steps" in result.stdout
    assert result.stdout.startswith("Healthy: no failure was found.\n")
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("not judged ")]
    assert line.startswith("not judged  no length, ")
    for flag in ("-v", "--verbose", "--all"):
        assert "check skipped: mismatch_growth: needs " in invoke("scan", healthy_log, flag).stdout


def test_the_answer_is_fifteen_lines_of_eighty_columns_and_says_nothing_twice(
    broken_log: Path, healthy_log: Path, invoke: Invoke
) -> None:
    """Headline, cause and evidence, what to do, when, what was not judged."""
    for log in (broken_log, healthy_log, Path(__file__).parents[2] / "sample_logs/entropy-collapse-trl-console.log"):
        lines = invoke("scan", log).stdout.splitlines()
        assert len(lines) <= 15
        assert all(len(line) <= 80 for line in lines)
        assert len(set(lines)) == len(lines)
    said = invoke("scan", broken_log).stdout
    labels = [
        label for label in ("cause", "evidence", "do", "alarms", "not judged", "reading") if f"\n{label} " in said
    ]
    assert labels == ["cause", "evidence", "do", "alarms", "not judged", "reading"]


def test_several_runs_give_a_line_each(two_runs: Path, invoke: Invoke) -> None:
    """Behind their names; -v gives the whole of each."""
    lines = invoke("scan", two_runs).stdout.splitlines()

    assert [line.split(": ")[1:2] for line in lines] == [["Healthy"], ["Collapsed at step 61"]]
    assert "Findings" in invoke("scan", "-v", two_runs).stdout


def test_a_table_with_names_of_its_own_is_read_by_their_words(tmp_path: Path, invoke: Invoke) -> None:
    """What was taken for what is told, and so is what nothing judges."""
    rows = [f"{step},0.4,{250 if step < 60 else 20000},0.01,1.0,3" for step in range(1, 81)]
    log = tmp_path / "own.csv"
    log.write_text("\n".join(["step,avg_reward,GradientNorm,clipped,meanEntropy,fmt", *rows]) + "\n")

    said = invoke("scan", "-v", log).stdout
    told = strict(invoke("scan", log, "--format", "json").stdout)

    assert "80 steps, 3 known metrics" in said
    assert "GradientNorm as optim/grad_norm" in said
    assert "unknown metrics, not used: clipped, fmt" in said
    assert told["unknown"] == ["clipped", "fmt"]
    assert told["guessed"]["avg_reward"] == "reward/mean"
    assert "grad_rise" in {alarm["kind"] for alarm in told["alarms"]}


def test_a_critical_alarm_exits_1_and_is_named_first(broken_log: Path, invoke: Invoke) -> None:
    """Where a person looks first."""
    result = invoke("scan", "-v", broken_log)

    assert result.exit_code == 1
    assert result.stdout.startswith("Collapsed at step 61: values became non-finite")
    assert result.stdout.index("most likely: ") < result.stdout.index("What to do") < result.stdout.index("Findings")
    assert "Findings" in result.stdout
    assert "Alerts (would have been sent)" in result.stdout


def test_the_json_object_has_all_its_parts(broken_log: Path, invoke: Invoke) -> None:
    """Those the documents promise, under their names, and strictly."""
    result = invoke("scan", broken_log, "--format", "json")
    document = strict(result.stdout)

    assert result.exit_code == 1
    assert {"source", "format", "steps", "metrics", "findings", "alarms", "forecast", "not_run", "diagnosis"} <= set(
        document
    )
    assert document["steps"] == 70
    assert "policy/entropy" in document["metrics"]
    assert bool(document["forecast"]) != ("forecast" in {part["name"] for part in document["not_run"]})
    assert document["diagnosis"]["causes"][0]["kind"] == "nonfinite"
    assert document["diagnosis"]["causes"][0]["actions"]
    assert all(part["reason"] for part in document["not_run"])
    for finding in document["findings"]:
        assert {"detector", "kind", "severity", "onset_step", "step", "message", "evidence"} <= set(finding)
    assert [(a["kind"], a["severity"], a["step"]) for a in document["alarms"]] == [("nonfinite", "critical", 61)]
    assert all(alarm["reason"] for alarm in document["alarms"])


def test_what_was_said_of_a_step_needs_nothing_after_it(tmp_path: Path, invoke: Invoke) -> None:
    """A log cut short gives the same findings up to the cut."""
    whole = strict(invoke("scan", write_log(tmp_path / "a.log", _rows(broken=10)), "--format", "json").stdout)
    cut = strict(invoke("scan", write_log(tmp_path / "b.log", _rows(broken=2)), "--format", "json").stdout)

    assert [f for f in whole["findings"] if f["step"] <= 61] == [f for f in cut["findings"] if f["step"] <= 61]


def test_several_runs_give_a_list_and_one_can_be_chosen(two_runs: Path, invoke: Invoke) -> None:
    """The code is that of the worst."""
    both = invoke("scan", two_runs, "--format", "json")
    good = invoke("scan", two_runs, "--run", "good", "--format", "json")

    assert both.exit_code == 1
    assert [report["run"] for report in strict(both.stdout)] == ["good", "bad"]
    assert good.exit_code == 0
    assert strict(good.stdout)["run"] == "good"
    assert invoke("scan", two_runs).stdout.count("Collapsed at step") == 1


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no such file"),
        (b"", "empty"),
        (b"hello\nworld\n", "no known format"),
        (b"\x00\x01\x02\xff" * 500, "binary"),
    ],
)
def test_what_cannot_be_read_exits_2_with_one_line(
    content: bytes | None, complaint: str, tmp_path: Path, invoke: Invoke
) -> None:
    """On stderr, naming the file; stdout stays empty."""
    path = tmp_path / "log.txt"
    if content is not None:
        path.write_bytes(content)

    for options in ((), ("--format", "json")):
        result = invoke("scan", path, *options)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(f"error: {path}")
        assert complaint in result.stderr
        assert result.stderr.count("\n") == 1


def test_an_unknown_run_or_format_exits_2_and_names_what_there_is(two_runs: Path, invoke: Invoke) -> None:
    """So that the next try succeeds."""
    run = invoke("scan", two_runs, "--run", "ugly")
    read_as = invoke("scan", two_runs, "--as", "telepathy")

    assert (run.exit_code, read_as.exit_code) == (2, 2)
    assert "'good', 'bad'" in run.stderr
    assert "trl-console" in read_as.stderr


def test_rules_of_a_file_decide_about_alarms(broken_log: Path, tmp_path: Path, invoke: Invoke) -> None:
    """A wrong one is refused, not ignored."""
    config = tmp_path / "mine.toml"
    config.write_text("this is no toml")

    assert invoke("scan", broken_log, "--config", config).exit_code == 2
    assert invoke("scan", broken_log, "--config", tmp_path / "none.toml").exit_code == 2


def test_no_bar_is_drawn_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the size of the log."""
    records = [StepRecord(1, {}), StepRecord(2, {})]

    assert console.progress_bar(records, worth=1) is records
    with console.reading(Path("x")):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_bar_is_drawn_on_a_terminal_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr."""
    records = [StepRecord(1, {}), StepRecord(2, {})]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")

    assert list(console.progress_bar(records, worth=1)) == records
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "replaying" in captured.err


def test_an_imported_log_is_a_finished_run_with_records_and_findings(
    broken_log: Path, tmp_path: Path, invoke: Invoke
) -> None:
    """Bit for bit, and nobody is alerted."""
    result = invoke("import", broken_log, "--project", "math", "--name", "seed 3", "--store", tmp_path / "runs")

    store = open_store(tmp_path / "runs")
    assert (result.exit_code, result.stdout) == (0, "broken\n")
    run = store.run("broken")
    assert (run.project, run.name, run.state, run.last_step) == ("math", "seed 3", RunState.FINISHED, 70)
    assert [f.kind for f in store.findings("broken")] == ["nonfinite"]
    assert math.isnan(store.series("broken", ["entropy"])["entropy"].values[-1])
    assert len(store.records("broken")) == 70
    assert store.alerts() == []
    assert store.outbox() == []


def test_importing_again_is_refused_and_changes_nothing(healthy_log: Path, tmp_path: Path, invoke: Invoke) -> None:
    """Another id is accepted."""
    runs = tmp_path / "runs"
    invoke("import", healthy_log, "--store", runs)

    again = invoke("import", healthy_log, "--store", runs)
    renamed = invoke("import", healthy_log, "--store", runs, "--run-id", "second", "--format", "json")

    assert (again.exit_code, again.stdout) == (2, "")
    assert "'healthy' exists" in again.stderr
    assert open_store(runs).run("healthy").attempt == 1
    assert strict(renamed.stdout) == [{"run_id": "second", "steps": 60, "findings": 0, "format": "trl-console"}]


def test_an_imported_failure_of_the_past_alerts_no_one(broken_log: Path, tmp_path: Path, invoke: Invoke) -> None:
    """It is judged where it is imported: the watchman of a dashboard finds nothing left to judge."""
    invoke("import", broken_log, "--store", tmp_path / "runs")
    store = open_store(tmp_path / "runs")
    (run,) = store.runs()
    found = store.findings(run.run_id)
    judged, last = store.judged(run.run_id)

    Watchman(store, AlertingConfig()).look()

    assert judged == last > 0
    assert store.findings(run.run_id) == found != []
    assert store.alerts(run.run_id) == []


def test_of_a_log_with_several_runs_all_or_none_are_imported(two_runs: Path, tmp_path: Path, invoke: Invoke) -> None:
    """An id that is taken stops the whole import."""
    runs = tmp_path / "runs"
    assert invoke("import", two_runs, "--run", "bad", "--store", runs).stdout == "bad\n"

    refused = invoke("import", two_runs, "--store", runs)
    named = invoke("import", two_runs, "--run-id", "x", "--store", runs)

    assert (refused.exit_code, named.exit_code) == (2, 2)
    assert [run.run_id for run in open_store(runs).runs()] == ["bad"]
    assert "--run" in named.stderr


def test_runs_whose_names_give_the_same_id_are_not_mixed(tmp_path: Path, invoke: Invoke) -> None:
    """They can be imported one by one."""
    log = tmp_path / "runs.csv"
    log.write_text("run_id,step,metric,value\n" + "".join(f"{run},1,entropy,1.0\n" for run in ("a/b", "a:b")))

    both = invoke("import", log, "--store", tmp_path / "runs")
    one = invoke("import", log, "--run", "a:b", "--run-id", "second", "--store", tmp_path / "runs")

    assert both.exit_code == 2
    assert "two runs of this log would be called 'a-b'" in both.stderr
    assert (one.exit_code, [run.run_id for run in open_store(tmp_path / "runs").runs()]) == (0, ["second"])


def test_a_log_of_two_attempts_is_imported_as_two_attempts(tmp_path: Path, invoke: Invoke) -> None:
    """The trainer resumed at step 21."""
    log = write_log(tmp_path / "resumed.log", [*_rows(40), *_rows(60)[20:]])

    assert invoke("import", log, "--store", tmp_path / "runs").exit_code == 0

    store = open_store(tmp_path / "runs")
    assert store.run("resumed").attempt == 2
    assert [r.attempt for r in store.records("resumed")] == [1] * 40 + [2] * 40
    assert len(list(store.branch("resumed", 2, 21))) == 20


def test_a_missing_log_is_not_imported(tmp_path: Path, invoke: Invoke) -> None:
    """And no store is made."""
    result = invoke("import", tmp_path / "none.log", "--store", tmp_path / "runs")

    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "run_id"),
    [
        ("train.v2", "train.v2"),
        ("a/b:c d", "a-b-c-d"),
        ("../..", "imported"),
        ("x" * 300, "x" * 120),
        ("λ", "imported"),
    ],
)
def test_any_name_becomes_an_id_a_store_accepts(name: str, run_id: str) -> None:
    """Paths and odd characters are left out."""
    assert plain_id(name) == run_id


def test_the_real_shape_of_a_trainer_state_is_read(tmp_path: Path, invoke: Invoke) -> None:
    """As HF's Trainer saves it beside each checkpoint."""
    state = {"global_step": 60, "log_history": [row | {"epoch": 0.1} for row in _rows()], "max_steps": 60}
    directory = tmp_path / "my-model" / "checkpoint-60"
    directory.mkdir(parents=True)
    path = directory / "trainer_state.json"
    path.write_text(json.dumps(state))

    result = invoke("import", path, "--store", tmp_path / "runs")

    assert (result.exit_code, result.stdout) == (0, "my-model\n")


@pytest.mark.parametrize("command", ["scan", "import", "watch"])
def test_each_way_of_reading_says_what_names_were_taken_for(command: str, tmp_path: Path, invoke: Invoke) -> None:
    """Of a log of no known trainer; what scripts take from `import` stays the id alone."""
    log = tmp_path / "own.log"
    log.write_text("".join(f"step={n} reward=0.{n} resp_len={90 + n} H=1.5\n" for n in range(1, 9)))
    more = {
        "scan": ("-v",),
        "import": ("--store", tmp_path / "runs"),
        "watch": ("--once", "--store", tmp_path / "runs"),
    }

    told = invoke(command, log, *more[command])
    lines = (told.stderr if command == "import" else told.stdout).splitlines()

    assert "read as: reward as reward/mean; guessed: resp_len as len/mean" in lines
    assert "unknown metrics, not used: H" in lines
    assert command != "import" or told.stdout == "own\n"
