"""Recorded tokens, counted, ordered and found again, against plain loops over the same rows."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from app_world import cells
from hypothesis import given
from hypothesis import strategies as st
from rlwatch_app import tokens_page
from rlwatch_app.tokens import culprits_of, response_of, tokens

from rlwatch.records import CULPRITS, RESPONSES, SpikeBatch

SHARES = st.sampled_from([0.1, 0.25, 0.5, math.nan, math.inf])
CAUSES = st.sampled_from(["token ratio", "layer"])
ROWS = st.lists(st.tuples(st.integers(0, 3), SHARES, CAUSES), min_size=1, max_size=5)


def blamed(step, rows):
    ids, shares, causes = zip(*rows, strict=True)
    columns = {
        "token_id": np.array(ids),
        "text": [f"t{one}" for one in ids],
        "share": np.array(shares),
        "cause": list(causes),
        "position": np.arange(len(ids)),
    }
    return SpikeBatch(step, columns, CULPRITS)


@given(st.lists(st.tuples(st.integers(1, 9), ROWS), max_size=4))
def test_tokens_that_recur_are_counted_over_all_steps(parts):
    """How often, in how many steps, why, and the largest finite share; who did it once is not listed."""
    found = {one.token.token_id: one for one in tokens_page.recurring(blamed(s, rows) for s, rows in parts)}
    flat = [(step, *row) for step, rows in parts for row in rows]
    times = Counter(token for _, token, _, _ in flat)

    assert found.keys() == {token for token, count in times.items() if count > 1}
    for token, one in found.items():
        mine = [row for row in flat if row[1] == token]
        finite = [share for _, _, share, _ in mine if math.isfinite(share)]
        assert one.times == len(mine)
        assert one.steps == {step for step, *_ in mine}
        assert one.causes == Counter(cause for *_, cause in mine)
        assert one.share == max(finite, default=None)
        assert len(cells({"cells": tokens_page.recurring_row(one).cells})) == len(tokens_page.RECURRING_COLUMNS)


@given(st.lists(ROWS, max_size=4))
def test_the_most_frequent_comes_first(parts):
    """Among equals the one with the larger share."""
    listed = tokens_page.recurring(blamed(step, rows) for step, rows in enumerate(parts))
    keys = [(-one.times, -(one.share or 0.0)) for one in listed]

    assert keys == sorted(keys)


@pytest.mark.parametrize(
    ("batches", "most", "told"),
    [
        ([], 5, "over 0 localised steps"),
        ([(1, 7)], 5, "over 1 localised step"),
        ([(1, 7), (1, 7), (2, 7)], 5, "over 2 localised steps"),
        ([(1, 7), (1, 8)], 2, "over 2 localised steps, the newest"),
    ],
)
def test_over_how_many_steps_it_was_counted(batches, most, told):
    """A step of several ranks is one; another attempt's is another; that older ones are left out is said."""
    made = [SpikeBatch(step, {"position": np.arange(1)}, CULPRITS, attempt=attempt) for attempt, step in batches]

    assert tokens_page.recurring_scope(made, most) == told


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ('{"layers.3": 0.5, "lm_head": 1}', {"layers.3": 0.5, "lm_head": 1.0}),
        ("{}", {}),
        ("", {}),
        ("[1, 2]", {}),
        ('{"layers.3": "much"}', {}),
        ('{"layers.3": null}', {}),
        (json.dumps({"layers.3": 10**400}), {}),
        ("[" * 100_000, {}),
    ],
    ids=["two", "none", "empty", "a list", "text", "null", "beyond floats", "endless"],
)
def test_layers_of_a_token_are_read_or_left_out(text, layers):
    """Nothing that a file may hold fails a page."""
    (token,) = tokens(SpikeBatch(1, {"position": np.arange(1), "layers": [text]}, CULPRITS))

    assert token.layers == layers


@given(st.lists(st.lists(st.tuples(st.floats(-5, 5), st.floats(0, 5)), min_size=1, max_size=4), min_size=1, max_size=3))
def test_culprits_of_several_ranks_are_worst_first(ranks):
    """By contribution or own norm, whichever is larger; those of one rank stay as they were found."""
    batches = [
        SpikeBatch(
            1,
            {"position": np.arange(len(rows)), "contribution": np.array(rows)[:, 0], "own_norm": np.array(rows)[:, 1]},
            CULPRITS,
            rank=rank,
        )
        for rank, rows in enumerate(ranks)
    ]
    found = [(token.rank, token.position) for token in culprits_of(batches)]
    size = {(rank, at): max(abs(c), n) for rank, rows in enumerate(ranks) for at, (c, n) in enumerate(rows)}

    assert sorted(found) == sorted(size)
    if len(ranks) > 1:
        assert [size[one] for one in found] == sorted(size.values(), reverse=True)
    else:
        assert found == list(size)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 6)), min_size=1, max_size=20), st.data())
def test_a_response_holds_each_position_once_in_order(rows, data):
    """That of the token's micro-batch and sequence; its columns go along, what was not measured is None."""
    micro, sequence, position = (np.array(column) for column in zip(*rows, strict=True))
    columns = {"microbatch": micro, "sequence": sequence, "position": position, "entropy": np.arange(len(rows)) / 2}
    batch = SpikeBatch(1, columns, RESPONSES)
    token = data.draw(st.sampled_from(tokens(batch)))
    response = response_of([batch], token)
    mine = {}
    for at, (m, s, p) in enumerate(rows):
        if (m, s) == (token.microbatch, token.sequence):
            mine.setdefault(p, at / 2)

    assert response is not None
    assert response.positions.tolist() == sorted(mine)
    assert response.column("entropy").tolist() == [mine[p] for p in sorted(mine)]
    assert response.column("ratio") is None


def test_a_response_of_another_rank_or_reason_is_not_found():
    """Culprits alone are no response."""
    batch = SpikeBatch(1, {"position": np.arange(3)}, RESPONSES, rank=1)
    (token,) = tokens(SpikeBatch(1, {"position": np.arange(1)}, CULPRITS))

    assert response_of([batch], token) is None
    assert response_of([SpikeBatch(1, {"position": np.arange(3)}, CULPRITS)], token) is None
    assert response_of([], token) is None
