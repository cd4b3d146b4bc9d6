"""The chain of NaN: its links in order, where it was entered, and the freeze it ends in."""

import math

import pytest
from exact_runs import alarms, always, exact, then, when, worst

from rlwatch.detectors.optimisation.nonfinite import NonFinite
from rlwatch.detectors.optimisation.silent_freeze import SilentFreeze
from rlwatch.records import LOCALISED, ClosedStep, Event, Severity

GOOD = {
    "loss/policy": 0.01,
    "optim/grad_norm": 0.4,
    "policy/entropy": 0.3,
    "policy/kl_ref": 0.01,
    "policy/kl_old": 0.001,
    "reward/mean": 0.5,
    "nonfinite/rollout_logp": 0.0,
    "nonfinite/old_logp": 0.0,
    "nonfinite/ref_logp": 0.0,
    "nonfinite/advantage": 0.0,
    "ratio/log_absmax": 0.5,
}
NAN = math.nan


def last(*rows, events=(), start=10):
    """The finding at the last of some rows, each given by what differs from a good one; 10 good ones come before."""
    detector = NonFinite()
    for step in range(start):
        detector.update(ClosedStep(step=step, metrics=GOOD))
    for event in events:
        detector.notice(event)
    found = [detector.update(ClosedStep(step=start + i, metrics=GOOD | row)) for i, row in enumerate(rows)]
    return found[-1][0]


BACKWARD = {"optim/grad_norm": NAN}
WEIGHTS = {"policy/entropy": NAN, "loss/policy": NAN, "optim/grad_norm": NAN, "policy/kl_ref": NAN}
WEIGHTS |= {"nonfinite/old_logp": 9.0, "nonfinite/rollout_logp": 9.0}


def test_a_backward_overflow_is_class_a_and_its_links_are_dated():
    """Gradient at step 10, then the weights: log-probs, policy, KL and loss at step 11; the reference is fine."""
    finding = last(BACKWARD, WEIGHTS)

    assert finding.evidence["class"] == "A"
    assert finding.evidence["chain"] == {
        "gradient": 10,
        "rollout log-probs": 11,
        "old log-probs": 11,
        "policy": 11,
        "KL to the reference": 11,
        "loss": 11,
    }
    assert "class A (backward pass); in order: gradient (step 10), rollout log-probs, old log-probs" in finding.message


def test_broken_weights_beside_a_finite_reference_are_class_a():
    """The gradient's own NaN was not logged."""
    assert last({"nonfinite/old_logp": 5.0, "policy/entropy": NAN}).evidence["class"] == "A"


def test_a_broken_engine_beside_finite_old_log_probs_is_class_b():
    """Weight sync, a race, quantisation; what follows does not change it."""
    assert last({"nonfinite/rollout_logp": 5.0}).evidence["class"] == "B"
    assert last({"nonfinite/rollout_logp": 5.0}, WEIGHTS).evidence["class"] == "B"


@pytest.mark.parametrize("row", [{"reward/mean": NAN}, {"nonfinite/advantage": 3.0}])
def test_a_broken_reward_is_class_d(row):
    """The reward function, or groups without variance."""
    assert last(row).evidence["class"] == "D"


def test_extreme_log_ratios_before_are_class_c():
    """Misaligned tokens: finite for several steps, then the overflow."""
    extreme = {"ratio/log_absmax": 30.0}

    assert last(extreme, extreme, extreme, BACKWARD).evidence["class"] == "C"
    assert last(extreme, BACKWARD).evidence["class"] == "A"


@pytest.mark.parametrize(
    ("link", "counted", "measured"),
    [
        ("reward", ["nonfinite/reward"], ["reward/mean"]),
        ("advantage", ["nonfinite/advantage"], ["adv/mean", "adv/max"]),
        ("rollout log-probs", ["nonfinite/rollout_logp"], []),
        ("mismatch", [], ["mismatch/kl", "mismatch/k3", "mismatch/logp_absdiff", "mismatch/prob_absdiff"]),
        ("old log-probs", ["nonfinite/old_logp"], []),
        ("reference log-probs", ["nonfinite/ref_logp"], []),
        ("policy", ["nonfinite/logp"], ["policy/logp_mean", "policy/entropy"]),
        ("ratio", [], ["ratio/mean", "ratio/max", "policy/kl_old"]),
        ("KL to the reference", [], ["policy/kl_ref"]),
        ("loss", ["nonfinite/loss"], ["loss/policy", "loss/raw"]),
        ("gradient", ["nonfinite/grad"], ["optim/grad_norm"]),
    ],
)
def test_each_link_is_broken_by_a_single_count_or_a_value_that_is_none(link, counted, measured):
    """A count of zero is not; what was finite before is not merely switched off."""
    for name, value, good in [
        *((name, 1.0, 0.0) for name in counted),
        *((name, NAN, 0.0) for name in counted),
        *((name, math.inf, 0.1) for name in measured),
    ]:
        detector = NonFinite()
        for step in range(10):
            detector.update(ClosedStep(step=step, metrics=GOOD | {name: good}))
        (finding,) = detector.update(ClosedStep(step=10, metrics=GOOD | {name: value}))
        assert finding.evidence["chain"] == {link: 10}, name


