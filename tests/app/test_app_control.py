"""Asking a live run: what is checked beforehand, and what is written down."""

import pytest
from app_world import alert
from rlwatch_app import control

from rlwatch.clock import ManualClock
from rlwatch.control.policy import COLLAPSE_KINDS
from rlwatch.errors import ConfigError
from rlwatch.records import AlertState, CommandStatus, RunInfo, RunState, Severity
from rlwatch.store.url import open_store

RUN = RunInfo("run-1", name="seed3")


@pytest.fixture
def store(request):
    """A store in memory that knows the run."""
    store = open_store(f"memory://{request.node.name}")
    store.open_run(RUN).close()
    return store


def send(store, key="k", **more):
    fields = {"optimizer": "keep", "why": " KL saturated ", "by": "ann", "force": False, **more}
    return control.send(store, "run-1", key=key, clock=ManualClock(1000.0), **fields)


def test_a_reset_is_one_queued_row_with_who_why_and_an_end(store):
    """Everything an audit asks, and no command lives for ever."""
    send(store)
    (row,) = store.commands("run-1")
    assert (row.kind, row.status, row.args) == ("reset-reference", CommandStatus.QUEUED, {"optimizer": "keep"})
    assert (row.requested_by, row.why, row.force, row.created_at) == ("ann", "KL saturated", False, 1000.0)
    assert row.expires_at > row.created_at


def test_a_double_click_is_one_command(store):
    """The key belongs to the opening of the dialog."""
    assert send(store).command_id == send(store).command_id
    assert len(store.commands("run-1")) == 1
    send(store, key=control.new_key())
    assert len(store.commands("run-1")) == 2


def test_nobody_is_nobody(store):
    """An empty name falls back to the account the app runs under."""
    assert "@" in send(store, by="  ").requested_by


def test_an_unknown_choice_is_refused(store):
    """Before anything is written."""
    with pytest.raises(ConfigError):
        send(store, optimizer="melt")
    assert store.commands("run-1") == []


def test_only_the_runs_name_confirms():
    """Not another one's, not nothing."""
    assert control.may_send(RUN, " seed3 ")
    assert not control.may_send(RUN, "seed4")
    assert not control.may_send(RUN, "")


@pytest.mark.parametrize("name", ["", "x" * 200, "   "])
def test_a_name_nobody_would_type_is_replaced_by_the_id(name):
    """Two hundred characters are not a confirmation but a punishment."""
    assert control.confirmation(RunInfo("run-1", name=name)) == "run-1"


def test_a_run_that_ended_cannot_be_asked():
    """Nobody would claim it."""
    assert not control.may_send(RunInfo("run-1", name="seed3", state=RunState.FINISHED), "seed3")


@pytest.mark.parametrize("kind", sorted(COLLAPSE_KINDS))
def test_a_critical_collapse_warns_of_the_refusal(kind):
    """The same kinds as the trainer vetoes."""
    checks = control.reset_checks(RUN, [alert(kind=kind)], stale=False, has_reference=True)
    assert [check.met for check in checks] == [True, True, False]
    assert "refused unless forced" in checks[-1].text


@pytest.mark.parametrize(
    "harmless",
    [
        alert(severity=Severity.WARNING),
        alert(state=AlertState.RESOLVED),
        alert(state=AlertState.PENDING),
        alert(kind="kl_saturation"),
    ],
)
def test_what_is_no_collapse_now_does_not_warn(harmless):
    """A saturated KL is the very reason for a reset."""
    assert control.reset_checks(RUN, [harmless], stale=False, has_reference=True)[-1].met


def test_what_only_the_trainer_knows_is_said_so():
    """Neither a tick nor a cross."""
    alive, reference, _ = control.reset_checks(RUN, [], stale=True, has_reference=None)
    assert (alive.met, reference.met) == (None, None)


def test_outcomes_name_their_step(store):
    """What the history shows."""
    sent = send(store)
    assert control.waiting([sent], 1001.0)
    store.claim("run-1", 1001.0)
    done = store.settle("run-1", sent.command_id, CommandStatus.DONE, 1002.0, step=4816, result="KL 0.31 to 0")
    assert control.outcome(done, 1002.0) == "done at step 4\u202f816"
    assert not control.waiting([done], 1002.0)


def test_a_command_nobody_claimed_in_time_is_no_longer_on_its_way(store):
    """The row says queued until somebody looks; the page knows better."""
    sent = send(store)
    assert control.outcome(sent, sent.expires_at - 1) == "queued"
    assert control.outcome(sent, sent.expires_at) == "expired: nobody claimed it"
    assert not control.waiting([sent], sent.expires_at)


def test_a_reset_is_due_when_kl_saturates_and_nothing_collapses():
    """Then the button stands out."""
    assert control.reset_due([alert(kind="kl_saturation", severity=Severity.INFO)])
    assert not control.reset_due([alert(kind="kl_saturation"), alert()])
    assert not control.reset_due([alert(kind="kl_saturation", state=AlertState.RESOLVED)])
