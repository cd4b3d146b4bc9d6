"""Reader, writer and operator may do what they are for, by the server's own rules, and see their projects only."""

from contextlib import closing
from dataclasses import replace

import pytest
from postgres_server import new_schema, sql

from rlwatch.errors import RunNotFoundError, StoreError
from rlwatch.records import Acknowledgement, CommandStatus, OutboxStatus, RunEdit, RunInfo, RunState, Silence
from rlwatch.store.postgres import migrations
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
