"""Permissions to act without asking: what they may say, and when they refuse."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.control.policy import ActionHistory, PermittedAction, action_key, action_refusal, requested_at_step
from rlwatch.errors import ConfigError
from rlwatch.records import Alert, AlertState, Command, CommandStatus, Severity


def alert(step=100, kind="kl_saturation", severity=Severity.WARNING):
    return Alert(f"a{step}", "r", "rule", kind, severity, AlertState.FIRING, step - 5, step, "KL is flat")


def action(**kwargs):
    return PermittedAction(**{"name": "reset when due", "kinds": ("kl_saturation",), "do": "reset-reference", **kwargs})


def command(made_by, step, status=CommandStatus.DONE):
    return Command(
        "c", "r", made_by.do, status=status, requested_by=made_by.by, idempotency_key=action_key(made_by, alert(step))
    )


def test_an_action_only_tries_itself_out_unless_told_otherwise():
    """And asks once in a run."""
    assert action().dry_run
    assert action().most == 1


def test_arguments_are_those_of_the_command():
    """With their defaults."""
    assert action().args == {"optimizer": "clear"}
    assert action(do="lower-lr", args={"scale": 0.3}).args == {"scale": 0.3, "until": None, "freeze": "no"}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"do": "reset-refrence"}, "unknown command"),
        ({"args": {"optimiser": "keep"}}, "no argument"),
        ({"do": "lower-lr"}, "needs scale"),
        ({"kinds": ()}, "at least one kind"),
        ({"name": ""}, "needs a name"),
        ({"most": 0}, "most must be an integer of at least 1"),
        ({"cooldown_steps": True}, "cooldown_steps must be an integer"),
    ],
)
def test_what_is_wrong_is_said_with_the_name_of_the_action(wrong, says):
    """At set-up, before a run begins."""
    with pytest.raises(ConfigError, match=says):
        action(**wrong)


@pytest.mark.parametrize("kind", ["nonfinite", "entropy_collapse", "reward_drop"])
def test_a_reset_upon_a_collapse_cannot_even_be_written_down(kind):
    """It would make the collapsing policy the anchor; stopping may be."""
    with pytest.raises(ConfigError, match="collapsing policy"):
        action(kinds=("kl_saturation", kind))
    assert action(kinds=(kind,), do="stop").do == "stop"


def test_it_concerns_alerts_of_its_kinds_from_its_severity_on():
    """And no others: there is no action upon everything."""
    critical_only = action(min_severity=Severity.CRITICAL)

    assert action().concerns(alert())
    assert not action().concerns(alert(kind="kl_drift"))
    assert not critical_only.concerns(alert())
    assert critical_only.concerns(alert(severity=Severity.CRITICAL))


def test_the_past_is_read_from_the_commands_of_the_run():
    """So that a resumed run goes on with the same budget; what expired or was refused is not spent, but cools down."""
    mine = action(most=3)
    past = ActionHistory.of(
        mine,
        [
            command(mine, 100),
            command(mine, 300, CommandStatus.REJECTED),
            command(action(name="another"), 900),
            Command("c", "r", "stop", requested_by="ann@lab", idempotency_key="x@950"),
        ],
    )

    assert past == ActionHistory(1, 300)


def test_budget_and_cool_down_refuse_with_the_reason():
    """Each by its own."""
    mine = action(most=2, cooldown_steps=100)

    assert action_refusal(mine, alert(100), ActionHistory()) is None
    assert "cools down until step 200" in action_refusal(mine, alert(199), ActionHistory(1, 100))
    assert action_refusal(mine, alert(200), ActionHistory(1, 100)) is None
    assert "budget of 2" in action_refusal(mine, alert(900), ActionHistory(2, 300))


def test_the_step_comes_back_from_the_key():
    """Also where a name has an @ in it; a person's command has none."""
    odd = action(name="a@b/c")

    assert requested_at_step(command(odd, 417)) == 417
    assert requested_at_step(Command("c", "r", "stop", requested_by="ann", idempotency_key="k@9")) is None
    assert requested_at_step(Command("c", "r", "stop", requested_by=odd.by, idempotency_key="none")) is None


@given(st.lists(st.integers(0, 2000), max_size=60), st.integers(1, 4), st.integers(0, 300))
def test_no_history_of_alerts_gets_more_than_the_budget_or_closer_than_the_cool_down(steps, most, cooldown):
    """Whatever fires, in whatever order."""
    mine, asked = action(most=most, cooldown_steps=cooldown), []
    for step in sorted(steps):
        past = ActionHistory.of(mine, [command(mine, earlier) for earlier in asked])
        if action_refusal(mine, alert(step), past) is None:
            asked.append(step)

    assert len(asked) <= most
    assert all(later - earlier >= cooldown for earlier, later in itertools.pairwise(asked))
