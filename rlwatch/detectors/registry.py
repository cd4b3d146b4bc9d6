"""The detectors every run gets: those that the catalogue names, in its order, and those of plugins.

An entry of the catalogue is enough to have one tested.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

from rlwatch.catalogue import detector_class, kinds
from rlwatch.detectors.base import BaseDetector
from rlwatch.detectors.context import RunContext
from rlwatch.error_boundary import call_or, described
from rlwatch.plugins import usable
from rlwatch.ports import Detector
from rlwatch.records import ClosedStep, Event, Finding

logger = logging.getLogger("rlwatch")

REGISTRY: tuple[type[Detector], ...] = tuple(
    dict.fromkeys(detector_class(kind) for kind in kinds().values() if kind.detector)
)


DOOR = "rlwatch.detectors"


def of_plugins() -> tuple[type[Detector], ...]:
    """Detectors of other people's packages."""
    return tuple(usable(DOOR, {detector.name for detector in REGISTRY}).values())


def registered() -> tuple[type[Detector], ...]:
    """All detectors that a run gets."""
    return (*REGISTRY, *of_plugins())


def default_detectors() -> list[Detector]:
    """A fresh set of all registered detectors, for one run: what several of them follow is followed once."""
    detectors = [detector() for detector in REGISTRY]
    context = RunContext()
    common = {type(part): part for part in (context, context.reward, *detectors)}
    for detector in detectors:
        if isinstance(detector, BaseDetector):
            detector.share(common)
    return [*detectors, *(cast("Detector", GuardedDetector(detector)) for detector in of_plugins())]


class GuardedDetector:
    """A detector of somebody else's: where it raises, or gives what is no finding, it is said once and not asked again.

    Parameters
    ----------
    made
        Its class.
    """

    def __init__(self, made: type[Detector]) -> None:
        self.name, self.family, self.kinds, self.requires = made.name, made.family, made.kinds, made.requires
        self._detector: Detector | None = call_or(made, self._failed)

    def update(self, step: ClosedStep) -> list[Finding]:
        """Its findings."""
        return self._asked(lambda detector: detector.update(step))

    def arrival(self, step: ClosedStep) -> list[Finding]:
        """Its findings at the moment a record arrives."""
        return self._asked(lambda detector: detector.arrival(step))

    def notice(self, event: Event) -> None:
        """Pass the event on."""

        def told(detector: Detector) -> list[Finding]:
            detector.notice(event)
            return []

        self._asked(told)

    def _asked(self, work: Callable[[Detector], list[Finding]]) -> list[Finding]:
        detector = self._detector
        if detector is None:
            return []
        return call_or(lambda: _findings(work(detector)), self._given_up)

    def _given_up(self, error: Exception) -> list[Finding]:
        self._detector = self._failed(error)
        return []

    def _failed(self, error: Exception) -> Detector | None:
        """None, which stands for it from now on."""
        said = "rlwatch: detector %r of a plugin failed and is not asked again: %s"
        logger.warning(said, self.name, described(error))
        return None


def _findings(given: list[Finding]) -> list[Finding]:
    """Raises ``TypeError`` if it is anything else."""
    told = list(given)
    wrong = next((one for one in told if not isinstance(one, Finding)), None)
    if wrong is not None:
        raise TypeError(f"a detector must return findings, got {type(wrong).__name__}")
    return told
