"""Asking and refusing: what a request is as a row, when a reset is vetoed, and in which words."""

import os
import pwd
import socket
from dataclasses import replace

import pytest

from rlwatch.clock import ManualClock
from rlwatch.control.commands import EXPIRES_S, request, whoami
from rlwatch.control.mailbox import POLL_S, CommandResult, Mailbox, PendingCommand
from rlwatch.control.policy import (
    COLLAPSE_KINDS,
    NamedSetting,
    RunHealth,
    describe,
    veto_reset_reference,
    veto_save_checkpoint,
    veto_set_kl_coef,
)
from rlwatch.detectors.registry import detector_classes
from rlwatch.records import Command, CommandStatus, Finding, RunInfo, Severity
from rlwatch.store.url import open_store


@pytest.fixture
def store(request):
    opened = open_store(f"memory://request-{request.node.name}")
    opened.open_run(RunInfo("r"))
    return opened


def finding(kind, severity=Severity.CRITICAL, onset=7):
    return Finding("d", kind, severity, onset + 5, onset, "m")


def test_every_collapse_kind_is_one_a_detector_can_report():
    """A renamed kind would be a veto lost."""
    assert {kind for detector in detector_classes() for kind in detector.kinds} >= COLLAPSE_KINDS


@pytest.mark.parametrize("kind", ["id0_run", "garbled_output", "silent_freeze", "length_collapse"])
def test_broken_output_and_frozen_weights_are_collapses_too(kind):
    """Advice called them so, and a reset was carried out all the same."""
    assert veto_reset_reference(RunHealth((finding(kind),))) is not None
    assert veto_save_checkpoint(RunHealth((finding(kind),)), kept=2) is not None
    assert veto_set_kl_coef(RunHealth((finding(kind),)), old=0.1, new=0.0) is not None


@pytest.mark.parametrize("kind", sorted(COLLAPSE_KINDS))
def test_every_critical_collapse_vetoes_a_reset(kind):
    """A warning does not, and force overrules it."""
    critical, warning = RunHealth((finding(kind),)), RunHealth((finding(kind, Severity.WARNING),))

    assert veto_reset_reference(critical) is not None
    assert veto_reset_reference(critical, force=True) is None
    assert veto_reset_reference(warning) is None
    assert critical.collapsing == critical.findings


def test_a_refusal_names_all_that_collapses_and_what_to_do():
    """And nothing that does not."""
    health = RunHealth((finding("entropy_collapse", onset=120), finding("kl_drift"), finding("reward_drop", onset=130)))

    assert veto_reset_reference(health) == (
        "refused: entropy_collapse since step 120, reward_drop since step 130; a reset now would make the collapsing "
        "policy the anchor. Roll back to a checkpoint before the onset instead, or send the command again with force."
    )
    assert describe(()) == ""


def test_a_save_in_a_collapse_is_vetoed_only_where_it_deletes_an_older_checkpoint():
    """The last good one may be the one that goes."""
    bad = RunHealth((finding("nonfinite", onset=40),))

    assert veto_save_checkpoint(bad, kept=None) is None
    assert veto_save_checkpoint(RunHealth(), kept=2) is None
    assert veto_save_checkpoint(bad, kept=2, force=True) is None
    assert veto_save_checkpoint(bad, kept=2) == (
        "refused: nonfinite since step 40; only 2 checkpoints are kept, so that a save now could delete the last good "
        "one. Copy that first, or send the command again with force."
    )


def test_the_anchor_is_not_loosened_in_a_collapse():
    """Raising the coefficient is never vetoed, lowering it only while something collapses."""
    bad = RunHealth((finding("entropy_collapse", onset=40),))

    assert veto_set_kl_coef(bad, old=0.1, new=0.1) is None
    assert veto_set_kl_coef(bad, old=0.1, new=1.0) is None
    assert veto_set_kl_coef(RunHealth(), old=0.1, new=0.0) is None
    assert veto_set_kl_coef(bad, old=0.1, new=0.05, force=True) is None
    assert "(0.1 -> 0.05)" in veto_set_kl_coef(bad, old=0.1, new=0.05)
    risen = replace(bad, named=(NamedSetting("kl_coefficient", "policy/kl_coef", 30, 0.05, 0.1, "strong"),))
    assert veto_set_kl_coef(risen, old=0.1, new=0.05) is None
    assert veto_set_kl_coef(risen, old=0.1, new=0.04) is not None


