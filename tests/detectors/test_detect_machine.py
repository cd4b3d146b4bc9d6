"""A rank that is slower, a GPU that is too hot, memory and disks that run out; and machines that only work hard."""

import math
import random

import pytest
from exact_runs import always, exact, then, when
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.detectors.machine import Depletion, DiskFullAhead, GpuThrottled, MemoryLeak, StragglingRank
from rlwatch.records import ClosedStep


def ranks(**curves):
    return {f"time/rank/{name[1:]}": curve for name, curve in curves.items()}


def test_a_rank_that_stays_slow_is_named():
    """Once it is half of the last rows, and for five rows."""
    rows = exact(ranks(r0=always(8.0), r1=always(8.2), r2=then(8.0, 12.0, 30), r3=always(7.9)))
    detector = StragglingRank()

    (first,) = next(found for found in map(detector.update, rows) if found)
    assert (first.severity.value, first.onset_step <= first.step, first.metric) == ("warning", True, "time/rank/2")
    assert 38 <= first.step <= 46
    assert "rank 2" in first.message


def test_ranks_that_take_turns_in_being_slow_are_not():
    """Responses are longer now here, now there; and a checkpoint is one row."""
    noise = random.Random(5)
    rows = exact(ranks(**{f"r{r}": lambda step: 8.0 * math.exp(noise.gauss(0.0, 0.3)) for r in range(8)}), length=400)
    peak = exact(ranks(r0=always(8.0), r1=lambda step: 80.0 if step % 25 == 0 else 8.0, r2=always(8.0)), length=200)

    assert when(StragglingRank(), rows) == {}
    assert when(StragglingRank(), peak) == {}


def test_one_rank_alone_cannot_straggle():
    """There is nothing to compare it with."""
    assert when(StragglingRank(), exact(ranks(r0=then(8.0, 80.0, 30)))) == {}


def test_a_gpu_held_back_for_long_is_reported_and_peaks_are_not():
    """Also that of another rank; its power limit alone is none of it."""
    far = {"system/rank/3/gpu/1/throttled": then(0.0, 1.0, 20), "system/rank/3/gpu/1/temperature": always(94.0)}
    peaks = {"system/gpu/0/throttled": lambda step: float(step % 4 == 0), "system/gpu/0/power_capped": always(1.0)}

    assert when(GpuThrottled(), exact(far)) == {"warning": 24}
    assert when(GpuThrottled(), exact(peaks)) == {}
    detector = GpuThrottled()
    (finding,) = [detector.update(row) for row in exact(far)][-1]
    assert "rank 3 gpu 1" in finding.message
    assert "94" in finding.message


def timed(curve, metric="system/memory/free", rows=120, every_s=60.0):
    """Rows a minute apart; ``curve``: minutes -> what is left."""
    return [
        ClosedStep(step=i, metrics={metric: curve(i * every_s / 60.0)}, seq=i + 1, ts=1e6 + i * every_s)
        for i in range(rows)
    ]


def noisy(curve, sigma, seed=0):
    noise = random.Random(seed)
    return lambda minutes: max(0.0, curve(minutes) + noise.gauss(0.0, sigma))


def test_a_leak_is_forecast_hours_before_the_end():
    """200 GiB that shrink by 30 an hour are gone in under seven hours; said within the first hour of it."""
    rows = timed(noisy(lambda minutes: 200.0 - 0.5 * max(0.0, minutes - 20.0), 0.5))
    detector = MemoryLeak()

    (first,) = next(found for found in map(detector.update, rows) if found)
    assert first.step <= 80
    left = 200.0 - 0.5 * (first.step - 20)
    assert first.evidence["hours"] == pytest.approx(left / 30.0, rel=0.25)
    assert "training process" not in first.message


SOUND = {
    "level": lambda minutes: 200.0,
    "a leak of weeks": lambda minutes: 200.0 - 0.01 * minutes,
    "caches that fill": lambda minutes: 120.0 + 80.0 * math.exp(-minutes / 15.0),
    "a jump": lambda minutes: 200.0 if minutes < 60 else 90.0,
    "evaluations": lambda minutes: 200.0 - 60.0 * (minutes % 30 < 10),
    "checkpoints kept in turn": lambda minutes: 200.0 - 8.0 * (minutes % 12),
    "freed": lambda minutes: 50.0 + minutes,
}


@pytest.mark.parametrize("sound", SOUND)
@pytest.mark.parametrize("seed", range(3))
def test_memory_that_is_used_is_no_leak(sound, seed):
    """With the noise of work on it."""
    assert when(MemoryLeak(), timed(noisy(SOUND[sound], 4.0, seed), rows=400)) == {}


def test_a_disk_that_fills_is_forecast_on_every_machine():
    """The soonest is named; a store on a disk of its own is watched, too."""
    rows = timed(lambda minutes: 900.0 - 3.0 * minutes, "system/rank/8/disk/checkpoints/free")
    detector = DiskFullAhead()
    (first,) = next(found for found in map(detector.update, rows) if found)

    assert first.evidence["hours"] == pytest.approx(5.0 - first.step / 60.0, rel=0.05)
    assert "system/rank/8/disk/checkpoints/free" in first.message
    assert when(DiskFullAhead(), timed(lambda minutes: 9.0 - 0.02 * minutes, "system/disk/store/free")) == {
        "warning": 28
    }


def test_looks_more_often_than_once_a_minute_change_nothing():
    """Rows of a second each are not taken for hours."""
    rows = timed(noisy(lambda minutes: 200.0 - 20.0 * minutes, 0.01), rows=300, every_s=1.0)

    assert when(MemoryLeak(), rows) == {}


def test_a_log_without_times_is_not_judged():
    """Hours cannot be told from steps."""
    assert when(MemoryLeak(), exact({"system/memory/free": lambda step: 200.0 - 3 * step})) == {}


@given(
    per_hour=st.floats(1.0, 1000.0),
    start=st.floats(10.0, 1e5),
    pace=st.sampled_from([60.0, 90.0, 600.0]),
)
def test_a_straight_fall_is_forecast_exactly(per_hour, start, pace):
    """Whatever the unit, the amount and the pace of the rows."""
    depletion = Depletion()
    for i in range(40):
        left = start - per_hour * i * pace / 3600.0
        if left < 0.0:
            return
        depletion.update(i, 1e6 + i * pace, left)
        if depletion.hours is not None:
            assert depletion.hours == pytest.approx(left / per_hour, rel=0.01, abs=1e-3)
    assert depletion.hours is not None


@given(values=st.lists(st.floats(0.0, 1e6), min_size=30, max_size=60))
def test_no_forecast_where_there_is_no_fall(values):
    """Sorted upwards, whatever it is, nothing runs out."""
    depletion = Depletion()
    for i, left in enumerate(sorted(values)):
        depletion.update(i, 1e6 + 60.0 * i, left)
        assert depletion.hours is None
