"""The scorer: what it counts, by tools whose figures are known beforehand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from forecast.scoring.scorer import Setting, ToolResult, evaluate
from forecast.scoring.skill import ToolScores
from forecast_small_tables import fleet, label, per_run, run_table

from rlwatch.errors import ConfigError
from rlwatch.forecast.labels import Label, Labels, RunOutcome
from rlwatch.forecast.tables import RunTable

ONSETS = [None, 120, None, 160, None, 200, None, 240, None, 300] * 8
TABLE, LABELS = fleet(ONSETS)
ONSET = np.array([math.inf if onset is None else onset for onset in ONSETS])[TABLE.run_of]


def judged(score: np.ndarray, table: RunTable = TABLE, labels: Labels = LABELS, **options: Any) -> ToolResult:
    """The result of one tool, with few draws."""
    return evaluate(table, labels, [ToolScores("tool", score, **options)], draws=20).tools[0]


def as_is(alarm: np.ndarray, table: RunTable = TABLE, labels: Labels = LABELS) -> Setting:
    """One tool without a dial: its alarms, as they are."""
    found = judged(np.where(alarm, 1.0, np.nan), table, labels, alarms_only=True).as_is
    assert found is not None
    return found


def small(labels: Sequence[Label], length: int = 300) -> tuple[RunTable, Labels]:
    """A table of these runs."""
    return run_table({each.run: {"reward/mean": [0.5] * length} for each in labels}), Labels("test", tuple(labels))


def test_a_perfect_oracle_scores_perfectly() -> None:
    """An alarm 50 steps before every onset, and none else: recall 1, lead 50, no false alarm, chance AUROC 1 at 50."""
    found = judged((TABLE.step >= ONSET - 50).astype(float))
    point = found.headline.point

    assert (point.recall, point.detection, point.per_1000, point.occupancy) == (1.0, 1.0, 0.0, 0.0)
    assert point.lead == (50.0, 50.0, 50.0)
    assert point.clean_alarmed == point.untouched_alarmed == 0
    assert (point.placebo, point.p) == (0.0, 0.0)
    assert found.skill[1].auroc == 1.0
    assert found.headline.recall_interval == (1.0, 1.0)


@pytest.mark.parametrize("length", [350, 3000])
def test_what_always_alarms_meets_no_budget(length: int) -> None:
    """Also on runs so long that one episode each would be within it: a tool that never stops is of no use."""
    table, labels = fleet([None, 200] * 5, length)
    constant = judged(np.ones(len(table)), table, labels)
    alarms = as_is(np.ones(len(table), dtype=bool), table, labels).point

    assert [setting.point.recall for setting in constant.pooled.values()] == [0.0, 0.0, 0.0]
    assert (alarms.recall, alarms.occupancy) == (1.0, 1.0)
    assert not as_is(np.ones(len(table), dtype=bool), table, labels).met
    assert alarms.clean_alarmed == alarms.clean == 5
    assert alarms.placebo == alarms.events


def test_clean_runs_that_had_nothing_to_get_over_are_told_apart() -> None:
    """One of four had a fault that ended in time; where no fault is recorded at all nobody knows."""
    table, labels = small([label(name, None) for name in ("mended", "a", "b", "c")])
    table = replace(table, faults=(100, None, None, None))
    alarm = np.isin(table.run_of, (0, 1))
    point = as_is(alarm, table, labels).point
    unknown = [as_is(alarm, replace(table, faults=faults), labels).point for faults in ((), (None,) * 4)]

    assert (point.clean, point.clean_alarmed, point.untouched, point.untouched_alarmed) == (4, 2, 3, 1)
    assert [each.untouched for each in unknown] == [0, 0]


def test_what_never_alarms_finds_nothing_and_costs_nothing() -> None:
    """No forecast at all."""
    point = as_is(np.zeros(len(TABLE), dtype=bool)).point

    assert (point.forecast, point.detected, point.episodes, point.p, point.lead) == (0, 0, 0, 1.0, None)


@pytest.mark.parametrize("share", [0.002, 0.01, 0.03])
def test_a_random_score_lands_where_its_occupancy_says(share: float) -> None:
    """Alarms on a share q of steps hit a window of 96 steps with chance 1 - (1 - q)^96; the placebo says so too."""
    onsets = [None, 150, None, 250] * 100
    table, labels = fleet(onsets, 300)
    point = as_is(np.random.default_rng(3).random(len(table)) < share, table, labels).point
    chance = 1.0 - (1.0 - share) ** 96
    noise = 4.0 * math.sqrt(chance * (1.0 - chance) / point.events)

    assert point.occupancy == pytest.approx(share, rel=0.1)
    assert point.recall == pytest.approx(chance, abs=noise)
    assert point.placebo / point.events == pytest.approx(chance, abs=noise)
    assert point.p > 0.005


def test_noise_ranks_nothing() -> None:
    """AUROC of a random score is 1/2 at each horizon, and its interval covers it."""
    for each in judged(np.random.default_rng(5).random(len(TABLE))).skill:
        assert each.auroc == pytest.approx(0.5, abs=0.03)
        assert each.auroc_interval is not None
        assert each.auroc_interval[0] < 0.5 < each.auroc_interval[1]


def test_finding_a_failure_once_it_is_there_is_no_forecast() -> None:
    """Point-adjusting would count the whole failed segment as found: here a hit after the window is worth nothing."""
    late = as_is(TABLE.step >= ONSET + 11).point
    at_onset = as_is(TABLE.step >= ONSET).point

    assert (late.forecast, late.detected) == (0, 0)
    assert (at_onset.forecast, at_onset.detected) == (0, at_onset.events)


@pytest.mark.parametrize(
    ("offset", "forecast", "early", "detected", "false"),
    [
        (-101, 0, 0, 0, 1),
        (-100, 1, 1, 1, 0),
        (-10, 1, 1, 1, 0),
        (-9, 1, 0, 1, 0),
        (-5, 1, 0, 1, 0),
        (-4, 0, 0, 1, 0),
        (10, 0, 0, 1, 0),
        (11, 0, 0, 0, 0),
    ],
)
def test_the_windows_have_these_edges(offset: int, forecast: int, early: int, detected: int, false: int) -> None:
    """Steps before (negative) the onset at 200; an alarm more than 100 steps early is false."""
    table, labels = small([label("a", 200)])
    point = as_is(per_run(table, {"a": {200 + offset: 1.0}}) > 0, table, labels).point

    assert (point.forecast, point.early, point.detected, point.episodes) == (forecast, early, detected, false)


def test_rows_give_a_coarse_log_its_time() -> None:
    """Ten logged rows after the onset are in time also where they are 100 steps."""
    steps = list(range(0, 600, 10))
    table = run_table({"a": {"reward/mean": [0.5] * len(steps)}}, steps={"a": steps})
    labels = Labels("test", (label("a", 300),))
    point = as_is(table.step == 400, table, labels).point

    assert (point.detected, point.detected_rows) == (0, 1)


def test_false_alarms_are_counted_per_step_and_per_row() -> None:
    """A clean run with a row every 10 steps: 26 rows of 10 steps, the first of 1, from step 40 on."""
    steps = list(range(0, 300, 10))
    table = run_table({"a": {"reward/mean": [0.5] * len(steps)}}, steps={"a": steps})
    point = as_is(table.step == 100, table, Labels("test", (label("a", None),))).point

    assert (point.episodes, point.steps, point.rows) == (1, 251.0, 26)
    assert point.per_1000 == pytest.approx(1000 / 251)
    assert point.per_1000_rows == pytest.approx(1000 / 26)


def test_nothing_before_step_40_counts() -> None:
    """Neither as an alarm nor as a false one."""
    table, labels = small([label("a", 60), label("b", None)])
    point = as_is(table.step < 40, table, labels).point

    assert (point.forecast, point.episodes, point.clean_alarmed) == (0, 0, 0)


def test_early_failures_count_for_detection_only() -> None:
    """In a column of their own: an alarm from step 40 to 10 steps after, or to step 50."""
    table, labels = small([label("a", 20), label("b", 50), label("c", 50)])
    alarm = per_run(table, {"a": {50: 1.0}, "b": {60: 1.0}, "c": {61: 1.0}}) > 0
    point = as_is(alarm, table, labels).point

    assert (point.events, point.faults, point.faults_detected, point.steps) == (0, 3, 2, 0)


def test_ambiguous_runs_are_outside_the_headline_and_inside_the_strict_budget() -> None:
    """Alarms there are false only where all runs count."""
    table, labels = small([Label("near", RunOutcome.AMBIGUOUS), *(label(f"c{i}", None) for i in range(9))])
    score = per_run(table, {"near": dict.fromkeys((60, 100, 140, 180), 1.0)}, rest=0.0)
    found = judged(score, table, labels)

    assert found.pooled[1.0].point.episodes == 0
    assert found.pooled[1.0].point.steps == 9 * 260
    assert found.strict[1.0].point.steps == 10 * 260
    assert found.strict[1.0].point.episodes == 0  # 4 episodes in 2600 steps: the threshold has to stay above them
    assert found.pooled[1.0].met


def test_faulty_runs_are_healthy_until_their_fault_and_all_of_them_count_in_the_strict_budget() -> None:
    """From the fault on nobody knows what an alarm was worth, unless all runs count."""
    table, labels = small([Label("bad", RunOutcome.FAULTY), *(label(f"c{i}", None) for i in range(9))])
    table = replace(table, faults=(100, *[None] * 9), families=("fault", *["healthy"] * 9))
    found = as_is(per_run(table, {"bad": {60: 1.0, 150: 1.0, 220: 1.0}}, rest=0.0) > 0, table, labels).point
    strict = judged(per_run(table, {"bad": {150: 1.0}}, rest=0.0), table, labels).strict[1.0].point

    unknown = as_is(np.zeros(len(table), dtype=bool), replace(table, faults=()), labels).point

    assert (found.episodes, found.steps, found.clean) == (1, 9 * 260 + 60, 9)
    assert unknown.steps == 9 * 260, "nobody knows until when it was sound"
    assert strict.steps == 10 * 260


def test_failures_that_nobody_could_see_coming_are_left_out_of_a_second_auroc() -> None:
    """A tool that sees each fault ranks perfectly what built up, and not what came at once."""
    table, labels = small([label("slow", 200), label("sudden", 200), label("random", 200), label("clean", None)])
    table = replace(table, faults=(140, 190, 100, None), at_once=(False, False, True, False))
    seen = (table.run_of == 0) & (table.step >= 150)
    skill = judged(seen.astype(float), table, labels).skill[1]
    plain = judged(seen.astype(float), replace(table, faults=(), at_once=()), labels).skill[1]

    assert skill.auroc_built_up == 1.0
    assert skill.auroc is not None
    assert skill.auroc < 0.9
    assert plain.auroc_built_up is None
    assert plain.auroc == skill.auroc


def test_thresholds_come_from_other_folds() -> None:
    """What is loud in one fold only looks fine on the pool's threshold, and breaks the budget when transferred."""
    from rlwatch.forecast.examples import folds_of

    fold = folds_of(TABLE, "run")
    loud = (fold == 0)[TABLE.run_of] & ~np.isfinite(ONSET) & (TABLE.step % 40 == 0)
    score = np.random.default_rng(1).random(len(TABLE)) + np.where(loud, 1.0, 0.0)
    found = judged(score)

    assert found.pooled[1.0].met
    assert found.pooled[1.0].point.episodes > 0
    assert not found.transferred[1.0].met
    assert (found.transferred[1.0].point.per_1000 or 0) > 1.0


