"""What a store on PostgreSQL refuses, and says; and what it takes that is odd. The contract is tested with the others'."""

import contextlib
import math
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psycopg
import pytest
from postgres_server import new_schema, sql
from typer.testing import CliRunner

from rlwatch.cli.app import app
from rlwatch.errors import RunNotFoundError, StoreCorruptError, StoreError, StoreURLError, StoreVersionError
from rlwatch.records import Command, Event, RunEdit, RunInfo, StepRecord
from rlwatch.store.postgres import migrations
from rlwatch.store.postgres.address import read_address
from rlwatch.store.url import open_store
from rlwatch.testing.store_run_contract import command, fill, forecast, steps

PASSWORD = "s3cret-wörd"


@pytest.fixture
def locked_role(postgres_server):
    """A role whose password is asked for."""
    with sql(postgres_server.url()) as db:
        db.execute("DROP ROLE IF EXISTS locked")
        db.execute(f"CREATE ROLE locked LOGIN SUPERUSER PASSWORD '{PASSWORD}'")
    return postgres_server


def refused(url: str, error: type[StoreError] = StoreError) -> str:
    with pytest.raises(error) as failure:
        open_store(url).runs()
    return str(failure.value)


def test_a_password_is_taken_and_never_told(locked_role):
    """From the URL, where it must be; the store's own address has none."""
    url = locked_role.url(user=f"locked:{PASSWORD.replace('ö', '%C3%B6')}")
    store = open_store(url)

    assert store.runs() == []
    assert "rd@" not in store.url
    assert "cret" not in store.url + repr(read_address(url))
    with pytest.raises(RunNotFoundError) as failure:
        store.run("absent")
    assert "cret" not in str(failure.value)


def test_a_password_comes_from_the_environment_or_the_users_file(locked_role, monkeypatch, tmp_path: Path):
    """As every program of libpq takes it."""
    url = locked_role.url(user="locked")
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    assert open_store(url).runs() == []
    monkeypatch.delenv("PGPASSWORD")
    file = tmp_path / "pgpass"
    file.write_text(f"127.0.0.1:*:*:locked:{PASSWORD}\n")
    file.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(file))
    assert open_store(url).runs() == []


def test_each_refusal_says_what_to_do_in_one_line(locked_role, tmp_path: Path):
    """Wrong password, none, role, database, TLS wanted by them, by us, a server that is away, an option nobody knows."""
    server, away = locked_role, "postgresql://rlw@127.0.0.1:1/db"
    told = {
        refused(server.url(user="locked:wrong-one")): "PGPASSWORD",
        refused(server.url(user="locked")): "PGPASSWORD",
        refused(server.url(user="nobody_like_this")): "nobody_like_this",
        refused(server.url(database="no_such_base")): "create the database",
        refused(server.url(user="tlsonly")): "sslmode",
        refused(server.url().replace("sslmode=disable", "sslmode=require")): "sslmode",
        refused(away): "check host, port",
        refused(f"{away}?no_such_option=1", StoreURLError): "options of libpq",
        refused(f"{away}?schema=Robert'); DROP", StoreURLError): "small letters",
    }

    assert [advice for said, advice in told.items() if advice not in said] == []
    assert all("\n" not in said and "wrong-one" not in said for said in told)


@pytest.mark.parametrize("dropped", [False, True])
def test_a_network_that_swallows_everything_delays_nobody_for_long(tmp_path, monkeypatch, dropped):
    """Packets go nowhere: a port whose queue takes connections nobody answers, or is full, so that they are dropped. A
    person is told after ``connect_timeout``; a trainer begins without the server.
    """
    monkeypatch.setenv("RLWATCH_LOCAL_DIR", str(tmp_path))
    with contextlib.ExitStack() as stack:
        hole = stack.enter_context(socket.socket())
        hole.bind(("127.0.0.1", 0))
        hole.listen(0)
        for _ in range(4 if dropped else 0):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(hole.getsockname())
        url = f"postgresql://rlw@127.0.0.1:{hole.getsockname()[1]}/db?connect_timeout=2"
        assert "cannot be reached" in refused(url)
        writer = open_store(url, control_timeout_s=0.0).open_run(RunInfo("run"))
        assert writer.journal.append_record(1, 0.0, {"kl": 1.0})
        with pytest.raises(StoreError, match="cannot be reached"):
            writer.write(steps(1))
        writer.close()


