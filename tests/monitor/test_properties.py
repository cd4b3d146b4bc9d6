"""Live is replay, whatever the cut; resumed is uninterrupted; a prefix says a prefix."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scripted import Threshold, rollback, told

from rlwatch.alerts.dispatch import Dispatcher
from rlwatch.alerts.rules import AlertingConfig, Rule
from rlwatch.detectors.registry import default_detectors
from rlwatch.monitor import Monitor, MonitorOutcome
from rlwatch.monitor.judge import MonitorSink
from rlwatch.records import Event, RunInfo, StepRecord
from rlwatch.store.memory import forget
from rlwatch.store.url import open_store
from rlwatch.testing.detector_contract import broken_run, whole_run
from rlwatch.testing.small_batches import FAILURES, small_run

VALUES = st.sampled_from([0.0, 0.5, 2.0, 20.0, float("nan"), float("inf")])
METRICS = st.dictionaries(
    st.sampled_from(["reward", "entropy", "grad_norm", "kl", "frac_reward_zero_std", "nonfinite/logp"]),
    st.one_of(VALUES, st.floats(width=32)),
    min_size=1,
    max_size=6,
)
OF_A_RESUME = "lost_reference_reset"
"""The one finding that an uninterrupted run cannot have."""
RULES = (Rule("now"), Rule("later", for_steps=3, keep_firing_for=4))


@st.composite
def streams(draw, size=40, rollbacks=True):
    """Items of one attempt: steps mostly forward, sometimes repeated or late, with events between."""
    items, step = [], 0
    for seq in range(1, draw(st.integers(1, size)) + 1):
        step = max(0, step + draw(st.sampled_from([1, 1, 1, 1, 0, 5, -2])))
        drawn = draw(st.integers(0, 15))
        if drawn == 0:
            items.append(Event("reference_reset", step, seq=seq))
        elif drawn == 1 and rollbacks:
            items.append(rollback(step, draw(st.integers(0, step)), seq))
        else:
            items.append(StepRecord(step, draw(METRICS), ts=float(seq), seq=seq))
    return items


def watch(items, detectors=lambda: [Threshold()], **kwargs):
    monitor = Monitor(run_id="run", detectors=detectors, rules=RULES, **kwargs)
    return monitor, [monitor.observe(item) for item in items]


def total(outcomes):
    return sum(outcomes, MonitorOutcome())


def whole(run):
    """A run of every kind of failure, as records: with an event, and an attempt that goes back."""
    half = len(run) // 2
    records = [StepRecord(row.step, row.metrics, ts=float(row.seq), attempt=1) for row in run[: half + 20]]
    records += [StepRecord(row.step, row.metrics, ts=float(row.seq), attempt=2) for row in run[half:]]
    items = [*records[:half], Event("reference_reset", run[half].step, attempt=1), *records[half:]]
    return [replace(item, seq=seq) for seq, item in enumerate(items, 1)]


@pytest.mark.parametrize("name", ["broken", "sound", "loses its reward", "coarse"])
def test_a_log_taken_whole_says_what_its_rows_say_one_by_one(name):
    """Findings, alerts and forecasts, to the last bit."""
    run = {
        "broken": lambda: broken_run(length=300, at=150),
        "sound": lambda: whole_run(2, 300),
        "loses its reward": lambda: small_run(5, failure=FAILURES[0], every=1).rows,
        "coarse": lambda: whole_run(4, 600, 5),
    }[name]()
    items = whole(run)

    def past(attempt, before):
        return (item for item in items if item.attempt < attempt and item.step < before)

    one_by_one, at_once = (Monitor(run_id="run", history=past) for _ in range(2))
    said = total([*map(one_by_one.observe, items), one_by_one.close()])

    assert repr(said) == repr(total(at_once.observing_all(items, closes=True)))
    assert sum(not forecast.absent for forecast in said.forecasts) > 20


@settings(max_examples=40, deadline=None)
@given(streams())
def test_any_stream_taken_whole_says_what_its_items_say_one_by_one(items):
    """Late records, values that are no numbers, events, and steps that a roll-back undid."""

    def past(attempt, before):
        return (item for item in items if item.attempt < attempt and item.step < before)

    one_by_one, at_once = (Monitor(run_id="run", history=past) for _ in range(2))
    said = total([*map(one_by_one.observe, items), one_by_one.close()])

    assert repr(said) == repr(total([*at_once.observing_all(items), at_once.close()]))
    assert one_by_one.late == at_once.late


@settings(max_examples=40, deadline=None)
@given(streams())
def test_the_same_items_say_the_same(items):
    """Nothing depends on time, identity or chance."""
    first, second = (repr(total(watch(items, default_detectors)[1])) for _ in range(2))

    assert first == second


@settings(max_examples=40, deadline=None)
@given(streams(), st.data())
def test_a_prefix_of_the_log_gives_a_prefix_of_what_is_said(items, data):
    """Everything at step s uses only data up to s, with the shipped detectors."""
    cut = data.draw(st.integers(0, len(items)))
    _, whole = watch(items, default_detectors)
    _, part = watch(items[:cut], default_detectors)

    assert repr(whole[:cut]) == repr(part)


@settings(max_examples=40, deadline=None)
@given(streams(rollbacks=False), st.data())
def test_resumed_equals_uninterrupted(items, data):
    """A process dies at any row; the next one, fed the stored rows as history, says the rest the same.

    Reliving repeats what was said before the cut with the same ids; nothing is missing, nothing is new, but what a
    detector says of the resume itself.
    """
    forward = [items[k] for k in range(len(items)) if items[k].step >= max([0, *[i.step for i in items[:k]]])]
    steps = [i.step for i in forward if isinstance(i, StepRecord)]  # an event may lie ahead of a row: that row is gone
    assume(steps)
    at = data.draw(st.sampled_from(sorted(set(steps))))
    past = [i for i in forward if i.step < at]
    rest = [i for i in forward if i.step >= at]
    monitor, whole = watch(forward, default_detectors)
    uninterrupted = total(whole) + monitor.close()

    def again(item):
        fields = {name: getattr(item, name) for name in item.__dataclass_fields__}
        return type(item)(**{**fields, "attempt": 2})

    monitor, outcomes = watch([again(i) for i in rest], default_detectors, history=lambda attempt, before: past)
    resumed = total(outcomes) + monitor.close()

    assert [said for said in told(resumed) if said[0] != OF_A_RESUME] == told(uninterrupted)
    assert [(t.reason, t.alert.alert_id) for t in resumed.transitions if t.alert.kind != OF_A_RESUME] == [
        (t.reason, t.alert.alert_id) for t in uninterrupted.transitions
    ]


def live(items, cuts):
    """What a store holds after the items went through the sink in batches cut at ``cuts``."""
    store = open_store("memory://chunks")
    writer = store.open_run(RunInfo("run"))
    monitor = Monitor(run_id="run", detectors=default_detectors, rules=RULES)
    sink = MonitorSink(
        monitor, writer.run, store, keep=writer.write, dispatcher=Dispatcher(store, AlertingConfig(rules=()))
    )
    for begin, end in pairwise([0, *sorted(cuts), len(items)]):
        if items[begin:end]:
            writer.write(items[begin:end])
            sink.write(items[begin:end])
    sink.close()
    found = (
        repr((store.findings("run"), store.recoveries("run"))),
        repr(sorted(store.alerts("run"), key=lambda alert: alert.alert_id)),
    )
    writer.close()
    forget("chunks")
    return found


@settings(max_examples=40, deadline=None)
@given(streams(), st.data())
def test_live_is_replay_whatever_the_chunking(items, data):
    """The writer thread cuts the stream wherever time happens to; a replay does not cut at all."""
    cuts = data.draw(st.lists(st.integers(0, len(items)), max_size=6))
    monitor, outcomes = watch(items, default_detectors)
    replayed = total(outcomes) + monitor.close()

    stored, alerts = live(items, cuts)

    assert (stored, alerts) == live(items, [])
    told_of = (replayed.findings, replayed.recoveries)
    assert stored == repr(tuple(sorted(part, key=lambda finding: finding.seq) for part in told_of))
