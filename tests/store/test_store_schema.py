"""Migrations, and the little formats inside the rows."""

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from rlwatch.errors import StoreCorruptError, StoreVersionError
from rlwatch.records import CompletionBatch, Event, ForecastRecord, RunInfo
from rlwatch.store.sqlite import schema
from rlwatch.store.sqlite.rows import pack_columns, unpack_columns, worst_rows
from rlwatch.store.sqlite.schema import Migration, check_readable, migrate, transaction, version_of
from rlwatch.store.url import open_store
from rlwatch.testing.store_run_contract import command, fill, steps


def _adds(column: str) -> Migration:
    return Migration(f"add {column}", lambda db: db.execute(f"ALTER TABLE run ADD COLUMN {column} TEXT") and None)


def _columns(path: Path) -> list[str]:
    return [row[1] for row in sqlite3.connect(path).execute("PRAGMA table_info(run)")]


def test_a_file_of_the_first_version_is_read_and_brought_up_to_date_by_its_writer(tmp_path: Path, monkeypatch):
    """Readers of the next version read it as it is; only resuming changes it; then an older program refuses it."""
    store = open_store(tmp_path)
    fill(store, steps(1, 2), finish=True)  # by the program that knows one migration less
    path = tmp_path / "run" / "run.db"
    with monkeypatch.context() as newer:
        newer.setattr(schema, "RUN_TABLES", (*schema.RUN_TABLES, _adds("colour")))
        assert len(store.records("run")) == 2
        assert "colour" not in _columns(path)
        fill(store, steps(3))
        assert "colour" in _columns(path)
        assert [record.step for record in store.records("run")] == [1, 2, 3]

    with pytest.raises(StoreVersionError, match=r"format 6.*only up to 5.*install a newer rlwatch"):
        store.run("run")
    assert "format 6" in store.unreadable()["run"]


def test_a_run_recorded_before_there_were_completions_gets_their_table_from_its_writer(tmp_path: Path, monkeypatch):
    """Four versions ago: readers wait for the writer."""
    store = open_store(tmp_path)
    with monkeypatch.context() as older:
        older.setattr(schema, "RUN_TABLES", schema.RUN_TABLES[:1])
        fill(store, steps(1, 2), finish=True)

    fill(store, [*steps(3), CompletionBatch(3, {"completion": ["x"]})])
    assert [batch.step for batch in store.completions("run")] == [3]


def test_a_run_recorded_before_there_were_forecasts_has_none(tmp_path: Path, monkeypatch):
    """Its reader does not miss the table, in whatever it is asked; its writer makes it."""
    store = open_store(tmp_path)
    with monkeypatch.context() as older:
        older.setattr(schema, "RUN_TABLES", schema.RUN_TABLES[:2])
        fill(store, steps(1, 2), finish=True)
    name = store.metric_names("run")[0]
    assert (store.forecasts("run"), len(store.series("run", [name])[name].steps)) == ([], 2)
    assert store.last_values("run")[name][0] == 2

    fill(store, [*steps(3), ForecastRecord(3, {"forecast/p50": 0.5}, seq=3)])
    assert store.last_values("run")["forecast/p50"] == (3, 0.5)


@pytest.mark.parametrize("last", [steps(1, 2), [*steps(1), Event("note", 1, {})], []], ids=["record", "event", "none"])
def test_a_run_recorded_before_judging_was_noted_is_taken_to_be_judged(tmp_path: Path, monkeypatch, last: list):
    """Up to its last record or event, whichever came later: nobody is alarmed today of what was then."""
    store = open_store(tmp_path)
    with monkeypatch.context() as older:
        older.setattr(schema, "RUN_TABLES", schema.RUN_TABLES[:3])
        fill(store, last, finish=True)
    ended = store.judged("run")[1]
    assert store.judged("run") == (ended, ended)

    fill(store, steps(3))
    judged, newest = store.judged("run")
    assert judged == ended < newest


def test_a_file_four_versions_old_wants_its_writer_first(tmp_path: Path, monkeypatch):
    """A reader says what to do; resuming takes all steps."""
    store = open_store(tmp_path)
    fill(store, steps(1), finish=True)
    monkeypatch.setattr(schema, "RUN_TABLES", (*schema.RUN_TABLES, *map(_adds, ("colour", "taste", "weight", "age"))))
    with pytest.raises(StoreVersionError, match=r"format 5.*reads 6 to 9.*resume"):
        store.run("run")

    fill(store, steps(2), finish=True)
    assert [record.step for record in store.records("run")] == [1, 2]
    assert _columns(tmp_path / "run" / "run.db")[-4:] == ["colour", "taste", "weight", "age"]


def test_control_tables_are_brought_up_to_date_by_whoever_uses_them(tmp_path: Path, monkeypatch):
    """They have no single owner."""
    store = open_store(tmp_path)
    fill(store)
    store.submit(command())
    monkeypatch.setattr(
        schema,
        "CONTROL_TABLES",
        (*schema.CONTROL_TABLES, Migration("x", lambda db: db.execute("CREATE TABLE x (y)") and None)),
    )

    assert len(store.commands("run")) == 1
    db = sqlite3.connect(tmp_path / "run" / "control.db")
    assert version_of(db) == len(schema.CONTROL_TABLES)


