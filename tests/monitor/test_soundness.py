"""A row is sound by the run's first rows and its own best: never by a baseline that was broken already."""

import math

import pytest

import rlwatch
from rlwatch.monitor.step_judge import Soundness
from rlwatch.records import ClosedStep, Finding, Severity


def judged(rewards=(), entropy=None, mismatch=None, holding=None, steps=None):
    """Why each row is not sound; ``holding`` maps a step to findings."""
    sound = Soundness()
    for step in range(steps or len(rewards)):
        metrics = {}
        if step < len(rewards) and rewards[step] is not None:
            metrics["reward/mean"] = rewards[step]
        if entropy:
            metrics["policy/entropy"] = entropy[step]
        if mismatch:
            metrics["mismatch/k3"] = mismatch[step]
        sound.update(ClosedStep(step, metrics, {}, 0.0, 1, step), (holding or {}).get(step, ()))
    return [row.why_not for row in sound.rows]


def test_a_run_that_is_broken_by_its_first_update_is_never_sound_again():
    """The first row, before any update, is part of the best: the level of the broken rows is no measure."""
    reasons = judged([0.5, 0.5] + [0.1] * 20)

    assert reasons[:2] == ["", ""]
    assert all("its best 0.5" in why for why in reasons[8:])


def test_a_reward_that_rises_and_one_that_is_noisy_are_sound():
    """The noise of a row is allowed below the best; nine tenths of it are enough."""
    noisy = [0.5 + 0.1 * (-1) ** i for i in range(30)]

    assert set(judged([0.01 * i for i in range(30)])) == {""}
    assert set(judged(noisy)) == {""}
    assert judged([1.0] * 10 + [0.92] * 10)[-1] == ""
    assert judged([1.0] * 10 + [0.85] * 10)[-1] != ""
    assert judged([-1.0] * 10 + [-1.2] * 10)[-1] != ""


@pytest.mark.parametrize(("factor", "sound"), [(0.3, True), (0.2, False), (1.5, True), (1.7, False), (math.nan, False)])
def test_entropy_is_measured_by_the_first_row(factor, sound):
    """From a quarter of it to 1.6 times."""
    assert (judged([0.5] * 3, entropy=[1.0, 1.0, factor])[-1] == "") is sound


def test_mismatch_has_a_limit_and_one_row_of_it_is_none():
    """The median of three rows counts."""
    reasons = judged([0.5] * 6, mismatch=[0.001, 0.2, 0.001, 0.2, 0.2, 0.2])

    assert reasons[:3] == ["", "the mismatch k3 is 0.101 nats a token", ""]
    assert "mismatch" in reasons[-1]


def test_what_stands_makes_a_row_unsound_and_a_row_without_a_reward_is_no_evidence():
    """A critical finding by the run's state machine; a warning does not; a reward that is not finite does."""
    critical = Finding("d", "entropy_collapse", Severity.CRITICAL, 1, 1, "")
    warning = Finding("d", "entropy_collapse", Severity.WARNING, 2, 2, "")
    reasons = judged([0.5, 0.5, 0.5], holding={1: [critical], 2: [warning]})

    assert reasons == ["", "Collapsed at step 1: entropy fell; still running", ""]
    assert judged([], steps=2) == []
    assert judged([0.5, None, 0.5]) == ["", ""]
    assert judged([math.nan]) == ["the reward is not finite"]


def test_the_health_of_a_live_run_tells_its_judged_rows(tmp_path):
    """Each step once the next has begun; by the trainer's own names."""
    with rlwatch.init(store=tmp_path, name="a") as run:
        for step in range(1, 13):
            run.log({"reward": 0.5 if step < 7 else 0.0, "entropy": 1.0}, step=step)
        run.flush()
        health = run.health()

    assert [row.step for row in health.rows] == list(range(1, 12))
    assert health.unsound_after(0) == ""
    assert health.unsound_after(1) == ""
    assert "reward" in health.unsound_after(4)
    assert health.unsound_after(12) is not None