def test_a_request_is_a_queued_command_that_expires_in_ten_minutes(store):
    """With the defaults of its kind, who asked and why."""
    clock = ManualClock(50.0)
    made = request(store, "r", "reset-reference", why="KL is flat", clock=clock)

    assert (made.status, made.args, made.force) == (CommandStatus.QUEUED, {"optimizer": "clear"}, False)
    assert (made.created_at, made.expires_at, EXPIRES_S) == (50.0, 650.0, 600.0)
    assert (made.requested_by, made.why) == (whoami(), "KL is flat")
    assert store.commands("r") == [made]


def test_what_was_asked_is_what_is_kept(store):
    """The other value, force, another expiry."""
    made = request(
        store,
        "r",
        "reset-reference",
        args={"optimizer": "keep"},
        by="ada",
        force=True,
        expires_s=5.0,
        clock=ManualClock(50.0),
    )

    assert (made.args, made.force, made.requested_by, made.expires_at) == ({"optimizer": "keep"}, True, "ada", 55.0)


def test_two_requests_are_two_commands_unless_they_share_a_key(store):
    """A key is made up where none is given."""
    first, second = (request(store, "r", "reset-reference") for _ in range(2))
    third, fourth = (request(store, "r", "reset-reference", idempotency_key="click 1") for _ in range(2))

    assert first.command_id != second.command_id
    assert first.idempotency_key != second.idempotency_key
    assert third == fourth
    assert len(store.commands("r")) == 3


def test_a_command_carries_the_account_it_comes_from(monkeypatch):
    """As the system knows it, whatever the environment says; in a container without users, its number."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "somebody-else")
    user, host = pwd.getpwuid(os.getuid()).pw_name, socket.gethostname()

    assert whoami() == f"{user}@{host}"
    monkeypatch.setattr(os, "getuid", lambda: 4_242_424)
    assert whoami() == f"uid4242424@{host}"


def test_a_pending_command_shows_what_was_asked_and_is_answered_once():
    """Its arguments are a copy: changing them changes no row."""
    answers = []
    pending = PendingCommand(Command("c", "r", "reset-reference", {"optimizer": "keep"}, force=True), answers.append)
    pending.args["optimizer"] = "clear"
    pending.done("KL 0.4 -> 0", step=12)
    pending.reject("too late")

    assert (pending.kind, pending.args, pending.force, pending.answered) == (
        "reset-reference",
        {"optimizer": "keep"},
        True,
        True,
    )
    assert answers == [CommandResult(pending.command, CommandStatus.DONE, 12, "KL 0.4 -> 0")]


def test_the_next_poll_is_exactly_a_second_later(store):
    """Not before; answers do not wait for it."""
    clock = ManualClock(100.0)
    mailbox = Mailbox(store, "r", clock)
    mailbox.take()
    mailbox.tick()
    request(store, "r", "reset-reference", clock=clock)
    clock.advance(POLL_S - 0.01)
    mailbox.tick()
    early = mailbox.take()
    clock.advance(0.01)
    mailbox.tick()
    (pending,) = mailbox.take()
    pending.done("ok")
    mailbox.tick()

    assert early == []
    assert [c.status for c in store.commands("r")] == [CommandStatus.DONE]


def test_a_closed_mailbox_claims_nothing_more(store):
    """What is queued stays queued, for the next attempt or to expire."""
    clock = ManualClock(100.0)
    mailbox = Mailbox(store, "r", clock)
    mailbox.take()
    request(store, "r", "reset-reference", clock=clock)
    mailbox.close()

    assert [c.status for c in store.commands("r")] == [CommandStatus.QUEUED]
