"""Numbers, ages, names and other people's text: the same on every face."""

from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.wording import THIN, duration, el, for_markdown, for_terminal, number, one_line, step


@given(st.text())
def test_cleaned_text_never_holds_an_escape_or_control_character(text: str) -> None:
    """Whatever a run is called, the terminal is not commanded."""
    assert not [char for char in for_terminal(text) if char != "\n" and (ord(char) < 32 or 127 <= ord(char) < 160)]


@given(st.text(alphabet=st.characters(exclude_categories=["C", "Z"])))
def test_ordinary_text_is_left_alone(text: str) -> None:
    """Only what cannot be seen is replaced."""
    assert for_terminal(text) == text


def test_a_mark_that_reverses_the_reading_direction_is_shown_as_a_replacement() -> None:
    """A name must not be able to look like another one."""
    assert for_terminal("abc\u202edcba") == "abc\ufffddcba"


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
    [
        (0, "0 ms"),
        (5, "5 s"),
        (59, "59 s"),
        (119, "2 min"),
        (3599, "1 h"),
        (7200, "2 h"),
        (172_800, "2 d"),
        (-5, "0 ms"),
    ],
)
def test_an_age_has_one_unit(seconds: float, shown: str) -> None:
    """A clock that is a little behind gives nothing, not a negative age."""
    assert duration(seconds) == shown.replace(" ", THIN)


@given(st.text(), st.integers(min_value=1, max_value=40))
def test_one_line_is_one_line_and_no_longer_than_asked(text: str, most: int) -> None:
    """A message with line breaks cannot break a table."""
    shown = one_line(text, most)

    assert len(shown) <= most
    assert "\n" not in shown


@given(st.text())
def test_no_face_shows_a_character_that_nobody_sees(text: str) -> None:
    """A name that turns the reading direction, or moves the cursor, looks the same everywhere: replaced."""
    for shown in (for_terminal(text), for_markdown(text), str(el("b", text, title=text))):
        assert not [c for c in shown if c not in "\n\t" and unicodedata.category(c) in {"Cc", "Cf", "Cs", "Co", "Cn"}]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_number_has_a_short_form_close_to_it(value: float) -> None:
    """No float is too odd to show, none is shown as another one."""
    text = number(value)

    assert len(text) <= 10
    if abs(value) < 1.79e308:  # beyond, three digits round to infinity
        shown = float(text.replace("k", "e3").replace("M", "e6"))
        assert math.isclose(shown, value, rel_tol=0.0051, abs_tol=5e-324)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1234.0, "1234"),
        (9999.4, "9999"),
        (9999.6, "10k"),
        (12483.0, "12.5k"),
        (999.96, "1000"),
        (1e6, "1M"),
        (9.994e8, "999M"),
        (1e9, "1e+09"),
        (-0.487, "-0.487"),
    ],
)
def test_thousands_and_millions_have_letters(value: float, shown: str) -> None:
    """Four digits are as short as three and a letter, so a whole number of four is exact."""
    assert number(value) == shown
