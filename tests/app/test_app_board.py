"""Charts as data for their script: what is drawn, and what is told of it."""

import json

import numpy as np
import pytest
from rlwatch_app.board import LINEAR, LOG, Board, BoardChart, Cells, ChartLine, ChartSection, StepAxis, lines_of, wide
from rlwatch_app.charts import DARK, LIGHT
from rlwatch_app.overlays import COLOURS, line, overlay
from rlwatch_app.thinning import Branches, ThinnedCurve, thin


def curve(values):
    return thin(np.arange(len(values)), np.asarray(values, dtype=float), 240)


def drawn(*panels, **more):
    """What the script gets of the first panel."""
    board = Board("k", (0, 10), (0, 10), LIGHT, sections=[ChartSection("s", "S", panels)], **more)
    text = json.dumps(board.data(), allow_nan=False)
    return json.loads(text)["sections"][0]["panels"][0]


def panel(*lines, ends=(0.0, 10.0), **more):
    return BoardChart("m", "policy/entropy", lines, ends, **more)


@pytest.mark.parametrize("values", [[], [1.0], [np.nan] * 4, [1.0, np.nan, np.inf, -np.inf, 2.0], list(range(50))])
@pytest.mark.parametrize("ink", [LIGHT, DARK])
def test_a_chart_is_strict_json(values, ink):
    """No NaN reaches the browser, whatever was measured."""
    one = drawn(panel(ChartLine(curve(values), ink.line), band=(1e-308, 1e308)))
    assert len(one["lines"][0]["y"]) >= len([value for value in values if np.isfinite(value)])


def test_what_is_not_finite_is_marked_by_its_word_in_its_line():
    """Never a gap that looks like nothing, also in what a later attempt replaced."""
    old = ThinnedCurve(np.array([1]), np.array([1.0]), np.array([False]), ((2, "NaN"),))
    lines = lines_of(Branches(curve([1.0, np.inf, 2.0]), (old,)), LIGHT)
    assert drawn(panel(*lines))["bad"] == [[1, "Inf", ""], [2, "NaN", "replaced"]]


def test_the_line_breaks_at_a_bad_value():
    """A place without a value between its neighbours."""
    one = drawn(panel(ChartLine(curve([1.0, np.nan, 2.0]), LIGHT.line)))["lines"][0]
    assert one["y"] == [1, None, 2]


def test_replaced_attempts_are_pale_and_not_in_the_tooltip():
    """They are there, and do not compete."""
    kept, old = lines_of(Branches(curve([1, 2, 3]), (curve([3, 2, 1]),)), LIGHT)
    assert (kept.mute, old.mute) == (False, True)
    assert old.alpha < kept.alpha


def test_what_is_beyond_the_range_is_told_with_its_line():
    """Of each line that can be pointed at."""
    one = drawn(panel(line("a", 0, curve([1, 50, 2])), line("b", 1, curve([1, 2, -7]))))
    assert one["beyond"] == [[1, 50, "a", COLOURS[0]], [2, -7, "b", COLOURS[1]]]


def test_an_area_has_its_ends_at_the_places_of_its_line():
    """Low and high, with the line between them."""
    area = np.array([[0.5, 1.5, 2.5], [1.5, 2.5, 3.5]])
    one = drawn(panel(line("mean", 0, curve([1, 2, 3]), area)))["lines"][0]
    assert (one["low"], one["y"], one["high"]) == ([0.5, 1.5, 2.5], [1, 2, 3], [1.5, 2.5, 3.5])


def test_a_map_sends_values_levels_and_what_was_not_finite():
    """A cell without a value has none; colours are the script's."""
    values, bad = np.array([[1.0, np.nan, 123.456], [2.0, 2.0, 2.0]]), np.zeros((2, 3), dtype=bool)
    bad[1, 2] = True
    one = drawn(panel(cells=Cells(["a", "b"], (0, 5, 10, 15), values, np.array([1.0, np.nan]), bad)))["cells"]
    assert one == {
        "names": ["a", "b"],
        "starts": [0, 5, 10, 15],
        "values": [1.0, None, 123.0, 2.0, 2.0, 2.0],
        "usual": [1.0, None],
        "bad": [5],
    }


def test_places_on_another_axis_are_those_of_their_steps():
    """Lines, marks of what is not finite, and the range shown."""
    place = StepAxis("time", np.array([0.0, 10.0]), np.array([0.0, 1.0]))
    board = Board("k", (0, 5), (0, 10), LIGHT, place, sections=[ChartSection("s", "S", [panel(ChartLine(curve([1, np.nan, 2]), "#000000"))])])  # fmt: skip
    data = board.data()
    one = data["sections"][0]["panels"][0]
    assert (data["window"], data["whole"]) == ([0, 0.5], [0, 1])
    assert (one["lines"][0]["x"], one["bad"][0][0]) == ([0, 0.1, 0.2], 0.1)


@pytest.mark.parametrize(
    ("values", "logarithmic"),
    [([1.0] * 20 + [5000.0], True), ([-1.0] + [1.0] * 20 + [5000.0], False), ([1.0, 5000.0], False), ([], False)],
)
def test_only_what_a_linear_axis_would_flatten_is_on_a_logarithmic_one(values, logarithmic):
    """Positive values, and enough of them."""
    assert wide(np.array(values)) == logarithmic


def test_runs_in_one_chart_share_a_range_that_no_single_outlier_flattens():
    """What lasts is in sight whole; the range of a metric is never left."""
    lasting, spike = [1.0] * 50 + [30.0] * 50, [2.0] * 99
    spike[40] = 1000.0
    one = overlay("optim/grad_norm", [line("a", 0, curve(lasting)), line("b", 1, curve(spike))])
    assert one.scale == LINEAR
    assert 30.0 <= one.range[1] < 40.0
    assert one.range[0] >= 0.0
    grown = overlay("mine/odd", [line("a", 0, curve(np.geomspace(1e-3, 1e4, 100)))])
    assert grown.scale == LOG


def test_more_runs_than_colours_are_told_apart_by_dashes():
    """The same colour comes back dashed."""
    first, again = line("a", 0, curve([1])), line("b", len(COLOURS), curve([1]))
    assert (first.colour, first.dash) != (again.colour, again.dash)
    assert first.colour == again.colour


@pytest.mark.parametrize(("dark", "page"), [(False, "#FFFFFF"), (True, "#181715")])
def test_lines_can_be_told_from_the_page(dark, page):
    """At least 2.2 : 1 on its background, as Okabe and Ito's lightest orange has on white."""

    def light(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for place in range(len(COLOURS)):
        ends = sorted((light(line("a", place, curve([1]), dark=dark).colour), light(page)))
        assert (ends[1] + 0.05) / (ends[0] + 0.05) >= (5.0 if dark else 2.2)
