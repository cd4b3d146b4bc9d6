"""Non-finite values: harmless quirks stay quiet, broken runs are critical at once, and the culprit is named."""

import math

import pytest

from rlwatch.detectors.optimisation.nonfinite import NonFinite
from rlwatch.metrics import canonicalise
from rlwatch.records import ClosedStep, Severity

GOOD = {"loss/policy": 0.01, "optim/grad_norm": 0.4, "policy/entropy": 0.3, "policy/kl_ref": 0.01, "reward/mean": 0.5}


def said(*rows, detector=None):
    """Severity (or None) at each row; a row is what differs from a good one."""
    detector = detector or NonFinite()
    found = [detector.update(ClosedStep(step=i, metrics=GOOD | row)) for i, row in enumerate(rows)]
    return [f[0].severity if f else None for f in found]


def without(name, **changed):
    """A good row in which ``name`` was not measured."""
    return {k: v for k, v in GOOD.items() if k != name} | changed


def last(*rows):
    """The finding at the last of some full rows."""
    detector = NonFinite()
    found = [detector.update(ClosedStep(step=i, metrics=row)) for i, row in enumerate(rows)]
    return found[-1][0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["policy/kl_ref", "loss/policy", "optim/grad_norm"])
def test_one_value_once_is_a_warning(name, value):
    """Seen in runs that recovered by themselves."""
    assert said({}, {name: value}, {}, {}) == [None, Severity.WARNING, None, None]


@pytest.mark.parametrize(("first", "second"), [("loss/policy", "policy/entropy"), ("critic/value_loss", "loss/policy")])
def test_another_value_that_breaks_soon_after_is_critical(first, second):
    """A second NaN two steps later is no quirk of the first; the first one again is as harmless as before."""
    other = said({}, {first: math.nan}, {}, {second: math.nan}, {})
    same = said({}, {first: math.nan}, {}, {first: math.nan}, {})
    late = said({}, {first: math.nan}, *[{}] * 60, {second: math.nan})

    assert other == [None, Severity.WARNING, None, Severity.CRITICAL, None]
    assert same == [None, Severity.WARNING, None, Severity.WARNING, None]
    assert late[-1] is Severity.WARNING


def test_kl_that_was_never_finite_is_told_once_as_info():
    """TRL logs NaN for ``kl`` at beta = 0."""
    assert said(*[{"policy/kl_ref": math.nan}] * 5) == [Severity.INFO, None, None, None, None]


def test_kl_that_breaks_later_is_not_mistaken_for_that():
    """It was finite once: two rows warn, the third is critical."""
    assert said({}, *[{"policy/kl_ref": math.nan}] * 3) == [None, Severity.WARNING, Severity.WARNING, Severity.CRITICAL]


def test_a_nan_gradient_twice_in_a_row_is_critical():
    """Trainers that skip the update then skip every update."""
    assert said({}, {"optim/grad_norm": math.nan}, {"optim/grad_norm": math.nan})[1:] == [
        Severity.WARNING,
        Severity.CRITICAL,
    ]


def test_several_metrics_at_one_step_are_critical_at_once():
    """The way verl dies: everything NaN, the clip fraction still finite."""
    row = {"actor/entropy": math.nan, "actor/kl_loss": math.nan, "actor/pg_loss": math.nan, "actor/grad_norm": math.nan}
    metrics, _ = canonicalise(row | {"actor/pg_clipfrac": 0.002, "critic/score/mean": -1.0}, "verl")

    finding = last(GOOD, metrics)

    assert finding.severity is Severity.CRITICAL
    assert finding.evidence["suspect"] == "everything"
    assert "optim/grad_norm = nan" in finding.message


def test_a_run_that_starts_broken_is_critical_on_its_first_row():
    """Nothing was ever finite, yet it is no switched-off metric."""
    assert last(dict.fromkeys(GOOD, math.nan)).severity is Severity.CRITICAL


def test_what_trl_hides_is_seen():
    """Loss reads exactly 0, the gradient is NaN, entropy vanished: critical in one row."""
    hidden = without("policy/entropy", **{"loss/policy": 0.0, "optim/grad_norm": math.nan})

    assert last(GOOD, hidden).severity is Severity.CRITICAL


def test_counts_need_a_second_step_or_a_second_sign():
    """One count once may be a skipped step of a loss scaler."""
    assert said({"nonfinite/grad": 3.0}, {}, {}) == [Severity.WARNING, None, None]
    assert said({"nonfinite/grad": 3.0}, {}, {"nonfinite/grad": 1.0})[-1] is Severity.CRITICAL
    assert said({"nonfinite/grad": 3.0, "nonfinite/logp": 5.0}) == [Severity.CRITICAL]
    assert said({}, {"nonfinite/loss": 1.0, "optim/grad_norm": math.nan})[-1] is Severity.CRITICAL


def test_a_count_long_ago_is_forgotten():
    """Sixty clean rows between two counts."""
    assert said({"nonfinite/grad": 1.0}, *[{}] * 60, {"nonfinite/grad": 1.0})[-1] is Severity.WARNING


def test_counts_of_zero_are_good_news():
    """Measured, and nothing found."""
    assert said({"nonfinite/grad": 0.0, "nonfinite/logp": 0.0}) == [None]


@pytest.mark.parametrize(
    ("row", "suspect"),
    [
        ({"nonfinite/rollout_logp": 9.0, "nonfinite/old_logp": 0.0}, "rollout_engine"),
        ({"nonfinite/old_logp": 9.0, "nonfinite/ref_logp": 0.0}, "policy_weights"),
        ({"nonfinite/old_logp": 9.0, "nonfinite/logp": 0.0}, "old_pass"),
        ({"reward/mean": math.nan}, "reward"),
        ({"nonfinite/advantage": 2.0}, "reward"),
        ({"optim/grad_norm": math.inf}, "backward"),
        ({"nonfinite/grad": 2.0}, "backward"),
        ({"optim/grad_norm": math.nan, "policy/entropy": math.nan, "loss/policy": math.nan}, "everything"),
        ({"policy/entropy": math.nan}, "unknown"),
    ],
)
def test_the_first_broken_tensor_names_the_suspect(row, suspect):
    """In the order rollout, old policy, reference, loss, gradient."""
    finding = last(GOOD, GOOD | row)

    assert finding.evidence["suspect"] == suspect


def test_arrival_judges_at_once_and_knows_what_was_switched_off():
    """Before the step closes; never-finite KL stays quiet."""
    detector = NonFinite()
    detector.update(ClosedStep(step=0, metrics=GOOD))

    (finding,) = detector.arrival(ClosedStep(step=1, metrics={"optim/grad_norm": math.nan, "loss/policy": math.nan}))

    assert finding.severity is Severity.CRITICAL
    assert NonFinite().arrival(ClosedStep(step=0, metrics={"policy/kl_ref": math.nan})) == []


def test_the_onset_is_the_first_bad_row():
    """Looking back over a persistent NaN."""
    finding = last(GOOD, *[GOOD | {"policy/entropy": math.nan}] * 4)

    assert (finding.onset_step, finding.step) == (1, 4)
    assert finding.severity is Severity.CRITICAL


def test_system_metrics_do_not_matter():
    """A NaN timer is no crash."""
    assert said({"time/step": math.nan, "len/mean": math.nan}) == [None]
