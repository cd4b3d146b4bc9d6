"""Thresholds of the published search: with the right normaliser they are the figure's and the released code's."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.gradloc.bisection import noise_threshold, single_token_level

T, N, M, W = 640, 65536, 4, 8
"""A token's threshold; tokens, micro-batches and ranks of the step."""
sizes = st.integers(1, 10**6)


def of_mean(n, single=T):
    """Of the mean over ``n`` tokens: the normaliser is their number."""
    return noise_threshold(n, n, single_token=single)


def test_the_figure_has_the_published_numbers():
    """Each probe is the mean of what it probes: the step, a micro-batch of all ranks, of some ranks, a segment."""
    assert of_mean(N) == 2.5
    assert of_mean(N / M) == 5.0
    assert [of_mean(N * active / (M * W)) for active in (4, 2, 1)] == pytest.approx([7.0710678, 10.0, 14.1421356])
    assert [of_mean(length) for length in (1024, 16, 1)] == [20, 160, 640]


def test_the_released_code_has_the_published_numbers():
    """It probes what FSDP averages over W ranks though only some contribute, and has M too much for the step."""
    of_ranks = lambda n, active: noise_threshold(n, n * W / active, single_token=T)  # noqa: E731

    assert noise_threshold(N, N / M, single_token=T) == 10.0
    assert [of_ranks(N * active / (M * W), active) for active in (4, 2, 1)] == pytest.approx([3.5355339, 2.5, 1.767767])
    assert [of_ranks(length, 1) for length in (1024, 16, 1)] == [2.5, 20, 80]


@given(sizes, st.floats(1e-3, 1e6))
def test_a_renormalised_probe_and_a_masked_one_decide_alike(tokens, norm):
    """The mean over L tokens is Z/L times their part of a loss divided by Z, and so is its threshold."""
    step = 10**6
    masked = noise_threshold(tokens, step, single_token=640)

    assert math.isclose(masked * step / tokens, of_mean(tokens), rel_tol=1e-12)
    assert (norm > masked) == (norm * step > masked * step)


def test_with_a_fixed_normaliser_the_threshold_falls_with_depth():
    """Where the loss is divided by the tokens of the step, fewer tokens have less noise, not more."""
    of = [noise_threshold(n, 1024, single_token=1.0) for n in (1024, 256, 1)]

    assert of == [1 / 32, 1 / 64, 1 / 1024]
    assert [of_mean(n, 1.0) for n in (1024, 256, 1)] == [1 / 32, 1 / 16, 1.0]


@pytest.mark.parametrize("normaliser", [0.0, -1.0, math.nan])
def test_a_loss_is_not_divided_by_nothing(normaliser):
    """An empty step has no normaliser: the message says what was passed."""
    with pytest.raises(ValueError, match="normaliser"):
        noise_threshold(1, normaliser, single_token=1.0)


@given(sizes, sizes, st.floats(1e-6, 1e6))
def test_the_level_of_a_single_token_is_the_inverse(tokens, normaliser, norm):
    """A step whose norm is the threshold is just not above it."""
    level = single_token_level(norm, tokens, normaliser)

    assert math.isclose(noise_threshold(tokens, normaliser, single_token=level), norm, rel_tol=1e-12)


def test_no_tokens_have_no_level():
    """Nothing can be learned from an empty step."""
    with pytest.raises(ValueError, match="n_tokens=0"):
        single_token_level(1.0, 0, 8)
