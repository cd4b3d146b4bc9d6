"""``rlwatch forecast label``, as a script sees it."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from cli_helpers import Invoke, strict


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``runs.csv``: eight runs of 200 steps, half of which lose their accuracy."""
    place = tmp_path_factory.mktemp("runs")
    with (place / "runs.csv").open("w", newline="") as table:
        rows = csv.writer(table)
        rows.writerow(("run", "recipe", "family", "step", "reward", "truth/acc"))
        for i in range(8):
            fails = i % 2 == 1
            for step in range(200):
                acc = 0.1 if fails and step >= 116 + i else 0.5
                rows.writerow((f"r{i}", f"recipe{i}", "fault" if fails else "healthy", step, 0.5, acc))
    return place


def test_labels_are_printed_and_counted(invoke: Invoke, folder: Path) -> None:
    """With the types that could be judged."""
    result = invoke("forecast", "label", folder / "runs.csv")

    assert result.exit_code == 0
    assert "8 runs by labels-v3: 4 event, 0 early, 0 ambiguous, 0 faulty, 4 clean" in result.stdout
    assert next(line for line in result.stdout.splitlines() if line.startswith("r1")).split() == [
        "r1",
        "event",
        "121",
        "reward",
        "reward",
    ]


def test_labels_as_json_and_as_a_file(invoke: Invoke, folder: Path, tmp_path: Path) -> None:
    """A file holds what is printed."""
    rows = strict(invoke("forecast", "label", folder / "runs.csv", "--format", "json").stdout)
    written = invoke("forecast", "label", folder / "runs.csv", "--out", tmp_path / "labels.csv")

    assert rows[1] == {
        "run": "r1",
        "onset": 121,
        "type": "reward",
        "class": "event",
        "steps": 200,
        "judged": "reward",
        "version": "labels-v3",
    }
    assert written.exit_code == 0
    with (tmp_path / "labels.csv").open() as file:
        assert [row["class"] for row in csv.DictReader(file)] == [row["class"] for row in rows]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("label", "absent.csv"), "absent.csv"),
        (("label", "{runs}", "--version", "labels-v0"), "there are no labels 'labels-v0'"),
        (("label", "{runs}", "--out", "labels.txt"), "ends in .csv or .parquet"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(
    invoke: Invoke, folder: Path, arguments: tuple[str, ...], problem: str
) -> None:
    """And nothing on stdout."""
    result = invoke("forecast", *(each.format(runs=folder / "runs.csv") for each in arguments))

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert problem in result.stderr
    assert result.stderr.count("\n") == 1


def test_without_pyarrow_one_line_names_the_extra(folder: Path) -> None:
    """Also where typer and rich are there."""
    code = "import sys; sys.modules['pyarrow'] = None; from rlwatch.cli.entry import main; main()"
    command = [sys.executable, "-c", code, "forecast", "label", str(folder / "runs.csv")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert done.stdout == ""
    assert "pip install 'rlwatch-monitor[forecast]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_reading_the_package_costs_nothing_heavy() -> None:
    """pyarrow is imported when a table is read, scikit-learn when a model is grown."""
    code = (
        "import sys, rlwatch.forecast.labels, rlwatch.forecast.tables, rlwatch.forecast.training\n"
        "print([m for m in ('pyarrow', 'sklearn', 'pandas', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
