"""A team's store whose series lie in ClickHouse: nothing is lost, doubled or half there, whichever of the two fails."""

import math
import struct
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import numpy as np
import psycopg
import pytest
from clickhouse_server import ClickHouseServer, engine
from postgres_server import PostgresServer, new_schema, sql
from typer.testing import CliRunner

from rlwatch.cli.app import app
from rlwatch.errors import StoreError, StoreURLError
from rlwatch.records import CompletionBatch, Event, RunEdit, RunInfo, RunState, SpikeBatch, StepRecord
from rlwatch.store.clickhouse.address import read_place
from rlwatch.store.clickhouse.carrier import BULK
from rlwatch.store.postgres.address import read_address
from rlwatch.store.postgres.server import Server
from rlwatch.store.postgres.spool import sync
from rlwatch.store.url import open_store
from rlwatch.testing.store_contract import StoreContract
from rlwatch.testing.store_data_contract import ReadingContract
from rlwatch.testing.store_fields_contract import FieldsContract
from rlwatch.testing.store_run_contract import ForecastContract, fill, steps

ODD = [math.nan, math.inf, -math.inf, -0.0, 5e-324, struct.unpack("<d", b"\x01\0\0\0\0\0\xf8\x7f")[0]]
EVIL = "'; DROP TABLE x; --\x00\n\\\t{a:String} \udc80é"
TRAINER = """
import logging, rlwatch
url, steps = sys.argv[1], int(sys.argv[2])
run = rlwatch.init(store=url, run_id="run", project="p")
for step in range(steps):
    run.log({"kl": 0.01, "reward": float(step)}, step=step)
    if step % 50 == 0: print(step, flush=True)
    time.sleep(0.004)
run.finish()
print("dropped", run.counters["dropped"], "unkept", run.counters["unkept"])
"""


@pytest.fixture
def own_servers(postgres_server, clickhouse_server) -> tuple[PostgresServer, ClickHouseServer]:
    """Of the tests' own, whatever the contract is tested with."""
    return postgres_server, clickhouse_server


@pytest.fixture
def store_url(own_servers, tmp_path: Path, monkeypatch) -> str:
    monkeypatch.setenv("RLWATCH_LOCAL_DIR", str(tmp_path / "local"))
    postgres, clickhouse = own_servers
    return f"{postgres.url(new_schema())}&series={quote(clickhouse.url, safe='')}"


def reached(trainer, step: int) -> None:
    for line in trainer.stdout:
        if int(line) >= step:
            return
    raise AssertionError(trainer.communicate()[1])


def shipped(local: Path) -> None:
    left = sync(local, lambda url: Server(read_address(url), patience_s=30.0, lock_wait_s=1.0, hurried=False))[1]
    assert left == {}


def written(url: str) -> list[int]:
    return [record.step for record in open_store(url).records("run")]


class _Carried:
    @pytest.fixture
    def store(self, emptied_carried_url: str):
        store = open_store(emptied_carried_url)
        yield store
        store.close()


class TestCarriedStore(_Carried, ReadingContract, ForecastContract):
    """Those parts of the contract in which another engine answers."""

    test_fields_of_a_newer_rlwatch = FieldsContract.test_what_a_run_holds_keeps_fields_of_a_newer_rlwatch


@pytest.mark.thorough
class TestCarriedStoreWhole(_Carried, StoreContract):
    """All of it: minutes, as every write makes parts of three tables there."""


def test_numbers_keep_their_bits_and_names_are_anything(emptied_carried_url):
    """In records, series and last values; three sets of metrics, a step that comes again, tokens and completions."""
    store = open_store(emptied_carried_url)
    rows = [StepRecord(k, {"b": value, EVIL: float(k)}, ts=value) for k, value in enumerate(ODD)]
    rows += [StepRecord(3, {"a": 1.0}, rank=7), StepRecord(4, {}), StepRecord(-(1 << 63), {"b": 2.0})]
    spikes = SpikeBatch(1, {"logp": np.array(ODD), "text": ["é\x00"] * 6}, reason=EVIL)
    fill(store, [*rows, spikes, CompletionBatch(2, {"text": ["a\x00b"], "reward": np.array([math.nan])})])

    found = store.records("run")
    assert [struct.pack("<d", record.metrics["b"]) for record in found[:6]] == [struct.pack("<d", v) for v in ODD]
    assert [list(record.metrics) for record in found[:7:6]] == [["b", EVIL], ["a"]]
    assert (found[6].rank, found[7].metrics, found[8].step) == (7, {}, -(1 << 63))
    series = store.series("run", ["b", EVIL, "absent"])
    assert series["b"].values.tobytes() == np.array([*ODD, 2.0]).tobytes()
    assert series[EVIL].values.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert len(series["absent"].values) == 0
    assert store.moments("run").values[:6].tobytes() == np.array(ODD).tobytes()
    assert store.last_values("run") == {"b": (-(1 << 63), 2.0), EVIL: (5, 5.0), "a": (3, 1.0)}
    assert store.spikes("run")[0].columns["logp"].tobytes() == np.array(ODD).tobytes()
    assert [top["text"] for top in store.top_spikes("run", limit=2)] == ["é\x00"] * 2
    assert store.completions("run")[0].columns["text"] == ["a\x00b"]


