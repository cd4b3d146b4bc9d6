"""What others write is heard of at once; who cannot listen goes on polling."""

import threading
import time
from contextlib import closing

import psycopg
from postgres_server import sql

from rlwatch.clock import SystemClock
from rlwatch.control.mailbox import Mailbox
from rlwatch.records import Acknowledgement, Finding, RunInfo, RunState, Severity, Silence
from rlwatch.store.postgres.news import PostgresNews
from rlwatch.store.url import open_store
from rlwatch.testing.store_run_contract import alert, command, fill, message, steps


def test_commands_and_alerts_are_heard_of_by_who_asked(emptied_postgres_url):
    """Of one topic, of one run or of all; each once it is committed, not before and not what is long past."""
    store, other = open_store(emptied_postgres_url), open_store(emptied_postgres_url)
    for run_id in ("one", "two"):
        fill(store, steps(1), run_id)
    store.submit(command("old", "one"))
    with closing(other.news("commands", "one")) as mine, closing(other.news("alerts")) as alerts:
        assert (mine.arrived(), alerts.arrived()) == (False, False)
        store.submit(command("c1", "two"))
        store.put_alerts([alert("a1", "two")], [])
        assert (mine.arrived(0.2), alerts.arrived(5.0)) == (False, True)
        store.submit(command("c1", "one"))
        assert mine.arrived(5.0)
        for write in (
            lambda: store.publish("one", [alert("a2", "one")], lambda _: [message("m1", "one")]),
            lambda: store.acknowledge(Acknowledgement("a2", "one", "ann")),
            lambda: fill(store, [Finding("d", "kl_drift", Severity.INFO, 1, 1, "m", seq=1)], "one"),
        ):
            write()
            assert alerts.arrived(5.0)
        fill(store, steps(2), "one")
        assert (mine.arrived(0.1), alerts.arrived(0.1)) == (False, False)


def test_who_waits_is_woken(emptied_postgres_url):
    """Before its time is over."""
    store = open_store(emptied_postgres_url)
    fill(store, run_id="run")
    with closing(store.news("commands", "run")) as news:
        assert not news.arrived()
        threading.Timer(0.3, lambda: store.submit(command())).start()
        assert news.arrived(60.0)


def test_a_mailbox_claims_what_it_is_told_of_and_polls_all_the_same(emptied_postgres_url):
    """At its next tick; a connection that was cut makes it deaf for a while, not blind."""
    store = open_store(emptied_postgres_url)
    fill(store, run_id="run")
    mailbox = Mailbox(store, "run", SystemClock(), news=store.news("commands", "run"))
    mailbox.listen()
    mailbox.tick()
    store.submit(command("c1"))
    end = time.monotonic() + 4.0
    while not mailbox.waiting() and time.monotonic() < end:
        mailbox.tick()
    assert [pending.command.command_id for pending in mailbox.take()] == ["c1"]

    with sql(emptied_postgres_url) as db:
        db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'")
    store.submit(command("c2"))
    while not mailbox.waiting():
        mailbox.tick()
        time.sleep(0.05)
    mailbox.close()


def test_pages_hear_of_rows_and_of_whatever_else_they_show(emptied_postgres_url):
    """By the run, or of all; that the writer lives is no news."""
    store, other = open_store(emptied_postgres_url), open_store(emptied_postgres_url)
    fill(store, steps(1), "one")
    with closing(other.news("pages")) as news, closing(other.news("pages", "two")) as foreign:
        assert (news.heard(), foreign.arrived(), news.deaf) == (frozenset(), False, False)
        writer = store.open_run(RunInfo("one"))
        for write in (
            lambda: writer.write(steps(2)),
            lambda: store.submit(command("c1", "one")),
            lambda: store.put_alerts([alert("a1", "one")], []),
            lambda: writer.finish(RunState.FINISHED, "", 1.0),
        ):
            while news.heard(0.1):
                pass
            write()
            assert news.heard(60.0) == {"one"}
        store.put_silence(Silence("s", "", "", 0.0, 0.0))
        assert foreign.heard(60.0) == {""}


def test_a_pool_that_delivers_nothing_is_noticed_and_so_is_the_end_of_it(emptied_postgres_url, monkeypatch):
    """One that shares its connections takes LISTEN, and forgets it: pages go on polling until they hear themselves."""
    pooled, execute = [True], psycopg.Connection.execute

    def forgotten(db, query, *args, **more):
        return execute(db, "" if pooled[0] and str(query).startswith("LISTEN") else query, *args, **more)

    monkeypatch.setattr(psycopg.Connection, "execute", forgotten)
    store = open_store(emptied_postgres_url)
    fill(store, steps(1), "one")
    with closing(PostgresNews(store.server, "pages", None, again_s=0.1, echo_s=0.3)) as news:
        assert not news.heard()
        assert news.deaf
        pooled[0] = False
        end = time.monotonic() + 60.0
        while news.deaf and time.monotonic() < end:
            news.heard(0.1)
        fill(store, steps(2), "one")
        assert news.heard(60.0) == {"one"}
