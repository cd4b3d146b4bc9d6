"""Slow steps, a counter that stands, metrics that vanish."""

import math
from dataclasses import replace

import pytest
from exact_runs import alarms, always, exact, then, when, worst
from shaped_runs import findings, flat, run

from rlwatch.detectors.system import PATIENCE, MetricVanished, StalledSteps, ThroughputDrop
from rlwatch.metrics import canonicalise
from rlwatch.records import ClosedStep, Event
from rlwatch.testing.healthy_runs import healthy_run

AT = 100


# Throughput


@pytest.mark.parametrize("every", [1, 5, 10])
def test_steps_that_take_thrice_as_long_for_the_same_tokens_are_a_warning(every):
    """A slow reward service, a sick machine."""
    rows = exact({"time/step": then(20.0, 60.0, AT), "len/mean": always(400.0)}, length=40 + 160 // every, every=every)

    found = alarms(ThroughputDrop(), rows)

    assert set(found) == {"warning"}
    assert found["warning"].message == "a step takes 60 s, 20 s at the start"
    assert found["warning"].onset_step == AT
    assert found["warning"].step <= AT + 8 + 10 * every


def test_steps_that_take_longer_for_longer_responses_are_information():
    """The same seconds for each token."""
    rows = exact({"time/step": then(20.0, 60.0, AT), "len/mean": then(400.0, 1200.0, AT)}, length=160)

    assert set(alarms(ThroughputDrop(), rows)) == {"info"}
    assert alarms(ThroughputDrop(), rows)["info"].message.endswith("responses are that much longer")


@pytest.mark.parametrize(
    ("seconds", "severity"), [(always(None), "warning"), (then(20.0, 30.0, AT), "warning"), (always(20.0), "info")]
)
def test_a_lower_rate_is_a_warning_unless_steps_take_no_longer(seconds, severity):
    """Fewer tokens to process give a lower rate at no cost."""
    rows = exact({"time/throughput": then(5000.0, 2000.0, AT), "time/step": seconds}, length=160)

    found = alarms(ThroughputDrop(), rows)

    assert set(found) == {severity}
    assert found[severity].message.startswith("throughput fell to 2000 tokens/s, 5000 at the start")
    assert found[severity].baseline == pytest.approx(5000.0)


@pytest.mark.parametrize(
    "seconds",
    [
        lambda s: 90.0 if s % 20 == 0 else 20.0,
        lambda s: 500.0 if s == AT else 20.0,
        then(20.0, 30.0, AT),
        lambda s: 300.0 if s == 0 else 20.0,
        lambda s: math.nan if s >= AT else 20.0,
        then(0.2, 0.9, AT),
        always(0.0),
    ],
    ids=[
        "evaluations",
        "a checkpoint",
        "half as long again",
        "compiling",
        "not measured",
        "a toy",
        "a clock that is off",
    ],
)
def test_what_is_no_slowdown(seconds):
    """Rows that are slow now and then."""
    assert when(ThroughputDrop(), exact({"time/step": seconds}, length=180)) == {}


def test_verls_rate_is_read_and_a_clock_of_nothing_is_not_measured():
    """perf/throughput is tokens per second and GPU."""
    assert canonicalise({"perf/throughput": 812.0}, "verl")[0] == {"time/throughput": 812.0}
    assert canonicalise({"fully_async/rollouter/idle_ratio": 0.3}, "verl")[0] == {"time/rollout_idle": 0.3}


# A counter that stands


def seconds(curve, length=60):
    return exact({"time/step": curve}, length=length)


def test_steps_of_many_times_the_usual_are_told_at_the_third():
    """20 s, then 400 s."""
    found = alarms(StalledSteps(), seconds(then(20.0, 400.0, 30)))

    assert set(found) == {"warning"}
    assert (found["warning"].step, found["warning"].onset_step) == (32, 30)
    assert found["warning"].message == "a step takes 400 s, usually 20 s: the run has nearly stopped"


@pytest.mark.parametrize("curve", [then(20.0, 250.0, 30), lambda s: 900.0 if s % 10 < 2 else 20.0, always(math.nan)])
def test_long_rows_now_and_then_are_no_standstill(curve):
    """Twelve times the usual; evaluations that take two rows; nothing measured."""
    assert when(StalledSteps(), seconds(curve)) == {}


@pytest.mark.parametrize("every", [1, 10])
def test_the_clock_of_the_records_will_do(every):
    """Per step, whatever the distance of rows: the third row of every step, the second of a coarse log."""
    rows, clock = [], 1000.0
    for i in range(40):
        clock += every * (20.0 if i < 30 else 400.0)
        rows.append(ClosedStep(step=i * every, metrics={"reward/mean": 0.5}, ts=clock, seq=i + 1))

    assert when(StalledSteps(), rows) == {"warning": (32 if every == 1 else 31) * every}
    assert when(StalledSteps(), [replace(row, ts=0.0) for row in rows]) == {}


@pytest.mark.parametrize("step", [lambda i: 20, lambda i: 60 - i], ids=["stands", "goes back"])
def test_five_rows_without_a_new_step_are_told(step):
    """Where rows come as they are, not merged by step."""
    rows = [ClosedStep(step=i, metrics={"reward/mean": 0.5}) for i in range(20)]
    rows += [ClosedStep(step=step(20 + i), metrics={"reward/mean": 0.5}) for i in range(8)]
    judge = StalledSteps()
    said = [bool(judge.update(row)) for row in rows]

    assert said.index(True) == 25
    assert all(said[25:])
    assert judge.update(ClosedStep(step=100, metrics={"reward/mean": 0.5})) == []


@pytest.mark.parametrize("by", ["attempt", "event", "nothing"])
def test_a_run_that_goes_back_once_and_goes_on_has_resumed(by):
    """Announced or not; the time in between is no step's."""
    judge = StalledSteps()
    rows = [ClosedStep(step=i, metrics={}, ts=1000.0 + 20.0 * i) for i in range(30)]
    again = [replace(row, ts=row.ts + 9000.0, attempt=2 if by == "attempt" else 1) for row in rows[10:]]
    said = [judge.update(row) for row in rows]
    if by == "event":
        judge.notice(Event("resume", step=10))
    said += [judge.update(row) for row in again]

    assert [f for found in said for f in found] == []


@pytest.mark.parametrize(
    ("records", "usual", "told"), [(49, 1, False), (50, 1, True), (400, 64, False), (640, 64, True), (999, None, False)]
)
def test_records_without_a_new_step_are_judged_by_what_is_usual(records, usual, told):
    """What the monitor counts: ten times the most a step had, and at least fifty."""
    metrics = {"rlwatch/records": float(records)} | ({} if usual is None else {"rlwatch/records_usual": float(usual)})

    assert bool(StalledSteps().arrival(ClosedStep(step=7, metrics=metrics))) is told


# A metric that vanished


def without(name, start, end=10**9, length=120, every=1):
    """A healthy run that does not log ``name`` from ``start`` to ``end``."""
    return [
        replace(row, metrics={k: v for k, v in row.metrics.items() if k != name or not start <= row.step < end})
        for row in healthy_run(length=length, every=every)
    ]


@pytest.mark.parametrize("every", [1, 5, 10])
def test_a_metric_that_vanishes_is_missed_after_ten_rows(every):
    """Dated to its last row; the others are named as going on."""
    rows = without("policy/entropy", 61 * every, length=120 * every, every=every)

    found = alarms(MetricVanished(), rows)

    assert set(found) == {"warning"}
    assert (found["warning"].step, found["warning"].onset_step) == (71 * every, 60 * every)
    assert found["warning"].message.startswith(f"policy/entropy: not logged since step {60 * every}, while ")
    assert found["warning"].evidence["metrics"] == ["policy/entropy"]


@pytest.mark.parametrize(
    "rows",
    [
        without("policy/entropy", 61, 71),
        without("policy/entropy", 15),
        [r for r in healthy_run(length=200) if not 80 <= r.step < 160],
        [replace(r, metrics={**r.metrics, "policy/entropy": math.nan}) if r.step > 60 else r for r in healthy_run()],
    ],
    ids=["ten rows", "hardly known", "a gap of all", "NaN"],
)
def test_what_has_not_vanished(rows):
    """Short gaps, metrics of the warm-up, holes in the log, values that are NaN."""
    assert findings(MetricVanished(), rows) == []


def test_a_metric_with_gaps_gets_five_times_its_longest():
    """Evaluated every eighth step, twenty-five times: forty rows more."""
    rows = exact(
        {"reward/mean": always(0.5), "val/score": lambda s: 0.6 if s % 8 == 0 and s <= 200 else None}, length=280
    )

    assert when(MetricVanished(), rows) == {"warning": 241}


def test_rows_of_another_kind_are_no_disappearance():
    """Eighty rows of an evaluation alone: all but one are gone, so it is the rows that differ."""
    training = exact({name: always(0.5) for name in ("reward/mean", "policy/entropy", "len/mean")} | {"x": always(1.0)})
    evaluation = [ClosedStep(step=60 + i, metrics={"x": 1.0}) for i in range(80)]

    assert findings(MetricVanished(), [*training, *evaluation]) == []


def test_several_are_told_in_one_finding_and_forgotten_for_good_later():
    """The names of the first eight; a schedule may end a metric on purpose."""
    gone = {f"g{i}": then(1.0, None, 60) for i in range(10)}
    stay = {f"s{i}": always(1.0) for i in range(10)}
    judge, rows = MetricVanished(), exact(gone | stay, length=60 + 2 * PATIENCE)
    said = {row.step: found for row in rows for found in judge.update(row)}

    assert said[70].message.startswith("g0, g1, g2, g3, g4, g5, g6, g7 and 2 more: not logged since step 59")
    assert said[70].evidence["missing"] == 10
    assert max(said) == 59 + 10 + PATIENCE + 1


@pytest.mark.parametrize("by", ["attempt", "event"])
def test_a_resumed_run_may_log_other_things(by):
    """Another configuration."""
    judge = MetricVanished()
    rows = without("policy/entropy", 61)
    said = [judge.update(row) for row in rows[:60]]
    if by == "event":
        judge.notice(Event("resume", step=60))
    said += [judge.update(replace(row, attempt=2 if by == "attempt" else 1)) for row in rows[60:]]

    assert [f for found in said for f in found] == []


def test_rlwatchs_own_counters_come_and_go():
    """They are there when there is something to count."""
    rows = exact({"reward/mean": always(0.5), "rlwatch/dropped": then(1.0, None, 60)}, length=120)

    assert worst(MetricVanished(), rows) is None


def test_a_run_with_very_many_metrics_is_followed_in_part():
    """Memory is bounded by a thousand names."""
    judge = MetricVanished()
    for step in range(30):
        judge.update(ClosedStep(step=step, metrics={f"m{step % 3}-{i}": 1.0 for i in range(600)}))

    assert len(judge._presence) == 1000


@pytest.mark.parametrize("detector", [ThroughputDrop, StalledSteps, MetricVanished])
@pytest.mark.parametrize("every", [1, 5])
def test_a_healthy_run_with_slow_rows_is_left_alone(detector, every):
    """Checkpoints every twentieth step take ten times as long."""
    curves = {"time/step": lambda s, n: flat(200.0 if s % 20 == 0 else 20.0)(s, n)}

    assert findings(detector(), run(curves, length=400, every=every)) == []
