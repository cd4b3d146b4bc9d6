"""A run says the same on every face: terminal, JSON, report and dashboard, scanned as a log or stored as a run."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from html import unescape
from pathlib import Path

import pytest
from app_world import html, no_traceback, run_page
from typer.testing import CliRunner

import rlwatch
from rlwatch.cli.app import app
from rlwatch.cli.import_log import import_run, info_of
from rlwatch.importers import read_log
from rlwatch.records import Finding, RunInfo, Severity, StepRecord
from rlwatch.scanner import replay
from rlwatch.store.url import open_store
from rlwatch.view import RunView, view_of_run

ROOT = Path(__file__).parents[2]
LOGS = {
    "entropy-collapse-trl-console.log": "collapsed@88",
    "mismatch-growth-trl-trainer_state.json": "collapsed@68",
    "nonfinite-verl.jsonl": "collapsed@132",
    "healthy-verl-console.log": "healthy",
    "names-of-nobody.jsonl": "not judged",
}


@dataclass(frozen=True)
class Faces:
    """What each face says of a log; ``texts`` are for people, ``documents`` for scripts."""

    view: RunView
    texts: dict[str, str]
    documents: dict[str, dict]


@pytest.fixture(scope="module")
def seen():
    """Log -> its faces, as far as they were looked at: each once for all tests."""
    return {}


@pytest.fixture(params=LOGS)
def faces(request, store_dir, tmp_path, seen):
    """The log, and what each face says of it."""
    if request.param not in seen:
        seen[request.param] = rendered(logged(request.param, tmp_path), store_dir)
    return request.param, seen[request.param]


def rendered(path, store_dir):
    """The log scanned, then imported and rendered on every other face."""
    log, store = str(path), ("--store", str(store_dir))
    said("import", log, "--run-id", "run-1", *store)
    page = run_page()
    assert no_traceback(page)
    texts = {
        "scan": said("scan", "-v", log),
        "show": said("show", "run-1", "--findings", *store),
        "report as HTML": words_of(said("report", "run-1", *store, "-o", "-")),
        "report as Markdown": re.sub(
            r"\\(.)", r"\1", unescape(said("report", "run-1", *store, "--format", "md", "-o", "-"))
        ),
        "report of the log": words_of(said("report", log, "-o", "-")),
        "dashboard": words_of(html(page)),
        "notebook": words_of(notebook(rlwatch.open(store_dir)["run-1"])),
        "notebook of the log": words_of(notebook(rlwatch.scan(path))),
    }
    documents = {
        "scan": json.loads(said("scan", log, "--format", "json")),
        "show": json.loads(said("show", "run-1", "--format", "json", *store)),
        "runs": json.loads(said("runs", "--format", "json", *store))["runs"][0],
    }
    source = open_store(store_dir)
    return Faces(
        view_of_run(source, source.run("run-1")), {face: " ".join(t.split()) for face, t in texts.items()}, documents
    )


def logged(name, directory):
    """A sample log; one in which nothing that matters has a name that anybody knows is written here."""
    if LOGS[name] != "not judged":
        return ROOT / "sample_logs" / name
    rows = ({"step": step, "grad_norm": 1.0, "my_return_v2": 0.5} for step in range(60))
    (directory / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return directory / name


def said(*arguments):
    """The output of a command that found its log or run."""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code in (0, 1, 3), done.output
    return done.stdout


def notebook(shown):
    """As Jupyter, VS Code and Colab ask for it."""
    return getattr(shown, "_repr_html" + "_")()


def words_of(markup):
    """What a browser shows of it."""
    bare = re.sub(r"(?s)<(style|svg).*?</\1>", " ", markup)
    return unescape(re.sub(r"</?(?:b|code|span)\b[^>]*>", "", re.sub(r"</?(?!b\b|code\b|span\b)[^>]*>", " ", bare)))


def test_every_face_says_the_same(faces):
    """Headline, state, cause, how sure, since when, what to do first, and the numbers of the findings."""
    log, shown = faces
    view = shown.view

    assert view.verdict.name == LOGS[log]
    for name, text in shown.texts.items():
        assert " ".join(view.headline.split()) in text, name
        rest = view.verdict.text.removeprefix(view.verdict.brief).lstrip("; ")  # the page puts it below the headline
        assert " ".join(rest[1:].split()) in text, name
        if view.cause is not None:
            assert view.cause.title in text, name
            assert view.sureness.words in text.lower(), name
            assert re.search(rf"\b{view.onset_step}\b", text.replace("\u202f", "")), name
            assert view.advice[0].name in text, name
            assert view.cause.why in text, name
    for name in shown.texts.keys() - {"dashboard"}:
        for finding in view.findings:
            if finding.severity.rank and finding.kind in {e.kind for e in (view.cause.evidence if view.cause else ())}:
                assert finding.message[:60] in shown.texts[name], (name, finding.kind)


def test_every_document_says_the_same(faces):
    """Verdict and diagnosis are one and the same object, and the findings are the same rows."""
    _, shown = faces
    scan, show, runs = shown.documents["scan"], shown.documents["show"], shown.documents["runs"]

    assert scan["verdict"] == show["verdict"] == runs["verdict"] == shown.view.verdict.to_dict()
    assert scan["diagnosis"] == show["diagnosis"]
    assert scan["headline"] == show["headline"] == shown.view.headline
    assert scan["recoveries"] == show["recoveries"]
    assert len(scan["findings"]) == len(show["findings"])
    assert [(f["kind"], f["onset_step"], f["message"]) for f in scan["findings"]] == [
        (f["kind"], f["onset_step"], f["message"]) for f in show["findings"]
    ]


@pytest.mark.parametrize("every", [10, 25])
@pytest.mark.parametrize("log", ["entropy-collapse-trl-console.log", "mismatch-growth-trl-trainer_state.json"])
def test_a_coarsely_logged_run_is_diagnosed_alike_as_a_log_and_as_a_run(log, every, store_dir):
    """Onsets of a log with a row every so many steps are that coarse: whoever diagnoses must know it."""
    [imported] = read_log(ROOT / "sample_logs" / log)
    coarse = replace(imported, records=[replace(record, step=record.step * every) for record in imported.records])
    report = replay(coarse)
    store = open_store(store_dir)
    info = info_of(coarse, "run-1", project="p", name="", source="", now=1.0)
    import_run(store, info, list(coarse.records), [*report.findings, *report.view.recoveries, *report.forecasts], 1.0)

    view = view_of_run(store, store.run("run-1"))

    assert view.explanation.to_dict() == report.diagnosis.to_dict()
    assert view.verdict == report.view.verdict
    assert view.steps == report.view.steps


def test_a_knob_that_was_turned_is_blamed_on_every_face(faces):
    """The learning rate of this run grew by a slip in its schedule: in the rows, and nowhere else."""
    log, shown = faces
    turned = log == "entropy-collapse-trl-console.log"

    assert turned == (shown.view.cause is not None and shown.view.cause.knob == "learning_rate")
    if turned:
        assert "Learning rate x" in shown.view.cause.title
        assert all(one["diagnosis"]["causes"][0]["knob"] == "learning_rate" for one in _with_diagnosis(shown))


def _with_diagnosis(shown):
    return [shown.documents["scan"], shown.documents["show"]]


def test_an_option_changed_at_a_resume_is_blamed(store_dir):
    """The rows hold no learning rate; the configurations of the two attempts do."""
    store = open_store(store_dir)
    for attempt, config in enumerate(({"lr": 1e-6}, {"lr": 3e-5}), start=1):
        writer = store.open_run(RunInfo("run-1", config=config))
        first, last = (1, 150) if attempt == 1 else (151, 200)
        rows = [StepRecord(step, {"reward": 0.5}, attempt=attempt) for step in range(first, last)]
        writer.write(rows)
        writer.close()
    found = Finding("d", "reward_drop", Severity.CRITICAL, 190, 180, "it fell", attempt=2)
    writer = store.amend_run("run-1")
    writer.write([found])
    writer.close()

    cause = view_of_run(store, store.run("run-1")).cause

    assert cause.title == "Learning rate x 30 since step 151 (1e-06 to 3e-05)"
    assert cause.sure.value == "strong"


def test_nobody_but_the_monitor_and_the_view_diagnoses():
    """Two callers who know different things of a run would say different things of it."""
    calls = {
        str(path.relative_to(ROOT))
        for room in ("rlwatch", "app")
        for path in (ROOT / room).rglob("*.py")
        if re.search(r"(?<!def )(?<!>>> )\bdiagnose\(", path.read_text(encoding="utf-8"))
    }

    assert calls == {"rlwatch/monitor/step_judge.py", "rlwatch/view.py"}
