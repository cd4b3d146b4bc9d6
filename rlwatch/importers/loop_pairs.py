"""Pairs of a name and a number in a line that a custom loop prints: in text, between bars, in a dict, in a table.

A number may have separators of thousands (``1,000``), a spread (``0.65±0.077``, which is left out) or a change (``0.48
-> 0.49``, of which the new value counts). ``48 %`` is 0.48. A number with any other unit is not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rlwatch.importers.base import NUMBER, of_held_out
from rlwatch.importers.console import bars
from rlwatch.importers.lines import LARGEST_STEP, LONGEST_NAME
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

    ``percent`` is True if a percent sign follows the number, ``spread`` if a standard deviation does (``0.5±0.1``).
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


# Parser of one line that a custom loop prints: its step, its names and numbers, and the form of its text.
#
# Lines of one form differ only in their numbers. The parser remembers where it found names and numbers by the text
# between the numbers. So it can split the next line of that form instead of searching it.

_N = r"(?P<n>[1-9]\d{0,2}(?:,\d{3})+(?![\d,]\d)|\d{1,12}(?:\.0{1,6})?)(?![\d.]*[A-Za-z%])(?!\.?\d)"
_OF_TOTAL = r"(?:\s*(?:/|of)\s*(?P<total>\d{1,12}))?"
_STEP = re.compile(
    r"(?<![A-Za-z])(?:global[_ ]?step|step|it|iter(?:ation)?|update|batch|episode|round|rollout)s?"
    rf"(?:[\s:=#\[(]{{1,8}}|_){_N}(?!_){_OF_TOTAL}",
    re.IGNORECASE,
)
_BEFORE_DICT = re.compile(r"\s*\(?(?P<n>\d{1,12})(?P<total>)[:,]?\s+(?=\{\s*['\"])")
"""Pattern of the step that ``print(step, metrics)`` puts before a dict."""
_COUNTED = re.compile(r"\((?P<n>\d{1,12})\s*/\s*(?P<total>\d{1,12})\)")
_BRACKETS = re.compile(r"\[(?P<n>\d{1,12})\s*/\s*(?P<total>\d{1,12})\]")
_EPOCH = re.compile(r"(?<![A-Za-z])epoch[\s:=#\[(]{0,3}(?P<n>\d{1,9})(?![\d.]*[eE.]\d)", re.IGNORECASE)
_EVALUATION = re.compile(
    r"(?<![\w.])(?:eval(?:uation|uating)?|valid(?:ation)?|val|test|held-?out)(?![\w.])", re.IGNORECASE
)
_RANK = re.compile(r"(?<![A-Za-z])rank[\s:=_]{0,2}(?P<n>\d{1,6})(?!\d)", re.IGNORECASE)
NUMBERS = re.compile(
    r"([-+]?(?:[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?![\d,]\d)|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)"
    r"|(?<![A-Za-z_])[-+]?(?:[nN]a[nN]|[iI]nf(?:inity)?)(?![A-Za-z_]))"
)
_IN_BAR = re.compile(r"%\|[^|]*\| *(?P<n>\d{1,15})/")
_JOINT = re.compile(r"\s*[:=]?")
_DIGIT = re.compile(r"\d")
_LETTER = re.compile(r"[A-Za-z]")
MOST_KINDS = 1000
"""Largest number of line forms that are remembered at a time."""
BAR = "#bar"
AROUND = 12
"""Number of characters before the step that identify the form of a line."""


class NumberSpan(NamedTuple):
    """Start and end index of a number in a line."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """Step, metrics and form of a line.

    Attributes
    ----------
    metrics
        Value of each name.
    step, total, epoch
        Step and epoch, None if the line holds none; total number of steps, 0 if unknown.
    form
        Text around the step, without numbers.
    evaluation
        True if the line names an evaluation.
    rank
        Rank that printed the line; -1 if unknown.
    left
        Names that were left out because their numbers have a unit or a spread.
    """

    metrics: dict[str, float]
    step: int | None = None
    total: int = 0
    epoch: int | None = None
    form: str = ""
    evaluation: bool = False
    rank: int = -1
    left: tuple[str, ...] = ()
    lone: str = ""
    """Name of the only pair in a line without other text: a metric, or a word for a step."""
    written: str = ""
    """The line without its numbers if it may belong to a block; empty otherwise."""
    table: bool = False
    before: str = ""
    """Text before the first pair, without numbers; empty if the line holds a step."""
    bare: bool = False
    """True if the line holds only pairs and separators."""


@dataclass(slots=True)
class _Plan:
    """Plan for cutting lines of one form: the index of each part among the numbers of the line; -1 for none."""

    pairs: list[tuple[str, int, bool]]
    step: int
    total: int
    epoch: int
    rank: int
    line: ParsedLine


class LineReader:
    """Parser of console lines with names and numbers; it remembers the forms of lines that it has parsed, and so is
    faster for similar ones.
    """

    def __init__(self) -> None:
        self._plans: dict[tuple[str, ...], _Plan] = {}
        self._united: set[str] = set()
        """Names seen with a unit, which are no metrics, also in lines that are split by a remembered form."""

    def read(self, text: str) -> ParsedLine | None:
        """Parse a line; return None if it has no number or no name."""
        pieces = NUMBERS.split(text)
        if len(pieces) == 1 or not any(map(_LETTER.search, pieces[::2])):
            return None
        plan = self._plans.get(tuple(pieces[::2]))
        if plan is not None and (line := _cut(plan, pieces)) is not None:
            return line
        return self._searched(text, pieces)

    def is_united(self, name: str) -> bool:
        """Return True if ``name`` was seen with a unit after its number, such as ``1.2 s``."""
        return name in self._united

    def _searched(self, text: str, pieces: list[str]) -> ParsedLine:
        units = units_of(text)
        if not units <= self._united:
            self._united |= units
            self._plans.clear()
        step, by_word = _step_match(text)
        lone = lone_pair(text)
        found = {pair.name: pair for pair in found_in(text, step.end() if step else -1) or ([lone] if lone else [])}
        metrics = {name: pair for name, pair in found.items() if name not in self._united and not is_step(name)}
        if step is not None and not by_word and any(pair.start < step.start() for pair in metrics.values()):
            step = None
        step_at = _span(step) or _of_pair(text, found) or (_of_bar(text) if metrics else None)
        total = NumberSpan(*step.span("total")) if step is not None and step["total"] else None
        epoch, rank = _EPOCH.search(text), _RANK.search(text)
        first = min((pair.start for pair in metrics.values()), default=len(text))
        spread = tuple(f"{name} ±" for name, pair in metrics.items() if pair.spread)
        line = ParsedLine(
            {name: amount(text[pair.start : pair.end], percent=pair.percent) for name, pair in metrics.items()},
            None if step_at is None else _number(text[step_at.start : step_at.end]),
            int(text[total.start : total.end]) if total else 0,
            int(epoch["n"]) if epoch else None,
            _form(text, step_at) + _joint(text, first, metrics),
            _is_evaluation(text, metrics, first),
            int(rank["n"]) if rank else -1,
            (*sorted(units), *spread),
            lone.name if lone else "",
            pieces[0] if lone else "0".join(pieces[::2]) if step_at and not metrics else "",
            lone is not None and in_table_row(text),
            "" if step_at else NUMBERS.sub("0", text[:first].removesuffix(_name_at(text, first, metrics))),
            step_at is None and _is_bare(text, metrics),
        )
        self._remember(text, pieces, line, list(metrics.values()), (step_at, total, _span(epoch), _span(rank)))
        return line

    def _remember(
        self,
        text: str,
        pieces: list[str],
        line: ParsedLine,
        pairs: list[NamedNumber],
        places: tuple[NumberSpan | None, ...],
    ) -> None:
        """Keep the plan for cutting the line if each part is one of its numbers and no name holds a digit."""
        if not (pairs or line.written) or any(map(_DIGIT.search, line.metrics)):
            return
        at = {match.span(): number for number, match in enumerate(NUMBERS.finditer(text))}
        numbers = [at.get((pair.start, pair.end), -1) for pair in pairs]
        others = [-1 if place is None else at.get((place.start, place.end), -2) for place in places]
        if min(numbers, default=0) < 0 or min(others) < -1:
            return
        if len(self._plans) >= MOST_KINDS:
            self._plans.clear()
        cut = [(pair.name, 2 * number + 1, pair.percent) for pair, number in zip(pairs, numbers, strict=True)]
        step, total, epoch, rank = (2 * number + 1 if number >= 0 else -1 for number in others)
        self._plans[tuple(pieces[::2])] = _Plan(cut, step, total, epoch, rank, line)


def _cut(plan: _Plan, pieces: list[str]) -> ParsedLine | None:
    """Return the line, cut by the plan of its form; None if its step is not a step."""
    known = plan.line
    step = _number(pieces[plan.step]) if plan.step > 0 else None
    if plan.step > 0 and step is None:
        return None
    try:
        metrics = {
            name: float(pieces[at]) if not percent else float(pieces[at]) / 100 for name, at, percent in plan.pairs
        }
        total = int(pieces[plan.total]) if plan.total > 0 else 0
        epoch = int(pieces[plan.epoch]) if plan.epoch > 0 else None
        rank = int(pieces[plan.rank]) if plan.rank > 0 else -1
    except ValueError:  # groups of thousands
        return None
    return ParsedLine(
        metrics,
        step,
        total,
        epoch,
        known.form,
        known.evaluation,
        rank,
        known.left,
        known.lone,
        known.written,
        known.table,
        known.before,
        known.bare,
    )


def _step_match(text: str) -> tuple[re.Match[str] | None, bool]:
    """Return the match of the step, and whether a word (``step 3``) or a dict identifies it."""
    by_word = _STEP.search(text) or _BEFORE_DICT.match(text)
    return (by_word, True) if by_word else (_COUNTED.search(text) or _BRACKETS.search(text), False)


def _number(text: str) -> int | None:
    """Return the step that a number denotes; None if it is not a whole number >= 0."""
    if text.isdigit() and len(text) <= 12:
        return int(text)
    value = float(text.replace(",", ""))
    return min(int(value), LARGEST_STEP - 1) if value.is_integer() and value >= 0 else None


def _of_pair(text: str, found: dict[str, NamedNumber]) -> NumberSpan | None:
    """Return the span of a step that is written like a metric."""
    for name, pair in found.items():
        value = amount(text[pair.start : pair.end]) if name.lower() in STEP_NAMES else -1.0
        if value.is_integer() and 0 <= value < LARGEST_STEP:
            return NumberSpan(pair.start, pair.end)
    return None


def _of_bar(text: str) -> NumberSpan | None:
    """Return the span of the step in the trainer's progress bar."""
    for bar in bars(text):
        at = _IN_BAR.search(text, bar.start) if bar.may_count_steps else None
        if at is not None:
            return NumberSpan(*at.span("n"))
    return None


