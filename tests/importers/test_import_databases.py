"""Databases of trackers, Parquet, and packed logs: what the contract does not ask of every format."""

from __future__ import annotations

import bz2
import lzma
import math
from pathlib import Path
from time import thread_time

import binary_logs
import pyarrow as pa
import pytest
from native_logs import verl_console

import rlwatch
from rlwatch.errors import ImportFormatError
from rlwatch.importers import LogTail, read_log
from rlwatch.importers.databases import DatabaseReading, RunDatabase
from rlwatch.importers.follow import A_WHILE_S, WholeFollower

ROWS = [(step, {"reward": step / 10, "entropy": 1.0}) for step in range(1, 6)]


def test_each_run_of_mlflow_is_a_run_with_its_values_and_settings(tmp_path: Path) -> None:
    """NaN and the infinities come back, runs of one name are told apart by their ids."""
    odd = [(1, {"reward": math.nan}), (2, {"reward": math.inf}), (3, {"reward": -math.inf}), (4, {"reward": 0.5})]
    (tmp_path / "mlflow.db").write_bytes(binary_logs.mlflow({"a": ROWS, "b": odd, "b*": ROWS}, {"lr": "1e-6"}))
    found = {run.name: run for run in read_log(tmp_path / "mlflow.db")}

    assert list(found) == ["a", "b", "b-00000002"]
    assert [repr(record.metrics["reward"]) for record in found["b"].records] == ["nan", "inf", "-inf", "0.5"]
    assert [record.step for record in found["a"].records] == [1, 2, 3, 4, 5]
    assert found["a"].records[1].ts == 2.0
    assert all(run.config == {"lr": "1e-6"} for run in found.values())


def test_a_run_is_followed_among_others_and_with_what_comes_late(tmp_path: Path) -> None:
    """Neither rows of a run before it nor a metric of an earlier step begin it anew; a changed value does."""
    path = tmp_path / "mlflow.db"

    def written(first: int, rows: list[tuple[int, dict[str, float]]]) -> None:
        path.write_bytes(binary_logs.mlflow({"a": ROWS[:first], "b": rows}, {}))

    def polled() -> list[tuple[int, int, dict[str, float]]]:
        return [(record.attempt, record.step, dict(record.metrics)) for record in tail.poll()]

    plain = [(step, {"reward": math.nan}) for step in (1, 2, 3)]
    late = [plain[0], (2, {"reward": math.nan, "eval_reward": 0.5}), plain[2]]
    written(1, plain)
    tail = LogTail(path, run="b")
    assert len(polled()) == 3
    written(3, [*late, (4, {"reward": 0.5})])
    assert polled() == [(1, 2, {"eval_reward": 0.5}), (1, 4, {"reward": 0.5})]
    written(3, [])  # gone for a moment
    assert polled() == []
    written(3, [*late, (4, {"reward": 0.5})])
    assert polled() == []
    written(3, [*late[:2], (3, {"reward": 0.25}), (4, {"reward": 0.5})])
    assert polled() == [(2, 3, {"reward": 0.25}), (2, 4, {"reward": 0.5})]


class Busy(RunDatabase):
    """A database that takes long to read."""

    def reading(self, path: str) -> DatabaseReading:
        began = thread_time()
        while thread_time() - began <= self.takes_s:
            pass
        return super().reading(path)

    takes_s = 0.0


def test_a_database_that_takes_long_is_not_read_at_every_look(tmp_path: Path) -> None:
    """At the end it is, with what came since."""
    path, importer = tmp_path / "mlflow.db", Busy()
    path.write_bytes(binary_logs.mlflow({"a": ROWS[:2]}, {}))
    follower = WholeFollower(path, importer, share=1e-6)
    importer.takes_s = A_WHILE_S
    assert [row.step for row in follower.poll()] == [1, 2]
    path.write_bytes(binary_logs.mlflow({"a": ROWS}, {}))

    assert follower.poll() == []
    assert [row.step for row in follower.close()] == [3, 4, 5]


def test_a_run_of_rlwatch_is_not_read_as_a_log(tmp_path: Path) -> None:
    """It says where to look instead."""
    with rlwatch.init(project="p", name="n", store=tmp_path / "store") as run:
        run.log({"entropy": 1.0}, step=1)
    (database,) = (tmp_path / "store").rglob("run.db")

    with pytest.raises(ImportFormatError, match="rlwatch runs"):
        read_log(database)


def test_another_database_is_refused_with_its_tables(tmp_path: Path) -> None:
    """Neither trackio's nor MLflow's."""
    import sqlite3

    with sqlite3.connect(tmp_path / "x.db") as database:
        database.execute("create table apples (x)")

    with pytest.raises(ImportFormatError, match=r"neither trackio nor MLflow .tables: apples."):
        read_log(tmp_path / "x.db")


@pytest.mark.parametrize(
    ("ending", "pack"),
    [("bz2", bz2.compress), ("xz", lzma.compress), ("zst", lambda b: pa.compress(b, codec="zstd", asbytes=True))],
)
def test_logs_may_be_packed(tmp_path: Path, ending: str, pack) -> None:
    """By their bytes, whatever the name says; a half-written one is a clear error."""
    whole = pack(verl_console(ROWS))
    (tmp_path / f"train.log.{ending}").write_bytes(whole)
    (tmp_path / "half.log").write_bytes(whole[: len(whole) // 2])

    (run,) = read_log(tmp_path / f"train.log.{ending}")
    assert (run.name, [record.metrics["reward"] for record in run.records]) == ("train", [0.1, 0.2, 0.3, 0.4, 0.5])
    with pytest.raises(ImportFormatError, match="damaged or still being written"):
        read_log(tmp_path / "half.log")
