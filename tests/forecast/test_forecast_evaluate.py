"""``evaluate`` and ``leaderboard`` of ``python -m benchmarks.forecast``, as a script sees them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import typer.testing
from cli_helpers import Invoke, strict
from forecast.commands import app

from rlwatch.forecast.labels import label_runs
from rlwatch.forecast.tables import read_runs


@pytest.fixture
def invoke() -> Invoke:
    """Run the benchmark's command with these arguments."""

    def run(*arguments: object) -> typer.testing.Result:
        return typer.testing.CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``runs.csv``: eight runs of 200 steps, half of which lose their accuracy; ``mine.csv``: an oracle's scores."""
    place = tmp_path_factory.mktemp("runs")
    with (place / "runs.csv").open("w", newline="") as table, (place / "mine.csv").open("w", newline="") as mine:
        rows, scores = csv.writer(table), csv.writer(mine)
        rows.writerow(("run", "recipe", "family", "step", "reward", "truth/acc"))
        scores.writerow(("run", "step", "score"))
        for i in range(8):
            fails = i % 2 == 1
            for step in range(200):
                acc = 0.1 if fails and step >= 116 + i else 0.5
                rows.writerow((f"r{i}", f"recipe{i}", "fault" if fails else "healthy", step, 0.5, acc))
                scores.writerow((f"r{i}", step, 0.9 if fails and step >= 70 + i else 0.1))
    return place


def test_labels_of_a_file_are_those_that_are_made(invoke: Invoke, folder: Path, tmp_path: Path) -> None:
    """Written by ``label``, read by ``evaluate``."""
    label_runs(read_runs(folder / "runs.csv")).write(tmp_path / "labels.csv")
    args = ("evaluate", folder / "runs.csv", "--draws", 20, "--scores", folder / "mine.csv")
    args = (*args, "--no-baselines", "--format", "json")

    made, read = (strict(invoke(*args, *more).stdout) for more in ((), ("--labels", tmp_path / "labels.csv")))
    assert made["tools"] == read["tools"]


def test_a_tool_is_judged_beside_the_simple_ones(invoke: Invoke, folder: Path) -> None:
    """The oracle forecasts all four, 51 steps ahead, without a false alarm; its name is the file's."""
    args = ("evaluate", folder / "runs.csv", "--scores", folder / "mine.csv", "--draws", 20)
    made = strict(invoke(*args, "--split", "none", "--format", "json").stdout)
    tools = {tool["name"]: tool for tool in made["tools"]}

    assert next(iter(tools)) == "never"
    assert list(tools)[-1] == "mine"
    point = tools["mine"]["headline"]
    assert (point["forecast"], point["events"], point["episodes"]) == (4, 4, 0)
    assert point["lead"] == [50.0, 50.0, 50.0]
    assert made["about"]["table"] == "runs.csv"
    assert made["about"]["classes"] == {"event": 4, "early": 0, "ambiguous": 0, "faulty": 0, "clean": 4}


def test_the_table_for_people_has_counts_placebo_and_families(invoke: Invoke, folder: Path) -> None:
    """In three tables and one by family."""
    text = invoke("evaluate", folder / "runs.csv", "--draws", 20, "--scores", folder / "mine.csv").stdout

    for title in ("Alarms", "Recall by budget", "Skill", "By family"):
        assert title in text.splitlines()
    assert "by placebo" in text
    assert "4/4 = 1.00 [1.00, 1.00]" in text


def test_an_index_that_names_repositories_is_judged_by_them(invoke: Invoke, folder: Path, tmp_path: Path) -> None:
    """Two repositories, in one of which the oracle is right; last all of them, each once."""
    rows = [f"r{i},lab/{i // 4},{'instability' if i % 2 else 'healthy'},{120 if i % 2 else ''}" for i in range(8)]
    index = tmp_path / "index.csv"
    index.write_text("\n".join(("run_id,repo,severity,onset_step", *rows)) + "\n")
    args = ("evaluate", folder / "runs.csv", "--scores", folder / "mine.csv", "--draws", 20)
    text = invoke(*args, "--index", index, "--split", "none").stdout

    assert "By repository" in text.splitlines()
    told = {line.split()[0]: line.rstrip() for line in text.splitlines() if line.startswith(("lab/", "each once"))}
    assert set(told) == {"lab/0", "lab/1", "each"}
    assert told["lab/1"].endswith("2/2 by 0.0, p 0; late 2/2 by 0.0, p 0 (0/2)")


def test_the_leaderboard_is_made_of_evaluations(invoke: Invoke, folder: Path, tmp_path: Path) -> None:
    """A section each, with its command, how to add to it, and no half-written file."""
    for split in ("run", "none"):
        args = ("evaluate", folder / "runs.csv", "--draws", 20, "--split", split, "--format", "json")
        assert invoke(*args, "--out", tmp_path / f"{split}.json").stdout == ""
    page = tmp_path / "page.md"
    result = invoke("leaderboard", tmp_path / "run.json", f"Elsewhere={tmp_path / 'none.json'}", "--out", page)

    text = page.read_text()
    assert result.exit_code == 0
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Known recipes",
        "## Elsewhere",
        "## Add a tool",
        "## Add runs",
    ]
    assert "| static limits |" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["none.json", "page.md", "run.json"]


def test_markdown_holds_every_table(invoke: Invoke, folder: Path) -> None:
    """Also by recipe and type."""
    args = ("evaluate", folder / "runs.csv", "--draws", 20, "--no-baselines", "--format", "markdown")
    text = invoke(*args, "--scores", f"oracle={folder / 'mine.csv'}").stdout

    assert [line for line in text.splitlines() if line.startswith("### ")] == [
        "### Alarms",
        "### Recall by budget",
        "### Skill",
        "### By family",
        "### By recipe",
        "### By type",
    ]
    assert "| oracle |" in text


def test_labels_of_people(invoke: Invoke, folder: Path, tmp_path: Path) -> None:
    """--index instead of labels-v1."""
    lines = ["run_id,severity,onset_step", *(f"r{i},{'instability,150' if i == 1 else 'healthy,'}" for i in range(8))]
    (tmp_path / "index.csv").write_text("\n".join(lines) + "\n")
    args = ("evaluate", folder / "runs.csv", "--draws", 20, "--split", "none", "--format", "json")
    args = (*args, "--no-baselines", "--scores", folder / "mine.csv")
    made = strict(invoke(*args, "--index", tmp_path / "index.csv").stdout)

    assert made["about"]["types"] == {"instability": 1}
    assert made["about"]["labels"] == "index"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("evaluate", "absent.csv"), "absent.csv"),
        (("evaluate", "{runs}", "--scores", "{runs}"), "needs run, step and score (or alarm)"),
        (("evaluate", "{runs}", "--no-baselines"), "nothing to judge"),
        (("evaluate", "{runs}", "--labels", "a.csv", "--index", "b.csv"), "give one"),
        (("evaluate", "{runs}", "--scores", "{mine}", "--scores", "{mine}"), "two tools are called 'mine'"),
        (("leaderboard", "{mine}"), "is no evaluation"),
        (("leaderboard", "absent.json"), "absent.json"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(
    invoke: Invoke, folder: Path, arguments: tuple[str, ...], problem: str
) -> None:
    """And nothing on stdout."""
    given = [each.format(runs=folder / "runs.csv", mine=folder / "mine.csv") for each in arguments]
    result = invoke(*given)

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert problem in result.stderr
    assert result.stderr.count("\n") == 1
