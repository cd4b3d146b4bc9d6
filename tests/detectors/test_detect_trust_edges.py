"""Gradient norm, KL to the reference and mismatch at their thresholds, with dates and numbers."""

import pytest
from exact_runs import alarms, always, exact, then, when, worst

from rlwatch.detectors.mismatch.mismatch_growth import MismatchGrowth
from rlwatch.detectors.optimisation.grad_spike import GradSpike
from rlwatch.detectors.trust_region.kl_reference import KLReference
from rlwatch.records import Event


def norms(curve, **how):
    return exact({"optim/grad_norm": curve}, **how)


def spike(at, height, before=1.0):
    return lambda s: height if s == at else before


@pytest.mark.parametrize(("height", "said"), [(5.9, {}), (6.1, {"warning": 30})])
def test_six_times_the_usual_norm_is_a_spike(height, said):
    """Of the recent upper decile."""
    assert when(GradSpike(), norms(spike(30, height))) == said


@pytest.mark.parametrize(("at", "said"), [(7, {}), (8, {"warning": 8})])
def test_a_spike_needs_eight_rows_to_stand_out_from(at, said):
    """Before that nothing is usual."""
    assert when(GradSpike(), norms(spike(at, 50.0))) == said


@pytest.mark.parametrize(("height", "said"), [(1.9, {}), (2.1, {"warning": 150})])
def test_a_norm_that_has_shrunk_is_still_measured_by_a_third_of_its_start(height, said):
    """A hundredfold of nearly nothing is no spike."""
    rows = norms(lambda s: 1.0 if s < 30 else height if s == 150 else 0.01, length=160)

    assert when(GradSpike(), rows) == said


def test_the_numbers_of_a_spike():
    """Factor over the usual, score over the threshold."""
    finding = alarms(GradSpike(), norms(spike(30, 6.0, before=0.5)))["warning"]

    assert (finding.score, finding.baseline, finding.onset_step) == (2.0, 0.5, 30)
    assert finding.evidence == {"grad_norm": 6, "usual": 0.5, "factor": 12}
    assert finding.message.startswith("gradient norm 6 is 12 times its recent upper range (0.5)")


def test_spikes_that_become_the_rule_are_the_new_usual():
    """A quarter of recent rows: below ten times the start, nothing is said of them any more, nor is it critical."""
    detector = GradSpike()
    said = [f.step for row in norms(then(1.0, 9.9, 20), length=80) for f in detector.update(row)]

    assert said == list(range(20, said[-1] + 1))
    assert said[-1] < 35


@pytest.mark.parametrize(("every", "change", "critical"), [(1, 20, 28), (5, 200, 215), (10, 200, 210)])
def test_ten_times_the_start_is_critical_once_the_median_has_it_for_five_rows(every, change, critical):
    """The fifth of eight rows turns the median; where rows are far apart two of them must have it."""
    finding = alarms(GradSpike(), norms(then(0.5, 5.05, change), every=every))["critical"]

    assert (finding.step, finding.onset_step) == (critical, change)
    assert finding.score == pytest.approx(1.01)
    assert finding.evidence == {"grad_norm": 5.05, "start": 0.5, "factor": 10.1, "rows": 5 if every == 1 else 2}


@pytest.mark.parametrize(("before", "onset"), [(4.9, 25), (5.1, 20)])
def test_a_sustained_rise_is_dated_to_five_times_the_start(before, onset):
    """Where it was half-way up."""
    rows = norms(lambda s: 1.0 if s < 20 else before if s < 25 else 11.0)

    assert alarms(GradSpike(), rows)["critical"].onset_step == onset


def climbing(low, high, first=60, last=120):
    """``low`` until step ``first``, ``high`` from ``last`` on, a straight line between."""
    return lambda s: low + (high - low) * min(max((s - first) / (last - first), 0.0), 1.0)


TAKING_OFF = climbing(0.02, 0.6)


@pytest.mark.parametrize(
    ("reward", "norm", "said"),
    [
        (TAKING_OFF, climbing(0.05, 0.6), None),
        (always(0.02), climbing(0.05, 0.6), "critical"),
        (TAKING_OFF, lambda s: climbing(0.05, 0.6)(s) if s < 160 else 5.8, None),
        (TAKING_OFF, lambda s: climbing(0.05, 0.6)(s) if s < 160 else 6.2, "critical"),
    ],
)
def test_gradients_are_measured_by_what_they_became_as_the_reward_took_off(reward, norm, said):
    """From next to no right answer to more than half of them: twelve times the start is what learning takes."""
    found = alarms(GradSpike(), exact({"optim/grad_norm": norm, "reward/mean": reward}, length=220))

    assert ("critical" if "critical" in found else None) == said


