"""Training: examples through the live code, heads read out of scikit-learn exactly, thresholds that keep a budget."""

import math
from dataclasses import replace

import numpy as np
import pytest
from forecast_runs import steady
from forecast_small_tables import fleet
from forecast_tables import LENGTH, ONSET, failing, tables
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.errors import ConfigError
from rlwatch.forecast import Forecaster, thresholds
from rlwatch.forecast import model as artefact
from rlwatch.forecast.examples import Examples, LogCadence, coarse, examples
from rlwatch.forecast.features import FEATURES
from rlwatch.forecast.labels import Labels, RunOutcome
from rlwatch.forecast.training import TreeSettings, grow, head_of, intervals, platt_line, train
from rlwatch.records import ClosedStep

SMALL = TreeSettings(trees=5, leaves=5, least=10, rate=0.3)


@pytest.fixture(scope="module")
def trained():
    table, labels = tables()
    return train(table, labels, how=SMALL, folds=2, meta={"version": "test"})


def test_a_failure_is_forecast_before_it_and_sound_runs_are_left_alone(trained):
    """On runs of seeds that were not trained on."""

    def first_alarm(rows):
        one = Forecaster(trained.model)
        found = (one.update(ClosedStep(step, row)) for step, row in rows.items())
        return next((forecast for forecast in found if forecast.alarm), None)

    caught = [first_alarm(failing(seed)) for seed in range(50, 55)]
    assert all(alarm is not None and 80 < alarm.step <= ONSET - 5 for alarm in caught)
    assert {alarm.limit for alarm in caught} == {"ent_low"}
    assert [first_alarm(steady(LENGTH, every=2, seed=seed)) for seed in range(60, 64)] == [None] * 4


def test_sparse_logs_have_a_model_of_their_own_in_it(trained):
    """Of the same budgets; on runs of other seeds, logged every 10 steps."""
    sparse = trained.model.sparse
    assert sparse is not None
    assert sparse.profiles[0].thresholds.keys() == trained.model.profiles[0].thresholds.keys()

    def chances(rows):
        one = Forecaster(trained.model)
        found = one.extend([ClosedStep(step, row) for step, row in LogCadence(10).of(list(rows.items()))])
        return [forecast.p50 for forecast in found if forecast.p50 is not None and 60 < forecast.step < ONSET]

    sound = [max(chances(steady(LENGTH, every=2, seed=seed))) for seed in range(60, 64)]
    assert min(max(chances(failing(seed))) for seed in range(50, 55)) > 2 * max(sound)


def test_the_model_is_a_valid_file(trained, tmp_path):
    """Written and read without a loss."""
    artefact.write_model(trained.model, tmp_path / "m.json")
    assert artefact.load(tmp_path / "m.json") == trained.model


def test_held_out_chances_are_chances_of_every_row(trained):
    """One a row, none missing."""
    assert trained.p50.shape == (len(trained.examples),)
    assert np.isfinite(trained.p50).all()
    ahead = trained.examples.ahead
    assert trained.p50[(ahead > 0) & (ahead < 25)].mean() > 5 * trained.p50[np.isinf(ahead)].mean()


def test_a_head_says_what_scikit_learn_says():
    """To the rounding of 32 bits, with missing values."""
    table, labels = tables(4, 6)
    part = examples(table, labels).at_risk()
    classifier = grow(part, SMALL).hazards[1]
    head = head_of(classifier)
    rows = range(0, len(part), 37)
    assert [head.logit(part.x[i].astype(float).tolist()) for i in rows] == pytest.approx(
        classifier.decision_function(part.x[list(rows)]).tolist(), abs=1e-5
    )


def test_a_split_between_what_is_missing_and_what_is_not_is_a_number_too():
    """Scikit-learn asks whether a value is at most infinity; a file cannot."""
    table, labels = tables(4, 6)
    part = examples(table, labels).at_risk()
    part.x[part.ahead < 60, :] = math.nan
    head = head_of(grow(part, SMALL).hazards[1])
    asked = [t for tree in head.trees for t in tree.threshold]
    assert max(asked) > 1e100
    assert all(math.isfinite(t) for t in asked)
    assert head.logit([math.nan] * len(FEATURES)) > head.logit([0.0] * len(FEATURES))


