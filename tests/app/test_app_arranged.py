"""Pinned charts in their order, sizes and combinations, and named layouts of them."""

import json

import numpy as np
import pytest
from app_world import boards, no_traceback, write_run
from rlwatch_app import pinned
from rlwatch_app.principal import NotPermittedError, Principal
from test_app_notes import run_page

from rlwatch.errors import ConfigError
from rlwatch.ports import Series
from rlwatch.store.url import open_store

ANN = Principal("ann", "operator")


def arranged(*pins):
    """The pinned charts of run-1, for these texts in the address."""
    page = run_page()
    page.query_params["pin"] = list(pins)
    page.run()
    assert no_traceback(page)
    sections = json.loads(json.dumps(boards(page)["board-all"]))["sections"]
    return next((section for section in sections if section["key"] == "pinned"), {"panels": []})["panels"]


def test_two_metrics_on_one_chart_have_an_axis_each_and_a_ratio_is_that_of_every_row(store_dir):
    """In the order and the width of the address; a pin of a metric that the run has not is left out."""
    write_run(
        store_dir, metrics=lambda step: {"reward": step / 10, "kl": 0.5 * step, "entropy": 0.0 if step == 4 else 2.0}
    )

    wide, both, part = arranged("kl @3", "reward + kl", "reward ÷ kl @2", "gone", "kl ÷ gone")

    assert (wide["title"], wide["columns"], wide["pin"]) == ("policy/kl_ref", 3, "kl @3")
    assert [one["title"] for one in both["pair"]] == ["reward/mean", "policy/kl_ref"]
    assert both["pair"][0]["range"] != both["pair"][1]["range"]
    assert (part["title"], part["columns"]) == ("reward/mean ÷ policy/kl_ref", 2)
    assert (wide["family"], part["family"]) == ("Trust region", "")  # marked by the alarms of its family, or by all
    assert set(part["lines"][0]["y"]) == {0.2}
    [by_zero] = arranged("reward ÷ entropy")
    assert by_zero["bad"] == [[4, "Inf", ""]]


def test_a_ratio_is_over_the_rows_of_both():
    """By row, not by step: a step that was run twice has two."""

    def series(name, seqs, values):
        at = np.array(seqs)
        return Series(name, at, np.array(values, dtype=float), np.ones_like(at), at)

    made = pinned.ratio("r", series("a", [1, 2, 3, 5], [2, 4, 0, 1]), series("b", [2, 3, 4, 5], [2, 0, 7, -0.5]))
    assert made.seqs.tolist() == [2, 3, 5]
    assert np.array_equal(made.values, [2.0, np.nan, -2.0], equal_nan=True)


def test_a_layout_is_kept_by_name_for_the_project_and_used_by_a_click(store_dir):
    """For all users; using it puts its charts into the address."""
    write_run(store_dir)
    store = open_store(str(store_dir))
    pinned.keep_layout(store, "math", " KL   watch ", ["kl @2", "reward"], ANN)
    pinned.keep_layout(store, "other", "theirs", ["kl"], ANN)
    page = run_page().run()
    page.button(key="layout-KL watch").click().run()
    assert no_traceback(page)
    assert page.query_params["pin"] == ["kl @2", "reward"]
    assert pinned.layouts_of("math") == {"KL watch": ("kl @2", "reward")}
    page.text_input(key="layout-name").set_value("mine").run()
    page.button(key="layout-save").click().run()
    page.button(key="layout-remove-KL watch").click().run()
    assert pinned.layouts_of("math") == {"mine": ("kl @2", "reward")}


def test_a_layout_needs_a_name_and_someone_who_may(store_dir):
    """Words, and nothing kept."""
    write_run(store_dir)
    store = open_store(str(store_dir))
    for name in ("", " ", "x" * 61):
        with pytest.raises(ConfigError, match="name"):
            pinned.keep_layout(store, "math", name, ["kl"], ANN)
    with pytest.raises(NotPermittedError):
        pinned.keep_layout(store, "math", "mine", ["kl"], Principal("eve", "viewer"))
    assert store.audit() == []