def test_without_folds_only_the_pool_speaks() -> None:
    """And it is the headline."""
    score = (TABLE.step >= ONSET - 50).astype(float)
    found = evaluate(TABLE, LABELS, [ToolScores("tool", score)], split="none", draws=20)

    assert found["tool"].transferred == {}
    assert found["tool"].headline.point.recall == 1.0
    assert found.about["folds"] == 0


def test_no_forecast_is_no_alarm_and_ranks_last() -> None:
    """Keeping quiet where it is hard gains nothing."""
    honest = (TABLE.step >= ONSET - 50).astype(float)
    quiet = np.where(np.isfinite(ONSET), np.nan, honest)
    found = judged(quiet)

    assert found.headline.point.forecast == 0
    assert (found.skill[1].auroc or 0.0) < 0.5
    assert found.skill[1].covered < found.skill[1].rows


def test_the_placebo_is_the_share_of_clean_runs_that_alarm_in_the_same_steps() -> None:
    """Two of four clean runs that reach the window alarm within it; one is too short, one alarms elsewhere."""
    names = ["c0", "c1", "c2", "c3", "short"]
    runs = {name: {"reward/mean": [0.5] * (90 if name == "short" else 300)} for name in ["event", *names]}
    table = run_table(runs)
    labels = Labels("test", (label("event", 200), *(label(name, None) for name in names)))
    alarm = per_run(table, {"event": {150: 1}, "c0": {100: 1}, "c1": {195: 1}, "c2": {196: 1}, "short": {80: 1}}) > 0
    point = as_is(alarm, table, labels).point

    assert (point.placebo, point.p) == (0.5, 0.5)
    assert point.placebo_early == 0.25  # up to step 190


