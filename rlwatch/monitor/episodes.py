"""From "this holds at every step" to "this began": what is worth telling once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlwatch.records import Finding

QUIET_STEPS = 5


@dataclass(slots=True)
class _Episode:
    rank: int
    quiet: int = 0


class Episodes:
    """Publishes a finding when its condition begins to hold, and again when its severity rises.

    An episode ends after the condition was absent for ``quiet_steps`` closed steps in a row, so a
    condition that flickers is one episode.
    """

    def __init__(self, quiet_steps: int = QUIET_STEPS) -> None:
        self._quiet_steps = quiet_steps
        self._open: dict[tuple[str, str], _Episode] = {}

    def arrival(self, holding: Sequence[Finding]) -> list[Finding]:
        """Findings of a record that just arrived; begins or raises episodes, ends none."""
        return [finding for finding in holding if self._raises(finding)]

    def closed(self, holding: Sequence[Finding]) -> list[Finding]:
        """Findings that hold at a closed step; the ones to publish."""
        published = self.arrival(holding)
        present = {(finding.detector, finding.kind) for finding in holding}
        for key in [key for key in self._open if key not in present]:
            episode = self._open[key]
            episode.quiet += 1
            if episode.quiet >= self._quiet_steps:
                del self._open[key]
        return published

    def _raises(self, finding: Finding) -> bool:
        key = (finding.detector, finding.kind)
        episode = self._open.get(key)
        if episode is None:
            self._open[key] = _Episode(finding.severity.rank)
            return True
        episode.quiet = 0
        if finding.severity.rank > episode.rank:
            episode.rank = finding.severity.rank
            return True
        return False
