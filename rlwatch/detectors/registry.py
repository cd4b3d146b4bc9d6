"""The detectors of every run: those of the catalogue, in its order, and those of plugins.

An entry in the catalogue is enough for a detector to be run and tested.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, cast

from rlwatch.detectors.index import DetectorEntry, LazyDetector, entries
from rlwatch.error_boundary import call_or, described
from rlwatch.errors import ConfigError
from rlwatch.plugins import DOORS, usable
from rlwatch.ports import Detector
from rlwatch.records import ClosedStep, Event, Finding

logger = logging.getLogger("rlwatch")

EXTENSION_POINT = "rlwatch.detectors"


@cache
def detector_classes() -> tuple[type[Detector], ...]:
    """Return the classes of all detectors of the catalogue, in its order; the first call imports them."""
    return tuple(entry.load() for entry in entries())


def of_plugins() -> tuple[type[Detector], ...]:
    """Return the detector classes of installed plugins."""
    return tuple(usable(EXTENSION_POINT, {entry.name for entry in entries()}).values())


def registered() -> tuple[DetectorEntry | type[Detector], ...]:
    """Return all detectors that a run uses: the entries of those of the catalogue, then the classes of plugins."""
    return (*entries(), *of_plugins())


def default_detectors() -> list[Detector]:
    """Return new instances of all registered detectors for one run; state that several of them need is shared."""
    return _detectors(lazily=False)


def lazy_detectors() -> list[Detector]:
    """Return :func:`default_detectors` of which those that may wait are loaded with the first row that concerns them.

    They are for a :class:`~rlwatch.detectors.base.DetectorSet`, which loads them.
    """
    return _detectors(lazily=True)


def _detectors(*, lazily: bool) -> list[Detector]:
    from rlwatch.detectors.context import RunContext

    context = RunContext()
    common: dict[type, Any] = {type(part): part for part in (context, context.reward)}
    ours: list[Any] = [LazyDetector(entry, common) if lazily and entry.waits else entry.load()() for entry in entries()]
    loaded = [detector for detector in ours if not isinstance(detector, LazyDetector)]
    common |= {type(detector): detector for detector in loaded}
    for detector in loaded:
        detector.share(common)
    return [*ours, *(cast("Detector", GuardedDetector(detector)) for detector in of_plugins())]


def made_by(make: Callable[[], Sequence[Detector]]) -> list[Detector]:
    """Return the new detectors that a caller's function ``make`` makes.

    Raises ``ConfigError`` if ``make`` is no function, or returns something other than detectors.
    """
    if not callable(make):
        raise ConfigError(
            f"detectors must be a function that returns new detectors, such as `lambda: [MyDetector()]`, got {make!r}"
        )
    made = make()
    if not isinstance(made, Iterable):
        raise ConfigError(f"the function for detectors must return a list of them, got {made!r}")
    detectors = list(made)
    for detector in detectors:
        lacking = [name for name in ("name", *DOORS[EXTENSION_POINT].needs) if not hasattr(detector, name)]
        if lacking:
            raise ConfigError(
                f"a detector must have {', '.join(lacking)} (see rlwatch.ports.Detector), got {detector!r}"
            )
    return detectors


class GuardedDetector:
    """Wrapper of a plugin's detector: after an exception or an invalid result it is logged once and disabled.

    Parameters
    ----------
    made
        Class of the plugin's detector.
    """

    def __init__(self, made: type[Detector]) -> None:
        self.name, self.family, self.kinds, self.requires = made.name, made.family, made.kinds, made.requires
        self._detector: Detector | None = call_or(made, self._failed)

    def update(self, step: ClosedStep) -> list[Finding]:
        """Return the wrapped detector's findings for a closed step; none once it is disabled."""
        return self._call(lambda detector: detector.update(step))

    def arrival(self, step: ClosedStep) -> list[Finding]:
        """Return the wrapped detector's findings for the record ``step`` at its arrival; none once the detector is
        disabled.
        """
        return self._call(lambda detector: detector.arrival(step))

    def notice(self, event: Event) -> None:
        """Pass the event to the wrapped detector, unless it is disabled."""

        def notify(detector: Detector) -> list[Finding]:
            detector.notice(event)
            return []

        self._call(notify)

    def _call(self, work: Callable[[Detector], list[Finding]]) -> list[Finding]:
        detector = self._detector
        if detector is None:
            return []
        return call_or(lambda: _findings(work(detector)), self._given_up)

    def _given_up(self, error: Exception) -> list[Finding]:
        self._detector = self._failed(error)
        return []

    def _failed(self, error: Exception) -> Detector | None:
        """Log the failure; return None, which replaces the detector from now on."""
        message = "rlwatch: detector %r of a plugin failed and is not asked again: %s"
        logger.warning(message, self.name, described(error))
        return None


def _findings(given: list[Finding]) -> list[Finding]:
    """Return the findings as a list; raise ``TypeError`` for anything else."""
    findings = list(given)
    wrong = next((one for one in findings if not isinstance(one, Finding)), None)
    if wrong is not None:
        raise TypeError(f"a detector must return findings, got {type(wrong).__name__}")
    return findings
