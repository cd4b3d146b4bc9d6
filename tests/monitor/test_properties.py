"""Live is replay, whatever the cut; resumed is uninterrupted; a prefix says a prefix."""

from itertools import pairwise

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scripted import Threshold, told

from rlwatch.alerts.dispatch import Dispatcher
from rlwatch.alerts.rules import Policy, Rule
from rlwatch.detectors.registry import default_detectors
from rlwatch.monitor import Monitor, Outcome
from rlwatch.monitor.judge import MonitorSink
from rlwatch.records import Event, RunInfo, StepRecord
from rlwatch.store.memory import forget
from rlwatch.store.url import open_store

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
def streams(draw, size=40):
    """Items of one attempt: steps mostly forward, sometimes repeated or late, with events between."""
    items, step = [], 0
    for seq in range(1, draw(st.integers(1, size)) + 1):
        step = max(0, step + draw(st.sampled_from([1, 1, 1, 1, 0, 5, -2])))
        if draw(st.integers(0, 15)) == 0:
            items.append(Event("reference_reset", step, seq=seq))
        else:
            items.append(StepRecord(step, draw(METRICS), ts=float(seq), seq=seq))
    return items


def watch(items, detectors=lambda: [Threshold()], **kwargs):
    monitor = Monitor(run_id="run", detectors=detectors, rules=RULES, **kwargs)
    return monitor, [monitor.observe(item) for item in items]


def total(outcomes):
    return sum(outcomes, Outcome())


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
@given(streams(), st.data())
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
    sink = MonitorSink(monitor, writer.run, store, keep=writer.write, dispatcher=Dispatcher(store, Policy(rules=())))
    for begin, end in pairwise([0, *sorted(cuts), len(items)]):
        if items[begin:end]:
            writer.write(items[begin:end])
            sink.write(items[begin:end])
    sink.close()
    found = repr(store.findings("run")), repr(sorted(store.alerts("run"), key=lambda alert: alert.alert_id))
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
    assert stored == repr(sorted(replayed.findings, key=lambda finding: finding.seq))