@pytest.mark.parametrize(
    ("name", "limit"), [("mismatch/logp_absdiff_max", 20.0), ("ratio/log_absmax", 20.0), ("mismatch/logp_absdiff", 3.0)]
)
def test_log_ratios_are_extreme_from_here_on(name, limit):
    """20 nats, where trainers clamp them; a mean of 3. Twice in the last twenty rows."""
    at, below = {name: limit}, {name: limit * 0.999}

    assert last(at, at, BACKWARD).evidence["class"] == "C"
    assert last(below, below, BACKWARD).evidence["class"] == "A"
    assert last(at, below, BACKWARD).evidence["class"] == "A"
    assert last(at, at, *[{}] * 18, BACKWARD).evidence["class"] == "C"
    assert last(at, *[{}] * 19, at, BACKWARD).evidence["class"] == "A"


def test_what_cannot_be_told_has_no_class():
    """Only the entropy, once."""
    finding = last({"policy/entropy": NAN})

    assert finding.evidence["class"] == ""
    assert "class" not in finding.message


def traced(step, origin):
    body = {"trace": {"origin": origin, "kind": "activation", "name": "layers.3.mlp", "layer": "layers.3", "count": 7}}
    return Event(kind=LOCALISED, step=step, body=body)


def test_a_localisation_of_the_first_step_decides():
    """It saw the tensors; the metrics only their shadows."""
    finding = last(BACKWARD, events=[traced(10, "forward")])

    assert finding.evidence["class"] == "B"
    assert finding.evidence["trace"] == {
        "step": 10,
        "kind": "activation",
        "name": "layers.3.mlp",
        "layer": "layers.3",
        "origin": "forward",
    }


@pytest.mark.parametrize(
    "event",
    [
        traced(2, "forward"),
        traced(None, "forward"),
        Event(kind=LOCALISED, step=10, body={"trace": None}),
        Event(kind=LOCALISED, step=10, body={"trace": {"origin": 3}}),
        Event(kind="note", step=10, body={"trace": {"origin": "forward"}}),
    ],
    ids=["long ago", "no step", "no trace", "no word", "another event"],
)
def test_other_localisations_do_not(event):
    """Nothing raises, and metrics decide."""
    assert last(BACKWARD, events=[event]).evidence["class"] == "A"


def test_a_chain_ends_after_clean_rows():
    """A spike that passed is no link of what comes later."""
    finding = last(BACKWARD, *[{}] * 11, {"reward/mean": NAN})

    assert finding.evidence["chain"] == {"reward": 22}
    assert finding.evidence["class"] == "D"


def test_an_early_judgement_shows_the_chain_and_keeps_nothing():
    """A record judged before its step closes."""
    detector = NonFinite()
    row = ClosedStep(step=3, metrics=GOOD | BACKWARD)
    detector.update(ClosedStep(step=2, metrics=GOOD))

    assert detector.arrival(row)[0].evidence["chain"] == {"gradient": 3}
    assert detector.arrival(row) == detector.arrival(row) == detector.update(row)


def test_skipping_every_step_is_a_freeze():
    """Warned of after four steps, critical after twenty, dated to the first."""
    found = alarms(SilentFreeze(), exact({"optim/step_skipped": then(0.0, 1.0, 30)}))

    assert {s: f.step for s, f in found.items()} == {"warning": 34, "critical": 50}
    assert {f.onset_step for f in found.values()} == {30}
    assert "since step 30" in found["critical"].message


def test_coarse_logs_freeze_too():
    """Ten steps a row, as a share of the steps: three rows."""
    assert when(SilentFreeze(), exact({"optim/step_skipped": then(0.0, 1.0, 300)}, every=10))["critical"] <= 330


@pytest.mark.parametrize(
    "curve",
    [always(0.0), always(0.9), lambda s: float(s % 4 != 0), lambda s: float(30 <= s < 34), lambda s: float(s < 4)],
    ids=["none", "most", "three in four", "a few", "the scaler's search"],
)
def test_some_skipped_steps_are_no_freeze(curve):
    """An update in between, and the weights did change."""
    assert worst(SilentFreeze(), exact({"optim/step_skipped": curve})) is None


def test_a_scaler_that_takes_ten_steps_warns_at_most():
    """Its search halves the scale ten times."""
    assert worst(SilentFreeze(), exact({"optim/step_skipped": lambda s: float(s < 12)})) == "warning"


def test_a_nan_gradient_with_a_living_policy_means_skipped_updates():
    """Made with it, an update would have broken the entropy too."""
    frozen = exact({"optim/grad_norm": then(0.5, NAN, 30), "policy/entropy": always(0.3)})
    dead = exact({"optim/grad_norm": then(0.5, NAN, 30), "policy/entropy": then(0.3, NAN, 31)})
    alone = exact({"optim/grad_norm": then(0.5, NAN, 30)})

    found = alarms(SilentFreeze(), frozen)
    assert found["critical"].evidence["counted"] is False
    assert "must have been skipped" in found["critical"].message
    assert worst(SilentFreeze(), dead) is None
    assert worst(SilentFreeze(), alone) is None


def test_severity_of_nonfinite_values_is_as_before():
    """The chain only explains."""
    assert last(BACKWARD).severity is Severity.WARNING
    assert last(BACKWARD, WEIGHTS).severity is Severity.CRITICAL