def test_what_is_not_in_both_counts_in_none(emptied_carried_url, clickhouse_place: str):
    """The transaction fails after ClickHouse has the rows: they stay out of sight, when others take their numbers too."""
    store = open_store(emptied_carried_url)
    writer = store.open_run(RunInfo("run"))
    tokens = SpikeBatch(1, {"logp": np.zeros(2)})
    writer.write([*steps(1, 2), tokens])
    with sql(emptied_carried_url) as db:
        schema = read_address(emptied_carried_url).schema
        db.execute(f"ALTER TABLE {schema}.event ADD CONSTRAINT none CHECK (kind <> 'note')")
        with pytest.raises(StoreError, match="none"):
            writer.write([*steps(30, 40), Event("note"), tokens, StepRecord(50, {"other": 1.0})])
        db.execute(f"ALTER TABLE {schema}.event DROP CONSTRAINT none")
    sent = engine(clickhouse_place).read(f"SELECT max(step) FROM {schema}_record").numbers(struct.Struct("<q"))
    assert sent == (50,)  # they are there
    assert [record.step for record in store.records("run")] == [1, 2]
    assert store.last_values("run") == {"kl": (2, store.records("run")[1].metrics["kl"])}
    assert (len(store.spikes("run")), len(store.top_spikes("run"))) == (1, 2)

    writer.write([Event("note"), *steps(3)])
    writer.close()
    assert [(item.seq, getattr(item, "step", None)) for item in store.stream("run", after_seq=0, limit=9)] == [
        (1, 1),
        (2, 2),
        (3, None),
        (4, 3),
    ]
    assert store.spans("run") == {1: (1, 3)}
    assert store.series("run", ["kl"])["kl"].seqs.tolist() == [1, 2, 4]


def test_a_resume_continues_what_lies_below_its_start(emptied_carried_url):
    """Attempt by attempt, by rows that lie in ClickHouse and events that do not."""
    store = open_store(emptied_carried_url)
    fill(store, [*steps(1, 2), Event("kept", 2), *steps(3, 4), Event("cut", 4)])
    fill(store, [*steps(3, 5, attempt=2)])

    branch = store.branch("run", 3, 5)
    assert [(item.attempt, item.step) for item in branch] == [(1, 1), (1, 2), (1, 2), (2, 3)]
    assert dict(store.branch_bounds("run", 3, 5)) == {2: 5, 1: 3}
    assert store.steps("run") == {1: [1, 2, 3, 4], 2: [3, 5]}


def test_rows_that_are_sent_twice_are_there_once(own_servers, store_url):
    """As a client that was cut off sends them again: the server has two of each, and shows one."""
    store, mark = open_store(store_url), own_servers[1].directory / "twice"
    store.server.migrate()
    schema, past = read_address(store_url).schema, engine(own_servers[1].url)
    past.do(f"SYSTEM STOP MERGES {schema}_record")
    mark.touch()
    fill(store, [*steps(1, 2, 3), SpikeBatch(1, {"logp": np.zeros(2)}), CompletionBatch(1, {"text": ["a"]})])
    mark.unlink()

    assert past.read(f"SELECT count() FROM {schema}_record").numbers(struct.Struct("<Q")) == (6,)
    assert [record.step for record in store.records("run")] == [1, 2, 3]
    assert len(store.series("run", ["kl"])["kl"].values) == 3
    assert (len(store.spikes("run")), len(store.completions("run")), len(store.top_spikes("run"))) == (1, 1, 2)


def test_what_is_purged_is_gone_from_both(emptied_carried_url, clickhouse_place: str):
    """A run of the same id has nothing of the old one."""
    store = open_store(emptied_carried_url)
    batches = [SpikeBatch(1, {"logp": np.zeros(2)}), CompletionBatch(1, {"text": ["a"]})]
    fill(store, [*steps(1, 2), *batches])
    store.edit(RunEdit("run", "ann", 1e12, deleted=True))
    store.purge("run", by="ann", now=2e12)

    schema = read_address(emptied_carried_url).schema
    for table in BULK:
        left = engine(clickhouse_place).read(f"SELECT count() FROM {schema}_{table} WHERE run_id = 'run'")
        assert left.numbers(struct.Struct("<Q")) == (0,), table
    fill(store, steps(7))
    assert [record.step for record in store.records("run")] == [7]
    assert {"ClickHouse " + schema + "_point"} <= store.usage().keys()


def test_a_password_is_told_by_nobody(emptied_carried_url, own_servers, store_url, monkeypatch):
    """In the store's address, in errors, in notes on the node's disk; it comes from the environment, too."""
    plain = store_url.partition("&series=")[0]
    clickhouse = own_servers[1].url.replace("//", "//locked:s3cret@")
    store = open_store(f"{plain}&series={quote(clickhouse, safe='')}")
    fill(store, steps(1))
    assert "s3cret" not in store.url + repr(store.server.address)
    assert "series=clickhouse://locked@" in store.url

    for url in (f"{plain}&series={quote(clickhouse.replace('s3cret', 'wr0ng'), safe='')}", store.url):
        with pytest.raises(StoreError, match="set CLICKHOUSE_PASSWORD") as failure:
            open_store(url).records("run")
        assert "wr0ng" not in str(failure.value)
    monkeypatch.setenv("CLICKHOUSE_PASSWORD", "s3cret")
    assert len(open_store(store.url).records("run")) == 1


