"""What compression says of text."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.text import repeats, zlib_ratio

SENTENCE = "the answer is 42. "
PROSE = (
    "We first note that both sides are positive, so squaring keeps the order. Expanding the left side gives a sum "
    "of three terms, of which the second is bounded by the inequality of means; the others cancel. What remains is "
    "a quadratic in the ratio of the two lengths, and its discriminant turns out to be negative."
)


def test_a_loop_compresses_more_than_a_hundredfold():
    """The oracles: 10,000 characters of one sentence, and 4096 exclamation marks."""
    assert zlib_ratio((SENTENCE * 1000)[-10_000:]) == pytest.approx(142.857, abs=1e-3)
    assert zlib_ratio("!" * 4096) == pytest.approx(146.286, abs=1e-3)


def test_prose_compresses_less_than_threefold():
    """And random letters hardly."""
    noise = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=2000))

    assert 1.5 < zlib_ratio(PROSE) < 3
    assert zlib_ratio(noise) < zlib_ratio(PROSE)


@pytest.mark.parametrize(("text", "measured"), [("", False), ("a" * 199, False), ("a" * 200, True), ("ж" * 100, True)])
def test_short_text_has_no_ratio(text, measured):
    """The header would decide it; 200 bytes of UTF-8 are the least."""
    assert (zlib_ratio(text) is not None) == measured


def test_only_the_end_of_a_long_text_decides_whether_it_repeats():
    """More than 10,000 characters, and the last 10,000 of them."""
    noise = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=10_000))

    assert repeats(noise + SENTENCE * 600)
    assert not repeats(SENTENCE * 600 + noise)
    assert not repeats("a" * 10_000)
    assert repeats("a" * 10_001)


@given(st.text(alphabet=st.characters(codec=None), min_size=0, max_size=300))
def test_any_text_can_be_measured(text):
    """Lone surrogates too, which no UTF-8 holds."""
    ratio = zlib_ratio(text)

    assert ratio is None or ratio > 0
    assert repeats(text) is False
