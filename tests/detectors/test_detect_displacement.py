"""Likelihood displacement: the early warning comes in phase 2, and exploration is not mistaken for it."""

import math

import pytest
from exact_runs import alarms, exact, then
from exact_runs import worst as worst_of
from shaped_runs import coarse, findings, firsts, flat, ramp, run, worst

from rlwatch.detectors.exploration.likelihood_displacement import LikelihoodDisplacement
from rlwatch.records import Severity

DECAY, BLOW = 60, 120
"""Steps at which the likelihood begins to decay, and at which gradients and entropy surge (arXiv 2512.04220)."""


def three_phases(*, every=1, seed=0, **changed):
    """Stagnation to step 60, decay at rising reward and calm gradients to 120, then surge and fall."""

    def likelihood(step, noise):
        lost = 0.004 * max(step - DECAY, 0) + 0.03 * max(step - BLOW, 0)
        return -0.4 - lost + noise.gauss(0.0, 0.015)

    def norm(step, noise):
        return 0.5 * math.exp(noise.gauss(0.0, 0.2)) * (1.0 if step < BLOW else 1.15 ** min(step - BLOW, 30))

    def reward(step, noise):
        return 0.3 + 0.3 * min(step, BLOW) / BLOW - 0.02 * max(step - BLOW, 0) + noise.gauss(0.0, 0.02)

    curves = {
        "lld/logp_positive": likelihood,
        "optim/grad_norm": norm,
        "reward/mean": reward,
        "policy/entropy": flat(0.4, 0.05),
    }
    rows = run(curves | changed, length=150, seed=seed, only=())
    return rows if every == 1 else coarse(rows, every)


@pytest.mark.parametrize("seed", range(4))
def test_phase_two_is_alarmed_before_the_gradient_spikes(seed):
    """A warning between the beginning of the decay and step 120, critical after."""
    found = firsts(LikelihoodDisplacement(), three_phases(seed=seed))
    warning, critical = found[Severity.WARNING], found[Severity.CRITICAL]

    assert DECAY < warning.step < BLOW - 20
    assert warning.evidence["phase"] == 2
    assert abs(warning.onset_step - DECAY) <= 30
    assert "while reward rose" in warning.message
    assert BLOW <= critical.step <= BLOW + 20
    assert critical.evidence["phase"] == 3


def test_phase_one_is_information():
    """The reward has risen, the likelihood has not: no news for anybody's night."""
    found = findings(LikelihoodDisplacement(), three_phases())

    assert found[0].severity is Severity.INFO
    assert found[0].evidence["phase"] == 1


@pytest.mark.parametrize("every", [5, 10])
def test_coarse_logs_are_warned_of_too(every):
    """One row in five or ten steps: at the latest a few rows after the surge begins."""
    found = firsts(LikelihoodDisplacement(), three_phases(every=every))

    assert found[Severity.WARNING].step <= BLOW + 2 * every


def test_an_entropy_surge_is_the_third_phase_too():
    """Gradients calm, entropy threefold."""
    rows = three_phases(
        **{"optim/grad_norm": flat(0.5, 0.1), "policy/entropy": ramp(0.4, 1.6, BLOW, BLOW + 10)},
        **{"lld/displaced_frac": ramp(0.2, 0.7, DECAY, DECAY + 10)},
    )
    critical = firsts(LikelihoodDisplacement(), rows)[Severity.CRITICAL]

    assert critical.step >= BLOW
    assert "entropy is" in critical.message


def exploring(**more):
    """Entropy and likelihood move together, as when a policy explores more while its reward rises."""
    return run(
        {
            "policy/entropy": ramp(0.3, 0.55, 40, 160),
            "lld/logp_positive": lambda s, n: -ramp(0.3, 0.55, 40, 160)(s, n),
            "optim/grad_norm": flat(0.5),
            **more,
        }
    )


def test_exploration_is_no_displacement():
    """Correct responses lose what all responses lose."""
    assert worst(LikelihoodDisplacement(), exploring()) in (None, Severity.INFO)


def test_measured_displacement_decides():
    """Where updates are seen to raise what they reward, a falling level is no displacement; else it is."""
    assert worst(LikelihoodDisplacement(), exploring(**{"lld/displaced_frac": flat(0.2)})) in (None, Severity.INFO)
    assert worst(LikelihoodDisplacement(), exploring(**{"lld/displaced_frac": flat(0.6)})) is Severity.WARNING


