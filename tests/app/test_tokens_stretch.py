"""Which tokens of a long response are drawn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlwatch_app.token_response import MOST_DRAWN, drawn, gaps


@given(st.integers(1, 400), st.integers(1, 60), st.lists(st.integers(0, 500), max_size=70), st.randoms())
def test_a_response_is_bounded_and_what_matters_is_in_it(count, most, anchors, random):
    """At most ``most`` tokens, in order, each once; as many anchors as there is room for, the first ones."""
    positions = np.array(sorted(random.sample(range(600), count)))
    anchors = [anchor for anchor in anchors if anchor in positions]

    chosen = drawn(positions, anchors, most)

    assert len(chosen) <= most
    assert (np.diff(chosen) > 0).all()
    assert set(dict.fromkeys(anchors[:most])) <= set(positions[chosen].tolist())


@given(st.integers(1, 300), st.integers(1, 60), st.lists(st.integers(0, 299), min_size=1, max_size=5))
def test_every_token_is_drawn_or_counted(count, most, anchors):
    """What is drawn and what the gaps say add up to what was recorded."""
    positions = np.arange(0, 3 * count, 3)
    chosen = drawn(positions, anchors, most)

    found = gaps(chosen, positions)

    assert len(found) == len(chosen) + 1
    assert len(chosen) + sum(left for left, _ in found) == count
    assert sum(missing for _, missing in found) == 2 * (count - 1)


def test_a_short_response_is_drawn_whole():
    """Without a gap."""
    positions = np.arange(50)

    assert drawn(positions, [7]).tolist() == list(range(50))
    assert gaps(np.arange(50), positions) == [(0, 0)] * 51


def test_the_room_is_shared_among_the_culprits():
    """16 384 tokens, two culprits: an equal stretch around each, and no more than a browser bears."""
    chosen = drawn(np.arange(16384), [1000, 12000])

    around = [int(((chosen > at - 2000) & (chosen < at + 2000)).sum()) for at in (1000, 12000)]
    assert around[0] == around[1]
    assert MOST_DRAWN - 2 <= sum(around) + 2 <= MOST_DRAWN + 2


def test_without_anything_that_matters_the_beginning_is_drawn():
    """Or the part that was recorded first."""
    assert drawn(np.arange(100, 200), [], 5).tolist() == [0, 1, 2, 3, 4]


def test_more_culprits_than_room():
    """The first ones are drawn."""
    assert drawn(np.arange(100), [90, 50, 10, 20], 2).tolist() == [50, 90]


@pytest.mark.parametrize(
    ("positions", "expected"),
    [([0, 1, 2], [(0, 0)] * 4), ([5, 6], [(0, 5), (0, 0), (0, 0)]), ([0, 9], [(0, 0), (0, 8), (0, 0)])],
)
def test_a_stretch_says_what_was_not_recorded(positions, expected):
    """Before it and within it; what comes after it nobody knows."""
    assert gaps(np.arange(len(positions)), np.array(positions)) == expected
