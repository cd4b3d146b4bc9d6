"""The server dies, stops, cuts connections; trainers die: nothing is lost, doubled, or raised into training."""

import select
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from postgres_server import PostgresServer, new_schema, sql

from rlwatch.errors import StoreError, UnstorableError
from rlwatch.ports import Progress
from rlwatch.records import Event, Finding, RunInfo, RunState, Severity, SpikeBatch, StepRecord
from rlwatch.store.postgres.address import read_address
from rlwatch.store.postgres.server import Server
from rlwatch.store.postgres.spool import sync
from rlwatch.store.url import open_store
from rlwatch.testing.store_run_contract import fill, forecast, steps

TRAINER = """
import logging, random, rlwatch
logging.disable(logging.CRITICAL)
url, steps = sys.argv[1], int(sys.argv[2])
run = rlwatch.init(store=url, run_id="run", project="p")
worst = 0.0
for step in range(steps):
    before = time.perf_counter()
    run.log({"kl": 0.01, "reward": float(step), **{f"m{k}": random.random() for k in range(300)}}, step=step)
    worst = max(worst, time.perf_counter() - before)
    if step % 50 == 0: print(step, flush=True)
    time.sleep(0.004)
run.finish()
print("worst", worst, "dropped", run.counters["dropped"], "unkept", run.counters["unkept"])
"""


@pytest.fixture(scope="module")
def own_server():
    server = PostgresServer()
    server.start()
    yield server
    server.remove()


