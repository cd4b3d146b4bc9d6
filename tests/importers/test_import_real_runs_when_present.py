"""Real public logs beside the repository (../shared/real_runs), where they exist; never copied here.

Skipped, and said so, where they are absent.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections import defaultdict
from pathlib import Path

import pytest

from rlwatch.importers import ImportedRun, LogTail, read_log
from rlwatch.metrics import known
from rlwatch.testing.importer_contract import comparable

HOME = Path(__file__).resolve().parents[3] / "shared" / "real_runs"
pytestmark = pytest.mark.skipif(not HOME.is_dir(), reason=f"the real runs are not here: {HOME} does not exist")

FILES = sorted(p for part in ("raw", "fragments") for p in (HOME / part).rglob("*") if p.is_file())
EVENTS = [p for p in FILES if "tfevents" in p.name]

# run of runs.csv.gz -> the raw file it was taken from
KNOWN_SERIES = {
    "UnslothGRPO:checkpoint-250_trainer_state.json": "IMJONEZZ+UnslothGRPO/outputs/checkpoint-250/trainer_state.json",
    "Gemma-3-RL-Finetuning:checkpoint-250_trainer_state.json": "abdo-ashraf+Gemma-3-RL-Finetuning/outputs/"
    "checkpoint-250/trainer_state.json",
    "hotpotqa-agent:grpo.log": "Ning-Guo+hotpotqa-agent/logs/grpo.log",
    "hotpotqa-agent:grpo_v2.log": "Ning-Guo+hotpotqa-agent/logs/grpo_v2.log",
    "hotpotqa-agent:grpo_v3.log": "Ning-Guo+hotpotqa-agent/logs/grpo_v3.log",
    "Chaos-Economy:vsr-new.log@8339a1fd": "Rusheel86+Chaos-Economy/vsr-new.log@8339a1fd",
    # the console output of the run whose TensorBoard events are in the table
    "trl_DAPO:-20251002-112605_events.out.tfevents.1761134743.instance-20251002-112605.176000.0@8f4915f0": "JuncyLu+"
    "trl_DAPO/training_logs/20251022_120531/run_terminal.md@877d661c",
}
VERL_NOTEBOOK = "volcengine+verl/examples/ppo_trainer/verl_getting_started.ipynb@73df079e"
VERL_RUN = "verl:examples_ppo_trainer_verl_getting_started.ipynb@73df079e"


@pytest.fixture(scope="module")
def table() -> dict[str, dict[tuple[int, str], float]]:
    """Run -> (step, metric) -> value, read independently of the importers."""
    runs: dict[str, dict[tuple[int, str], float]] = defaultdict(dict)
    with gzip.open(HOME / "runs.csv.gz", "rt") as file:
        for line in csv.DictReader(file):
            if line["value"]:  # one cell of the table is empty
                runs[line["run_id"]][int(line["step"]), line["metric"]] = float(line["value"])
    return runs


def series(run: ImportedRun) -> dict[tuple[int, str], float]:
    return {(r.step, name): value for r in run.records for name, value in r.metrics.items()}


def disagreements(found: dict, expected: dict, *, rel: float) -> list:
    """Cells of ``expected`` that ``found`` lacks or reads differently."""
    return [
        (cell, value, found.get(cell))
        for cell, value in expected.items()
        if cell not in found or not (math.isclose(found[cell], value, rel_tol=rel, abs_tol=1e-12) or value != value)
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_real_log_reads_sensibly_when_present(path):
    """One run, steps that go up, metrics that rlwatch knows, hardly anything skipped."""
    [run] = read_log(path)
    steps = [record.step for record in run.records]

    assert steps == sorted(steps)
    assert {record.attempt for record in run.records} == {1}
    assert len(known({name for record in run.records for name in record.metrics}, run.source)) >= 2
    assert run.source.startswith(("verl", "trl", "ms-swift", "torchforge")) or run.format == "markdown"


@pytest.mark.parametrize("name", KNOWN_SERIES)
def test_real_series_equal_those_read_by_others_when_present(name, table):
    """Every cell of the table; against TensorBoard (float32) all but the epoch, which the console rounds."""
    [run] = read_log(HOME / "raw" / KNOWN_SERIES[name])
    found, expected = series(run), table[name]
    if "tfevents" in name:
        expected = {cell: value for cell, value in expected.items() if cell in found and cell[1] != "epoch"}

    assert len(expected) > 100
    assert {step for step, _ in found} == {step for step, _ in table[name]}
    assert disagreements(found, expected, rel=1e-5) == []


def test_real_event_files_equal_those_read_by_others_when_present(table):
    """Every cell of every run of the table that came from one (Hugging Face's tags begin with ``train/`` there)."""
    compared = 0
    for path in EVENTS:
        [run] = read_log(path)
        found = {(step, name.removeprefix("train/")): value for (step, name), value in series(run).items()}
        for expected in (cells for name, cells in table.items() if name.endswith(path.name[-40:])):
            cells = {(step, name.removeprefix("train/")): value for (step, name), value in expected.items()}
            assert disagreements(found, cells, rel=1e-6) == []
            compared += len(cells)

    assert compared > 60_000


def test_real_verl_console_in_a_notebook_reads_when_present(table, tmp_path):
    """Its text outputs are a verl console log with Ray prefixes and colours."""
    notebook = json.loads((HOME / "raw" / VERL_NOTEBOOK).read_text())
    texts = ["".join(out.get("text", ())) for cell in notebook["cells"] for out in cell.get("outputs", ())]
    log = tmp_path / "verl.log"
    log.write_text("".join(texts))
    [run] = read_log(log)

    assert run.format == "verl-console"
    assert disagreements(series(run), table[VERL_RUN], rel=1e-9) == []


def test_real_long_csv_reads_when_present(table):
    """All runs, all cells."""
    runs = read_log(HOME / "runs.csv.gz")

    assert [run.name for run in runs] == list(table)
    assert all(disagreements(series(run), table[run.name], rel=0) == [] for run in runs)
    assert sum(len(series(run)) for run in runs) == sum(len(cells) for cells in table.values())


@pytest.mark.parametrize("path", [p for p in FILES if "trainer_state" not in p.name], ids=lambda p: p.name)
def test_real_log_followed_in_pieces_equals_one_reading_when_present(path, tmp_path):
    """Twenty pieces, cut wherever."""
    whole = path.read_bytes()
    log = tmp_path / path.name
    log.write_bytes(b"")
    tail = LogTail(log)
    found = []
    size = len(whole) // 20 + 1
    for start in range(0, len(whole), size):
        with log.open("ab") as file:
            file.write(whole[start : start + size])
        found += tail.poll()
    found += tail.close()

    assert comparable(found) == comparable(read_log(path)[0].records)
