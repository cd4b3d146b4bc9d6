"""What others write into files is heard of by those who show it, and that a writer lives is no news."""

import time
from contextlib import closing

import pytest

from rlwatch.records import RunInfo, Silence
from rlwatch.store.url import open_store
from rlwatch.testing.store_run_contract import alert, command, fill, steps

PATIENCE_S = 60.0


@pytest.fixture
def stores(tmp_path):
    """One that is written, and one that looks."""
    return open_store(tmp_path), open_store(tmp_path)


def quiet(news):
    """Whatever was written so far has been heard of."""
    while news.heard(0.1):
        pass


def test_rows_and_what_people_do_are_heard_of(stores):
    """Of all runs or of one; each once."""
    store, other = stores
    fill(store, steps(1), "one")
    with closing(other.news("pages")) as news, closing(other.news("pages", "one")) as mine:
        assert (news.heard(), mine.arrived(), news.deaf) == (frozenset(), False, False)
        writer = store.open_run(RunInfo("two"))
        assert news.heard(PATIENCE_S) == {"two"}
        for write in (
            lambda: writer.write(steps(1)),
            lambda: writer.write(steps(2)),
            lambda: store.put_alerts([alert("a1", "two")], []),
            lambda: store.submit(command("c1", "two")),
        ):
            quiet(news)
            write()
            assert news.heard(PATIENCE_S) == {"two"}
        quiet(news)
        store.put_silence(Silence("s", "", "", 0.0, 0.0))
        assert news.heard(PATIENCE_S) == {""}
        assert mine.heard(PATIENCE_S) == {""}
        store.submit(command("c1", "one"))
        assert mine.heard(PATIENCE_S) == {"one"}
        writer.close()


def test_a_heartbeat_and_a_look_are_no_news(stores):
    """Once it is known how far the run is: by its rows, not by the times of its files."""
    store, other = stores
    writer = store.open_run(RunInfo("live"))
    with closing(other.news("pages")) as news:
        writer.write(steps(1))
        quiet(news)
        writer.heartbeat(time.time())
        quiet(news)
        writer.heartbeat(time.time() + 5)
        other.run("live"), other.last_values("live"), other.alerts("live"), other.commands("live")
        assert news.heard(1.0) == frozenset()
        writer.close()


def test_only_pages_are_told_by_files(stores):
    """Trainers look themselves."""
    assert stores[0].news("commands", "one") is None
    assert stores[0].news("alerts") is None
