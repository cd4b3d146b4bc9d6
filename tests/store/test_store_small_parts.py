"""The small parts of a store: error codes as advice, what is remembered of files, names, modes, values as text."""

import errno
import math
import os
import sqlite3
import stat
import time
from pathlib import Path

import numpy as np
import pytest

from rlwatch.errors import (
    RunNotFoundError,
    StoreBusyError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
)
from rlwatch.store import check_run_id
from rlwatch.store.sqlite.connection import explain, explained
from rlwatch.store.sqlite.layout import existing_files, make_private, run_ids, size_of, touch_private, writing_to
from rlwatch.store.sqlite.rows import dumps, loads, plain
from rlwatch.store.sqlite.run_index import Unchanged, stamp_of


def failure(code):
    error = sqlite3.OperationalError("told by sqlite")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("code", "kind", "advice"),
    [
        (sqlite3.SQLITE_FULL, StoreFullError, "free disk space or quota"),
        (sqlite3.SQLITE_IOERR_WRITE, StoreFullError, "free disk space or quota"),
        (sqlite3.SQLITE_IOERR_TRUNCATE, StoreFullError, "free disk space or quota"),
        (sqlite3.SQLITE_CORRUPT, StoreCorruptError, "restore it from a copy"),
        (sqlite3.SQLITE_CORRUPT_INDEX, StoreCorruptError, "restore it from a copy"),
        (sqlite3.SQLITE_NOTADB, StoreCorruptError, "restore it from a copy"),
        (sqlite3.SQLITE_IOERR_SHORT_READ, StoreCorruptError, "restore it from a copy"),
        (sqlite3.SQLITE_BUSY, StoreBusyError, "try again"),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, StoreBusyError, "try again"),
        (sqlite3.SQLITE_LOCKED, StoreBusyError, "try again"),
        (sqlite3.SQLITE_CANTOPEN, StoreError, "RLWATCH_STORE"),
        (sqlite3.SQLITE_READONLY_DIRECTORY, StoreError, "RLWATCH_STORE"),
        (sqlite3.SQLITE_IOERR_READ, StoreError, "run.db: told by sqlite"),
        (sqlite3.SQLITE_MISUSE, StoreError, "run.db: told by sqlite"),
    ],
)
def test_an_error_code_becomes_what_happened_and_what_to_do(code, kind, advice):
    """By the extended code where that says more; always with the file."""
    error = explain(failure(code), "/data/run.db")

    assert type(error) is kind
    assert "/data/run.db" in str(error)
    assert advice in str(error)


def test_an_error_without_a_code_is_passed_on_in_words():
    """From a connection that is closed, say."""
    assert str(explain(sqlite3.ProgrammingError("closed"), "f")) == "f: closed"


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (failure(sqlite3.SQLITE_BUSY), StoreBusyError),
        (ValueError("bad json"), StoreCorruptError),
        (KeyError("name"), StoreCorruptError),
        (StoreFullError("as it is"), StoreFullError),
        (TypeError("ours"), TypeError),
    ],
)
def test_what_a_file_cannot_mean_is_damage_and_our_own_mistakes_stay_ours(raised, kind):
    """The cause is kept."""
    with pytest.raises(kind) as error, explained("run.db"):
        raise raised

    assert error.value is raised or error.value.__cause__ is raised


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StoreFullError),
        (errno.EDQUOT, StoreFullError),
        (errno.EFBIG, StoreFullError),
        (errno.EACCES, StoreError),
        (errno.EROFS, StoreError),
    ],
)
def test_a_write_that_fails_says_whether_room_would_help(number, kind):
    """Disk, quota and file size limit are one thing; rights another."""
    with pytest.raises(StoreError) as error, writing_to(Path("/data/run.lock")):
        raise OSError(number, os.strerror(number))

    assert type(error.value) is kind
    assert "/data/run.lock" in str(error.value)
    assert os.strerror(number) in str(error.value)


@pytest.mark.parametrize("run_id", ["a", "A-1_b.c", "x" * 120, "_-flag", "_", "7"])
def test_these_are_names_of_runs(run_id):
    """Up to 120 characters."""
    assert check_run_id(run_id) == run_id


