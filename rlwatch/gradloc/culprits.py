"""Tokens to blame, described: their numbers, their class, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlwatch.gradloc.causes import ResponseLevels, StepLevels, cause_of
from rlwatch.gradloc.on_host import NUMBERS, HostPass
from rlwatch.gradloc.report import Cause, Culprit, OwnGradient, TokenAt
from rlwatch.gradloc.traced import Trace
from rlwatch.gradloc.world import World

_FIELDS = ("sequence", "token_id", *NUMBERS, "response", "response_rollout")


@dataclass(frozen=True, slots=True)
class Described:
    """What is known of one token, and of the response it is in."""

    at: TokenAt
    sequence: int
    token_id: int | None
    numbers: dict[str, float]
    response: ResponseLevels


def describe(hosts: Sequence[HostPass], at: TokenAt) -> Described:
    """The token at ``at``, of the rank that ``hosts`` are of."""
    host = hosts[at.microbatch]
    return Described(at, host.first_row + at.row, host.token_id(at), host.numbers(at), host.response(at))


def describe_all(hosts: Sequence[HostPass], tokens: Sequence[TokenAt], world: World) -> list[Described]:
    """``tokens`` of all ranks, the same on each: a collective. Each rank describes its own."""
    if world.size == 1:
        return [describe(hosts, at) for at in tokens]
    if not tokens:
        return []
    ours = [_packed(describe(hosts, at) if at.rank == world.rank else None) for at in tokens]
    return [_unpacked(at, row) for at, row in zip(tokens, world.sum(torch.stack(ours)), strict=True)]


def culprit_of(
    token: Described,
    levels: StepLevels,
    *,
    norm: float | None = None,
    contribution: float | None = None,
    own: OwnGradient | None = None,
) -> Culprit:
    """The token with its class; its share is ``contribution / norm`` where both are known."""
    cause, why = cause_of(token.numbers, token.response, levels)
    share = contribution / norm if contribution is not None and norm else None
    found = Culprit(token.at, token.sequence, token.token_id, cause, why, numbers=token.numbers)
    return replace(found, contribution=contribution, share=share, own=own)


def culprits_of_trace(hosts: Sequence[HostPass], trace: Trace, most: int = 8) -> list[Culprit]:
    """The tokens of this rank that a trace names, ``most`` at most; what it found is why."""
    places = list(trace.tokens or ([trace.at] if trace.at is not None else []))[:most]
    found = [describe(hosts, at) for at in places]
    return [
        Culprit(token.at, token.sequence, token.token_id, Cause.NON_FINITE, trace.message, numbers=token.numbers)
        for token in found
    ]


def _packed(token: Described | None) -> Tensor:
    """(2, F), float64: which fields are known, and their values; zeros for a token of another rank."""
    row = torch.zeros(2, len(_FIELDS), dtype=torch.float64)
    if token is None:
        return row
    response = {"response": token.response.log_ratio, "response_rollout": token.response.rollout_log_ratio}
    every = {"sequence": token.sequence, "token_id": token.token_id, **token.numbers, **response}
    for i, name in enumerate(_FIELDS):
        value = every.get(name)
        if value is not None:
            row[0, i], row[1, i] = 1.0, value
    return row


def _unpacked(at: TokenAt, row: Tensor) -> Described:
    known = {name: value for name, there, value in zip(_FIELDS, *row.tolist(), strict=True) if there}
    token, response = known.get("token_id"), ResponseLevels(known.get("response"), known.get("response_rollout"))
    numbers = {name: known[name] for name in NUMBERS if name in known}
    return Described(at, int(known.get("sequence", 0)), None if token is None else int(token), numbers, response)
