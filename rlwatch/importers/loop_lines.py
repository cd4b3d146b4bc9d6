"""One line of a loop's console, read: which step it tells, which names and numbers it holds, and how it is written.

Lines of one kind differ in their numbers only. What was found in one is remembered by the text between its numbers, so
that the next of its kind is cut instead of searched.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from rlwatch.importers.base import of_held_out
from rlwatch.importers.console import bars
from rlwatch.importers.lines import LARGEST_STEP
from rlwatch.importers.loop_pairs import (
    STEP_NAMES,
    NamedNumber,
    amount,
    found_in,
    in_table_row,
    is_step,
    lone_pair,
    units_of,
    without_units,
)

_N = r"(?P<n>[1-9]\d{0,2}(?:,\d{3})+(?![\d,]\d)|\d{1,12}(?:\.0{1,6})?)(?![\d.]*[A-Za-z%])(?!\.?\d)"
_OF_TOTAL = r"(?:\s*(?:/|of)\s*(?P<total>\d{1,12}))?"
_STEP = re.compile(
    r"(?<![A-Za-z])(?:global[_ ]?step|step|it|iter(?:ation)?|update|batch|episode|round|rollout)s?"
    rf"(?:[\s:=#\[(]{{1,8}}|_){_N}(?!_){_OF_TOTAL}",
    re.IGNORECASE,
)
_BEFORE_DICT = re.compile(r"\s*\(?(?P<n>\d{1,12})(?P<total>)[:,]?\s+(?=\{\s*['\"])")
"""What ``print(step, metrics)`` puts before a dict."""
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
"""Ways of writing a line that are remembered at a time."""
BAR = "#bar"
AROUND = 12
"""Characters before the step that tell how a line is written."""


class NumberSpan(NamedTuple):
    """Place of a number in a line."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """The step, the metrics and the looks of a line.

    ``step`` is None where it tells none. ``form``: how it is written around the step; ``evaluation``: it says that it
    is of one; ``rank``: the process that printed it, -1 where it does not say; ``left``: names whose numbers have a
    unit, or a spread that was left out.
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
    """Name of the pair that the line holds and nothing besides: of a metric, or a word for a step."""
    written: str = ""
    """The line without its numbers, where it may be one of a block."""
    table: bool = False
    before: str = ""
    """What stands before its first pair, without numbers."""
    bare: bool = False
    """Nothing but pairs, and what separates them, is in it."""


@dataclass(slots=True)
class _Plan:
    """Cuts a line of one kind: the number of each thing among the numbers of the line; -1 for none."""

    pairs: list[tuple[str, int, bool]]
    step: int
    total: int
    epoch: int
    rank: int
    line: ParsedLine


class LineReader:
    """Reads lines; knows again how those were written that it read."""

    def __init__(self) -> None:
        self._plans: dict[tuple[str, ...], _Plan] = {}
        self._united: set[str] = set()
        """Names of what has a unit and so is no metric, also where a line that is cut off hides it."""

    def read(self, text: str) -> ParsedLine | None:
        """The line ``text``, read; None if there is no number in it, or no name."""
        pieces = NUMBERS.split(text)
        if len(pieces) == 1 or not any(map(_LETTER.search, pieces[::2])):
            return None
        plan = self._plans.get(tuple(pieces[::2]))
        if plan is not None and (line := _cut(plan, pieces)) is not None:
            return line
        return self._searched(text, pieces)

    def is_united(self, name: str) -> bool:
        """True if the name was seen with a unit behind its number."""
        return name in self._united

    def _searched(self, text: str, pieces: list[str]) -> ParsedLine:
        units = units_of(text)
        if not units <= self._united:
            self._united |= units
            self._plans.clear()
        told, alone = _told(text)
        lone = lone_pair(text)
        found = {pair.name: pair for pair in found_in(text, told.end() if told else -1) or ([lone] if lone else [])}
        metrics = {name: pair for name, pair in found.items() if name not in self._united and not is_step(name)}
        if told is not None and not alone and any(pair.start < told.start() for pair in metrics.values()):
            told = None
        told_at = _span(told) or _of_pair(text, found) or (_of_bar(text) if metrics else None)
        total = NumberSpan(*told.span("total")) if told is not None and told["total"] else None
        epoch, rank = _EPOCH.search(text), _RANK.search(text)
        first = min((pair.start for pair in metrics.values()), default=len(text))
        spread = tuple(f"{name} ±" for name, pair in metrics.items() if pair.spread)
        line = ParsedLine(
            {name: amount(text[pair.start : pair.end], percent=pair.percent) for name, pair in metrics.items()},
            None if told_at is None else _number(text[told_at.start : told_at.end]),
            int(text[total.start : total.end]) if total else 0,
            int(epoch["n"]) if epoch else None,
            _form(text, told_at) + _joint(text, first, metrics),
            _is_evaluation(text, metrics, first),
            int(rank["n"]) if rank else -1,
            (*sorted(units), *spread),
            lone.name if lone else "",
            pieces[0] if lone else "0".join(pieces[::2]) if told_at and not metrics else "",
            lone is not None and in_table_row(text),
            "" if told_at else NUMBERS.sub("0", text[:first].removesuffix(_name_at(text, first, metrics))),
            told_at is None and _is_bare(text, metrics),
        )
        self._remember(text, pieces, line, list(metrics.values()), (told_at, total, _span(epoch), _span(rank)))
        return line

    def _remember(
        self,
        text: str,
        pieces: list[str],
        line: ParsedLine,
        pairs: list[NamedNumber],
        places: tuple[NumberSpan | None, ...],
    ) -> None:
        """Keep how the line is cut, if each of its parts is one of its numbers and no name holds any."""
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
    """A line of a kind that is known; None if its step is none."""
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


