"""Rows that detectors take at once: findings and state are those of one row after the other."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.detectors.base import LONGEST, USUAL, BaseDetector, DetectorSet, Stretch, stretches
from rlwatch.detectors.context import RunContext
from rlwatch.detectors.registry import default_detectors
from rlwatch.metrics import BY_NAME
from rlwatch.monitor import Monitor
from rlwatch.monitor.forecasting import forecaster_for
from rlwatch.records import ClosedStep, Severity, StepRecord
from rlwatch.stats import Hold, Ranked, Window
from rlwatch.testing.detector_contract import whole_run

NAMES = [name for name in BY_NAME if not name.endswith("/")]
LEVELS = {
    "reward/mean": 0.4, "reward/std": 0.3, "policy/entropy": 0.6, "optim/grad_norm": 0.4, "policy/kl_ref": 0.03,
    "len/mean": 820.0, "len/max": 2000.0, "len/min": 90.0, "len/clipped": 0.03, "ratio/clipfrac": 0.01,
    "policy/kl_old": 0.002, "time/step": 73.0, "time/throughput": 1700.0, "critic/value_loss": 0.1,
    "critic/value_mean": 0.4, "critic/returns_mean": 0.4, "critic/value_clipfrac": 0.01, "critic/explained_var": 0.6,
}  # fmt: skip
"""Metrics of a run in good order."""


def run_of(seed: int, rows: int = 420, every: int = 1) -> list[ClosedStep]:
    """A run whose metrics are calm for stretches, then drift, jump, are missing, or are not finite for some rows."""
    draw = random.Random(seed)
    levels = dict(LEVELS) if seed % 2 else dict.fromkeys(draw.sample(NAMES, 60), 0.5) | LEVELS
    made, pace = [], dict.fromkeys(levels, 1.0)
    for row in range(rows):
        if draw.random() < 0.02:
            pace[draw.choice(list(levels))] = draw.choice((0.9, 0.97, 1.0, 1.03, 1.2))
        levels = {name: min(level * pace[name], 1e6) for name, level in levels.items()}
        values = {name: level * draw.gauss(1.0, 0.03) for name, level in levels.items()}
        if draw.random() < 0.03:
            values[draw.choice(list(values))] *= draw.choice((30.0, 0.0, -1.0, float("nan")))
        if draw.random() < 0.02:
            values.pop(draw.choice(list(values)))
        made.append(ClosedStep(row * every, values, ts=10.0 * row + 1.0, seq=row + 1))
    return made


def assert_equal_findings(run):
    """Assert that detectors find the same in ``run`` row by row and in stretches of either length."""
    single = DetectorSet(default_detectors())
    expected = [single.update(row) for row in run]
    for most in (USUAL, LONGEST):
        stretched, found = DetectorSet(default_detectors()), []
        for rows in stretches(run, longest=lambda most=most: most):
            stretched.ahead(rows)
            found += map(stretched.update, rows)

        assert found == expected
        assert not single.broken
        assert not stretched.broken


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("seed", range(8))
def test_stretches_give_the_findings_of_single_rows(seed, every):
    """Every row's findings, from every detector, through calm rows and failures."""
    run = run_of(seed, every=every)
    assert_equal_findings(run)


REWARDS = {
    "noisy": lambda draw, row: 0.4 + draw.gauss(0.0, 0.12),
    "of eight answers": lambda draw, row: sum(draw.random() < 0.4 for _ in range(8)) / 8.0,
    "rising": lambda draw, row: 0.1 + 0.6 * row / 400.0 + draw.gauss(0.0, 0.04),
    "falling": lambda draw, row: 0.7 - 0.5 * max(row - 250, 0) / 170.0 + draw.gauss(0.0, 0.03),
    "lost": lambda draw, row: (0.7 if row < 300 else 0.05) + draw.gauss(0.0, 0.02),
    "rarely earned": lambda draw, row: float(draw.random() < 0.03),
    "penalties": lambda draw, row: -3.0 + 2.0 * (row > 200) + draw.gauss(0.0, 0.5),
    "zeros of both signs": lambda draw, row: draw.choice((0.0, -0.0, 0.5)),
    "repeated": lambda draw, row: 0.5 if row % 90 > 60 else draw.choice((0.4, 0.6)),
}
"""Mean rewards of different kinds, by row."""


