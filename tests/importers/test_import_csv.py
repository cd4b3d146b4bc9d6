"""Long and wide CSV."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest

from rlwatch.errors import ImportFormatError
from rlwatch.importers import ImportedRun, read_log


def write(tmp_path: Path, *lines: str, name: str = "runs.csv") -> Path:
    log = tmp_path / name
    log.write_text("\n".join(lines) + "\n")
    return log


def rows(run: ImportedRun) -> list[tuple[int, str]]:
    return [(record.step, repr(record.metrics)) for record in run.records]


TWO = (
    "run_id,step,metric,value",
    "a,1,loss,0.5",
    "a,1,kl,nan",
    "b,1,loss,inf",
    "a,2,loss,-inf",
    "b,2,loss,0.25",
)


def test_a_long_csv_gives_one_run_for_each_id(tmp_path):
    """Interleaved or not; names in order of appearance."""
    a, b = read_log(write(tmp_path, *TWO))

    assert (a.name, rows(a)) == ("a", [(1, "{'loss': 0.5, 'kl': nan}"), (2, "{'loss': -inf}")])
    assert (b.name, rows(b)) == ("b", [(1, "{'loss': inf}"), (2, "{'loss': 0.25}")])
    assert [record.seq for record in b.records] == [1, 2]


def test_one_run_can_be_picked(tmp_path):
    """By its id; the others are not kept."""
    [b] = read_log(write(tmp_path, *TWO), run="b")

    assert b.name == "b"
    assert len(b.records) == 2


def test_an_unknown_run_is_an_error_that_names_the_runs(tmp_path):
    """So that the next try is right."""
    with pytest.raises(ImportFormatError, match=r"no run 'c'; it has: 'a', 'b'"):
        read_log(write(tmp_path, *TWO), run="c")


def test_a_log_of_one_unnamed_run_refuses_another_name(tmp_path):
    """It goes by the name of its file."""
    log = write(tmp_path, "step,metric,value", "1,loss,0.5")

    assert read_log(log, run="runs")[0].records[0].metrics == {"loss": 0.5}
    with pytest.raises(ImportFormatError, match="'runs'"):
        read_log(log, run="other")


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_separators_and_quotes(tmp_path, separator):
    """As spreadsheets write them."""
    log = write(
        tmp_path, separator.join(["run_id", "step", "metric", "value"]), separator.join(["a", "1", '"loss"', "0.5"])
    )

    assert read_log(log)[0].records[0].metrics == {"loss": 0.5}


@pytest.mark.parametrize(
    "lines",
    [
        ("Iter,reward", "7,0.5"),
        ("reward,training_step", "0.5,7"),
        ("epoch,reward", "7,0.5"),
        ("epoch,reward,step", "1,0.5,7"),
    ],
)
def test_the_column_of_steps_has_many_names(tmp_path, lines):
    """An epoch is one only where there is nothing better."""
    [run] = read_log(write(tmp_path, *lines))

    assert [(record.step, record.metrics["reward"]) for record in run.records] == [(7, 0.5)]


def test_gzip_is_seen_through(tmp_path):
    """Whatever the file is called."""
    log = tmp_path / "runs.csv.gz"
    log.write_bytes(gzip.compress("\n".join(TWO).encode()))

    assert [run.name for run in read_log(log)] == ["a", "b"]


def test_the_same_cell_twice_is_two_records_of_one_step(tmp_path):
    """Neither is lost; the later one counts when the step closes."""
    [run] = read_log(write(tmp_path, "step,metric,value", "1,loss,0.5", "1,kl,0.1", "1,loss,0.25"))

    assert [(r.attempt, r.step, r.metrics) for r in run.records] == [
        (1, 1, {"loss": 0.5, "kl": 0.1}),
        (1, 1, {"loss": 0.25}),
    ]


def test_a_table_sorted_by_metric_reads_as_one_sorted_by_step(tmp_path):
    """The order of lines of a table carries no meaning."""
    cells = [("loss", s, s * 0.5) for s in (1, 2, 3)] + [("kl", s, s * 0.1) for s in (1, 3)]
    [run] = read_log(write(tmp_path, "step,metric,value", *(f"{s},{m},{v!r}" for m, s, v in cells)))

    assert [(r.seq, r.attempt, r.step, sorted(r.metrics)) for r in run.records] == [
        (1, 1, 1, ["kl", "loss"]),
        (2, 1, 2, ["loss"]),
        (3, 1, 3, ["kl", "loss"]),
    ]


@pytest.mark.parametrize("step", ["-1", "1.5", "", "nan", "one"])
def test_a_bad_step_is_an_error_that_names_the_line(tmp_path, step):
    """It is the table's own column."""
    with pytest.raises(ImportFormatError, match=r"runs\.csv:3: the step must be"):
        read_log(write(tmp_path, "run_id,step,metric,value", "a,1,loss,0.5", f"a,{step},loss,0.5"))


def test_cells_that_cannot_be_used_are_counted(tmp_path):
    """Text, an empty value (not measured), a line that is too short."""
    [run] = read_log(
        write(tmp_path, "run_id,step,metric,value", "a,1,loss,0.5", "a,1,kl,", "a,1,note,hello", "a,1", "a,2,loss,0.5")
    )

    assert rows(run) == [(1, "{'loss': 0.5}"), (2, "{'loss': 0.5}")]
    assert [(s.count, s.lines) for s in run.skipped] == [(1, (3,)), (1, (4,)), (1, (5,))]


