"""Culprits of every rank on every rank: what travels is text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rlwatch.gradloc.report import Cause, Culprit, OwnGradient, TokenAt
from rlwatch.gradloc.world import World, gather_plain


def shared(ours: Sequence[Culprit], world: World) -> list[Culprit]:
    """Those of all ranks, by rank, in the order they had there. A collective; NaN and Inf come through."""
    if world.size == 1:
        return list(ours)
    return [_read(body) for theirs in gather_plain(world, [asdict(each) for each in ours]) for body in theirs]


def _read(body: Mapping[str, Any]) -> Culprit:
    own = body["own"]
    changed = {
        "at": TokenAt(**body["at"]),
        "cause": Cause(body["cause"]),
        "own": None if own is None else OwnGradient(**own),
    }
    return Culprit(**{**body, **changed})