@pytest.mark.parametrize("every", [1, 3, 20])
@pytest.mark.parametrize("kind", REWARDS)
def test_rewards_of_any_kind_give_the_findings_of_single_rows(kind, every):
    """Also where rows are far or unevenly apart, and the entropy is spent or a gradient comes with the reward."""
    draw, run, at = random.Random(kind), [], 0
    for row in range(420):
        at += every if draw.random() < 0.99 else 2 * every
        values = {name: level * draw.gauss(1.0, 0.03) for name, level in LEVELS.items()}
        values |= {"reward/mean": REWARDS[kind](draw, row), "policy/entropy": 2.0 * 0.99**row * draw.gauss(1.0, 0.02)}
        values |= {"optim/grad_norm": 0.4 * draw.gauss(1.0, 0.2) * (1.0 + row / 100.0)}
        run.append(ClosedStep(at, values, ts=10.0 * row + 1.0, seq=row + 1))
    assert_equal_findings(run)


@pytest.mark.parametrize("kind", REWARDS)
def test_a_context_extended_is_a_context_updated_row_by_row(kind):
    """All that detectors ask of it, after each of many stretches of different lengths."""
    draw, at, row, one, other = random.Random(kind), 0, 0, RunContext(), RunContext()
    asked = ("now", "best", "start", "noise", "wander", "error", "above", "still")
    while row < 400:
        rows = []
        for _ in range(draw.choice((1, 2, 7, 30, 64))):
            at, row = at + (1 if draw.random() < 0.98 else 4), row + 1
            values = {
                "reward/mean": REWARDS[kind](draw, row),
                "reward/std": draw.random(),
                "len/clipped": draw.random(),
            }
            rows.append(ClosedStep(at, values | {"optim/grad_norm": draw.choice((0.0, draw.random()))}, seq=row))
        one.extend(Stretch(rows))
        for each in rows:
            one.update(each)
            other.update(each)
        of = [
            [getattr(each.reward, name) for name in asked]
            + [each.reward.fallen(), each.reward.risen(), each.reward.low(0.3), each.reward.taking_off()]
            + [each.silent, each.grad, each.grad_ratio, each.truncated, each.newly_truncated, each.stiff, each.mute()]
            for each in (one, other)
        ]

        assert of[0] == of[1]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.floats(-1e6, 1e6)), max_size=40),
    st.lists(st.floats(-1e6, 1e6) | st.sampled_from((0.0, -0.0, 1.0)), min_size=1, max_size=40),
    st.sampled_from([1, 2, 7]),
    st.sampled_from([(10, 15, 3), (10, 15, 6), (9, 10**9, 5), (8, 8, 5)]),
)
def test_medians_of_rows_ahead_are_those_of_rows_added(before, then, gap, size):
    """With their spreads and the oldest row, digit for digit, and without a change to the window."""
    rows, steps, least = size
    one, other = (Window(rows=rows, steps=steps, least=least) for _ in range(2))
    at = 0
    for between, value in before:
        at += between
        one.update(at, value)
        other.update(at, value)
    ahead = [at + gap * (i + 1) for i in range(len(then))]
    medians, oldest, (same, spreads) = (
        one.medians(ahead, then),
        one.oldest_after(ahead),
        one.medians_and_spreads(ahead, then),
    )
    kept, expected = one.state_dict(), []
    for row in zip(ahead, then, strict=True):
        other.update(*row)
        expected.append((other.get(), other.oldest, other.spread))

    assert repr(list(zip(medians, oldest, spreads, strict=True))) == repr(expected)
    assert repr(same) == repr(medians)
    assert one.values == kept["_values"]


def test_most_detectors_take_calm_rows_at_once():
    """Judged one by one, the rows of a run in good order would cost each detector its work."""
    draw = random.Random(0)
    run = [
        ClosedStep(step, {name: level * draw.gauss(1.0, 0.03) for name, level in LEVELS.items()}, ts=step + 1.0)
        for step in range(400)
    ]
    detectors = [one for one in default_detectors() if isinstance(one, BaseDetector)]
    panel, judged = DetectorSet(detectors), dict.fromkeys((one.name for one in detectors), 0)
    for rows in stretches(run):
        panel.ahead(rows)
        for one in detectors:
            judged[one.name] += 0 if one.rests(True) else len(rows)
        for row in rows:
            panel.update(row)

    reading = [one for one in detectors if set(one.reads) & LEVELS.keys()]
    assert sum(judged[one.name] <= 128 for one in reading) >= len(reading) // 2


