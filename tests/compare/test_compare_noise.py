"""Groups of seeds: p by brute force, false positives of twins, the date of a planted parting, and what must not matter."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import records, sound, subject

from rlwatch.compare import Answer, MetricSeries, SeedGroup, compare_groups, compare_seeds, group_of, runs_of_group
from rlwatch.compare.noise import ALPHA, differences, labellings, needed, smallest_p
from rlwatch.errors import ConfigError
from rlwatch.records import Curation, RunInfo

STEPS = 200


def wandering(rng: np.random.Generator, runs: int, steps: int = STEPS, phi: float = 0.9) -> np.ndarray:
    """AR(1) curves (runs, steps) of unit variance around a level of each seed's own."""
    noise, curves = rng.normal(size=(runs, steps)), np.empty((runs, steps))
    curves[:, 0] = noise[:, 0]
    for i in range(1, steps):
        curves[:, i] = phi * curves[:, i - 1] + math.sqrt(1 - phi**2) * noise[:, i]
    return curves + 0.3 * rng.normal(size=(runs, 1))


def seeds(curves: np.ndarray, every: int = 1) -> list[MetricSeries]:
    """Each row as the metric of a run."""
    return [MetricSeries(np.arange(0.0, len(row) * every, every), row) for row in curves]


def test_twins_differ_no_more_often_than_the_level_says():
    """200 draws of four against four seeds: alpha, and three standard deviations of a count of 200."""
    found = 0
    for draw in range(200):
        curves = wandering(np.random.default_rng(draw), 8)
        found += compare_seeds(seeds(curves[:4]), seeds(curves[4:])).answer is Answer.DIFFERS

    assert found / 200 <= ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / 200)


@pytest.mark.parametrize("at", [0.3, 0.6])
def test_a_planted_parting_is_found_and_dated(at: float):
    """Three standard deviations of a seed, from a step on: within 12 % of the length, in nine of ten."""
    found = []
    for draw in range(30):
        curves = wandering(np.random.default_rng(draw), 8)
        curves[4:, int(at * STEPS) :] += 3.0
        found.append(compare_seeds(seeds(curves[:4]), seeds(curves[4:])))

    assert sum(one.answer is Answer.DIFFERS for one in found) >= 27
    dated = [one.since is not None and abs(one.since - at * STEPS) <= 0.12 * STEPS for one in found]
    assert sum(dated) >= 27


def test_a_difference_that_ends_is_given_its_end():
    """And one that lasts has none."""
    curves = wandering(np.random.default_rng(3), 8)
    curves[4:, 60:120] += 8.0
    passing = compare_seeds(seeds(curves[:4]), seeds(curves[4:]))
    curves[4:, 120:] += 8.0
    lasting = compare_seeds(seeds(curves[:4]), seeds(curves[4:]))

    assert passing.since == pytest.approx(60, abs=24)
    assert passing.until == pytest.approx(120, abs=24)
    assert lasting.until is None


