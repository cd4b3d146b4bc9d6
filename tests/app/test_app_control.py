"""Asking a live run: what is checked beforehand, and what is written down."""

import pytest
from app_world import alert
from rlwatch_app import commands
from rlwatch_app.principal import NotPermittedError, Principal

from rlwatch.clock import ManualClock
from rlwatch.control.commands import COMMAND_KINDS
from rlwatch.control.policy import COLLAPSE_KINDS
from rlwatch.errors import ConfigError
from rlwatch.records import AlertState, CommandStatus, RunInfo, RunState, Severity
from rlwatch.store.url import open_store

RUN = RunInfo("run-1", name="seed3")
ANN = Principal("ann", "operator")


@pytest.fixture
def store(request):
    """A store in memory that knows the run."""
    store = open_store(f"memory://{request.node.name}")
    store.open_run(RUN).close()
    return store


def send(store, key="k", kind="reset-reference", args=None, **more):
    fields = {"why": " KL saturated ", "by": ANN, "force": False, **more}
    args = {"optimizer": "keep"} if args is None else args
    return commands.send(store, "run-1", kind, args, key=key, clock=ManualClock(1000.0), **fields)


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
    send(store, key=commands.new_key())
    assert len(store.commands("run-1")) == 2


@pytest.mark.parametrize("by", [Principal("eve", "viewer"), commands.Principal("", "operator"), commands.Principal()])
def test_only_an_operator_with_a_name_may_send(store, by):
    """Whatever a page offered: a viewer, and a page that no door stands before, write nothing."""
    with pytest.raises(NotPermittedError, match="has read-only access"):
        send(store, by=by)
    assert store.commands("run-1") == []


def test_an_unknown_choice_is_refused(store):
    """Before anything is written."""
    with pytest.raises(ConfigError):
        send(store, args={"optimizer": "melt"})
    assert store.commands("run-1") == []


def test_only_the_runs_name_confirms():
    """Not another one's, not nothing."""
    for kind in ("reset-reference", "stop"):
        assert commands.may_send(RUN, kind, " seed3 ")
        assert not commands.may_send(RUN, kind, "seed4")
        assert not commands.may_send(RUN, kind, "")


def test_what_can_be_undone_needs_no_confirmation():
    """A pause is resumed, a rate given back."""
    for kind in ("pause", "resume", "lower-lr", "set-kl-coef", "save-checkpoint"):
        assert commands.may_send(RUN, kind, "")


@pytest.mark.parametrize("name", ["", "x" * 200, "   "])
def test_a_name_nobody_would_type_is_replaced_by_the_id(name):
    """Two hundred characters are not a confirmation but a punishment."""
    assert commands.confirmation(RunInfo("run-1", name=name)) == "run-1"


def test_a_run_that_ended_cannot_be_asked():
    """Nobody would claim it."""
    assert not commands.may_send(RunInfo("run-1", name="seed3", state=RunState.FINISHED), "stop", "seed3")


@pytest.mark.parametrize("kind", sorted(COLLAPSE_KINDS))
def test_a_critical_collapse_warns_of_the_refusal(kind):
    """The same kinds as the trainer vetoes."""
    checks = commands.checks("reset-reference", RUN, [alert(kind=kind)], stale=False, has_reference=True)
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
    assert commands.checks("reset-reference", RUN, [harmless], stale=False, has_reference=True)[-1].met


def test_what_only_the_trainer_knows_is_said_so():
    """Neither a tick nor a cross."""
    alive, reference, _ = commands.checks("reset-reference", RUN, [], stale=True, has_reference=None)
    assert (alive.met, reference.met) == (None, None)


@pytest.mark.parametrize("kind", ["save-checkpoint", "set-kl-coef"])
def test_every_vetoed_command_says_what_a_collapse_means_for_it(kind):
    """Each for its own reason."""
    collapse = commands.checks(kind, RUN, [alert()], stale=False, has_reference=True)[-1]
    assert (collapse.met, "refused unless forced" in collapse.text) == (False, True)
    assert commands.REFUSED.keys() == {name for name, one in COMMAND_KINDS.items() if one.vetoed}


@pytest.mark.parametrize("kind", ["pause", "lower-lr", "stop"])
def test_what_protects_a_run_is_never_warned_of(kind):
    """In a collapse least of all."""
    assert [check.met for check in commands.checks(kind, RUN, [alert()], stale=False, has_reference=None)] == [True]


def test_a_paused_run_is_live_and_says_what_waits():
    """It is still, but it listens."""
    alive, saves = (c for c in commands.checks("save-checkpoint", RUN, [], stale=True, has_reference=None, paused=True)
                    if "collapse" not in c.text)  # fmt: skip
    assert (alive.met, saves.met) == (True, None)
    assert commands.checks("resume", RUN, [], stale=True, has_reference=None, paused=True)[-1].met
    assert commands.checks("resume", RUN, [], stale=False, has_reference=None)[-1].met is None


def test_force_is_sent_only_where_it_means_something(store):
    """A pause cannot be forced."""
    assert not send(store, "a", "pause", {"minutes": 5.0}, force=True).force
    assert send(store, "b", "save-checkpoint", {}, force=True).force


def test_what_a_command_was_asked_with_is_said_in_a_few_words(store):
    """Numbers as a person writes them; what was left open is not said."""
    assert commands.arguments(send(store, "a", "lower-lr", {"scale": 0.3})) == "scale 0.3"
    assert commands.arguments(send(store, "b", "lower-lr", {"scale": 1, "until": 40})) == "scale 1, until 40"
    assert commands.arguments(send(store, "c", "reset-reference", {}, force=True)) == "optimizer clear, forced"
    assert commands.arguments(send(store, "d", "resume", {})) == ""


def test_outcomes_name_their_step(store):
    """What the history shows."""
    sent = send(store)
    assert commands.waiting([sent], 1001.0)
    store.claim("run-1", 1001.0)
    done = store.settle("run-1", sent.command_id, CommandStatus.DONE, 1002.0, step=4816, result="KL 0.31 to 0")
    assert commands.outcome(done, 1002.0) == "done at step 4\u202f816"
    assert not commands.waiting([done], 1002.0)


def test_a_command_nobody_claimed_in_time_is_no_longer_on_its_way(store):
    """The row says queued until somebody looks; the page knows better."""
    sent = send(store)
    assert commands.outcome(sent, sent.expires_at - 1) == "queued"
    assert commands.outcome(sent, sent.expires_at) == "expired: no trainer took it"
    assert not commands.waiting([sent], sent.expires_at)


def test_a_reset_is_due_when_kl_saturates_and_nothing_collapses():
    """Then the button stands out."""
    assert commands.reset_due([alert(kind="kl_saturation", severity=Severity.INFO)])
    assert not commands.reset_due([alert(kind="kl_saturation"), alert()])
    assert not commands.reset_due([alert(kind="kl_saturation", state=AlertState.RESOLVED)])
