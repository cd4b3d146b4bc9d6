"""Waits between tries."""

from __future__ import annotations

import random

import pytest

from rlwatch.alerts.outbox import exponential


@pytest.mark.parametrize(
    ("attempts", "expected"), [(1, 5.0), (2, 10.0), (3, 20.0), (8, 640.0), (9, 900.0), (5000, 900.0)]
)
def test_the_wait_doubles_up_to_the_longest(attempts: int, expected: float):
    """Without the random part."""
    assert exponential(jitter_s=0.0)(attempts) == expected


def test_the_random_part_spreads_senders_and_stays_small():
    """Not all the same, all within bounds."""
    waits = {exponential()(3) for _ in range(50)}

    assert len(waits) > 1
    assert all(20.0 <= wait <= 25.0 for wait in waits)


def test_the_random_part_is_not_drawn_from_the_trainers_numbers():
    """A retry does not change what a seeded run does."""
    random.seed(5)
    before = random.getstate()
    exponential()(3)

    assert random.getstate() == before
