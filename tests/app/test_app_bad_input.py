"""Input that nobody intended: the pages stay whole, small and text. More of it is in the tests of each page."""

import json
import time

import numpy as np
import pytest
from app_world import WEIRD, boards, html, no_traceback, run_page, runs_page, tables, write_run
from rlwatch_app import pinned
from rlwatch_app.thinning import reduced, thin
from test_api import client, fits

from rlwatch.ports import Series
from rlwatch.records import AuditEntry, RunInfo, StepRecord
from rlwatch.step_notes import add_step_note, step_notes
from rlwatch.store.url import open_store

MANY = 10_000


def test_ten_thousand_metrics_are_a_page_of_some_charts(store_dir):
    """What crosses to the browser does not grow with them; any of them is found by its name."""
    write_run(store_dir, steps=2, metrics=lambda step: {f"mine/metric_{i}": float(i + step) for i in range(MANY)})
    page = run_page()
    assert no_traceback(page)
    data = boards(page)["board-all"]
    assert sum(len(section["panels"]) for section in data["sections"]) < 50
    assert len(json.dumps(data)) < 300_000
    found = run_page(q="metric_9876")
    assert [panel["name"] for panel in boards(found)["board-all"]["sections"][0]["panels"]] == ["mine/metric_9876"]


def test_a_million_points_are_thinned_to_what_a_screen_shows():
    """For a chart and for scripts, with the one spike and the one NaN among them."""
    steps, values = np.arange(1_000_000), np.zeros(1_000_000)
    values[777_777], values[333_333] = 1e9, np.nan
    curve = thin(steps, values, 240)
    assert len(curve) <= 482
    assert 777_777 in curve.steps.tolist()
    assert [word for _, word in curve.bad] == ["NaN"]
    ones = np.ones(1_000_000, dtype=np.int64)
    answer = reduced(Series("m", steps, values, ones, steps), {1: 0}, 500)
    assert len(answer.steps) <= 1003
    assert {333_333, 777_777} <= set(answer.steps.tolist())


@pytest.mark.parametrize("ahead_s", [3600.0, 86_400.0 * 400, -86_400.0 * 400])
def test_a_trainer_whose_clock_is_wrong_has_pages_all_the_same(store_dir, ahead_s):
    """Rows of tomorrow, of next year or of last year: no negative ages, no traceback, in the list, the page and the API."""
    store = open_store(str(store_dir))
    now = time.time() + ahead_s
    writer = store.open_run(RunInfo("run-1", project="math", name="skewed", source="trl/grpo", created_at=now))
    writer.write([StepRecord(s, {"reward": 0.5}, ts=now + s) for s in range(1, 31)])
    writer.heartbeat(now + 30)
    writer.close()
    store.close()
    listed, page = runs_page(), run_page()
    assert no_traceback(listed)
    assert no_traceback(page)
    cells = [cell.get("text", "") for cell in tables(listed)["runs"]["rows"][0]["cells"]]
    assert not any(text.startswith("-") and "ago" in text for text in cells)
    assert "-" not in html(page).split("last step")[1][:20]
    assert fits(client().get("/api/runs"), "/api/runs")["runs"][0]["run_id"] == "run-1"


def test_hostile_pins_layouts_and_notes_are_text(store_dir):
    """From the address, from the store, and from another version of rlwatch that wrote otherwise."""
    write_run(store_dir)
    store = open_store(str(store_dir))
    for place, text in enumerate(
        ["no json", "[]", "{}", '{"project": "math", "names": 3}', '{"project": "math"}', "null"]
    ):
        for act in (pinned.PINS_ACT, pinned.LAYOUT_ACT):
            store.put_entry(AuditEntry(f"{act}-{place}", float(place), "eve", act, text))
    store.put_entry(AuditEntry("odd", 9.0, "eve", "step-note", "step x: never", "run-1"))
    add_step_note(store, "run-1", 2**62, WEIRD, by=WEIRD)
    page = run_page(pin=["reward ÷ ÷ kl", "reward + ", " ÷ ", WEIRD, "kl @9", "reward + kl ÷ reward", "reward @2"])
    assert no_traceback(page)
    assert "<script>alert" not in html(page)
    sections = boards(page)["board-all"]["sections"]
    assert [panel["pin"] for panel in sections[0]["panels"]] == ["reward @2"]
    assert [note.step for note in step_notes(store, "run-1")] == [2**62]
    mark = next(mark for mark in boards(page)["board-strip"]["marks"] if mark["shape"] == "✎")
    assert mark["step"] == str(2**62)
