"""The person acts on what the store shows, once for each reason, and on nothing else."""

import pytest
from demo_world import RESET, World, alert, command, finding, healthy

from rlwatch.demo.checks import NAME, PATIENCE, Person, look
from rlwatch.errors import StoreBusyError
from rlwatch.records import AlertState, CommandStatus, Severity

SATURATED = finding("kl_saturation", Severity.INFO, 80, "KL has been flat: a reference reset is due")
DONE = command(1, CommandStatus.DONE, RESET, "done")
COLLAPSE = alert("entropy_collapse", Severity.CRITICAL, 235)
CALM = {"findings": [], "commands": [], "alerts": [], "death": None}


def acts(**changes):
    """What the person does about a world: the command sent, or None, and all commands in the store."""
    store = World(**(CALM | changes)).store()
    sent = Person(store, "demo-1").act(look(store, "demo-1"))
    return sent, store.commands("demo-1")


def rising(step):
    return healthy(step) | {"kl": 0.01 * step}


def flat_from_the_start(step):
    return healthy(step) | {"kl": 0.4}


def test_a_finding_of_saturation_is_reason_enough():
    """The command says who, what and why, and asks for no force."""
    sent, stored = acts(steps=82, findings=[SATURATED])

    assert stored == [sent]
    assert (sent.kind, sent.requested_by, sent.why, sent.force) == ("reset-reference", NAME, SATURATED.message, False)


def test_without_a_finding_the_person_waits_and_then_reads_the_chart():
    """Not before the patience is over, then with the two levels as the reason."""
    early, _ = acts(steps=PATIENCE - 1, curve=lambda step: healthy(min(step, RESET)))
    late, _ = acts(steps=PATIENCE, curve=lambda step: healthy(min(step, RESET)))

    assert early is None
    assert late.why == "the KL chart is flat: 0.400, then 0.400 nats/token"


@pytest.mark.parametrize("curve", [rising, flat_from_the_start], ids=["still rising", "never rose"])
def test_a_chart_that_is_not_saturated_is_no_reason(curve):
    """Neither growth nor a curve that never moved."""
    assert acts(steps=PATIENCE + 5, curve=curve)[0] is None


@pytest.mark.parametrize("status", [CommandStatus.QUEUED, CommandStatus.CLAIMED])
def test_nothing_is_asked_while_an_answer_is_awaited(status):
    """One wish at a time."""
    sent, stored = acts(steps=82, findings=[SATURATED], commands=[command(1, status, None, "")])

    assert sent is None
    assert len(stored) == 1


def test_a_saturation_is_acted_on_once():
    """After the reset the old finding still stands in the store."""
    assert acts(steps=120, findings=[SATURATED], commands=[DONE])[0] is None


def test_two_critical_alerts_of_a_collapse_make_the_person_rash():
    """The alarms are the reason given."""
    sent, stored = acts(steps=240, commands=[DONE], alerts=[COLLAPSE, alert("reward_drop", Severity.CRITICAL, 238)])

    assert len(stored) == 2
    assert sent.why == "perhaps it helps against entropy_collapse and reward_drop"


@pytest.mark.parametrize(
    "second",
    [
        alert("reward_drop", Severity.WARNING, 220),
        alert("kl_drift", Severity.CRITICAL, 220),
        alert("reward_drop", Severity.CRITICAL, 220, state=AlertState.PENDING),
        alert("reward_drop", Severity.CRITICAL, 220, state=AlertState.RESOLVED),
        alert("entropy_collapse", Severity.CRITICAL, 220, alert_id="another episode"),
    ],
    ids=["a warning", "no collapse", "not firing yet", "over", "the same kind"],
)
def test_lesser_news_do_not(second):
    """One alarm may be a passing weakness; two kinds at once are a collapse."""
    assert acts(steps=240, commands=[DONE], alerts=[COLLAPSE, second])[0] is None


def test_the_person_does_not_insist():
    """After the refusal, silence."""
    refused = command(2, CommandStatus.REJECTED, 240, "refused")
    alarms = [COLLAPSE, alert("no_signal", Severity.CRITICAL, 250)]

    assert acts(steps=260, commands=[DONE, refused], alerts=alarms)[0] is None


def test_looking_twice_before_the_store_shows_the_command_sends_it_once():
    """The idempotency key is the number of commands seen."""
    store = World(**(CALM | {"steps": 82, "findings": [SATURATED]})).store()
    seen = look(store, "demo-1")
    person = Person(store, "demo-1")

    first, second = person.act(seen), person.act(seen)

    assert first == second
    assert len(store.commands("demo-1")) == 1


def test_a_store_that_is_busy_is_asked_again_at_the_next_look():
    """Somebody else held the file: nothing is lost, nothing is raised."""
    store = World(**(CALM | {"steps": 82, "findings": [SATURATED]})).store()
    busy = BusyOnce(store)
    person, seen = Person(busy, "demo-1"), look(store, "demo-1")

    first, second = person.act(seen), person.act(seen)

    assert first is None
    assert store.commands("demo-1") == [second]


class BusyOnce:
    """A store whose first submission meets a lock."""

    def __init__(self, store):
        self.store, self.tries = store, 0

    def submit(self, wish):
        self.tries += 1
        if self.tries == 1:
            raise StoreBusyError("held by another process")
        return self.store.submit(wish)