def test_series_are_looked_for_where_they_are_only(emptied_carried_url, emptied_postgres_url, clickhouse_place: str):
    """A URL without ClickHouse, and one with it for runs that are in PostgreSQL, are told what to do."""
    fill(open_store(emptied_carried_url), steps(1))
    with pytest.raises(StoreError, match="add series=clickhouse://"):
        open_store(emptied_carried_url.partition("&series=")[0]).runs()
    fill(open_store(emptied_postgres_url), steps(1))
    with pytest.raises(StoreError, match="leave series= out"):
        open_store(f"{emptied_postgres_url}&series={quote(clickhouse_place, safe='')}").runs()


@pytest.mark.parametrize(
    "wrong", ["http://host", "clickhouse:///db", "clickhouse://h?keep_rows=1y", "clickhouse://h?secure=maybe", "x"]
)
def test_an_address_that_is_none_is_refused(wrong: str):
    """By what one looks like."""
    with pytest.raises(StoreURLError):
        read_address(f"postgresql://h/d?series={quote(wrong, safe='')}")


def test_an_address_has_defaults_and_passes_settings_on():
    """Ports by TLS; what is not ours is the server's."""
    place = read_place("clickhouse://ann:pw@host/fleet?secure=true&insert_quorum=2&keep_tokens=90d")

    assert (place.client["port"], place.client["interface"], place.client["database"]) == (8443, "https", "fleet")
    assert place.settings == {"async_insert": "1", "wait_for_async_insert": "1", "insert_quorum": "2"}
    assert place.keep_days == {"spike": 90}
    assert place.url == "clickhouse://ann@host:8443/fleet?secure=true&insert_quorum=2&keep_tokens=90d"
    assert "pw" not in repr(place)


def test_what_is_kept_for_how_long_is_the_servers_to_do(own_servers, store_url):
    """``rlwatch db migrate`` says it anew, or takes it back."""
    clickhouse = own_servers[1]
    plain = store_url.partition("&series=")[0]
    schema = read_address(plain).schema

    def lives(options: str) -> dict[str, bool]:
        url = f"{plain}&series={quote(clickhouse.url + options, safe='')}"
        assert CliRunner().invoke(app, ["db", "migrate", "--store", url]).exit_code == 0
        told = engine(clickhouse.url).read("SELECT name, engine_full FROM system.tables ORDER BY name")
        found = {}
        while told:
            name, said = told.text(), told.text()
            found[name] = "TTL at + toIntervalDay(90)" in said
        return {table: found[f"{schema}_{table}"] for table in BULK}

    assert lives("?keep_tokens=90d") == {table: table == "spike" for table in BULK}
    assert lives("?keep_tokens=90d&keep_rows=90d")["point"]
    assert not any(lives("").values())


def test_clickhouse_that_is_killed_while_rows_come_in_costs_none(own_servers, store_url, child, tmp_path):
    """It dies with requests under way, once before the run began: training goes on, and each row is there once."""
    open_store(store_url).server.migrate()
    own_servers[1].stop()
    trainer = child(TRAINER, store_url, 300)
    try:
        reached(trainer, 50)
        own_servers[1].start()
        reached(trainer, 150)
        own_servers[1].stop()
        reached(trainer, 200)
    finally:
        own_servers[1].stop()
        own_servers[1].start()
    out, err = trainer.communicate(timeout=120)
    assert trainer.returncode == 0, err
    assert "dropped 0 unkept 0" in out
    assert err.count("cannot be reached") <= 2

    shipped(tmp_path / "local")
    store = open_store(store_url)
    assert written(store_url) == list(range(300))
    assert store.series("run", ["reward"])["reward"].values.tolist() == list(map(float, range(300)))
    assert store.run("run").state is RunState.FINISHED


def test_postgresql_that_is_away_leaves_nothing_behind_in_clickhouse(own_servers, store_url):
    """A writer whose connection was cut begins anew under another epoch; what it sent before counts once."""
    store = open_store(store_url)
    writer = store.open_run(RunInfo("run"))
    writer.write(steps(1, 2))
    with sql(store_url) as db:
        db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'rlwatch'")
    again = [replace(step, seq=0) for step in steps(3, 4)]
    with pytest.raises(StoreError, match="cannot be reached"):
        writer.write(again)
    writer.write(again)
    writer.close()

    assert [(record.seq, record.step) for record in store.records("run")] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    with psycopg.connect(store_url.partition("&schema=")[0]) as db:
        schema = read_address(store_url).schema
        counted = db.execute(f"SELECT first_seq, last_seq FROM {schema}.series_epoch ORDER BY epoch").fetchall()
    assert counted == [(1, 2), (3, 4)]
