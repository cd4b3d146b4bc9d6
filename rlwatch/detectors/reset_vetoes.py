"""What speaks against a reset of the reference: it would make the policy of a collapse the anchor."""

from __future__ import annotations

from rlwatch.catalogue import collapse_kinds, detector_class, kinds
from rlwatch.detectors.base import finite
from rlwatch.detectors.company import Company
from rlwatch.ports import Detector
from rlwatch.records import ClosedStep, Severity
from rlwatch.stats import Window

GARBLED = (("text/garbled", 0.1), ("text/id0_frac", 0.05), ("text/replacement", 0.1))
"""Shares of the output from which it is no language any more."""
ROWS = 20
"""Rows for which a sign of collapse speaks against a reset."""


class Vetoes:
    """Signs of any kind that the catalogue calls a collapse, garbled output, cut responses, and a lost reward."""

    def __init__(self) -> None:
        makers = dict.fromkeys(detector_class(kind) for kind in kinds().values() if kind.collapse)
        self._watch: tuple[Detector, ...] = tuple(make() for make in makers)
        self._garbled = {name: Window(rows=ROWS, steps=ROWS) for name, _ in GARBLED}
        self._ago: dict[str, int] = {}

    def update(self, step: ClosedStep) -> None:
        """Take notice of a row."""
        self._ago = {kind: rows + 1 for kind, rows in self._ago.items() if rows < ROWS}
        for detector in self._watch:
            for finding in detector.update(step):
                if finding.severity is not Severity.INFO and finding.kind in collapse_kinds():
                    self._ago[finding.kind] = 0
        for name, limit in GARBLED:
            value = finite(step, name)
            if value is not None:
                self._garbled[name].update(step.step, value)
                level = self._garbled[name].get()
                if level is not None and level > limit:
                    self._ago["garbled output"] = 0

    def why(self, company: Company) -> tuple[str, ...]:
        """The signs of collapse of the last rows; empty where a reset would do no harm."""
        signs = list(self._ago)
        if company.reward.fallen():
            signs.append("reward_drop")
        if company.truncated:
            signs.append("truncated responses")
        return tuple(signs)
