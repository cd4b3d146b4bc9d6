"""verl's threshold strings, read as verl reads them."""

from __future__ import annotations

from dataclasses import dataclass

OPTIONS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)
"""What ``rollout_rs`` may name."""

Threshold = str | float


@dataclass(frozen=True, slots=True)
class Rule:
    """One rejection rule: which option, and the weights or divergences it keeps; ``low`` only for k1."""

    option: str
    low: float | None
    high: float

    @property
    def level(self) -> str:
        """``token``, ``seq_sum``, ``seq_mean`` or ``seq_max``."""
        return self.option.rpartition("_")[0]

    @property
    def estimator(self) -> str:
        """``k1``, ``k2`` or ``k3``."""
        return self.option.rpartition("_")[2]


def weight_bounds(threshold: Threshold) -> tuple[float | None, float]:
    """``rollout_is_threshold``: an upper bound (truncation) or ``"low_high"`` (IcePop). Raises ``ValueError``."""
    low, high = _bounds(threshold, "rollout_is_threshold")
    _check("rollout_is_threshold", threshold, low, high)
    return low, high


def rules(options: str, thresholds: Threshold) -> list[Rule]:
    """``rollout_rs`` and ``rollout_rs_threshold``: comma-separated options, and one threshold for all or one for each.

    Raises ``ValueError`` for an unknown option, a count that does not match, or a threshold that cannot be.
    """
    names = list(dict.fromkeys(part.strip() for part in options.split(",") if part.strip()))
    unknown = [name for name in names if name not in OPTIONS]
    if unknown or not names:
        raise ValueError(f"rollout_rs must name one or more of {', '.join(OPTIONS)}; got {options!r}")
    given = [part.strip() for part in str(thresholds).split(",") if part.strip()]
    if len(given) not in (1, len(names)):
        raise ValueError(f"rollout_rs_threshold needs 1 or {len(names)} values for {options!r}, got {thresholds!r}")
    each = given * len(names) if len(given) == 1 else given
    return [_rule(name, threshold) for name, threshold in zip(names, each, strict=True)]


def _rule(option: str, threshold: str) -> Rule:
    low, high = _bounds(threshold, option)
    if option.endswith("k1"):
        low = 1.0 / high if low is None and high else low
    elif low is not None:
        raise ValueError(f"the threshold of {option} is one upper bound, got {threshold!r}")
    _check(option, threshold, low, high)
    return Rule(option, low, high)


def _bounds(threshold: Threshold, what: str) -> tuple[float | None, float]:
    first, both, second = str(threshold).strip().partition("_")
    try:
        if isinstance(threshold, bool):
            raise ValueError
        return (float(first), float(second)) if both else (None, float(first))
    except ValueError:
        raise ValueError(f'the threshold of {what} must be a number or "low_high", got {threshold!r}') from None


def _check(what: str, threshold: Threshold, low: float | None, high: float) -> None:
    if not high > 0 or not (low is None or 0 < low <= high):
        raise ValueError(f"the threshold of {what} must be above 0 and not reversed, got {threshold!r}")
