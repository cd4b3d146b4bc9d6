"""Advice: the meaning of a kind of finding and the actions against it, with the option names of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rlwatch import catalogue
from rlwatch.errors import ConfigError
from rlwatch.records import JSON

OWN = "rlwatch"
"""Key of the options that rlwatch itself offers, which are shown for every trainer."""
RESET = "reset-reference"
"""The action that is never advised in a collapse."""


class Strength(StrEnum):
    """Strength of the evidence for an action.

    ``measured``: on paired toy-sized runs of rlwatch; ``published``: in a paper; ``reported``: in issues and logs;
    ``folklore``: common practice.
    """

    MEASURED = "measured"
    PUBLISHED = "published"
    REPORTED = "reported"
    FOLKLORE = "folklore"


@dataclass(frozen=True, slots=True)
class Action:
    """One recommended action against a failure of training.

    Parameters
    ----------
    id, name, what
        Id, short name, and description.
    options
        Trainer (``"trl"``, ``"verl"``, ``"openrlhf"``, or ``"rlwatch"`` for rlwatch's own commands and calls) -> the
        setting to change, with option names in backticks.
    source
        Paper, issue or measurement on which it is based.
    strength
        Strength of the evidence.
    evidence
        Description of what was measured or published, including evidence against the action.
    """

    id: str
    name: str
    what: str
    options: Mapping[str, str]
    source: str
    strength: Strength
    evidence: str = ""

    def to_dict(self) -> dict[str, JSON]:
        """Return the action as plain values for JSON, without its id."""
        return {
            "name": self.name,
            "what": self.what,
            "options": dict(self.options),
            "source": self.source,
            "strength": self.strength.value,
            "evidence": self.evidence,
        }


@dataclass(frozen=True, slots=True)
class Advice:
    """The meaning of one kind of finding (detected problem), and the actions against it, the most useful first."""

    kind: str
    title: str
    meaning: str
    actions: tuple[Action, ...] = field(default_factory=tuple)

    def to_dict(self) -> dict[str, JSON]:
        """Return the advice as plain values for JSON."""
        return {
            "kind": self.kind,
            "title": self.title,
            "meaning": self.meaning,
            "actions": [action.to_dict() for action in self.actions],
        }


def advice(kind: str, source: str = "") -> Advice | None:
    """Return the meaning of a kind of finding and the actions against it; None for a kind that the catalogue lacks.

    Parameters
    ----------
    kind
        ``Finding.kind``, or the name of a setting in the catalogue.
    source
        The trainer (``RunInfo.source``: ``"trl/grpo"``, ``"verl"``, ``"openrlhf"``); only its option names are
        returned. Empty or unknown: the option names of all trainers.

    Raises
    ------
    ConfigError
        If the catalogue refers to an action that it does not describe.

    >>> advice("mismatch_growth", "verl").actions[1].options["verl"].split("`")[1]
    'actor_rollout_ref.actor.optim.lr'
    >>> advice("no_such_kind") is None
    True
    """
    entry: catalogue.FindingKind | catalogue.Knob | None = catalogue.kinds().get(kind) or catalogue.knobs().get(kind)
    if entry is None:
        return None
    meaning = entry.meaning if isinstance(entry, catalogue.FindingKind) else entry.source
    return Advice(kind, entry.title, meaning, tuple(_action(entry, used, source) for used in entry.do))


def kinds() -> tuple[str, ...]:
    """Return every kind of finding with advice, in alphabetical order."""
    return tuple(sorted(catalogue.kinds()))


def _action(entry: catalogue.FindingKind | catalogue.Knob, used: Mapping[str, str], source: str) -> Action:
    """Return an action of the catalogue, with the texts of the kind that uses it where those differ."""
    known = catalogue.actions().get(used["action"])
    if known is None:
        raise ConfigError(f"the catalogue: {entry.name} uses the action {used['action']!r}, which nothing describes")
    table = {**known, **used}
    return Action(
        id=table["action"],
        name=table["name"],
        what=table["what"],
        options=_options(table["options"], source),
        source=table["source"],
        strength=Strength(table["strength"]),
        evidence=table["evidence"],
    )


def _options(options: Mapping[str, str], source: str) -> dict[str, str]:
    """Return the options of ``source``; an exact match (``trl/rloo``) takes precedence over the trainer's (``trl``)."""
    trainer = source.partition("/")[0]
    if trainer not in ("trl", "verl", "openrlhf"):
        return {name: text for name, text in options.items() if "/" not in name}
    chosen = {OWN: options[OWN]} if OWN in options else {}
    text = options.get(source, options.get(trainer))
    return chosen | ({trainer: text} if text is not None else {})
