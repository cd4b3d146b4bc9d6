"""Events of any shape as reports of a step: a page shows what can be read, and never fails."""

import math

import pytest
from app_world import cells
from hypothesis import given
from hypothesis import strategies as st
from rlwatch_app import token_steps
from rlwatch_app.token_steps import LocalisationReport, entries
from rlwatch_app.tokens import Token

from rlwatch.records import Event

NUMBERS = st.none() | st.booleans() | st.integers() | st.floats() | st.just(10**400) | st.just(-(10**400))
VALUES = st.recursive(
    NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
COSTS = st.dictionaries(st.sampled_from(["forwards", "backwards", "seconds"]), NUMBERS, max_size=3)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "norm": NUMBERS,
        "threshold": NUMBERS,
        "tokens": NUMBERS,
        "gap": NUMBERS,
        "complete": VALUES,
        "cause": VALUES,
        "message": VALUES,
        "why_not": VALUES,
        "method": VALUES,
        "notes": VALUES,
        "layers": VALUES,
        "cost": COSTS | VALUES,
        "culprits": st.lists(st.fixed_dictionaries({}, optional={"share": NUMBERS}), max_size=3) | VALUES,
    },
)


@given(BODIES)
def test_a_page_fails_on_no_event(body):
    """Whatever another version wrote: the row, the headline and the finding are text."""
    (entry,) = entries([Event("gradient_localised", 7, body)], [], [])

    assert len(cells({"cells": token_steps.step_row(entry, None, 1).cells})) == len(token_steps.STEP_COLUMNS)
    assert token_steps.headline(entry, None).startswith("Step 7")
    assert all(isinstance(line, str) for line in token_steps.finding(entry, []))


@given(NUMBERS)
def test_numbers_keep_what_they_are(value):
    """NaN and the infinities are numbers of the event; truth values, text and integers beyond floats are none."""
    norm = LocalisationReport.of({"norm": value}).norm
    number = isinstance(value, int | float) and not isinstance(value, bool) and value not in (10**400, -(10**400))

    assert (norm is None) == (not number)
    if number:
        assert norm == float(value) or (math.isnan(norm) and math.isnan(value))


@pytest.mark.parametrize(
    ("tokens", "count"), [(16384, 16384), (3.0, 3), (math.nan, 0), (math.inf, 0), (10**400, 0), (True, 0), ("9", 0)]
)
def test_a_count_is_a_finite_number(tokens, count):
    """Else nothing was counted."""
    assert LocalisationReport.of({"tokens": tokens}).tokens == count


@given(st.lists(st.none() | st.floats() | st.text(max_size=3), max_size=6))
def test_the_worst_share_is_the_largest_finite_one(shares):
    """Of the culprits that have one; none is no 0."""
    finite = [share for share in shares if isinstance(share, float) and math.isfinite(share)]

    assert LocalisationReport.of({"culprits": [{"share": share} for share in shares]}).worst == max(
        finite, default=None
    )


@pytest.mark.parametrize(
    ("cost", "told"),
    [
        ({"forwards": 2, "backwards": 1, "seconds": 0.5}, "2 forward passes and 1 backward pass; took 500\u202fms."),
        ({"forwards": math.inf, "backwards": 3}, "3 backward passes."),
        ({"forwards": math.nan, "seconds": 75.0}, "Took 1\u202fmin."),
        ({"forwards": 0, "backwards": 0}, ""),
    ],
)
def test_what_it_cost_is_reported_as_far_as_it_is_known(cost, told):
    """Passes that are no number are left out."""
    (entry,) = entries([Event("gradient_localised", 7, {"cost": cost})], [], [])

    assert token_steps.finding(entry, [])[1:] == ([told] if told else [])


@pytest.mark.parametrize(
    ("numbers", "layers", "told"),
    [
        (
            {"share": 0.41, "ratio": 148.0},
            {"layers.27": 0.62, "layers.3": 0.38},
            "share 41%, ratio 148, layers.27 62%",
        ),
        ({"ratio": math.inf}, {}, "ratio Inf"),
        ({"share": math.nan}, {}, "share NaN"),
        ({}, {"lm_head": 1.0}, "lm_head 100%"),
        ({}, {}, ""),
    ],
)
def test_a_culprit_on_one_line(numbers, layers, told):
    """Only what was measured; what is not a number is told as that."""
    assert token_steps.in_short(Token(0, 0, 0, 0, numbers=numbers, layers=layers)) == told


@given(st.sampled_from(["", "0", "7", "007", "-7", "7.0", "٧", "1e3", " 7", "9" * 15, "9" * 16, "seven"]))
def test_only_plain_digits_name_a_step(text):
    """An address is typed by people and written by strangers."""
    plain = text.isdigit() and text.isascii() and len(text) <= 15

    assert token_steps.numbered(text) == (int(text) if plain else None)
    assert token_steps.numbered(None) is None
