"""Detect lazy likelihood displacement: correct responses become less likely while the reward still rises."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, Stretch, finite, rounded
from rlwatch.detectors.context import MEDIAN_ERROR, RunContext
from rlwatch.detectors.rise import Rise, RiseLimit, odds
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Hold, Window, mad
from rlwatch.wording import number


class Likelihood:
    """Mean log-prob (nats/token) of tokens of responses with a positive advantage, compared with its best level."""

    def __init__(self) -> None:
        self._base = Baseline()
        self._now = Window(rows=10, steps=20, least=4)
        self._recent = Window(rows=60, steps=10**9, least=6)
        self._other = Window(rows=10, steps=20, least=4)
        self.best: float | None = None
        self.other_at_best: float | None = None

    def update(self, step: int, logp: float, entropy: float | None) -> None:
        """Read a row's mean log-prob, and its entropy (both nats/token) if that is measured."""
        self._base.update(step, logp)
        self._now.update(step, logp)
        self._recent.update(step, logp)
        if entropy is not None:
            self._other.update(step, entropy)
        now = self._now.get()
        if now is None:
            return
        self.best = now if self.best is None else max(self.best, now)
        # Within three errors of the best, which is a maximum over many rows.
        if self.best - now <= 3.0 * self.error:
            self.other_at_best = self._other.get()

    @property
    def now(self) -> float | None:
        """Median of the mean log-prob over the last rows, nats per token; None if there are too few rows."""
        return self._now.get()

    @property
    def start(self) -> float | None:
        """Median of the mean log-prob over the first rows, nats per token; None if unknown."""
        return self._base.get()

    @property
    def error(self) -> float:
        """Standard error, in nats per token, of the median log-prob of the last rows, estimated from first
        differences.
        """
        jumps = [b - a for a, b in pairwise(self._recent.values)]
        noise = mad(jumps, 0.0) / math.sqrt(2.0) if jumps else 0.0
        return MEDIAN_ERROR * noise / math.sqrt(max(len(self._now), 1))

    @property
    def lost(self) -> float:
        """Distance of the log-prob's level below its best level, nats per token, >= 0."""
        return 0.0 if self.now is None or self.best is None else self.best - self.now

    @property
    def unexplained(self) -> float | None:
        """Part of the loss (nats/token) that the rise of entropy does not explain; None if entropy is not measured.

        A policy that explores more gives all its responses less probability, the correct ones too: that is no
        displacement.
        """
        now, then = self._other.get(), self.other_at_best
        return None if now is None or then is None else self.lost - max(now - then, 0.0)

    def displaced(self, share: float, errors: float = 5.0) -> bool | None:
        """Return True if the level has fallen, mostly unexplained by entropy; None if entropy is not measured.

        ``share``: least part of the best level; ``errors``: least number of standard errors.
        """
        left = self.unexplained
        if left is None:
            return None
        least = max(share * abs(self.best or 0.0), 1.5 * errors * self.error, self.lost / 2.0)
        return self.fallen(share, errors) and left > least

    def fallen(self, share: float, errors: float = 5.0) -> bool:
        """Return True if the mean log-prob fell from its best level by the given ``share`` of that level.

        The fall must also exceed ``errors`` standard errors.
        """
        best = self.best
        return best is not None and self.lost > max(share * abs(best), errors * self.error, 1e-9)


LOST = 0.1
"""Loss, as a share of the best level, that counts if displacement, or a lack of entropy growth, confirms it."""
LOST_ALONE = 0.3
"""Loss, as a share of the best level, that counts if neither displacement nor entropy is measured."""
MOST = RiseLimit("lld/displaced_frac", 0.5, 1.5, odds)
"""Share of correct responses that an update made less likely: more than half of the questions in the published
collapses.
"""
SURGE = 3.0
"""Factor of the gradient norm over the upper quartile of the start that marks the last phase."""
ENTROPY = 2.0
"""Factor of entropy, over its level when the likelihood was best, that marks the last phase."""
STAGNANT = 30
"""Rows of risen reward without any gain of likelihood that mark the first phase."""


