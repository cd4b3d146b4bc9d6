"""The mailbox between the store and the training loop."""

import threading

import numpy as np
import pytest

from rlwatch.clock import ManualClock
from rlwatch.control.commands import cancel, request
from rlwatch.control.mailbox import LATE, Mailbox
from rlwatch.control.policy import RunHealth, veto_reset_reference
from rlwatch.errors import ConfigError, ControlUnavailableError, StoreBusyError
from rlwatch.records import Alert, AlertState, Command, CommandStatus, Finding, RunInfo, Severity
from rlwatch.store.url import open_store


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def store(request):
    opened = open_store(f"memory://mailbox-{request.node.name}")
    opened.open_run(RunInfo("r"))
    return opened


def ask(store, clock, **kwargs):
    return request(store, "r", "reset-reference", by="ada@lab", clock=clock, **kwargs)


def status(store):
    return [(c.status, c.finished_step, c.result) for c in store.commands("r")]


def listening(store, clock, **kwargs):
    mailbox = Mailbox(store, "r", clock, **kwargs)
    mailbox.take()
    return mailbox


def test_a_command_reaches_the_loop_and_its_answer_the_store(store, clock):
    """Queued, claimed, done at a step."""
    mailbox = listening(store, clock)
    ask(store, clock, args={"optimizer": "keep"}, why="KL saturated")
    mailbox.tick()
    (command,) = mailbox.take()
    assert status(store)[0][0] is CommandStatus.CLAIMED

    command.done("KL 0.31 -> 0.00", step=480)
    mailbox.tick()

    assert (command.kind, command.args, command.force) == ("reset-reference", {"optimizer": "keep"}, False)
    assert status(store) == [(CommandStatus.DONE, 480, "KL 0.31 -> 0.00")]


def test_a_rejection_carries_its_reason(store, clock):
    """The person reads why."""
    mailbox = listening(store, clock)
    ask(store, clock)
    mailbox.tick()
    mailbox.take()[0].reject("there is no reference (beta=0)", step=3)
    mailbox.tick()

    assert status(store) == [(CommandStatus.REJECTED, 3, "there is no reference (beta=0)")]


def test_only_the_first_answer_counts(store, clock):
    """Done and then rejected is done."""
    mailbox = listening(store, clock)
    ask(store, clock)
    mailbox.tick()
    (command,) = mailbox.take()
    command.done("ok", step=1)
    command.reject("no")
    mailbox.tick()

    assert status(store) == [(CommandStatus.DONE, 1, "ok")]


def test_a_loop_that_never_asks_claims_nothing(store, clock):
    """The command stays queued and expires visibly."""
    mailbox = Mailbox(store, "r", clock)
    ask(store, clock)
    mailbox.tick()

    assert status(store)[0][0] is CommandStatus.QUEUED


def test_an_overdue_command_is_not_obeyed(store, clock):
    """Last night's click."""
    mailbox = listening(store, clock)
    ask(store, clock, expires_s=60.0)
    clock.advance(61.0)
    mailbox.tick()

    assert mailbox.take() == []
    assert status(store)[0][0] is CommandStatus.EXPIRED


def test_with_several_ranks_a_command_is_rejected_with_the_reason(store, clock):
    """One rank alone would act, and the others hang."""
    mailbox = listening(store, clock, world_size=4)
    ask(store, clock)
    mailbox.tick()
    assert mailbox.take() == []
    mailbox.tick()

    ((state, _, reason),) = status(store)
    assert state is CommandStatus.REJECTED
    assert "4 ranks" in reason


def test_a_loop_that_passes_commands_on_to_all_ranks_gets_them(store, clock):
    """And one that has not asked yet has refused nothing."""
    mailbox = Mailbox(store, "r", clock, world_size=4)
    ask(store, clock)
    mailbox.tick()
    assert status(store)[0][0] is CommandStatus.QUEUED

    assert mailbox.take(for_all_ranks=True) == []
    clock.advance(1.0)
    mailbox.tick()
    (command,) = mailbox.take(for_all_ranks=True)
    assert command.kind == "reset-reference"


