"""When a command must not be obeyed, and the words to say so.

A reset of the reference during a collapse would make the collapsing policy the anchor (measured: it saved
0 of 14 crashing runs), so it is refused unless forced. Nothing can be forced past what is impossible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlwatch.catalogue import collapse_kinds
from rlwatch.records import Alert, Finding, Severity

if TYPE_CHECKING:
    from rlwatch.forecast import Forecast

COLLAPSE_KINDS = collapse_kinds()
"""Kinds of finding that, while critical, mean the policy is not fit to become a reference: the catalogue says which."""


@dataclass(frozen=True, slots=True)
class Health:
    """What holds for the run right now, and what fires: an alert outlives a finding that flickers.

    ``forecast``: of the last step judged. It vetoes nothing: what may come is no collapse yet, and a reset or a
    checkpoint before it may be just what is wanted.
    """

    findings: tuple[Finding, ...] = ()
    alerts: tuple[Alert, ...] = ()
    forecast: Forecast | None = None

    @property
    def collapsing(self) -> tuple[Finding | Alert, ...]:
        """What vetoes a reset: critical findings that hold and critical alerts that fire, one of each kind."""
        signs: tuple[Finding | Alert, ...] = (*self.findings, *self.alerts)
        bad = [sign for sign in signs if sign.severity is Severity.CRITICAL and sign.kind in COLLAPSE_KINDS]
        return tuple({sign.kind: sign for sign in reversed(bad)}.values())[::-1]


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


def veto_save_checkpoint(health: Health, *, kept: int | None, force: bool = False) -> str | None:
    """Why no checkpoint should be saved now: the trainer keeps only ``kept`` and would delete an older, good one.

    None if one may be saved; always, where all are kept (``kept`` None).
    """
    if force or kept is None or not health.collapsing:
        return None
    return f"refused: {describe(health.collapsing)}; only {kept} checkpoints are kept, so that a save now could " + (
        "delete the last good one. Copy that first, or send the command again with force."
    )


def veto_set_kl_coef(health: Health, *, old: float, new: float, force: bool = False) -> str | None:
    """Why the KL coefficient must not be lowered now; None if it may be. Raising it is never vetoed."""
    if force or new >= old or not health.collapsing:
        return None
    return f"refused: {describe(health.collapsing)}; a lower KL coefficient ({old:g} -> {new:g}) would free the " + (
        "collapsing policy from its anchor. Send the command again with force if that is meant."
    )


def describe(signs: Sequence[Finding | Alert]) -> str:
    """They in a few words: ``entropy_collapse since step 120``."""
    return ", ".join(f"{f.kind} since step {f.onset_step}" for f in signs)
