"""Every promise of the demo is kept by a run that kept it, and broken by exactly what breaks it."""

from dataclasses import replace

import pytest
from demo_world import RECIPE, RESET, Post, World, alert, command, finding, healthy

from rlwatch.demo.checks import examine
from rlwatch.records import CRASH_FORECAST, CommandStatus, OutboxMessage, OutboxStatus, RunState, Severity

LEARNED = "the policy learned"
SATURATED = "KL to the reference rose and saturated"
NO_EARLY = "no critical finding while it was healthy"
RESET_DONE = "the live trainer reset its reference when asked"
ZERO = "KL went back to zero"
COLLAPSED = "its own learning rate collapsed it"
NAMED = "its learning rate was named as the cause"
FORECAST = "the collapse was forecast"
WARNED = "a collapse was warned of, then alarmed"
DELIVERED = "a signed webhook carried the alarm"
REFUSED = "a reset in the middle of the collapse was refused"
FINISHED = "the run was recorded to its end"

REFUSAL = command(2, CommandStatus.REJECTED, 240, "refused: entropy_collapse since step 212")
DONE = command(1, CommandStatus.DONE, RESET, "done")


ONE_POST = (Post(),)


def broken(world, posts=ONE_POST, code=0):
    """Promises that were not kept."""
    return {check.promise for check in examine(world.facts(), world.diagnosis(), posts, code, RECIPE) if not check.kept}


def without_learning(step):
    return healthy(step) | {"reward": 0.1}


def without_return(step):
    return healthy(step) | {"kl": 0.4}


def at_one_rate(step):
    return healthy(step) | {"learning_rate": RECIPE.learning_rate}


def rising(step):
    return healthy(step) | ({"kl": 0.01 * step} if step <= RESET else {})


def test_a_run_that_did_it_all_keeps_every_promise():
    """The happy case, with twelve promises."""
    world = World()

    checks = examine(world.facts(), world.diagnosis(), [Post()], 0, RECIPE)

    assert [check.promise for check in checks] == [
        LEARNED, SATURATED, NO_EARLY, RESET_DONE, ZERO, COLLAPSED, NAMED, FORECAST, WARNED, DELIVERED,
        REFUSED, FINISHED,
    ]  # fmt: skip
    assert all(check.kept for check in checks)
    assert all(check.evidence for check in checks)


@pytest.mark.parametrize(
    ("changes", "promises"),
    [
        pytest.param({"curve": without_learning}, {LEARNED}, id="reward never rose"),
        pytest.param({"curve": without_return}, {ZERO}, id="KL stayed"),
        pytest.param({"death": None}, {COLLAPSED}, id="it survived"),
        pytest.param({"curve": at_one_rate}, {NAMED}, id="its learning rate stayed"),
        pytest.param({"commands": []}, {RESET_DONE, ZERO, REFUSED}, id="nobody asked"),
        pytest.param({"commands": [DONE]}, {REFUSED}, id="nobody asked twice"),
        pytest.param({"events": []}, {RESET_DONE}, id="no event tells of the reset"),
        pytest.param({"alerts": []}, {WARNED}, id="no alert fired"),
        pytest.param({"state": RunState.CRASHED}, {FINISHED}, id="crashed"),
        pytest.param({"state": RunState.RUNNING}, {FINISHED}, id="never finished"),
    ],
)
def test_what_is_missing_breaks_its_own_promise_only(changes, promises):
    """One lie, one promise."""
    assert broken(World(**changes)) == promises


@pytest.mark.parametrize("status", [CommandStatus.QUEUED, CommandStatus.CLAIMED, CommandStatus.REJECTED])
def test_a_reset_that_was_not_done_is_no_reset(status):
    """Asking is not enough."""
    world = World(commands=[command(1, status, 95, "not today")])

    assert {RESET_DONE, ZERO} <= broken(world)


def test_a_reset_after_the_range_test_began_came_too_late():
    """Then the run was collapsing already."""
    late = RECIPE.range_test_step
    world = World(commands=[command(1, CommandStatus.DONE, late, "done"), REFUSAL], events=[])

    assert RESET_DONE in broken(world)


@pytest.mark.parametrize("step", [RECIPE.range_test_step - 1, 235, 236])
def test_a_forecast_before_there_was_anything_to_see_or_after_the_alarm_is_none(step):
    """It must lie between the beginning of the range test and the first critical finding."""
    world = World()
    world.findings = [replace(f, step=step) if f.kind == CRASH_FORECAST else f for f in world.findings]
    world.findings.sort(key=lambda f: f.step)

    assert broken(world) == {FORECAST}


