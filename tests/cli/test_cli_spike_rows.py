"""Token spikes as rows."""

from __future__ import annotations

import math

import numpy as np

from rlwatch.cli.show import spike_rows
from rlwatch.records import SpikeBatch


def _batch(step: int, **columns: object) -> SpikeBatch:
    return SpikeBatch(step, columns, reason="r")  # type: ignore[arg-type]


def test_the_newest_step_comes_first_and_its_worst_token_leads() -> None:
    """By contribution where it was measured."""
    batches = [
        _batch(3, token_id=np.array([1, 2]), contribution=np.array([0.1, 0.2])),
        _batch(7, token_id=np.array([3, 4]), contribution=np.array([0.5, -0.9])),
    ]

    rows = spike_rows(batches)

    assert [(row["step"], row["token_id"]) for row in rows] == [(7, 4), (7, 3), (3, 2), (3, 1)]


def test_a_small_ratio_is_as_far_out_as_a_large_one_and_nan_is_farthest() -> None:
    """Ratios are judged by their logarithm; zero cannot be, and is worst."""
    ratio = np.array([1.0, 8.0, 1 / 16, math.nan, 0.0])

    rows = spike_rows([_batch(1, ratio=ratio, position=np.arange(5))])

    assert [row["position"] for row in rows] == [3, 4, 2, 1, 0]


def test_values_are_plain_numbers_and_texts() -> None:
    """No numpy type reaches the printer."""
    row = spike_rows([_batch(1, token_id=np.array([5]), entropy=np.array([0.5]), text=["a"])])[0]

    assert row == {"step": 1, "rank": 0, "reason": "r", "token_id": 5, "entropy": 0.5, "text": "a"}
    assert {type(value) for value in row.values()} == {int, float, str}


def test_no_more_rows_than_asked_for() -> None:
    """A burst of tokens does not fill the terminal."""
    batches = [_batch(step, ratio=np.full(30, 2.0)) for step in range(5)]

    rows = spike_rows(batches, most=40)

    assert len(rows) == 40
    assert {row["step"] for row in rows} == {4, 3}


def test_no_batches_give_no_rows_and_a_batch_without_a_measure_keeps_its_order() -> None:
    """Columns that decide may be absent."""
    assert spike_rows([]) == []
    assert [row["position"] for row in spike_rows([_batch(1, position=np.array([2, 1]))])] == [2, 1]
