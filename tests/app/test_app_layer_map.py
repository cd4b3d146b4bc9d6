"""The heat map of layers: nothing that spiked is thinned away, and a hundred layers are one picture."""

import math

import numpy as np
import pytest
from app_world import board, healthy, no_traceback, panels, run_page, write_run
from rlwatch_app.run_charts import COLUMNS, MOST_ROWS, LayerRow, in_model_order, layer_map, map_height, map_section
from rlwatch_app.thinning import thin


def layer(name, values, first=0):
    values = np.asarray(values, dtype=float)
    return LayerRow(name, thin(np.arange(first, first + len(values)), values, 240))


def test_layers_are_in_the_order_of_the_model():
    """Embeddings at the top, numbers as numbers, heads at the bottom."""
    names = ["lm_head", "model.layers.10", "model.embed_tokens", "model.layers.2", "model.norm", "h.1"]
    assert in_model_order(names) == [
        "model.embed_tokens",
        "h.1",
        "model.layers.2",
        "model.layers.10",
        "lm_head",
        "model.norm",
    ]


def test_a_cell_is_the_highest_norm_and_its_level_the_layers_median():
    """Usually 2, once 20: ten times as much."""
    shown = layer_map([layer("a", [2.0, 2.0, 20.0, 2.0, 0.4, 2.0])], (0, 5))
    assert shown.cells.values.tolist() == [[2.0, 2.0, 20.0, 2.0, 0.4, 2.0]]
    assert shown.times[0] == pytest.approx([1, 1, 10, 1, 0.2, 1])


@pytest.mark.parametrize("length", [50, 500, 20_000])
def test_a_spike_of_one_step_is_seen_in_a_run_of_any_length(length):
    """In the one column its step lies in."""
    values = np.ones(length)
    at = length // 3
    values[at] = 50.0
    shown = layer_map([layer("a", values), layer("b", np.ones(length))], (0, length - 1))
    assert shown.cells.values.shape == (2, min(COLUMNS, length))
    [(row, column)] = np.argwhere(shown.times > 5).tolist()
    starts = shown.cells.starts
    assert (row, starts[column] <= at < starts[column + 1]) == (0, True)


def test_the_level_of_a_long_run_is_the_middle_of_its_norms():
    """Drawn from their extremes: as far above the lowest as below the highest, where norms vary by factors."""
    norms = np.exp(np.random.default_rng(0).normal(size=50_000) * 0.5)
    assert layer_map([layer("a", norms)], (0, 49_999)).cells.usual[0] == pytest.approx(1.0, abs=0.1)


def test_a_norm_that_is_no_number_has_a_mark_of_its_own():
    """NaN and Inf, even where the column holds finite norms as well; the words beside the title say its colour."""
    shown = layer_map([layer("a", [1.0, math.nan, 1.0, math.inf]), layer("b", np.ones(4))], (0, 3))
    assert shown.cells.bad.tolist() == [[False, True, False, True], [False] * 4]
    assert "NaN or Inf" in map_section(shown).panels[0].sub
    assert "NaN" not in map_section(layer_map([layer("b", np.ones(4))], (0, 3))).panels[0].sub


def test_a_layer_that_was_not_measured_is_empty_not_low():
    """No cell at all, where it has no norm or only zeros."""
    cells = layer_map([layer("a", [0.0, 0.0]), layer("b", [1.0, 1.0]), layer("c", [])], (0, 1)).cells
    assert np.isnan(cells.values).all(axis=1).tolist() == [True, False, True]


def test_columns_are_the_steps_shown():
    """One a step of a short window."""
    assert layer_map([layer("a", [1.0] * 10, 10)], (10, 19)).cells.starts == tuple(range(10, 21))


def test_silent_batches_do_not_move_the_usual_norm():
    """Zeros are no level."""
    assert layer_map([layer("a", [0.0] * 10 + [3.0] * 5)], (0, 14)).cells.usual[0] == pytest.approx(3.0)


def test_too_many_layers_leave_those_out_that_never_rose():
    """The furthest above their usual are kept, in model order, and the rest is counted."""
    rows = [layer(f"layers.{i}", [1.0, 1.0, 9.0 if i == 300 else 1.0 + i / 1000]) for i in range(400)]
    shown = layer_map(rows, (0, 2))
    names = shown.cells.names
    assert len(names) == MOST_ROWS
    assert "layers.300" in names
    assert names == in_model_order(names)
    assert "280 more" in map_section(shown).panels[0].sub


@pytest.mark.parametrize("count", [1, 4, 60, 120])
def test_rows_can_be_told_apart(count):
    """At least five pixels each, and no more than a screen in all."""
    assert 5 * count <= map_height(count) <= 640


def test_a_map_of_nothing_is_no_error():
    """A layer without a norm, a run of one step."""
    assert np.isnan(layer_map([layer("x", [])], (0, 0)).cells.usual).all()


def layered(step):
    return {**healthy(step), **{f"grad_layer/model.layers.{i}": 1.0 + i + step % 3 for i in range(12)}}


def layers_of(page):
    return [section for section in board(page)["sections"] if section["key"] == "layers"]


def test_the_run_page_shows_one_map_and_no_chart_per_layer(store_dir):
    """Below the charts; the layers' own series are not offered as charts."""
    told = {"layers/heterogeneity": 0.25}
    write_run(store_dir, metrics=lambda step: {**layered(step), **told, "layers/rise": 1.0 + step % 2})
    page = run_page()
    assert no_traceback(page)
    [section] = layers_of(page)
    assert len(section["panels"][0]["cells"]["names"]) == 12
    assert [panel["title"] for panel in section["panels"][1:]] == ["heterogeneity of the layers"]
    assert set(filter(None, section["panels"][1]["lines"][0]["y"])) == {0.25}
    titles = list(panels(page))
    assert "layers/rise" in titles
    assert not [title for title in titles if title.startswith("grad_layer/")]
    assert not any(section["more"] for section in board(page)["sections"])


def test_where_no_heterogeneity_is_known_the_map_stands_alone(store_dir):
    """No empty chart below it."""
    write_run(store_dir, metrics=layered)
    [section] = layers_of(run_page())
    assert len(section["panels"]) == 1


def test_the_map_shows_the_steps_that_the_charts_show(store_dir):
    """A range in the address is its range, too."""
    write_run(store_dir, metrics=layered)
    [section] = layers_of(run_page(from_=10, to=19))
    assert section["panels"][0]["cells"]["starts"] == list(range(10, 21))


def test_a_run_without_layers_has_no_map(store_dir):
    """Nothing empty stands in its place."""
    write_run(store_dir)
    assert layers_of(run_page()) == []
