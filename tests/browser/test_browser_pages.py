"""What only a browser can tell: pages fill by themselves, links work, text is text, zoom stays."""

import re
import time

import pytest
from playwright.sync_api import expect
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

from rlwatch.alerts.config import load_config
from rlwatch.forecast.forecast import Forecast, record_of
from rlwatch.records import Alert, AlertState, ClosedStep, Finding, RunInfo, RunState, Severity, StepRecord
from rlwatch.store.url import open_store
from rlwatch.testing.webhook_receiver import WebhookReceiver

pytestmark = pytest.mark.browser

HOSTILE = '<script>alert("name")</script><img src=x onerror=alert(1)> **bold** '
METRIC = "reward/<img src=x onerror=alert(2)>"


def write(store_url, run_id="r", name="seed3", steps=range(1, 31), **more):
    store = open_store(store_url)
    writer = store.open_run(RunInfo(run_id, project="p", name=name, source="trl/grpo"))
    now = time.time()
    writer.write([StepRecord(s, {"reward": s / 10, "kl": 0.1, **more.get("metrics", {})}, ts=now) for s in steps])
    writer.write(more.get("findings", []))
    store.put_alerts(more.get("alerts", []), [])
    if "end" in more:
        writer.finish(more["end"], "", now)
    writer.close()
    store.close()


def test_an_empty_page_fills_by_itself(app, page, store_url):
    """Whoever waits for the first run need not reload."""
    page.goto(app)
    expect(page.get_by_text("No runs yet")).to_be_visible()
    write(store_url)
    expect(page.get_by_role("link", name="seed3")).to_be_visible()


def test_hostile_text_is_shown_and_does_nothing(shared_app, page, shared_store):
    """In the list, the head, the charts, the findings: the page fixture fails on any dialog or script error."""
    finding = Finding("d", "k", Severity.WARNING, 20, 12, HOSTILE, {HOSTILE: HOSTILE}, metric=METRIC)
    write(shared_store, "hostile", name=HOSTILE, metrics={METRIC: 1.5}, findings=[finding])
    page.goto(shared_app)
    link = page.get_by_role("link", name=re.compile("<script>"))
    expect(link).to_be_visible()
    link.click()
    expect(page.locator(".rl-name")).to_contain_text('<script>alert("name")</script>')
    summary = page.locator(".rlwatch-table summary").first
    summary.click()
    expect(page.locator(".rlwatch-table dt").first).to_contain_text("<script>")
    for place in range(page.locator(".u-over").count()):
        page.locator(".u-over").nth(place).hover()  # names are in the tooltips
    assert page.locator("img[src='x']").count() == 0


def test_a_row_opens_its_run_and_the_address_can_be_shared(shared_app, page, shared_store):
    """By click inside the app, by address from outside."""
    write(shared_store, "run-a", name="alpha")
    write(shared_store, "run-b", name="beta")
    page.goto(shared_app)
    page.get_by_text("beta").click()
    expect(page.locator(".rl-name")).to_contain_text("beta")
    assert page.url.endswith("/run?run=run-b")
    page.goto(f"{shared_app}/run?run=run-a&from=5&to=9")
    expect(page.locator(".rl-name")).to_contain_text("alpha")
    expect(page.get_by_role("slider").nth(0)).to_have_value("5")


def test_the_range_stays_while_the_run_goes_on(shared_app, page, shared_store):
    """Live refresh brings new steps and does not touch the zoom."""
    write(shared_store, "range", steps=range(1, 31))
    page.goto(f"{shared_app}/run?run=range&from=5&to=15")
    expect(page.locator(".rl-facts")).to_contain_text("step 30")
    write(shared_store, "range", steps=range(31, 95))
    expect(page.locator(".rl-facts")).to_contain_text("step 94")
    expect(page.get_by_role("slider").nth(0)).to_have_value("5")
    expect(page.get_by_role("slider").nth(1)).to_have_value("15")
    assert "from=5" in page.url
    assert "to=15" in page.url


def test_a_moved_slider_is_in_the_address(shared_app, page, shared_store):
    """So that a reload, and a colleague, see the same."""
    write(shared_store, "slider")
    page.goto(f"{shared_app}/run?run=slider")
    handle = page.get_by_role("slider").nth(0)
    handle.focus()
    for _ in range(4):
        handle.press("ArrowRight")
    expect(page).to_have_url(re.compile(r"from=4"))
    page.reload()
    expect(page.get_by_role("slider").nth(0)).to_have_value("4")


def test_what_was_opened_stays_open_while_the_run_goes_on(shared_app, page, shared_store):
    """Somebody reads the evidence when the next step arrives."""
    finding = Finding("d", "entropy_collapse", Severity.WARNING, 20, 12, "entropy fell", {"ratio": 0.1})
    write(shared_store, "opened", findings=[finding])
    page.goto(f"{shared_app}/run?run=opened")
    expect(page.locator(".rlwatch-table summary").first).to_be_visible()
    expect(page.get_by_test_id("stApp")).to_have_attribute("data-test-script-state", "notRunning")
    page.locator(".rlwatch-table summary").first.click()
    expect(page.locator(".rlwatch-table dd").first).to_be_visible()
    write(
        shared_store,
        "opened",
        steps=range(31, 61),
        findings=[Finding("d", "kl_drift", Severity.WARNING, 40, 35, "KL grew")],
    )
    expect(page.get_by_text("KL grew")).to_be_visible()
    expect(page.locator(".rlwatch-table dd").first).to_be_visible()


