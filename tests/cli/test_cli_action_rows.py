"""The audit of an action policy, as `rlwatch show` tells it."""

from __future__ import annotations

from cli_helpers import record_run, strict

from rlwatch.cli.show import action_rows
from rlwatch.control.policy import PermittedAction, action_key
from rlwatch.records import Alert, AlertState, Command, CommandStatus, Event, RunInfo, Severity
from rlwatch.store.url import open_store

SLOW = {"action": "slow down", "do": "lower-lr", "args": {"scale": 0.3, "until": None}, "kind_of_alert": "no_signal"}


def decided(step, outcome, alert="a1", **more):
    """An event as the policy records it."""
    return Event("action", step, {**SLOW, "outcome": outcome, "alert": alert, **more})


def asked(step, status=CommandStatus.DONE, result="applied"):
    """The command such a decision wrote, under the key the policy gives it."""
    action = PermittedAction("slow down", ("no_signal",), "lower-lr", {"scale": 0.3})
    fired = Alert("a1", "r", "no-signal", "no_signal", Severity.WARNING, AlertState.FIRING, step, step, "")
    return Command("c", "r", "lower-lr", status=status, result=result, idempotency_key=action_key(action, fired))


def test_a_request_carries_what_became_of_its_command():
    """And no other decision does."""
    events = [decided(76, "requested"), decided(81, "refused", why_not="it cools down"), Event("note", 82)]

    rows = action_rows(events, [asked(76), asked(81)])

    assert [(row["step"], row["outcome"], row["answer"]) for row in rows] == [
        (76, "requested", "done: applied"),
        (81, "refused", ""),
    ]


def test_a_command_nobody_has_answered_yet_is_said_to_be_queued():
    """No colon dangles."""
    assert action_rows([decided(5, "requested")], [asked(5, CommandStatus.QUEUED, "")])[0]["answer"] == "queued"


def test_show_prints_the_audit_as_text_and_as_json(invoke):
    """What was done, with which arguments, upon what, and why not."""
    store = open_store()
    record_run(store, "r", state=None)
    writer = store.open_run(RunInfo("r", attempt=2))
    writer.write([decided(3, "dry run"), decided(4, "refused", why_not="its budget of 1 in this run is spent")])
    writer.close()
    store.close()

    text = invoke("show", "r").stdout
    rows = strict(invoke("show", "r", "--format", "json").stdout)["actions"]

    assert "slow down  lower-lr scale=0.3  no_signal  dry run" in text
    assert "its budget of 1 in this run is spent" in text
    assert [(row["step"], row["outcome"]) for row in rows] == [(3, "dry run"), (4, "refused")]


def test_a_run_without_actions_has_no_such_table(invoke):
    """Nothing is said of what was never permitted."""
    with_none = open_store()
    record_run(with_none, "r")
    with_none.close()

    assert "Actions" not in invoke("show", "r").stdout
