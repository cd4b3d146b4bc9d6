"""Mismatch, KL to the reference, gradient norm: growth is told from noise, spikes and resets."""

import math
import random

import pytest
from shaped_runs import findings, firsts, flat, ramp, run, warned_then_confirmed, worst

from rlwatch.detectors.mismatch.mismatch_growth import MismatchGrowth
from rlwatch.detectors.optimisation.grad_spike import GradSpike
from rlwatch.detectors.trust_region.kl_reference import KLReference
from rlwatch.records import Event, Severity

MISMATCH = {"mismatch/k3", "mismatch/kl", "mismatch/logp_absdiff", "mismatch/prob_absdiff"}


@pytest.mark.parametrize("every", [1, 5, 10])
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("mismatch/k3", 1e-4, 0.7),
        ("mismatch/kl", 5e-4, 0.4),
        ("mismatch/logp_absdiff", 0.003, 0.5),
        ("mismatch/prob_absdiff", 0.007, 0.3),
    ],
)
def test_growing_mismatch_is_warned_of_then_confirmed(name, before, after, every):
    """Each metric alone is enough, at any cadence; the reward need not have noticed."""
    rows = run({name: ramp(before, after, 100, 220, jitter=0.2)}, length=320, every=every, only={"reward/mean", name})

    critical = warned_then_confirmed(MismatchGrowth(), rows, begins=100, within=120 + 4 * every)

    assert critical.metric == name
    assert critical.evidence["factor"] > 3


@pytest.mark.parametrize("level", [0.0, 1e-9, 0.004, 0.027])
def test_steady_mismatch_is_the_engine_being_an_engine(level):
    """Exact samplers, bf16 noise, mixture-of-experts: what does not grow is no finding."""
    rows = run({"mismatch/logp_absdiff": flat(level, jitter=0.2), "mismatch/k3": flat(level / 30, jitter=0.3)})

    assert findings(MismatchGrowth(), rows) == []


def test_growth_within_rounding_noise_is_nothing():
    """A hundredfold from nearly nothing is still nothing."""
    rows = run({"mismatch/k3": ramp(1e-7, 1e-5, 50, 150)}, only={"mismatch/k3"})

    assert findings(MismatchGrowth(), rows) == []


def test_a_slow_shift_is_found_by_its_persistence():
    """From 0.07 to 0.11 nats, less than twofold, but for good: a warning, no more."""
    rows = run({"mismatch/logp_absdiff": ramp(0.07, 0.11, 100, 300)}, length=400, only={"mismatch/logp_absdiff"})

    warning = firsts(MismatchGrowth(), rows)[Severity.WARNING]

    assert 150 <= warning.step <= 320
    assert worst(MismatchGrowth(), rows) is Severity.WARNING


def test_single_mismatch_spikes_are_ignored():
    """One stale batch in twenty."""
    rows = run({"mismatch/k3": lambda s, n: 0.5 if s % 20 == 0 else 5e-4}, only={"mismatch/k3"})

    assert findings(MismatchGrowth(), rows) == []


def test_a_single_gradient_spike_is_a_warning_for_its_row():
    """Fifty times normal at step 100, then nothing."""
    rows = run({"optim/grad_norm": lambda s, n: 25.0 if s == 100 else 0.5 * math.exp(n.gauss(0.0, 0.2))})

    (finding,) = findings(GradSpike(), rows)

    assert (finding.step, finding.severity) == (100, Severity.WARNING)
    assert finding.score > 1


def test_a_spike_does_not_vaccinate():
    """After one of 50 at step 100, one of 5 at step 130 is still seen."""
    rows = run({"optim/grad_norm": lambda s, n: {100: 50.0, 130: 5.0}.get(s, 0.5 * math.exp(n.gauss(0.0, 0.1)))})

    assert [f.step for f in findings(GradSpike(), rows)] == [100, 130]


