"""Settings that changed and are named as causes: what a live run's health says of them, and until when."""

import pytest

from rlwatch.monitor import Monitor
from rlwatch.records import Event, StepRecord

TURNED = 80


def rows(*, to=4.0, back=None, falls=True, name="beta"):
    """A run whose setting goes from 0.04 to ``to`` at step ``TURNED``, and whose reward is gone ten steps later."""
    for step in range(1, 141):
        turned = step >= TURNED and (back is None or step < back)
        gone = falls and step >= TURNED + 10
        yield StepRecord(
            step,
            {
                "reward": 0.02 if gone else 0.3 + 0.4 * min(step / 60, 1.0) + 0.01 * (step % 3),
                "entropy": 2.5 if gone else 1.0,
                "kl": 0.01,
                "grad_norm": 1.0,
                name: to if turned else 0.04,
            },
            seq=step,
        )


def named(items):
    """Return the settings that the health of the run names, after each row."""
    monitor, found = Monitor(run_id="r", source="trl/grpo"), []
    for item in items:
        monitor.observe(item)
        found.append(monitor.health().named)
    return found


@pytest.mark.parametrize(("name", "metric"), [("beta", "policy/kl_coef"), ("learning_rate", "optim/lr")])
def test_a_setting_that_the_log_shows_to_have_changed_is_named_with_its_value_before(name, metric):
    """From the first alarm on; nothing is named before it."""
    found = named(rows(name=name))
    (last,) = found[-1]

    assert all(not one for one in found[: TURNED + 9])
    assert (last.metric, last.since, last.before, last.after) == (metric, TURNED, 0.04, 4.0)
    assert last.sure in ("strong", "plausible")


def test_neither_a_setting_that_is_back_nor_one_of_a_run_that_is_sound_is_named():
    """There is nothing to set back, or no reason to."""
    assert named(rows(back=TURNED + 5))[-1] == ()
    assert named(rows(falls=False))[-1] == ()


def test_what_a_command_has_set_is_not_named():
    """A person has decided it."""
    items = list(rows())
    asked = Event("command", TURNED - 1, {"command": "set-kl-coef", "args": {"value": 4.0}, "by": "ann@lab"})
    items.insert(TURNED - 1, asked)

    assert named(items)[-1] == ()


def test_a_setting_stays_named_though_a_rollback_has_undone_the_rows_that_show_its_change():
    """Until no alert of a collapse fires."""
    items = list(rows())
    body = {"command": "rollback", "report": {"to_step": 70}, "by": "policy:rescue"}
    undo = items.index(next(item for item in items if item.step == TURNED + 25))
    items.insert(undo, Event("command", TURNED + 24, body))
    found = named(items)

    assert found[undo - 1] == found[undo] == found[undo + 3] != ()
