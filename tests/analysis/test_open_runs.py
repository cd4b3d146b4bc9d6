"""``rlwatch.open``: runs as a table, each with its history, findings, texts and plots; missing is not NaN."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import rlwatch
from rlwatch.errors import ConfigError, RunNotFoundError
from rlwatch.records import DISTRIBUTIONS, CompletionBatch, RunInfo, SpikeBatch, StepRecord

ROOT = Path(__file__).parents[2]
NAN, INF = math.nan, math.inf


def rows(*metrics: dict[str, float], attempt: int = 1, first: int = 0, seq: int = 1) -> list[StepRecord]:
    return [StepRecord(first + i, m, seq=seq + i, attempt=attempt) for i, m in enumerate(metrics)]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A run that was resumed at step 2, and one without anything."""
    runs = rlwatch.open_store(tmp_path / "runs")
    writer = runs.open_run(RunInfo("r-1", name="math", source="verl", config={"lr": 1e-6, "hub_token": "x"}))
    first = (
        {"actor/entropy": 0.9, "mine": 1.0},
        {"actor/entropy": NAN},
        {"actor/entropy": 7.0},
        {"actor/entropy": 8.0},
    )
    writer.write([*rows(*first), completions(1)])
    writer.close()
    writer = runs.open_run(RunInfo("r-1", config={"lr": 2e-6}))
    writer.write(rows({"actor/entropy": -INF}, {"mine": 2.0}, attempt=2, first=2, seq=5))
    writer.close()
    runs.open_run(RunInfo("empty")).close()
    return tmp_path / "runs"


def completions(step: int) -> CompletionBatch:
    columns = {"completion": ["a", "b"], "reward": np.array([NAN, INF]), "score": np.array([1.0, 2.0])}
    return CompletionBatch(step, columns)


def notebook(shown: object) -> str:
    """As Jupyter, VS Code and Colab ask for it."""
    return getattr(shown, "_repr_html" + "_")()


def cells(frame: pd.DataFrame, name: str) -> list[object]:
    """Values with what is missing as None and NaN as the text."""
    return [None if v is pd.NA else "NaN" if math.isnan(v) else v for v in frame[name].to_list()]


def test_missing_nan_and_infinity_stay_three_things(store: Path) -> None:
    """In the wide table by <NA>; in the long one what was not measured has no row."""
    run = rlwatch.open(store)["math"]
    wide, long = run.history(), run.history(form="long")

    assert wide["step"].to_list() == [0, 1, 2, 3]
    assert cells(wide, "actor/entropy") == [0.9, "NaN", -INF, None]
    assert cells(wide, "mine") == [1.0, None, None, 2.0]
    assert wide["actor/entropy"].isna().to_list() == [False, False, False, True]
    assert list(zip(long["step"], long["metric"], cells(long, "value"), strict=True)) == [
        (0, "actor/entropy", 0.9), (0, "mine", 1.0), (1, "actor/entropy", "NaN"), (2, "actor/entropy", -INF), (3, "mine", 2.0),
    ]  # fmt: skip


def test_other_libraries_take_the_tables_as_they_are(store: Path) -> None:
    """Through Arrow's C stream: nulls stay nulls, NaN stays NaN, and nothing is made of objects."""
    table = pa.table(rlwatch.open(store)["math"].history())

    assert (table["actor/entropy"].type, table["actor/entropy"].null_count) == (pa.float64(), 1)
    assert math.isnan(table["actor/entropy"][1].as_py())
    assert pa.table(rlwatch.open(store))["run_id"].to_pylist() == ["empty", "r-1"]


