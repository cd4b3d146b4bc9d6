"""New rows of a live run: fetched by themselves and appended, at no cost where nobody looks, found again after a cut."""

import time
from contextlib import contextmanager

import pytest
from playwright.sync_api import expect
from test_browser_charts import strip, view
from waiting import until

from rlwatch.records import Finding, RunInfo, Severity, StepRecord
from rlwatch.store.url import open_store

pytestmark = pytest.mark.browser


@pytest.fixture
def fetched(page):
    """Bytes of what the page has fetched of new rows so far."""
    sizes = []
    page.on("response", lambda answer: sizes.append(len(answer.body())) if "after=" in answer.url else None)
    return sizes


@contextmanager
def trainer(store_url, run_id, steps, metrics=None):
    """A run of one attempt; what it gives writes one more step, or anything else."""
    store = open_store(store_url)
    writer = store.open_run(RunInfo(run_id, project="p", name=run_id, source="trl/grpo"))

    def row(step, **more):
        return StepRecord(step, {"reward": step / 10, "kl": 0.1, **(metrics or {}), **more}, ts=time.time())

    writer.write([row(step) for step in range(1, steps + 1)])
    yield lambda step, *others, **more: writer.write([row(step, **more), *others])
    writer.close()
    store.close()


def charts(sizes):
    """Messages so large that they hold charts."""
    return [size for size in sizes if size > 10_000]


def test_a_new_row_is_appended_and_no_chart_is_sent_again(shared_app, page, shared_store, messages, fetched):
    """A few kilobytes bring it; NaN is told, and a finding has the page drawn anew with its mark."""
    finding = Finding("d", "entropy_collapse", Severity.CRITICAL, 302, 290, "entropy fell", seq=302)
    with trainer(shared_store, "grows", 300, {f"mine/{i}": 0.5 for i in range(40)}) as write:
        page.goto(f"{shared_app}/run?run=grows&smooth=mean+of+10")
        strip(page)
        expect(page.get_by_test_id("stApp")).to_have_attribute("data-test-script-state", "notRunning")
        sent = len(messages)

        write(301, kl=float("nan"))

        expect(page.locator(".row .value").nth(0)).to_have_text("30.1")
        expect(page.locator(".row .value").nth(1)).to_have_text("NaN")
        assert view(page)[1] == 301
        assert 0 < max(fetched) < 5000
        assert charts(messages[sent:]) == []

        write(302, finding)
        expect(page.get_by_role("button", name="entropy collapse (finding), step 302")).to_be_visible()
        expect(page.locator(".row .value").nth(0)).to_have_text("30.2")


def test_a_page_that_nobody_sees_asks_nothing_and_catches_up(shared_app, page, shared_store, fetched):
    """Hidden, it closes its stream; seen again, it has every row."""
    with trainer(shared_store, "hides", 50) as write:
        hidden_for_five_rows(shared_app, page, fetched, write)


def hidden_for_five_rows(shared_app, page, fetched, write):
    """The scene of the test above."""
    page.goto(f"{shared_app}/run?run=hides")
    strip(page)
    until(lambda: page.wait_for_timeout(50) or fetched, "the page has asked once")
    page.evaluate(HIDDEN, True)
    page.wait_for_timeout(1500)
    before = len(fetched)
    for step in range(51, 56):
        write(step)
        page.wait_for_timeout(500)
    assert len(fetched) == before
    page.evaluate(HIDDEN, False)
    expect(page.locator(".row .value").first).to_have_text("5.5")


HIDDEN = """(hidden) => {
  Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_a_page_goes_on_by_itself_when_its_server_was_started_anew(serve, joined, shared_store):
    """The same address and session: no reload, no login, and the rows of the meantime."""
    with trainer(shared_store, "restarted", 50) as write:
        with serve(shared_store) as address:
            page = joined(address, "operator", "ann")
            page.goto(f"{address}/run?run=restarted")
            strip(page)
            page.evaluate("window.kept = true")
        write(51)
        with serve(shared_store, int(address.rpartition(":")[2])) as again:
            assert again == address
            write(52)
            expect(page.locator(".row .value").nth(0)).to_have_text("5.2")
            expect(page.locator(".rl-facts").first).to_contain_text("step 52")
            assert page.evaluate("window.kept")