def kl_run(before, after, *, length=60, at=40, **more):
    """KL ``before`` until ``at``, then ``after``."""
    more = {name.replace("_", "/", 1): curve for name, curve in more.items()}
    return exact({"policy/kl_ref": then(before, after, at), **more}, length=length)


FLAT = always(0.5)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (0.09, 0.29, None),
        (0.09, 0.31, "warning"),
        (0.12, 0.35, None),
        (0.12, 0.37, "warning"),
        (0.11, 0.95, "warning"),
        (0.11, 1.05, "critical"),
        (0.09, 1.05, "warning"),
        (0.09, 19.0, "warning"),
        (0.09, 21.0, "critical"),
    ],
)
def test_kl_drifts_by_its_level_its_factor_and_where_it_came_from(before, after, said):
    """0.3 nats and threefold warn; 1 nat from an established 0.1 is critical, and 20 from anywhere."""
    rows = kl_run(before, after, length=75, reward_mean=FLAT)

    assert worst(KLReference(), rows, "kl_drift") == said


@pytest.mark.parametrize(
    ("reward", "said"), [(then(1.0, 0.2, 40), "critical"), (then(0.2, 1.0, 30), "info"), (FLAT, "warning")]
)
def test_half_a_nat_is_critical_beside_a_lost_reward_and_a_remark_beside_a_gain(reward, said):
    """Threefold, above 0.3: what it cost decides."""
    assert worst(KLReference(), kl_run(0.1, 0.5, length=80, reward_mean=reward), "kl_drift") == said


@pytest.mark.parametrize("after", [5.0, 50.0])
def test_kl_the_run_has_gained_by_is_never_critical(after):
    """Not even beyond twenty nats."""
    rows = kl_run(0.2, after, length=80, reward_mean=then(0.2, 1.0, 20))

    assert worst(KLReference(), rows, "kl_drift") == "warning"


def test_a_drift_is_dated_and_told_with_its_numbers():
    """Five of ten rows lift the median half-way; the third such row warns, and twenty steps of it are critical."""
    found = alarms(KLReference(), kl_run(0.2, 2.0, length=80, reward_mean=FLAT), "kl_drift")

    assert {severity: f.step for severity, f in found.items()} == {"warning": 46, "critical": 64}
    assert {f.onset_step for f in found.values()} == {40}
    assert found["critical"].evidence == {"kl": 2, "kl_before": 0.2, "reward": 0.5}
    assert found["critical"].score == pytest.approx(2.0 / 0.6)
    assert found["critical"].baseline == pytest.approx(0.2)


@pytest.mark.parametrize(("level", "said"), [(0.29, {}), (0.31, {"info": 59})])
def test_kl_is_saturated_once_it_has_been_flat_and_notable_for_fifty_steps_and_ten_rows(level, said):
    """Below 0.3 nats flat is just small."""
    found = alarms(KLReference(), exact({"policy/kl_ref": always(level)}, length=80))

    assert {severity: f.step for severity, f in found.items()} == said
    assert [f.onset_step for f in found.values()] == ([50] if said else [])


def test_saturation_in_a_coarse_log_needs_two_flat_rows():
    """Two rows, once there are twenty."""
    rows = exact({"policy/kl_ref": always(0.5)}, length=40, every=10)

    assert when(KLReference(), rows) == {"info": 200}


@pytest.mark.parametrize(("slope", "said"), [(0.0020, None), (0.0010, "info")])
def test_kl_that_still_moves_by_a_seventh_is_not_flat(slope, said):
    """Change over the last sixty rows, relative to the level."""
    rows = exact({"policy/kl_ref": lambda s: 0.5 + slope * s}, length=100)

    assert worst(KLReference(), rows, "kl_saturation") == said


