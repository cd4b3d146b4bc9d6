"""One stretch of the responses that leaves the others."""

import pytest
from exact_runs import alarms, always, exact, then, when

from rlwatch.detectors.trust_region.position_drift import PositionDrift

KL, GAP = "policy/kl_ref_at_", "mismatch/logp_absdiff_at_"


def run(opening, rest=0.06, family=KL):
    """A run of an opening and two other stretches."""
    rest = rest if callable(rest) else always(rest)
    return exact({f"{family}0": opening, f"{family}8": rest, f"{family}64": rest}, length=80)


@pytest.mark.parametrize("family", [KL, GAP])
def test_an_opening_that_leaves_the_rest_is_told(family):
    """Five of its rows make the median of ten; then it has to last."""
    found = alarms(PositionDrift(), run(then(0.06, 0.6, 40), family=family))

    assert list(found) == ["warning"]
    assert 43 <= found["warning"].step <= 50
    assert found["warning"].onset_step == 40
    assert found["warning"].metric == f"{family}0"
    assert "tokens 1 to 8" in found["warning"].message


@pytest.mark.parametrize(
    ("why", "opening", "rest"),
    [
        ("all of it drifts", then(0.06, 0.6, 40), then(0.06, 0.6, 40)),
        ("the opening has always been apart", always(0.6), 0.06),
        ("it is next to nothing", then(0.001, 0.04, 40), 0.001),
        ("three times is what openings do", then(0.06, 0.18, 40), 0.06),
        ("a single row", lambda step: 0.6 if step == 40 else 0.06, 0.06),
        ("nothing to compare with", then(0.0, 0.6, 40), 0.0),
    ],
)
def test_what_is_no_drift_of_a_stretch(why, opening, rest):
    """The nearest runs that are none."""
    assert when(PositionDrift(), run(opening, rest)) == {}, why


def test_the_tail_of_the_responses_is_a_stretch_like_any_other():
    """Long answers drift at their end where the engine's precision does."""
    curves = {f"{GAP}0": always(0.02), f"{GAP}8": always(0.02), f"{GAP}512": then(0.02, 0.3, 40)}

    assert list(when(PositionDrift(), exact(curves, length=80))) == ["warning"]
