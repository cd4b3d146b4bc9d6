"""The detectors every run gets: those that the catalogue names, in its order. An entry is enough to have one tested."""

from __future__ import annotations

from rlwatch.catalogue import detector_class, kinds
from rlwatch.ports import Detector

REGISTRY: tuple[type[Detector], ...] = tuple(
    dict.fromkeys(detector_class(kind) for kind in kinds().values() if kind.detector)
)


def default_detectors() -> list[Detector]:
    """A fresh set of all registered detectors, for one run."""
    return [detector() for detector in REGISTRY]