def test_a_schema_from_the_future_is_refused_and_left_alone(postgres_url):
    """By readers, writers and whoever migrates; so is one from the past, until it is migrated on purpose."""
    fill(open_store(postgres_url), steps(1))
    schema = read_address(postgres_url).schema
    with sql(postgres_url) as db:
        db.execute(f"INSERT INTO {schema}.schema_version (version) VALUES (99)")
        assert "format 99" in refused(postgres_url, StoreVersionError)
        with pytest.raises(StoreVersionError, match="install a newer rlwatch"):
            open_store(postgres_url).open_run(RunInfo("run"))
        db.execute(f"DELETE FROM {schema}.schema_version WHERE version = 99")
    assert len(open_store(postgres_url).records("run")) == 1


def test_an_upgrade_is_whole_or_not_at_all(postgres_url):
    """A step that fails leaves the format it found; once it is mended it goes through; then the old program is told."""
    fill(open_store(postgres_url), steps(1))
    made, address = migrations.steps(), read_address(postgres_url)
    with sql(postgres_url) as db:
        db.execute(f"SET search_path TO {address.schema}")
        with pytest.raises(psycopg.errors.DivisionByZero):
            migrations.migrate(db, address, [*made, "CREATE TABLE more (id integer); SELECT 1 / 0"])
        assert migrations.version(db, address) == len(made)
        assert len(open_store(postgres_url).records("run")) == 1

        assert migrations.migrate(db, address, [*made, "CREATE TABLE more (id integer)"]) == 1
        assert migrations.migrate(db, address, [*made, "CREATE TABLE more (id integer)"]) == 0
    assert "install a newer rlwatch" in refused(postgres_url, StoreVersionError)


def test_tables_that_were_taken_away_are_named(postgres_url):
    """A schema restored by half is no empty store."""
    fill(open_store(postgres_url), steps(1))
    with sql(postgres_url) as db:
        db.execute(f"DROP TABLE {read_address(postgres_url).schema}.event")

    with pytest.raises(StoreCorruptError, match="event"):
        open_store(postgres_url).events("run")