@pytest.mark.parametrize(
    "run_id", ["", "-rf", "--help", ".hidden", "..", "x" * 121, "a/b", "a b", "é", "a\n", "a\x00", "a\\b"]
)
def test_these_are_not(run_id):
    """Nothing that leaves the directory, hides in it, looks like two or like an option."""
    with pytest.raises(StoreError, match="cannot be a run id: use 1 to 120"):
        check_run_id(run_id)


def test_files_are_for_their_owner_only(tmp_path):
    """A second call changes nothing."""
    directory = tmp_path / "deep" / "run"
    for _ in range(2):
        make_private(directory)
        touch_private(directory / "run.db")
    (directory / "run.db").write_text("kept")
    touch_private(directory / "run.db")

    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "run.db").stat().st_mode) == 0o600
    assert ((directory / "run.db").read_text(), size_of(directory / "run.db")) == ("kept", 4)
    assert size_of(directory / "nothing") == 0


def test_only_directories_with_a_run_in_them_are_runs(tmp_path):
    """Sorted; hidden ones, files and empty directories are passed over; no root is no runs."""
    for name in ("b", "a", ".hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.db").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()

    assert run_ids(tmp_path) == ["a", "b"]
    assert run_ids(tmp_path / "nowhere") == []
    assert existing_files(tmp_path, "a").run == tmp_path / "a" / "run.db"
    for missing in ("empty", "../a", "c"):
        with pytest.raises(RunNotFoundError):
            existing_files(tmp_path, missing)


def test_what_was_read_is_remembered_while_the_file_stays_as_it_was(tmp_path):
    """By time, size and identity; another name knows nothing of it."""
    path, memory = tmp_path / "run.db", Unchanged()
    path.write_text("one")
    os.utime(path, (1000, 1000))
    stamp = stamp_of(path, tmp_path / "missing")
    memory.keep("run", stamp, "value")
    path.write_text("two")
    os.utime(path, (1001, 1001))

    assert stamp[1] is None
    assert memory.recall("run", stamp) == "value"
    assert memory.recall("other", stamp) is None
    assert memory.recall("run", stamp_of(path, tmp_path / "missing")) is None


@pytest.mark.parametrize(("age_ns", "kept"), [(1_900_000_000, False), (2_100_000_000, True)])
def test_a_file_changed_just_now_is_not_trusted_to_show_the_next_change(monkeypatch, age_ns, kept):
    """Two writes within one tick of the file system's clock leave one time stamp."""
    now, memory = 10**18, Unchanged()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    stamp = ((now - age_ns, 3, 7), None, (now - 10**12, 1, 1))
    memory.keep("run", stamp, "value")

    assert (memory.recall("run", stamp) == "value") is kept


def test_files_that_are_not_there_are_not_remembered():
    """They may come at any moment."""
    memory = Unchanged()
    memory.keep("run", (None, None), "nothing")

    assert memory.recall("run", (None, None)) is None


@pytest.mark.parametrize(
    ("value", "back"),
    [
        ({"t": (1, 2), "n": np.float32(0.5), "a": np.arange(2)}, {"t": [1, 2], "n": 0.5, "a": [0, 1]}),
        ({"s": {3, 1, 2}, "p": Path("/x")}, {"s": [1, 2, 3], "p": "/x"}),
        ([math.inf, -math.inf, None, True, 1 << 70], [math.inf, -math.inf, None, True, 1 << 70]),
        ({"é\ud800": "\x00"}, {"é\ud800": "\x00"}),
    ],
)
def test_values_come_back_from_text_as_the_nearest_json_knows(value, back):
    """In plain ASCII, whatever they hold."""
    assert dumps(value).isascii()
    assert loads(dumps(value)) == back


def test_text_is_kept_unless_no_file_could_hold_it():
    """Half a surrogate pair becomes its escape; what is no text becomes one."""
    assert (plain("naïve 日本"), plain("a\udc80b"), plain(7)) == ("naïve 日本", "a\\udc80b", "7")
