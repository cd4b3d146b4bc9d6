"""Index of the detectors: what each is and which metrics it reads, known without loading its module.

``index.json`` is written by ``python -m rlwatch.detectors`` from the classes. With it a run loads a detector only when
it logs a metric of it, and a command that lists what could not be judged loads none.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

from rlwatch.catalogue import detector_class, kinds, reported_by
from rlwatch.error_boundary import PASSING_TRIES, passing
from rlwatch.ports import Detector
from rlwatch.records import ClosedStep, Event, Finding

FILE = Path(__file__).with_name("index.json")


@dataclass(frozen=True, slots=True)
class DetectorEntry:
    """A detector of the catalogue, described without its class.

    Parameters
    ----------
    path
        Module and class below ``rlwatch.detectors``, such as ``drift.SlowDrift``.
    name, family, kinds, requires
        Those of the class (see :class:`rlwatch.ports.Detector`).
    reads, families
        Metrics that the detector judges, and prefixes of such metrics.
    waits
        True if rows without any of them, and events, do not concern it: it may be loaded with the first row that has
        one.
    """

    path: str
    name: str
    family: str
    kinds: tuple[str, ...]
    requires: tuple[tuple[str, ...], ...]
    reads: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    waits: bool = False

    @classmethod
    def of(cls, path: str, known: Mapping[str, Any]) -> DetectorEntry:
        """Return the entry of the class at ``path``, from its table ``known`` in the index."""
        reported = reported_by(path)
        return cls(
            path,
            known["name"],
            reported[0].family,
            tuple(kind.name for kind in reported),
            tuple(map(tuple, known["requires"])),
            tuple(known.get("reads", ())),
            tuple(known.get("families", ())),
            waits=known.get("waits", False),
        )

    def load(self) -> type[Detector]:
        """Return the class; import its module if necessary."""
        return cast("type[Detector]", detector_class(kinds()[self.kinds[0]]))

    def concerns(self, names: Collection[str]) -> bool:
        """Return True if one of the metrics ``names`` is one that the detector judges."""
        return any(name in names for name in self.reads) or (
            bool(self.families) and any(name.startswith(self.families) for name in names)
        )


@cache
def entries() -> tuple[DetectorEntry, ...]:
    """Return the entry of each detector, in the order of the catalogue.

    A detector that the index does not have yet is loaded for it.
    """
    known = json.loads(FILE.read_text(encoding="utf-8"))
    paths = dict.fromkeys(kind.detector for kind in kinds().values() if kind.detector)
    return tuple(DetectorEntry.of(path, known[path] if path in known else _described(path)) for path in paths)


def _described(path: str) -> dict[str, Any]:
    made = detector_class(reported_by(path)[0])
    return {"name": made.name, "requires": made.requires}


class LazyDetector:
    """A detector that is loaded with the first row that has one of its metrics; until then it has nothing to do.

    Parameters
    ----------
    entry
        Its entry in the index, with ``waits``.
    common
        Objects that the detectors of the run share, and these detectors themselves, by type; it is added to them once
        it is loaded.
    """

    _held: ClassVar[tuple[Finding, ...]] = ()

    def __init__(self, entry: DetectorEntry, common: dict[type, Any]) -> None:
        self.entry = entry
        self.name, self.family, self.kinds, self.requires = entry.name, entry.family, entry.kinds, entry.requires
        self._common = common
        self._tries = 0
        self._missed: list[ClosedStep] = []
        """Rows that came while its module could not be loaded, for it to take first."""

    def loaded(self) -> Detector | None:
        """Return the detector, after the rows that it missed; None while its module cannot be loaded.

        Raises what loading it, or judging those rows, raised; a lack of file descriptors or memory only after many
        tries.
        """
        try:
            made: Any = self.entry.load()()
        except (OSError, MemoryError, ImportError) as error:
            self._tries += 1
            if passing(error) and self._tries <= PASSING_TRIES:
                return None
            raise
        made.share(self._common)
        self._common[type(made)] = made
        for row in self._missed:
            made.update(row)
        return cast("Detector", made)

    def update(self, step: ClosedStep) -> list[Finding]:
        """Keep a row that concerns the detector, while it cannot be loaded; return no findings."""
        self._missed.append(step)
        return []

    def arrival(self, step: ClosedStep) -> list[Finding]:  # noqa: ARG002  (the protocol's signature)
        """Return no findings: a detector that may wait judges closed steps only."""
        return []

    def notice(self, event: Event) -> None:
        """Ignore the event: a detector that may wait learns nothing from events."""


@dataclass(frozen=True, slots=True)
class NotRun:
    """A detector that could not run, and the reason in words."""

    name: str
    reason: str


def not_run(detectors: Iterable[Detector | type[Detector] | DetectorEntry], seen: Collection[str]) -> list[NotRun]:
    """Return the detectors that lack metrics, each with the reason. ``seen``: names of all metrics that the run
    logged.
    """
    return [
        NotRun(detector.name, f"needs {alternatives(detector.requires)}, which this run has not logged")
        for detector in detectors
        if lacks_metrics(detector, seen)
    ]


def lacks_metrics(detector: Detector | type[Detector] | DetectorEntry, seen: Collection[str]) -> bool:
    """Return True if the run logged none of the detector's alternative sets of metrics. ``seen``: names of logged
    metrics.
    """
    return not any(all(_was_seen(name, seen) for name in needed) for needed in detector.requires)


def alternatives(requires: Sequence[Sequence[str]]) -> str:
    """Return the alternative sets of metrics that a detector requires, in words: ``a + b or c``."""
    return " or ".join(" + ".join(needed) for needed in requires)


def _was_seen(needed: str, seen: Collection[str]) -> bool:
    """Return whether the metric was logged; a name that ends in a slash means any metric of that open family."""
    return needed in seen or (needed.endswith("/") and any(name.startswith(needed) for name in seen))