def test_examples_are_the_features_of_the_run_and_its_distance_to_the_onset():
    """The same numbers a live run has; from the onset on the distance is not positive."""
    table, labels = tables(1, 1)
    part = examples(table, labels)
    assert part.x.shape == (len(part), len(FEATURES))
    assert part.ahead[part.run == 0].tolist() == [ONSET - s for s in part.step[part.run == 0]]
    assert np.isinf(part.ahead[part.run == 1]).all()
    assert part.left[-1] == 0
    assert set(part.kind[part.run == 0]) == {"ent_low"}
    assert len(part.at_risk()) == (part.ahead > 0).sum()


def test_what_is_dropped_is_missing_and_nothing_else_changes():
    """Metric dropout is the run's own features without those of a signal."""
    table, labels = tables(1, 1)
    part = examples(table, labels)
    poorer = part.without(["entropy"])
    gone = [i for i, name in enumerate(FEATURES) if "entropy" in name.split(":")]
    assert np.isnan(poorer.x[:, gone]).all()
    kept = [i for i in range(len(FEATURES)) if i not in gone]
    np.testing.assert_array_equal(poorer.x[:, kept], part.x[:, kept])


def test_rows_whose_end_was_not_seen_count_only_as_long_as_they_were_watched():
    """Onset at 10, 30 and 80 steps; a run that ends in 30 steps without one; one that goes on."""
    ahead = np.array([10.0, 30.0, 80.0, math.inf, math.inf, -3.0])
    part = _made(np.arange(6), ahead, left=np.array([15.0, 35.0, 90.0, 30.0, 500.0, 9.0]))
    assert [(rows.tolist(), hit.tolist()) for rows, hit in intervals(part)] == [
        ([0, 1, 2, 3, 4], [True, False, False, False, False]),
        ([1, 2, 4], [True, False, False]),
        ([2, 4], [True, False]),
    ]


def _made(step, ahead=None, *, run=None, left=None):
    n = len(step)
    return Examples(
        x=np.zeros((n, len(FEATURES)), np.float32),
        run=np.zeros(n, np.int64) if run is None else run,
        step=step,
        ahead=np.full(n, math.inf) if ahead is None else ahead,
        left=np.full(n, 999.0) if left is None else left,
        static=np.zeros(n),
        kind=np.full(n, "", dtype="U8"),
    )


def test_alarms_within_25_steps_are_one_episode_and_runs_are_kept_apart():
    """Counted by hand."""
    part = _made(np.array([40, 41, 60, 90, 40, 41]), run=np.array([0, 0, 0, 0, 1, 1]))
    assert thresholds.episodes(part, np.array([1, 1, 1, 1, 0, 1], bool)) == 3
    assert thresholds.episodes(part, np.zeros(6, bool)) == 0


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.5, 1.0, 5.0]))
def test_a_threshold_keeps_its_budget_and_a_lower_one_would_not_be_needed_less(seed, budget):
    """Episodes at the threshold are within the budget; steps are counted by the cadence of the log."""
    draw = np.random.default_rng(seed)
    part = _made(np.tile(np.arange(0, 2000, 5), 3), run=np.repeat(np.arange(3), 400))
    scores = draw.random(1200)
    assert thresholds.steps_watched(part) == 6000
    found = thresholds.threshold(part, scores, budget)
    assert thresholds.episodes(part, scores >= found) <= budget * 6


@pytest.mark.parametrize("alike", [True, False])
def test_both_layers_together_keep_the_budget_and_make_the_most_of_it(alike):
    """Where they alarm at the same rows, each gets more than its share; the union never goes beyond the budget."""
    draw = np.random.default_rng(1)
    part = _made(np.tile(np.arange(3000), 10), run=np.repeat(np.arange(10), 3000))
    model = draw.random(30_000)
    static = model if alike else draw.random(30_000)
    for budget, (first, second) in zip((0.5, 2.0), thresholds.jointly(part, model, static, (0.5, 2.0)), strict=True):
        both = thresholds.episodes(part, (model >= first) | (static >= second))
        assert both <= 30 * budget
        alone = thresholds.threshold(part, model, budget * (1.0 - thresholds.STATIC_SHARE))
        assert (first < alone) is alike


