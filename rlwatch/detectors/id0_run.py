"""Responses that are nearly all token id 0: what a sampler writes that is given NaN."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, number, rounded
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Hold

SOME = 0.01
"""Share of responses from which it is no accident; healthy runs have none at all."""
MANY = 0.5
"""Share from which the weights or the engine must be broken, not single slots of it."""


class Id0Run(BaseDetector):
    """Share of responses that are at least 90 % id 0 (``!`` in byte-level vocabularies: verl issue 751).

    One row may be a race between weight update and generation (NeMo-RL issue 2180); it says so, and a second one
    with half of the responses is critical.
    """

    name: ClassVar[str] = "id0_run"
    reads: ClassVar[tuple[str, ...]] = ("text/id0_frac",)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("text/id0_frac",),)

    def __init__(self) -> None:
        super().__init__()
        self._some = Hold(forgive=1)
        self._many = Hold()

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the row: such responses are never normal."""
        share = finite(step, *self.reads) or 0.0
        self._some.update(step.step, share >= SOME)
        self._many.update(step.step, share >= MANY)
        if share < SOME:
            return []
        length = finite(step, "len/mean")
        longest = finite(step, "text/id0_run")
        run = "" if longest is None else f", in runs of up to {number(longest)} tokens"
        return [
            self.finding(
                step,
                "id0_run",
                Severity.CRITICAL if self._many.lasted(2) else Severity.WARNING,
                f"{share:.0%} of the responses are runs of token id 0{run}: the sampler was given NaN, by broken "
                "weights or by the engine's own forward pass",
                onset=self._some.since,
                metric="text/id0_frac",
                score=share / SOME,
                evidence=rounded({"id0": share, "longest_run": longest, "length": length}),
            )
        ]
