"""Skipping of the optimizer's step on a batch whose gradient is not finite, or comes mostly from one token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from rlwatch.errors import ConfigError
from rlwatch.gradloc.report import Localisation


def skip_step(of: nn.Module | Optimizer | Iterable[Parameter]) -> None:
    """Remove the gradients, so that the optimizer's next step changes nothing.

    Zero gradients would not do: with those, momentum and weight decay still change the weights, and Adam counts the
    step. With gradients of None, optimizers of torch leave parameter and state unchanged, bit for bit. A learning-rate
    schedule still advances. With a float16 loss scale, call this function after ``scaler.unscale_(optimizer)`` (or a
    trainer's clip): before that, a scaler raises an error if there is no gradient. With several ranks, either all ranks
    must skip or none.
    """
    for parameter in _parameters(of):
        parameter.grad = None


def _parameters(of: nn.Module | Optimizer | Iterable[Parameter]) -> Iterable[Parameter]:
    if isinstance(of, nn.Module):
        return of.parameters()
    if isinstance(of, Optimizer):
        return [parameter for group in of.param_groups for parameter in group["params"]]
    return of


@dataclass(frozen=True, slots=True)
class SkipDecision:
    """Decision of :class:`SkipOnSpike` on one step, with the reason as text."""

    skip: bool
    reason: str


@dataclass(slots=True)
class SkipOnSpike:
    """Policy that decides from a localisation whether to skip the step. Equal localisations give equal decisions.

    >>> from rlwatch.gradloc.report import Localisation
    >>> SkipOnSpike().decide(Localisation(norm=float("nan")), step=7)
    SkipDecision(skip=True, reason='the gradient norm is nan')

    A step whose gradient is not finite is always skipped: it would destroy the weights. A step with a culprit token
    that makes up more than ``share`` of the norm is skipped, unless ``most`` of the last ``within`` steps were already
    skipped for that reason: a run with a culprit in every batch has another problem, and skipping all of its steps
    would hide that. A spike that was not localised, or that comes from no single token, is never skipped.

    Parameters
    ----------
    share
        Share of the gradient norm above which a token is a culprit: the size of contribution / norm, in (0, 1].
    most, within
        Limit: at most ``most`` >= 1 batches with a culprit are skipped in any ``within`` steps.
    skipped
        Number of skipped steps by reason, ``"non-finite"`` and ``"culprit"``; under ``"refused"``, the number of steps
        that were not skipped because of the limit.
    """

    share: float = 0.5
    most: int = 2
    within: int = 100
    skipped: dict[str, int] = field(default_factory=lambda: {"non-finite": 0, "culprit": 0, "refused": 0})
    _recent: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"SkipOnSpike: share must be in (0, 1], got {self.share!r}")
        if not 1 <= self.most <= self.within:
            raise ConfigError(f"SkipOnSpike: need 1 <= most <= within, got {self.most} and {self.within}")

    def decide(self, localisation: Localisation, step: int) -> SkipDecision:
        """Decide whether to skip ``step``, and return the decision. Call it once for each localised step, in order."""
        if not math.isfinite(localisation.norm):
            return self._skip("non-finite", f"the gradient norm is {localisation.norm}")
        shares = [abs(culprit.share) for culprit in localisation.culprits if culprit.share is not None]
        worst = max((share for share in shares if math.isfinite(share)), default=0.0)
        if not worst > self.share:
            return SkipDecision(skip=False, reason=f"no token holds more than {self.share:.0%} of the gradient norm")
        self._recent = [s for s in self._recent if step - self.within < s <= step]
        if len(self._recent) >= self.most:
            self.skipped["refused"] += 1
            return SkipDecision(skip=False, reason=f"{self.most} of the last {self.within} steps were skipped already")
        self._recent.append(step)
        return self._skip("culprit", f"one token holds {worst:.0%} of the gradient norm")

    def _skip(self, kind: str, reason: str) -> SkipDecision:
        self.skipped[kind] += 1
        return SkipDecision(skip=True, reason=reason)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and the steps skipped last, as JSON values, for a checkpoint."""
        return {"recent": list(self._recent), "skipped": dict(self.skipped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        self._recent = [int(step) for step in state["recent"]]
        self.skipped |= {str(kind): int(n) for kind, n in state["skipped"].items()}