def test_a_paused_page_keeps_still(shared_app, page, shared_store):
    """Whoever reads closely is not disturbed; one click and it goes on."""
    write(shared_store, "paused")
    page.goto(f"{shared_app}/run?run=paused")
    expect(page.locator(".rl-facts")).to_contain_text("step 30")
    page.get_by_text("Live", exact=True).click()
    expect(page).to_have_url(re.compile("live=false"))
    page.wait_for_timeout(2_000)  # the address changes at once, what is drawn when the server has answered
    expect(page.get_by_test_id("stApp")).to_have_attribute("data-test-script-state", "notRunning")
    write(shared_store, "paused", steps=range(31, 61))
    page.wait_for_timeout(7_000)  # longer than a live page would wait
    expect(page.locator(".rl-facts")).to_contain_text("step 30")
    page.get_by_text("Live", exact=True).click()
    expect(page.locator(".rl-facts")).to_contain_text("step 60")


def test_an_alert_leads_to_its_run_and_back(app, page, store_url):
    """From the page of alerts to the cause, by its link, without loading the app again."""
    alert = Alert("a1", "r", "entropy", "entropy_collapse", Severity.CRITICAL, AlertState.FIRING, 12, 20, "it fell",
                  fired_at=time.time())  # fmt: skip
    found = Finding("d", "entropy_collapse", Severity.CRITICAL, 20, 12, "it fell", seq=20)
    write(store_url, alerts=[alert], findings=[found])
    page.goto(f"{app}/alerts")
    expect(page.get_by_text("1 incident firing")).to_be_visible()
    page.get_by_role("link", name="seed3").click()
    expect(page.locator(".rl-verdict")).to_contain_text("Collapsed at step 12: entropy fell")
    page.get_by_role("link", name="Runs").click()
    expect(page.get_by_text("1 run needs attention")).to_be_visible()


def test_a_run_that_ends_is_seen_to_end(shared_app, page, shared_store):
    """The page notices, and asks no more."""
    write(shared_store, "ending")
    page.goto(f"{shared_app}/run?run=ending")
    expect(page.get_by_role("button", name="Reset reference…")).to_be_enabled()
    write(shared_store, "ending", steps=range(31, 33), end=RunState.FINISHED)
    expect(page.locator(".rl-facts").first).to_contain_text("finished")
    expect(page.get_by_role("button", name="Reset reference…")).to_be_disabled()


@pytest.mark.thorough
def test_a_long_run_is_drawn_from_as_little_as_a_short_one(shared_app, page, shared_store, messages):
    """20 000 steps: what crosses to the browser and is drawn there is what the width of a chart can show."""
    write(shared_store, "long", steps=range(1, 20_001))
    page.goto(f"{shared_app}/run?run=long")
    expect(page.locator("canvas").nth(1)).to_be_visible()
    assert max(messages) < 100_000  # the drawing library is 80 000 of them, once


def test_an_alert_is_acknowledged_by_a_click(app, page, store_url):
    """From the row through the dialog and back; the row says who has it."""
    alert = Alert("a1", "r", "entropy", "entropy_collapse", Severity.CRITICAL, AlertState.FIRING, 12, 20, "it fell",
                  fired_at=time.time())  # fmt: skip
    write(store_url, alerts=[alert])
    page.goto(f"{app}/alerts")
    page.get_by_role("link", name="acknowledge").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("What are you doing about it?").fill("rolled back")
    dialog.get_by_role("button", name="Acknowledge").click()
    expect(page.get_by_text("1 incident firing, 1 acknowledged")).to_be_visible()
    expect(page.get_by_role("link", name="acknowledge")).to_have_count(0)
    assert [(a.alert_id, a.by, a.why) for a in open_store(store_url).acknowledgements()] == [
        ("a1", "ann", "rolled back")
    ]


def test_an_incident_is_silenced_and_the_silence_ended_by_clicks(app, page, store_url):
    """From the row into the dialog; the silence is seen, and ends by a button."""
    alert = Alert("a1", "r", "entropy", "entropy_collapse", Severity.CRITICAL, AlertState.FIRING, 12, 20, "it fell",
                  fired_at=time.time())  # fmt: skip
    write(store_url, alerts=[alert])
    page.goto(f"{app}/alerts")
    page.get_by_role("link", name="entropy collapse: it fell").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("radio", name="Silence").or_(dialog.get_by_role("button", name="Silence")).first.click()
    dialog.get_by_label("Reason (required").fill("the judge is down")
    dialog.get_by_role("button", name="Silence").last.click()
    expect(page.get_by_text("1 incident firing, 1 silenced")).to_be_visible()
    [silence] = open_store(store_url).silences()
    assert (silence.by, silence.run, silence.kind, silence.why) == ("ann", "r", "entropy_collapse", "the judge is down")
    page.get_by_text("1 silence, matching alerts not sent").click()
    page.get_by_role("button", name="End now").click()
    expect(page.get_by_text("1 incident firing", exact=True)).to_be_visible()