def test_only_the_branch_that_counts_unless_all_is_asked_for(store: Path) -> None:
    """Steps 2 and 3 of the first process were run again."""
    every = rlwatch.open(store)["math"].history("actor/entropy", attempts="all")

    assert list(zip(every["attempt"], every["step"], cells(every, "actor/entropy"), strict=True)) == [
        (1, 0, 0.9), (1, 1, "NaN"), (1, 2, 7.0), (1, 3, 8.0), (2, 2, -INF),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        (slice(1, 3), [1, 2]),
        (slice(2, None), [2, 3]),
        (slice(None, None, 2), [0, 2]),
        (range(1, 4, 2), [1, 3]),
        ([3, 0, 99], [0, 3]),
        ([], []),
    ],
)
def test_steps_that_are_asked_for(store: Path, steps: object, found: list[int]) -> None:
    """A slice is half open, as in a list."""
    assert rlwatch.open(store)["math"].history(steps=steps)["step"].to_list() == found


def test_metrics_go_by_logged_and_canonical_names_and_patterns(store: Path) -> None:
    """A column is called as it was asked for; one that nobody logged is named with the closest."""
    run = rlwatch.open(store)["math"]

    assert list(run.history(["mine", "policy/entropy"]).columns) == ["step", "attempt", "mine", "policy/entropy"]
    assert list(run.history("actor/*").columns) == ["step", "attempt", "actor/entropy"]
    assert cells(run.history("policy/entropy"), "policy/entropy")[:2] == [0.9, "NaN"]
    with pytest.raises(ConfigError, match="did you mean actor/entropy"):
        run.history("actor/entrpy")


def test_runs_are_a_sequence_and_a_table(store: Path) -> None:
    """Newest first; found as the command line finds them."""
    with rlwatch.open(store) as runs:
        assert (len(runs), [run.run_id for run in runs]) == (2, ["empty", "r-1"])
        assert "math" in runs
        assert runs[-1].run_id == runs["r-"].run_id == "r-1"
        assert runs.table()["attempt"].to_list() == [1, 2]
        assert runs.table(project="other").shape[0] == 0
        with pytest.raises(RunNotFoundError, match="did you mean"):
            runs["maths"]


def test_completions_and_configuration(store: Path) -> None:
    """Columns that somebody added follow; secrets are blacked out."""
    run = rlwatch.open(store)["math"]
    texts = run.completions()

    assert (texts["completion"].to_list(), cells(texts, "reward"), texts["score"].to_list()) == (
        ["a", "b"], ["NaN", INF], [1.0, 2.0],
    )  # fmt: skip
    assert texts["prompt"].isna().all()
    assert dict(run.config().to_numpy()) == {"lr": "2e-06"}
    assert dict(run.config(1).to_numpy()) == {"lr": "1e-06", "hub_token": "[redacted]"}
    with pytest.raises(ConfigError, match="no attempt 7"):
        run.config(7)


def test_two_runs_are_held_against_each_other(tmp_path: Path) -> None:
    """The metric that parted first, when, and the option in which they differ."""
    for name, lr in (("calm", 1e-6), ("wild", 1e-5)):
        with rlwatch.init(name=name, store=tmp_path / "runs", config={"lr": lr, "seed": 3, "api_key": name}) as run:
            for step in range(100):
                norm = 9.0 if name == "wild" and step >= 60 else 1.0
                run.log({"grad_norm": norm + step % 3 / 10, "reward": step / 200 + step % 5 / 50}, step=step)
    runs = rlwatch.open(tmp_path / "runs")
    parted, options = runs["wild"].diff(runs["calm"]), runs["wild"].config_diff(runs["calm"])

    assert parted["metric"].to_list() == ["optim/grad_norm"]
    assert (parted["at"][0], parted["until"].isna()[0]) == (60.0, True)
    assert parted.attrs["answer"].startswith("optim/grad_norm diverged first, at step 60")
    assert options.to_numpy().tolist() == [["lr", "1e-05", "1e-06"]]
    assert len(runs["calm"].diff(runs["calm"])) == 0


@pytest.mark.parametrize(
    "table", ["history", "metrics", "findings", "alerts", "forecasts", "events", "spikes", "completions", "config"]
)
def test_a_run_without_anything_has_empty_tables_with_their_columns(store: Path, table: str) -> None:
    """A cell that is run too early must not fail."""
    frame = getattr(rlwatch.open(store)["empty"], table)()

    assert len(frame) == 0
    assert len(frame.columns) > 1