class LikelihoodDisplacement(BaseDetector):
    """Detector of the three phases of likelihood displacement (arXiv 2512.04220), reported in ``evidence["phase"]``.

    1: the reward has risen, the likelihood of correct responses has not (information). 2: the likelihood falls while
    the reward does not and gradients are calm: the early warning, 60 to 180 steps before the published collapses. 3:
    gradients or entropy surge in addition: critical.
    """

    name: ClassVar[str] = "likelihood_displacement"
    reads: ClassVar[tuple[str, ...]] = ("lld/logp_positive", "lld/displaced_frac")
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("lld/logp_positive",), ("lld/displaced_frac",))
    shares: ClassVar[tuple[str, ...]] = ("_context",)

    def __init__(self) -> None:
        super().__init__()
        self._context = RunContext()
        self._likelihood = Likelihood()
        self._displaced = Rise(MOST)
        self._share = Window(rows=20, steps=20)
        self._norm = Window(rows=5, steps=5)
        self._norm_base = Baseline()
        self._entropy = Window(rows=5, steps=5)
        self._low = Hold(forgive=2)
        self._falls = Hold(forgive=2)
        self._surges = Hold(forgive=1)
        self._stagnates = Hold(forgive=2)

    def listen(self, step: ClosedStep) -> None:
        """Read mean reward, gradient norm and entropy from the row ``step``."""
        self._context.update(step)
        norm, entropy = finite(step, "optim/grad_norm"), finite(step, "policy/entropy")
        if norm is not None:
            self._norm.update(step.step, abs(norm))
            self._norm_base.update(step.step, abs(norm))
        if entropy is not None:
            self._entropy.update(step.step, entropy)

    def listen_over(self, rows: Stretch) -> bool:
        """Read the gradient norms and entropies of all ``rows`` at once."""
        norms, entropies = list(map(abs, rows.column("optim/grad_norm"))), rows.column("policy/entropy")
        if norms:
            self._norm.extend(rows.steps, norms)
            self._norm_base.extend(rows.steps, norms)
        if entropies:
            self._entropy.extend(rows.steps, entropies)
        return True

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Determine which phase of likelihood displacement the run is in, and return the phase's finding, if any."""
        logp, share = finite(step, "lld/logp_positive"), finite(step, "lld/displaced_frac")
        if logp is not None:
            self._likelihood.update(step.step, logp, finite(step, "policy/entropy"))
        if share is not None:
            self._share.update(step.step, share)
        self._displaced.update(step.step, share)
        self._low.update(step.step, self._likelihood.fallen(LOST / 2.0, errors=2.0))
        self._falls.update(step.step, self._falling())
        holds = self._falls.lasted(5) or self._displaced.lasted
        self._surges.update(step.step, holds and (self._grad_factor >= SURGE or self._entropy_factor >= ENTROPY))
        self._stagnates.update(step.step, self._stagnant())
        if self._surges.lasted(2):
            return [self._finding(step, 3, Severity.CRITICAL)]
        if holds:
            return [self._finding(step, 2, Severity.WARNING)]
        return [self._finding(step, 1, Severity.INFO)] if self._stagnates.lasted(STAGNANT, STAGNANT) else []

    def _falling(self) -> bool:
        """Return whether likelihood has fallen in a way that exploration does not explain."""
        share = self._share.get()
        if share is not None:
            return share > 0.5 and self._likelihood.fallen(LOST)
        displaced = self._likelihood.displaced(LOST)
        return self._likelihood.fallen(LOST_ALONE) if displaced is None else displaced

    def _stagnant(self) -> bool:
        now, start = self._likelihood.now, self._likelihood.start
        if now is None or start is None:
            return False
        return self._context.reward.risen() and now - start < 2.0 * self._likelihood.error

    @property
    def _grad_factor(self) -> float:
        now, then = self._norm.get(), self._norm_base.upper()
        return 0.0 if now is None or not then else now / then

    @property
    def _entropy_factor(self) -> float:
        now, then = self._entropy.get(), self._likelihood.other_at_best
        return 0.0 if now is None or not then else now / then

    def _onset(self, phase: int) -> int | None:
        if phase == 1:
            return self._stagnates.since
        if self._falls.since is None:
            return self._displaced.since
        return self._falls.since if self._low.since is None else min(self._low.since, self._falls.since)

    def _finding(self, step: ClosedStep, phase: int, severity: Severity) -> Finding:
        seen = self._likelihood
        levels = {"logp_positive": seen.now, "logp_best": seen.best, "displaced": self._share.get()}
        return self.finding(
            step,
            "likelihood_displacement",
            severity,
            self._message(phase),
            onset=self._onset(phase),
            metric="lld/logp_positive" if seen.now is not None else "lld/displaced_frac",
            score=max(seen.lost / max(LOST * abs(seen.best or 0.0), 1e-9), self._displaced.score),
            baseline=seen.best,
            evidence={"phase": phase}
            | rounded(levels | {"grad_factor": self._grad_factor, "entropy_factor": self._entropy_factor}),
        )

    def _message(self, phase: int) -> str:
        seen, share = self._likelihood, self._share.get()
        reward = self._context.reward.in_words()
        moved = "" if share is None else f"; {share:.0%} of them became less likely by the updates that reward them"
        if phase == 1:
            return f"correct responses have not become more likely{reward} (phase 1 of likelihood displacement){moved}"
        if seen.now is None or seen.best is None:
            fell = "updates make most correct responses less likely"
        else:
            fell = f"correct responses became less likely, from {number(seen.best)} to {number(seen.now)} nats/token"
        if phase == 2:
            return f"{fell}{reward} (phase 2 of likelihood displacement: collapses followed 60 to 180 steps on){moved}"
        how = f"the gradient norm is {number(self._grad_factor)} times its start"
        if self._grad_factor < SURGE:
            how = f"entropy is {number(self._entropy_factor)} times what it was when they were likeliest"
        return f"{fell}{reward}, and {how} (phase 3 of likelihood displacement: it accelerates){moved}"
