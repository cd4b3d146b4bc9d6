"""Suspects: settings that changed before a failure began, ranked by how much such a change is known to hurt, and when.

A weight of 1 is a change that is known to break runs by itself (``harm`` in ``knobs.toml``); its square weighs 2. A
change that came late, was over, or went in the harmless direction weighs less. The weight of an inferred change is the
value that its footprint had on one half of the corpus's recipes (``benchmarks/causes.py``).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from itertools import pairwise

from rlwatch import catalogue
from rlwatch.catalogue import Knob
from rlwatch.diagnosis.signs import Sign, failure_onset
from rlwatch.diagnosis.turns import ChangeSource, KnobChange, standing
from rlwatch.errors import ConfigError
from rlwatch.records import JSON, Event

LEAST = 0.3
"""Weight from which on a changed setting is a suspect."""
SOME = 0.5
"""Weight from which on a changed setting is a plausible cause."""
MOST = 3.0
"""Largest weight: beyond the cube of the harmful factor, all changes are equally bad."""
ODD = 2.5
"""Weight of a setting that became NaN, or changed its sign."""
FROM_NOTHING, TO_NOTHING = 1.5, 0.2
"""Weights of a term that was switched on, and of one that was switched off."""
OPTION = 1.2
"""Weight of an option that changed at a resume without a number for its size."""
WARMING = 0.5
"""Weight of a learning rate during its warm-up."""
HARMLESS = 0.4
"""Largest weight of a change in the direction that is known to help."""
INFERRED: Mapping[str, float] = {
    "entropy_bonus": 1.7, "rollout_engine": 2.0, "data": 1.6, "update_size": 0.6, "environment": 0.6,
}  # fmt: skip
"""Weights of inferred changes; others have 2.2. Importance ratios, for example, grow for many reasons."""
CLEAR = 2.2
GAP_WEIGHT = 0.45
"""Weight of a reward that diverges from the validation score, which overfitting to the training data also causes."""
STANDING = 0.8
"""Weight of a setting that is large from the start, where one of its known effects was found."""
LATER = 60
"""Number of steps after the beginning of the failure from which on a change is unrelated."""
LATE, LATE_INFERRED, TOO_LATE = 0.3, 0.4, 0.1
GAP = 60
"""Number of steps without a new finding that separate an earlier one from the failure."""
OLD = 300
"""Number of steps before the first finding from which on a change weighs half."""
OVER, OVER_STEPS = 0.3, 30
"""Factor on the weight of a setting that was back at its value so many steps before the first finding."""


NO_KNOBS = (ChangeSource.MOVED, ChangeSource.MEASURED)
"""Sources of changes without a changed setting: movements of metrics, and the shape of a gap."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A setting that may have caused the failure, its changes (the heaviest first), and their weight.

    A weight of 1 is a change that is known to break runs by itself.
    """

    knob: Knob
    turns: tuple[KnobChange, ...]
    weight: float

    @property
    def turn(self) -> KnobChange:
        """The change of this setting with the largest weight."""
        return self.turns[0]

    @property
    def inferred(self) -> bool:
        """Return whether the change was inferred from metrics, not logged."""
        return self.turn.source is ChangeSource.INFERRED


@dataclass(frozen=True, slots=True)
class Trouble:
    """The time span of a failure, in steps.

    ``began``: onset of its first finding. ``first``: onset of the first of its most severe findings. ``last``: onset of
    its last finding. ``slack``: error of onsets.
    """

    began: int
    first: int
    last: int
    slack: int


DATED_WITHIN = 8
"""Error in steps of the onset of a failure that builds up: a setting that changed within it is not too late."""


def trouble_of(found: Iterable[Sign], slack: int) -> Trouble | None:
    """Return the time span of the failure: the stretch of findings with the largest weight; None where only remarks
    exist.

    A stretch continues while the next finding is near: some detector always reports something in a run's first hundred
    rows. ``found``: findings, one for each beginning. ``slack``: error of their onsets, in steps.
    """
    stretches: list[list[Sign]] = []
    for sign in sorted((sign for sign in found if sign.bad), key=lambda sign: sign.onset_step):
        if stretches and sign.onset_step <= stretches[-1][-1].onset_step + max(GAP, 4 * slack):
            stretches[-1].append(sign)
        else:
            stretches.append([sign])
    if not stretches:
        return None
    story = max(stretches, key=lambda signs: (max(s.severity.rank for s in signs), sum(s.severity.rank for s in signs)))
    severest = max(sign.severity.rank for sign in story)
    first = failure_onset((sign.entry, sign.onset_step) for sign in story if sign.severity.rank == severest)
    began = story[0].onset_step
    return Trouble(began, began if first is None else first, story[-1].onset_step, max(slack, DATED_WITHIN))


def suspects(turns: Sequence[KnobChange], trouble: Trouble) -> list[Suspect]:
    """Return the changed settings that may have caused the failure, the heaviest first.

    ``turns``: changes during the run. ``trouble``: time span of the failure.
    """
    weighed: dict[str, list[tuple[float, KnobChange]]] = defaultdict(list)
    for turn in _own([turn for turn in turns if turn.source not in NO_KNOBS], trouble):
        weighed[turn.knob].append((weight_of(turn, trouble), turn))
    made = []
    for name, pairs in weighed.items():
        ordered = sorted(pairs, key=lambda pair: (-pair[0], pair[1].step, pair[1].name))
        if ordered[0][0] >= LEAST:
            made.append(Suspect(catalogue.knobs()[name], tuple(turn for _, turn in ordered), ordered[0][0]))
    return sorted(made, key=lambda suspect: (-suspect.weight, suspect.turn.step, suspect.knob.name))


def _own(turns: Sequence[KnobChange], trouble: Trouble) -> list[KnobChange]:
    """Return the changes without those that another setting caused.

    An engine with old weights is far from the trainer; advantages off their centre, or another KL term, move the loss.
    """
    kept = []
    for turn in turns:
        by = {"rollout_engine": ("weight_sync",), "entropy_bonus": ("advantages", "kl_coefficient")}.get(turn.knob, ())
        others = [other.step for other in turns if other.knob in by]
        latest = turn.step + 4 * trouble.slack
        if turn.source is not ChangeSource.INFERRED or not any(step <= latest for step in others):
            kept.append(turn)
    return kept


def weight_of(turn: KnobChange, trouble: Trouble) -> float:
    """Return the weight of one change as a cause of the failure: 1 is known to break runs by itself, and more is worse.

    It depends on the size and direction of the change, and on its distance in steps from the failure.
    """
    if turn.source is ChangeSource.STANDING:
        return STANDING
    if turn.source is ChangeSource.INFERRED:
        weight = GAP_WEIGHT if turn.name.startswith("gap") else INFERRED.get(turn.knob, CLEAR)
    else:
        weight = _size(turn, catalogue.knobs()[turn.knob], trouble.last)
    if turn.step > trouble.first + trouble.slack:
        late = LATE_INFERRED if turn.source is ChangeSource.INFERRED else LATE
        weight *= late if turn.step <= trouble.first + LATER else min(late, TOO_LATE)
    if trouble.first - turn.step >= OLD:
        weight /= 2
    if turn.until is not None and turn.until < trouble.first - OVER_STEPS:
        weight *= OVER
    return weight


def _size(turn: KnobChange, knob: Knob, step: int) -> float:
    """Return how far the setting had changed at ``step``, as a power of the factor that is known to harm."""
    if turn.warming:
        return WARMING
    before, after, factor = turn.before, turn.at(step), turn.factor(step)
    if isinstance(before, str) or isinstance(after, str):
        return OPTION
    if factor is None:
        if not math.isfinite(after) or after < 0:
            return ODD
        return FROM_NOTHING if before == 0 else TO_NOTHING
    size = abs(math.log(factor)) / math.log(knob.harm)
    hurts = factor > 1 if knob.name == "kl_coefficient" or knob.hurts == "up" else factor < 1 or knob.hurts == "both"
    return min(size, MOST if hurts else HARMLESS)


@cache
def knob_of(kind: str) -> str:
    """Return the setting that is usually behind a kind of finding, or the setting of that name; empty
    if none is known.
    """
    named = next((knob.name for knob in catalogue.knobs().values() if kind in knob.usually), "")
    return kind if kind in catalogue.knobs() else named


# Changes that rows do not show: configs that changed between attempts, and commands.

LONGEST = 40
"""Largest number of characters of an option's value."""


