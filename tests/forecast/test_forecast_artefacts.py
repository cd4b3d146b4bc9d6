"""The corpus outside the repository, and the sample of it that is kept: chosen by a command, labelled, forecast."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
from forecast_testbed import artefacts, tables

from rlwatch.errors import RLWatchError
from rlwatch.forecast import Forecaster
from rlwatch.forecast.labels import RunOutcome, label_runs
from rlwatch.forecast.tables import read_runs
from rlwatch.records import ClosedStep

KEPT = Path(artefacts.__file__).parent
GOLDEN = json.loads((Path(__file__).parent / "golden_forecasts.json").read_text())


@pytest.fixture(scope="module")
def sampled():
    return read_runs(artefacts.SAMPLE)


def test_the_repository_keeps_five_megabytes_at_most():
    """Whatever of it is data."""
    kept = [path for path in KEPT.rglob("*") if path.suffix in {".parquet", ".csv", ".json"}]

    assert artefacts.SAMPLE / "sample.parquet" in kept
    assert sum(path.stat().st_size for path in kept) <= 5_000_000


def test_the_sample_is_what_its_command_chooses(sampled):
    """Of every source and outcome its share, and two runs at least."""
    known = artefacts.known()
    wanted = artefacts.chosen(known)

    assert list(sampled.runs) == wanted
    assert len(wanted) == pytest.approx(artefacts.RUNS, abs=6)
    assert artefacts.chosen(known, seed=artefacts.SEED + 1) != wanted
    groups = [(run.source, run.outcome) for run in known if run.run in set(wanted)]
    assert {group: min(groups.count(group), 2) for group in groups} == {(r.source, r.outcome): 2 for r in known}


def test_the_list_of_labels_counts_what_the_data_card_says():
    """All runs of both shards, which are not here."""
    labels = {row["run"]: row for row in pc.read_csv(artefacts.LABELS).to_pylist()}
    large, small = artefacts.shards()

    assert [(each.name, each.runs, each.rows) for each in (large, small)] == [
        ("corpus", 793, 360_466),
        ("small", 64, 7_612),
    ]
    assert len(labels) == large.runs + small.runs
    counted = [
        {outcome.value: sum(labels[run]["class"] == outcome for run in runs_of(shard)) for outcome in RunOutcome}
        for shard in (large, small)
    ]
    assert counted == [
        {"event": 325, "early": 4, "ambiguous": 29, "faulty": 97, "clean": 338},
        {"event": 15, "early": 3, "ambiguous": 4, "faulty": 10, "clean": 32},
    ]
    types = [
        Counter(labels[run]["type"] for run in runs_of(shard) if labels[run]["class"] == RunOutcome.EVENT)
        for shard in (large, small)
    ]
    assert types == [
        {"reward": 150, "mismatch": 55, "nan": 38, "ent_high": 25, "ref_kl": 21, "grad": 19, "ent_low": 17},
        {"reward": 8, "grad": 4, "nan": 1, "ent_low": 1, "length": 1},
    ]


def test_a_shard_that_is_not_sampled_leaves_the_sample_as_it_is(sampled):
    """Golden forecasts and figures of the sample stay comparable; its rows are fetched as those of any other."""
    _, small = artefacts.shards()

    assert not small.sampled
    assert not set(runs_of(small)) & {run.run for run in artefacts.known()}
    assert not set(runs_of(small)) & set(sampled.runs)


def runs_of(shard):
    """Names of the runs of a shard, from what is known of them."""
    return pq.read_table(KEPT / shard.records).column("run").to_pylist()


def test_runs_of_the_sample_are_labelled_as_in_the_whole_corpus(sampled):
    """Row by row of the list: a limit that moves shows."""
    listed = {row["run"]: row for row in pc.read_csv(artefacts.LABELS).to_pylist()}
    labels = label_runs(sampled)
    columns = labels.columns()
    made = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    assert labels.count(RunOutcome.EVENT) >= 50
    assert labels.count(RunOutcome.CLEAN) >= 50
    assert [row | {"onset": row["onset"]} for row in made] == [listed[run] for run in sampled.runs]


def test_what_is_known_of_runs_comes_from_beside_the_shard(sampled):
    """Also where the table is a folder: twins, sources of faults."""
    records = {row["run"]: row for row in pq.read_table(KEPT / "corpus-runs.parquet").to_pylist()}

    assert sampled.pairs == tuple(records[run]["pair"] for run in sampled.runs)
    assert sampled.faults == tuple(records[run]["fault_step"] for run in sampled.runs)
    assert sampled.at_once == tuple(records[run]["at_once"] for run in sampled.runs)
    assert any(sampled.pairs)
    assert any(sampled.at_once)


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=pytest.mark.thorough if place % 4 else []) for place, run in enumerate(GOLDEN)]
)
def test_the_shipped_forecaster_says_what_it_said(sampled, run):
    """Chances and risk every 40 rows, the alarms, and the limits that were named."""
    forecaster = Forecaster()
    rows = sampled.stream(sampled.place[run])
    made = [f for step, metrics in rows if not (f := forecaster.update(ClosedStep(step, metrics))).absent]
    golden = GOLDEN[run]

    steps, chances, risks = zip(*golden["p50"], strict=True)
    assert tuple(f.step for f in made[::40]) == steps
    assert [f.p50 for f in made[::40]] == pytest.approx(chances, abs=1e-6)
    assert [f.risk for f in made[::40]] == pytest.approx(risks, rel=1e-5, abs=1e-5)
    alarms = [f.step for f in made if f.alarm]
    assert [*alarms[:1], len(alarms)] == golden["alarms"]
    assert sorted({f.limit for f in made}) == golden["limits"]


@pytest.fixture
def elsewhere(tmp_path):
    """A shard of two runs in a folder of its own, and its entry; what is known of its runs lies in an index."""
    place, index = tmp_path / "elsewhere", tmp_path / "index"
    for name in ("a", "b"):
        tables.write_run(tmp_path / "runs", tables.RunInfo(name, "r", "f", "testbed", 1), {"step": [0, 1], "x": [1, 2]})
    rows, records = tables.pack(place / "new.parquet", tmp_path / "runs")
    index.mkdir()
    records.rename(index / records.name)
    (entry,) = tomllib.loads(artefacts.entry(rows))["shard"]
    return place, index, artefacts.Shard(**entry)


def test_a_shard_is_fetched_from_a_folder_once_and_whole(elsewhere, tmp_path):
    """Its rows and its records; what is there is checked and not fetched again."""
    place, index, shard = elsewhere
    out = tmp_path / "out"

    assert artefacts.fetch(out, str(place), listed=[shard], index=index) == [out / "new.parquet"]
    assert (shard.runs, shard.rows, shard.bytes) == (2, 4, (out / "new.parquet").stat().st_size)
    assert read_runs(out).families == ("f", "f")
    (place / "new.parquet").unlink()
    assert artefacts.fetch(out, str(place), listed=[shard], index=index) == [out / "new.parquet"]
    assert sorted(path.name for path in out.iterdir()) == ["new-runs.parquet", "new.parquet"]


def test_what_is_not_the_shard_is_refused(elsewhere, tmp_path):
    """Nothing of it is left, and what was there is not written over."""
    place, index, shard = elsewhere
    (place / "new.parquet").write_bytes(b"something else")

    with pytest.raises(RLWatchError, match=f"{shard.sha256} was expected"):
        artefacts.fetch(tmp_path / "out", str(place), listed=[shard], index=index)
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(
        RLWatchError, match=r"new.parquet cannot be had from .*nowhere.*corpus.toml says how to make it again"
    ):
        artefacts.fetch(tmp_path / "out", str(tmp_path / "nowhere"), listed=[shard], index=index)


def test_a_shard_is_never_written_again(elsewhere, tmp_path):
    """New runs are a new shard beside it, and both are one table."""
    place, _, _ = elsewhere
    before = (place / "new.parquet").read_bytes()

    with pytest.raises(RLWatchError, match="a shard is never written again"):
        tables.pack(place / "new.parquet", tmp_path / "runs")
    assert (place / "new.parquet").read_bytes() == before
    tables.write_run(tmp_path / "later", tables.RunInfo("c", "r", "g", "testbed", 1), {"step": [0], "y": [1.0]})
    tables.pack(place / "newer.parquet", tmp_path / "later")
    both = read_runs(place)
    assert both.runs == ("a", "b", "c")
    assert pa.concat_tables([pq.read_table(place / "newer-runs.parquet")]).num_rows == 1