def _span(match: re.Match[str] | None) -> NumberSpan | None:
    return None if match is None else NumberSpan(*match.span("n"))


def _name_at(text: str, first: int, metrics: dict[str, NamedNumber]) -> str:
    """Return the name and the separator of the pair whose number is at ``first``."""
    name = next((name for name, pair in metrics.items() if pair.start == first), "")
    at = text.rfind(name, 0, first)
    return text[at:first] if name and at >= 0 else ""


def _joint(text: str, first: int, metrics: dict[str, NamedNumber]) -> str:
    """Return the sign between the first name and its number."""
    name = next((name for name, pair in metrics.items() if pair.start == first), "")
    match = _JOINT.match(_name_at(text, first, metrics).removeprefix(name))
    return match[0].rstrip() if match else ""


def _is_bare(text: str, metrics: dict[str, NamedNumber]) -> bool:
    """Return True if a line holds no words other than names of metrics."""
    rest = without_units(text)
    for name, pair in sorted(metrics.items(), key=lambda item: -item[1].start):
        rest = rest[: pair.start].removesuffix(_name_at(rest, pair.start, {name: pair})) + rest[pair.end :]
    return not any(map(str.isalpha, rest))


def _is_evaluation(text: str, metrics: dict[str, NamedNumber], first: int) -> bool:
    """Return True if a line names an evaluation before its first number, and its metric names do not."""
    match = _EVALUATION.search(text, 0, first)
    return match is not None and not any(map(of_held_out, metrics))


def _form(text: str, step: NumberSpan | None) -> str:
    """Return the text around the step, without numbers."""
    if step is None:
        return ""
    if "%|" in text:
        return BAR
    before = NUMBERS.sub("0", text[max(0, step.start - 4 * AROUND) : step.start])
    return f"{before[-AROUND:]}#{text[step.end : step.end + 1]}"