def by_hand(rows: list[list[float]], left: int) -> float:
    """p of curves of no more than 20 rows, in plain Python: every labelling, every place, the largest difference."""
    runs, places = len(rows), len(rows[0])
    around = max(1, round(4 * places / 20))

    def largest(chosen: set[int]) -> float:
        within, apart = [], []
        for t in range(places):
            a = [rows[i][t] for i in range(runs) if i in chosen]
            b = [rows[i][t] for i in range(runs) if i not in chosen]
            mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
            squares = sum((v - mean_a) ** 2 for v in a) + sum((v - mean_b) ** 2 for v in b)
            within.append(squares / (runs - 2))
            apart.append(abs(mean_a - mean_b))
        found = []
        for t in range(places):
            near = within[max(0, t - (around - 1) // 2) : t + around // 2 + 1]
            found.append(apart[t] / math.sqrt(sum(near) / len(near)))
        return max(found)

    own = largest(set(range(left)))
    every = [largest(set(chosen)) for chosen in combinations(range(runs), left)]
    return sum(one >= own * (1 - 1e-6) for one in every) / len(every)


@pytest.mark.parametrize(("left", "right", "places"), [(2, 2, 1), (3, 3, 7), (4, 4, 12), (2, 5, 20), (4, 3, 16)])
def test_p_is_that_of_every_labelling_tried_by_hand(left: int, right: int, places: int):
    """Small enough that nothing is averaged."""
    for draw in range(5):
        values = np.random.default_rng(draw).normal(size=(left + right, places))
        values[:left] += draw
        found = compare_seeds(seeds(values[:left]), seeds(values[left:]))

        assert found.exact
        assert found.p == pytest.approx(by_hand(values.tolist(), left))


@pytest.mark.parametrize(
    ("left", "right", "least", "enough"),
    [(2, 2, 1 / 3, (4, 5)), (3, 2, 0.1, (4, 4)), (3, 3, 0.1, (4, 4)), (4, 4, 2 / 70, (4, 4)), (2, 5, 1 / 21, (5, 2))],
)
def test_too_few_seeds_say_how_many_are_needed(left: int, right: int, least: float, enough: tuple[int, int]):
    """However far apart they are: the least p is a matter of counting."""
    apart = np.concatenate([np.zeros((left, 30)), np.full((right, 30), 9.0)]) + np.arange(left + right)[:, None] / 100
    found = compare_seeds(seeds(apart[:left]), seeds(apart[left:]))

    assert found.smallest_p == smallest_p(left, right) == pytest.approx(least)
    assert found.needed == needed(left, right) == enough
    assert found.p == pytest.approx(least)
    assert found.answer is (Answer.DIFFERS if least <= ALPHA else Answer.TOO_FEW)


def test_many_seeds_are_tried_by_labellings_drawn_at_random_always_the_same():
    """C(20, 10) is 184 756; what was run is one of those tried, so p is never 0."""
    chosen, exact = labellings(10, 10)
    curves = wandering(np.random.default_rng(1), 20, 60)
    curves[10:, 30:] += 4.0
    one, again = (compare_seeds(seeds(curves[:10]), seeds(curves[10:])) for _ in range(2))

    assert (len(chosen), exact, one.exact) == (10_001, False, False)
    assert (chosen.sum(axis=1) == 10).all()
    assert 1 / 10_001 <= one.p == again.p <= 0.001


cases = st.tuples(st.integers(0, 10_000), st.integers(2, 4), st.integers(2, 4), st.integers(1, 40))


@given(cases, st.randoms())
@settings(max_examples=40, deadline=None)
def test_neither_the_order_of_seeds_nor_of_groups_matters(case, random):
    """Up to rounding."""
    draw, left, right, steps = case
    curves = wandering(np.random.default_rng(draw), left + right, steps)
    curves[:left, steps // 2 :] += draw % 4
    one, other = seeds(curves[:left]), seeds(curves[left:])
    found = compare_seeds(one, other)
    swapped = compare_seeds(other, one)
    mixed = compare_seeds(random.sample(one, left), random.sample(other, right))

    for same in (swapped, mixed):
        assert (same.p, same.answer) == (pytest.approx(found.p), found.answer)
        assert (same.since, same.until) == (found.since, found.until)
        assert same.statistic == pytest.approx(found.statistic, rel=1e-5)
    np.testing.assert_array_equal(swapped.bands[1].low, found.bands[0].low)


@given(cases)
@settings(max_examples=30, deadline=None)
def test_steps_matter_by_their_order_alone(case):
    """Rows of the same steps, however those are spaced; the date goes along."""
    draw, left, right, steps = case
    curves = wandering(np.random.default_rng(draw), left + right, steps)
    curves[:left, steps // 2 :] += 5
    stretched = [MetricSeries(np.exp(run.x / 10) - 3, run.values) for run in seeds(curves)]
    found = compare_seeds(seeds(curves[:left]), seeds(curves[left:]))
    same = compare_seeds(stretched[:left], stretched[left:])

    assert (same.p, same.answer) == (found.p, found.answer)
    assert (same.since is None) == (found.since is None)
    if found.since is not None:
        assert same.since == pytest.approx(np.exp(found.since / 10) - 3)


@given(cases, st.floats(0.01, 100.0), st.floats(-100.0, 100.0))
@settings(max_examples=30, deadline=None)
def test_the_unit_of_a_metric_does_not_matter(case, factor: float, offset: float):
    """Other factor and offset, other sign: the same answer."""
    draw, left, right, steps = case
    curves = wandering(np.random.default_rng(draw), left + right, steps)
    found = compare_seeds(seeds(curves[:left]), seeds(curves[left:]))
    same = compare_seeds(seeds(offset - factor * curves[:left]), seeds(offset - factor * curves[left:]))

    assert same.p == pytest.approx(found.p)


def test_gaps_nan_lengths_and_cadences_do_not_hide_a_difference():
    """Every third row missing, NaN, a run that ends early, one that logs every fifth step."""
    curves = wandering(np.random.default_rng(5), 8)
    curves[4:, 80:] += 6.0
    runs = seeds(curves)
    kept = np.arange(STEPS) % 3 > 0
    runs[0] = MetricSeries(runs[0].x[kept], runs[0].values[kept])
    runs[1].values[[5, 50, 90]] = [math.nan, math.inf, -math.inf]
    runs[2] = MetricSeries(runs[2].x[:170], runs[2].values[:170])
    runs[5] = MetricSeries(runs[5].x[::5], runs[5].values[::5])
    runs[6] = MetricSeries(runs[6].x[2::5], runs[6].values[2::5])
    found = compare_seeds(runs[:4], runs[4:])

    assert found.answer is Answer.DIFFERS
    assert found.since == pytest.approx(80, abs=24)
    assert found.not_finite == 1
    assert found.places[-1] <= 170
    for band in found.bands:
        assert band.median.shape == band.std.shape == found.places.shape
        told = band.seeds > 0
        assert (band.low[told] <= band.median[told]).all()
        assert (band.median[told] <= band.high[told]).all()


def test_a_long_curve_is_averaged_and_dated_in_its_own_steps():
    """5 000 rows."""
    curves = wandering(np.random.default_rng(6), 8, 5000)
    curves[4:, 3000:] += 5.0
    found = compare_seeds(seeds(curves[:4]), seeds(curves[4:]))

    assert len(found.places) <= 400
    assert found.since == pytest.approx(3000, abs=600)


def test_seeds_that_are_all_equal_have_no_spread_and_a_difference_is_infinite():
    """A schedule: the arms have different ones, or the same."""
    schedule = np.tile(np.linspace(1e-6, 0, 50), (4, 1))

    same = compare_seeds(seeds(schedule), seeds(schedule))
    other = compare_seeds(seeds(schedule), seeds(2 * schedule))

    assert (same.answer, same.p, same.statistic) == (Answer.NO_DIFFERENCE, 1.0, 0.0)
    assert (other.answer, other.since, other.statistic) == (Answer.DIFFERS, 0.0, math.inf)
    assert np.isfinite(differences(wandering(np.random.default_rng(0), 8), labellings(4, 4)[0])).all()


def test_nothing_in_common_is_told_as_nothing():
    """Runs that end before others begin; a metric that is never finite; one seed."""
    curves = wandering(np.random.default_rng(7), 8, 20)
    late = [MetricSeries(run.x + 1000, run.values) for run in seeds(curves[4:])]
    never = [MetricSeries(run.x, np.full(20, math.nan)) for run in seeds(curves[4:])]

    for other in (late, never):
        found = compare_seeds(seeds(curves[:4]), other)
        assert math.isnan(found.p)
        assert (len(found.places), found.since) == (0, None)
        assert math.isnan(found.bands[0].last)
    with pytest.raises(ValueError, match="right has 1"):
        compare_seeds(seeds(curves[:4]), seeds(curves[4:5]))


def group(name: str, first: int, count: int = 4, **more: object) -> SeedGroup:
    """Sound runs of all kinds of noise, each of a seed of its own."""
    of = [subject(records(sound(150, first + i)), f"{name}-s{i}", seed=i, **more) for i in range(count)]
    return SeedGroup(name, tuple(of))


def test_all_metrics_of_two_groups_and_p_corrected_for_them():
    """Twins: next to nothing; with all metrics no p becomes smaller, and the search is paid for."""
    found = compare_groups(group("a", 0, lr=1e-6), group("b", 100, lr=1e-6))

    assert len(found.metrics) >= 8
    assert all(found.p_of_all[name] >= one.p for name, one in found.metrics.items())
    assert found.left.mixed == []
    assert "metrics" in found.answer


def test_a_group_of_several_configurations_says_so():
    """The seed may differ; a learning rate makes it no group of seeds."""
    one, other = group("a", 0, 2, lr=1e-6), group("a", 4, 2, lr=3e-6)

    assert [setting.name for setting in SeedGroup("a", one.runs + other.runs).mixed] == ["lr"]


@pytest.mark.parametrize(
    ("count", "says"),
    [(2, "Too few seeds: with 4 against 2, p cannot be below 0.067; 4 in each group are needed, or 3 in b alone.")],
)
def test_too_few_seeds_in_a_sentence(count: int, says: str):
    """With what would be enough."""
    found = compare_groups(group("a", 0), group("b", 50, count))

    assert found.too_few
    assert found.answer == says


def test_groups_that_cannot_be_compared_are_one_error_each():
    """No common metric, no common step, one run, one group."""
    a, b = group("a", 0, 2), group("b", 50, 2)
    odd = SeedGroup("odd", tuple(subject(records({"my/own": np.ones(9)}), f"o{i}") for i in range(2)))
    late = SeedGroup("late", tuple(subject(records(sound(50, i), first=900), f"l{i}") for i in range(2)))

    for left, right, says in (
        (a, odd, "no metric is common to all runs of a and odd"),
        (a, late, "no step is common to all runs of a and late"),
        (a, SeedGroup("b", b.runs[:1]), "group 'b' has 1 run"),
        (a, a, "got 'a' twice"),
    ):
        with pytest.raises(ConfigError, match=says):
            compare_groups(left, right)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (RunInfo("r", name="math-7b-s3"), "math-7b"),
        (RunInfo("r", name="math_seed42"), "math"),
        (RunInfo("r", name="loss3"), "loss"),
        (RunInfo("r", name="seed-3"), "seed"),
        (RunInfo("r", name="42"), "42"),
        (RunInfo("r", name="math-7b"), "math-7b"),
        (RunInfo("run-7"), "run"),
        (RunInfo("r", name="x-1", config={"group": "A"}), "A"),
        (RunInfo("r", name="x-1", config={"group": 8}), "x"),
        (RunInfo("r", name="x-1", config={"group": "A"}, tags=("paper", "group:B")), "B"),
    ],
)
def test_the_group_of_a_run_is_its_tag_else_its_setting_else_its_name(run: RunInfo, name: str):
    """Without the seed."""
    assert group_of(run) == name


def test_a_group_is_found_by_name_and_the_near_ones_are_offered():
    """A group of one run is none."""
    runs = [RunInfo(f"id{i}", name=f"{arm}-s{i}") for arm, i in (("low-kl", 1), ("low-kl", 2), ("alone", 1))]

    assert [run.run_id for run in runs_of_group(runs, "low-kl")] == ["id1", "id2"]
    with pytest.raises(ConfigError, match="no group 'low_kl'; there are low-kl"):
        runs_of_group(runs, "low_kl")
    with pytest.raises(ConfigError, match="has one run, id1; a group of seeds needs two"):
        runs_of_group(runs, "alone")
    with pytest.raises(ConfigError, match="no group of this store has two runs"):
        runs_of_group(runs[2:], "nobody")


def test_a_group_is_of_one_project_and_of_runs_that_are_not_deleted():
    """A name in several projects is asked for with one of them."""
    runs = [RunInfo(f"{project}{i}", project, f"arm-{i}") for project in ("math", "code") for i in range(3)]
    runs[0] = replace(runs[0], curation=Curation(deleted_at=1.0))

    with pytest.raises(ConfigError, match="'arm' is in 2 projects; give one of math/arm, code/arm"):
        runs_of_group(runs, "arm")
    assert [run.run_id for run in runs_of_group(runs, "math/arm")] == ["math1", "math2"]
    assert len(runs_of_group(runs, "code/arm")) == 3