def test_what_a_notebook_shows_holds_no_markup_of_others(tmp_path: Path) -> None:
    """Names and messages come from whoever logged."""
    evil = "<script>alert(1)</script>"
    with rlwatch.init(name=evil, store=tmp_path / "runs") as run:
        for step in range(40):
            run.log({evil: 1.0, "entropy": NAN if step > 30 else 0.5}, step=step)
    runs = rlwatch.open(tmp_path / "runs")
    shown = notebook(runs) + notebook(runs[0]) + runs[0].plot(evil, "entropy").html

    assert "<script" not in shown
    assert "&lt;script&gt;" in shown
    assert runs[0].view().verdict.text in unescape(notebook(runs[0]))
    assert len(re.findall("<svg", runs[0].plot(evil, "entropy").html)) == 2


def test_without_pandas_the_extra_is_named(store: Path) -> None:
    """Showing needs neither pandas nor pyarrow."""
    code = (
        "import sys; sys.modules.update(pandas=None, pyarrow=None)\n"
        f"import rlwatch; run = rlwatch.open({str(store)!r})['math']\n"
        "assert run._repr_html_()\n"
        "try: run.history()\n"
        "except rlwatch.RLWatchError as error: print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "rlwatch-monitor[export]" in out.stdout


def test_every_block_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom, beside a store with the run that the page speaks of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLWATCH_STORE", raising=False)
    with rlwatch.init(name="math-7b", store=tmp_path / "rlwatch-runs") as run:
        for step in range(200):
            run.log({"entropy": 0.9, "grad_norm": 1.0} | ({"reward": step / 400} if step % 2 else {}), step=step)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)

    assert len(blocks) >= 5
    assert "<svg" in (tmp_path / "entropy.html").read_text()


# rlwatch.scan of what is in memory.


def test_a_document_in_memory_is_read_as_its_file(tmp_path: Path) -> None:
    """A dict and a list of rows, as json.load gives them."""
    log = ROOT / "sample_logs" / "mismatch-growth-trl-trainer_state.json"
    shutil.copy(log, tmp_path)
    state = json.loads(log.read_text())
    read = rlwatch.scan(log)

    for data in (state, state["log_history"]):
        report = rlwatch.scan(data)
        assert report.view.verdict == read.view.verdict
        assert [(f.kind, f.step) for f in report.findings] == [(f.kind, f.step) for f in read.findings]


def frame(**columns: list[float | None]) -> pa.Table:
    return pa.table({"step": list(range(60)), **columns})


MADE = {
    "pyarrow": lambda table: table,
    "pandas of Arrow": lambda table: table.to_pandas(types_mapper=pd.ArrowDtype),
    "dict": lambda table: table.to_pydict(),
}


@pytest.mark.parametrize("made", MADE)
def test_nan_is_found_and_null_is_not_measured(made: str) -> None:
    """An evaluation every tenth step is no NaN in between."""
    sparse = [0.5 if step % 10 == 0 else None for step in range(60)]
    calm = MADE[made](frame(entropy=[0.5 + step / 1e3 for step in range(60)], val_score=sparse))
    broken = MADE[made](frame(entropy=[0.5 + step / 1e3 for step in range(59)] + [NAN], val_score=sparse))

    assert "nonfinite" not in {f.kind for f in rlwatch.scan(calm).findings}
    assert [(f.kind, f.step) for f in rlwatch.scan(broken).findings if f.kind == "nonfinite"] == [("nonfinite", 59)]