def test_whether_commands_wait_can_be_asked_without_taking_them(store, clock):
    """Where ranks have to meet first: what waits is taken later, or answered at the end. Looking is no promise to take."""
    mailbox = Mailbox(store, "r", clock, world_size=4)
    ask(store, clock)
    mailbox.tick()
    assert not mailbox.waiting()
    mailbox.listen(for_all_ranks=True)
    clock.advance(1.0)
    mailbox.tick()
    assert mailbox.waiting()
    assert mailbox.waiting()

    mailbox.close()
    assert status(store)[0][0] is CommandStatus.REJECTED


def test_what_a_dead_process_had_claimed_is_answered(store, clock):
    """Nobody waits for ever for a trainer that died."""
    ask(store, clock)
    store.claim("r", clock.now())

    reborn = Mailbox(store, "r", clock)
    reborn.tick()
    reborn.tick()

    ((state, _, reason),) = status(store)
    assert state is CommandStatus.FAILED
    assert "ended before" in reason


def test_the_store_is_polled_at_most_once_a_second(store, clock):
    """The writer ticks ten times a second."""
    polls = []
    mailbox = listening(store, clock)
    claim = store.claim
    store.claim = lambda *args: polls.append(1) or claim(*args)
    for _ in range(30):
        mailbox.tick()
        clock.advance(0.1)

    assert len(polls) == 3


@pytest.mark.parametrize(
    ("step", "kept"),
    [
        (2**63 - 1, 2**63 - 1),
        (2**63, None),
        (-(2**63), -(2**63)),
        (-(2**63) - 1, None),
        (np.int32(7), 7),
        (7.0, None),
        ("seven", None),
        (None, None),
    ],
)
def test_a_step_that_is_no_number_of_64_bits_is_none(store, clock, step, kept):
    """The answer counts all the same."""
    mailbox = listening(store, clock)
    ask(store, clock)
    mailbox.tick()
    mailbox.take()[0].done("ok", step=step)
    mailbox.tick()

    assert status(store) == [(CommandStatus.DONE, kept, "ok")]


def test_a_busy_store_is_tried_again(store, clock):
    """An answer is not lost because the app held the lock."""
    mailbox = listening(store, clock)
    ask(store, clock)
    mailbox.tick()
    mailbox.take()[0].done("ok", step=7)
    settle, busy = store.settle, [True]

    def sometimes(*args, **kwargs):
        if busy.pop() if busy else False:
            raise StoreBusyError("locked")
        return settle(*args, **kwargs)

    store.settle = sometimes
    mailbox.tick()
    assert status(store)[0][0] is CommandStatus.CLAIMED
    mailbox.tick()

    assert status(store) == [(CommandStatus.DONE, 7, "ok")]


def test_a_store_without_control_is_left_alone(store, clock):
    """A network file system carries no commands; the run goes on."""
    calls = []

    def unavailable(*args):
        calls.append(1)
        raise ControlUnavailableError("not available on a network file system")

    store.commands = unavailable
    mailbox = listening(store, clock)
    for _ in range(3):
        mailbox.tick()
        clock.advance(2.0)

    assert len(calls) == 1


def test_a_command_claimed_at_the_very_end_is_rejected(store, clock):
    """The run ended before its next boundary."""
    mailbox = listening(store, clock)
    ask(store, clock)
    mailbox.tick()
    mailbox.close()

    assert status(store)[0][0] is CommandStatus.REJECTED


def test_the_same_key_twice_is_one_command(store, clock):
    """A double click."""
    first = ask(store, clock, idempotency_key="k")
    second = ask(store, clock, idempotency_key="k")

    assert first.command_id == second.command_id
    assert len(store.commands("r")) == 1


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        ("explode", {}, "unknown command 'explode'"),
        ("reset-reference", {"optimiser": "keep"}, "no argument 'optimiser'"),
        ("reset-reference", {"optimizer": "maybe"}, "'maybe' is not one of clear, keep"),
    ],
)
def test_a_command_nobody_could_carry_out_is_refused_at_once(store, clock, kind, args, message):
    """The sender learns, not the trainer."""
    with pytest.raises(ConfigError, match=message):
        request(store, "r", kind, args=args, clock=clock)


def finding(kind, severity):
    return Finding("d", kind, severity, step=130, onset_step=120, message="")


def test_a_reset_during_a_collapse_is_refused_with_the_finding_named():
    """It would make the bad policy the anchor."""
    health = RunHealth((finding("entropy_collapse", Severity.CRITICAL),))

    assert "entropy_collapse since step 120" in veto_reset_reference(health)
    assert veto_reset_reference(health, force=True) is None


