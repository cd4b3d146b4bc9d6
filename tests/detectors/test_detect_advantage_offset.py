"""Advantages whose mean was 0 by construction, and no longer is."""

import pytest
from exact_runs import always, exact, then, when

from rlwatch.detectors.reward.advantage_centre import AdvantageOffset

LENGTHS = {"len/min": always(3.0), "len/max": always(9.0)}


SPREAD = always(0.9)


def run(mean, spread=SPREAD, lengths=LENGTHS):
    return exact({"adv/mean": mean, "adv/std": spread, **lengths})


@pytest.mark.parametrize("after", [-0.2, 0.2])
def test_a_mean_that_leaves_0_is_reported_at_its_fifth_row_on_either_side(after):
    """Weights on one sign make it so."""
    detector = AdvantageOffset()
    found = [finding for row in run(then(1e-8, after, 30)) for finding in detector.update(row)]

    assert found[0].step == 34
    assert {finding.onset_step for finding in found} == {30}
    assert found[0].severity.value == "warning"


@pytest.mark.parametrize(
    ("mean", "lengths"),
    [
        (lambda step: 0.0 if step < 30 else 0.05, LENGTHS),
        (lambda step: -0.2 if step % 5 == 0 else 0.0, LENGTHS),
        (lambda step: (0.0 if step < 30 else 0.3) * (-1) ** step, LENGTHS),
        (lambda step: 0.02 if step < 30 else 0.3, LENGTHS),
        (then(0.0, 0.3, 30), {"len/min": always(9.0), "len/max": always(9.0)}),
        (then(0.0, 0.3, 30), {}),
    ],
    ids=["near 0", "now and then", "both sides", "never centred", "one length", "no lengths"],
)
def test_a_mean_that_is_not_known_to_be_0_by_construction_or_does_not_leave_it_is_not_reported(mean, lengths):
    """A mean over tokens is 0 by chance while all lengths are equal; noise is on both sides."""
    assert when(AdvantageOffset(), run(mean, lengths=lengths)) == {}


def test_rows_without_a_spread_are_not_judged_and_the_report_ends_when_the_mean_is_0_again():
    """All rewards were equal in such a row: it says nothing."""
    silent = run(then(0.0, -0.3, 30), spread=lambda step: 0.0 if step < 25 else 0.9)
    detector = AdvantageOffset()
    back = [detector.update(row) for row in run(lambda step: -0.3 if 30 <= step < 40 else 0.0)]

    assert when(AdvantageOffset(), silent) == {}
    assert [bool(found) for found in back[33:42]] == [False] + [True] * 6 + [False] * 2
