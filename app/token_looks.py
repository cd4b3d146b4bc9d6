"""What was found of a step, in a word, a shape and a colour: the same in every list (pure)."""

from __future__ import annotations

from .health import AMBER, BLUE, GREY, VERMILLION, Look

NOT_LOCALISED, FAR_OUT_ONLY, NON_FINITE_ONLY = "not localised", "far-out tokens", "non-finite tokens"

LOOKS = {
    "non-finite": Look("✕", VERMILLION),
    "token ratio": Look("◆", AMBER),
    "sequence ratio": Look("▬", AMBER),
    "reward outlier": Look("★", AMBER),
    "layer": Look("▤", BLUE),
    "unexplained": Look("?", GREY),
    NOT_LOCALISED: Look("◌", GREY),
    NON_FINITE_ONLY: Look("✕", GREY),
    FAR_OUT_ONLY: Look("·", GREY),
}
"""Causes as :class:`rlwatch.gradloc.report.Cause` words them, and what else may be said of a step."""


def look(cause: str) -> Look:
    """Shape and colour of a cause, also of one that this version does not know."""
    return LOOKS.get(cause, LOOKS["unexplained"])