def test_a_second_reset_that_was_carried_out_breaks_the_promise_of_refusal():
    """A collapsing policy must not become the anchor."""
    world = World(commands=[DONE, command(2, CommandStatus.DONE, 240, "KL 3 -> 0")])

    assert broken(world) == {REFUSED}


def test_a_refusal_must_name_the_collapse():
    """Being refused for another reason proves nothing."""
    world = World(commands=[DONE, command(2, CommandStatus.REJECTED, 240, "there is no reference")])

    assert broken(world) == {REFUSED}


def test_a_critical_finding_before_the_range_test_is_a_false_alarm():
    """At the very step at which it begins, it is not; nor is a warning before: a plateau asks for the reset."""
    early = finding("grad_spike", Severity.CRITICAL, RECIPE.range_test_step - 1)
    just = replace(early, step=RECIPE.range_test_step)
    warning = replace(early, severity=Severity.WARNING)

    assert broken(World(findings=[*World().findings, early])) == {NO_EARLY}
    assert broken(World(findings=[*World().findings, just])) == set()
    assert broken(World(findings=[*World().findings, warning])) == set()


def test_an_alarm_without_a_warning_before_it_does_not_count():
    """Nor does a warning of another kind, or one that came after."""
    saturation, forecast, warning, alarm = World().findings
    other = replace(warning, kind="no_signal")
    after = replace(warning, step=alarm.step + 5)

    assert broken(World(findings=[saturation, forecast, alarm])) == {WARNED}
    assert broken(World(findings=[saturation, forecast, other, alarm])) == {WARNED}
    assert broken(World(findings=[saturation, forecast, alarm, after])) == {WARNED}


def test_an_alert_that_never_fired_does_not_count():
    """A pending one tells nobody."""
    world = World(alerts=[alert("entropy_collapse", Severity.CRITICAL, 235, fired_at=None)])

    assert broken(world) == {WARNED}


def test_without_a_finding_a_flat_curve_counts_as_saturated():
    """A person can see it too; the evidence says who saw it."""
    world = World(findings=World().findings[1:])

    check = next(c for c in examine(world.facts(), world.diagnosis(), [Post()], 0, RECIPE) if c.promise == SATURATED)

    assert check.kept
    assert "a person saw it level at 0.40" in check.evidence


def test_without_a_finding_or_a_flat_curve_nothing_saturated():
    """A curve that still rises when the reset comes is not flat."""
    world = World(findings=World().findings[1:], curve=rising)

    assert SATURATED in broken(world)


def test_a_saturation_found_after_the_reset_is_not_the_one_promised():
    """It belongs to the new reference."""
    late = finding("kl_saturation", Severity.INFO, RESET + 60)
    world = World(findings=[*World().findings[1:], late], curve=rising)

    assert SATURATED in broken(world)


@pytest.mark.parametrize(
    "posts",
    [
        pytest.param([], id="nothing came"),
        pytest.param([Post(severity="warning")], id="only a warning"),
        pytest.param([Post(verified=False)], id="forged"),
        pytest.param([Post(), Post(verified=False)], id="one of two forged"),
        pytest.param([Post(verified=None)], id="nobody verified"),
    ],
)
def test_the_webhook_counts_only_if_critical_and_signed(posts):
    """An unsigned alarm could be anybody's."""
    assert broken(World(), posts) == {DELIVERED}


def test_a_message_still_waiting_in_the_outbox_was_not_delivered():
    """Those for other channels do not matter."""
    waiting = OutboxMessage("m2", "demo-1", "a-1", "webhook", {}, status=OutboxStatus.PENDING)

    assert broken(World(outbox=[waiting])) == {DELIVERED}
    assert broken(World(outbox=[replace(waiting, channel="console")])) == set()


@pytest.mark.parametrize("code", [1, -15, None])
def test_a_trainer_that_did_not_end_well_breaks_the_last_promise(code):
    """Whatever the store says."""
    assert broken(World(), code=code) == {FINISHED}


def test_a_run_that_stopped_early_is_not_recorded_to_its_end():
    """Its last step is not the last of the recipe."""
    assert FINISHED in broken(World(steps=RECIPE.steps - 1))


def test_an_empty_run_breaks_promises_and_nothing_else():
    """No rows, no findings, no commands: everything is said to be missing, nothing raises."""
    world = World(steps=0, findings=[], commands=[], alerts=[], events=[], outbox=[], state=RunState.RUNNING)

    assert broken(world, [], None) == {
        LEARNED, SATURATED, RESET_DONE, ZERO, COLLAPSED, NAMED, FORECAST, WARNED, DELIVERED,
        REFUSED, FINISHED,
    }  # fmt: skip
