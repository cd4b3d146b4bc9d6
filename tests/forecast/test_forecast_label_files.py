"""Tables of runs and labels on disk: what is read, what is refused, and with which words."""

from __future__ import annotations

import gzip
import json
import math
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forecast.scoring.skill import read_scores
from forecast_small_tables import label, run_table

from rlwatch.errors import ConfigError, ImportFormatError, MissingExtraError
from rlwatch.forecast.labels import Label, Labels, RunOutcome, label_runs, labels_of_index, read_labels
from rlwatch.forecast.tables import read_runs

WIDE = "run,step,recipe,reward,grad_norm,note\na,0,lr,0.5,1,x\na,1,lr,nan,,y\nb,0,clip,inf,2,z\n"


def csv(tmp_path: Path, text: str, name: str = "t.csv") -> Path:
    """A file of this text."""
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_a_wide_csv_is_read_by_canonical_names(tmp_path: Path) -> None:
    """NaN, infinity and not measured are three things; a text column is said to be left out."""
    table = read_runs(csv(tmp_path, WIDE))

    assert table.runs == ("a", "b")
    assert table.recipes == ("lr", "clip")
    assert list(table.columns) == ["reward/mean", "optim/grad_norm"]
    assert next(iter(table.stream(0))) == (0, {"reward/mean": 0.5, "optim/grad_norm": 1.0})
    step, row = list(table.stream(0))[1]
    assert step == 1
    assert math.isnan(row.pop("reward/mean"))
    assert row == {}
    assert table.columns["reward/mean"].values[2] == math.inf
    assert "'note'" in table.notes[0]


def test_a_long_csv_is_the_same_table(tmp_path: Path) -> None:
    """In any order of rows, also compressed."""
    lines = ["b,0,grad_norm,2", "a,1,reward,nan", "a,0,grad_norm,1", "a,0,reward,0.5", "b,0,reward,inf"]
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress("\n".join(["run_id,step,metric,value", *lines, ""]).encode()))
    table = read_runs(path)
    wide = read_runs(csv(tmp_path, WIDE))

    assert set(table.runs) == {"a", "b"}
    for run in ("a", "b"):
        np.testing.assert_equal(list(table.stream(table.place[run])), list(wide.stream(wide.place[run])))


def test_parquet_a_folder_and_what_each_file_says_of_its_run(tmp_path: Path) -> None:
    """A file a run, with its own columns; the record in the file's metadata names the twin."""
    for name, column, pair in (("a", "reward/mean", ""), ("a-twin", "truth/acc", "a")):
        rows = {"run": [name] * 2, "recipe": ["lr"] * 2, "family": ["x"] * 2, "step": [0, 1], column: [0.5, None]}
        record = {b"rlwatch.run": json.dumps({"run": name, "pair": pair})}
        pq.write_table(pa.table(rows).replace_schema_metadata(record), tmp_path / f"{name}.parquet")
    table = read_runs(tmp_path)

    assert table.runs == ("a-twin", "a")  # files in order of name: '-' before '.'
    assert table.pairs == ("a", "")
    assert table.visible == ["reward/mean"]
    assert list(table.stream(1)) == [(0, {"reward/mean": 0.5}), (1, {})]
    assert list(table.stream(0)) == [(0, {}), (1, {})]  # what is hidden stays hidden


def test_the_runs_table_beside_it_is_found(tmp_path: Path) -> None:
    """Recipe, family and pair come from it where the rows do not say."""
    path = csv(tmp_path, "run,step,reward\na,0,0.5\nb,0,0.5\n")
    csv(tmp_path, "run,recipe,family,pair\na,lr,x,\nb,lr,x,a\n", "t-runs.csv")
    table = read_runs(path)

    assert (table.recipes, table.families, table.pairs) == (("lr", "lr"), ("x", "x"), ("", "a"))


