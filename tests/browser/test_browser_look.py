"""The switches above a run's charts: drawn by the browser alone, kept in the address, one step back for each."""

import json
import math
import random
import re
import struct
import time

import pytest
from playwright.sync_api import expect
from test_browser_charts import at, drag, strip
from test_browser_pages import write

from rlwatch.records import RunInfo, StepRecord
from rlwatch.store.url import open_store
from rlwatch.wording import number

pytestmark = pytest.mark.browser

DRAWN = """() => {
  const roots = [...document.querySelectorAll("*")].map((node) => node.shadowRoot).filter(Boolean);
  return roots.flatMap((root) => [...root.querySelectorAll("figure")]).map((node) => node.querySelector(".sub").textContent);
}"""
"""What stands below the title of every chart; the scale is part of it."""


@pytest.fixture
def asked(page):
    """Sizes of what the page has sent to the script so far."""
    sizes = []
    page.on("websocket", lambda socket: socket.on("framesent", lambda sent: sizes.append(len(sent))))
    return sizes


def still(page):
    """Wait until the script has nothing to do."""
    expect(page.get_by_test_id("stApp")).to_have_attribute("data-test-script-state", "notRunning")


def test_a_switch_asks_the_script_nothing_and_is_one_step_back(shared_app, page, shared_store, asked):
    """Log, smoothing, axis, outliers, legend and drawer; a reload shows the same."""
    write(shared_store, "look", steps=range(1, 101), metrics={"grad_norm": 2.0})
    page.goto(f"{shared_app}/run?run=look&live=false")
    strip(page)
    still(page)
    length, sent = page.evaluate("history.length"), len(asked)

    page.get_by_label("Log").check()
    assert any("log scale" in words for words in page.evaluate(DRAWN))
    page.get_by_label("Smooth").select_option("EMA 0.9")
    page.get_by_label("Legend").check()
    expect(page.locator(".legend").first).to_contain_text("smoothed")
    page.get_by_label("Details").uncheck()
    expect(page.locator(".st-key-drawer")).to_be_hidden()
    page.get_by_label("Clip outliers").uncheck()
    assert (page.evaluate("history.length") - length, len(asked) - sent) == (5, 0)
    expect(page).to_have_url(re.compile(r"log=true&smooth=EMA\+0.9&legend=true&side=false&clip=false"))

    page.reload()
    strip(page)
    expect(page.get_by_label("Log")).to_be_checked()
    expect(page.get_by_label("Smooth")).to_have_value("EMA 0.9")
    expect(page.locator(".st-key-drawer")).to_be_hidden()
    page.go_back()
    expect(page.get_by_label("Clip outliers")).to_be_checked()
    expect(page.locator(".st-key-drawer")).to_be_hidden()
    page.go_back()
    expect(page.locator(".st-key-drawer")).to_be_visible()
    page.go_back()
    page.go_back()
    expect(page.get_by_label("Smooth")).to_have_value("off")
    expect(page.get_by_label("Log")).to_be_checked()
    page.go_back()
    expect(page.get_by_label("Log")).not_to_be_checked()
    assert not any("log scale" in words for words in page.evaluate(DRAWN))


def test_what_the_server_writes_into_the_address_leaves_the_switches_there(shared_app, page, shared_store):
    """A zoom is one step back, by steps also where time is looked at; then the search, which is the server's too."""
    write(shared_store, "kept", steps=range(1, 201))
    page.goto(f"{shared_app}/run?run=kept&live=false")
    chart = strip(page)
    page.get_by_label("Log").check()
    length = page.evaluate("history.length")
    drag(page, chart, 0.25, 0.75)
    expect(page).to_have_url(re.compile(r"from=\d+&to=\d+"))
    expect(page).to_have_url(re.compile("log=true"))
    still(page)
    assert page.evaluate("history.length") - length == 1
    low, high = json.loads(page.locator(".board").first.get_attribute("data-view"))
    assert 40 < low < high < 160
    page.get_by_placeholder("Search metrics").fill("kl")
    page.keyboard.press("Enter")
    expect(page.locator("h3").first).to_contain_text("match")
    expect(page).to_have_url(re.compile("log=true"))
    expect(page.get_by_label("Log")).to_be_checked()