def test_the_median_of_the_last_rows_is_that_of_the_forecaster():
    """Within a run only: of three rows, or of as many as span ten steps."""
    run, scores = np.array([0, 0, 0, 0, 1, 1]), np.array([0.0, 9.0, 1.0, 2.0, 5.0, 7.0])
    at = np.array([4, 5, 6, 7, 4, 5])

    assert thresholds.smoothed(_made(at, run=run), scores).tolist() == [0.0, 4.5, 1.0, 2.0, 5.0, 6.0]
    assert thresholds.smoothed(_made(10 * at, run=run), scores).tolist() == [0.0, 4.5, 5.0, 1.5, 5.0, 6.0]
    assert thresholds.smoothed(_made(20 * at, run=run), scores).tolist() == scores.tolist()


def test_logs_of_one_run_at_several_cadences_are_as_many_runs():
    """Each row stands for the steps of its own log, and an alarm in both logs is two."""
    part = _made(np.array([40, 45, 50, 40, 50]))

    assert thresholds.steps_watched(part) == 15 + 20
    assert thresholds.episodes(part, np.array([0, 0, 1, 1, 0], bool)) == 2


def test_alarms_shortly_before_an_onset_are_no_false_ones():
    """Of failing runs the rows long before; of sound ones all; of faulty ones those before it; of doubtful ones none."""
    ahead = np.array([150.0, 100.0, *[math.inf] * 4])
    part = _made(np.array([0, 50, 7, 7, 8, 9]), ahead, run=np.array([0, 0, 1, 2, 2, 3]))
    table, labels = fleet([150, None, None, None])
    table = replace(table, faults=(9, None, 8, None), families=("bad", "healthy", "bad", "healthy"))
    kinds = (RunOutcome.EVENT, RunOutcome.CLEAN, RunOutcome.FAULTY, RunOutcome.AMBIGUOUS)
    labels = Labels("test", tuple(replace(label, outcome=kind) for label, kind in zip(labels, kinds, strict=True)))

    sound = thresholds.sound_until(table, labels)

    assert sound[1:].tolist() == [math.inf, 8.0, -math.inf]
    assert thresholds.healthy(part, sound).tolist() == [True, False, True, True, False, False]


def test_calibration_finds_the_line_that_made_the_outcomes():
    """Log-odds that were twice too bold, and shifted."""
    draw = np.random.default_rng(0)
    true = draw.normal(-1.0, 2.0, 20_000)
    hit = draw.random(20_000) < 1 / (1 + np.exp(-true))
    slope, offset = platt_line(2 * true + 1.0, hit)
    assert (slope, offset) == (pytest.approx(0.5, abs=0.03), pytest.approx(-0.5, abs=0.06))
    assert platt_line(true, np.zeros(20_000, bool)) == (1.0, 0.0)


def test_a_coarse_log_holds_means_at_the_last_step_of_each_stretch():
    """NaN stays NaN; a metric logged now and then is the mean of what was logged."""
    rows = [
        (s, {"a": float(s)} | ({"b": 2.0} if s == 7 else {}) | ({"c": math.nan} if s == 2 else {"c": 1.0}))
        for s in range(10)
    ]
    (first, one), (second, two) = coarse(rows, 5)
    assert (first, second) == (4, 9)
    assert (one["a"], two["a"], two["b"], "b" in one, two["c"]) == (2.0, 7.0, 2.0, False, 1.0)
    assert math.isnan(one["c"])


def test_too_few_runs_are_refused_with_their_numbers():
    """Before any work is done."""
    with pytest.raises(ConfigError, match=r"at least 40 runs.*these are 24 with 12 and 12"):
        train(*tables(12, 12))
