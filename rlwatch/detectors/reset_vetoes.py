"""What speaks against a reset of the reference: it would make the policy of a collapse the anchor."""

from __future__ import annotations

from rlwatch.detectors.base import finite
from rlwatch.detectors.company import Company
from rlwatch.detectors.entropy_collapse import EntropyCollapse
from rlwatch.detectors.entropy_explosion import EntropyExplosion
from rlwatch.detectors.mismatch_growth import MismatchGrowth
from rlwatch.detectors.nonfinite import NonFinite
from rlwatch.ports import Detector
from rlwatch.records import ClosedStep, Severity
from rlwatch.stats import Window

GARBLED = (("text/garbled", 0.1), ("text/id0_frac", 0.05), ("text/replacement", 0.1))
"""Shares of the output from which it is no language any more."""
ROWS = 20
"""Rows for which a sign of collapse speaks against a reset."""


class Vetoes:
    """NaN, engine mismatch, entropy off its course, garbled output, nearly every response cut, or a lost reward."""

    def __init__(self) -> None:
        self._watch: tuple[Detector, ...] = (NonFinite(), EntropyCollapse(), EntropyExplosion(), MismatchGrowth())
        self._garbled = {name: Window(rows=ROWS, steps=ROWS) for name, _ in GARBLED}
        self._ago: dict[str, int] = {}

    def update(self, step: ClosedStep) -> None:
        """Take notice of a row."""
        self._ago = {kind: rows + 1 for kind, rows in self._ago.items() if rows < ROWS}
        for detector in self._watch:
            for finding in detector.update(step):
                if finding.severity is not Severity.INFO:
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