CURVES = """async ([steps, values, how]) => {
  const { name } = performance.getEntriesByType("resource").find(({ name }) => name.endsWith("/curves.js"));
  return (await import(name)).smoothed(steps, values, how, null, 1);
}"""


def test_a_smoothed_line_is_the_one_that_the_server_makes(shared_app, page, shared_store):
    """Of short runs by the browser's own sums, of long ones by the server's: every way gives the same."""
    values = [((37 * i) % 101) / 7 - 5 for i in range(100)]
    store = open_store(shared_store)
    writer = store.open_run(RunInfo("rough", project="p", source="trl/grpo"))
    writer.write([StepRecord(s, {"reward": value}, time.time()) for s, value in enumerate(values, 1)])
    writer.close()
    store.close()
    page.goto(f"{shared_app}/run?run=rough&live=false")
    strip(page)
    ways = page.get_by_label("Smooth").locator("option").all_inner_texts()
    assert len(ways) == 7
    for how in ways[1:]:
        answer = page.request.get(f"{shared_app}/api/runs/rough/series", params={"metrics": "reward", "smooth": how})
        drawn = page.evaluate(CURVES, [list(range(1, 101)), values, how])
        assert drawn == pytest.approx(answer.json()["series"]["reward"]["values"], rel=1e-9)


def saw(step):
    """A value of its step; one is a spike, a stretch is not finite."""
    return {**dict.fromkeys(range(690, 731), math.nan), 740: math.inf, 3500: 900.0}.get(step, float((37 * step) % 101))


def test_a_long_chart_shows_its_extremes_and_the_mean_of_every_row(shared_app, page, shared_store):
    """The mean is exact where the drawn points are extremes only; NaN stays in the tooltip, by any axis."""
    store = open_store(shared_store)
    writer = store.open_run(RunInfo("long-mean", project="p", source="trl/grpo"))
    writer.write([StepRecord(s, {"reward": saw(s)}, 1000.0 + s) for s in range(1, 4801)])
    page.goto(f"{shared_app}/run?run=long-mean&live=false&legend=true&clip=false")
    chart = strip(page)
    expect(page.locator(".legend").first).to_contain_text("mean")

    page.mouse.move(*at(chart, 0.5))
    rows = page.locator(".tip").first.locator(".line")
    expect(rows.filter(has_text="mean")).to_be_visible()
    place, shown = (rows.filter(has_text="mean").locator(one).inner_text() for one in (".quiet", "b"))
    middle = float(re.search(r"[\d\u202f]+", place)[0].replace("\u202f", "")) if place else None
    ranges = [range(20 * k, 20 * k + 20) for k in range(241)]
    near = [sum(map(saw, own)) / 20 for own in ranges if middle is None or abs(own[0] + 9.5 - middle) <= 1]
    assert any(abs(float(shown) - mean) < 1e-3 for mean in near)

    page.mouse.move(*at(chart, 710 / 4799))
    expect(page.locator(".tip").first).to_contain_text("NaN")
    page.get_by_label("Axis").first.select_option("time")
    page.mouse.move(*at(chart, 0.4))
    expect(page.locator(".tip").first).to_contain_text("mean")
    page.get_by_label("Smooth").first.select_option("EMA 0.9")
    expect(page.locator(".legend").first).not_to_contain_text("mean")
    writer.close()
    store.close()


GROWN = """async ([reply, steps, values]) => {
  const { name } = performance.getEntriesByType("resource").find(({ name }) => name.endsWith("/means.js"));
  const { grow, meansOf } = await import(name), means = meansOf(reply, 7n).get("m");
  for (const upto of [values.length / 2, values.length]) grow(means, { x: steps.slice(0, upto), y: values.slice(0, upto) });
  return means;
}"""


