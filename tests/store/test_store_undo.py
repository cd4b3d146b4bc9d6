"""What a store begins and cannot end is undone: locks, connections, transactions, half-made copies."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.errors import RunLockedError, StoreCorruptError, StoreError, StoreFullError, StoreVersionError
from rlwatch.records import RunInfo, StepRecord
from rlwatch.store.sqlite import schema
from rlwatch.store.sqlite.connection import open_reader, open_writer
from rlwatch.store.sqlite.layout import RunFiles, RunLock, touch_private
from rlwatch.store.sqlite.schema import Migration, transaction
from rlwatch.store.sqlite.shared import put_in_place
from rlwatch.store.url import open_store


class Interrupted(BaseException):
    """Ctrl-C at the worst moment."""


class Remembering(sqlite3.Connection):
    """Knows which of its kind were closed."""

    opened: list[Remembering] = []  # noqa: RUF012  (emptied by each test)
    shut = False

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        Remembering.opened.append(self)

    def close(self) -> None:
        self.shut = True
        super().close()


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Remembering]:
    """The connections made from now on."""
    usual = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: usual(*a, **k | {"factory": Remembering}))
    Remembering.opened = []
    return Remembering.opened


def run_file(directory: Path) -> RunFiles:
    directory.mkdir()
    files = RunFiles(directory)
    touch_private(files.run)
    return files


def refusing(error: BaseException) -> Migration:
    def apply(db: sqlite3.Connection) -> None:
        db.execute("CREATE TABLE half (a)")
        raise error

    return Migration("half", apply)


@pytest.mark.parametrize("error", [Interrupted(), sqlite3.DatabaseError("gone"), ValueError("ours")])
def test_a_writer_that_cannot_be_opened_is_closed(tmp_path: Path, connections, monkeypatch, error: BaseException):
    """Whatever stops it; and nothing of the step that failed is in the file."""
    files = run_file(tmp_path / "run")
    monkeypatch.setattr(schema, "RUN_TABLES", (*schema.RUN_TABLES, refusing(error)))
    with pytest.raises((type(error), StoreError)):
        open_writer(files.run)
    monkeypatch.undo()

    assert [connection.shut for connection in connections] == [True]
    tables = sqlite3.connect(files.run).execute("SELECT count(*) FROM sqlite_master WHERE name = 'half'").fetchone()
    assert tables == (0,)


def test_a_writer_that_opens_stays_open(tmp_path: Path, connections):
    """It is the caller's to close."""
    db = open_writer(run_file(tmp_path / "run").run)

    assert [connection.shut for connection in connections] == [False]
    db.close()


def test_a_newer_file_is_refused_with_no_connection_left(tmp_path: Path, connections):
    """By a writer and by a reader."""
    files = run_file(tmp_path / "run")
    open_writer(files.run).close()
    with sqlite3.connect(files.run) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreVersionError, match="format 99"):
        open_writer(files.run)
    with pytest.raises(StoreVersionError, match="format 99"), open_reader(files):
        pass

    assert all(connection.shut for connection in connections)


