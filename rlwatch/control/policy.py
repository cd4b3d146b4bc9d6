"""When a command must not be obeyed, and the words to say so.

A reset of the reference during a collapse would make the collapsing policy the anchor (measured: it saved
0 of 14 crashing runs), so it is refused unless forced. Nothing can be forced past what is impossible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlwatch.records import Finding, Severity

COLLAPSE_KINDS = frozenset(
    {
        "nonfinite",
        "entropy_collapse",
        "entropy_explosion",
        "mismatch_growth",
        "no_signal",
        "reward_drop",
        "length_explosion",
    }
)
"""Kinds of finding that, while critical, mean the policy is not fit to become a reference."""


@dataclass(frozen=True, slots=True)
class Health:
    """What holds for the run right now. ``collapsing`` is the part that vetoes a reference reset."""

    findings: tuple[Finding, ...] = ()

    @property
    def collapsing(self) -> tuple[Finding, ...]:
        """Critical findings of a collapse kind that hold now."""
        return tuple(f for f in self.findings if f.severity is Severity.CRITICAL and f.kind in COLLAPSE_KINDS)


def veto_reset_reference(health: Health, *, force: bool = False) -> str | None:
    """Why the reference must not be reset now, or None if it may be.

    >>> veto_reset_reference(Health()) is None
    True
    """
    if force or not health.collapsing:
        return None
    return f"refused: {describe(health.collapsing)}; a reset now would make the collapsing policy the anchor. " + (
        "Roll back to a checkpoint before the onset instead, or send the command again with force."
    )


def describe(findings: Sequence[Finding]) -> str:
    """The findings in a few words: ``entropy_collapse since step 120``."""
    return ", ".join(f"{f.kind} since step {f.onset_step}" for f in findings)
