"""Estimators of KL: tokens beyond the clamp, and k1, k3 and the weighted k3 against each other."""

import math
import random
from dataclasses import replace

import pytest
from exact_runs import alarms, always, exact, swinging, then, when
from hypothesis import given, settings
from hypothesis import strategies as st
from shaped_runs import run

from rlwatch.detectors.trust_region.kl_estimator import Disagreement, KLEstimator
from rlwatch.records import Event

K1, K3, WEIGHTED, BEYOND = (f"policy/kl_ref_{name}" for name in ("k1", "k3", "weighted", "saturated"))


def sampled(policy, reference, rows, *, tokens=2000, seed=0):
    """Rows of (k1, k3, weighted k3) over ``tokens`` tokens drawn from ``policy``, a distribution over a few tokens."""
    noise = random.Random(seed)
    logs = [math.log(p / q) for p, q in zip(policy, reference, strict=True)]
    estimates = []
    for _ in range(rows):
        drawn = noise.choices(logs, policy, k=tokens)
        estimates.append((math.fsum(drawn) / tokens, math.fsum(math.exp(-x) - 1 + x for x in drawn) / tokens))
    return estimates


def curves(estimates):
    return {K1: lambda s: estimates[s][0], K3: lambda s: estimates[s][1], WEIGHTED: lambda s: estimates[s][1]}


def test_on_samples_of_the_policy_the_estimators_agree():
    """p = (.5, .3, .2) against q = (.4, .4, .2), and one far away: same mean, other scatter, no finding."""
    near, far = (0.5, 0.3, 0.2), (0.9, 0.09, 0.01)
    for policy, reference in [(near, (0.4, 0.4, 0.2)), (far, (0.2, 0.4, 0.4))]:
        estimates = sampled(policy, reference, 60)
        assert when(KLEstimator(), exact(curves(estimates), length=60)) == {}

    k1, k3 = (sum(e[i] for e in sampled(near, (0.4, 0.4, 0.2), 60)) / 60 for i in (0, 1))
    assert k1 == pytest.approx(0.02526715392, abs=0.003)
    assert k3 == pytest.approx(0.02526715392, abs=0.0003)


def test_samples_of_another_policy_make_k1_negative():
    """Drawn from the reference instead: k1 is -KL(q||p), and no KL is below zero."""
    policy, reference = (0.8, 0.15, 0.05), (0.3, 0.4, 0.3)
    logs = [math.log(p / q) for p, q in zip(policy, reference, strict=True)]
    noise = random.Random(3)
    rows = []
    for _ in range(60):
        drawn = noise.choices(logs, reference, k=2000)
        rows.append((sum(drawn) / 2000, sum(math.exp(-x) - 1 + x for x in drawn) / 2000))
    found = alarms(KLEstimator(), exact(curves(rows), length=60), "k3_bias")

    assert list(found) == ["warning"]
    assert found["warning"].evidence[K1] < 0.0 < found["warning"].evidence[K3]


@pytest.mark.parametrize(
    ("k1", "k3", "said"),
    [
        (0.10, 0.13, None),
        (0.10, 0.19, None),
        (0.10, 0.21, "info"),
        (0.10, 0.31, "warning"),
        (0.30, 0.09, "warning"),
        (-0.05, 0.05, "warning"),
        (0.001, 0.04, None),
    ],
)
def test_half_of_the_estimate_is_told_and_a_factor_of_three_warns(k1, k3, said):
    """And at least 0.05 nats, whichever is larger."""
    found = alarms(KLEstimator(), exact({K1: always(k1), K3: always(k3)}, length=40), "k3_bias")

    assert list(found) == ([] if said is None else [said])


@pytest.mark.parametrize(("scatter", "said"), [(0.05, True), (1.5, False)])
def test_disagreement_within_the_scatter_of_rows_is_noise(scatter, said):
    """k1 of few tokens swings more than it is wrong."""
    rows = exact({K1: swinging(0.1, 0.1, 0, scatter), K3: always(0.5)}, length=60)

    assert bool(alarms(KLEstimator(), rows, "k3_bias")) is said


def test_a_weighted_k3_far_from_the_plain_one_is_told_too():
    """pi/pi_old has left one."""
    rows = exact({K1: always(0.2), K3: always(0.2), WEIGHTED: then(0.2, 0.7, 30)}, length=80)
    finding = alarms(KLEstimator(), rows, "k3_bias")["warning"]

    assert finding.metric == WEIGHTED
    assert finding.onset_step >= 30


@pytest.mark.parametrize("every", [1, 5, 10])
def test_tokens_beyond_the_clamp_are_told_against_the_start(every):
    """2 % of them carry 0.2 nats of a clamped mean, and nothing pulls them back."""
    found = alarms(KLEstimator(), exact({BEYOND: then(1e-5, 0.02, 40 * every)}, length=80, every=every))

    assert list(found) == ["warning"]
    assert found["warning"].kind == "k3_saturation"
    assert found["warning"].onset_step == 40 * every
    assert found["warning"].evidence["clamped_mean"] == pytest.approx(0.2)
    assert "2.00% of the tokens" in found["warning"].message


@pytest.mark.parametrize(
    ("level", "origin", "said"),
    [(7.0, "actor/kl_loss", {"warning": 47}), (4.0, "actor/kl_loss", {}), (7.0, "kl", {}), (15.0, "actor/kl_loss", {})],
)
def test_a_clamped_mean_betrays_the_share_at_the_clamp(level, origin, said):
    """verl's mean of 7 is 70 % of the tokens at 10; other trainers clamp nothing, and 15 is no clamped mean."""
    rows = [replace(r, origin={"policy/kl_ref": origin}) for r in exact({"policy/kl_ref": then(0.05, level, 40)})]
    found = alarms(KLEstimator(), rows)

    assert {severity: f.step for severity, f in found.items()} == said
    for finding in found.values():
        assert "about 70% of the tokens" in finding.message


def test_a_reset_begins_anew():
    """What was said of the old reference is not said of the new one."""
    watch = KLEstimator()
    rows = exact({K1: always(0.1), K3: always(0.5), BEYOND: then(1e-5, 0.05, 20)}, length=60)
    assert [f.kind for row in rows for f in watch.update(row)][-2:] == ["k3_saturation", "k3_bias"]
    watch.notice(Event(kind="note", step=59))
    assert watch.update(replace(rows[-1], step=60))
    watch.notice(Event(kind="reference_reset", step=60))

    assert [watch.update(replace(rows[i], step=61 + i)) for i in range(5)] == [[]] * 5


def test_a_run_in_which_they_follow_each_other_is_silent():
    """KL grows, all estimators with it, through a blip of the learning rate."""
    kl = [0.002 * s * (3.0 if 100 <= s < 104 else 1.0) for s in range(201)]
    rows = run({K1: lambda s, n: kl[s] + n.gauss(0, 0.01), K3: lambda s, n: kl[s] * math.exp(n.gauss(0, 0.05))})

    assert [f for row in rows for f in KLEstimator().update(row)] == []
    watch = KLEstimator()
    assert [f for row in rows for f in watch.update(row)] == []


@settings(max_examples=60, deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(0.0, 1e3))
def test_a_disagreement_is_a_share_of_the_larger(a, b, errors):
    """Between 0 (equal) and 2 (opposite)."""
    said = Disagreement(min(a, b), max(a, b), errors)

    assert 0.0 <= said.apart <= 2.0 + 1e-9
    assert not (said.real and said.high - said.low < 0.05)