def _told(text: str) -> tuple[re.Match[str] | None, bool]:
    """The part that tells the step, and whether a word does."""
    by_word = _STEP.search(text) or _BEFORE_DICT.match(text)
    return (by_word, True) if by_word else (_COUNTED.search(text) or _BRACKETS.search(text), False)


def _number(text: str) -> int | None:
    """The step that a text says; None if it says none."""
    if text.isdigit() and len(text) <= 12:
        return int(text)
    value = float(text.replace(",", ""))
    return min(int(value), LARGEST_STEP - 1) if value.is_integer() and value >= 0 else None


def _of_pair(text: str, found: dict[str, NamedNumber]) -> NumberSpan | None:
    """The place of a step that is written as the metrics are."""
    for name, pair in found.items():
        value = amount(text[pair.start : pair.end]) if name.lower() in STEP_NAMES else -1.0
        if value.is_integer() and 0 <= value < LARGEST_STEP:
            return NumberSpan(pair.start, pair.end)
    return None


def _of_bar(text: str) -> NumberSpan | None:
    """The place of the step in a progress bar of the trainer's own."""
    for bar in bars(text):
        at = _IN_BAR.search(text, bar.start) if bar.may_count_steps else None
        if at is not None:
            return NumberSpan(*at.span("n"))
    return None


def _span(match: re.Match[str] | None) -> NumberSpan | None:
    return None if match is None else NumberSpan(*match.span("n"))


def _name_at(text: str, first: int, metrics: dict[str, NamedNumber]) -> str:
    """The name, and what joins it, of the pair whose number is at ``first``."""
    name = next((name for name, pair in metrics.items() if pair.start == first), "")
    at = text.rfind(name, 0, first)
    return text[at:first] if name and at >= 0 else ""


def _joint(text: str, first: int, metrics: dict[str, NamedNumber]) -> str:
    """The sign between the first name and its number."""
    name = next((name for name, pair in metrics.items() if pair.start == first), "")
    match = _JOINT.match(_name_at(text, first, metrics).removeprefix(name))
    return match[0].rstrip() if match else ""


def _is_bare(text: str, metrics: dict[str, NamedNumber]) -> bool:
    """True if no word but names of metrics is in a line."""
    rest = without_units(text)
    for name, pair in sorted(metrics.items(), key=lambda item: -item[1].start):
        rest = rest[: pair.start].removesuffix(_name_at(rest, pair.start, {name: pair})) + rest[pair.end :]
    return not any(map(str.isalpha, rest))


def _is_evaluation(text: str, metrics: dict[str, NamedNumber], first: int) -> bool:
    """True if a line says before its first number that it is of an evaluation, unless its names do so themselves."""
    match = _EVALUATION.search(text, 0, first)
    return match is not None and not any(map(of_held_out, metrics))


def _form(text: str, step: NumberSpan | None) -> str:
    """The text around the step, without numbers."""
    if step is None:
        return ""
    if "%|" in text:
        return BAR
    before = NUMBERS.sub("0", text[max(0, step.start - 4 * AROUND) : step.start])
    return f"{before[-AROUND:]}#{text[step.end : step.end + 1]}"
