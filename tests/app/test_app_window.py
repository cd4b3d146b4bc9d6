"""The range of steps lives in the address."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlwatch_app import charts
from rlwatch_app.charts import StepRange


def test_without_parameters_everything_is_shown_and_followed():
    """The newest step stays in sight."""
    assert charts.read_window({}, 0, 100) == StepRange(0, 100, follows=True)


def test_a_chosen_end_stays_while_the_run_goes_on():
    """Zoom survives a refresh."""
    assert charts.read_window({"from": "10", "to": "50"}, 0, 100) == StepRange(10, 50, follows=False)
    assert charts.read_window({"from": "10", "to": "50"}, 0, 900) == StepRange(10, 50, follows=False)


def test_a_chosen_start_alone_follows_the_newest():
    """As in "from step 4 000 on"."""
    assert charts.read_window({"from": "40"}, 0, 120) == StepRange(40, 120, follows=True)


@pytest.mark.parametrize("bad", ["", "x", "1e3", "nan", "None"])
def test_nonsense_reads_as_no_limit(bad):
    """An address may be mistyped."""
    assert charts.read_window({"from": bad, "to": bad}, 0, 100) == StepRange(0, 100, follows=True)


@given(st.integers(-10, 300), st.integers(-10, 300), st.integers(0, 50), st.integers(0, 200))
def test_the_window_is_never_upside_down_nor_outside(low, high, first, length):
    """Whatever the address says."""
    last = first + length
    read = charts.read_window({"from": str(low), "to": str(high)}, first, last)
    assert first <= read.low <= read.high <= last


def test_the_sliders_ends_mean_no_limit():
    """And leave the address short."""
    params = {"run": "r", "from": "5", "to": "9"}
    charts.write_window(params, 0, 100, 0, 100)
    assert params == {"run": "r"}


def test_a_written_window_is_read_back():
    """Round trip."""
    params = {}
    charts.write_window(params, 20, 60, 0, 100)
    assert charts.read_window(params, 0, 100) == StepRange(20, 60, follows=False)


@given(st.integers(0, 10_000_000))
def test_the_sliders_end_is_near_and_rarely_moves(last):
    """At most an eighth (or ten steps) of the slider is empty."""
    end = charts.slider_end(last)
    assert last <= end <= last + max(10, last // 8 + 1)
    assert charts.slider_end(end) == end


def test_the_sliders_end_moves_a_few_dozen_times_in_a_long_run():
    """Each move redraws the slider."""
    assert len({charts.slider_end(n) for n in range(1, 100_000)}) < 130
