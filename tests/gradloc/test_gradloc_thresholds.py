"""Thresholds of the published search: the figure's, the released code's, and what they have in common."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.gradloc.thresholds import Figure, ReleasedCode, single_token, threshold

STEP = {"single_token": 640, "tokens": 65536, "micro_batches": 4, "ranks": 8}
sizes = st.integers(1, 10**6)


def test_the_figure_has_the_published_numbers():
    """T=640, N=65536, M=4, W=8."""
    figure = Figure(**STEP)

    assert figure.whole_step() == 2.5
    assert figure.micro_batch() == 5.0
    assert [figure.rank_group(active) for active in (4, 2, 1)] == pytest.approx([7.0710678, 10.0, 14.1421356])
    assert [figure.segment(length) for length in (1024, 16, 1)] == [20, 160, 640]


def test_the_released_code_has_the_published_numbers():
    """Four times the figure's for the step, l/W times it below the micro-batch."""
    code = ReleasedCode(**STEP)

    assert code.whole_step() == 10.0
    assert code.micro_batch() == 5.0
    assert [code.rank_group(active) for active in (4, 2, 1)] == pytest.approx([3.5355339, 2.5, 1.7677670])
    assert [code.segment(length) for length in (1024, 16, 1)] == [2.5, 20, 80]


@given(sizes, st.integers(1, 64), st.integers(1, 64))
def test_both_agree_where_one_rank_has_one_micro_batch(tokens, length, single):
    """The published run had one micro-batch: there the difference did not show."""
    figure, code = Figure(single, tokens), ReleasedCode(single, tokens)

    assert figure.whole_step() == code.whole_step() == figure.micro_batch() == code.micro_batch()
    assert figure.rank_group(1) == code.rank_group(1)
    assert figure.segment(length) == code.segment(length)


@given(sizes, st.floats(1e-3, 1e6))
def test_a_renormalised_probe_and_a_masked_one_decide_alike(tokens, norm):
    """The mean over L tokens is Z/L times their part of a loss divided by Z, and so is its threshold."""
    step = 10**6
    masked = threshold(tokens, step, single_token=640)

    assert math.isclose(masked * step / tokens, Figure(640, step).segment(tokens), rel_tol=1e-12)
    assert (norm > masked) == (norm * step > masked * step)


def test_with_a_fixed_normaliser_the_threshold_falls_with_depth():
    """Where the loss is divided by the tokens of the step, fewer tokens have less noise, not more."""
    of = [threshold(n, 1024, single_token=1.0) for n in (1024, 256, 1)]

    assert of == [1 / 32, 1 / 64, 1 / 1024]
    assert [Figure(1.0, 1024).segment(n) for n in (1024, 256, 1)] == [1 / 32, 1 / 16, 1.0]


@pytest.mark.parametrize("normaliser", [0.0, -1.0, math.nan])
def test_a_loss_is_not_divided_by_nothing(normaliser):
    """An empty step has no normaliser: the message says what was passed."""
    with pytest.raises(ValueError, match="normaliser"):
        threshold(1, normaliser, single_token=1.0)


@given(sizes, sizes, st.floats(1e-6, 1e6))
def test_the_level_of_a_single_token_is_the_inverse(tokens, normaliser, norm):
    """A step whose norm is the threshold is just not above it."""
    level = single_token(norm, tokens, normaliser)

    assert math.isclose(threshold(tokens, normaliser, single_token=level), norm, rel_tol=1e-12)


def test_no_tokens_have_no_level():
    """Nothing can be learned from an empty step."""
    with pytest.raises(ValueError, match="n_tokens=0"):
        single_token(1.0, 0, 8)
