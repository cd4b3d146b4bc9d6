"""Reader, writer and operator may do what they are for, by the server's own rules, and see their projects only."""

import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from postgres_server import new_schema, sql

from rlwatch.errors import RunLockedError, RunNotFoundError, StoreError
from rlwatch.records import Acknowledgement, CommandStatus, OutboxStatus, RunEdit, RunInfo, RunState, Silence
from rlwatch.store.postgres import migrations, ownership
from rlwatch.store.postgres.address import read_address
from rlwatch.store.url import open_store
from rlwatch.testing.store_run_contract import alert, command, forecast, message, steps


@pytest.fixture(scope="module")
def team(postgres_server):
    """Role -> URL: of an owner, and of a reader, a writer and an operator of project ``math``."""
    schema = new_schema()
    owner = postgres_server.url(schema)
    open_store(owner).put_silence(Silence("s", "ann", "", 0.0, 0.0))
    urls = {"owner": owner}
    with sql(owner) as db:
        for _ in range(2):  # as often as one likes
            db.execute(migrations.script("roles", schema))
        for role in ("reader", "writer", "operator"):
            name = f"{schema}_{role}_1"
            db.execute(f"CREATE ROLE {name} LOGIN IN ROLE {schema}_{role}")
            db.execute(f"INSERT INTO {schema}.member VALUES ('{name}', 'math')")
            urls[role] = postgres_server.url(schema, user=name)
    return urls


@pytest.fixture
def stores(team, tmp_path, monkeypatch):
    monkeypatch.setenv("RLWATCH_LOCAL_DIR", str(tmp_path))
    return {role: open_store(url) for role, url in team.items()}


def test_a_writer_records_and_answers_and_cannot_command(stores):
    """All that a trainer does: rows, findings, alerts, claims, answers, its end."""
    writer, operator = stores["writer"], stores["operator"]
    with closing(writer.open_run(RunInfo("one", project="math"))) as run:
        run.write([*steps(1, 2), forecast(2, 0.5, 2)])
        operator.submit(command("c1", "one"))
        assert [each.command_id for each in writer.claim("one", 1.0)] == ["c1"]
        writer.settle("one", "c1", CommandStatus.DONE, 3.0, step=2, result="done")
        writer.publish("one", [alert("a1", "one")], lambda _: [message("m1", "one")])
        [leased] = [one for one in writer.lease_messages(1.0, lease_s=5.0) if one.run_id == "one"]
        writer.settle_message(replace(leased, status=OutboxStatus.SENT))
        run.finish(RunState.FINISHED, "", 9.0)

    for ask in (
        lambda: writer.submit(command("c2", "one")),
        lambda: writer.put_silence(Silence("quiet", "w", "", 0.0, 1.0)),
        lambda: writer.acknowledge(Acknowledgement("a1", "one", "w")),
        lambda: writer.edit(RunEdit("one", "w", 1.0, deleted=True)),
    ):
        with pytest.raises(StoreError, match=r"permission denied.*use a role that may"):
            ask()


def test_a_reader_reads_and_changes_nothing(stores):
    """Not a row, not a word."""
    with closing(stores["writer"].open_run(RunInfo("two", project="math"))) as run:
        run.write(steps(1))
    reader = stores["reader"]

    assert (len(reader.records("two")), reader.alerts("two"), reader.amend_run("two")) == (1, [], None)
    for ask in (
        lambda: reader.open_run(RunInfo("two", project="math")),
        lambda: reader.open_run(RunInfo("new", project="math")),
        lambda: reader.submit(command("c1", "two")),
        lambda: reader.publish("two", [], lambda _: []),
        lambda: reader.edit(RunEdit("two", "r", 1.0, name="x")),
        lambda: reader.put_silence(Silence("quiet", "r", "", 0.0, 1.0)),
    ):
        with pytest.raises(StoreError, match="permission denied"):
            ask()
    assert stores["owner"].run("two").attempt == 1


