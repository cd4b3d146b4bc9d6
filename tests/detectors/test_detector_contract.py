"""Every registered detector keeps the contract; registering one is enough to be tested."""

import pytest

from rlwatch.detectors.registry import REGISTRY, default_detectors
from rlwatch.ports import Detector
from rlwatch.testing.detector_contract import DetectorContract, broken_run, outputs


class TestRegisteredDetectors(DetectorContract):
    @pytest.fixture(params=REGISTRY, ids=lambda detector: detector.name)
    def make(self, request):
        return request.param

    def test_speaks_when_everything_breaks(self, make):
        """The run used for causality and determinism really makes it speak (else those prove nothing)."""
        assert any(outputs(make(), broken_run()))


def test_each_run_gets_its_own_detectors():
    """Two runs share no state."""
    first, second = default_detectors(), default_detectors()

    assert [d.name for d in first] == [d.name for d in second]
    assert not {id(d) for d in first} & {id(d) for d in second}


def test_names_and_kinds_are_unique():
    """A finding names one detector; a kind has one meaning."""
    kinds = [kind for detector in REGISTRY for kind in detector.kinds]

    assert len({detector.name for detector in REGISTRY}) == len(REGISTRY)
    assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize("detector", default_detectors(), ids=lambda d: d.name)
def test_keeps_the_port(detector: Detector):
    """The methods a Monitor calls are there."""
    assert all(callable(getattr(detector, name)) for name in ("update", "arrival", "notice"))
