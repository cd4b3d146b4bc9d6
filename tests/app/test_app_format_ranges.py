"""Shares, chances, lengths of time: over their whole range, and what is no number."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlwatch_app import format as fmt
from rlwatch_app.format import event_words, evidence_line, evidence_lines

from rlwatch.records import Event

THIN = fmt.THIN
UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
NOT_FINITE = [(math.nan, "NaN"), (math.inf, "Inf"), (-math.inf, "-Inf")]


def seconds_of(text):
    amount, unit = text.split(THIN)
    return float(amount) * UNITS[unit]


@given(st.floats(0.0, 1e9))
def test_a_length_of_time_is_reported_within_its_rounding(seconds):
    """Half of the last digit told, and never as much as one of the next unit."""
    told = fmt.duration(seconds)
    amount, unit = told.split(THIN)
    last = 0.1 if "." in amount else 1.0

    assert seconds_of(told) == pytest.approx(seconds, abs=0.5001 * last * UNITS[unit])
    assert float(amount) < {"ms": 1000, "s": 60, "min": 60, "h": 24, "d": math.inf}[unit]


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (-3.0, "0 ms"),
        (0.0, "0 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (3599.0, "1 h"),
        (86_399.0, "1 d"),
        (10 * 86_400.0, "10 d"),
    ],
)
def test_a_length_that_rounds_up_to_the_next_unit_is_told_in_it(seconds, told):
    """Nobody says sixty minutes, or a thousand milliseconds."""
    assert fmt.duration(seconds) == told.replace(" ", THIN)


@given(st.floats(0.0, 1e8), st.floats(0.0, 1e8))
def test_what_lasts_longer_is_not_shown_as_shorter(a, b):
    """Over all units."""
    short, long = sorted((a, b))

    assert seconds_of(fmt.duration(short)) <= seconds_of(fmt.duration(long))


@pytest.mark.parametrize("odd", [None, math.nan, math.inf, -math.inf])
def test_a_time_that_is_none_is_shown_as_nothing(odd):
    """Neither a length nor an age, nor a moment in the future."""
    assert fmt.duration(odd) == fmt.age(odd, 1e9) == fmt.NOTHING


@given(st.floats(0.0, 1.0))
def test_a_chance_is_never_shown_as_certain(value):
    """Whole per cents between 1 and 99; beyond, only that it is."""
    told = fmt.chance(value)
    shown = int(re.fullmatch(r"[<>]?(\d+)%", told)[1])

    assert 1 <= shown <= 99
    assert told[0] == "<" if value < 0.01 else told[0] == ">" if value > 0.99 else abs(shown - 100 * value) <= 0.5001


@pytest.mark.parametrize(("value", "told"), NOT_FINITE)
def test_what_is_no_chance_and_no_share_is_called_by_its_name(value, told):
    """NaN is not more than 99 %."""
    assert fmt.chance(value) == fmt.percent(value) == fmt.number(value) == told


@given(st.floats(-2.0, 2.0))
def test_a_share_is_told_to_two_digits(share):
    """Of per cents; three where it is nearly all."""
    told = float(fmt.percent(share).removesuffix("%").replace("-", "-"))

    assert told == pytest.approx(100 * share, rel=0.051, abs=1e-300)


@given(st.integers(0, 10**15))
def test_counts_agree_with_their_noun(count):
    """One is one, none is many; the number is exact."""
    told, noun = fmt.plural(count, "try", "tries").split(" ")

    assert int(told.replace(THIN, "")) == count
    assert noun == ("try" if count == 1 else "tries")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=5), st.integers(2, 80))
def test_any_body_is_lines_of_text(body, limit):
    """One for each entry, in order; together at most as long as asked, on one line."""
    assert [name for name, _ in evidence_lines(body)] == [name.replace("_", " ") for name in body]
    assert all(isinstance(told, str) for _, told in evidence_lines(body))
    assert len(evidence_line(body, limit)) <= limit
    assert not any(ord(c) < 32 for c in evidence_line(body, limit))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (True, "yes"),
        (False, "no"),
        (None, "none"),
        (1, "1"),
        (0.5, "0.5"),
        *NOT_FINITE,
        ("a", "a"),
        ([1, "ü"], "1, ü"),
        ({"a_b": [0.5, None], "c": {}}, "a b 0.5, none, c none"),
    ],
)
def test_each_kind_of_value_is_distinguished(value, told):
    """A truth value is no number, nothing is no text."""
    assert evidence_lines({"x": value}) == [("x", told)]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            {"command": "lower-lr", "by": "ann", "why": "spikes", "report": {"summary": "3e-6 to 1.5e-6"}},
            ("lower learning rate", "3e-6 to 1.5e-6 · by ann · spikes"),
        ),
        ({"command": "pause", "report": {"held": True}}, ("pause", "held yes")),
        ({"command": "pause", "report": {"summary": ""}, "by": None}, ("pause", "summary ")),
        ({"command": "pause", "report": "text"}, ("command", "command pause · report text")),
        ({"report": {}}, ("command", "")),
    ],
)
def test_a_command_is_described_by_what_came_of_it(body, told):
    """By whom and why where that is known; a body of another shape entry by entry."""
    assert event_words(Event("command", 7, body)) == told


def test_another_event_is_described_by_its_entries():
    """A report in it is one of them."""
    assert event_words(Event("reference_reset", 7, {"kl": 0.31, "report": {"a": 1}})) == (
        "reference reset",
        "kl 0.31 · report a 1",
    )