def test_an_operator_commands_and_cannot_touch_what_was_measured(stores):
    """Commands, acknowledgements, silences, edits; no rows, no purge."""
    with closing(stores["writer"].open_run(RunInfo("three", project="math"))) as run:
        run.write(steps(1))
    operator = stores["operator"]
    operator.submit(command("c1", "three"))
    operator.cancel("three", "c1", 1.0, result="")
    operator.put_alerts([alert("a1", "three")], [message("m1", "three")])
    operator.acknowledge(Acknowledgement("a1", "three", "ann"))
    operator.put_silence(Silence("quiet", "ann", "", 0.0, 1.0))
    operator.edit(RunEdit("three", "ann", 1e10, name="best", deleted=True))
    [leased] = [one for one in operator.lease_messages(1.0, lease_s=5.0) if one.run_id == "three"]
    operator.retry_message(leased)

    for ask in (
        lambda: operator.open_run(RunInfo("three", project="math")),
        lambda: operator.purge("three", by="ann", now=2e10),
    ):
        with pytest.raises(StoreError, match="permission denied"):
            ask()
    assert len(operator.records("three")) == 1
    stores["owner"].purge("three", by="owner", now=2e10)


def test_nobody_sees_or_writes_another_project(stores):
    """It is not there; the owner of the tables sees all."""
    with closing(stores["owner"].open_run(RunInfo("secret", project="code"))) as run:
        run.write(steps(1))
    stores["owner"].put_alerts([alert("a9", "secret")], [message("m9", "secret")])

    for role in ("reader", "writer", "operator"):
        store = stores[role]
        assert "secret" not in {run.run_id for run in store.runs()}
        assert not [one for one in (*store.alerts(), *store.outbox()) if one.run_id == "secret"]
        with pytest.raises(RunNotFoundError):
            store.records("secret")
        if role != "reader":
            assert "secret" not in {leased.run_id for leased in store.lease_messages(1.0, lease_s=1.0)}
    with pytest.raises(RunNotFoundError):
        stores["operator"].submit(command("c1", "secret"))
    for run in (RunInfo("secret", project="code"), RunInfo("mine", project="code")):
        with pytest.raises(StoreError, match="row-level security"):
            stores["writer"].open_run(run)
    assert stores["owner"].run("secret").attempt == 1


# Locks. Anybody with a login may take an advisory lock by its number, which is no secret.


@pytest.fixture(scope="module")
def logins(team, postgres_server):
    """The logins that may write no run of ``math``: without a role, reader, operator, writer of another project."""
    owner, schema = team["owner"], read_address(team["owner"]).schema
    with sql(owner) as db:
        db.execute(f"CREATE ROLE {schema}_nobody LOGIN")
        db.execute(f"CREATE ROLE {schema}_other LOGIN IN ROLE {schema}_writer")
        db.execute(f"INSERT INTO {schema}.member VALUES ('{schema}_other', 'code')")
    names = (f"{schema}_nobody", f"{schema}_reader_1", f"{schema}_operator_1", f"{schema}_other")
    return [postgres_server.url(schema, user=name) for name in names]


@contextmanager
def taken(urls: Iterable[str], *keys: int) -> Iterator[None]:
    """All the locks of these numbers, each by one of the logins, and waited for by the others."""
    with ExitStack() as held:
        for at, url in enumerate(urls):
            db = held.enter_context(sql(url))
            for number, key in enumerate(keys):
                if number % len(list(urls)) == at:
                    assert db.execute("SELECT pg_try_advisory_lock(%s)", (key,)).fetchone() == (True,)
        yield


@pytest.mark.parametrize("at", range(4), ids=["no role", "reader", "operator", "writer of another project"])
def test_who_may_not_write_a_run_keeps_no_trainer_from_it(stores, team, logins, at):
    """Not a new run nor a known one, by none of the numbers; and a second trainer is refused as ever."""
    address, name = read_address(team["owner"]), f"locked-{at}"
    numbers = [address.key("run", name), address.key("amends", name), address.key("exclusive"), address.key()]
    with taken(logins[at : at + 1], *numbers):
        run = stores["writer"].open_run(RunInfo(name, project="math"))
        run.write(steps(1))
        with pytest.raises(RunLockedError, match="already being written by process"):
            stores["owner"].open_run(RunInfo(name, project="math"))
        run.close()
        with closing(stores["writer"].open_run(RunInfo(name, project="math"))) as again:
            assert again.run.attempt == 2
        stores["owner"].amend_run(name).close()
        if at < 2:  # the others deliver messages, and take turns at it
            with stores["owner"].exclusive():
                pass
    assert len(stores["owner"].records(name)) == 1


