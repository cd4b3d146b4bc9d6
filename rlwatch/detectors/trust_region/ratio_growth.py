"""Detect that importance ratios of responses spread with their length: long responses are clipped or dominate."""

from __future__ import annotations

import math
from typing import ClassVar

from rlwatch.detectors.base import Stretch, finite, rounded
from rlwatch.detectors.rise import Rise, RiseDetector, RiseLimit
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Window
from rlwatch.wording import number

NOTABLE = 0.5
"""Variance of a mean response's log-ratio, nats^2: the effective sample size is exp(-0.5) = 0.61 there."""
FACTOR = 4.0
"""Factor over the growth at the start."""
LENGTH = 1000.0
"""Tokens of a mean response that are assumed if no length is logged."""
METRIC = "ratio/log_var_growth"


class RatioGrowth(RiseDetector):
    """Detector of a log-ratio whose variance over responses grows with their length, weighted by the mean length.

    Independent tokens of deviation s give s^2 per token, and then ESS = exp(-s^2 T) over responses of T tokens.
    """

    name: ClassVar[str] = "ratio_growth"
    limits: ClassVar[tuple[RiseLimit, ...]] = (RiseLimit(METRIC, NOTABLE / LENGTH, FACTOR),)

    def __init__(self) -> None:
        super().__init__()
        self._lengths = Window(rows=10, steps=10)

    def listen(self, step: ClosedStep) -> None:
        """Read the mean length of responses from the row ``step``."""
        length = finite(step, "len/mean")
        if length is not None and length > 0.0:
            self._lengths.update(step.step, length)

    def listen_over(self, rows: Stretch) -> bool:
        """Read the mean lengths of all ``rows`` at once."""
        lengths = rows.column("len/mean")
        if lengths and min(lengths) > 0.0:
            self._lengths.extend(rows.steps, lengths)
            return True
        return not lengths

    @property
    def length(self) -> float:
        """Mean length of responses over the last rows, in tokens."""
        return self._lengths.get() or LENGTH

    def read(self, step: ClosedStep, limit: RiseLimit) -> float | None:
        """Return the growth of the log-ratio's variance per token in the row ``step``; None if not measured.

        ``limit``: the limit of this metric. A negative value is sampling noise and counts as 0.
        """
        value = finite(step, limit.metric)
        return None if value is None else max(value, 0.0)

    def floor(self, limit: RiseLimit) -> float:  # noqa: ARG002
        """Return the growth per token, in nats^2, at which the ratios of responses of the present mean length spread
        notably.

        ``limit``: the limit of the metric, whose own floor this one replaces.
        """
        return NOTABLE / self.length

    def report(self, step: ClosedStep, rise: Rise) -> Finding:
        """Return the finding at the row ``step``: the spread of the ratio of a response of mean length.

        ``rise``: the course of the variance per token.
        """
        growth = rise.level or 0.0
        spread = growth * self.length
        return self.finding(
            step,
            "ratio_length_growth",
            Severity.WARNING,
            f"the log-ratio of a response spreads by {number(growth)} nats^2 a token: at the mean length of "
            f"{number(self.length)} tokens the effective sample size of responses is {number(math.exp(-spread))} "
            f"(at the start the growth was {number(rise.began or 0.0)})",
            onset=rise.since,
            metric=METRIC,
            score=rise.score,
            baseline=rise.began,
            evidence=rounded({**rise.evidence(), "length": self.length, "variance": spread}),
        )
