"""Degenerate text seen on token ids."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.tensors.degeneration import (
    LOOP_WINDOW,
    Loops,
    degeneration_stats,
    distinct,
    id0_run,
    id0_share,
    observe_degeneration,
    unended,
)
from rlwatch.tensors.mergeable import merge
from rlwatch.tensors.tokens import TokenBatch

pytestmark = pytest.mark.torch


def padded(rows, fill=0):
    """Ids and mask (B, T) of rows of ids."""
    width = max(map(len, rows), default=0)
    ids = torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=torch.int64)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids.reshape(len(rows), width), mask.reshape(len(rows), width)


def read(stats):
    """What would be recorded."""
    return {name: stat.value().item() for name, stat in stats.items() if stat.count > 0}


def loops(*rows):
    """Longest and tail loops of rows of ids."""
    found = Loops.of(*padded(list(rows)))
    return found.longest.tolist(), found.tail.tolist()


def varied(n, start=1000):
    """Ids that repeat nothing."""
    return list(range(start, start + n))


def test_distinct_ids_of_the_worked_example():
    """[1 2 3 1 2 3 4]: 4 of 7 ids, 4 of 6 pairs, 4 of 5 triples."""
    ids, mask = padded([[1, 2, 3, 1, 2, 3, 4]])

    got = [distinct(ids, mask, n)[0].item() for n in (1, 2, 3)]

    assert got == pytest.approx([0.5714286, 0.6666667, 0.8], abs=1e-7)
    assert read(degeneration_stats(ids, mask))["text/repetition"] == pytest.approx(0.2)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), max_size=12), min_size=1, max_size=5), st.sampled_from([1, 2, 3]))
def test_distinct_equals_counting_in_python(rows, n):
    """Against the definition, on padded batches."""
    value, measured = distinct(*padded(rows), n)

    for i, row in enumerate(rows):
        grams = [tuple(row[j : j + n]) for j in range(len(row) - n + 1)]
        assert bool(measured[i]) == bool(grams)
        if grams:
            assert value[i].item() == pytest.approx(len(set(grams)) / len(grams), abs=1e-6)
        else:
            assert value[i].isnan()


def test_ids_of_the_largest_vocabulary_do_not_collide():
    """3-grams that differ in one large id are different."""
    big = 2**21 - 1
    ids = torch.tensor([[big, big, big, big - 1, big]])

    assert distinct(ids, torch.ones_like(ids), 3)[0].item() == 1.0


def test_n_grams_never_reach_over_a_hole_in_the_mask():
    """Tool output between two turns separates them."""
    ids, mask = torch.tensor([[1, 2, 9, 1, 2, 3, 1, 2, 3]]), torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1]])

    value, measured = distinct(ids, mask, 3)

    assert measured.all()
    assert value.item() == pytest.approx(3 / 4)


@pytest.mark.parametrize("period", [1, 2, 7, 16, 40, 300])
def test_a_loop_of_any_period_is_covered_from_its_first_block(period):
    """100 tokens of text, then a block again and again: the block may be longer than the window that finds it."""
    block, times = varied(period), 1000 // period + 3

    longest, tail = loops(varied(100, 5000) + block * times)

    assert longest == pytest.approx([period * times / (100 + period * times)])
    assert tail == longest


def test_a_loop_the_response_leaves_again_is_no_tail():
    """The longest loop still is."""
    longest, tail = loops([7] * 50 + varied(50))

    assert longest == [0.5]
    assert tail == [0.0]


def test_the_last_block_of_a_loop_may_be_cut():
    """By the length limit."""
    block = varied(30)

    assert loops(block * 3 + block[:11]) == ([1.0], [1.0])


@pytest.mark.parametrize(
    "row",
    [
        varied(200),
        varied(100) + varied(100)[:50],  # said again once, not twice in a row
        [*varied(10), 1, 2, 3, *varied(10), 4, 5, 6, *varied(10), 7, 8, 9],  # phrases below the window
        varied(16) + varied(20, 5000) + varied(16),
    ],
)
def test_what_comes_back_but_not_in_a_row_is_no_loop(row):
    """Texts quote themselves."""
    assert loops(row) == ([0.0], [0.0])


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(2, 5), st.integers(0, 40), st.integers(0, 40), st.integers(0, 30))
def test_the_cover_of_a_planted_loop_is_exact(period, times, before, after, seed):
    """Whatever stands around it, if the repeated part is at least a window long."""
    block = [1000 + seed * 100 + i for i in range(period)]
    row = varied(before, 10_000) + block * times + varied(after, 20_000)
    covered = period * times if period * (times - 1) >= LOOP_WINDOW else 0

    longest, tail = loops(row)

    assert longest == pytest.approx([covered / len(row)])
    assert tail == pytest.approx([covered / len(row) if after == 0 else 0.0])


def test_a_loop_does_not_reach_over_what_a_tool_wrote():
    """Tokens outside the mask end it and are not counted."""
    ids = torch.tensor([[7] * 40 + [9] * 20 + [7] * 20])
    mask = torch.tensor([[1] * 40 + [0] * 20 + [1] * 20])

    found = Loops.of(ids, mask)

    assert found.longest.item() == pytest.approx(40 / 60)
    assert found.tail.item() == pytest.approx(20 / 60)


@pytest.mark.parametrize("width", [0, 1, LOOP_WINDOW - 1, LOOP_WINDOW])
def test_responses_too_short_to_loop_are_not_measured(width):
    """Nothing to compare with."""
    ids = torch.ones(2, width, dtype=torch.int64)

    assert Loops.of(ids, torch.ones_like(ids)).measured.tolist() == [False, False]
    assert "text/loop_cover" not in read(degeneration_stats(ids, torch.ones_like(ids)))


def test_looping_responses_are_counted_when_half_of_them_loops():
    """One of three."""
    got = read(degeneration_stats(*padded([[7] * 50 + varied(50), [7] * 49 + varied(51), varied(100)])))

    assert got["text/looping_frac"] == pytest.approx(1 / 3)
    assert got["text/loop_cover"] == pytest.approx((0.5 + 0.49) / 3)
    assert got["text/tail_loop"] == 0.0


def test_a_nan_sampler_is_recognised_by_its_zeros():
    """Responses that are at least 90 % id 0 count; padding with 0 does not."""
    ids, mask = padded([[0] * 10, [0] * 9 + [5], [0] * 8 + [5, 6], [5]])

    got = read(degeneration_stats(ids, mask))

    assert id0_share(ids, mask).tolist() == pytest.approx([1.0, 0.9, 0.8, 0.0])
    assert got["text/id0_frac"] == 0.5
    assert got["text/id0_run"] == 10


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=4))
def test_the_longest_run_of_zeros_is_that_of_python(rows):
    """Padding is no run."""
    expected = [max((len(run) for run in "".join(map(str, row)).split("1")), default=0) for row in rows]

    assert id0_run(*padded(rows)).tolist() == expected


def test_a_response_without_tokens_has_no_share_of_id_0():
    """Not 0: nothing was sampled."""
    assert id0_share(torch.zeros(1, 3), torch.zeros(1, 3)).isnan().all()
    assert read(degeneration_stats(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3))) == {}


@pytest.mark.parametrize(
    ("rows", "eos", "expected"),
    [
        ([[5, 2], [5, 6], [2, 5], []], (2,), [False, True, True, True]),
        ([[5, 2], [5, 3]], (2, 3), [False, False]),
        ([[5]], (), [True]),
        ([[], []], (2,), [True, True]),
    ],
)
def test_a_response_has_ended_if_its_last_token_ends_a_sequence(rows, eos, expected):
    """Padding with the same id ends nothing."""
    assert unended(*padded(rows, fill=2), eos).tolist() == expected


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=2, max_size=6), st.integers(1, 5))
def test_responses_of_two_batches_are_those_of_one(rows, place):
    """Also where the batches are padded to different widths."""
    place = min(place, len(rows) - 1)
    parts = [degeneration_stats(*padded(part)) for part in (rows[:place], rows[place:])]

    assert read(merge(*parts)) == pytest.approx(read(degeneration_stats(*padded(rows))), abs=1e-6)


def test_without_ids_there_is_no_text():
    """A trainer may keep them to itself."""
    assert observe_degeneration(TokenBatch(logp=-torch.rand(2, 3), mask=torch.ones(2, 3))) == {}


def test_ids_of_any_layout_and_type_read_the_same():
    """int32, and a transposed view."""
    ids, mask = padded([[1, 2, 3, 1, 2, 3, 4], [0] * 7])
    expected = read(degeneration_stats(ids, mask))

    assert read(degeneration_stats(ids.int(), mask.bool())) == expected
    assert read(degeneration_stats(ids.T.contiguous().T, mask.float())) == expected


def test_an_answer_of_one_token_is_no_run_of_id_0():
    """Where id 0 ends a response, an empty answer is that token alone."""
    got = read(degeneration_stats(*padded([[0], [0], [5, 6, 0], [0, 0]])))

    assert (got["text/id0_frac"], got["text/id0_run"]) == (0.25, 2.0)


def test_id_0_is_not_counted_where_it_is_declared_to_end_a_response():
    """Whatever the mask counts behind the end; the other measures are there."""
    ids, mask = padded([[5, 0, 0, 0], [0, 0, 0]])
    batch = TokenBatch(logp=-torch.rand(2, 4), mask=mask, ids=ids)

    assert set(read(observe_degeneration(batch))) - set(read(observe_degeneration(replace(batch, eos=(0, 9))))) == {
        "text/id0_frac",
        "text/id0_run",
    }
    assert "text/id0_frac" in read(observe_degeneration(replace(batch, eos=(9,))))