def test_stretches_are_long_while_hardly_any_row_is_judged_by_itself():
    """One odd row of a long stretch costs many others, so a run that is not calm has short ones."""
    draw, panel, lengths = random.Random(0), DetectorSet(default_detectors()), []
    spread = [0.03] * 900 + [0.4] * 300
    run = [
        ClosedStep(step, {name: level * abs(draw.gauss(1.0, by)) for name, level in LEVELS.items()}, ts=step + 1.0)
        for step, by in enumerate(spread)
    ]
    for rows in stretches(run, longest=lambda: panel.longest):
        panel.ahead(rows)
        lengths.append(len(rows))
        for row in rows:
            panel.update(row)

    assert lengths[0] == 24
    assert max(lengths) == LONGEST
    assert lengths[-3:-1] == [USUAL, USUAL]


class FailsAt(BaseDetector):
    """Raises at one step, and reports every other row, so that a row after it would show."""

    name, family, kinds = "fails", "system", ("fails",)
    reads, requires = ("reward/mean",), (("reward/mean",),)

    def judge(self, step):
        """Raise at step 20."""
        if step.step == 20:
            raise ValueError(step.step)
        return [self.finding(step, "fails", Severity.INFO, "still here")]


def test_a_detector_that_fails_within_a_stretch_is_removed_at_that_row():
    """The rest of the stretch goes on without it, as single rows do."""
    run = [ClosedStep(step, {"reward/mean": 0.5}) for step in range(64)]
    single, stretched = (DetectorSet([*default_detectors()[:1], FailsAt()]) for _ in range(2))
    expected = [single.update(row) for row in run]
    found = []
    for rows in stretches(run):
        stretched.ahead(rows)
        found += map(stretched.update, rows)

    assert found == expected
    assert [len(one) for one in found] == [1] * 20 + [0] * 44
    assert stretched.broken.keys() == single.broken.keys() == {"fails"}


def test_a_stretch_holds_rows_with_equal_names_finite_and_ascending():
    """Where a name comes or goes, a value is not finite, or a step is repeated, a new one begins."""
    metrics = [{"a": 1.0}, {"a": 1.0}, {"a": 1.0, "b": 1.0}, {"a": float("nan")}, {"a": 1.0}, {"a": 1.0}]
    rows = [ClosedStep(step, row) for step, row in zip((1, 2, 3, 4, 5, 5), metrics, strict=True)]

    assert [[row.step for row in part] for part in stretches(rows)] == [[1, 2], [3], [4], [5], [5]]


@pytest.mark.parametrize("seed", range(3))
def test_a_monitor_in_batches_of_any_size_keeps_the_state_of_single_rows(seed):
    """What it reports later does not depend on how earlier rows were cut."""
    rows = [
        StepRecord(row.step, row.metrics, ts=row.ts, seq=row.seq)
        for row in (run_of(seed) if seed else whole_run(2, 300))
    ]
    whole, cut = (Monitor(run_id="run", forecaster=forecaster_for(wanted=False)) for _ in range(2))
    draw, at = random.Random(seed), 0
    while at < len(rows) - 100:
        some = draw.choice((1, 5, 40, 100))
        for _ in cut.observing_all(rows[at : at + some]):
            pass
        at += some
    for row in rows[:at]:
        whole.observe(row)

    assert [cut.observe(row) for row in rows[at:]] == [whole.observe(row) for row in rows[at:]]


ROWS = st.lists(st.tuples(st.integers(1, 30), st.floats(-1e6, 1e6)), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(ROWS, ROWS, st.sampled_from([(10, 10, 3), (8, 8, 5), (20, 15, 3), (48, 10**9, 6)]))
def test_a_window_extended_is_a_window_updated_row_by_row(before, then, size):
    """Its rows, its median and its quantile."""
    rows, steps, least = size
    for kind in (Window, Ranked):
        one, other = (kind(rows=rows, steps=steps, least=least) for _ in range(2))
        at, values, made = 0, [], []
        for gap, value in before:
            at += gap
            one.update(at, value)
            other.update(at, value)
        for gap, value in then:
            at += gap
            made.append(at)
            values.append(value)
        one.extend(made, values)
        for row in zip(made, values, strict=True):
            other.update(*row)

        assert (one.at, one.values, one.get(), one.spread) == (other.at, other.values, other.get(), other.spread)
        if kind is Ranked:
            assert one.quantile(0.9) == other.quantile(0.9)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=30),
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
    st.integers(0, 3),
)
def test_a_hold_that_misses_rows_at_once_is_one_that_missed_each(before, gaps, forgive):
    """Its beginning, its rows, and how it goes on."""
    one, other = Hold(forgive), Hold(forgive)
    at, missed = 0, []
    for gap, condition in before:
        at += gap
        one.update(at, condition)
        other.update(at, condition)
    for gap in gaps:
        at += gap
        missed.append(at)
        other.update(at, condition=False)
    one.miss(missed)

    assert one.state_dict() == other.state_dict()
