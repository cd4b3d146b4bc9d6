"""Suspects: knobs that were turned before a failure began, by how much that is known to hurt, and when.

A weight of 1 is a change that is known to break runs by itself (``harm`` in ``knobs.toml``), its square weighs 2. What
came late, was over, or went the other way weighs less; what is only inferred weighs what such a footprint proved to be
worth on one half of the corpus's recipes (``benchmarks/causes.py``).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from rlwatch import catalogue
from rlwatch.catalogue import Knob
from rlwatch.diagnosis.signs import Sign, failure_onset
from rlwatch.diagnosis.turns import ChangeSource, KnobChange, standing
from rlwatch.records import JSON, Event

LEAST = 0.3
"""Weight from which a knob is a suspect."""
SOME = 0.5
"""Weight from which it is a plausible cause."""
MOST = 3.0
"""No change weighs more: beyond the cube of its harm, one is as bad as another."""
ODD = 2.5
"""Weight of a value that turned NaN, or changed its sign."""
FROM_NOTHING, TO_NOTHING = 1.5, 0.2
"""Weights of a term that was switched on, and of one that was switched off."""
OPTION = 1.2
"""Weight of an option that was changed at a resume, where no number says how much."""
WARMING = 0.5
"""Weight of a learning rate on its first rise."""
HARMLESS = 0.4
"""The most a change weighs that went the way that is known to do good."""
INFERRED: Mapping[str, float] = {
    "entropy_bonus": 1.7, "rollout_engine": 2.0, "data": 1.6, "update_size": 0.6, "environment": 0.6,
}  # fmt: skip
"""Weights of footprints; 2.2 of those not named. Ratios go far for many reasons."""
CLEAR = 2.2
GAP_WEIGHT = 0.45
"""Of a reward that parts from the validation score: whatever is learnt of the training data alone parts them too."""
STANDING = 0.8
"""Weight of a value that is large from the start, where what it is known to do was found."""
LATER = 60
"""Steps after the failure began from which a turn is none of its story."""
LATE, LATE_INFERRED, TOO_LATE = 0.3, 0.4, 0.1
GAP = 60
"""Steps without a new sign that keep an earlier one out of the story."""
OLD = 300
"""Steps before the first sign from which a change weighs half."""
OVER, OVER_STEPS = 0.3, 30
"""What the weight is multiplied by where the knob was back at its place so many steps before the first sign."""


NO_KNOBS = (ChangeSource.MOVED, ChangeSource.MEASURED)
"""Of what moved by itself, and of the shape of a gap, nobody turned a knob."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A knob, its turns (the weightiest first), and what they weigh."""

    knob: Knob
    turns: tuple[KnobChange, ...]
    weight: float

    @property
    def turn(self) -> KnobChange:
        """The weightiest."""
        return self.turns[0]

    @property
    def inferred(self) -> bool:
        """True where nobody told of it."""
        return self.turn.told is ChangeSource.INFERRED


@dataclass(frozen=True, slots=True)
class Trouble:
    """A failure as far as its signs go: when the first began, when the severest did, and the last; how far onsets may
    be off.
    """

    began: int
    first: int
    last: int
    slack: int


DATED_WITHIN = 8
"""Steps by which the onset of a failure that builds up may be off: a knob turned within them is not too late."""