def test_each_run_reads_the_names_its_trainer_uses(tmp_path: Path) -> None:
    """Two trainers in one table: an empty column of the one does not hide the other's."""
    table = read_runs(csv(tmp_path, "run,step,grad_norm,actor/grad_norm\na,0,1,\nb,0,,2\n"))

    assert table.columns["optim/grad_norm"].values.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("run,reward\na,1\n", "has no column 'step'"),
        ("run,step,reward\na,,1\n", "1 rows have no step"),
        ("run,step,reward\na,0.5,1\n", "steps that are no whole numbers"),
        ("run,step,reward\na,-1,1\n", "negative step, -1"),
        ("run,step,reward\na,3,1\na,3,1\n", "run 'a' repeats step 3"),
        ("run,step,reward\na,3,1\nb,9,1\na,2,1\n", "run 'a' goes back from step 3 to 2"),
        ("run,step,metric,value\na,3,reward,1\na,3,reward,2\n", "a metric of a run twice at one step"),
        ("run,step,reward\n,3,1\n", "has 1 rows that name no run"),
        ("run,step,reward\n", "holds no rows"),
    ],
)
def test_a_wrong_table_is_refused_with_what_is_wrong(tmp_path: Path, text: str, problem: str) -> None:
    """One error, with the file's name."""
    with pytest.raises(ImportFormatError, match=problem) as error:
        read_runs(csv(tmp_path, text))

    assert "t.csv" in str(error.value)


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    """Neither an empty folder nor bytes."""
    with pytest.raises(ImportFormatError, match=r"holds no \.parquet file"):
        read_runs(tmp_path)
    (tmp_path / "x.parquet").write_bytes(b"no")
    with pytest.raises(ImportFormatError, match="cannot be read as a table"):
        read_runs(tmp_path / "x.parquet")
    with pytest.raises(FileNotFoundError):
        read_runs(tmp_path / "absent.csv")


def test_without_pyarrow_one_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ready to be copied."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rlwatch-monitor\[forecast\]'"):
        read_runs(tmp_path / "t.csv")


LABELS = Labels(
    "labels-v1",
    (
        Label("a", RunOutcome.EVENT, 104, "reward", 200, ("nan", "reward")),
        Label("b", RunOutcome.CLEAN, steps=3),
        Label("c", RunOutcome.AMBIGUOUS, steps=10, judged=("reward",)),
    ),
)


@pytest.mark.parametrize("name", ["labels.csv", "labels.parquet"])
def test_labels_are_read_as_they_were_written(tmp_path: Path, name: str) -> None:
    """And no other file is left."""
    assert read_labels(LABELS.write(tmp_path / name)) == LABELS
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_labels_go_into_csv_or_parquet_only(tmp_path: Path) -> None:
    """The name says which."""
    with pytest.raises(ImportFormatError, match=r"ends in .csv or .parquet"):
        LABELS.write(tmp_path / "labels.json")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("run,onset\na,1\n", "has no column 'class'"),
        ("run,onset,class\na,,dirty\n", "class 'dirty' of run 'a' is none of event, early, ambiguous, faulty, clean"),
        ("run,onset,class\na,,event\n", "run 'a' is of class event and has onset None"),
        ("run,onset,class\na,5,clean\n", "run 'a' is of class clean and has onset 5"),
        ("run,onset,class\na,,clean\na,,clean\n", "names the run 'a' twice"),
    ],
)
def test_wrong_labels_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    """With the run."""
    with pytest.raises(ImportFormatError, match=problem):
        read_labels(csv(tmp_path, text))


def test_an_index_names_the_repository_of_each_run(tmp_path: Path) -> None:
    """Whatever became of the run; without the column there is none."""
    text = "run_id,repo,severity,onset_step\na,one/lab,healthy,\nb,one/lab,dead,1\nc,,transient,7\n"
    assert [each.repository for each in labels_of_index(csv(tmp_path, text))] == ["one/lab", "one/lab", ""]
    assert {each.repository for each in labels_of_index(csv(tmp_path, "run,severity,onset_step\na,healthy,\n"))} == {""}