def test_nan_of_numpy_in_pandas_needs_evidence() -> None:
    """pandas writes NaN for what is missing as well: alone it is none; of metrics that were always there it is one."""
    calm = pd.DataFrame({"step": range(60), "entropy": [0.5] * 59 + [NAN], "val_score": [NAN] * 59 + [0.3]})
    broken = pd.DataFrame({"step": range(60), "entropy": [0.5] * 59 + [NAN], "grad_norm": [1.0] * 59 + [NAN]})

    assert "nonfinite" not in {f.kind for f in rlwatch.scan(calm).findings}
    assert "nonfinite" in {f.kind for f in rlwatch.scan(broken.set_index("step")).findings}


def test_long_tables_and_several_runs() -> None:
    """As history(form="long") gives them; of several runs one has to be named."""
    long = pd.DataFrame(
        [(run, s, m, 0.5) for run in ("a", "b") for s in range(40) for m in ("entropy", "reward")],
        columns=["run_id", "step", "metric", "value"],
    )

    assert rlwatch.scan(long, run="b").steps == 40
    assert set(rlwatch.scan(long, run="a").metrics) == {"policy/entropy", "reward/mean"}
    with pytest.raises(rlwatch.RLWatchError, match="holds 2 runs"):
        rlwatch.scan(long)


def test_columns_of_one_name_are_refused() -> None:
    """Which of them counts?"""
    with pytest.raises(rlwatch.RLWatchError, match="several columns of one name"):
        rlwatch.scan(pd.DataFrame([[1, 0.5, 0.6]] * 9, columns=["step", "entropy", "entropy"]))


def test_distributions_are_rows_of_quantiles(store: Path) -> None:
    """NaN apart; what is in one bin is told as it; an unknown quantity names those there are."""
    columns = {
        "quantity": np.array([2, 2, 0]),
        "bin": np.array([126 * 4, 255 * 4 + 2, 512 + 255 * 2]),
        "count": np.array([9, 2, 1]),
    }
    runs = rlwatch.open_store(store)
    writer = runs.open_run(RunInfo("counted"))
    writer.write([SpikeBatch(3, columns, DISTRIBUTIONS)])
    writer.close()
    run = rlwatch.open(store)["counted"]
    (entropy,) = run.distributions("entropy").to_dict("records")

    assert (entropy["step"], entropy["tokens"], entropy["nan"], entropy["below"]) == (3, 11, 2, 0)
    assert 0.5 <= entropy["p05"] <= entropy["p50"] <= entropy["p99"] <= 0.625
    assert cells(run.distributions("log_ratio"), "p50") == ["NaN"]
    assert len(run.distributions()) == 2
    with pytest.raises(ConfigError, match=r"there is no quantity 'entrpy' of tokens; .*entropy"):
        run.distributions("entrpy")


def test_two_groups_of_seeds_are_held_against_each_other(tmp_path: Path) -> None:
    """By the group that a run was begun with; a group without a name is an error at once."""
    for arm in ("cool", "hot"):
        for seed in range(1, 5):
            name = f"{arm}{seed}"
            with rlwatch.init(
                name=name, group=f" {arm} ", store=tmp_path / "runs", tags="paper", forecast=False
            ) as run:
                for step in range(60):
                    more = 0.3 if arm == "hot" and step >= 30 else 0.0
                    run.log({"reward": 0.4 + more + 0.05 * math.sin(seed * step)}, step=step)
    runs = rlwatch.open(tmp_path / "runs")
    found = runs["cool1"].compare(runs["hot2"])

    assert runs["hot2"].info.tags == ("paper", "group:hot")
    assert found["metric"].to_list() == ["reward/mean"]
    assert found["answer"].to_list() == ["differs"]
    assert found["since"][0] == pytest.approx(30, abs=3)
    assert found.attrs["answer"].startswith("1 of 1 metric differs, first reward/mean from step ")
    assert len(found.attrs["found"].metrics["reward/mean"].bands[0].median) == 60
    with pytest.raises(rlwatch.errors.ConfigError, match="no group 'warm'; there are"):
        runs.compare("hot", "warm")
    with pytest.raises(rlwatch.errors.ConfigError, match="group must be a text"):
        rlwatch.init(group="", store=tmp_path / "runs")
