"""Detect token ids in training that were not sampled: re-encoded text, rewritten histories, unmasked observations."""

from __future__ import annotations

from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, finite, rounded
from rlwatch.detectors.mismatch.mismatch_growth import shortfall
from rlwatch.detectors.rise import Rise, RiseLimit, SustainedLevel, odds
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.wording import number


def missing(share: float) -> float:
    """Return the odds of not being part of ``share``, as the scale of a limit."""
    return odds(min(shortfall(share), 1.0))


LIMITS = {
    "retokenisation_drift": (
        RiseLimit("text/retok_exact", 0.9, 3.0, missing),
        RiseLimit("text/retok_edit", 0.005, 3.0),
        RiseLimit("text/retok_naive", 0.05, 3.0),
    ),
    "prefix_break": (RiseLimit("text/turn_prefix_kept", 0.98, 3.0, missing),),
}
DESCRIPTIONS = {
    "retokenisation_drift": "ids that are decoded and encoded again differ from the sampled ones ({metric} {level}): "
    "wherever text is re-encoded on its way into training, training uses tokens that were never sampled",
    "prefix_break": "the prompt of a turn no longer begins with the ids of the turn before ({metric} {level}): the "
    "history is rendered or encoded anew, so earlier tokens are not those that were sampled",
}


class Retokenisation(BaseDetector):
    """Detector of token ids that change when text is re-encoded, and of turns that do not continue the ids before.

    Compared with the start: sampled ids need not be canonical, and templates may drop earlier reasoning on purpose. So
    a level from the first row on is information, a later rise is a warning.
    """

    name: ClassVar[str] = "retokenisation"
    reads: ClassVar[tuple[str, ...]] = tuple(limit.metric for limits in LIMITS.values() for limit in limits)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in reads)

    def __init__(self) -> None:
        super().__init__()
        self._rises = {kind: [Rise(limit) for limit in limits] for kind, limits in LIMITS.items()}
        self._standing = {kind: [SustainedLevel(limit) for limit in limits] for kind, limits in LIMITS.items()}

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge both kinds of retokenisation; return for each a finding of a rise, else one of a lasting high level, if
        any.
        """
        found = (self._kind(step, kind) for kind in self.kinds)
        return [finding for finding in found if finding is not None]

    def _kind(self, step: ClosedStep, kind: str) -> Finding | None:
        parts: list[Rise | SustainedLevel] = [*self._rises[kind], *self._standing[kind]]
        for part in parts:
            part.update(step.step, finite(step, part.limit.metric))
        risen = [rise for rise in self._rises[kind] if rise.lasted]
        if risen:
            return self._report(step, kind, max(risen, key=lambda rise: rise.score), Severity.WARNING)
        beyond = [state for state in self._standing[kind] if state.lasted]
        if beyond:
            return self._report(step, kind, max(beyond, key=lambda state: state.score), Severity.INFO)
        return None

    def _report(self, step: ClosedStep, kind: str, what: Rise | SustainedLevel, severity: Severity) -> Finding:
        level, metric = what.level or 0.0, what.limit.metric
        since = "" if severity is Severity.WARNING else "; it was so when the run began"
        extra = {name: finite(step, name) for name in ("text/retok_first", "text/retok_growth")}
        return self.finding(
            step,
            kind,
            severity,
            DESCRIPTIONS[kind].format(metric=metric, level=number(level)) + since,
            onset=what.since,
            metric=metric,
            score=what.score,
            evidence=rounded({metric: level, **extra}),
        )


# Tokens the environment wrote are counted by the loss.

LEAK = RiseLimit("tokens/environment_leak", 1e-3, 0.0)
"""Share of the environment's tokens from which the mask is wrong; it should be exactly 0."""


class MaskLeakage(BaseDetector):
    """Detector of tool and user tokens that the loss counts (mask 1). No share is healthy, so no start is compared
    with.
    """

    name: ClassVar[str] = "mask_leakage"
    reads: ClassVar[tuple[str, ...]] = (LEAK.metric,)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = ((LEAK.metric,),)

    def __init__(self) -> None:
        super().__init__()
        self._leak = SustainedLevel(LEAK, rows=3)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the share of tool and user tokens in the loss over the last rows; return the leak as a finding, if
        there is one.
        """
        self._leak.update(step.step, finite(step, LEAK.metric))
        if not self._leak.lasted:
            return []
        level, share = self._leak.level or 0.0, finite(step, "tokens/environment_frac")
        of_all = "" if share is None else f" ({share:.0%} of all response tokens are theirs)"
        return [
            self.finding(
                step,
                "mask_leakage",
                Severity.WARNING,
                f"{level:.1%} of the tokens that tools or users wrote are counted by the loss{of_all}: the policy is "
                "trained to predict its environment",
                onset=self._leak.since,
                metric=LEAK.metric,
                score=self._leak.score,
                evidence=rounded({"leak": level, "environment": share}),
            )
        ]
