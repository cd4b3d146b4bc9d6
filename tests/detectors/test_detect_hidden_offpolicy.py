"""Samples that are more optimizer updates old than versions."""

from exact_runs import always, exact, then, when

from rlwatch.detectors.rises import RouterShift
from rlwatch.detectors.trust_region.hidden_offpolicy import HiddenOffPolicy


def test_several_updates_to_a_version_are_reported_and_one_is_not():
    """One version old; from row 20 on a version is eight updates. Fresh samples hide nothing."""
    piled = {"staleness/mean": always(1.0), "staleness/updates": then(1.0, 11.5, 20)}
    plain = {"staleness/mean": always(8.0), "staleness/updates": always(8.0)}
    fresh = {"staleness/mean": always(0.0), "staleness/updates": then(0.0, 7.5, 20)}

    assert when(HiddenOffPolicy(), exact(piled)) == {"warning": 24}
    assert when(HiddenOffPolicy(), exact(plain)) == {}
    assert when(HiddenOffPolicy(), exact(fresh)) == {}


def test_a_router_that_begins_to_move_is_reported_and_one_that_always_did_is_not():
    """Growth is judged, not the level."""
    grown = {"ratio/router_layer_frac": then(0.02, 0.2, 30)}
    level = {"ratio/router_layer_frac": always(0.2)}

    assert list(when(RouterShift(), exact(grown))) == ["warning"]
    assert when(RouterShift(), exact(level)) == {}