def test_the_last_line_needs_no_line_end(tmp_path):
    """Its value may be the very NaN."""
    log = tmp_path / "runs.csv"
    log.write_text("run_id,step,metric,value\na,1,loss,nan")

    assert math.isnan(read_log(log)[0].records[0].metrics["loss"])


def test_a_wide_csv(tmp_path):
    """One line a step; an empty cell is not measured; text columns are counted."""
    log = write(tmp_path, "Step,loss,kl,note", "1,0.5,nan,x", "2,,0.25,x", "3,,,")
    [run] = read_log(log)

    assert rows(run) == [(1, "{'loss': 0.5, 'kl': nan}"), (2, "{'kl': 0.25}")]
    assert run.format == "csv-wide"


def test_a_wide_csv_of_several_runs(tmp_path):
    """With a column for the run."""
    log = write(tmp_path, "run_id,step,loss", "a,1,0.5", "b,1,0.25")

    assert [run.name for run in read_log(log)] == ["a", "b"]


def test_names_tell_the_trainer_where_they_can(tmp_path):
    """Otherwise the source stays open."""
    verl = read_log(write(tmp_path, "step,actor/ppo_kl,loss", "1,0.1,0.5"))
    trl = read_log(write(tmp_path, "step,frac_reward_zero_std,loss", "1,0.1,0.5"))
    tracked = read_log(write(tmp_path, "step,train/frac_reward_zero_std,train/loss", "1,0.1,0.5"))
    own = read_log(write(tmp_path, "step,policy/entropy", "1,0.1"))

    assert [run.source for run in (*verl, *trl, *tracked, *own)] == ["verl", "trl/grpo", "trl/grpo", ""]


def test_a_header_without_rows_is_a_clear_error(tmp_path):
    """Nothing has been logged."""
    with pytest.raises(ImportFormatError, match="holds no metrics of any step, read as csv"):
        read_log(write(tmp_path, "run_id,step,metric,value"))


def test_the_csv_that_wandbs_page_gives_of_a_chart_holds_a_column_for_each_run(tmp_path):
    """With extremes beside it, which are none of its metrics."""
    names = [f"{run} - train/reward{end}" for run in ("sun-3", "sea-2 - b") for end in ("", "__MIN", "__MAX")]
    lines = [
        ["Step", *names],
        *([str(step), f"0.{step}", "0", "1", *(["0.1"] * 3 if step > 1 else [""] * 3)] for step in (1, 2, 3)),
    ]
    (tmp_path / "chart.csv").write_text("".join(",".join(f'"{cell}"' for cell in line) + "\n" for line in lines))
    found = {run.name: [(r.step, dict(r.metrics)) for r in run.records] for run in read_log(tmp_path / "chart.csv")}

    assert found == {
        "sun-3": [(step, {"train/reward": step / 10}) for step in (1, 2, 3)],
        "sea-2 - b": [(step, {"train/reward": 0.1}) for step in (2, 3)],
    }


def test_the_csv_that_tensorboards_page_gives_has_its_metric_in_its_name(tmp_path):
    """With an underscore for what is no name of a file."""
    log = tmp_path / "run-seed3-tag-train_reward.csv"
    log.write_text("Wall time,Step,Value\n" + "".join(f"1756.5,{step},0.{step}\n" for step in (1, 2, 3)))
    [run] = read_log(log)

    assert [(record.step, dict(record.metrics)) for record in run.records] == [
        (step, {"train_reward": step / 10}) for step in (1, 2, 3)
    ]


def test_a_decimal_comma_is_read_beside_semicolons(tmp_path):
    """As spreadsheets write them in half of Europe; thousands have no sign there."""
    (tmp_path / "run.csv").write_text("step;reward;kl\n" + "".join(f"{n};0,5;1,25e-2\n" for n in range(1, 5)))
    [run] = read_log(tmp_path / "run.csv")

    assert [dict(record.metrics) for record in run.records] == [{"reward": 0.5, "kl": 0.0125}] * 4


@pytest.mark.parametrize(
    "lines",
    [
        ["# seed 3", "step,entropy,kl", "1,0.5,0.1", "2,0.4,0.2"],
        ["step | entropy | kl", "1 | 0.5 | 0.1", "2 | 0.4 | 0.2"],
        ["step,entropy,kl", "1,0.5,0.1", "step,entropy,kl", "2,0.4,0.2"],
    ],
)
def test_comments_bars_and_a_header_that_is_written_again(tmp_path, lines):
    """The last as by a script that was started again and appended."""
    [run] = read_log(write(tmp_path, *lines))

    assert [(record.step, record.metrics) for record in run.records] == [
        (1, {"entropy": 0.5, "kl": 0.1}),
        (2, {"entropy": 0.4, "kl": 0.2}),
    ]


def test_a_line_of_names_and_numbers_is_no_header(tmp_path):
    """It is a row of a console, in which tabs stand between them."""
    path = write(tmp_path, *(f"step\t{n}\tentropy\t0.{n}\tkl\t0.1" for n in range(1, 9)), name="run.log")

    assert [(run.format, len(run.records)) for run in read_log(path)] == [("loop-console", 8)]