def test_a_failing_migration_leaves_the_file_as_it_was():
    """Each step is one transaction, version and tables together."""
    db = sqlite3.connect(":memory:", isolation_level=None)

    def half(db: sqlite3.Connection) -> None:
        db.execute("CREATE TABLE later (x)")
        raise RuntimeError("power")

    good = Migration("good", lambda db: db.execute("CREATE TABLE first (x)") and None)
    with pytest.raises(RuntimeError, match="power"):
        migrate(db, (good, Migration("half", half)), "here")

    assert version_of(db) == 1
    assert [row[0] for row in db.execute("SELECT name FROM sqlite_schema")] == ["first"]
    migrate(db, (good,), "here")
    migrate(db, (good, Migration("whole", lambda db: db.execute("CREATE TABLE later (x)") and None)), "here")
    assert version_of(db) == 2


def test_an_empty_file_is_no_run():
    """Version 0 means that nobody ever made tables in it."""
    with pytest.raises(StoreCorruptError, match="here holds no run"):
        check_readable(sqlite3.connect(":memory:"), 1, "here")


def test_a_transaction_that_raises_leaves_nothing():
    """Whatever it raises."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.execute("CREATE TABLE t (x)")

    def interrupted() -> None:
        with transaction(db):
            db.execute("INSERT INTO t VALUES (1)")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (db.execute("SELECT count(*) FROM t").fetchone(), db.in_transaction) == ((0,), False)


@pytest.mark.parametrize("dtype", ["<f8", ">f8", "<f4", "<f2", "<i8", ">i4", "|u1", "|b1"])
def test_columns_keep_their_type_in_little_endian(dtype: str):
    """On any machine."""
    column = np.array([0, 1, 0, 1]).astype(dtype)
    rows, blob = pack_columns({"x": column, "/odd\x00name": column})

    back = unpack_columns(blob)
    assert rows == 4
    assert list(back) == ["x", "/odd\x00name"]
    assert back["x"].dtype == np.dtype(dtype).newbyteorder("<")
    np.testing.assert_array_equal(back["x"], column)


def test_a_strided_column_and_a_large_batch_come_back():
    """And take a fraction of their size where they repeat."""
    columns = {"a": np.arange(200_000)[::2], "b": np.zeros(100_000)}
    rows, blob = pack_columns(columns)

    assert rows == 100_000
    np.testing.assert_array_equal(unpack_columns(blob)["a"], columns["a"])
    assert len(blob) < 400_000


@pytest.mark.parametrize("blob", [b"", b"x", b"no zlib at all", b"\x78\x01", pack_columns({"a": np.zeros(99)})[1][:-3]])
def test_a_damaged_blob_is_a_value_error(blob: bytes):
    """Which readers report as damage of the file."""
    with pytest.raises(ValueError, match="batch"):
        unpack_columns(blob)


def test_a_blob_cannot_ask_for_python_objects():
    """Run directories travel; a stranger's file must not run code."""
    import json
    import zlib

    head = json.dumps([["x", "|O", 8]]).encode()
    with pytest.raises(ValueError, match=r"\|O"):
        unpack_columns(zlib.compress(len(head).to_bytes(4, "little") + head + bytes(8)))


@pytest.mark.parametrize(
    ("columns", "order"),
    [
        ({"contribution": [1.0, -3.0, 2.0], "ratio": [9.0, 1.0, 1.0]}, [1, 2, 0]),
        ({"screen": [1.0, 0.0, 2.0], "ratio": [9.0, 1.0, 1.0]}, [2, 0, 1]),
        ({"contribution": [1.0, -3.0], "screen": [9.0, 1.0]}, [1, 0]),
        ({"ratio": [1.1, 0.01, 20.0, 0.0]}, [3, 1, 2, 0]),
        ({"ratio": [1.0, float("nan"), -1.0]}, [1, 2, 0]),
        ({"logp": [-1.0, -5.0], "old_logp": [-1.0, -1.0]}, [1, 0]),
        ({"logp": [-1.0, -1.0], "rollout_logp": [-1.0, -9.0]}, [1, 0]),
        ({"token_id": [3, 2, 1]}, [0, 1, 2]),
        ({}, []),
    ],
)
def test_the_worst_rows_are_those_furthest_from_the_sampler(columns: dict, order: list[int]):
    """By contribution, else screen, else |log ratio|, else |log-prob difference|; without any, in order."""
    columns = {name: np.array(column) for name, column in columns.items()}
    count = len(order)
    rows = {"at": np.arange(count), **columns} if count else columns

    assert [row["at"] for _, row in worst_rows(rows, 10)] == order


def test_opening_with_an_ancient_sqlite_says_so(tmp_path: Path, monkeypatch):
    """Before any file is made of which it would understand half."""
    from rlwatch.errors import StoreError

    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 22, 0))
    with pytest.raises(StoreError, match=r"3\.24"):
        open_store(tmp_path).open_run(RunInfo("run"))