def test_an_index_of_people_becomes_labels(tmp_path: Path) -> None:
    """Severities as classes; an onset before step 55 is early."""
    text = "run_id,severity,onset_step\na,healthy,\nb,transient,80\nc,instability,280.0\nd,dead,1\ne,crash,136\n"
    found = list(labels_of_index(csv(tmp_path, text)))

    assert [(each.run, each.outcome.value, each.onset) for each in found] == [
        ("a", "clean", None),
        ("b", "ambiguous", None),
        ("c", "event", 280),
        ("d", "early", 1),
        ("e", "event", 136),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("run_id,severity\na,healthy\n", "has no column 'onset_step'"),
        ("run_id,severity,onset_step\na,ill,\n", "severity 'ill' of run 'a' is none of healthy"),
        ("run_id,severity,onset_step\na,dead,\n", "run 'a' is of severity dead and has no onset_step"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    """With the run."""
    with pytest.raises(ImportFormatError, match=problem):
        labels_of_index(csv(tmp_path, text))


TABLE = run_table({"a": {"reward/mean": [0.5] * 3}, "b": {"reward/mean": [0.5] * 2}}, steps={"b": [10, 20]})


def test_scores_are_put_on_the_rows_of_the_table(tmp_path: Path) -> None:
    """In any order; what is not there, is empty or NaN is no forecast; infinity is a score."""
    found = read_scores(csv(tmp_path, "run,step,score\nb,20,inf\na,1,0.5\na,2,nan\nb,10,\n", "mine.csv"), TABLE)

    np.testing.assert_array_equal(found.score, [np.nan, 0.5, np.nan, np.nan, np.inf])
    assert (found.name, found.alarms_only) == ("mine", False)


def test_alarms_have_no_dial_and_scores_beside_them_win(tmp_path: Path) -> None:
    """0 is no alarm."""
    alarms = read_scores(csv(tmp_path, "run,step,alarm\na,0,1\na,1,0\n"), TABLE, "mine")
    both = read_scores(csv(tmp_path, "run,step,alarm,score,p50\na,0,1,0.2,0.7\n"), TABLE)

    np.testing.assert_array_equal(alarms.score, [1, np.nan, np.nan, np.nan, np.nan])
    assert (alarms.name, alarms.alarms_only) == ("mine", True)
    assert (both.score[0], both.alarms_only) == (0.2, False)
    assert list(both.chances) == [50]
    assert both.chances[50][0] == 0.7


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("run,step\na,0\n", r"needs run, step and score \(or alarm\)"),
        ("run,step,score\nz,0,1\n", "scores the run 'z', which is not in the table"),
        ("run,step,score\na,7,1\n", "scores step 7 of 'a', which the table has not"),
        ("run,step,score\nb,15,1\n", "scores step 15 of 'b', which the table has not"),
        ("run,step,score\na,1,1\na,1,2\n", "scores step 1 of 'a' twice"),
        ("run,step,score,p20\na,1,1,1.5\n", "gives 1.5 in 'p20'; a chance lies in"),
    ],
)
def test_wrong_scores_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    """With the run and the step."""
    with pytest.raises(ImportFormatError, match=problem):
        read_scores(csv(tmp_path, text), TABLE)


def test_a_table_of_some_runs_is_labelled_as_the_whole() -> None:
    """Any runs, in any order."""
    table = run_table({"a": {"truth/acc": [0.5] * 100 + [0.1] * 50}, "b": {"truth/acc": [0.5] * 60}})
    part = table.only([1, 0])

    assert part.runs == ("b", "a")
    assert list(label_runs(part))[::-1] == list(label_runs(table))
    with pytest.raises(ConfigError, match="'a'"):
        Labels("x", (label("b", None),)).of(part)