def config_turns(configs: Mapping[int, Mapping[str, JSON]], starts: Mapping[int, int]) -> list[KnobChange]:
    """Return options of settings that differ from one attempt to the next, at the first step of the later one.

    Options of the first configuration that are harmful by their size are included.

    Parameters
    ----------
    configs
        Attempt (process of the run) -> its configuration; an attempt without one continued with the one before.
    starts
        Attempt -> its first step.
    """
    given = [(attempt, _flat(config)) for attempt, config in sorted(configs.items()) if config]
    found = []
    for (_, old), (attempt, new) in pairwise(given):
        for option in sorted(old.keys() & new.keys()):
            knob = _knob_with(option)
            if old[option] != new[option] and knob is not None and attempt in starts:
                path = ((starts[attempt], _value(new[option])),)
                found.append(KnobChange(knob, option, starts[attempt], _value(old[option]), path, ChangeSource.CONFIG))
    return [*_standing_options(given, starts), *found]


def _standing_options(
    given: Sequence[tuple[int, Mapping[str, JSON]]], starts: Mapping[int, int]
) -> Iterator[KnobChange]:
    """Yield options of the first configuration that are large by themselves."""
    for attempt, config in given[:1]:
        for knob in (knob for knob in catalogue.knobs().values() if knob.large and attempt in starts):
            for option in sorted(option for option in config if re.search(knob.large["option"], option)):
                value = _value(config[option])
                turn = None if isinstance(value, str) else standing(knob.name, option, starts[attempt], value)
                if turn is not None:
                    yield turn


