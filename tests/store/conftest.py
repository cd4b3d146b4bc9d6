"""Child processes for the tests of the store: some die, some have fewer rights, some share a run."""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from clickhouse_server import ClickHouseServer, engine
from postgres_server import PostgresServer, dropped, emptied, new_schema
from preloaded import Program

from rlwatch.records import Silence
from rlwatch.store.clickhouse.carrier import BULK
from rlwatch.store.url import open_store

_ROOT = Path(__file__).parents[2]
_PRELUDE = """
import os, resource, signal, sys, time
from rlwatch.errors import *
from rlwatch.records import *
from rlwatch.store.clickhouse.carrier import BULK
from rlwatch.store.url import open_store
import rlwatch.store.memory, rlwatch.store.sqlite.filestore, rlwatch.store.sqlite.shared, numpy.lib.format

def records(*steps, **rest):
    return [StepRecord(step, {"kl": step / 10}, **rest) for step in steps]

def become_nobody():
    if os.getuid() == 0:  # root may write anywhere: tests of missing rights need another user
        os.setgid(65534)
        os.setuid(65534)

"""
Child = Callable[..., Program]


@pytest.fixture
def child() -> Iterator[Child]:
    """``child(code, *args)`` starts Python on ``code``, which finds the store's names imported."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *args: object) -> Program:
        environment = os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
        started.append(
            Program(
                _PRELUDE + code,
                *args,
                having="rlwatch",
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()


@pytest.fixture
def run_child(child: Child) -> Callable[..., str]:
    """The same, waiting for the end; returns what it printed and fails with its traceback if it failed."""

    def run(code: str, *args: object) -> str:
        process = child(code, *args)
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        return out.strip()

    return run


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory every user can enter (pytest's own are the owner's only)."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        yield path
        for directory, _, _ in os.walk(path):
            Path(directory).chmod(0o755)


@pytest.fixture
def lock_away() -> Callable[[Path], None]:
    """``lock_away(dir)``: readable by everyone in it, writable by no one but root."""

    def away(directory: Path) -> None:
        for path in [*directory.rglob("*"), directory]:
            path.chmod(0o555 if path.is_dir() else 0o444)

    return away


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A server of this worker's own, running; what stops it starts it again."""
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="session")
def postgres_place(request) -> Callable[[str], str]:
    """``postgres_place(schema)`` is the URL of a store there: in ``TEST_DB_URL`` where that is given."""
    given = os.environ.get("TEST_DB_URL")
    if given:
        return lambda schema: f"{given}{'&' if '?' in given else '?'}schema={schema}"
    return request.getfixturevalue("postgres_server").url


@pytest.fixture
def postgres_url(postgres_place, tmp_path: Path, monkeypatch) -> Iterator[str]:
    """A new store, without tables. Journals lie in the test's directory."""
    monkeypatch.setenv("RLWATCH_LOCAL_DIR", str(tmp_path / "local"))
    schema = new_schema()
    yield postgres_place(schema)
    dropped(postgres_place(schema), schema)


@pytest.fixture(scope="session")
def _postgres_tables(postgres_place) -> Iterator[tuple[str, str]]:
    schema = new_schema()
    open_store(postgres_place(schema)).put_silence(Silence("s", "", "", 0.0, 0.0))  # makes the tables
    yield schema, postgres_place(schema)
    dropped(postgres_place(schema), schema)


@pytest.fixture
def emptied_postgres_url(_postgres_tables, tmp_path: Path, monkeypatch) -> str:
    """A store whose tables are there and empty: making them anew takes longer than most tests."""
    monkeypatch.setenv("RLWATCH_LOCAL_DIR", str(tmp_path / "local"))
    schema, url = _postgres_tables
    emptied(url, schema)
    return url


@pytest.fixture(scope="session")
def clickhouse_server() -> Iterator[ClickHouseServer]:
    """An engine of this worker's own; what stops it starts it again."""
    server = ClickHouseServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="session")
def clickhouse_place(request) -> str:
    """A database of ClickHouse: that of ``TEST_CLICKHOUSE_URL`` where it is given."""
    return os.environ.get("TEST_CLICKHOUSE_URL") or request.getfixturevalue("clickhouse_server").url


@pytest.fixture(scope="session")
def _carried_tables(postgres_place, clickhouse_place: str) -> Iterator[tuple[str, str]]:
    schema = new_schema()
    url = f"{postgres_place(schema)}&series={quote(clickhouse_place, safe='')}"
    open_store(url).server.migrate()
    yield schema, url
    dropped(url, schema)
    for name in ("to_record", "to_point", "to_latest", "row", *BULK):
        engine(clickhouse_place).do(f"DROP TABLE {schema}_{name}")


@pytest.fixture
def emptied_carried_url(_carried_tables, tmp_path: Path, monkeypatch) -> str:
    """A store whose series lie in ClickHouse, without runs; what is left there of those of other tests counts no more."""
    monkeypatch.setenv("RLWATCH_LOCAL_DIR", str(tmp_path / "local"))
    schema, url = _carried_tables
    emptied(url, schema)
    return url
