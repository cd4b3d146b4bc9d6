"""Receivers that fail and processes that are killed: nothing is lost, and what comes twice says so."""

from __future__ import annotations

import delivery_scenarios
import pytest
from delivery_scenarios import Toll, scenarios, table, troubled

SMALL = scenarios(messages=4, deaths=1)
"""Enough to go through every point; benchmarks/delivery_faults.py prints the table of more."""


@pytest.fixture(scope="module")
def tolls() -> dict[str, Toll]:
    """Each scenario, once."""
    return {name: run() for name, run in SMALL.items()}


@pytest.mark.parametrize("name", SMALL)
def test_nothing_is_lost_and_duplicates_carry_the_same_key(name: str, tolls: dict[str, Toll]):
    """Ten minutes without a receiver, errors, rate limits, answers that get lost, SIGKILL at each point."""
    assert tolls[name].messages >= 2
    assert (tolls[name].lost, tolls[name].other_keys) == (0, 0)


def test_the_faults_happened(tolls: dict[str, Toll]):
    """What was refused, or taken without a known answer, came again; nobody was asked before time."""
    again = {name: toll.again for name, toll in tolls.items()}

    assert again["500 for each, five times"] == 20
    assert again["429, Retry-After 120 s"] == 8
    for name in ("answer lost after taking it", "killed when sending", "killed when sent"):
        assert again[name] >= 1
    assert tolls["receiver down for 10 minutes"].minutes >= 10.0
    assert again["receiver down for 10 minutes"] == 0
    assert tolls["429, Retry-After 120 s"].minutes >= 4.0
    assert tolls["killed when leased"].minutes > 1.0


def test_a_lost_message_would_be_noticed(monkeypatch: pytest.MonkeyPatch):
    """The count can fail: with deliverers that never try again, what a dead receiver did not take is lost."""
    monkeypatch.setattr(delivery_scenarios, "LONGEST_S", 60.0)

    assert delivery_scenarios.answers("never", [500] * 1000, messages=2).lost == 2


def test_the_table_has_a_line_for_each(tolls: dict[str, Toll]):
    """Under its heads."""
    lines = table(list(tolls.values())).splitlines()

    assert len(lines) == 1 + len(SMALL)
    assert len({len(line) for line in lines}) == 1


def test_the_bad_hour_is_the_same_every_time():
    """Seeded, and with every kind of trouble in it."""
    assert troubled(5) == troubled(5)
    assert {500, 502, 503, 408, 204} <= {answer for answer in troubled(5) if isinstance(answer, int)}
