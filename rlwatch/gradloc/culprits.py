"""Tokens to blame, described: their numbers, their class, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlwatch.gradloc.causes import ResponseLevels, StepLevels, cause_of
from rlwatch.gradloc.on_host import HostPass
from rlwatch.gradloc.report import Cause, Culprit, OwnGradient, TokenAt
from rlwatch.gradloc.traced import Trace


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
    places = trace.tokens or ([trace.at] if trace.at is not None else [])
    ours = [at for at in places if any(host.rank == at.rank for host in hosts)]
    found = [describe(hosts, at) for at in ours[:most]]
    return [
        Culprit(token.at, token.sequence, token.token_id, Cause.NON_FINITE, trace.message, numbers=token.numbers)
        for token in found
    ]
