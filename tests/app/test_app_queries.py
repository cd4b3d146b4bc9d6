"""The door to the store: what is read, how often, and what is made of it."""

from dataclasses import replace

import numpy as np
import pytest
from app_world import NAN, alert, put_alerts, write_run
from rlwatch_app import fleet, queries, thinning
from rlwatch_app.queries import Extent

from rlwatch.errors import RunNotFoundError, StoreURLError
from rlwatch.records import RunInfo, StepRecord
from rlwatch.store.url import open_store


class Counting:
    """The open store, counting the reads of whole series."""

    def __init__(self, store):
        self._store = store
        self.read = []
        self.asked = []
        self.rows = 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def series(self, run_id, names, **asked):
        self.read.append((run_id, tuple(names)))
        self.asked.append(asked)
        found = self._store.series(run_id, names, **asked)
        self.rows = sum(len(one.steps) for one in found.values())
        return found


@pytest.fixture
def counted(store_dir, monkeypatch):
    """The app's store, its reads counted."""
    counting = Counting(open_store(str(store_dir)))
    monkeypatch.setattr(queries, "store", lambda: counting)
    return counting


def test_the_store_is_the_one_the_environment_names(store_dir, monkeypatch):
    """Set by ``rlwatch ui``; the default where it is empty."""
    assert queries.store_url() == str(store_dir)
    monkeypatch.setenv("RLWATCH_STORE", "")
    assert queries.store_url() == queries.DEFAULT_STORE


def test_one_open_store_serves_every_session(store_dir):
    """Connections are not opened per look."""
    assert queries.store() is queries.store()


def test_a_bad_store_is_an_error_at_every_look(monkeypatch):
    """A failure is not remembered as a store."""
    monkeypatch.setenv("RLWATCH_STORE", "redis://x")
    for _ in range(2):
        with pytest.raises(StoreURLError):
            queries.store()


@pytest.mark.parametrize("change", [{"last_step": 31}, {"last_ts": 9.0}, {"attempt": 2}, {"state": "finished"}])
def test_a_run_that_moved_on_has_another_version(change):
    """Any new row, attempt or end."""
    run = RunInfo("r", last_step=30, last_ts=8.0)
    if "state" in change:
        change = {"state": type(run.state)(change["state"])}
    assert queries.version(replace(run, **change)) != queries.version(run)
    assert queries.version(replace(run, heartbeat_at=99.0)) == queries.version(run)


def test_an_unchanged_run_is_not_read_again(store_dir, counted):
    """Ten tabs on a finished run cost one read."""
    write_run(store_dir)
    run = queries.run("run-1")
    first = queries.traces(run, (0, 30), ["kl", "reward"])
    reads = len(counted.read)
    assert queries.traces(run, (0, 30), ["kl", "reward"]).keys() == first.keys()
    assert queries.outline(run).last == 30
    queries.vitals(run)
    after_vitals = len(counted.read)
    queries.vitals(run)
    queries.vitals(run)
    assert (len(counted.read), reads) == (after_vitals, 1)


def test_a_chart_costs_what_it_shows(store_dir, counted):
    """Of a long run some points a panel are read, of a window what lies in it."""
    write_run(store_dir, steps=8000, metrics=lambda step: {"reward": NAN if step == 20 else float(step % 7), "lr": 1.0})
    run = queries.run("run-1")
    whole = queries.traces(run, (0, 8000), ["reward", "lr"])
    assert counted.rows < 2 * 5 * queries.BUCKETS
    assert [step for step, _ in whole["reward"].current.bad] == [20]
    narrow = queries.traces(run, (1000, 1002), ["reward"])
    assert narrow["reward"].current.steps.tolist() == [1000, 1001, 1002]


def test_what_a_metric_ever_was_is_known_by_reading_what_is_new(store_dir, counted):
    """Whether it was always finite, and its one value; a later look reads the later rows, and new metrics whole."""
    write_run(store_dir, steps=4000, metrics=lambda step: {"reward": NAN if step == 20 else 1.0, "lr": 0.5})
    first = queries.extents(queries.run("run-1"))
    assert counted.rows < 400
    assert ((first["reward"].finite, first["reward"].level), first["lr"].level) == ((False, None), 0.5)
    write_run(store_dir, steps=3, metrics=lambda step: {"lr": 0.5 + step, "new": float("inf") if step == 1 else 1.0})
    counted.asked.clear()
    later = queries.extents(queries.run("run-1"))
    assert (later["lr"].level, later["lr"].high, later["new"].finite, later["reward"].finite) == (
        None,
        3.5,
        False,
        False,
    )
    assert [asked for asked in counted.asked if "after_seq" in asked] == [{"after_seq": 4000}]


