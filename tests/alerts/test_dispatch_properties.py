"""What must hold of every history of alerts, people and time: no message lost, none twice."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise

from dispatch_examples import CRITICAL, FIRING, NOON, RESOLVED, WARNING, Office, alert
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.alerts.dispatch import Publications
from rlwatch.alerts.rules import AlertGrouping, GroupBy, Inhibition, Rule
from rlwatch.records import Acknowledgement, Alert, Severity, Silence

KINDS = ("cause", "symptom", "other")
RULE = Rule("r", channels=("hook", "chat"), repeat_minutes=60.0, escalate_after_minutes=90.0, escalate_to=("pager",))
POLICY = {"inhibitions": (Inhibition(("cause",), ("symptom",), min_severity=WARNING),)}

moves = st.one_of(
    st.tuples(st.just("fire"), st.sampled_from(KINDS)),
    st.tuples(st.just("worsen"), st.sampled_from(KINDS)),
    st.tuples(st.just("ease"), st.sampled_from(KINDS)),
    st.tuples(st.just("resolve"), st.sampled_from(KINDS)),
    st.tuples(st.just("acknowledge"), st.sampled_from(KINDS)),
    st.tuples(st.just("silence"), st.sampled_from(KINDS)),
    st.tuples(st.just("wait"), st.sampled_from([1, 20, 61, 200])),
    st.tuples(st.just("deliver"), st.just(0)),
)
histories = st.lists(st.tuples(moves, st.integers(0, 1)), max_size=25)
groupings = st.builds(AlertGrouping, st.sampled_from(GroupBy), st.sampled_from([0.0, 30.0]))


@dataclass
class World:
    """An office, the alert of each kind as it is, and how often each kind has begun."""

    office: Office

    def __post_init__(self) -> None:
        self.now: dict[str, Alert] = {}
        self.begun: dict[str, int] = defaultdict(int)
        self.quiet: dict[str, int] = {}
        self.dispatchers = [self.office.dispatcher, self.office.another_dispatcher()]

    def move(self, what: str, of: object, dispatcher: int) -> None:
        changed = getattr(self, what)(of)
        self.dispatchers[dispatcher].publish("run", [changed] if changed else [])

    def fire(self, kind: str) -> Alert | None:
        if kind in self.now and self.now[kind].state is FIRING:
            return None
        self.begun[kind] += 1
        fresh = alert(kind, fired_at=self.office.clock.now())
        self.now[kind] = replace(fresh, alert_id=f"{kind}-{self.begun[kind]}")
        return self.now[kind]

    def worsen(self, kind: str) -> Alert | None:
        return self._change(kind, severity=CRITICAL)

    def ease(self, kind: str) -> Alert | None:
        return self._change(kind, severity=WARNING)

    def resolve(self, kind: str) -> Alert | None:
        return self._change(kind, state=RESOLVED, resolved_step=9)

    def acknowledge(self, kind: str) -> None:
        if kind in self.now:
            one = self.now[kind]
            self.office.store.acknowledge(Acknowledgement(one.alert_id, "run", "ann", severity=one.severity))
            self.quiet[one.alert_id] = one.severity.rank

    def silence(self, kind: str) -> None:
        now = self.office.clock.now()
        self.office.store.put_silence(Silence(f"s{now}{kind}", "ann", "", now, now + 1800.0, kind=kind))

    def wait(self, minutes: int) -> None:
        self.office.clock.advance(60.0 * minutes)

    def deliver(self, _: int) -> None:
        self.office.deliver()

    def _change(self, kind: str, **values: object) -> Alert | None:
        if kind not in self.now or self.now[kind].state is not FIRING:
            return None
        self.now[kind] = replace(self.now[kind], **values)
        return self.now[kind]


def lived(history, grouping: AlertGrouping, *, two: bool = True) -> World:
    world = World(Office(RULE, grouping=grouping, **POLICY))
    for (what, of), dispatcher in history:
        world.move(what, of, dispatcher if two else 0)
    return world


def stories(world: World) -> dict[tuple[str, str], list[tuple[str, Severity]]]:
    """(alert, channel) -> what was said of it, in order."""
    telling, found = Publications(world.office.store.outbox("run")), {}
    for one in world.office.store.alerts("run"):
        for channel in telling.channels(one.alert_id):
            published = telling.of(one.alert_id, channel)
            found[one.alert_id, channel] = [(each.event.value, each.severity) for each in published]
    return found


@settings(max_examples=150, deadline=None)
@given(histories, groupings)
def test_no_channel_is_notified_of_a_thing_twice_and_the_end_comes_last(history, grouping):
    """One beginning, worse only if worse, eased only if better, one end after which nothing is said."""
    for story in stories(lived(history, grouping)).values():
        events = [event for event, _ in story]
        ranks = [(event, severity.rank) for event, severity in story if event in ("firing", "escalated", "eased")]

        assert events[0] in ("firing", "unacknowledged")
        assert all((after > before) is (event != "eased") for (_, before), (event, after) in pairwise(ranks))
        assert all(before != after for (_, before), (_, after) in pairwise(ranks))
        assert [events.count(once) <= 1 for once in ("firing", "resolved", "unacknowledged")] == [True] * 3
        assert "resolved" not in events[:-1]


@settings(max_examples=150, deadline=None)
@given(histories, groupings)
def test_nothing_is_lost_once_nothing_keeps_it_back(history, grouping):
    """Silences end, the cause is over, nobody waits: what fires was told everywhere, what is over, too."""
    world = lived(history, grouping)
    for what in (("resolve", "cause"), ("wait", 200), ("deliver", 0)):
        world.move(*what, 0)
    published, telling = stories(world), Publications(world.office.store.outbox("run"))

    for one in world.office.store.alerts("run"):
        acknowledged = world.quiet.get(one.alert_id, -1) >= one.severity.rank
        if one.state is FIRING and not acknowledged:
            assert {"hook", "chat"} <= set(telling.channels(one.alert_id))
            assert max(severity.rank for _, severity in published[one.alert_id, "hook"]) >= one.severity.rank
        if one.state is RESOLVED:
            assert all(
                published[one.alert_id, channel][-1][0] == "resolved" for channel in telling.channels(one.alert_id)
            )


@settings(max_examples=100, deadline=None)
@given(histories, groupings)
def test_two_who_look_say_what_one_would_have_said(history, grouping):
    """Which process came first makes no difference, message for message."""
    ids = [
        [(m.message_id, m.payload["text"]) for m in lived(history, grouping, two=two).office.store.outbox("run")]
        for two in (True, False)
    ]

    assert ids[0] == ids[1]


@settings(max_examples=100, deadline=None)
@given(histories, groupings, st.sampled_from(KINDS))
def test_an_acknowledged_alert_stays_quiet(history, grouping, kind):
    """Whatever else happens, until it gets worse or is over."""
    world = lived(history, grouping)
    world.move("acknowledge", kind, 0)
    if kind not in world.now or world.now[kind].state is not FIRING:
        return
    mine = world.now[kind].alert_id
    before = len(Publications(world.office.store.outbox("run")).of(mine))
    for move in (("deliver", 0), ("wait", 200), ("resolve", "cause") if kind != "cause" else ("wait", 1), ("wait", 61)):
        world.move(*move, 1)

    assert len(Publications(world.office.store.outbox("run")).of(mine)) == before


@settings(max_examples=100, deadline=None)
@given(histories)
def test_a_symptom_is_never_begun_while_its_cause_fires(history):
    """Not by any dispatcher at any time: every first word of it lies outside of every span of the cause."""
    world, spans = World(Office(RULE, **POLICY)), []
    for (what, of), dispatcher in history:
        before = len(world.office.store.outbox("run"))
        world.move(what, of, dispatcher)
        new = world.office.store.outbox("run")[before:]
        begun = any(m.payload["event"] == "firing" and m.payload["alert"]["kind"] == "symptom" for m in new)
        spans.append((begun, "cause" in world.now and world.now["cause"].state is FIRING))

    assert (True, True) not in spans


def test_the_clock_of_these_histories_begins_at_noon():
    """So that a failing example can be read."""
    assert Office(RULE).clock.now() == NOON
