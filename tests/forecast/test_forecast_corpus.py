"""Files of ``benchmarks/forecast``: made once, whole or not at all, packed without loss of what is missing."""

import json
import math
import sys

import pyarrow.parquet as pq
import pytest
from forecast_testbed import generate, tables, task

from rlwatch.errors import RLWatchError

pytestmark = pytest.mark.torch


@pytest.fixture
def made(monkeypatch):
    """Names of the runs that were trained, for which a table of two rows stands in."""
    trained = []

    def train(config, seed, start):
        trained.append(seed)
        return {"step": [0, 1], "policy/entropy": [1.0, None]}

    monkeypatch.setattr(generate, "train", train)
    monkeypatch.setattr(generate, "fitted", lambda *_: {})
    return trained


def test_what_is_there_is_not_made_again(tmp_path, made):
    """A corpus that was stopped goes on, and grows."""
    assert generate.generate(tmp_path, 3, 1, 1) == 3
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.parquet")}
    next(iter(kept)).unlink()

    assert generate.generate(tmp_path, 5, 1, 1) == 3
    assert len(made) == 6
    assert len(list(tmp_path.glob("*.parquet"))) == 5
    assert all(path.stat().st_mtime_ns == when for path, when in list(kept.items())[1:])


def test_ray_is_handed_some_runs_at_a_time(tmp_path, made, monkeypatch):
    """Its joblib backend gives back lists only, so nothing may be asked of it as a stream."""
    asked = []
    parallel = generate.joblib.Parallel
    monkeypatch.setattr(generate, "_cluster", lambda _: "threading")
    monkeypatch.setattr(generate, "RAY_RUNS", 2)
    monkeypatch.setattr(generate.joblib, "Parallel", lambda **options: asked.append(options) or parallel(**options))

    assert generate.generate(tmp_path, 5, 1, 1, backend="ray") == 5
    assert asked == [{}] * 3
    assert len(list(tmp_path.glob("*.parquet"))) == 5


def test_a_run_that_is_killed_while_it_is_written_leaves_nothing(tmp_path, made, monkeypatch):
    """No half file, and it is made the next time."""
    whole = pq.write_table

    def killed(table, path, **options):
        path.write_bytes(b"PAR1 half")
        raise KeyboardInterrupt

    monkeypatch.setattr(pq, "write_table", killed)
    with pytest.raises(KeyboardInterrupt):
        generate.generate(tmp_path, 1, 1, 1)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    monkeypatch.setattr(pq, "write_table", whole)

    assert generate.generate(tmp_path, 1, 1, 1) == 1


def test_a_record_lies_beside_every_run(tmp_path, made):
    """With everything that decided its numbers."""
    generate.generate(tmp_path, 2, 1, 7, only=("lr_step", "control"))
    records = [tables.read_info(path) for path in sorted(tmp_path.glob("*.parquet"))]

    for record in records:
        assert record["source"] == "testbed"
        assert {"testbed", "torch", "python"} <= set(json.loads(record["versions"]))
        assert json.loads(record["config"])["knobs"]["task"] in task.TASKS


def test_packing_keeps_missing_and_nan_apart_and_rounds_the_rest(tmp_path):
    """Two files: rows, and records with the pair and the fault."""
    first = tables.RunInfo("a", "lr_step", "learning_rate", "testbed", 5, {"x": 1}, fault_step=70)
    columns = {"step": [0, 1, 2], "policy/entropy": [1.23456789, None, math.nan], "ratio/max": [math.inf, 0.0, -1e-30]}
    columns["adv/max"] = [None, None, None]
    columns["ratio/ess"] = [0.99991, 0.5, 1.0]
    tables.write_run(tmp_path / "runs", first, columns)
    tables.write_run(
        tmp_path / "more", tables.RunInfo("b", "control", "healthy", "testbed", 5, pair="a"), {"step": [0]}
    )

    folders = (tmp_path / "runs", tmp_path / "more")
    rows, records = map(pq.read_table, tables.pack(tmp_path / "set.parquet", *folders, at_once=["lr_step"]))

    entropy, ratio = rows["policy/entropy"].to_pylist(), rows["ratio/max"].to_pylist()
    assert "adv/max" not in rows.column_names, "never measured"
    assert 0 < abs(entropy[0] - 1.23456789) < 2.5e-4 * 1.24
    assert entropy[1] is entropy[3] is None
    assert math.isnan(entropy[2])
    assert rows["ratio/ess"].to_pylist()[:3] == pytest.approx([0.99991, 0.5, 1.0], abs=1.6e-5), "1 - ess is what counts"
    assert ratio[:2] == [math.inf, 0.0]
    assert ratio[2] == pytest.approx(-1e-30, rel=2.5e-4)
    told = [(r["run"], r["pair"], r["fault_step"], r["at_once"]) for r in records.to_pylist()]
    assert told == [("a", "", 70, True), ("b", "a", None, False)]


def test_columns_of_unequal_length_are_refused(tmp_path):
    with pytest.raises(RLWatchError, match="one length"):
        tables.write_run(tmp_path, tables.RunInfo("a", "r", "f", "testbed", 1), {"step": [0, 1], "x": [1.0]})


def test_bad_input_is_one_clear_error(tmp_path, monkeypatch):
    """What was wrong, and what to do."""
    with pytest.raises(RLWatchError, match=r"no recipe is called lr_stop; there are: .*lr_step"):
        generate.generate(tmp_path, 1, 1, 1, only=("lr_stop",))
    with pytest.raises(RLWatchError, match="no runs in"):
        tables.pack(tmp_path / "set.parquet", tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RLWatchError, match="--backend ray needs ray"):
        generate.generate(tmp_path, 1, 1, 1, backend="ray")
