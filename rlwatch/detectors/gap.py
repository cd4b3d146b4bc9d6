"""How far trainer and rollout engine are apart at a row, by the best measure the run logs."""

from __future__ import annotations

from rlwatch.detectors.base import finite
from rlwatch.records import ClosedStep

GAPS = (
    "mismatch/logp_absdiff",
    "mismatch/log_ppl_absdiff",
    "mismatch/k3",
    "mismatch/prob_absdiff",
)
"""Sizes of the difference, which cannot cancel as the plain estimate of KL does; the first one logged is used."""


class Gap:
    """Sticks to the first of ``GAPS`` that is measured, so that levels of one metric are compared."""

    def __init__(self) -> None:
        self.name = ""

    def read(self, step: ClosedStep) -> float | None:
        """The gap at this row; None where it was not measured."""
        if not self.name:
            self.name = next((name for name in GAPS if finite(step, name) is not None), "")
        value = finite(step, self.name) if self.name else None
        return None if value is None else abs(value)
