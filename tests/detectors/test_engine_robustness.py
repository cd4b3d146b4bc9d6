"""Engine and data detectors on what is no failure: spikes, gaps, NaN, resumes, harmless events."""

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlwatch.detectors.exploration.likelihood_displacement import LikelihoodDisplacement
from rlwatch.detectors.mismatch.mismatch_growth import MismatchBlind, MismatchCorrelation, MismatchGrowth, MismatchLevel
from rlwatch.detectors.mismatch.mismatch_mask import MismatchMask
from rlwatch.detectors.optimisation.silent_freeze import SilentFreeze
from rlwatch.detectors.rises import MismatchTail, MoEImbalance, RoutingMismatch
from rlwatch.detectors.rollouts.broken_output import DegenerateBatch, GarbledOutput
from rlwatch.detectors.rollouts.token_ids import MaskLeakage, Retokenisation
from rlwatch.records import Event, Severity
from rlwatch.testing.healthy_runs import engine_broken, healthy_run

SLOW = (
    DegenerateBatch,
    GarbledOutput,
    LikelihoodDisplacement,
    MaskLeakage,
    MismatchBlind,
    MismatchCorrelation,
    MismatchGrowth,
    MismatchLevel,
    MismatchMask,
    MismatchTail,
    MoEImbalance,
    Retokenisation,
    RoutingMismatch,
    SilentFreeze,
)
"""Those that want more than one row of proof."""
slow = pytest.mark.parametrize("detector", SLOW, ids=lambda one: one.name)


def loud(detector, rows):
    """Findings above information."""
    return [f for row in rows for f in detector.update(row) if f.severity is not Severity.INFO]


def worse(row, names=None):
    """The row with everything broken at once, mismatch a thousandfold."""
    broken = {name: value * 1000.0 for name, value in row.metrics.items() if name.startswith("mismatch/")}
    broken |= engine_broken(row.metrics, seen=False) | {"len/clipped": 1.0, "reward/zero_std_frac": 1.0}
    return replace(row, metrics={**row.metrics, **{k: v for k, v in broken.items() if names is None or k in names}})


@slow
def test_single_rows_in_which_all_is_broken_are_no_failure(detector):
    """Any rows at least 15 apart."""

    @settings(max_examples=10, deadline=None)
    @given(st.lists(st.integers(15, 60), min_size=1, max_size=8))
    @example([15, 26, 60, 16, 28])
    def check(gaps):
        at = {sum(gaps[: i + 1]) for i in range(len(gaps))}
        rows = [worse(row) if row.step in at else row for row in healthy_run(1, length=300, taps=True)]
        assert loud(detector(), rows) == []

    check()


@slow
def test_missing_and_nan_values_between_healthy_ones_are_no_failure(detector):
    """Each metric is absent or NaN in half of the rows."""

    def holes(row):
        kept = {name: value for i, (name, value) in enumerate(row.metrics.items()) if (i + row.step) % 4}
        odd = {name: math.nan for i, name in enumerate(kept) if (i + row.step) % 4 == 1 and name != "optim/grad_norm"}
        return replace(row, metrics=kept | odd)

    assert loud(detector(), [holes(row) for row in healthy_run(2, length=300, taps=True)]) == []


@slow
@pytest.mark.parametrize("kind", ["reference_reset", "resume", "rollback"])
def test_resets_and_resumes_of_a_healthy_run_are_no_failure(detector, kind):
    """The run continues thirty steps back; the first row after it is odd, as a fresh engine's is."""
    one = detector()
    rows = list(healthy_run(3, length=300, taps=True))
    said = loud(one, rows[:150])
    one.notice(Event(kind=kind, step=150))
    said += loud(one, [worse(rows[120]), *rows[121:]])

    assert said == []


@slow
@pytest.mark.parametrize("every", [1, 5, 10])
def test_a_real_failure_is_still_told_at_any_cadence(detector, every):
    """Broken for good from the middle on: mean mismatch first as before, then a thousandfold.

    A level that was grown to is information: growth itself is told beside it.
    """
    rows = list(healthy_run(4, length=60 * every, every=every, taps=True))
    broken = [
        worse(row, None if i >= 50 else set(row.metrics) - {"mismatch/k3", "mismatch/kl"})
        for i, row in enumerate(rows[30:], start=30)
    ]
    falling = [replace(row, metrics={**row.metrics, "reward/mean": 0.0, "mismatch/moe_avg_vio": 2.0}) for row in broken]

    one = detector()
    said = [finding for row in [*rows[:30], *falling] for finding in one.update(row)]
    told = Severity.INFO if detector is MismatchLevel else Severity.WARNING

    assert max(finding.severity.rank for finding in said) >= told.rank
    assert said[0].step > 30 * every


@slow
def test_a_learning_rate_blip_and_hard_data_are_no_failure(detector):
    """Gradients threefold for five rows, then thirty rows of prompts the policy hardly solves."""

    def event(row):
        m = dict(row.metrics)
        if 100 <= row.step < 105:
            m |= {"optim/grad_norm": 3.0 * m["optim/grad_norm"], "mismatch/k3": 3.0 * m["mismatch/k3"]}
        if 150 <= row.step < 180:
            m |= {"reward/mean": 0.7 * m["reward/mean"], "len/mean": 1.5 * m["len/mean"]}
        return replace(row, metrics=m)

    assert loud(detector(), [event(row) for row in healthy_run(5, length=300, taps=True)]) == []
