"""Localisation takes no more than its share of the training time, but for what it is granted at first."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.clock import ManualClock
from rlwatch.gradloc.trigger import LocalisationBudget


def budget(**options):
    clock = ManualClock()
    return LocalisationBudget(clock=clock, **options), clock


def localise(budget, clock, seconds, *, non_finite=False, estimate=None):
    """Ask, and if it may be done, do it."""
    granted = budget.may(seconds if estimate is None else estimate, non_finite=non_finite)
    if granted:
        clock.advance(seconds)
        budget.spent(seconds)
    return granted


wishes = st.lists(
    st.tuples(st.floats(0.0, 1e4), st.floats(0.0, 1e3), st.booleans(), st.floats(0.0, 1.0)), min_size=1, max_size=60
)


@settings(max_examples=200, deadline=None)
@given(wishes=wishes, share=st.floats(0.0, 0.5), allowance=st.floats(0.0, 100.0))
def test_honest_estimates_never_exceed_the_share_and_the_allowance(wishes, share, allowance):
    """After any history of training, estimates and localisations that take at most what was estimated."""
    account, clock = budget(share=share, allowance_s=allowance)
    extra = {}
    for training, estimate, non_finite, part in wishes:
        clock.advance(training)
        first = account.granted == 0
        newly = non_finite and not account.traced
        if localise(account, clock, part * estimate, non_finite=non_finite, estimate=estimate):
            extra |= {"first": estimate} if first else {"non-finite": estimate} if newly else {}
        limit = share * account.elapsed_s + allowance + sum(extra.values())

        assert account.spent_s <= limit * (1 + 1e-9) + 1e-9
        assert account.spent_s <= (share * account.elapsed_s + account.allowance_s) * (1 + 1e-9) + 1e-9


def test_a_long_run_stays_below_one_per_cent():
    """A spike at each of 100 000 steps of one second, at half a second each: only the allowance is beyond 1 %."""
    account, clock = budget()
    for _ in range(100_000):
        clock.advance(1.0)
        localise(account, clock, 0.5)

    assert account.spent_s <= 0.01 * 100_000 + 30.0
    assert account.spent_s > 0.0099 * 100_000
    assert account.granted + account.refused == 100_000


def test_the_first_localisations_need_no_training_time_before_them():
    """Thirty seconds are there at once; then it waits until training has earned the next."""
    account, clock = budget()

    assert [localise(account, clock, 10.0) for _ in range(5)] == [True, True, True, False, False]
    assert account.refused == 2
    clock.advance(999.0)
    assert not localise(account, clock, 10.0)
    clock.advance(2.0)
    assert localise(account, clock, 10.0)


def test_the_first_is_granted_whatever_it_costs():
    """A model so large that one localisation takes longer than the allowance."""
    account, clock = budget()

    assert localise(account, clock, 300.0)
    assert not localise(account, clock, 300.0)


def test_the_first_non_finite_gradient_is_always_traced_and_only_the_first():
    """Even when all is spent; and it is no pretext for spikes."""
    account, clock = budget()
    localise(account, clock, 100.0)

    assert not localise(account, clock, 20.0)
    assert localise(account, clock, 20.0, non_finite=True)
    assert not localise(account, clock, 20.0, non_finite=True)
    assert not localise(account, clock, 20.0)


def test_a_localisation_that_took_longer_is_a_debt():
    """Later ones wait until it is earned back."""
    account, clock = budget(allowance_s=1.0)

    assert localise(account, clock, 11.0, estimate=1.0)
    assert account.left_s == pytest.approx(-10.0)
    clock.advance(1000.0)
    assert account.left_s == pytest.approx(0.0)
    assert not localise(account, clock, 1.0)
    clock.advance(101.0)
    assert localise(account, clock, 1.0)


def test_a_share_of_zero_allows_the_first_only():
    """And the first of a non-finite gradient; that is as good as off."""
    account, clock = budget(share=0.0, allowance_s=0.0)
    clock.advance(1e9)

    assert [localise(account, clock, 1.0) for _ in range(3)] == [True, False, False]
    assert localise(account, clock, 1.0, non_finite=True)


@pytest.mark.parametrize("share", [-0.01, 1.0, 10.0, math.nan])
def test_a_share_outside_its_range_is_refused(share):
    """1 % is 0.01, not 1."""
    with pytest.raises(ValueError, match="within"):
        LocalisationBudget(share=share)


def test_the_account_goes_on_after_a_resume():
    """Elapsed, spent, granted and refused are kept; the time between the processes does not count."""
    account, clock = budget()
    clock.advance(5000.0)
    localise(account, clock, 60.0)
    localise(account, clock, 60.0)
    resumed, later = budget()
    later.advance(12345.0)
    resumed.load_state_dict(json.loads(json.dumps(account.state_dict())))

    assert resumed.left_s == pytest.approx(account.left_s)
    assert (resumed.granted, resumed.refused) == (account.granted, account.refused) == (1, 1)
    assert [localise(resumed, later, 20.0), localise(resumed, later, 20.0)] == [True, False]


def test_it_runs_on_the_clock_of_the_machine_by_default():
    """Time passes by itself."""
    account = LocalisationBudget()

    assert account.elapsed_s >= 0.0
    assert account.may(1.0)
    account.spent(-1.0)
    assert account.spent_s == 0.0