def test_means_grow_by_new_rows_to_what_the_server_would_send(shared_app, page, shared_store):
    """Part of a range, new ranges, a gap and NaN; rows that the means have are not counted twice."""
    write(shared_store, "grown", steps=range(1, 5))
    page.goto(f"{shared_app}/run?run=grown&live=false")
    strip(page)
    steps = [*range(10, 60), *range(400, 470)]
    values = [None if s % 13 == 0 else ((37 * s) % 101) / 7 for s in steps]

    def means(last):
        ranges: dict[int, list[float]] = {}
        for step, value in zip(steps, values, strict=True):
            if value is not None and step <= last:
                ranges.setdefault(step // 10 * 10, []).append(value)
        return list(ranges), [sum(own) / len(own) for own in ranges.values()], [len(own) for own in ranges.values()]

    starts, sent, counts = means(413)
    reply = {
        "rows": [{"steps": starts, "width": 10, "through": 413}],
        "series": {"m": {"recorded": "m", "rows": 0, "values": sent, "counts": counts}},
    }
    grown = page.evaluate(GROWN, [reply, [s - 7 for s in steps], values])
    starts, whole, counts = means(469)
    assert grown["x"] == [start - 7 + 4.5 for start in starts]
    assert grown["counts"] == counts
    assert grown["y"] == pytest.approx(whole, rel=1e-12)


STRETCHES = """async ([marks, family]) => {
  const { name } = performance.getEntriesByType("resource").find(({ name }) => name.endsWith("/lane.js"));
  return (await import(name)).stretches(marks, family).map(({ from, to, colour }) => [from, to === Infinity ? null : to, colour]);
}"""


def test_alarms_that_overlap_are_one_band_from_the_first_onset(shared_app, page, shared_store):
    """In the colour of the worst; a chart has only those that concern it."""
    write(shared_store, "bands", steps=range(1, 5))
    page.goto(f"{shared_app}/run?run=bands&live=false")
    strip(page)

    def onset(x, until, families, rank=3):
        return {"x": x, "until": until, "families": families, "dashed": True, "rank": rank, "colour": f"rank {rank}"}

    alarm = {**onset(15, None, []), "dashed": False}
    marks = [onset(30, None, ["Reward"]), onset(10, 20, ["Reward"]), onset(12, 25, ["KL"], rank=4), alarm]

    assert page.evaluate(STRETCHES, [marks, "Reward"]) == [[10, 20, "rank 3"], [30, None, "rank 3"]]
    assert page.evaluate(STRETCHES, [marks, ""]) == [[10, 25, "rank 4"], [30, None, "rank 3"]]


NUMBERS = """async (cases) => {
  const { name } = performance.getEntriesByType("resource").find(({ name }) => name.endsWith("/numbers.js"));
  const { number } = await import(name);
  return cases.map(([value, digits]) => number(value, digits));
}"""


def odd_numbers(draws, count):
    """Any bits, halves between two digits, decimals, and what carries into the next power of ten."""
    for _ in range(count):
        yield struct.unpack("d", draws.randbytes(8))[0]
        yield draws.randint(-(10**9), 10**9) / 2 ** draws.randint(0, 20)
        yield round(draws.uniform(-1, 1) * 10 ** draws.randint(-6, 10), draws.randint(0, 8))
        yield draws.choice((1, -1)) * (10 ** draws.randint(-6, 10) - draws.choice((0, 0.5, 0.4, 0.05, 1e-5)))


def test_a_number_is_the_same_text_in_the_browser(shared_app, page, shared_store):
    """One rule, written down in both languages: 100 000 values, half of them ties or next to one."""
    write(shared_store, "texts", steps=range(1, 5))
    page.goto(f"{shared_app}/run?run=texts&live=false")
    strip(page)
    values = [value for value in odd_numbers(random.Random(0), 5000) if math.isfinite(value)]
    cases = [[value, digits] for value in [0.0, 1.125, 9999.5, 5e-324, *values] for digits in (1, 2, 3, 4, 7)]

    found = page.evaluate(NUMBERS, cases)

    assert [(case, text) for case, text in zip(cases, found, strict=True) if text != number(*case)] == []
    assert page.evaluate(NUMBERS, [[None, 3]]) == [number(None)]