def trouble_of(found: Iterable[Sign], slack: int) -> Trouble | None:
    """The stretch of signs that weighs most; None where there are none but remarks.

    A stretch reaches on as long as the next sign is near: of a run's first hundred rows some detector always says
    something.
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
    """Knobs that were turned, the weightiest first."""
    weighed: dict[str, list[tuple[float, KnobChange]]] = defaultdict(list)
    for turn in _own([turn for turn in turns if turn.told not in NO_KNOBS], trouble):
        weighed[turn.knob].append((weight_of(turn, trouble), turn))
    made = []
    for name, pairs in weighed.items():
        ordered = sorted(pairs, key=lambda pair: (-pair[0], pair[1].step, pair[1].name))
        if ordered[0][0] >= LEAST:
            made.append(Suspect(catalogue.knobs()[name], tuple(turn for _, turn in ordered), ordered[0][0]))
    return sorted(made, key=lambda suspect: (-suspect.weight, suspect.turn.step, suspect.knob.name))


def _own(turns: Sequence[KnobChange], trouble: Trouble) -> list[KnobChange]:
    """Without footprints that another knob's turn left: an engine with old weights is far from the trainer, and
    advantages that are off their centre, or another KL term, move the loss.
    """
    kept = []
    for turn in turns:
        by = {"rollout_engine": ("weight_sync",), "entropy_bonus": ("advantages", "kl_coefficient")}.get(turn.knob, ())
        others = [other.step for other in turns if other.knob in by]
        if turn.told is not ChangeSource.INFERRED or not any(step <= turn.step + 4 * trouble.slack for step in others):
            kept.append(turn)
    return kept


def weight_of(turn: KnobChange, trouble: Trouble) -> float:
    """The weight of one turn."""
    if turn.told is ChangeSource.STANDING:
        return STANDING
    if turn.told is ChangeSource.INFERRED:
        weight = GAP_WEIGHT if turn.name.startswith("gap") else INFERRED.get(turn.knob, CLEAR)
    else:
        weight = _size(turn, catalogue.knobs()[turn.knob], trouble.last)
    if turn.step > trouble.first + trouble.slack:
        late = LATE_INFERRED if turn.told is ChangeSource.INFERRED else LATE
        weight *= late if turn.step <= trouble.first + LATER else min(late, TOO_LATE)
    if trouble.first - turn.step >= OLD:
        weight /= 2
    if turn.until is not None and turn.until < trouble.first - OVER_STEPS:
        weight *= OVER
    return weight


def _size(turn: KnobChange, knob: Knob, step: int) -> float:
    """The share of its harm by which the knob had been turned at ``step``, in powers."""
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
    """The knob that is usually behind a kind of finding, or the knob of that name; "" if none is known."""
    named = next((knob.name for knob in catalogue.knobs().values() if kind in knob.usually), "")
    return kind if kind in catalogue.knobs() else named


# Turns that rows do not tell: of configs that changed between attempts, and of commands.

LONGEST = 40
"""Characters of an option's value."""


def config_turns(configs: Mapping[int, Mapping[str, JSON]], starts: Mapping[int, int]) -> list[KnobChange]:
    """Options of knobs that differ from one attempt to the next, at the first step of the later one.

    Parameters
    ----------
    configs
        Attempt -> what it was started with; one that gave nothing went on with what it had.
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
    """Options of the first configuration that are large by themselves."""
    for attempt, config in given[:1]:
        for knob in (knob for knob in catalogue.knobs().values() if knob.large and attempt in starts):
            for option in sorted(option for option in config if re.search(knob.large["option"], option)):
                value = _value(config[option])
                turn = None if isinstance(value, str) else standing(knob.name, option, starts[attempt], value)
                if turn is not None:
                    yield turn


def _flat(config: Mapping[str, JSON], within: str = "") -> dict[str, JSON]:
    """Dotted option -> value."""
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
    """A number, also one that a config holds as text (``"1e-6"``); anything else as text."""
    if isinstance(value, bool) or value is None:
        return str(value)
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)[:LONGEST]


def event_turns(events: Sequence[Event]) -> list[KnobChange]:
    """Settings that changed while the run went on, and commands that turn a knob and were carried out."""
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
            told = ", ".join(f"{name} {value}" for name, value in args.items()) if isinstance(args, Mapping) else ""
            says = f"the command {command}{' (' if told else ''}{told}{')' if told else ''}"
            found.append(
                KnobChange(
                    known[command], command, event.step, "", ((event.step, told),), ChangeSource.COMMAND, says=says
                )
            )
    return found