def test_a_run_that_moved_on_is_read_again(store_dir, counted):
    """And shows its new step."""
    write_run(store_dir, steps=30)
    assert queries.outline(queries.run("run-1")).last == 30
    write_run(store_dir, steps=40)
    assert queries.outline(queries.run("run-1")).last == 40


def test_vitals_are_pace_and_last_values(store_dir):
    """From the newest rows' own times; curves are read apart, where somebody sees them."""
    write_run(store_dir, step_s=7.0)
    run = queries.run("run-1")
    vitals = queries.vitals(run)
    assert vitals.step_s == pytest.approx(7.0)
    assert vitals.values["policy/entropy"] == pytest.approx(0.97)
    reward = fleet.sparks(run, vitals, ["reward/mean", "never/logged"])["reward/mean"]
    assert (reward.value, reward.trend) == (pytest.approx(0.5), "↑")
    assert thinning.in_unit_square(reward.curve)[0][0] == [0.0, 0.0]
    assert thinning.in_unit_square(reward.curve)[0][-1] == [1.0, 1.0]


def test_pace_is_per_step_however_rarely_rows_come(store_dir):
    """Logged every ten steps: a tenth of the time between rows."""
    store = open_store(str(store_dir))
    writer = store.open_run(RunInfo("run-1"))
    writer.write([StepRecord(10 * i, {"reward": 1.0}, ts=1000.0 + 50.0 * i) for i in range(1, 9)])
    writer.close()
    assert queries.vitals(queries.run("run-1")).step_s == pytest.approx(5.0)


def test_pace_falls_back_on_what_the_trainer_measured(store_dir):
    """An imported log has no times of its own."""
    store = open_store(str(store_dir))
    writer = store.open_run(RunInfo("run-1", source="trl/grpo"))
    writer.write([StepRecord(i, {"step_time": NAN if i == 3 else 2.0}) for i in range(1, 9)])
    writer.close()
    assert queries.vitals(queries.run("run-1")).step_s == pytest.approx(2.0)


def test_pace_is_unknown_after_one_step(store_dir):
    """Nothing to compare with."""
    write_run(store_dir, steps=1)
    assert queries.vitals(queries.run("run-1")).step_s is None


def test_a_restart_is_not_a_slow_step(store_dir):
    """The hours between attempts are nobody's pace."""
    write_run(store_dir, steps=10, age_s=9000.0)
    write_run(store_dir, steps=10, age_s=1.0)
    assert queries.vitals(queries.run("run-1")).step_s == pytest.approx(5.0)


def test_the_newest_value_is_shown_even_if_it_is_nan(store_dir):
    """Not the last good one."""
    write_run(store_dir, metrics=lambda step: {"reward": NAN if step == 30 else 1.0})
    run = queries.run("run-1")
    reward = fleet.sparks(run, queries.vitals(run), ["reward/mean"])["reward/mean"]
    assert np.isnan(reward.value)
    assert thinning.in_unit_square(reward.curve)[1] == [1.0]


def test_the_fleet_has_every_readable_run_with_its_alerts(store_dir):
    """And says of the others why not."""
    write_run(store_dir, "a")
    write_run(store_dir, "b")
    put_alerts(store_dir, [alert("b")])
    (store_dir / "junk").mkdir()
    (store_dir / "junk" / "run.db").write_bytes(b"junk" * 1000)
    every = fleet.fleet()
    assert {run.run_id for run in every.runs} == set(every.vitals) == {"a", "b"}
    assert [one.kind for one in every.alerts["b"]] == ["entropy_collapse"]
    assert list(every.unreadable) == ["junk"]


def test_an_outline_covers_all_attempts(store_dir):
    """The attempt before came further."""
    write_run(store_dir, steps=30)
    write_run(store_dir, steps=10)
    outline = queries.outline(queries.run("run-1"))
    assert (outline.first, outline.last, dict(outline.starts)) == (1, 30, {1: 1, 2: 1})


def test_a_run_of_unknown_metrics_still_has_a_length(store_dir):
    """From what the run says of itself."""
    write_run(store_dir, metrics=lambda step: {"mine": float(step)})
    assert queries.outline(queries.run("run-1")).last == 30


@pytest.mark.parametrize(
    ("values", "level", "finite"),
    [
        ([1.0] * 5, 1.0, True),
        ([1.0, 1.0], None, True),
        ([1.0, 1.0, 2.0], None, True),
        ([1.0, NAN, 1.0, 1.0], None, False),
        ([np.inf] * 5, None, False),
    ],
)
def test_a_level_is_one_finite_value_all_along(values, level, finite):
    """NaN and infinity are never "unchanging"."""
    found = Extent().grown(np.array(values, dtype=float))
    assert (found.level, found.finite) == (level, finite)


def test_nobody_is_a_run(store_dir):
    """Said with the error that names it."""
    write_run(store_dir)
    with pytest.raises(RunNotFoundError):
        queries.run("nobody")