def test_most_correct_responses_displaced_is_enough():
    """The published mark: more than half of the questions; nothing else measured."""
    found = firsts(LikelihoodDisplacement(), run({"lld/displaced_frac": ramp(0.2, 0.7, 60, 100)}, only=()))

    assert set(found) == {Severity.WARNING}
    assert found[Severity.WARNING].metric == "lld/displaced_frac"


def test_half_of_them_from_the_start_is_how_the_run_is():
    """No rise, no fall of likelihood."""
    assert worst(LikelihoodDisplacement(), run({"lld/displaced_frac": flat(0.55)}, only=())) is None


@pytest.mark.parametrize("blip", [range(100, 103), range(100, 101)])
def test_a_hard_batch_is_no_displacement(blip):
    """One to three rows of unlikely responses."""
    curve = lambda s, n: -1.5 if s in blip else -0.3 + n.gauss(0, 0.01)  # noqa: E731

    assert worst(LikelihoodDisplacement(), run({"lld/logp_positive": curve})) in (None, Severity.INFO)


def test_without_entropy_and_displacement_the_fall_must_be_large():
    """A fifth may be exploration; a half is not."""
    keep = {"reward/mean", "optim/grad_norm"}
    fifth = run({"lld/logp_positive": lambda s, n: -ramp(0.5, 0.6, 60, 120, 0.01)(s, n)}, only=keep)
    half = run({"lld/logp_positive": lambda s, n: -ramp(0.5, 0.75, 60, 120, 0.01)(s, n)}, only=keep)

    assert worst(LikelihoodDisplacement(), fifth) in (None, Severity.INFO)
    assert worst(LikelihoodDisplacement(), half) is Severity.WARNING


def fell(to, *, best=-1.0, **more):
    """Likelihood that falls at step 60, and other metrics that change with it."""
    curves = {name.replace("_", "/", 1): then(*pair, 60) for name, pair in more.items()}
    return exact({"lld/logp_positive": then(best, to, 60)} | curves, length=120)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (fell(-1.29), None),
        (fell(-1.31), "warning"),
        (fell(-1.09, policy_entropy=(1.0, 1.0)), None),
        (fell(-1.11, policy_entropy=(1.0, 1.0)), "warning"),
        (fell(-1.11, policy_entropy=(1.0, 0.5)), "warning"),
        (fell(-1.25, policy_entropy=(1.0, 1.12)), "warning"),
        (fell(-1.25, policy_entropy=(1.0, 1.13)), None),
        (fell(-1.09, lld_displaced_frac=(0.2, 0.49)), None),
        (fell(-1.11, lld_displaced_frac=(0.2, 0.49)), None),
        (fell(-1.11, lld_displaced_frac=(0.45, 0.51)), "warning"),
        (fell(-1.09, lld_displaced_frac=(0.45, 0.51)), None),
        (fell(-1.5, optim_grad_norm=(1.0, 2.9)), "warning"),
        (fell(-1.5, optim_grad_norm=(1.0, 3.0)), "critical"),
        (fell(-1.0, optim_grad_norm=(1.0, 9.0)), None),
        (fell(-4.0, policy_entropy=(1.0, 1.9)), "warning"),
        (fell(-4.0, policy_entropy=(1.0, 2.0)), "critical"),
    ],
)
def test_each_limit_of_a_phase(rows, said):
    """A third alone, a tenth with a witness, half of it beyond what entropy explains; gradient thrice, entropy twice."""
    assert worst_of(LikelihoodDisplacement(), rows) == said


def test_the_numbers_of_the_phases():
    """Which it is, the levels, and the factors; dated to the first row that was low."""
    steady = LikelihoodDisplacement()
    rows = exact({"lld/logp_positive": then(-1.0, -1.01, 60), "reward/mean": then(0.2, 0.8, 60)}, length=120)
    first = alarms(steady, rows)["info"]
    rows = fell(-2.0, optim_grad_norm=(0.5, 2.0), lld_displaced_frac=(0.25, 0.75), reward_mean=(0.5, 0.5))
    third = alarms(LikelihoodDisplacement(), rows)["critical"]

    assert (first.evidence["phase"], first.onset_step, first.step) == (1, 64, 94)
    assert "have not become more likely while reward rose from 0.2 to 0.8" in first.message
    assert third.onset_step == 60
    assert third.score == pytest.approx(10.0)
    assert third.baseline == -1.0
    assert third.evidence["phase"] == 3
    assert third.evidence["logp_positive"] == -2.0
    assert third.evidence["grad_factor"] == 4
    assert "the gradient norm is 4 times its start" in third.message
    assert "25% of them became less likely" in third.message, "the median of twenty rows, ten of which are new"
