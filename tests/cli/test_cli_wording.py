"""How numbers, ages and names are shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.cli.wording import THIN, age, clean, number, one_line, status, step
from rlwatch.control.liveness import Pace, Pause, Sign, last_sign
from rlwatch.records import RunInfo, RunState


@given(st.text())
def test_cleaned_text_never_holds_an_escape_or_control_character(text: str) -> None:
    """Whatever a run is called, the terminal is not commanded."""
    assert not [char for char in clean(text) if char != "\n" and (ord(char) < 32 or 127 <= ord(char) < 160)]


@given(st.text(alphabet=st.characters(exclude_categories=["C", "Z"])))
def test_ordinary_text_is_left_alone(text: str) -> None:
    """Only what cannot be seen is replaced."""
    assert clean(text) == text


def test_a_mark_that_reverses_the_reading_direction_is_shown_as_a_replacement() -> None:
    """A name must not be able to look like another one."""
    assert clean("abc\u202edcba") == "abc\ufffddcba"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (0.00001234, "1.23e-05"),
        (float("nan"), "NaN"),
        (float("inf"), "Inf"),
        (float("-inf"), "-Inf"),
        (None, "-"),
    ],
)
def test_missing_nan_and_the_infinities_look_different(value: float | None, shown: str) -> None:
    """Four different things have four different words."""
    assert number(value) == shown


def test_steps_have_narrow_spaces_between_thousands() -> None:
    """So that 1 000 000 and 100 000 can be told apart."""
    assert step(1_000_000) == f"1{THIN}000{THIN}000"
    assert step(999) == "999"
    assert step(None) == "-"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "119 min"), (7200, "2 h"), (172_800, "2 days"), (-5, "0 s")],
)
def test_an_age_has_one_unit(seconds: float, shown: str) -> None:
    """A clock that is a little behind gives 0 s, not a negative age."""
    assert age(seconds) == shown


def test_a_running_run_is_stale_or_paused_where_its_signs_say_so() -> None:
    """The writer's word, doubted."""
    run = RunInfo("r", created_at=1000.0, heartbeat_at=5000.0, last_ts=4000.0)

    assert last_sign(run) == 5000.0
    assert last_sign(RunInfo("r")) is None
    assert [status(run), status(run, Sign(Pace())), status(run, Sign(Pace(), silent_s=700.0))] == [
        "running",
        "running",
        "stale",
    ]
    assert status(run, Sign(Pace(), Pause(5, "ann", "", 6000.0))) == "paused"


@pytest.mark.parametrize("state", [RunState.FINISHED, RunState.CRASHED])
def test_an_ended_run_is_what_its_writer_said(state: RunState) -> None:
    """However long ago."""
    assert status(RunInfo("r", state=state, heartbeat_at=1.0), Sign(Pace(), silent_s=1e9)) == state.value


@given(st.text(), st.integers(min_value=1, max_value=40))
def test_one_line_is_one_line_and_no_longer_than_asked(text: str, most: int) -> None:
    """A message with line breaks cannot break a table."""
    shown = one_line(text, most)

    assert len(shown) <= most
    assert "\n" not in shown
