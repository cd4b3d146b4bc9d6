"""Where a correction of the mismatch would cut: needed to say how much it would cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from rlwatch.errors import ConfigError

Band = tuple[float, float]
"""Lowest and highest weight that is kept."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Of weights trainer/rollout, all unitless and > 0. Raises ``ConfigError`` if one is not, or a band is reversed.

    Parameters
    ----------
    cap
        Largest weight of truncated importance sampling; 2 as in https://fengyao.notion.site/off-policy-rl.
    token
        IcePop keeps the tokens whose weight lies in it; [.5, 5] as in arXiv 2510.18855.
    sequence
        Sequence rejection keeps the responses whose product of weights lies in it; [.5, 2] as verl's preset.
    geometric
        The same of the geometric mean of a response's weights; [.999, 1.001] as verl's preset.
    """

    cap: float = 2.0
    token: Band = (0.5, 5.0)
    sequence: Band = (0.5, 2.0)
    geometric: Band = (0.999, 1.001)

    def __post_init__(self) -> None:
        if not self.cap > 0:
            raise ConfigError(f"cap must be above 0, got {self.cap}")
        for name in ("token", "sequence", "geometric"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ConfigError(f"{name} must be (low, high) with 0 < low <= high, got {(low, high)}")

    def capped_as(self, truncation: float | None) -> Self:
        """With the cap of the run's own loss, where it has one."""
        return self if truncation is None else replace(self, cap=truncation)


USUAL = Thresholds()
