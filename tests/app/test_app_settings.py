"""The settings of a run: searched, against the last run of the project, and how long it has left."""

import re

import pytest
from app_world import html, no_traceback, write_run
from rlwatch_app.run_about import differing, last_run, planned_steps
from test_app_notes import run_page

from rlwatch.records import RunInfo


def test_settings_are_searched_and_set_against_the_last_run_of_the_project(store_dir):
    """By name and by value; a run of another project is none to compare with."""
    write_run(store_dir, "before", age_s=900, config={"lr": 1e-6, "seed": 1})
    write_run(store_dir, "other", age_s=300, project="code", config={"lr": 9.0})
    write_run(store_dir, "run-1", config={"lr": 3e-6, "seed": 1, "optim": {"name": "adamw"}})
    page = run_page().run()
    assert no_traceback(page)
    assert "adamw" in html(page)
    assert ", was " not in html(page)
    page.text_input(key="settings-search").set_value("OPTIM").run()
    assert "adamw" in html(page)
    assert "<dt>seed</dt>" not in html(page)
    page.text_input(key="settings-search").set_value("").run()
    page.toggle(key="settings-differ").set_value(True).run()
    assert no_traceback(page)
    assert "3e-06, was 1e-06" in html(page)
    assert "<dt>seed</dt>" not in html(page)


def test_the_first_run_of_a_project_has_none_before_it(store_dir):
    """And a setting that only one of two has is a difference."""
    one, two = (RunInfo(name, "math", created_at=at, config=config) for name, at, config in [("a", 1.0, {}), ("b", 2.0, {"x": 1})])  # fmt: skip
    assert last_run(one, [one, two]) is None
    assert last_run(two, [one, two]) is one
    assert list(differing(one, two)) == ["x"]


@pytest.mark.parametrize(
    ("config", "planned"),
    [({"max_steps": 500}, 500), ({"trainer": {"total_training_steps": 7.0}}, 7), ({"max_steps": -1}, None), ({"max_steps": True}, None), ({"max_steps": "many"}, None), ({}, None)],
)  # fmt: skip
def test_the_end_of_a_run_is_read_from_its_settings(config, planned):
    """Only a number of steps counts."""
    assert planned_steps(RunInfo("r", config=config)) == planned


def test_a_live_run_says_how_long_it_has_left(store_dir):
    """Steps left times the time of one; an end that was passed is none."""
    write_run(store_dir, "run-1", config={"max_steps": 750})
    page = run_page().run()
    assert "30 of 750" in html(page)
    assert re.search(r"about (60\Wmin|1\Wh|1\.0\Wh) left", html(page))
    write_run(store_dir, "run-2", config={"max_steps": 20})
    page = run_page()
    page.query_params["run"] = "run-2"
    page.run()
    assert "of 20" not in html(page)
    assert " left" not in html(page)
