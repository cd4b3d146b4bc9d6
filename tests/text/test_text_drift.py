"""Ids that do not survive decoding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.text import MOST_IDS, RetokenizationDrift, first_difference, levenshtein, prefix_kept, retokenized

A, B, C, D, X = range(5)
few = st.lists(st.integers(0, 3), max_size=14)


def by_the_table(first, second):
    """Wagner and Fischer's table, cell by cell."""
    row = list(range(len(second) + 1))
    for i, one in enumerate(first, 1):
        new = [i]
        for j, other in enumerate(second, 1):
            new.append(min(row[j] + 1, new[-1] + 1, row[j - 1] + (one != other)))
        row = new
    return row[-1]


def test_the_worked_example():
    """Sampled a b c d, encoded again a x d: positions 1 to 3 differ, but one substitution and one deletion do it."""
    got = RetokenizationDrift.of([A, B, C, D], [A, X, D])

    assert got == RetokenizationDrift(exact=False, naive=3 / 4, edits=2 / 4, first=1, growth=-1)


@given(few, few)
def test_the_distance_is_that_of_the_table(first, second):
    """rapidfuzz and cell by cell agree."""
    assert levenshtein(first, second) == by_the_table(first, second)


@given(few, few, few, few)
def test_equal_ends_change_no_distance(start, first, second, end):
    """On either side."""
    assert levenshtein(start + first + end, start + second + end) == levenshtein(first, second)


@given(st.lists(st.integers(0, 150_000), min_size=50, max_size=200), st.data())
def test_one_shift_counts_once_however_long_the_rest(ids, data):
    """Where comparing by position counts everything after it."""
    place = data.draw(st.integers(0, len(ids)))
    shifted = [*ids[:place], 200_000, *ids[place:]]

    assert levenshtein(ids, shifted) == 1
    assert RetokenizationDrift.of(ids, shifted).growth == 1
    assert RetokenizationDrift.of(ids, shifted).first == place


@pytest.mark.parametrize(
    ("first", "second", "place"),
    [([], [], None), ([A], [A], None), ([A], [A, B], 1), ([A, B], [A, C], 1), ([], [A], 0)],
)
def test_the_first_difference_is_also_where_one_ends(first, second, place):
    """A text that goes on differs from where the other stops."""
    assert first_difference(first, second) == place


def test_ids_that_survive_have_no_first_difference():
    """Nothing is not position 0."""
    assert RetokenizationDrift.of([A, B], [A, B]) == RetokenizationDrift(
        exact=True, naive=0.0, edits=0.0, first=None, growth=0
    )


def test_of_nothing_sampled_nothing_is_known():
    """And of a text that encodes to nothing, everything was lost."""
    assert RetokenizationDrift.of([], [A]) is None
    assert RetokenizationDrift.of([A, B], []) == RetokenizationDrift(
        exact=False, naive=1.0, edits=1.0, first=0, growth=-2
    )


def test_very_long_responses_are_compared_in_part():
    """The time grows with the square of the length; exactness and growth are still of the whole."""
    ids = list(range(3 * MOST_IDS))

    got = RetokenizationDrift.of(ids, [*ids, X])

    assert got == RetokenizationDrift(exact=False, naive=0.0, edits=0.0, first=len(ids), growth=1)


class Merging:
    """A tokenizer that samples letters but encodes pairs."""

    def __init__(self):
        self.asked = {}

    def decode(self, token_ids, **kwargs):
        self.asked |= kwargs
        return "".join("abc"[i] for i in token_ids)

    def encode(self, text, **kwargs):
        self.asked |= kwargs
        return [ord(pair[0]) for pair in (text[i : i + 2] for i in range(0, len(text), 2))]


def test_encoding_again_keeps_special_tokens_and_tidies_nothing():
    """Else every response with an end token would seem to drift."""
    tokenizer = Merging()

    assert retokenized(tokenizer, [0, 1, 2]) == [ord("a"), ord("c")]
    assert tokenizer.asked == {
        "skip_special_tokens": False,
        "clean_up_tokenization_spaces": False,
        "add_special_tokens": False,
    }


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([], (0, 0)),
        ([([A], [B])], (0, 0)),
        ([([A], [B]), ([A, B, C], [D])], (1, 1)),
        ([([A], [B]), ([A, X, C], [D])], (0, 1)),
        ([([A], [B]), ([A], [B])], (0, 1)),  # shorter than what it should begin with
        ([([A], [B]), ([A, B], [C]), ([A, B, X], [D])], (1, 2)),
    ],
)
def test_each_turn_begins_with_all_of_the_one_before(turns, expected):
    """Or the history was rendered anew and encoded differently."""
    assert prefix_kept(turns) == expected
