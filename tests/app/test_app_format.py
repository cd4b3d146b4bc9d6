"""Numbers, steps and ages read the same everywhere."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlwatch_app import format as fmt

THIN = "\u202f"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.41, "0.41"),
        (0.9999, "1"),
        (99.96, "100"),
        (12483.0, "12.5k"),
        (-0.487, "-0.487"),
        (1e-6, "1e-06"),
        (123456789.0, "123M"),
        (0.0, "0"),
        (-0.0, "-0"),
        (math.nan, "NaN"),
        (math.inf, "Inf"),
        (-math.inf, "-Inf"),
        (None, "-"),
    ],
)
def test_numbers_have_three_significant_digits(value, expected):
    """Also where rounding carries, and for what is not finite."""
    assert fmt.number(value) == expected


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_any_float_has_a_short_form_close_to_it(value):
    """No float is too odd to show, none is shown as another one."""
    text = fmt.number(value)
    assert 0 < len(text) <= 10
    if abs(value) < 1.79e308:  # beyond, three digits round to infinity
        shown = float(text.replace("k", "e3").replace("M", "e6"))
        assert math.isclose(shown, value, rel_tol=0.0051, abs_tol=5e-324)


def test_steps_are_exact_with_parted_thousands():
    """A step is never rounded."""
    assert fmt.step(1234567) == f"1{THIN}234{THIN}567"
    assert fmt.step(None) == "-"


@pytest.mark.parametrize(
    ("ago", "expected"),
    [(0.2, "now"), (5, f"5{THIN}s ago"), (59, f"59{THIN}s ago"), (200, f"3{THIN}min ago"), (7300, f"2{THIN}h ago")],
)
def test_ages_use_one_unit(ago, expected):
    """As a person would say it."""
    assert fmt.age(1000.0, 1000.0 + ago) == expected


def test_a_clock_that_runs_behind_reads_as_now():
    """Trainer and app may run on machines whose clocks disagree."""
    assert fmt.age(1000.0, 400.0) == "now"


def test_what_never_happened_has_no_age():
    """Neither None nor the epoch."""
    assert fmt.age(None, 10.0) == fmt.age(0.0, 10.0) == "-"


@given(st.text(max_size=300), st.integers(2, 50))
def test_shortened_text_fits_and_stays_on_one_line(text, limit):
    """Line ends and control characters cannot break a row."""
    short = fmt.shorten(text, limit)
    assert len(short) <= limit
    assert not any(ord(c) < 32 or ord(c) == 127 for c in short)


def test_a_name_cannot_turn_the_reading_direction():
    """U+202E would let one name pass for another."""
    assert fmt.shorten("a\u202eb", 9) == "a b"


def test_short_text_is_left_alone():
    """Nothing is cut that fits."""
    assert fmt.shorten("seed3", 5) == "seed3"


def test_unknown_kinds_are_readable():
    """A detector of somebody else's gets words too."""
    assert fmt.words("my_new_kind") == "my new kind"