def test_many_who_begin_at_once_make_the_tables_once(postgres_url):
    """Ten jobs of one array, say."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda k: fill(open_store(postgres_url), steps(1), f"run{k}"), range(8)))

    assert len(open_store(postgres_url).runs()) == 8


def test_a_role_that_may_not_make_tables_is_told_who_may(postgres_server):
    """And reading a store that is not there yet is no error for it either."""
    with sql(postgres_server.url()) as db:
        db.execute("DROP ROLE IF EXISTS plain")
        db.execute("CREATE ROLE plain LOGIN")
    store = open_store(postgres_server.url(new_schema(), user="plain"))

    assert store.runs() == []
    with pytest.raises(StoreError, match="rlwatch db migrate"):
        store.open_run(RunInfo("run"))


def test_sql_in_names_is_text(emptied_postgres_url):
    """Of runs, metrics, events, commands; NUL, which the server cannot hold, is escaped."""
    evil = "x'); DROP TABLE run; --\x00%s"
    store = open_store(emptied_postgres_url)
    writer = store.open_run(RunInfo("run", name=evil, tags=(evil,), project=evil))
    writer.write([StepRecord(1, {evil: 1.0}), Event(evil, body={evil: evil})])
    writer.close()
    asked = store.submit(Command("c'1", "run", evil, why=evil, idempotency_key=evil))

    assert store.metric_names("run") == [evil]
    assert store.series("run", [evil])[evil].values.tolist() == [1.0]
    assert (store.run("run").name, store.run("run").tags) == (evil.replace("\x00", "\\x00"), (evil,))
    assert store.events("run")[0].body == {evil: evil}
    assert store.commands("run") == [asked]
    assert store.submit(command("c2", key=evil)).command_id == "c'1"


def test_a_hundred_thousand_metrics_and_ten_megabytes_of_configuration_are_kept(emptied_postgres_url):
    """Slowly, but whole."""
    store = open_store(emptied_postgres_url)
    names = [f"layer/{k}/grad_norm" for k in range(100_000)]
    config = {"text": "é" * 5_000_000}
    writer = store.open_run(RunInfo("run", config=config))
    writer.write([StepRecord(k, dict.fromkeys(names, float(k))) for k in range(2)])
    writer.close()

    assert store.run("run").config == config
    assert store.series("run", names[-1:])[names[-1]].values.tolist() == [0.0, 1.0]
    assert len(store.last_values("run")) == 100_000


def test_a_clock_that_goes_wrong_hides_nothing(emptied_postgres_url):
    """Order is by number, not by time; a run of 1970 and one of tomorrow are listed."""
    store = open_store(emptied_postgres_url)
    for run_id, created in (("past", -1e9), ("future", 4e10)):
        store.open_run(RunInfo(run_id, created_at=created)).close()
    fill(
        store,
        [StepRecord(1, {"kl": 1.0}, ts=9e12), StepRecord(2, {"kl": 2.0}, ts=-5.0), StepRecord(3, {}, ts=math.nan)],
    )

    assert {run.run_id for run in store.runs()} == {"past", "future", "run"}
    assert [record.step for record in store.records("run")] == [1, 2, 3]


def test_series_out_of_chunks_are_those_of_the_rows(emptied_postgres_url):
    """Several metric sets, a restart that goes back, what is odd, forecasts, ranges, new rows only; then all is purged."""
    store = open_store(emptied_postgres_url)
    odd = [math.nan, math.inf, -math.inf, -0.0]
    for attempt, first in ((1, 0), (2, 1500)):
        writer = store.open_run(RunInfo("run"))
        for begin in range(first, first + 2400, 300):
            rows = []
            for step in range(begin, begin + 300):
                metrics = {"a": odd[step % 4] if step % 7 == 0 else step / 3, "b": float(step)}
                rows.append(StepRecord(step, metrics if step % 10 else {"c": 1.0, "a": 2.0}, attempt=attempt))
            writer.write([*rows, forecast(begin, 0.5, writer.last_seq + 1, attempt)])
        writer.close()
    with sql(emptied_postgres_url) as db:
        schema = read_address(emptied_postgres_url).schema
        assert db.execute(f"SELECT count(*), sum(n) FROM {schema}.chunk_axis").fetchone() == (4, 4096)

    records = store.records("run")
    for after, low, high in ((0, 0, 1 << 40), (1000, 0, 1 << 40), (0, 1400, 1600), (4500, 2000, 3000), (9999, 0, 9)):
        series = store.series("run", ["c", "a", "absent", "forecast/p50"], after_seq=after, steps=(low, high))
        for name in ("a", "c", "absent"):
            kept = [r for r in records if name in r.metrics and r.seq > after and low <= r.step <= high]
            assert series[name].seqs.tolist() == [r.seq for r in kept]
            assert series[name].steps.tolist() == [r.step for r in kept]
            assert series[name].attempts.tolist() == [r.attempt for r in kept]
            assert series[name].values.tobytes() == np.array([r.metrics[name] for r in kept], dtype=float).tobytes()
    assert len(store.series("run", ["forecast/p50"])["forecast/p50"].values) == 16

    store.edit(RunEdit("run", "ann", 1e12, deleted=True))
    store.purge("run", by="ann", now=2e12)
    with sql(emptied_postgres_url) as db:
        tables = "SELECT table_name FROM information_schema.columns WHERE table_schema = %s AND column_name = 'run_id'"
        for (table,) in db.execute(tables, (schema,)).fetchall():
            left = db.execute(f"SELECT count(*) FROM {schema}.{table}").fetchone()[0]
            assert (table, left) == (table, int(table == "purge"))


def test_the_shell_makes_the_tables_and_ships_what_is_left(postgres_url, tmp_path: Path):
    """Made once; roles are named after the schema; what is no such store, or no directory, is said."""
    run = CliRunner().invoke
    said = [run(app, ["db", "migrate", "--store", postgres_url]).output for _ in range(2)]
    assert ("made" in said[0], "nothing to do" in said[1]) == (True, True)
    assert len(open_store(postgres_url).runs()) == 0

    schema = read_address(postgres_url).schema
    assert (
        f"CREATE POLICY of_project ON {schema}.run" in run(app, ["db", "sql", "roles", "--store", postgres_url]).output
    )
    assert "0 items shipped" in run(app, ["sync", str(tmp_path)]).output
    wrong = run(app, ["db", "migrate", "--store", str(tmp_path / "runs")]), run(app, ["sync", str(tmp_path / "none")])
    assert [each.exit_code for each in wrong] == [2, 2]
