"""Loops, answers and codes against the plainest loops there are."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.tensors.degeneration import LOOP_WINDOW, Loops, distance_back, distinct, windows
from rlwatch.tensors.groups import Grouping, answer_stats, occurrences
from rlwatch.tensors.responses import as_numbers, as_optional_numbers, codes_of, device_of

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=60)
FEW = st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 3)), min_size=1, max_size=14)


def row(ids):
    return torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool)


def windows_of(ids):
    return [tuple(ids[at : at + LOOP_WINDOW]) for at in range(len(ids) - LOOP_WINDOW + 1)]


@given(IDS)
def test_how_far_back_a_window_stood_last(ids):
    """By looking through all earlier ones, the nearest first."""
    seen = windows_of(ids)
    expected = [next((at - b for b in range(at - 1, -1, -1) if seen[b] == seen[at]), 0) for at in range(len(seen))]

    assert distance_back(*row(ids))[0].tolist() == expected


@settings(max_examples=60)
@given(st.integers(1, 24), st.integers(0, 6), st.integers(0, 30), st.integers(2, 4), st.randoms(use_true_random=False))
def test_a_planted_loop_is_found_with_its_whole_length(period, cut, before, times, rng):
    """A block of different tokens, repeated, the last repetition cut: its cover is all of it, and it ends in it."""
    block = rng.sample(range(1000, 1000 + period), period)
    loop = block * times + block[: min(cut, period)]
    prefix = rng.sample(range(before), before)  # no token twice
    ids = prefix + loop
    found = Loops.of(*row(ids))
    long_enough = len(loop) >= period + LOOP_WINDOW
    share = len(loop) / len(ids) if long_enough else 0.0

    assert found.longest.item() == pytest.approx(share)
    assert found.tail.item() == pytest.approx(share)
    assert found.measured.item() == (len(ids) > LOOP_WINDOW)


def test_a_loop_that_was_left_is_not_where_it_ends():
    """The longest one is told, the tail has none."""
    ids = [1, 2, 3] * 20 + list(range(100, 140))
    found = Loops.of(*row(ids))

    assert found.longest.item() == pytest.approx(0.6)
    assert found.tail.item() == 0.0


@given(IDS, st.integers(0, 20), st.integers(0, 20))
def test_padding_on_either_side_changes_no_loop(ids, left, right):
    """What lies outside the mask does not exist, whatever stands there."""
    padded = torch.tensor([[0] * left + ids + [0] * right])
    mask = torch.tensor([[False] * left + [True] * len(ids) + [False] * right])
    alone, beside = Loops.of(*row(ids)), Loops.of(padded, mask)

    assert beside.longest.item() == pytest.approx(alone.longest.item())
    assert beside.tail.item() == pytest.approx(alone.tail.item())
    assert beside.measured.tolist() == alone.measured.tolist()


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=20), st.integers(1, 3))
def test_distinct_n_grams_of_a_response_with_holes(parts, n):
    """None reaches over a hole; a response without any has no value."""
    ids, on = [i for i, _ in parts], [m for _, m in parts]
    grams = [tuple(ids[at : at + n]) for at in range(len(ids) - n + 1) if all(on[at : at + n])]
    value, measured = distinct(torch.tensor([ids]), torch.tensor([on]), n)

    assert measured.item() == bool(grams)
    assert windows(torch.tensor([on]), n).sum().item() == len(grams)
    if grams:
        assert value.item() == pytest.approx(len(set(grams)) / len(grams))
    else:
        assert math.isnan(value.item())


@given(FEW)
def test_an_answer_is_counted_within_its_group(parts):
    """Equal answers of other groups are others."""
    counted = Counter(parts)
    values, labels = torch.tensor(parts).T

    assert occurrences(values, Grouping.of(labels).labels).tolist() == [counted[part] for part in parts]


@given(FEW)
def test_statistics_of_answers_over_groups(parts):
    """Of groups with two answers at least; a response without one (below 0) is left out."""
    answers, groups = torch.tensor(parts).T
    given_ = {g: Counter(a for a, h in parts if h == g and a >= 0) for _, g in parts}
    counts = [c for c in given_.values() if c.total() > 1]
    expected = {
        "reward/unique_answers": [len(c) / c.total() for c in counts],
        "reward/majority_share": [max(c.values()) / c.total() for c in counts],
        "reward/answer_entropy": [-sum(k / c.total() * math.log(k / c.total()) for k in c.values()) for c in counts],
    }

    for name, stat in answer_stats(answers, groups).items():
        found = stat.settle()
        assert found.count.item() == len(counts)
        if counts:
            assert found.value().item() == pytest.approx(sum(expected[name]) / len(counts), abs=1e-6)


@given(FEW)
def test_sums_and_maxima_of_groups(parts):
    """By the labels of their ids, in any order; ids may be negative."""
    values, ids = torch.tensor(parts).T
    grouping = Grouping.of(ids)
    total_, largest = grouping.total(values.float()), grouping.largest(values.float())

    for at, (_, group) in enumerate(parts):
        members = [v for v, g in parts if g == group]
        assert total_[grouping.labels[at]].item() == sum(members)
        assert largest[grouping.labels[at]].item() == max(members)


@given(st.lists(st.none() | st.text(max_size=4) | st.integers() | st.booleans(), max_size=8))
def test_codes_are_equal_for_equal_things(things):
    """By their text, unless all are whole numbers; nothing is -1; all within 52 bits, so exact as floats."""
    things = [thing % 2**40 if type(thing) is int else thing for thing in things]
    found = codes_of(things).tolist()

    if not all(isinstance(thing, int) for thing in things):
        same = [None if thing is None else str(thing) for thing in things]
        assert [(a == b) for a in found for b in found] == [(a == b) for a in same for b in same]
        assert [code == -1 for code in found] == [thing is None for thing in things]
    else:
        assert found == [int(thing) for thing in things]
    assert all(-1 <= code < 2**52 for code in found)


@given(st.lists(st.none() | st.floats(width=32), min_size=1, max_size=8))
def test_a_list_may_lack_some_numbers(values):
    """Missing is not NaN: it is NaN that is marked as absent."""
    read, there = as_optional_numbers(values)

    assert (there is None) == (None not in values)
    assert read.isnan().tolist() == [value is None or math.isnan(value) for value in values]
    if there is not None:
        assert there.tolist() == [value is not None for value in values]


def test_numbers_of_a_trainer_are_cut_from_its_graph_and_stay_where_they_are():
    """Tensors are detached, not copied; the CPU is where everything else is."""
    weight = torch.ones(2, requires_grad=True)
    read = as_numbers(weight)

    assert not read.requires_grad
    assert read.data_ptr() == weight.data_ptr()
    assert as_numbers([True, False]).dtype is torch.bool
    assert device_of([weight, 3, None]) == torch.device("cpu")
    assert device_of([weight, torch.ones(1, device="meta")]) == torch.device("meta")
