"""Every registered detector keeps the contract; registering one is enough to be tested."""

from dataclasses import replace

import pytest

from rlwatch.detectors.base import DetectorSet
from rlwatch.detectors.registry import default_detectors, detector_classes
from rlwatch.ports import Detector
from rlwatch.testing.detector_contract import EVENT_KINDS, DetectorContract, broken_run, broken_runs, outputs, whole_run
from rlwatch.testing.small_batches import FAILURES, small_run

HEALTHY = [(seed, every) for seed in range(4) for every in (1, 5, 10)]
QUICK_HEALTHY = [(0, 1), (1, 5), (2, 10), (3, 5)]
"""Every seed and every cadence; the other pairs are for ``make thorough``."""
QUICK_EVENTS = ("reference_reset", "reference_not_restored", "resume", "unheard-of")
"""Those that detectors treat differently, and one that they do not know."""


def cases(every, quick):
    """All as parameters of a test; those that are not ``quick`` are for ``make thorough``."""
    marked = [(one, [] if one in quick else [pytest.mark.thorough]) for one in every]
    return [pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=marks) for one, marks in marked]


class TestRegisteredDetectors(DetectorContract):
    @pytest.fixture(params=detector_classes(), ids=lambda detector: detector.name)
    def make(self, request):
        return request.param

    @pytest.mark.parametrize(("seed", "every"), cases(HEALTHY, QUICK_HEALTHY))
    def test_is_silent_on_a_healthy_run(self, make, seed, every):
        """As the contract has it for all pairs."""
        super().test_is_silent_on_a_healthy_run(make, seed, every)

    @pytest.mark.parametrize("kind", cases(EVENT_KINDS, QUICK_EVENTS))
    def test_any_event_is_accepted(self, make, kind):
        """As the contract has it for all kinds."""
        super().test_any_event_is_accepted(make, kind)

    def test_speaks_when_everything_breaks(self, make):
        """The runs used for causality and determinism really make it speak (else those prove nothing)."""
        assert any(any(outputs(make(), run)) for run in broken_runs())


def test_each_run_gets_its_own_detectors():
    """Two runs share no state."""
    first, second = default_detectors(), default_detectors()

    assert [d.name for d in first] == [d.name for d in second]
    assert not {id(d) for d in first} & {id(d) for d in second}


TOLD_ALIKE = {
    "broken": broken_run(),
    "broken at once": broken_run(at=3),
    "sound": whole_run(3, 300, 5),
    **{failure or "sound small": small_run(7, failure=failure, every=1).rows for failure in ("", *FAILURES)},
}


@pytest.mark.parametrize("run", TOLD_ALIKE)
def test_detectors_of_one_run_say_what_each_says_alone(run):
    """Several follow the reward, some ask others: what they hold in common changes nothing, wherever a resume begins."""
    together, alone = default_detectors(), [detector() for detector in detector_classes()]
    rows = TOLD_ALIKE[run]

    for row in (*rows[: len(rows) // 2], *rows[len(rows) // 3 :]):
        assert [detector.update(row) for detector in together] == [detector.update(row) for detector in alone]


@pytest.mark.parametrize("run", TOLD_ALIKE)
def test_a_row_given_only_to_those_it_concerns_says_what_it_says_to_all(run):
    """In their order, also where most metrics come every few rows and some stay away for long."""
    panel, alone = DetectorSet(default_detectors()), [detector() for detector in detector_classes()]
    for i, row in enumerate(TOLD_ALIKE[run]):
        there = [name for j, name in enumerate(row.metrics) if (i + j) % 3 == 0 or (i // 40 + j) % 4 == 0]
        part = replace(row, metrics={name: row.metrics[name] for name in there})

        assert panel.update(part) == [finding for detector in alone for finding in detector.update(part)]


def test_a_row_given_again_is_not_counted_again():
    """It holds what it held, and what follows is the same."""
    for make in detector_classes():
        once, twice = make(), make()
        for row in TOLD_ALIKE["broken"]:
            held = twice.update(row)
            assert held == twice.update(row) == once.update(row)


def test_names_and_kinds_are_unique():
    """A finding names one detector; a kind has one meaning."""
    kinds = [kind for detector in detector_classes() for kind in detector.kinds]

    assert len({detector.name for detector in detector_classes()}) == len(detector_classes())
    assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize("detector", default_detectors(), ids=lambda d: d.name)
def test_keeps_the_port(detector: Detector):
    """The methods a Monitor calls are there."""
    assert all(callable(getattr(detector, name)) for name in ("update", "arrival", "notice"))