def test_frequent_spikes_do_not_vaccinate_either():
    """Every seventh row 50: the last one is as much of a spike as the first."""
    rows = run({"optim/grad_norm": lambda s, n: 50.0 if s % 7 == 0 else 0.5 * math.exp(n.gauss(0.0, 0.1))})

    told = findings(GradSpike(), rows)

    assert told[-1].evidence["spikes"] == len(range(105, 200, 7))
    assert told[-1].onset_step == 105
    assert {f.severity for f in told} == {Severity.WARNING}


@pytest.mark.parametrize("every", [1, 5, 10])
def test_a_sustained_rise_by_orders_of_magnitude_is_critical(every):
    """0.5 to 50 and staying there: no spike, and not called one."""
    rows = run({"optim/grad_norm": ramp(0.5, 50.0, 100, 120)}, length=320, every=every)

    critical = firsts(GradSpike(), rows)[Severity.CRITICAL]

    assert 100 <= critical.onset_step <= 130
    assert critical.step <= 130 + 10 * every
    assert critical.baseline == pytest.approx(0.5, rel=0.2)
    assert critical.kind == "grad_rise"


def test_batches_without_gradient_do_not_make_the_others_spikes():
    """Two thirds of the rows near zero, one third normal: no finding at all."""
    rows = run({"optim/grad_norm": lambda s, n: 0.5 * math.exp(n.gauss(0.0, 0.2)) if s % 3 == 0 else 1e-3})

    assert findings(GradSpike(), rows) == []


def test_a_threefold_norm_for_good_is_only_a_new_phase():
    """A longer context or a new learning rate."""
    assert worst(GradSpike(), run({"optim/grad_norm": ramp(0.5, 1.5, 80, 90)})) is None


def test_a_few_spikes_in_a_row_are_no_sustained_rise():
    """Three bad batches."""
    rows = run({"optim/grad_norm": lambda s, n: 40.0 if 100 <= s < 103 else 0.5})

    assert worst(GradSpike(), rows) is Severity.WARNING


def test_kl_that_grows_as_the_policy_learns_is_no_drift():
    """From 0 to 0.25 nats under a rising reward."""
    rows = run({"policy/kl_ref": lambda s, n: 0.25 * (1 - math.exp(-s / 60)) * math.exp(n.gauss(0, 0.2))})

    assert findings(KLReference(), rows) == []


@pytest.mark.parametrize("every", [1, 5])
def test_runaway_kl_without_gain_is_warned_of_then_confirmed(every):
    """From an established 0.3 to 6 nats under a reward that goes nowhere."""
    rows = run(
        {"policy/kl_ref": ramp(0.3, 6.0, 120, 200, jitter=0.2), "reward/mean": flat(0.5)}, length=320, every=every
    )

    critical = warned_then_confirmed(KLReference(), rows, begins=120, within=80 + 20 + 2 * every)

    assert critical.kind == "kl_drift"
    assert "KL to the reference grew" in critical.message


def test_growth_from_next_to_nothing_is_only_a_warning():
    """Every run starts at zero: a large factor over a beginning is no runaway, even at 2 nats."""
    rows = run({"policy/kl_ref": ramp(0.001, 2.0, 60, 120), "reward/mean": flat(0.5)}, length=150)

    assert worst(KLReference(), rows) is Severity.WARNING


def small_batches(factor, seed, reward):
    """KL of two answers a row: it strays over two decades, and from step 200 on its level is ``factor`` times 0.4."""
    stray = random.Random(seed)
    curve = lambda s, _: 0.4 * (factor if s >= 200 else 1.0) * math.exp(stray.gauss(0.0, 1.3))  # noqa: E731
    rows = run({"policy/kl_ref": curve, "reward/mean": reward}, length=320, only=set())
    return [f.step for f in findings(KLReference(), rows) if f.kind == "kl_drift"]


