"""What localisation said of a step, put beside what detectors find in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from rlwatch.metrics import Family
from rlwatch.records import LOCALISED, Event, Finding

REMEMBERED = 16
"""Localised steps that are kept: a step is judged when the next begins."""
TOLD = ("message", "why_not", "cause", "method", "gap", "complete", "culprits")
"""Parts of the event that a finding repeats."""


class Blame:
    """Adds the culprits of a step to the findings on its gradient."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=REMEMBERED)

    def note(self, event: Event) -> None:
        """Take notice, if it is a localisation."""
        if event.kind == LOCALISED:
            self._events.append(event)

    def told(self, findings: Sequence[Finding]) -> list[Finding]:
        """The findings, those on the gradient of a localised step with its culprits."""
        return [self._with_culprits(finding) for finding in findings]

    def _with_culprits(self, finding: Finding) -> Finding:
        event = next(
            (e for e in reversed(self._events) if (e.step, e.attempt) == (finding.step, finding.attempt)), None
        )
        if event is None or finding.family != Family.OPTIMISATION.value:
            return finding
        said = event.body.get("message") or ""
        localised = {name: event.body[name] for name in TOLD if name in event.body}
        message = f"{finding.message}; {said}" if said else finding.message
        return replace(finding, message=message, evidence={**finding.evidence, "localised": localised})
