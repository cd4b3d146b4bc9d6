"""Pairs of a name and a number in a line that nobody's trainer prints: in text, between bars, in a dict, in a table."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlwatch.importers.base import NUMBER, number
from rlwatch.importers.lines import LONGEST_NAME
from rlwatch.metrics import resolve, unjudged

_WORDS = r"[A-Za-z_][\w/.@-]*(?: [A-Za-z_][\w/.@-]*){0,3}"
_NAME = rf"(?<![\w'\"/.])(?P<name>{_WORDS})\s?(?P<by>[:=]\s{{0,3}})"
_PAIR = re.compile(rf"{_NAME}(?P<value>{NUMBER})(?=$|[\s,;|)\]}}])")
_WITH_UNIT = re.compile(rf"{_NAME}{NUMBER}(?![eE][-+]?\d)[A-Za-z%]")
_SPACED = re.compile(
    rf"(?:^|[|,;:>\])])\s{{0,3}}(?P<name>{_WORDS})\s{{1,8}}(?P<value>{NUMBER})(?=\s{{0,8}}(?:$|[|,;]))"
)
_LONE = re.compile(rf"\s*(?:[-*•>]\s)?\s*(?P<name>{_WORDS})\s*[:=]\s*(?P<value>{NUMBER})\s*,?\s*")
_IN_DICT = re.compile(
    r"(?P<quote>['\"])(?P<key>[\w/.@ -]{1,200})(?P=quote)\s{0,3}:\s{0,3}"
    rf"(?:(?P<open>\{{)|(?P<value>(?:[A-Za-z_][\w.]{{0,40}}\()?{NUMBER}\)?)(?=\s{{0,3}}[,}}]))|(?P<close>\}})"
)
_BARS = re.compile(r"[|│┃]")
STEP_NAMES = frozenset(
    {"step", "steps", "global_step", "global step", "iter", "iteration", "update", "batch", "episode", "epoch"}
)
DEEPEST = 8


def is_step(name: str) -> bool:
    """True if the name is a word for a step, also behind what a logger puts before a message.

    >>> is_step("Step"), is_step("trainer step"), is_step("step_time")
    (True, True, False)
    """
    name = name.lower()
    plain = name in STEP_NAMES or name.rpartition(" ")[2] in STEP_NAMES
    return plain and resolve(name) is None


def pairs_of(text: str) -> dict[str, float]:
    """The names and numbers of a line, with that of its step where it is written as the others are.

    A printed dict counts if it tells its step: others are of an answer, or of an evaluation.

    >>> pairs_of("Epoch:[1/1](2/500), Reward: 0.30, Avg Len: 176, epoch_time: 9.0min")
    {'Reward': 0.3, 'Avg Len': 176.0}
    >>> pairs_of("INFO trainer loss=-0.5 entropy=nan"), pairs_of("step 3 | reward 0.5 | kl 0.01")
    ({'loss': -0.5, 'entropy': nan}, {'step': 3.0, 'reward': 0.5, 'kl': 0.01})
    >>> pairs_of("{'iter': 3, 'train': {'reward': 0.5, 'kl': np.float64(0.01)}, 'lr': 1e-6}")
    {'iter': 3.0, 'train/reward': 0.5, 'train/kl': 0.01, 'lr': 1e-06}
    """
    if "{" in text and ("'" in text or '"' in text):
        nested = dict(_in_dict(text))
        if any(name.lower() in STEP_NAMES for name in nested):
            return nested
    found: dict[str, float] = {}
    if "=" in text or ":" in text:
        for match in _PAIR.finditer(text):
            name = match["name"]
            if not found and " " in name and match["by"] == "=":
                name = _without_logger(name)
            if len(name) <= LONGEST_NAME:
                found[name] = float(match["value"])
    if len(found) < 2 and _BARS.search(text.replace(",", "|")):
        spaced = {match["name"]: float(match["value"]) for match in _SPACED.finditer(text)}
        found = spaced if len(spaced) > max(1, len(found)) else found
    return found


def _without_logger(name: str) -> str:
    """The last word of a name that only the words of a logger before it make unknown, as in ``trainer reward=0.5``."""
    last = name.rpartition(" ")[2]
    known = resolve(name) is None and not unjudged(name) and (resolve(last) is not None or last.lower() in STEP_NAMES)
    return last if known else name


def _in_dict(text: str) -> Iterator[tuple[str, float]]:
    """The numbers of a printed dict by their way: ``train/reward``."""
    way: list[str] = []
    for match in _IN_DICT.finditer(text):
        if match["open"]:
            way.append(match["key"])
            if len(way) > DEEPEST:
                return
        elif match["close"]:
            if way:
                way.pop()
        elif (value := number(match["value"])) is not None:
            yield "/".join((*way, match["key"])), value


def lone_pair(text: str) -> tuple[str, float] | None:
    """The name and the number of a line that holds nothing else, or of a table's row; None if there is no such.

    >>> lone_pair("  mean reward: 0.5"), lone_pair("| entropy    | 1.25  |"), lone_pair("took 3 s")
    (('mean reward', 0.5), ('entropy', 1.25), None)
    """
    if _BARS.search(text):
        cells = [cell.strip() for cell in _BARS.split(text) if cell.strip()]
        value = number(cells[1]) if len(cells) == 2 else None
        return None if value is None or not re.fullmatch(_WORDS, cells[0]) else (cells[0], value)
    match = _LONE.fullmatch(text)
    return None if match is None else (match["name"], float(match["value"]))


def in_table_row(text: str) -> bool:
    """True if a pair that is alone in its line is a row of a table, where the step need not come first."""
    return _BARS.search(text) is not None


def units_of(text: str) -> set[str]:
    """Names in a line whose numbers have a unit, and so are none of a metric."""
    match = _WITH_UNIT.search(text) if "=" in text or ":" in text else None
    return set() if match is None else {match["name"]}
