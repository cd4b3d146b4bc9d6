"""Who explains whom: chains from the signs that nothing explains down to what they are known to cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlwatch.diagnosis.signs import Sign


@dataclass(frozen=True, slots=True)
class Chain:
    """A sign that nothing before it explains, and what is known to follow from it, in order of onset."""

    root: Sign
    effects: tuple[Sign, ...]


def chains(signs: Sequence[Sign], slack: int) -> list[Chain]:
    """One for each unexplained sign. ``slack``: steps by which an onset may be off.

    Where signs explain each other in a ring (possible within the slack only), the earliest is taken as the root.
    """
    ahead = {sign: [other for other in signs if _explains(sign, other, slack)] for sign in signs}
    explained = {other for followers in ahead.values() for other in followers}
    found = [Chain(sign, _reached(sign, ahead)) for sign in signs if sign not in explained]
    covered = {sign for chain in found for sign in (chain.root, *chain.effects)}
    for sign in sorted(signs, key=lambda sign: (sign.onset_step, sign.entry.symptom, sign.kind)):
        if sign not in covered:
            found.append(Chain(sign, _reached(sign, ahead)))
            covered.update((sign, *found[-1].effects))
    return found


def _explains(cause: Sign, effect: Sign, slack: int) -> bool:
    """Order decides; within the slack, that the one is known to cause the other and not the reverse."""
    if cause == effect or not cause.leads_to(effect, slack):
        return False
    return cause.onset_step < effect.onset_step or not effect.leads_to(cause, slack)


def _reached(root: Sign, ahead: Mapping[Sign, Sequence[Sign]]) -> tuple[Sign, ...]:
    seen: set[Sign] = set()
    waiting = [root]
    while waiting:
        fresh = [sign for sign in ahead[waiting.pop()] if sign not in seen and sign != root]
        seen.update(fresh)
        waiting += fresh
    return tuple(sorted(seen, key=lambda sign: (sign.onset_step, sign.kind)))
