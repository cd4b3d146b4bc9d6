"""A clip fraction of zero for ever: when it says nothing, and when it is right."""

import math

import pytest
from exact_runs import alarms, always, exact, then, when

from rlwatch.detectors.trust_region.clipping import ClipBlind

ZERO = {"ratio/clipfrac": always(0.0)}


@pytest.mark.parametrize(
    ("metric", "witness", "far", "near"),
    [
        ("ratio/clipfrac", "ratio/log_absmax", 0.6, 0.3),
        ("ratio/clipfrac", "ratio/max", 1.8, 1.3),
        ("ratio/clipfrac", "ratio/min", 0.5, 0.7),
        ("ratio/clipfrac", "policy/kl_old", -0.02, 0.005),
        ("ratio/clipfrac_low", "ratio/min", 0.5, 0.7),
        ("ratio/clipfrac_high", "ratio/max", 1.8, 1.3),
        ("ratio/clipfrac_dual", "ratio/max", 11.0, 5.0),
    ],
)
def test_zero_beside_far_ratios_carries_no_information(metric, witness, far, near):
    """After twenty rows; within the widest usual bounds zero is no contradiction."""
    found = alarms(ClipBlind(), exact({metric: always(0.0), witness: always(far)}, length=45))
    near = when(ClipBlind(), exact({metric: always(0.0), witness: always(near)}, length=45))

    assert {severity: (f.step, f.onset_step, f.metric) for severity, f in found.items()} == {"info": (19, 0, metric)}
    assert "does not define it" in found["info"].message
    assert near == {}


def test_one_clipped_token_shows_that_it_works():
    """Then zero means nothing was clipped, for ever after."""
    rows = exact({"ratio/clipfrac": lambda s: 1e-5 if s == 30 else 0.0, "ratio/max": always(3.0)}, length=200)

    watch = ClipBlind()
    said = [row.step for row in rows if watch.update(row)]

    assert said == list(range(19, 30))


@pytest.mark.parametrize("every", [1, 10])
def test_a_zero_that_lasts_says_nothing_even_where_ratios_are_not_logged(every):
    """Fifty rows: the log of a public run that collapsed all the same."""
    finding = alarms(ClipBlind(), exact(ZERO, length=80, every=every))["info"]

    assert finding.step == 49 * every
    assert "one update a rollout, or with a loss that does not define it" in finding.message


def test_ratios_of_one_say_why():
    """Every batch is used once."""
    rows = exact(ZERO | {"ratio/log_absmax": always(1e-6), "ratio/max": always(1.0)}, length=80)

    assert "used for one update" in alarms(ClipBlind(), rows)["info"].message


@pytest.mark.parametrize("name", ["ratio/clipfrac", "ratio/clipfrac_high"])
def test_one_fraction_that_works_speaks_for_the_others(name):
    """Only one side of the clip is reached in many a healthy run."""
    assert when(ClipBlind(), exact(ZERO | {"ratio/clipfrac_low": always(0.0), name: always(1e-4)}, length=120)) == {}


def test_a_dual_clip_that_is_never_reached_is_the_rule():
    """Beside a clip fraction that works."""
    rows = exact({"ratio/clipfrac": always(1e-3), "ratio/clipfrac_dual": always(0.0)}, length=200)

    assert when(ClipBlind(), rows) == {}


def test_gaps_and_nan_count_for_nothing():
    """Neither as zero nor as a fraction that works."""
    curve = {0: 0.0, 1: None, 2: math.nan}
    rows = exact({"ratio/clipfrac": lambda s: curve[s % 3], "ratio/max": always(2.0)}, length=90)

    assert when(ClipBlind(), rows) == {"info": 57}


def test_ratios_that_begin_to_move_late_need_their_twenty_rows():
    """Onset is where the zeros began."""
    found = alarms(ClipBlind(), exact(ZERO | {"ratio/max": then(1.1, 2.0, 10)}, length=45))

    assert (found["info"].step, found["info"].onset_step) == (29, 0)