def test_leads_are_counted_from_the_first_alarm_of_the_window() -> None:
    """One that was on before the window has the window's whole length."""
    table, labels = small([label("a", 200), label("b", 200), label("c", 200)])
    alarm = per_run(table, {"a": dict.fromkeys(range(90, 200), 1), "b": {150: 1, 190: 1}, "c": {180: 1}}) > 0

    assert as_is(alarm, table, labels).point.lead == (35.0, 50.0, 75.0)


def test_groups_count_events_and_clean_runs() -> None:
    """By family, recipe and type of failure."""
    groups = judged((TABLE.step >= ONSET - 50).astype(float)).groups

    assert groups["family"]["fault"].events == groups["family"]["fault"].forecast == 40
    assert groups["family"]["healthy"].clean == 40
    assert groups["type"]["reward"].recall == 1.0
    assert sum(group.runs for group in groups["recipe"].values()) == 80


def test_draws_are_reproducible_and_intervals_cover_the_figure() -> None:
    """The same seed gives the same intervals."""
    score = np.random.default_rng(2).random(len(TABLE))
    first, second = (evaluate(TABLE, LABELS, [ToolScores("t", score)], draws=50, seed=4) for _ in range(2))
    at = first["t"].transferred[2.0]

    assert first.to_dict() == second.to_dict()
    assert at.recall_interval is not None
    assert at.recall_interval[0] <= (at.point.recall or 0.0) <= at.recall_interval[1]
    assert at.per_1000_interval is not None
    assert at.per_1000_interval[0] <= (at.point.per_1000 or 0.0) <= at.per_1000_interval[1]


def test_a_table_without_events_or_without_clean_runs_has_counts_and_no_rates() -> None:
    """A dash is not a zero."""
    table, labels = small([label("a", None)])
    quiet = judged(np.zeros(len(table)), table, labels)
    table, labels = small([label("b", 60)])
    busy = judged(np.zeros(len(table)), table, labels)

    assert quiet.headline.point.recall is None
    assert quiet.headline.recall_interval is None
    assert quiet.skill[0].auroc is None
    assert busy.headline.point.per_1000 is None
    assert busy.headline.point.placebo == 0.0


def test_a_run_without_a_label_is_refused() -> None:
    """By name."""
    with pytest.raises(ConfigError, match="1 runs of the table have no label, the first is 'r1'"):
        evaluate(fleet([None, None])[0], Labels("test", (label("r0", None),)), [])


def test_infinite_scores_that_break_the_budget_do_not_slip_through() -> None:
    """Nothing is above infinity, so a tool that says it everywhere gets no threshold at all."""
    assert judged(np.full(len(TABLE), np.inf)).pooled[2.0].point.forecast == 0
