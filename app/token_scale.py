"""What colours a response: a quantity of each token as a place on a scale that colour-blind eyes read too (pure)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .token_rows import Response

ORANGE, GREEN = "#E69F00", "#009E73"
"""Okabe-Ito: orange against the theme's blue for two signs, green for one."""

Level = float | str | None
"""A place from -1 to 1; or ``"nan"``, ``"inf"``, ``"-inf"``; None where nothing was measured."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """Something measured of each token.

    ``signed``: blue below 0, orange above. ``root``: colours follow the square root of its size, so that one huge
    value leaves the others visible.
    """

    name: str
    unit: str = ""
    says: str = ""
    signed: bool = True
    root: bool = True


CONTRIBUTION = Quantity("contribution", "", "what the token adds to the gradient norm")
QUANTITIES = (
    CONTRIBUTION,
    Quantity("log ratio", "nats", "logp now − logp old: the policy moved away from the one that is sampled"),
    Quantity("entropy", "nats", "how undecided the policy was", signed=False, root=False),
    Quantity("mismatch", "nats", "logp old − logp rollout: trainer and sampler disagree"),
    Quantity("advantage", "", "what the token is rewarded with", root=False),
)
BY_NAME = {quantity.name: quantity for quantity in QUANTITIES}


def values(name: str, response: Response) -> np.ndarray | None:
    """The quantity of each token of the response, (N,); None where it was not measured."""
    if name == "log ratio":
        difference = _difference(response, "logp", "old_logp")
        ratio = response.column("ratio")
        with np.errstate(all="ignore"):
            return difference if difference is not None or ratio is None else np.log(ratio)
    if name == "mismatch":
        difference = _difference(response, "old_logp", "rollout_logp")
        return _difference(response, "logp", "rollout_logp") if difference is None else difference
    return response.column(name)


def _difference(response: Response, one: str, other: str) -> np.ndarray | None:
    a, b = response.column(one), response.column(other)
    with np.errstate(invalid="ignore"):
        return None if a is None or b is None else a - b


def measured(response: Response) -> list[str]:
    """Names of the quantities that were measured of this response."""
    return [quantity.name for quantity in QUANTITIES if values(quantity.name, response) is not None]


def limit(found: np.ndarray) -> float:
    """Where the scale ends: the largest finite size; 0 where there is none."""
    finite = np.abs(found[np.isfinite(found)])
    return float(finite.max()) if len(finite) else 0.0


def levels(found: np.ndarray, end: float, quantity: Quantity) -> list[Level]:
    """Each value's place on the scale that ends at ``end``."""
    with np.errstate(invalid="ignore"):
        size = np.minimum(np.abs(found) / (end or 1.0), 1.0)
        places = np.sign(found) * (np.sqrt(size) if quantity.root else size)
    return [_level(value, place) for value, place in zip(found.tolist(), places.tolist(), strict=True)]


def _level(value: float, place: float) -> Level:
    if np.isfinite(value):
        return round(place, 2)
    return "nan" if np.isnan(value) else ("inf" if value > 0 else "-inf")
