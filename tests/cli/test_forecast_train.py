"""``rlwatch forecast train``, as a user types it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from cli_helpers import Invoke
from forecast_tables import tables

import rlwatch
from rlwatch.forecast import load
from rlwatch.forecast.tables import RunTable


def _csv(path: Path, table: RunTable) -> Path:
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(("run", "recipe", "step", *table.columns))
        for i, run in enumerate(table.runs):
            for step, row in table.stream(i):
                out.writerow((run, table.recipes[i], step, *(row[name] for name in table.columns)))
    return path


def test_a_table_and_its_labels_become_a_model_that_can_be_read(invoke: Invoke, tmp_path: Path) -> None:
    """Counts first, then the file, its hash and how to use it."""
    table, labels = tables()
    runs, told, out = _csv(tmp_path / "runs.csv", table), labels.write(tmp_path / "labels.csv"), tmp_path / "mine.json"

    result = invoke("forecast", "train", runs, "--labels", told, "--out", out, "--trees", 5, "--folds", 2)

    assert result.exit_code == 0, result.output
    assert "40 runs by" in result.stdout
    assert "12 event, 0 early, 0 ambiguous, 0 faulty, 28 clean" in result.stdout
    assert f"RLWATCH_FORECAST_MODEL={out}" in result.stdout.replace("\n", "")
    assert "sparse logs, taps: an alarm from p50 = " in result.stdout
    assert load(out).meta["runs"] == 40


def test_the_runs_of_a_store_are_learnt_from_too(invoke: Invoke, tmp_path: Path) -> None:
    """Those that have ended; too few of them is said with their number, and no file is left."""
    url = str(tmp_path / "store")
    for name in ("a", "b"):
        run = rlwatch.init(store=url, run_id=name)
        for step in range(30):
            run.log({"reward": 0.5, "entropy": 1.0}, step=step)
        run.finish()

    result = invoke("forecast", "train", "--store", url, "--out", tmp_path / "m.json")

    assert result.exit_code == 2
    assert "at least 40 runs" in result.stderr
    assert "these are 2 with 0 and 2" in result.stderr.replace("\n", " ")
    assert not (tmp_path / "m.json").exists()


@pytest.mark.parametrize(("given", "told"), [((), "no runs to train on"), (("nothing.parquet",), "nothing.parquet")])
def test_what_cannot_be_trained_on_is_said(invoke: Invoke, given: tuple[str, ...], told: str) -> None:
    """One clear error."""
    result = invoke("forecast", "train", *given)

    assert result.exit_code == 2
    assert told in result.stderr
