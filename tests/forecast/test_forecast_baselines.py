"""The simple tools: causal by construction, and each by figures worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from forecast.scoring.baselines import BASELINES, WATCHED, Tool, run_baselines, run_tool, slopes
from forecast_small_tables import run_table
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.metrics import BY_NAME

VALUES = st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 50.0, -1.0, math.nan, math.inf, None])


def told(name: str, rows: list[dict[str, float]], steps: list[int] | None = None) -> list[float | None]:
    """What a fresh tool says of each row."""
    tool: Tool = BASELINES[name](7)
    return [tool.update(step, row) for step, row in zip(steps or range(len(rows)), rows, strict=True)]


def test_watched_metrics_are_the_tables() -> None:
    """22 canonical names."""
    assert len(WATCHED) == len(set(WATCHED)) == 22
    assert set(WATCHED) <= set(BY_NAME)


@pytest.mark.parametrize("name", BASELINES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_what_is_said_of_a_step_does_not_change_when_later_rows_are_cut_off(name: str, data: st.DataObject) -> None:
    """On irregular steps, with NaN, infinities and gaps."""
    metrics = ("policy/entropy", "mismatch/k3", "reward/mean")
    rows = [
        {metric: value for metric, value in zip(metrics, cells, strict=True) if value is not None}
        for cells in data.draw(st.lists(st.tuples(VALUES, VALUES, VALUES), min_size=60, max_size=90))
    ]
    gaps = data.draw(st.lists(st.integers(1, 5), min_size=len(rows), max_size=len(rows)))
    steps = np.cumsum(gaps).tolist()
    cut = data.draw(st.integers(1, len(rows)))

    assert told(name, rows[:cut], steps[:cut]) == told(name, rows, steps)[:cut]


LOOKING = [name for name in BASELINES if name not in {"never", "always", "random score", "step index"}]


@pytest.mark.parametrize("name", LOOKING)
def test_rows_without_any_metric_say_nothing(name: str) -> None:
    """Three-step runs, empty rows and columns of NaN are no error."""
    nan = {"policy/entropy": math.nan, "mismatch/k3": math.nan}

    assert set(told(name, [{}] * 3)) == {None}
    assert set(told(name, [{}] * 100)) <= {None, 0.0}
    assert all(score is None or score in {0.0, math.inf} for score in told(name, [nan] * 100))


def test_the_constant_tools() -> None:
    """Silence, alarm, clock; noise is drawn anew in each run and alike in each repetition."""
    rows: list[dict[str, float]] = [{}] * 3

    assert told("never", rows) == [None, None, None]
    assert told("always", rows) == [1.0, 1.0, 1.0]
    assert told("step index", rows, [0, 5, 9]) == [0.0, 5.0, 9.0]
    assert told("random score", rows) == told("random score", rows)
    assert len(set(told("random score", rows))) == 3


def test_static_is_the_share_of_the_way_to_the_limit() -> None:
    """Gradient norm 1, limit 6: at 3.5 half of the way; the level is the median of 5 rows."""
    rows = [{"optim/grad_norm": 1.0}] * 60 + [{"optim/grad_norm": 3.5}] * 10
    found = told("static limits", rows)

    assert found[:40] == [None] * 40
    assert found[59] == 0.0
    assert found[61] == 0.0  # two of five
    assert found[62] == 0.5


def test_static_reads_the_reward_in_place_of_the_hidden_accuracy() -> None:
    """Half of the way from the best, 0.8, to 0.6 of it, 0.48; truth itself is nothing to it."""
    rows = [{"reward/mean": 0.8}] * 60 + [{"reward/mean": 0.64}] * 10

    assert told("static limits", rows)[-1] == pytest.approx(0.5)
    assert told("static limits", [{"truth/acc": 0.8 - 0.01 * i} for i in range(70)]) == [None] * 70


@pytest.mark.parametrize("name", ["static limits", "linear extrapolation"])
def test_what_is_not_finite_is_the_worst(name: str) -> None:
    """At once, also before the baseline is known."""
    assert told(name, [{"loss/policy": 0.1}, {"loss/policy": math.nan}])[1] == math.inf


def test_extrapolation_is_a_half_where_the_limit_is_50_steps_ahead() -> None:
    """k3 grows by 0.001 a step from 0: at a level of 0.05 it is 50 steps from 0.1."""
    found = told("linear extrapolation", [{"mismatch/k3": 0.001 * step} for step in range(300)])

    # the baseline is 0.0245, so the limit is 0.1225; the level is that of two steps before
    at = 122 - 50 + 2
    assert found[at] == pytest.approx(0.5, abs=0.01)
    assert (found[130] or 0.0) > 1.0
    assert told("linear extrapolation", [{"mismatch/k3": 0.01}] * 100)[-1] == 0.0


def test_slopes_are_least_squares_of_what_is_there() -> None:
    """Against numpy, with gaps; 0 of too few points."""
    x = np.array([0.0, 1.0, 3.0, 7.0, 8.0])
    columns = np.array([[1.0, np.nan], [2.0, 5.0], [2.5, np.nan], [9.0, 1.0], [4.0, np.nan]])

    assert slopes(x, columns)[0] == pytest.approx(np.polyfit(x, columns[:, 0], 1)[0])
    assert slopes(x, columns)[1] == 0.0


def test_ewma_z_is_in_standard_deviations_and_forgets() -> None:
    """A step of ten spreads is 10 at first, and less after."""
    quiet = [{"len/mean": 100.0 + (-1) ** i} for i in range(60)]
    found = told("EWMA z", quiet + [{"len/mean": 120.0}] * 60)

    assert (found[59] or 0.0) < 1.5
    assert (found[60] or 0.0) > 8.0
    assert (found[119] or 99.0) < 1.5


def test_cusum_adds_up_what_is_beyond_the_slack() -> None:
    """Two spreads above the baseline are 1.5 a row, for ever; below counts as well."""
    rows = [{"len/mean": 100.0}] * 60  # no spread: 2 % of the level stands for it
    for level in (104.0, 96.0):
        found = told("CUSUM", rows + [{"len/mean": level}] * 10)
        assert found[59] == 0.0
        assert found[69] == pytest.approx(15.0, rel=1e-3)


def test_early_warning_rises_with_variance_and_with_memory() -> None:
    """White noise as at the start says little; ten times of it more; a slow wander of that size still more."""
    random = np.random.default_rng(0)
    start = random.normal(1.0, 0.1, 60)
    slow = np.cumsum(random.normal(0, 1, 200))

    def after(values: np.ndarray) -> float:
        rows = [{"policy/entropy": float(v)} for v in np.concatenate([start, values])]
        return told("early-warning statistics", rows)[-1] or 0.0

    white, loud = after(random.normal(1.0, 0.1, 200)), after(random.normal(1.0, 1.0, 200))
    wander = after(1.0 + slow / slow[-40:].std())
    assert white < 1.0 < loud
    assert loud > 3.0
    assert wander > white + 2.0


def test_every_tool_is_run_on_every_run_from_its_own_start() -> None:
    """A run's scores do not depend on the runs beside it."""
    random = np.random.default_rng(1)
    runs = {name: {"policy/entropy": random.random(70).tolist()} for name in ("a", "b", "c")}
    together = {tool.name: tool for tool in run_baselines(run_table(runs))}

    assert list(together) == list(BASELINES)
    assert [tool.name for tool in together.values() if tool.alarms_only] == ["never", "always"]
    for name, make in BASELINES.items():
        alone = run_tool(name, make, run_table({"b": runs["b"]}))
        np.testing.assert_array_equal(together[name].score[70:140], alone.score)


def test_a_tool_sees_one_row_at_a_time_and_nothing_hidden() -> None:
    """Look-ahead has no door: no table, no run's length, no recipe, no truth."""
    seen: list[tuple[int, dict[str, float]]] = []

    class Nosy:
        def update(self, step: int, metrics: dict[str, float]) -> float:
            seen.append((step, dict(metrics)))
            return 0.0

    run_tool("nosy", lambda _seed: Nosy(), run_table({"a": {"reward/mean": [0.5, None], "truth/acc": [1.0, 0.0]}}))

    assert seen == [(0, {"reward/mean": 0.5}), (1, {})]
