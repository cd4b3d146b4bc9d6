"""Pairs of a name and a number in a line that a custom loop prints: in text, between bars, in a dict, in a table.

A number may have separators of thousands (``1,000``), a spread (``0.65±0.077``, which is left out) or a change (``0.48
-> 0.49``, of which the new value counts). ``48 %`` is 0.48. A number with any other unit is not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from rlwatch.importers.base import NUMBER
from rlwatch.importers.lines import LONGEST_NAME
from rlwatch.metrics import resolve, unjudged

ANY_NUMBER = rf"(?:[-+]?[1-9]\d{{0,2}}(?:,\d{{3}})+(?:\.\d+)?(?![\d,]\d)|{NUMBER})"
_SPREAD = rf"(?:\s?(?:±|\+/-|\+-)\s?{NUMBER})"
_VALUE = rf"(?:{ANY_NUMBER}\s?(?:->|→|=>)\s?)?(?P<value>{ANY_NUMBER})(?P<spread>{_SPREAD})?(?P<percent>\s?%(?!\|))?"
_OPEN = r"(?P<open>(?:[A-Za-z_][\w.]{0,40}\(|\[))?"
"""Calls and brackets around a number: ``np.float64(0.5)``, ``tensor(0.5, device='cuda:0')``, ``[0.5]``."""
_CLOSE = r"(?(open)(?:,\s?\w{1,20}=[^,()\[\]]{1,40}){0,3}\s?[)\]])"
_WORDS = r"[A-Za-z_][\w/.@-]*(?: [A-Za-z_][\w/.@-]*){0,3}"
_NAME = rf"(?<![\w'\"/.])(?P<name>{_WORDS})\s?(?P<by>[:=]\s{{0,3}})"
_PAIR = re.compile(rf"{_NAME}{_OPEN}{_VALUE}{_CLOSE}(?=$|[\s,;|)\]}}]|\.(?:\s|$))")
_WITH_UNIT = re.compile(rf"{_NAME}{ANY_NUMBER}(?![eE][-+]?\d)[A-Za-z][A-Za-z/%]{{0,12}}")
_UNITED_CELL = re.compile(rf"(?:^|[|,;])\s*{_WORDS}\s{{1,8}}{ANY_NUMBER}\s?[A-Za-z%/]{{1,12}}\s*(?=$|[|,;])")
_SPACED = re.compile(
    rf"(?:^\s{{0,40}}|[|,;:>\])(]\s{{0,3}})(?P<name>{_WORDS})\s{{1,8}}{_VALUE}(?=\s{{0,8}}(?:$|[|,;()]|\.(?:\s|$)))"
)
_BARE_ONE = r"[A-Za-z_][\w/.@-]*\s{1,8}" + re.sub(r"\(\?P<\w+>", "(?:", _VALUE)
_BARE_LINE = re.compile(rf"[\s:|\]),-]{{0,8}}(?:{_BARE_ONE}(?:(?:[\s,;|]|[-–—·•/]\s)+|$))+")
_BARE = re.compile(rf"(?P<name>[A-Za-z_][\w/.@-]*)\s{{1,8}}{_VALUE}(?=[\s,;|]|$)")
_LONE = re.compile(rf"\s*(?:[-*•>]\s)?\s*(?P<name>{_WORDS})\s*(?:[:=]\s*|\s){_VALUE}\s*,?\s*")
_CELL = re.compile(rf"\s*{_VALUE}\s*")
_IN_DICT = re.compile(
    r"(?P<quote>['\"])(?P<key>[\w/.@ -]{1,200})(?P=quote)\s{0,3}:\s{0,3}"
    rf"(?:(?P<nested>\{{)|{_OPEN}(?P<value>{NUMBER}){_CLOSE}(?=\s{{0,3}}[,}}]))|(?P<close>\}})"
)
_OF_DICT = re.compile(rf"(?<![\w'\"/.])(?P<name>{_WORDS})\s?[:=]\s{{0,3}}\{{(?=\s*['\"])")
_DICT_BEHIND = re.compile(r"[\s:,;|\]),-]{0,8}\{(?=\s*['\"])")
_BARS = re.compile(r"[|│┃]")
_SEPARATED = re.compile(r"[|│┃,;:(]")
STEP_NAMES = frozenset(
    {"step", "steps", "global_step", "global step", "iter", "iteration", "update", "batch", "episode", "epoch"}
)
_FILE = re.compile(r"\.(?:py|cc|cpp|cu|c|h|go|rs|js|ts)$")
"""End of the name of a source file, which may precede a line number."""
_LEVEL = re.compile(r"(?:TRACE|DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL) ")
DEEPEST = 8


class NamedNumber(NamedTuple):
    """A name in a line, and the start and end index of its number.

    ``percent`` and ``spread`` are True if a percent sign or a spread follows the number.
    """

    name: str
    start: int
    end: int
    percent: bool = False
    spread: bool = False


def amount(text: str, *, percent: bool = False) -> float:
    """Return the number in the text of a pair; divided by 100 if ``percent``.

    >>> amount("1,000"), amount("48", percent=True)
    (1000.0, 0.48)
    """
    value = float(text.replace(",", "") if "," in text else text)
    return value / 100 if percent else value


def is_step(name: str) -> bool:
    """Return True if ``name`` is a word for a step, also after a prefix that a logger puts before a message.

    >>> is_step("Step"), is_step("trainer step"), is_step("step_time")
    (True, True, False)
    """
    name = name.lower()
    plain = name in STEP_NAMES or name.rpartition(" ")[2] in STEP_NAMES
    return plain and resolve(name) is None


def found_in(text: str, after: int = -1) -> list[NamedNumber]:
    """Return the pairs of a name and a number in a line, including its step if it is written as a pair.

    A printed dict is read if it holds the step, if it follows the step (``step 3 {'reward': 0.5}``), or if it has a
    name in a line with other pairs. Any other dict is taken for an answer or an evaluation.

    Parameters
    ----------
    text
        The line.
    after
        Index at which the text of the step ends; -1 if there is none. If names and numbers alternate from there to the
        end of the line, they are pairs without a sign between them.
    """
    dicts = "{" in text and ("'" in text or '"' in text)
    if dicts:
        nested = list(_in_dict(text))
        if any(pair.name.lower() in STEP_NAMES for pair in nested):
            return nested
        if after >= 0 and (begin := _DICT_BEHIND.match(text, after)):
            return list(_in_dict(text, begin.end()))
    found = list(_signed(text)) if "=" in text or ":" in text else []
    if _SEPARATED.search(text):
        taken = {pair.start for pair in found}
        found += [_pair(match["name"], match) for match in _SPACED.finditer(text) if match.start("value") not in taken]
    if dicts and found:
        for match in _OF_DICT.finditer(text):
            found += [pair._replace(name=f"{match['name']}/{pair.name}") for pair in _in_dict(text, match.end())]
    if after >= 0 and all(pair.start < after for pair in found) and _BARE_LINE.fullmatch(text, after):
        found = [_pair(match["name"], match) for match in _BARE.finditer(text, after)]
    return found


def pairs_of(text: str) -> dict[str, float]:
    """Return the names and numbers in a line.

    >>> pairs_of("Epoch:[1/1](2/500), Reward: 0.30, Avg Len: 1,176, epoch_time: 9.0min, solved: 48 %")
    {'Reward': 0.3, 'Avg Len': 1176.0, 'solved': 0.48}
    >>> pairs_of("INFO trainer loss=-0.5 entropy=nan"), pairs_of("step 3 | reward 0.5±0.1 | kl 0.02 -> 0.01")
    ({'loss': -0.5, 'entropy': nan}, {'step': 3.0, 'reward': 0.5, 'kl': 0.01})
    >>> pairs_of("{'iter': 3, 'train': {'reward': 0.5, 'kl': np.float64(0.01)}, 'lr': 1e-6}")
    {'iter': 3.0, 'train/reward': 0.5, 'train/kl': 0.01, 'lr': 1e-06}
    """
    return {pair.name: amount(text[pair.start : pair.end], percent=pair.percent) for pair in found_in(text)}


def _signed(text: str) -> Iterator[NamedNumber]:
    """Yield the pairs with a sign between name and number."""
    first = True
    for match in _PAIR.finditer(text):
        name = match["name"]
        if first and " " in name and match["by"] == "=":
            name = _without_logger(name)
        if len(name) <= LONGEST_NAME and not _FILE.search(name):
            first = False
            yield _pair(name, match)


def _pair(name: str, match: re.Match[str]) -> NamedNumber:
    return NamedNumber(name, *match.span("value"), match["percent"] is not None, match["spread"] is not None)


def _without_logger(name: str) -> str:
    """Return a name without the words of a logger that make it unknown, as in ``trainer reward=0.5``."""
    last = name.rpartition(" ")[2]
    known = not _LEVEL.match(name) and (resolve(name) is not None or unjudged(name))
    return last if not known and (resolve(last) is not None or last.lower() in STEP_NAMES) else name


def _in_dict(text: str, begin: int = -1) -> Iterator[NamedNumber]:
    """Yield the numbers of a printed dict by their path (``train/reward``); only of the dict at ``begin``, if given."""
    way: list[str] = []
    for match in _IN_DICT.finditer(text, max(0, begin)):
        if match["nested"]:
            way.append(match["key"])
            if len(way) > DEEPEST:
                return
        elif match["close"]:
            if way:
                way.pop()
            elif begin >= 0:
                return
        else:
            yield NamedNumber("/".join((*way, match["key"])), *match.span("value"))


def lone_pair(text: str) -> NamedNumber | None:
    """Return the only pair of a line or of a table's row; None if the line contains anything else.

    >>> line = "  mean reward: 0.5"
    >>> lone_pair(line), lone_pair("| entropy    | 1.25  |").name, lone_pair("took 3 s")
    (NamedNumber(name='mean reward', start=15, end=18, percent=False, spread=False), 'entropy', None)
    """
    if _BARS.search(text):
        cells = [match for match in re.finditer(r"[^|│┃]+", text) if match[0].strip()]
        if len(cells) == 1:
            alone = _LONE.fullmatch(text, *cells[0].span())
            return None if alone is None else _pair(alone["name"], alone)
        name = cells[0][0].strip() if len(cells) == 2 else ""
        value = _CELL.fullmatch(text, *cells[1].span()) if re.fullmatch(_WORDS, name) else None
        return None if value is None else _pair(name, value)
    match = _LONE.fullmatch(text)
    return None if match is None else _pair(match["name"], match)


def in_table_row(text: str) -> bool:
    """Return True if a line with a single pair is a row of a table, in which the step need not come first."""
    return _BARS.search(text) is not None


def without_units(text: str) -> str:
    """Return ``text`` with blanks in place of pairs whose number has a unit; all other text keeps its position.

    >>> without_units("loss=4.5 took=1.25s"), without_units("kl 0.5 | took 1.2 s")
    ('loss=4.5           ', 'kl 0.5             ')
    """
    for pattern in (_WITH_UNIT, _UNITED_CELL):
        text = pattern.sub(lambda match: " " * len(match[0]), text)
    return text


def units_of(text: str) -> set[str]:
    """Return the names in a line whose numbers have a unit, so that they are no metrics."""
    return {match["name"] for match in _WITH_UNIT.finditer(text)} if "=" in text or ":" in text else set()
