"""Culprits of every rank on every rank: what travels is text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rlwatch.gradloc.report import Cause, Culprit, OwnGradient, TokenAt
from rlwatch.gradloc.world import World, gather_bytes


def shared(ours: Sequence[Culprit], world: World) -> list[Culprit]:
    """Those of all ranks, by rank, in the order they had there. A collective; NaN and Inf come through."""
    if world.size == 1:
        return list(ours)
    texts = gather_bytes(world, json.dumps([asdict(culprit) for culprit in ours]).encode())
    return [_read(body) for text in texts for body in json.loads(text)]


def _read(body: Mapping[str, Any]) -> Culprit:
    own = body["own"]
    changed = {
        "at": TokenAt(**body["at"]),
        "cause": Cause(body["cause"]),
        "own": None if own is None else OwnGradient(**own),
    }
    return Culprit(**{**body, **changed})