def _flat(config: Mapping[str, JSON], within: str = "") -> dict[str, JSON]:
    """Return dotted option in lower case -> value."""
    options: dict[str, JSON] = {}
    for name, value in config.items():
        option = f"{within}{name}".lower()
        if isinstance(value, Mapping):
            options |= _flat(value, f"{option}.")
        else:
            options[option] = value
    return options


def _knob_with(option: str) -> str | None:
    known = catalogue.knobs().values()
    return next((knob.name for knob in known if any(pattern.search(option) for pattern in knob.options)), None)


def _value(value: JSON) -> float | str:
    """Return a number, also from text (``"1e-6"``); anything else as text."""
    if isinstance(value, bool) or value is None:
        return str(value)
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)[:LONGEST]


def event_turns(events: Sequence[Event]) -> list[KnobChange]:
    """Return changes of settings that events report: settings that changed during the run, and executed commands."""
    return [*_setting_turns(events), *_command_turns(events)]


def _setting_turns(events: Iterable[Event]) -> Iterator[KnobChange]:
    for event in events:
        option = str(event.body.get("option", "")).lower() if event.kind == "setting" else ""
        knob = _knob_with(option)
        if event.step is not None and knob is not None:
            before, after = _value(event.body.get("before")), _value(event.body.get("after"))
            yield KnobChange(knob, option, event.step, before, ((event.step, after),), ChangeSource.CONFIG)


def _command_turns(events: Iterable[Event]) -> list[KnobChange]:
    known = {command: knob.name for knob in catalogue.knobs().values() for command in knob.commands}
    found = []
    for event in events:
        command = str(event.body.get("command", "")) if event.kind == "command" else ""
        if event.step is not None and command in known:
            args = event.body.get("args")
            given = ", ".join(f"{name} {value}" for name, value in args.items()) if isinstance(args, Mapping) else ""
            text = f"the command {command}{' (' if given else ''}{given}{')' if given else ''}"
            found.append(
                KnobChange(
                    known[command], command, event.step, "", ((event.step, given),), ChangeSource.COMMAND, text=text
                )
            )
    return found


# Advice: the meaning of a kind of finding and the actions against it, with the option names of the trainer.

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
    """Return the names of all kinds of findings that have advice, in alphabetical order."""
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
