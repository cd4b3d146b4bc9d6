"""When the gradient norm of a step is a spike worth localising."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rlwatch.stats.robust import mad, median, quantile
from rlwatch.stats.state import Stateful

PUBLISHED = 640.0
"""Threshold of a single token in GradLoc's published run (Qwen3-4B, GRPO, token mean)."""
RELEASED = 100.0
"""Default of the same threshold in GradLoc's released code."""
SILENT = 20.0
"""Factor below the upper decile from which a norm tells nothing of the level: batches whose groups mostly agree."""
LASTING = 20
"""Rows of which more than half must lie above the level for a new level to be adopted."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to localise. ``threshold`` is in the unit of the step's norm; None where there was none to compare."""

    fires: bool
    threshold: float | None
    reason: str = ""


class Trigger(Stateful):
    """Compares each step's gradient norm with the run's own level, per token.

    If token gradients are independent noise, the norm of their mean over n tokens falls as 1 / sqrt(n) (the noise
    model of GradLoc, Tencent Hunyuan 2026). So ``norm * sqrt(n)`` stands for the norm of a single token's gradient,
    whatever the batch, and is what the level is learnt of: median and median absolute deviation of its logarithm.
    Norms above the threshold stay out of the level until they are the rule; zero norms (no group with a signal) say
    nothing of it. Plain arithmetic: ranks that are given the same numbers decide alike.

    Parameters
    ----------
    factor
        Least multiple of the level that is a spike, > 1; None: the fixed threshold only.
    deviations
        Least distance from the level in (robust, log) standard deviations, for runs whose norms scatter widely.
    token_threshold
        Fixed threshold T for ``norm * sqrt(n)``, as published (:data:`PUBLISHED`, :data:`RELEASED`); None: none. It
        needs no warm-up.
    window
        Rows the level is learnt of.
    warm_up
        Rows from which there is a level.
    """

    MEMORY: ClassVar[tuple[str, ...]] = ("_level", "_recent")

    def __init__(
        self,
        *,
        factor: float | None = 4.0,
        deviations: float = 5.0,
        token_threshold: float | None = None,
        window: int = 100,
        warm_up: int = 20,
    ) -> None:
        self.factor = factor
        self.deviations = deviations
        self.token_threshold = token_threshold
        self.warm_up = warm_up
        self._level: deque[tuple[int, float]] = deque(maxlen=window)
        self._recent: deque[tuple[int, float, bool]] = deque(maxlen=LASTING)

    def check(self, step: int, norm: float, tokens: int) -> Decision:
        """Judge one optimizer step, then learn of it.

        Several optimizer steps may share a ``step``; a lower one than before (back to a checkpoint) forgets what lay
        after it.

        Parameters
        ----------
        step
            The trainer's global step.
        norm
            Gradient norm of all ranks before clipping, without any loss scale.
        tokens
            Response tokens of the step, all ranks and micro-batches.
        """
        self._forget_after(step)
        if not math.isfinite(norm):
            return Decision(True, self._in_norms(self._limit(), tokens), "non-finite")
        if norm <= 0.0 or tokens <= 0:
            return Decision(False, self._in_norms(self._limit(), tokens))
        value = math.log(norm) + 0.5 * math.log(tokens)
        limit = self._limit()
        decision = self._judge(value, limit, tokens)
        self._learn(step, value, limit is not None and value > limit)
        return decision

    def _judge(self, value: float, own: float | None, tokens: int) -> Decision:
        if own is not None and value > own:
            times = math.exp(own - self._middle())
            return Decision(True, self._in_norms(own, tokens), f"above {times:.3g} times the run's own level")
        fixed = None if self.token_threshold is None else math.log(self.token_threshold)
        if fixed is not None and value > fixed:
            return Decision(True, self._in_norms(fixed, tokens), "above the fixed threshold")
        lowest = min((limit for limit in (own, fixed) if limit is not None), default=None)
        return Decision(False, self._in_norms(lowest, tokens))

    def _limit(self) -> float | None:
        """The run's own threshold as a logarithm, per token; None while it warms up."""
        if self.factor is None or len(self._level) < self.warm_up:
            return None
        told = self._telling()
        return median(told) + max(math.log(self.factor), self.deviations * mad(told))

    def _middle(self) -> float:
        return median(self._telling())

    def _telling(self) -> Sequence[float]:
        values = [value for _, value in self._level]
        least = quantile(values, 0.9) - math.log(SILENT)
        return [value for value in values if value >= least]

    def _learn(self, step: int, value: float, above: bool) -> None:
        self._recent.append((step, value, above))
        if not above:
            self._level.append((step, value))
        elif sum(above for _, _, above in self._recent) > LASTING // 2:
            adopted = [(step, value) for step, value, above in self._recent if above]
            self._level.clear()
            self._level.extend(adopted)
            self._recent.clear()

    def _forget_after(self, step: int) -> None:
        for rows in (self._level, self._recent):
            while rows and rows[-1][0] > step:
                rows.pop()

    @staticmethod
    def _in_norms(limit: float | None, tokens: int) -> float | None:
        return None if limit is None or tokens <= 0 else math.exp(limit - 0.5 * math.log(tokens))