def test_a_stand_in_is_seen_by_who_gets_the_number(stores, team, logins):
    """The stranger lets go while a trainer has a stand-in: the next trainer is refused, and cut ones go on."""
    key = read_address(team["owner"]).key("run", "cut")
    with taken(logins[:1], key):
        run = stores["writer"].open_run(RunInfo("cut", project="math"))
    with pytest.raises(RunLockedError, match="already being written"):
        stores["owner"].open_run(RunInfo("cut", project="math"))
    with sql(team["owner"]) as db:
        room = read_address(team["owner"]).key("run", "cut") >> 32 & 0xFFFFFFFF
        db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE classid::bigint = %s AND objsubid = 2", (room,)
        )
    with taken(logins[1:2], key):
        for _ in range(100):
            try:
                run.write(steps(1))
                break
            except StoreError:
                time.sleep(0.05)
    run.close()
    assert len(stores["owner"].records("cut")) == 1


def test_a_refusal_names_who_holds_the_run_and_no_dead_process(stores, team):
    """The process of the run's row has ended; somebody else ships, judges or purges."""
    stores["writer"].open_run(RunInfo("left", project="math")).close()
    with sql(team["owner"]) as db:
        schema = read_address(team["owner"]).schema
        gone = f"{socket.gethostname()}/999999999/1"
        db.execute(f"UPDATE {schema}.run SET writer = %s, pid = 999999999 WHERE run_id = 'left'", (f"{gone}#ab",))
        db.execute("SELECT pg_advisory_lock(%s)", (read_address(team["owner"]).key("run", "left"),))
        held = db.execute("SELECT pg_backend_pid(), current_user").fetchone()
        address = read_address(team["writer"])
        with stores["writer"].server.connection() as other, pytest.raises(RunLockedError) as refused:
            ownership.lock_patiently(other, address, "left", let_go_s=0.05)

    assert f"is held by a connection of login '{held[1]}' (process {held[0]} of the server)" in str(refused.value)
    assert "not by process 999999999" in str(refused.value)
    assert "already being written" not in str(refused.value)


def granted(url: str) -> str:
    """Tables that each role may change, of the server's own catalogue, as a table of Markdown."""
    schema = read_address(url).schema
    rows = ["| role | INSERT | UPDATE | DELETE |", "|---|---|---|---|"]
    with sql(url) as db:
        whole = db.execute(
            "SELECT grantee, privilege_type, table_name FROM information_schema.role_table_grants WHERE table_schema = %s",
            (schema,),
        ).fetchall()
        parts = db.execute(
            "SELECT grantee, privilege_type, table_name, string_agg(column_name, ', ' ORDER BY column_name) "
            "FROM information_schema.role_column_grants WHERE table_schema = %s GROUP BY 1, 2, 3",
            (schema,),
        ).fetchall()
        tables = db.execute(
            "SELECT count(*) FROM information_schema.tables WHERE table_schema = %s", (schema,)
        ).fetchone()
    for role in ("reader", "writer", "operator"):
        mine = [one[1:] for one in whole if one[0] == f"{schema}_{role}"]
        assert sum(kind == "SELECT" for kind, _ in mine) == tables[0], "each role reads every table, row by row"
        assert {kind for kind, _ in mine} <= {"SELECT", "INSERT", "UPDATE", "DELETE"}
        cells = []
        for kind in ("INSERT", "UPDATE", "DELETE"):
            full = [table for which, table in mine if which == kind]
            some = [
                f"`{table}` ({columns})"
                for grantee, which, table, columns in parts
                if grantee == f"{schema}_{role}" and which == kind and table not in full
            ]
            cells.append(", ".join(sorted([*(f"`{table}`" for table in full), *some])) or "none")
        rows.append(f"| `rlwatch_{role}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def test_the_grants_on_the_page_are_those_of_the_server(team):
    """``docs/team-store.md`` between its marks; whoever changes roles.sql copies the new table there."""
    page = (Path(__file__).parents[2] / "docs" / "team-store.md").read_text(encoding="utf-8")

    assert granted(team["owner"]) == page.partition("<!-- grants -->\n")[2].partition("\n<!-- /grants -->")[0]