def test_a_finding_that_flickers_does_not_open_the_door():
    """Its alert still fires: the collapse is not over because one step looked better."""
    alert = Alert("a", "r", "entropy", "entropy_collapse", Severity.CRITICAL, AlertState.FIRING, 120, 130, "")

    assert "entropy_collapse since step 120" in veto_reset_reference(RunHealth((), (alert,)))
    assert len(RunHealth((finding("entropy_collapse", Severity.CRITICAL),), (alert,)).collapsing) == 1


@pytest.mark.parametrize(
    ("kind", "severity"),
    [("entropy_collapse", Severity.WARNING), ("grad_spike", Severity.CRITICAL), ("kl_saturation", Severity.WARNING)],
)
def test_a_reset_is_not_refused_for_less(kind, severity):
    """A saturated KL is the very reason for a reset."""
    assert veto_reset_reference(RunHealth((finding(kind, severity),))) is None


def test_what_waits_for_a_boundary_is_cancelled(store, clock):
    """The loop never sees it, and the row says who took it back."""
    mailbox = listening(store, clock)
    sent = ask(store, clock)
    mailbox.tick()
    assert cancel(store, "r", sent.command_id, by="ada@lab", why="a mistake").status is CommandStatus.CANCELLING
    clock.advance(1.0)
    mailbox.tick()

    assert mailbox.take() == []
    assert status(store) == [(CommandStatus.CANCELLED, None, "cancelled by ada@lab: a mistake")]


def test_what_was_begun_is_not_cancelled(store, clock):
    """Its own answer is the answer."""
    mailbox = listening(store, clock)
    sent = ask(store, clock)
    mailbox.tick()
    (command,) = mailbox.take()
    cancel(store, "r", sent.command_id)
    clock.advance(1.0)
    mailbox.tick()
    assert status(store)[0][0] is CommandStatus.CANCELLING
    command.done("KL 0.31 -> 0", step=4)
    mailbox.tick()

    assert status(store) == [(CommandStatus.DONE, 4, "KL 0.31 -> 0")]


def test_a_command_is_taken_or_cancelled_never_both(store, clock):
    """The training thread takes while the writer thread lets go."""
    taken = []
    for _ in range(200):
        mailbox = Mailbox(store, "r", clock)
        mailbox.take()
        sent = ask(store, clock)
        mailbox.tick()
        cancel(store, "r", sent.command_id)
        clock.advance(1.0)
        loop = threading.Thread(target=lambda box=mailbox: taken.extend(box.take()))
        loop.start()
        mailbox.tick()
        loop.join()
        for command in taken:
            command.done("ok", step=1)
        mailbox.tick()
    ends = {c.command_id: c.status for c in store.commands("r")}

    for command in taken:
        assert ends.pop(command.command.command_id) is CommandStatus.DONE
    assert set(ends.values()) <= {CommandStatus.CANCELLED}


def test_what_waits_for_a_boundary_beyond_its_time_expires(store, clock):
    """Whether a boundary comes or not: it is never begun late, whatever the wall clock does."""
    mailbox = listening(store, clock)
    ask(store, clock, expires_s=60.0)
    mailbox.tick()
    ask(store, clock, expires_s=90.0)
    clock.advance(1.0)
    mailbox.tick()
    clock.advance(60.0)
    mailbox.tick()
    assert [state for state, *_ in status(store)] == [CommandStatus.EXPIRED, CommandStatus.CLAIMED]
    clock.advance(60.0)

    assert mailbox.take() == []
    mailbox.tick()
    assert status(store) == [(CommandStatus.EXPIRED, None, LATE)] * 2


def test_a_command_without_a_time_limit_waits_for_ever(store, clock):
    """0 means never."""
    mailbox = listening(store, clock)
    store.submit(Command("c", "r", "stop", created_at=clock.now()))
    mailbox.tick()
    clock.advance(1e6)
    mailbox.tick()

    assert [command.expired for command in mailbox.take()] == [False]


def test_a_cancelled_command_of_a_dead_process_is_answered(store, clock):
    """Nobody knows whether it was begun."""
    sent = ask(store, clock)
    store.claim("r", clock.now())
    cancel(store, "r", sent.command_id)
    reborn = Mailbox(store, "r", clock)
    reborn.tick()
    reborn.tick()

    assert status(store)[0][0] is CommandStatus.FAILED