@pytest.mark.parametrize(
    ("loss", "said", "share"), [(0.041, "info", 0.4938), (-0.039, "warning", 0.5063), (0.0, "warning", 1.0)]
)
def test_a_kl_term_that_is_half_of_the_loss_makes_saturation_a_warning(loss, said, share):
    """coefficient times KL over it and the size of the policy loss."""
    rows = exact({"policy/kl_ref": always(0.4), "policy/kl_coef": always(0.1), "loss/policy": always(loss)}, length=70)
    found = alarms(KLReference(), rows)

    assert list(found) == [said]
    assert found[said].evidence["loss_share"] == pytest.approx(share, abs=1e-3)
    assert f"the KL term is {share:.0%} of the loss" in found[said].message


def test_without_a_coefficient_the_kl_term_rules_nothing():
    """beta = 0 is a measured zero, not an unknown."""
    rows = exact({"policy/kl_ref": always(0.4), "policy/kl_coef": always(0.0), "loss/policy": always(0.0)}, length=70)

    assert alarms(KLReference(), rows)["info"].evidence["loss_share"] == 0


def test_a_reset_ends_at_once_what_held():
    """Also over a row that does not measure KL."""
    detector = KLReference()
    for row in exact({"policy/kl_ref": always(0.5)}, length=70):
        held = detector.update(row)
    detector.notice(Event(kind="reference_reset", step=70))

    assert held
    assert detector.update(exact({"reward/mean": FLAT}, length=1)[0]) == []


def mismatch(before, after, name="mismatch/logp_absdiff", *, at=30, length=60, every=1):
    return exact({name: then(before, after, at)}, length=length, every=every)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (0.012, 0.0235, None),  # not twice, and too little for a drift
        (0.012, 0.0245, "warning"),  # twice
        (0.04, 0.052, None),  # 1.3 times for good
        (0.04, 0.056, "warning"),  # 1.4 times for good
        (0.026, 0.039, None),  # half as much again, but within twice the noise
        (0.028, 0.042, "warning"),  # half as much again, beyond it
        (0.03, 0.098, "warning"),
        (0.03, 0.102, "critical"),
        (0.04, 0.118, "warning"),
        (0.04, 0.122, "critical"),
        (0.001, 0.0195, None),  # twentyfold, but rounding noise
        (0.001, 0.0205, "warning"),
    ],
)
def test_mismatch_grows_by_factor_by_persistence_and_by_what_it_means(before, after, said):
    """Noise ends at 0.02 nats of mean difference, 0.1 steers the gradient."""
    assert worst(MismatchGrowth(), mismatch(before, after)) == said


@pytest.mark.parametrize(
    ("name", "noise", "severe"),
    [("mismatch/k3", 0.005, 0.05), ("mismatch/kl", 0.01, 0.1), ("mismatch/prob_absdiff", 0.015, 0.05)],
)
def test_each_mismatch_metric_has_its_own_scale(name, noise, severe):
    """Where noise ends and where the gradient is off-policy."""
    assert worst(MismatchGrowth(), mismatch(noise / 9, 0.97 * noise, name)) is None
    assert worst(MismatchGrowth(), mismatch(noise / 9, 1.03 * noise, name)) == "warning"
    assert worst(MismatchGrowth(), mismatch(severe / 4, 0.97 * severe, name)) == "warning"
    assert worst(MismatchGrowth(), mismatch(severe / 4, 1.03 * severe, name)) == "critical"


@pytest.mark.parametrize(("every", "change", "said"), [(1, 30, 37), (5, 200, 210), (10, 200, 210)])
def test_mismatch_is_said_at_the_third_row_of_a_high_median_and_dated_to_the_first_high_row(every, change, said):
    """The CUSUM looks back to where it began to climb."""
    finding = alarms(MismatchGrowth(), mismatch(0.03, 0.3, at=change, every=every))["critical"]

    assert (finding.step, finding.onset_step) == (said, change)
    assert finding.baseline == pytest.approx(0.03)
    assert finding.score == pytest.approx(10 / 1.35)
    assert finding.evidence["level"] == pytest.approx(0.3)
    assert finding.evidence["factor"] == pytest.approx(10)


def test_the_worst_mismatch_metric_speaks():
    """Severity first, factor second."""
    rows = exact(
        {
            "mismatch/kl": then(0.03, 0.09, 30),
            "mismatch/logp_absdiff": then(0.03, 0.12, 30),
            "mismatch/k3": then(0.005, 0.03, 30),
        }
    )

    assert alarms(MismatchGrowth(), rows)["critical"].metric == "mismatch/logp_absdiff"
    assert alarms(MismatchGrowth(), [r for r in rows if r.step < 38])["warning"].metric == "mismatch/k3"
