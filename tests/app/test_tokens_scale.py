"""Colours of a response: places on a scale, and what is on none."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlwatch_app import token_scale
from rlwatch_app.token_scale import BY_NAME, QUANTITIES, legend, levels, measured, scale_end, values
from rlwatch_app.tokens import Response

from rlwatch.records import RESPONSES, SpikeBatch

COLOURS = ("#0072B2", token_scale.ORANGE)
floats = st.lists(st.floats(), min_size=1, max_size=30).map(np.array)


def response(**columns):
    """A response with these numbers of its tokens."""
    arrays = {name: np.array(column, dtype=float) for name, column in columns.items()}
    count = len(next(iter(arrays.values())))
    return Response(SpikeBatch(1, arrays, RESPONSES), np.arange(count), np.arange(count))


@given(floats, st.sampled_from(QUANTITIES))
def test_every_value_is_on_the_scale_or_has_a_name(found, quantity):
    """Finite ones between -1 and 1 with their sign; NaN and infinities by name, never a colour."""
    for value, level in zip(found.tolist(), levels(found, scale_end(found), quantity), strict=True):
        if math.isnan(value):
            assert level == "nan"
        elif math.isinf(value):
            assert level == ("inf" if value > 0 else "-inf")
        else:
            assert -1 <= level <= 1
            assert level == 0 or math.copysign(1, level) == math.copysign(1, value)


@given(floats, st.sampled_from(QUANTITIES))
def test_a_larger_value_never_looks_smaller(found, quantity):
    """The scale is monotone."""
    finite = np.sort(found[np.isfinite(found)])
    placed = levels(finite, scale_end(finite), quantity)

    assert placed == sorted(placed)


def test_the_largest_size_ends_the_scale():
    """By size, whatever its sign; what is not finite has no say."""
    assert scale_end(np.array([1.0, -4.0, math.nan, math.inf])) == 4.0
    assert scale_end(np.array([math.nan])) == 0.0
    assert levels(np.array([0.0, 0.0]), 0.0, BY_NAME["entropy"]) == [0, 0]


def test_one_huge_token_leaves_the_others_visible():
    """A hundredth of the largest contribution has a tenth of its colour."""
    assert levels(np.array([100.0, 1.0, -1.0]), 100.0, BY_NAME["contribution"]) == [1.0, 0.1, -0.1]
    assert levels(np.array([4.0, 1.0]), 4.0, BY_NAME["entropy"]) == [1.0, 0.25]


@pytest.mark.parametrize(
    ("name", "columns", "expected"),
    [
        ("log ratio", {"logp": [-1.0], "old_logp": [-3.0], "ratio": [math.inf]}, 2.0),
        ("log ratio", {"ratio": [math.e]}, 1.0),
        ("mismatch", {"logp": [-1.0], "old_logp": [-2.0], "rollout_logp": [-5.0]}, 3.0),
        ("mismatch", {"logp": [-1.0], "rollout_logp": [-5.0]}, 4.0),
        ("entropy", {"entropy": [0.5]}, 0.5),
        ("advantage", {"advantage": [-1.5]}, -1.5),
        ("contribution", {"contribution": [0.3]}, 0.3),
    ],
)
def test_what_each_quantity_is(name, columns, expected):
    """In nats where it is a difference of log-probs; exact ones before what had to be exponentiated."""
    assert values(name, response(**columns)).tolist() == pytest.approx([expected])


def test_only_what_was_measured_is_offered():
    """A ratio without log-probs gives a log ratio; no quantity is made up."""
    assert measured(response(ratio=[1.0], advantage=[1.0])) == ["log ratio", "advantage"]
    assert measured(response(reward=[1.0])) == []
    assert values("entropy", response(reward=[1.0])) is None


def test_nan_in_a_column_stays_nan():
    """Of a difference as of a value; an infinity minus itself is no number either."""
    found = values("log ratio", response(logp=[math.nan, -math.inf, -1.0], old_logp=[-1.0, -math.inf, -1.0]))

    assert levels(found, scale_end(found), BY_NAME["log ratio"]) == ["nan", "nan", 0.0]


def test_the_legend_says_where_the_scale_ends_and_of_what():
    """Both ends of a signed scale, none below zero of another, the unit once."""
    signed = legend(BY_NAME["log ratio"], 4.97, COLOURS, [1.0])
    assert "-4.97" in signed
    assert "4.97 nats" in signed
    one = legend(BY_NAME["entropy"], 3.0, COLOURS, [1.0])
    assert "-3" not in one
    assert "3 nats" in one
    assert "no value other than 0" in legend(BY_NAME["entropy"], 0.0, COLOURS, [0.0])


@pytest.mark.parametrize(
    ("level", "word"), [("nan", "NaN"), ("inf", "Inf or -Inf"), ("-inf", "Inf or -Inf"), (None, "not measured")]
)
def test_the_legend_names_what_is_on_no_scale(level, word):
    """If there is any, and only then."""
    assert word in legend(BY_NAME["entropy"], 3.0, COLOURS, [0.5, level])
    assert word not in legend(BY_NAME["entropy"], 3.0, COLOURS, [0.5])
