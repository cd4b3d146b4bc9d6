"""Heights of a chart's values, and axes whose labels can be read however small the numbers are."""

import numpy as np
import pytest
from rlwatch_app.charts import LIGHT, PLAIN, Plot, family_option, points, scale_of
from rlwatch_app.thinning import Branches, Curve, thin


def a_curve(values):
    return thin(np.arange(len(values)), np.asarray(values, dtype=float), 99)


def drawn(values, **more):
    """The first axis, the line and the title of a panel of these values."""
    plot = Plot(
        "optim/lr", "learning_rate", Branches(a_curve(values), more.pop("replaced", ())), "Optimisation", **more
    )
    made = family_option([plot], [], (0, 30), LIGHT)
    return made["yAxis"][0], made["series"][0], made["title"][0]["subtext"], made


SPREAD = [2e-6] * 20 + [3e-2]


def test_a_logarithmic_axis_of_tiny_numbers_is_labelled_by_exponents():
    """1e-6 where ECharts would write 0.000001; every whole exponent is a power of ten."""
    axis, line, note, _ = drawn(SPREAD)

    assert (axis["type"], axis["minInterval"], axis["axisLabel"]["formatter"]) == ("value", 1, "1e{value}")
    assert note == "learning_rate · log scale"
    assert line["data"][0] == [0, pytest.approx(np.log10(2e-6), abs=1e-6), 2e-6]


def test_a_logarithmic_axis_of_common_numbers_stays_as_it_is():
    """0.1, 1, 10: nothing is easier to read."""
    axis, line, _, _ = drawn([1.0] * 20 + [5000.0])

    assert axis["type"] == "log"
    assert "formatter" not in axis["axisLabel"]
    assert line["data"][0] == [0, 1.0]


def test_tiny_numbers_on_a_linear_axis_are_multiples_of_a_power_of_ten():
    """The power is said once, in the title."""
    axis, line, note, _ = drawn([0.0, 6.15e-7, 1.23e-6])

    assert (axis["type"], note) == ("value", "learning_rate · × 1e−6")
    assert line["data"] == [[0, 0.0, 0.0], [1, 0.615, 6.15e-7], [2, 1.23, 1.23e-6]]


def test_the_value_a_person_reads_off_is_the_one_that_was_measured():
    """Not its height."""
    for values in (SPREAD, [0.0, 1.23e-6]):
        _, line, _, _ = drawn(values)
        assert line["encode"] == {"x": 0, "y": 1, "tooltip": [2]}
        assert [point[2] for point in line["data"]] == values
    assert "encode" not in drawn([1.0, 2.0])[1]


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [1e-4, -1e-4], [0.5], [2e6, 3e6]])
def test_numbers_that_read_well_are_drawn_as_they_are(values):
    """And so are none at all."""
    assert scale_of(a_curve(values)) == PLAIN


@pytest.mark.parametrize("largest", [9.99e-5, 1e-5, 1.0000001e-6, 9.999999e-9, 3e-300, -2e-7])
def test_the_largest_of_tiny_numbers_is_drawn_between_1_and_10(largest):
    """By its size; a negative one counts as much."""
    assert 1 <= abs(scale_of(a_curve([0.0, largest])).height(largest)) <= 10


def test_baseline_band_and_replaced_attempts_are_drawn_on_the_same_scale():
    """What has no logarithm has no place."""
    old = Curve(np.arange(2), np.array([1e-3, -1.0]), np.array([False, False]))
    _, line, _, made = drawn(SPREAD, baseline=1e-3, band=(1e-4, 1e-2), replaced=(old,))
    dimmed = next(series for series in made["series"] if series["name"].endswith("(replaced)"))

    assert line["markLine"]["data"][0]["yAxis"] == -3.0
    assert line["markArea"]["data"] == [[{"yAxis": -4.0}, {"yAxis": -2.0}]]
    assert dimmed["data"] == [[0, -3.0, 1e-3], [1, None, -1.0]]
    _, line, _, _ = drawn(SPREAD, baseline=0.0, band=(0.0, 1e-2))
    assert line["markLine"]["data"] == []
    assert "markArea" not in line


def test_a_line_breaks_on_every_scale():
    """A pair without a height between its neighbours."""
    curve = a_curve([1e-6, np.nan, 2e-6])

    assert points(curve, scale_of(curve)) == [[0, 1.0, 1e-6], [2, None], [2, 2.0, 2e-6]]
