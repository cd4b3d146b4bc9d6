"""First picture of a page, before its session exists: the same list and charts, for the same people."""

import json
import math
import re
from contextlib import closing

import pytest
from app_world import danger_run, run_page, runs_page, tables, write_run
from rlwatch_app import gate, preload
from test_api import client

from rlwatch.records import RunInfo, RunState, StepRecord
from rlwatch.store.url import open_store


def test_the_first_list_is_the_list_of_the_page(store_dir):
    """Rows, boxes, columns and curves, and where the others are; of another role, too."""
    for i in range(3):
        write_run(store_dir, f"run-{i}", name=f"seed{i}", steps=5, age_s=9e4, state=RunState.FINISHED)
    first = client().get("/first/runs/light").json()

    assert first["table"] == tables(runs_page())["runs"]
    assert first["title"] == "No live run needs attention"
    assert [row["picked"] for row in client(role="viewer").get("/first/runs/light").json()["table"]["rows"]] == [
        False
    ] * 3


def test_a_list_with_choices_is_drawn_by_its_session_alone(store_dir):
    """Only the session reads them all; and an empty store has no list."""
    assert client().get("/first/runs/light").json() == {}
    write_run(store_dir, "run-1", steps=5)
    for query in ("search=x", "group=project", "picked=run-1", "sort=run%2C+lowest", "show=deleted"):
        assert client().get(f"/first/runs/light?{query}").json() == {}


@pytest.mark.parametrize(
    "query", [{}, {"from": "5", "to": "20"}, {"q": "entropy"}, {"smooth": "EMA 0.9", "log": "true"}]
)
def test_the_first_charts_are_those_of_the_page(store_dir, query):
    """Lines, marks, range and choices."""
    danger_run(store_dir)
    first = client().get("/first/run/light", params={"run": "run-1", **query}).json()
    page = run_page("run-1", **query)

    assert set(first["boards"]) == {"board-strip", "board-all"}
    sent = {one.key: json.loads(one.proto.json) for one in page.get("bidi_component") if one.proto.json}
    assert {key: sent[key] for key in first["boards"]} == first["boards"]
    assert (first["project"], first["title"]) == ("math", "seed3")
    assert first["headline"] == client().get("/api/runs/run-1/state").json()["headline"]


def test_dark_charts_are_for_a_dark_page(store_dir):
    """The browser names its theme; any other word means a light one."""
    write_run(store_dir, steps=5)
    inks = [
        client().get(f"/first/run/{theme}?run=run-1").json()["boards"]["board-all"]["ink"] for theme in ("dark", "x")
    ]
    assert inks[0] != inks[1]


def test_a_run_without_charts_or_none_at_all_has_no_first_charts(store_dir):
    """The session shows what is wrong."""
    write_run(store_dir, "bare", steps=0)
    assert client().get("/first/run/light?run=bare").json() == {}
    assert client().get("/first/run/light?run=none").status_code == 404
    assert client().get("/first/run/light").status_code == 404
    assert client().get("/first/rules/light?run=bare").status_code == 400


@pytest.mark.parametrize("level", [1e308, 1.7e308])
@pytest.mark.parametrize("signs", [(1, -1), (1, 1)])
def test_values_as_large_as_numbers_get_break_neither_the_list_nor_their_charts(store_dir, level, signs):
    """The length of such an axis is no number; other runs are in the same list."""
    with closing(open_store(str(store_dir)).open_run(RunInfo("far", state=RunState.RUNNING))) as writer:
        rows = [{"reward": level * signs[s % 2], "entropy": 5e-324 if s % 9 else level} for s in range(40)]
        writer.write([StepRecord(step, row) for step, row in enumerate(rows)])
    (row,) = client().get("/first/runs/light").json()["table"]["rows"]
    points = [point for cell in row["cells"] for point in cell.get("points") or ()]
    boards = client().get("/first/run/light?run=far").json()["boards"]
    (reward,) = [panel for panel in boards["board-strip"]["strip"] if panel["name"] == "reward"]

    assert points
    assert all(0 <= end <= 1 for point in points for end in point)
    assert math.isfinite(reward["range"][1] - reward["range"][0])


def test_without_a_session_nothing_is_shown_first(store_dir):
    """As of every other data; and a foreign page gets nothing."""
    danger_run(store_dir)
    for path in ("/first/runs/light", "/first/run/light?run=run-1"):
        assert client(role="").get(path).status_code == 401
        assert client().get(path, headers={"Origin": "http://evil.example"}).status_code == 403


def test_a_page_names_its_first_data_once_a_theme_and_nothing_in_its_address_becomes_markup():
    """The query is the page's own, quoted."""
    hostile = 'run="><script>alert(1)</script>&from=1'
    html = preload.links("/base/run", "/base", hostile)
    named = re.findall(r'data-rl-first href="([^"]*)" media="([^"]*)"', html)

    assert [media for _, media in named] == ["(prefers-color-scheme: light)", "(prefers-color-scheme: dark)"]
    assert [gate.html.unescape(href) for href, _ in named] == [
        f"/base/first/run/{x}?{hostile}" for x in ("light", "dark")
    ]
    assert re.findall(r"<script[^>]*>", html) == [
        f'<script type="module" async src="{preload.module_address("first.js", "/base")}">'
    ]
    assert "data-rl-first" not in preload.links("/rules")
    assert "<script" not in preload.links("/rules")
