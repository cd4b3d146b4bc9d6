"""The trace of the rank that found something, on every rank: what travels is text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rlwatch.gradloc.report import Cost, TokenAt
from rlwatch.gradloc.traced import Kind, Origin, Trace
from rlwatch.gradloc.world import World, gather_plain


def shared_trace(ours: Trace, world: World) -> Trace:
    """That of the first rank that found something; ``ours`` where none did. A collective: all get the same.

    What is counted in it (``broken``, ``chain``, ``id0_frac``, ``cost``) is of that rank.
    """
    if world.size == 1:
        return ours
    every = gather_plain(world, asdict(ours) if ours.found else None)
    said = next((body for body in every if body is not None), None)
    return ours if said is None else _read(said)


def _read(body: Mapping[str, Any]) -> Trace:
    changed = {
        "kind": Kind(body["kind"]),
        "origin": Origin(body["origin"]),
        "at": None if body["at"] is None else TokenAt(**body["at"]),
        "index": tuple(body["index"]),
        "tokens": tuple(TokenAt(**at) for at in body["tokens"]),
        "chain": tuple(body["chain"]),
        "notes": tuple(body["notes"]),
        "cost": Cost(**body["cost"]),
    }
    return Trace(**{**body, **changed})
