"""Episodes, thresholds, ranks, calibration, placebo and folds, against loops that count one by one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from forecast.scoring.alarms import MOST_OCCUPIED, QUIET, Timeline, at_least, episodes, thresholds_for
from forecast.scoring.scorer import drawn, interval
from forecast.scoring.skill import ToolScores, auprc, auroc, calibration, skill
from forecast_small_tables import fleet, label, run_table
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.forecast.examples import folds_of
from rlwatch.forecast.labels import Labels

SCORES = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, math.nan, math.inf])


def counted(steps: list[int], scores: list[float], threshold: float) -> int:
    """Episodes of one run, the slow way."""
    found, quiet_since = 0, None
    for i, (step, score) in enumerate(zip(steps, scores, strict=True)):
        if not score >= threshold:
            continue
        fresh = quiet_since is None or (step - steps[quiet_since] > QUIET and quiet_since != i - 1)
        found, quiet_since = found + fresh, i
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(1, 30), SCORES), min_size=1, max_size=40), min_size=1, max_size=4),
    st.sampled_from([0.25, 0.5, 0.75, 1.0, math.inf]),
)
def test_episodes_are_those_a_loop_counts(runs: list[list[tuple[int, float]]], threshold: float) -> None:
    """At any threshold, on irregular steps, with gaps in the scores and with infinities."""
    steps = {f"r{i}": [40 + int(s) for s in np.cumsum([gap for gap, _ in run])] for i, run in enumerate(runs)}
    table = run_table({f"r{i}": {"reward/mean": [0.5] * len(run)} for i, run in enumerate(runs)}, steps=steps)
    line = Timeline.of(table, Labels("test", tuple(label(name, None) for name in table.runs)))
    score = np.array([score for run in runs for _, score in run])
    found = episodes(line, score, line.healthy())
    at = np.full(len(runs), threshold)

    expected = [counted(steps[f"r{i}"], [s for _, s in run], threshold) for i, run in enumerate(runs)]
    under = [float(line.weight[table.rows(i)][score[table.rows(i)] >= threshold].sum()) for i in range(len(runs))]

    assert found.begun(at).tolist() == expected
    assert found.occupied(at).tolist() == under


def test_25_quiet_steps_end_an_episode() -> None:
    """A row 25 steps later still belongs to it, one 26 steps later does not; neighbours always do."""
    assert counted([50, 60, 75], [1, 0, 1], 1) == 1
    assert counted([50, 60, 76], [1, 0, 1], 1) == 2
    assert counted([50, 150], [1, 1], 1) == 1


@settings(max_examples=30, deadline=None)
@given(st.lists(SCORES, min_size=30, max_size=90), st.sampled_from([1.0, 10.0, 40.0]))
def test_the_threshold_is_the_lowest_that_keeps_to_the_budget_all_the_way_down(
    scores: list[float], budget: float
) -> None:
    """Against trying every score from the top."""
    table = run_table({"r": {"reward/mean": [0.5] * len(scores)}}, steps={"r": list(range(40, 40 + len(scores)))})
    line = Timeline.of(table, Labels("test", (label("r", None),)))
    score = np.array(scores)
    (found,) = thresholds_for(episodes(line, score, line.healthy()), np.array([True]), score, [budget])

    expected = math.nan
    for tried in sorted({s for s in scores if not math.isnan(s)}, reverse=True):
        alarmed = sum(s >= tried for s in scores if not math.isnan(s))
        begun = counted(list(range(len(scores))), scores, tried)
        if 1000 * begun > budget * len(scores) or alarmed > MOST_OCCUPIED * len(scores):
            break
        expected = tried

    assert found == expected or (math.isnan(found) and math.isnan(expected))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.0, -math.inf, math.inf]), st.booleans()), max_size=30))
def test_auroc_is_the_share_of_pairs_in_order(rows: list[tuple[float, bool]]) -> None:
    """Ties count half; without both kinds there is none."""
    score, fails = np.array([s for s, _ in rows]), np.array([f for _, f in rows], dtype=bool)
    pairs = list(itertools.product(score[fails], score[~fails]))
    expected = sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs) if pairs else None

    assert auroc(score, fails) == (None if expected is None else pytest.approx(expected))


def test_auprc_is_average_precision() -> None:
    """By hand: hits at ranks 1 and 3 of 4; and a tie of all is the base rate."""
    fails = np.array([True, False, True, False])

    assert auprc(np.array([4.0, 3.0, 2.0, 1.0]), fails) == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    assert auprc(np.ones(4), fails) == pytest.approx(0.5)
    assert auprc(np.ones(2), np.array([False, False])) is None


def test_calibration_by_hand() -> None:
    """Two bins: 0.1 said of two rows of which none fails, 0.9 of two of which one does."""
    brier, gained, ece = calibration(np.array([0.1, 0.1, 0.9, 0.9]), np.array([False, False, True, False]))

    assert brier == pytest.approx((0.01 + 0.01 + 0.01 + 0.81) / 4)
    assert gained == pytest.approx(1 - brier / (0.25 * 0.75))
    assert ece == pytest.approx((0.2 + 0.8) / 4)


def test_chances_are_judged_at_their_own_horizon() -> None:
    """A tool that gives p50 is ranked by it there, and by its score elsewhere."""
    table, labels = fleet([None, 150] * 4, 250)
    line = Timeline.of(table, labels)
    truth = line.outcome_within(50)[1].astype(float)
    tool = ToolScores("t", np.zeros(len(table)), chances={50: truth})

    at_50, at_20 = skill(line, tool, 50), skill(line, tool, 20)

    assert (at_50.auroc, at_50.brier, at_50.brier_skill, at_50.ece) == (1.0, 0.0, 1.0, 0.0)
    assert (at_20.auroc, at_20.brier) == (0.5, None)


def test_rows_whose_end_nobody_saw_are_left_out() -> None:
    """A clean run of 100 rows: for 20 steps ahead the last row that is known is 79; an event is known to its onset."""
    table = run_table({"clean": {"reward/mean": [0.5] * 100}, "event": {"reward/mean": [0.5] * 100}})
    line = Timeline.of(table, Labels("test", (label("clean", None), label("event", 90))))
    rows, fails = line.outcome_within(20)

    assert table.step[rows & (table.run_of == 0)].tolist() == list(range(40, 80))
    assert table.step[rows & (table.run_of == 1)].tolist() == list(range(40, 90))
    assert table.step[rows & fails].tolist() == list(range(70, 90))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), max_size=7), st.integers(0, 8))
def test_at_least_so_many_hits_by_listing_every_outcome(chances: list[float], count: int) -> None:
    """Poisson-binomial against the sum over all of them."""
    total = 0.0
    for hits in itertools.product([0, 1], repeat=len(chances)):
        if sum(hits) >= count:
            total += math.prod(c if hit else 1 - c for c, hit in zip(chances, hits, strict=True))

    assert at_least(count, chances) == pytest.approx(total, abs=1e-9)


def test_draws_take_runs_with_replacement() -> None:
    """As many as there are, and a share that is 0 or 1 in every run has no width."""
    draws = drawn(10, 50, seed=1)

    assert draws.sum(axis=1).tolist() == [10] * 50
    assert interval(draws, np.ones(10), np.ones(10)) == (1.0, 1.0)
    assert interval(draws, np.zeros(10), np.zeros(10)) is None


def test_a_run_and_its_twin_share_a_fold() -> None:
    """Whatever split; and folds depend on names only."""
    names = [f"r{i}" for i in range(20)] + [f"r{i}-twin" for i in range(0, 20, 3)]
    table = run_table(
        {name: {"reward/mean": [0.5]} for name in names},
        recipes={name: f"recipe{int(name[1:].split('-')[0]) % 4}" for name in names},
        families=dict.fromkeys(names, "fault"),
        pairs={name: name.removesuffix("-twin") for name in names if name.endswith("-twin")},
    )
    for split in ("run", "recipe", "family"):
        fold = dict(zip(table.runs, folds_of(table, split).tolist(), strict=True))
        assert all(fold[name] == fold[name.removesuffix("-twin")] for name in names)

    backwards = table.only(list(range(len(names)))[::-1])
    there = dict(zip(backwards.runs, folds_of(backwards).tolist(), strict=True))
    assert there == dict(zip(table.runs, folds_of(table).tolist(), strict=True))


def test_held_out_recipes_are_whole_and_healthy_runs_are_spread() -> None:
    """No recipe with a fault is in two folds; every fold has healthy runs, and of each recipe by run."""
    table, _ = fleet([None, 120] * 35)
    held, by_run = folds_of(table, "recipe"), folds_of(table, "run")
    faulty = [i for i in range(70) if table.families[i] != "healthy"]

    assert all(len({int(held[i]) for i in faulty if table.recipes[i] == f"recipe{k}"}) == 1 for k in range(7))
    assert set(np.delete(held, faulty).tolist()) == set(range(5))
    assert np.bincount(by_run).tolist() == [14] * 5
    for k in range(7):
        counts = np.bincount([by_run[i] for i in range(70) if table.recipes[i] == f"recipe{k}"], minlength=5)
        assert counts.tolist() == [2] * 5
    assert folds_of(table, "none").tolist() == [0] * 70
