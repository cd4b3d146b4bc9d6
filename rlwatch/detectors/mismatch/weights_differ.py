"""Detect that the rollout engine does not hold the trainer's weights after a weight sync."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, members, rounded
from rlwatch.metrics import WEIGHTS_PREFIX
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.wording import number

DIFFER, COMPARED = "mismatch/weights_differ", "mismatch/weights_compared"
DISTANCE, MISSING = "mismatch/weights_distance", "mismatch/adapter_missing"
SYNCS = 3
"""Consecutive syncs that make it critical: one may be a race with the comparison."""
BASE_ONLY = 0.5
"""Share of the weights with an adapter that the engine holds without it, from which the adapter counts as not
loaded.
"""
NAMED = 3
"""Number of layers that a message names, those that differ most."""


class WeightsDiffer(BaseDetector):
    """Detector of rollout-engine weights that are not the trainer's, right after a weight sync. Any difference counts.

    A warning at the first sync, critical at the third in a row. Between syncs the last finding remains. No history is
    needed, and no threshold: a sync copies, so that what was compared is equal or the sync is broken.
    """

    name: ClassVar[str] = "weights_differ"
    reads: ClassVar[tuple[str, ...]] = (DIFFER,)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = ((DIFFER,),)
    families: ClassVar[tuple[str, ...]] = (DIFFER,)

    def __init__(self) -> None:
        super().__init__()
        self._equal: int | None = None
        self._since: int | None = None
        self._syncs = 0
        self._newest: Finding | None = None

    def measured(self, step: ClosedStep) -> bool:
        """Return True if weights were compared in this row, or if a difference was found at the last sync."""
        return self._newest is not None or finite(step, DIFFER) is not None

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Return a finding if the comparison in the row ``step`` shows that trainer and rollout engine hold different
        weights.

        A row without a comparison repeats the last finding.
        """
        share = finite(step, DIFFER)
        if share is None:
            newest = self._newest
            still = newest is not None and newest.onset_step <= step.step
            return [replace(newest, step=step.step, attempt=step.attempt, seq=step.seq)] if newest and still else []
        if share <= 0.0:
            self._equal, self._since, self._syncs, self._newest = step.step, None, 0, None
            return []
        if self._since is None or self._since > step.step:
            self._since, self._syncs = step.step, 0
        self._syncs += 1
        self._newest = self._finding(step, share, self._since)
        return [self._newest]

    def _finding(self, step: ClosedStep, share: float, since: int) -> Finding:
        missing, distance = finite(step, MISSING) or 0.0, finite(step, DISTANCE)
        every = members(step, WEIGHTS_PREFIX)
        layers = {name: value for name in every if (value := finite(step, name) or 0.0) > 0}
        worst = sorted(layers, key=lambda name: (-layers[name], name))[:NAMED]
        where = ", ".join(name.removeprefix(WEIGHTS_PREFIX) for name in worst)
        if len(layers) == len(every) > 1:
            where = "every layer"
        more = f" and {len(layers) - NAMED} more layers" if NAMED < len(layers) < len(every) else ""
        what = (
            f"the rollout engine samples without the adapter: it holds the base weights of {missing:.0%} of the "
            "adapted tensors after the sync"
            if missing >= BASE_ONLY
            else f"after the weight sync {share:.0%} of the rollout engine's tensors are not the trainer's"
        )
        text = f"{what}, in {where}{more}" if where else what
        apart = f"; the farthest is {number(distance)} of its norm away" if distance is not None else ""
        equal = "never seen equal" if self._equal is None else f"equal last at step {self._equal}"
        return self.finding(
            step,
            self.name,
            Severity.CRITICAL if self._syncs >= SYNCS else Severity.WARNING,
            f"{text}{apart}; {equal}",
            onset=since,
            metric=DIFFER,
            score=1.0 + share,
            baseline=0.0,
            evidence={
                **rounded({"tensors": share, "compared": finite(step, COMPARED), "distance": distance}),
                **rounded({"adapter_missing": finite(step, MISSING), "syncs": self._syncs, "equal_at": self._equal}),
                "layers": [name.removeprefix(WEIGHTS_PREFIX) for name in worst],
            },
        )