def test_a_file_that_is_no_database_leaves_no_connection(tmp_path: Path, connections):
    """The snapshot is where it shows."""
    files = run_file(tmp_path / "run")
    files.run.write_bytes(b"not a database, certainly" * 100)
    with pytest.raises(StoreCorruptError, match=str(files.run)), open_reader(files):
        pass

    assert all(connection.shut for connection in connections)
    assert connections


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([None, Interrupted, ValueError])), max_size=8))
def test_transactions_are_whole_or_not_at_all(parts):
    """However they end; the connection is ready for the next one."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.execute("CREATE TABLE t (a)")
    for value, error in parts:
        try:
            with transaction(db):
                db.execute("INSERT INTO t VALUES (?)", (value,))
                if error is not None:
                    raise error
        except (Interrupted, ValueError):
            assert error is not None
        assert not db.in_transaction

    assert [a for (a,) in db.execute("SELECT a FROM t ORDER BY rowid")] == [v for v, error in parts if error is None]
    db.close()


def test_a_transaction_that_sqlite_ended_itself_keeps_the_first_error():
    """After a full disk there is nothing left to roll back, and nobody hears of that instead."""
    db = sqlite3.connect(":memory:", isolation_level=None)

    def ended_by_sqlite() -> None:
        with transaction(db):
            db.execute("ROLLBACK")
            raise ValueError("no room")

    with pytest.raises(ValueError, match=r"^no room$"):
        ended_by_sqlite()

    assert not db.in_transaction


def test_a_lock_names_who_holds_it_and_is_free_again(tmp_path: Path):
    """Also for this very process; a refused try does not take it from the holder."""
    path = tmp_path / "run" / "run.lock"
    path.parent.mkdir()
    held = RunLock(path)
    for _ in range(2):
        with pytest.raises(RunLockedError, match=rf"^run 'run' is already being written by process {os.getpid()} on "):
            RunLock(path)
    held.release()
    held.release()

    RunLock(path).release()


@pytest.mark.parametrize("amending", [True, False])
def test_a_lock_says_if_it_is_held_for_a_moment_only(tmp_path: Path, amending: bool):
    """Then whoever wants to write the run waits for it instead of giving up."""
    held = RunLock(tmp_path / "run.lock", amending=amending)
    with pytest.raises(RunLockedError) as refused:
        RunLock(tmp_path / "run.lock")
    held.release()

    assert refused.value.amending is amending


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b'{"pid": 3}', b"\xff\xfe", b"null"])
def test_a_holder_that_left_no_name_is_another_process(tmp_path: Path, note: bytes):
    """It was killed while it wrote it down, or is another version."""
    path = tmp_path / "run.lock"
    held = RunLock(path)
    path.write_bytes(note)
    with pytest.raises(RunLockedError, match="written by another process; wait for it to end"):
        RunLock(path)
    held.release()


@pytest.mark.parametrize("error", [Interrupted(), OSError(errno.ENOSPC, "No space left on device")])
def test_a_lock_that_cannot_be_signed_is_let_go(tmp_path: Path, monkeypatch, error: BaseException):
    """No descriptor stays open, and the next try has it."""
    used: list[int] = []

    def failing(fd: int, *_: object) -> None:
        used.append(fd)
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", failing)
        with pytest.raises((Interrupted, StoreFullError)):
            RunLock(tmp_path / "run.lock")

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(used[0])
    RunLock(tmp_path / "run.lock").release()


def breaking_copy(patch: pytest.MonkeyPatch, full: object) -> None:
    patch.setattr(shutil, "copyfile", full)


def breaking_sync(patch: pytest.MonkeyPatch, full: object) -> None:
    patch.setattr(os, "fsync", full)


def breaking_replacement(patch: pytest.MonkeyPatch, full: object) -> None:
    patch.setattr(Path, "replace", full)


@pytest.mark.parametrize("breaking", [breaking_copy, breaking_sync, breaking_replacement])
def test_a_copy_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path, monkeypatch, breaking):
    """Readers see the old file or the new one; the reason is told with the path."""
    source, target = tmp_path / "new", tmp_path / "run.db"
    source.write_bytes(b"new")
    target.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as broken:
        breaking(broken, full)
        with pytest.raises(StoreFullError) as raised:
            put_in_place(source, target)

    assert str(raised.value) == f"no room to write {target} (Disk quota exceeded); free disk space or quota"
    assert target.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "run.db"]
    put_in_place(source, target)
    assert target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == 0o600


class OutOfMemory(sqlite3.Connection):
    """Has no memory left just after a commit, when it is told so."""

    now = False

    def execute(self, sql: str, *rest: object) -> sqlite3.Cursor:
        done = super().execute(sql, *rest)  # type: ignore[arg-type]
        if sql == "COMMIT" and OutOfMemory.now:
            OutOfMemory.now = False
            raise MemoryError
        return done


def test_what_was_stored_before_memory_ran_out_is_not_stored_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller cannot know, and gives it again."""
    usual = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: usual(*a, **k | {"factory": OutOfMemory}))
    store = open_store(tmp_path)
    writer = store.open_run(RunInfo("run"))
    rows = [StepRecord(step, {"a": float(step)}) for step in range(4)]
    writer.write(rows[:1])
    OutOfMemory.now = True
    waiting = rows[1:3]
    with pytest.raises(MemoryError):
        writer.write(waiting)
    waiting += rows[3:]  # as the caller's list grows until it is given again
    writer.write(waiting)
    writer.close()

    assert [(row.step, row.metrics["a"]) for row in store.records("run")] == [(step, float(step)) for step in range(4)]