def test_a_forecast_is_judged_by_clicks(app, page, store_url):
    """The question, the answer, and who gave it."""
    rows = [StepRecord(s, {"kl": 9.0 if s >= 200 else 0.01}, ts=time.time()) for s in range(1, 300)]
    said = [Forecast(s, p50=0.9, risk=1.5, alarm=True, limit="ref_kl") for s in range(170, 190)]
    store = open_store(store_url)
    writer = store.open_run(RunInfo("r", project="p", name="seed3", source="trl/grpo"))
    writer.write([*rows, *(record_of(each, ClosedStep(each.step, {}, {}, seq=each.step)) for each in said)])
    writer.close()
    page.goto(f"{app}/forecasts")
    expect(page.get_by_text("1 of 1 alarm came true")).to_be_visible()
    page.get_by_role("link", name="rate", exact=True).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("right", exact=True).click()
    dialog.get_by_label("Why").fill("it blew up")
    dialog.get_by_role("button", name="Save").click()
    expect(page.get_by_role("link", name="right (ann): it blew up")).to_be_visible()
    assert [(a.step, a.right, a.by) for a in store.forecast_answers()] == [(170, True, "ann")]


@pytest.fixture
def receiver(monkeypatch):
    """A real webhook receiver, which the app that is started next knows."""
    with WebhookReceiver() as made:
        monkeypatch.setenv("RLWATCH_WEBHOOK_URL", made.url)
        yield made


def test_a_rule_is_tried_and_kept_and_a_webhook_tested_by_clicks(receiver, app, page, store_url):
    """What it would have done, the file in the store, the row that says so; the receiver got a trial."""
    finding = Finding("d", "kl_drift", Severity.WARNING, 20, 12, "KL grew")
    write(store_url, findings=[finding])
    page.goto(f"{app}/rules")
    page.get_by_role("combobox", name="Rule").click()
    page.keyboard.type("kl")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    steps = page.get_by_label("Fire after, steps")
    expect(page.locator("input[aria-label='Name'][value='kl']")).to_be_visible()
    expect(page.get_by_test_id("stApp")).to_have_attribute("data-test-script-state", "notRunning")
    expect(steps).to_have_count(1)
    steps.fill("0")
    steps.press("Enter")
    page.get_by_role("button", name="Test", exact=True).click()
    expect(page.get_by_text("would have fired 1 time on 1 of 1 run")).to_be_visible()
    page.get_by_role("button", name="Save rule").click()
    expect(page.get_by_text("Rule kl saved")).to_be_visible()
    expect(page.get_by_text("changed", exact=True)).to_be_visible()
    kept = next(each for each in load_config(store_root=store_url, env={}).rules if each.name == "kl")
    assert kept.for_steps == 0
    page.get_by_role("button", name="Send test").click()
    expect(page.get_by_text("webhook: delivered")).to_be_visible()
    assert [got.event for got in receiver.received] == ["test"]
    expect(page.get_by_text(receiver.url)).to_have_count(0)


class Losing:
    """A connection that, once :attr:`armed`, loses the first things with which a whole page is drawn."""

    def __init__(self):
        self.armed, self._left = False, 0

    def __call__(self, socket):
        socket.connect_to_server().on_message(lambda data: self._loses(data) or socket.send(data))

    def _loses(self, data):
        message = ForwardMsg.FromString(data) if isinstance(data, bytes) else ForwardMsg()
        kind = message.WhichOneof("type")
        if self.armed and kind == "navigation":  # what a page that is drawn in part does not send
            self.armed, self._left = False, 3
        lost = kind == "delta" and self._left > 0
        self._left -= lost
        return lost


def test_a_page_that_lost_what_it_was_sent_comes_back_once(shared_app, joined, shared_store):
    """As after a connection that broke off and came back: Streamlit's client takes all of the page down. Not in a loop."""
    write(shared_store, "lost", name="lost")
    page, losing, loads, errors = joined(shared_app, "operator", "ann"), Losing(), [], []
    page.on("load", lambda: loads.append(page.url))
    page.on("pageerror", lambda error: errors.append(str(error)))

    def go_to_the_run():
        expect(page.get_by_role("link", name="lost")).to_be_visible()
        losing.armed = True
        page.get_by_role("link", name="lost").click()

    page.route_web_socket("**/*", losing)
    page.goto(shared_app)
    with page.expect_event("load"):
        go_to_the_run()
    expect(page.get_by_text("ann · operator")).to_be_visible()
    assert errors
    assert all("delta path" in error for error in errors)

    page.goto(shared_app)
    go_to_the_run()
    expect(page.locator("#root > *")).to_have_count(0)
    page.wait_for_timeout(1_000)
    assert len(loads) == 3
