"""A rescue rehearsed on a record: what would have been done first, and what became of the run without it."""

import pytest

from rlwatch.control.rescue import RescuePolicy
from rlwatch.monitor import Monitor
from rlwatch.monitor.rescue_rehearsal import rehearse_rescue
from rlwatch.records import StepRecord


def recorded(rewards, hours=0.01):
    """A run of these rewards, a row each ``hours``; entropy rises where the reward is gone."""
    return [
        StepRecord(
            step,
            {"reward": reward, "entropy": 1.0 if reward > 0.3 else 2.5, "kl": 0.01, "grad_norm": 1.0},
            ts=3600.0 * hours * step,
            seq=step,
        )
        for step, reward in enumerate(rewards, 1)
    ]


def climbing(step):
    return 0.3 + 0.4 * min(step / 60, 1.0) + 0.01 * (step % 3)


def rehearsed(rewards, **policy):
    return rehearse_rescue(recorded(rewards), Monitor(run_id="r"), RescuePolicy(**policy))


def test_a_collapse_would_have_been_probed_and_rolled_back():
    """To a snapshot from before it; the rest of the run, by its length and its reward, was wasted."""
    found = rehearsed([climbing(step) if step < 110 else 0.02 for step in range(1, 201)])

    assert [act.do for act in found.acts] == ["hold", "rollback"]
    assert found.acts[0].step >= 110
    assert found.restored <= 109
    assert found.level == pytest.approx(0.7, abs=0.05)
    assert (found.ended, found.wasted) == (0.02, True)
    assert found.steps_after == 200 - found.acts[1].step - 1  # a row is judged when the next begins
    assert found.hours_after == pytest.approx(0.01 * found.steps_after)


def test_a_sound_run_would_have_been_left_alone():
    """Nothing is held, nothing was wasted."""
    found = rehearsed([climbing(step) for step in range(1, 201)])

    assert found.acts == ()
    assert found.restored is None
    assert found.wasted is None


def test_a_policy_that_concerns_other_alerts_does_nothing():
    """The kinds of the file count."""
    found = rehearsed([climbing(step) if step < 110 else 0.02 for step in range(1, 201)], kinds=("length_collapse",))

    assert found.acts == ()
