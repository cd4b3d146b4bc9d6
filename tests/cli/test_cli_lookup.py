"""From what a person types to one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from rlwatch.analysis.lookup import MOST_LISTED, find_run
from rlwatch.errors import ConfigError, RunNotFoundError
from rlwatch.records import RunInfo


class Shelf:
    """As much of a store as looking up needs."""

    url = "memory://shelf"

    def __init__(self, runs: Sequence[RunInfo], unreadable: Mapping[str, str] | None = None) -> None:
        self._runs = list(runs)
        self._unreadable = unreadable or {}

    def runs(self) -> list[RunInfo]:
        return self._runs

    def unreadable(self) -> Mapping[str, str]:
        return self._unreadable


RUNS = [
    RunInfo("alpha-20251120-1", name="seed1"),
    RunInfo("alpha-20251120-12", name="seed2"),
    RunInfo("beta-20251120-2", name="seed3"),
    RunInfo("beta-20251121-2", name="seed3"),
]
SHELF = Shelf(RUNS)


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("alpha-20251120-1", 0),  # the whole id wins though it begins another one
        ("alpha-20251120-12", 1),
        ("seed1", 0),
        ("beta-20251121", 3),
    ],
)
def test_an_id_a_name_or_the_beginning_of_one_finds_its_run(typed: str, found: int) -> None:
    """The most exact reading wins."""
    assert find_run(SHELF, typed) is RUNS[found]  # type: ignore[arg-type]


def test_an_id_wins_over_the_name_of_another_run() -> None:
    """Ids are unique, names are not."""
    runs = [RunInfo("a", name="b"), RunInfo("b", name="a")]

    assert find_run(Shelf(runs), "a") is runs[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("typed", ["alpha", "seed3", "seed"])
def test_what_fits_several_runs_is_refused_with_their_ids(typed: str) -> None:
    """Guessing could send a command to the wrong run."""
    with pytest.raises(ConfigError, match="give the id") as caught:
        find_run(SHELF, typed)  # type: ignore[arg-type]

    assert "alpha-20251120-1 (seed1)" in str(caught.value) or "beta-20251120-2 (seed3)" in str(caught.value)


def test_the_list_of_runs_that_fit_is_short() -> None:
    """Five hundred runs do not fill the screen."""
    many = [RunInfo(f"run-{index:03d}") for index in range(500)]

    with pytest.raises(ConfigError, match="fits 500 runs") as caught:
        find_run(Shelf(many), "run")  # type: ignore[arg-type]

    assert str(caught.value).count("run-") == MOST_LISTED


def test_a_misspelt_id_is_answered_with_the_closest_one() -> None:
    """So that a typing error costs one look."""
    with pytest.raises(RunNotFoundError, match=r"did you mean alpha-20251120-1 \(seed1\)"):
        find_run(SHELF, "alhpa-20251120-1")  # type: ignore[arg-type]


def test_what_resembles_nothing_is_answered_with_the_newest_runs() -> None:
    """The store lists the newest first."""
    with pytest.raises(RunNotFoundError, match="the newest are alpha-20251120-1"):
        find_run(SHELF, "zzzzzz")  # type: ignore[arg-type]


@pytest.mark.parametrize("typed", ["anything", ""])
def test_an_empty_store_says_that_it_is_empty(typed: str) -> None:
    """Rather than listing nothing."""
    with pytest.raises(RunNotFoundError, match="the store memory://shelf holds no runs yet"):
        find_run(Shelf([]), typed)  # type: ignore[arg-type]


def test_nothing_typed_finds_nothing_even_in_a_store_of_one_run() -> None:
    """An empty shell variable must not pick a run."""
    with pytest.raises(RunNotFoundError):
        find_run(Shelf(RUNS[:1]), "")  # type: ignore[arg-type]


def test_an_unreadable_run_is_answered_with_the_reason() -> None:
    """It exists: 'not found' would be wrong."""
    shelf = Shelf(RUNS, {"gamma": "the file is damaged"})

    with pytest.raises(RunNotFoundError, match="cannot be read: the file is damaged"):
        find_run(shelf, "gamma")  # type: ignore[arg-type]
