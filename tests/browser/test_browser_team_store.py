"""A page over a team's store is told what is new, and looks by itself while it cannot be."""

import time

import pytest
from playwright.sync_api import expect
from postgres_server import PostgresServer, sql

from rlwatch.records import RunInfo, StepRecord
from rlwatch.store.url import open_store

pytestmark = pytest.mark.browser


@pytest.fixture
def store_url(tmp_path, monkeypatch):
    """A server of this test's own."""
    monkeypatch.setenv("RLWATCH_LOCAL_DIR", str(tmp_path))
    server = PostgresServer()
    server.start()
    yield server.url("team")
    server.remove()


def test_a_page_over_postgresql_goes_on_also_while_it_is_told_nothing(store_url, app, page):
    """Rows appear; the listening connection is cut, and the next ones appear all the same."""

    def row(step):
        writer.write([StepRecord(step, {"reward": 0.5}, time.time())])
        expect(page.locator(".rl-facts")).to_contain_text(f"step {step}")

    writer = open_store(store_url).open_run(RunInfo("live", project="p", source="trl/grpo"))
    writer.write([StepRecord(1, {"reward": 0.5}, time.time())])
    page.goto(f"{app}/run?run=live")
    row(22)
    with sql(store_url) as db:
        listening = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN rlwatch_team_pages%'"
        assert db.execute(f"SELECT pg_terminate_backend(pid) FROM ({listening}) AS one").rowcount == 1
    row(333)
    writer.close()
