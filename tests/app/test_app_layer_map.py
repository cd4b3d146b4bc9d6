"""The heat map of layers: nothing that spiked is thinned away, and a hundred layers are one picture."""

import json
import math

import numpy as np
import pytest
from app_world import board, charts, healthy, no_traceback, panels, run_page, write_run
from rlwatch_app import run_layers
from rlwatch_app.charts import DARK, LIGHT
from rlwatch_app.run_layers import COLUMNS, MOST_ROWS, LayerRow, in_model_order, layer_row, map_option

from rlwatch.ports import Series


def layer(name, values, window=None, steps=None):
    values = np.asarray(values, dtype=float)
    steps = np.arange(len(values)) if steps is None else np.asarray(steps)
    ones = np.ones(len(values), dtype=np.int64)
    window = window or (0, len(values) - 1)
    return layer_row(name, Series(name, steps, values, ones, np.arange(len(values))), {1: 0}, window)


def drawn(rows, window, ink=LIGHT):
    shown = run_layers.layer_map(rows, window)
    return shown, map_option(shown, ink)


def cells(option):
    """(column, row) -> the colour and the words of a cell."""
    found = {}
    for cell in option["series"][0]["data"]:
        x, y, colour, *words = cell["value"] if isinstance(cell, dict) else cell
        found[(x, y)] = (colour, words)
    return found


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


def test_a_cell_is_the_norm_over_the_layers_median():
    """Usually 2, once 20: ten times, at the end of the scale; a fifth of it is below."""
    option = drawn([layer("a", [2.0, 2.0, 20.0, 2.0, 0.4, 2.0])], (0, 5))[1]
    colours = {x: colour for (x, _), (colour, _) in cells(option).items()}
    assert colours == {0: 0.0, 1: 0.0, 2: 1.0, 3: 0.0, 4: -0.7, 5: 0.0}
    assert cells(option)[(2, 0)][1] == ["a", "2", "20", "10"]


def test_factors_beyond_the_scale_keep_its_last_colour_and_tell_their_number():
    """A thousand times is as red as ten times; the tooltip says it."""
    option = drawn([layer("a", [1.0, 1.0, 1000.0])], (0, 2))[1]
    assert cells(option)[(2, 0)] == (1.0, ["a", "2", "1000", "1000"])


@pytest.mark.parametrize("length", [50, 500, 20_000])
def test_a_spike_of_one_step_is_seen_in_a_run_of_any_length(length):
    """In the one column its step lies in."""
    values = np.ones(length)
    at = length // 3
    values[at] = 50.0
    shown, option = drawn([layer("a", values), layer("b", np.ones(length))], (0, length - 1))
    red = [place for place, (colour, _) in cells(option).items() if colour > 0.5]
    assert shown.norms.shape == (2, min(COLUMNS, length))
    [(x, y)] = red
    assert (y, shown.starts[x] <= at < shown.starts[x + 1]) == (0, True)


def test_a_norm_that_is_no_number_has_a_colour_of_its_own():
    """NaN and Inf, even where the column holds finite norms as well; the subtitle says what the colour means."""
    shown, option = drawn([layer("a", [1.0, math.nan, 1.0, math.inf]), layer("b", np.ones(4))], (0, 3))
    assert shown.bad.tolist() == [[False, True, False, True], [False] * 4]
    special = [cell for cell in option["series"][0]["data"] if isinstance(cell, dict)]
    assert [(cell["value"][0], cell["value"][1], cell["visualMap"]) for cell in special] == [
        (1, 0, False),
        (3, 0, False),
    ]
    assert "NaN or Inf" in option["title"]["subtext"]
    assert "NaN" not in drawn([layer("b", np.ones(4))], (0, 3))[1]["title"]["subtext"]


def test_a_layer_that_was_not_measured_is_empty_not_low():
    """No cell at all, where it has no norm or only zeros."""
    option = drawn([layer("a", [0.0, 0.0]), layer("b", [1.0, 1.0]), layer("c", [])], (0, 1))[1]
    assert {y for _, y in cells(option)} == {1}


def test_only_the_steps_shown_count():
    """Outside the window nothing is drawn, and the median is that of the window."""
    values = [100.0] * 10 + [1.0] * 10
    rows = [layer("a", values, (10, 19))]
    shown, option = drawn(rows, (10, 19))
    assert rows[0].usual == 1.0
    assert shown.starts == tuple(range(10, 21))
    assert {colour for colour, _ in cells(option).values()} == {0.0}


def test_silent_batches_do_not_move_the_usual_norm():
    """Zeros are no level."""
    assert layer("a", [0.0] * 10 + [3.0] * 5).usual == 3.0


def test_too_many_layers_leave_those_out_that_never_rose():
    """The furthest above their usual are kept, in model order, and the rest is counted."""
    rows = [layer(f"layers.{i}", [1.0, 1.0, 9.0 if i == 300 else 1.0 + i / 1000]) for i in range(400)]
    shown, option = drawn(rows, (0, 2))
    names = [one.name for one in shown.rows]
    assert len(names) == MOST_ROWS
    assert "layers.300" in names
    assert names == in_model_order(names)
    assert "280 more" in option["title"]["subtext"]


@pytest.mark.parametrize("count", [1, 4, 60, 120])
def test_labels_have_room(count):
    """Few layers are all named; of many every second or third is, in rows of at least 11 pixels."""
    option = drawn([layer(f"model.layers.{i}", [1.0, 2.0]) for i in range(count)], (0, 1))[1]
    hidden, labels = (axis["data"] for axis in option["yAxis"])
    each = (run_layers.map_height(count) - run_layers.HEAD_PX - run_layers.FOOT_PX) / count
    every = labels.index(next(filter(None, labels[1:]), labels[0])) or 1
    assert len(hidden) == len(labels) == count
    assert each * every >= 10 or count == 1
    assert labels[0] == "layers.0"


@pytest.mark.parametrize("ink", [LIGHT, DARK])
@pytest.mark.parametrize("window", [(0, 0), (0, 5), (3, 900)])
def test_an_option_is_strict_json(ink, window):
    """Whatever was measured, also where nothing was."""
    rows = [
        layer("<b>", [1.0, math.nan, 0.0, 1e308, 1e-308, -math.inf], window),
        LayerRow("x", None, layer("x", []).curve),
    ]
    json.dumps(drawn(rows, window, ink)[1], allow_nan=False)


def layered(step):
    return {**healthy(step), **{f"grad_layer/model.layers.{i}": 1.0 + i + step % 3 for i in range(12)}}


def test_the_run_page_shows_one_map_and_no_chart_per_layer(store_dir):
    """Below the charts of its optimisation; the layers' own series are not offered as charts."""
    write_run(store_dir, metrics=lambda step: {**layered(step), "layers/rise": 1.0 + step % 2})
    page = run_page()
    assert no_traceback(page)
    option = charts(page)["chart-layers"]
    assert len(option["yAxis"][0]["data"]) == 12
    titles = list(panels(page))
    assert "layers/rise" in titles
    assert not [title for title in titles if title.startswith("grad_layer/")]
    assert not any(section["more"] for section in board(page)["sections"])


def test_a_run_without_layers_has_no_map(store_dir):
    """Nothing empty stands in its place."""
    write_run(store_dir)
    assert "chart-layers" not in charts(run_page())