@pytest.mark.parametrize("seed", range(5))
def test_the_kl_of_small_batches_drifts_when_its_level_does_not_when_its_rows_do(seed):
    """A steady level is silent though ten rows of it often lie threefold apart; one that grows is found by fifty."""
    assert small_batches(1.0, seed, flat(0.5)) == []
    assert 200 <= small_batches(4.0, seed, flat(0.5))[0] <= 260


def test_kl_that_creeps_while_the_run_gains_by_it_is_said_less():
    """The same growth under a reward that rises from 0.2 to 0.8: only the last ten rows may speak."""
    gained, lost = (len(small_batches(3.0, 0, reward)) for reward in (ramp(0.2, 0.8, 0, 200), flat(0.5)))

    assert gained < 0.25 * lost


def test_a_kl_excursion_the_run_gains_by_is_at_most_a_warning():
    """Eight nats for thirty steps while the reward doubles."""
    rows = run(
        {
            "policy/kl_ref": lambda s, n: (8.0 if 100 <= s < 130 else 0.2) * math.exp(n.gauss(0, 0.2)),
            "reward/mean": ramp(0.3, 0.8, 1, 100),
        }
    )

    assert worst(KLReference(), rows) in (None, Severity.WARNING)


def test_single_kl_spikes_are_ignored():
    """119 nats in one row, seen in a run that improved."""
    rows = run({"policy/kl_ref": lambda s, n: 119.0 if s in (90, 150) else 0.5 * math.exp(n.gauss(0, 0.3))})

    assert [f for f in findings(KLReference(), rows) if f.kind == "kl_drift"] == []


def test_kl_that_has_risen_and_gone_flat_asks_for_a_reset():
    """Saturation is information; it becomes a warning when the KL term rules the loss."""

    def saturated(extra):
        rows = run({"policy/kl_ref": ramp(0.02, 0.8, 20, 100)} | extra, length=400)
        return [f for f in findings(KLReference(), rows) if f.kind == "kl_saturation"]

    plain = saturated({})
    heavy = saturated({"policy/kl_coef": lambda s, n: 0.2, "loss/policy": lambda s, n: 0.01})

    assert {f.severity for f in plain} == {Severity.INFO}
    assert plain[0].step > 150
    assert "a reference reset is due" in plain[0].message
    assert heavy[0].severity is Severity.WARNING
    assert heavy[0].evidence["loss_share"] > 0.9


def test_a_policy_that_lost_its_reward_is_never_to_be_anchored():
    """KL flat and heavy, but after a collapse: a reset would make it worse, and is not advised."""
    curves = {
        "policy/kl_ref": ramp(0.02, 3.0, 100, 130),
        "policy/kl_coef": lambda s, n: 0.2,
        "loss/policy": lambda s, n: 0.01,
        "reward/mean": lambda s, n: (0.6 if s < 100 else 0.0) + n.gauss(0, 0.01),
    }
    found = findings(KLReference(), run(curves, length=400))

    assert {f.kind for f in found} == {"kl_drift"}


def test_a_reference_reset_starts_kl_anew():
    """KL falls to zero and grows again: no finding after the event."""
    rows = run({"policy/kl_ref": lambda s, n: 0.9 if s < 250 else 0.002 * (s - 249)}, length=320)
    detector = KLReference()
    before = findings(detector, rows[:249])
    detector.notice(Event(kind="reference_reset", step=249))

    assert before
    assert findings(detector, rows[249:]) == []


def test_other_events_change_nothing():
    """A note is no reset."""
    rows = run({"policy/kl_ref": ramp(0.3, 6.0, 120, 200), "reward/mean": flat(0.5)})
    quiet, noted = KLReference(), KLReference()
    left = findings(quiet, rows)
    noted.notice(Event(kind="note", step=0))
    right = findings(noted, rows[:150])
    noted.notice(Event(kind="note", step=150))

    assert left == right + findings(noted, rows[150:])