@pytest.fixture
def store_url(own_server, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("RLWATCH_LOCAL_DIR", str(tmp_path / "local"))
    return own_server.url(new_schema())


def reached(trainer, step: int) -> None:
    """The trainer is there."""
    for line in trainer.stdout:
        if int(line) >= step:
            return
    raise AssertionError(trainer.communicate()[1])


def shipped(local: Path) -> None:
    """What is left on the node goes to the server."""
    left = sync(local, lambda url: Server(read_address(url), patience_s=30.0, lock_wait_s=1.0, hurried=False))[1]
    assert left == {}


def written(url: str) -> list[int]:
    return [record.step for record in open_store(url).records("run")]


def test_a_server_that_is_killed_again_and_again_costs_no_row(own_server, store_url, child, tmp_path):
    """While rows are copied in, ``-m immediate``: each row once, in order, and the trainer ends as ever."""
    trainer = child(TRAINER, store_url, 700)
    reached(trainer, 50)
    for _ in range(2):
        time.sleep(0.37)
        own_server.stop(signal.SIGQUIT)
        own_server.start()
        time.sleep(0.6)
    out, err = trainer.communicate(timeout=120)
    assert trainer.returncode == 0, err
    assert "dropped 0 unkept 0" in out

    shipped(tmp_path / "local")
    assert written(store_url) == list(range(700))
    assert open_store(store_url).run("run").state is RunState.FINISHED
    assert list((tmp_path / "local").glob("*/*")) == []


@pytest.mark.thorough
def test_a_server_that_stands_still_is_waited_for_by_nobody_who_trains(own_server, store_url, child, tmp_path):
    """Connections stay open and nothing answers; then it goes on."""
    trainer = child(TRAINER, store_url, 600)
    reached(trainer, 50)
    own_server.pause()
    try:
        reached(trainer, 550)  # the loop goes on
    finally:
        own_server.go_on()
    _, err = trainer.communicate(timeout=120)
    assert trainer.returncode == 0, err

    shipped(tmp_path / "local")
    assert written(store_url) == list(range(600))


@pytest.mark.thorough
def test_connections_that_are_cut_are_made_again(own_server, store_url, child, tmp_path):
    """By an administrator, a firewall, a fail-over: the writer's with its lock, too."""
    trainer = child(TRAINER, store_url, 900)
    reached(trainer, 50)
    with sql(store_url) as db:
        for _ in range(4):
            time.sleep(0.3)
            db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'rlwatch'")
    _, err = trainer.communicate(timeout=120)
    assert trainer.returncode == 0, err

    shipped(tmp_path / "local")
    assert written(store_url) == list(range(900))


def test_what_a_killed_trainer_left_while_the_server_was_away_is_shipped_once(own_server, store_url, child, tmp_path):
    """Both die; ``rlwatch sync``, as often as one likes, or the next attempt brings the rows."""
    trainer = child(TRAINER, store_url, 100_000)
    reached(trainer, 50)
    own_server.stop(signal.SIGQUIT)
    reached(trainer, 250)
    trainer.kill()
    trainer.wait()
    own_server.start()
    assert len(written(store_url)) < 250

    shipped(tmp_path / "local")
    shipped(tmp_path / "local")
    rows = written(store_url)
    assert rows == list(range(len(rows)))
    assert len(rows) > 250
    assert open_store(store_url).run("run").state is RunState.RUNNING


@pytest.mark.thorough
def test_the_next_attempt_brings_what_the_last_one_left(own_server, store_url, child, run_child, tmp_path):
    """On the same node, before its own first row, under the attempt that logged it."""
    trainer = child(TRAINER, store_url, 100_000)
    reached(trainer, 50)
    own_server.pause()
    try:
        reached(trainer, 200)
        trainer.kill()
        trainer.wait()
    finally:
        own_server.go_on()
    run_child(TRAINER, store_url, 10)

    records = open_store(store_url).records("run")
    first = [record.step for record in records if record.attempt == 1]
    assert first == list(range(len(first)))
    assert len(first) > 200
    assert [record.step for record in records if record.attempt == 2] == list(range(10))
    assert [record.seq for record in records] == sorted(record.seq for record in records)


def test_a_writer_that_was_replaced_may_not_go_on(own_server, store_url):
    """Its connection was cut, and another attempt began before it came back."""
    first = open_store(store_url).open_run(RunInfo("run"))
    with sql(store_url) as db:
        db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'rlwatch'")
    second = open_store(store_url).open_run(RunInfo("run"))

    for refusal in ("cannot be reached", "was cut"):
        with pytest.raises(StoreError, match=refusal):
            first.write([])
    second.write([])
    second.close()
    for _ in range(2):
        with pytest.raises(StoreError, match="by another process"):
            first.write([])
    first.close()


def test_a_run_begins_while_the_server_is_away(own_server, store_url, child, tmp_path):
    """Training does not wait for a database; the server hears of it later, or of a killed one by ``rlwatch sync``."""
    own_server.stop(signal.SIGQUIT)
    try:
        first, killed = child(TRAINER, store_url, 400), child(TRAINER.replace('"run"', '"other"'), store_url, 100_000)
        for trainer in (first, killed):
            reached(trainer, 50)
        killed.kill()
        killed.wait()
    finally:
        own_server.start()
    _, err = first.communicate(timeout=120)
    assert first.returncode == 0, err

    shipped(tmp_path / "local")
    assert written(store_url) == list(range(400))
    assert open_store(store_url).run("run").state is RunState.FINISHED
    other = [record.step for record in open_store(store_url).records("other")]
    assert other == list(range(len(other)))
    assert len(other) > 50


def test_a_resume_that_begins_while_the_server_is_away_is_the_next_attempt(own_server, store_url):
    """Numbers and attempts are those of the run, whatever its trainer was told meanwhile."""
    fill(open_store(store_url), steps(1, 2))
    own_server.stop(signal.SIGQUIT)
    try:
        writer = open_store(store_url, control_timeout_s=0.0).open_run(RunInfo("run"))
        with pytest.raises(StoreError, match="cannot be reached"):
            writer.write(steps(3))
    finally:
        own_server.start()
    bad = StepRecord(4, {"kl": "high"}, seq=2)
    time.sleep(1.0)  # the pause after a refusal
    with pytest.raises(UnstorableError) as failure:
        writer.write([*steps(3), bad])
    assert failure.value.item is bad
    writer.write(
        [replace(steps(3)[0], seq=1), Finding("d", "kl_drift", Severity.INFO, 3, 3, "m", seq=1)], Progress((), 1)
    )
    writer.close()

    store = open_store(store_url)
    assert [(r.seq, r.attempt, r.step) for r in store.records("run")] == [(1, 1, 1), (2, 1, 2), (3, 2, 3)]
    assert ([f.seq for f in store.findings("run")], store.judged("run")) == ([3], (3, 3))


class Cut(threading.Thread):
    """Between a client and the server; ``armed``, it lets a commit through and cuts the line before the answer."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.armed, self._server_port = False, port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.start()

    def run(self) -> None:
        while True:
            client, _ = self._listening.accept()
            server = socket.create_connection(("127.0.0.1", self._server_port))
            threading.Thread(target=self._carry, args=(client, server), daemon=True).start()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        while True:
            for side in select.select([client, server], [], [])[0]:
                data = side.recv(1 << 16)
                (server if side is client else client).sendall(data)
                if not data or (self.armed and side is client and b"COMMIT" in data):
                    self.armed = False
                    if data:
                        server.recv(1 << 16)  # the commit is done
                    client.close()
                    server.close()
                    return


def again_until_written(writer, items, progress, deadline_s=30.0):
    """Give items again, as a recorder does: the server may not have noticed yet that the last connection was cut."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            return writer.write(items, progress)
        except StoreError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def test_a_commit_whose_answer_was_cut_off_is_neither_lost_nor_repeated(own_server, store_url):
    """The same items are given again with later ones, as a recorder does: each is there once, whatever its kind."""
    line = Cut(own_server.port)
    finding = Finding("d", "kl_drift", Severity.INFO, 1, 1, "m", seq=1)
    batch = [*steps(1, 2), Event("note"), finding, SpikeBatch(1, {"logp": np.zeros(3)}), forecast(1, 0.5, 1)]
    writer = open_store(store_url.replace(str(own_server.port), str(line.port))).open_run(RunInfo("run"))
    writer.journal.append_record(0, 0.0, {"kl": 0.0})
    line.armed = True
    with pytest.raises(StoreError, match="cannot be reached"):
        writer.write(batch, Progress(journaled=(1,)))
    store = open_store(store_url)
    assert len(store.records("run")) == 2  # it was done

    again_until_written(writer, [*batch, *steps(3)], Progress(journaled=(1,)))
    writer.close()

    assert [(record.seq, record.step) for record in store.records("run")] == [(1, 1), (2, 2), (4, 3)]
    assert [len(kept) for kept in (store.events("run"), store.findings("run"), store.forecasts("run"))] == [1, 1, 1]
    assert [len(batch) for batch in store.spikes("run")] == [3]
    assert len(store.top_spikes("run")) == 3
