"""Lines of loops of one's own: ``Epoch:[1/1](20/500), Reward: 0.4, KL_ref: 0.01`` and ``step=20 loss=0.5 entropy=1.2``.

No trainer writes them, so a line is one of metrics by what is in it: at least two pairs of a name and a number, one of
which names a metric that rlwatch knows and that is no mere setting. The step is what stands before ``/`` in brackets or
behind a word for it (step, iteration, update, batch); where an epoch is told besides, steps go on across epochs. Lines
without a step are numbered. Pairs are found in text, between bars (``step 3 | reward 0.5``), and in printed dicts, also
nested ones.

A step may also be a **block**: a line that tells it, then a pair a line, or a table ``| reward | 0.5 |`` with a row for
the step. A block ends where the next begins.

This format is the last that is tried: what a trainer prints is read as the trainer's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from rlwatch.importers.base import LineImporter, LineParser, Row, Verdict
from rlwatch.importers.console import bars
from rlwatch.importers.lines import LARGEST_STEP, Segment, Segments, without_prefix
from rlwatch.importers.loop_pairs import STEP_NAMES, in_table_row, is_step, lone_pair, pairs_of, units_of
from rlwatch.metrics import Family, resolve

_OF = re.compile(r"\((?P<n>\d{1,12})\s*/\s*(?P<total>\d{1,12})\)")
_STEP = re.compile(
    r"(?<![A-Za-z])(?:global[_ ]?step|steps?|iter(?:ation)?|update|batch|episode)s?[\s:=#\[(]{1,3}"
    r"(?P<n>\d{1,12})(?![\d.]*[A-Za-z%])(?:\s*/\s*(?P<total>\d{1,12}))?",
    re.IGNORECASE,
)
_EPOCH = re.compile(r"(?<![A-Za-z])epoch[\s:=#\[(]{0,3}(?P<n>\d{1,9})(?![\d.]*[eE.]\d)", re.IGNORECASE)
_SAYING = frozenset({Family.REWARD, Family.EXPLORATION, Family.TRUST_REGION, Family.CRITIC, Family.MISMATCH})
"""Families of metrics that only a reinforcement learner prints."""
_SETTINGS = frozenset({"optim/lr", "policy/kl_coef", "policy/vocab_size", "time/step", "tokens/total", "val/score"})
_RULE = re.compile(r"\s*[-=+|┌┬┐├┼┤└┴┘─━═]{3,}\s*")
_WHOLE = re.compile(r"(?P<n>\d{1,12})(?P<total>)")
LONGEST = 4000
"""Characters of a line of metrics; longer ones are text somebody generated."""
LEAST_PAIRS = 2
LEAST_ROWS = 3
"""Different lines of one kind after which a log is taken for one of these."""
LEAST_UNTOLD = 6
"""The same where they tell no step."""


class LoopConsoleParser(LineParser):
    """Every line of metrics is a row."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._epoch = self._within = self._before = 0
        self._counted = 0
        self.plausible = False
        self._names: set[str] = set()
        self._united: set[str] = set()
        """Names of what has a unit and so is no metric, also where a line that is cut off hides it."""
        self._lines = False
        """True once a line was a row: then none is part of a block."""
        self._open: dict[str, float] = {}
        self._told: tuple[re.Match[str], re.Match[str] | None] | None = None
        self._line = 0
        self._seen: dict[frozenset[str], tuple[int, tuple[float, ...] | None]] = {}
        """Names of a kind of line -> how often it came with something new, and with what last."""

    def feed(self, segment: Segment) -> Iterator[Row]:
        """The row of a line, and that of a block that it ends."""
        if len(segment.text) > LONGEST:
            return
        text = without_prefix(segment.text)
        self._united.update(units_of(text))
        found = pairs_of(text)
        metrics = {name: value for name, value in found.items() if name not in self._united and not is_step(name)}
        told = _OF.search(text) or _STEP.search(text)
        said = next((found[name] for name in found if name.lower() in STEP_NAMES), None)
        if told is None and len(metrics) >= LEAST_PAIRS:
            told = None if said is None else _whole(said)
            told = told or next((_WHOLE.fullmatch(str(bar.n)) for bar in bars(text) if bar.may_count_steps), None)
        if len(metrics) < LEAST_PAIRS and not (told and metrics and self._names.issuperset(metrics)):
            yield from self._block(text, told, segment.line)
            return
        yield from self._closed()
        if any(map(_tells, metrics)):
            self._lines = True
            self._names.update(metrics)
            yield from self._row(metrics, told, _EPOCH.search(text), segment.line)

    def finish(self) -> Iterator[Row]:
        """The row of the block that is open."""
        yield from self._closed()

    def _row(
        self, metrics: dict[str, float], told: re.Match[str] | None, epoch: re.Match[str] | None, line: int
    ) -> Iterator[Row]:
        names = frozenset(metrics)
        step = self._step(told, epoch)
        count, last = self._seen.get(names, (0, None))
        mark = (step if told else 0, *metrics.values())
        self._seen[names] = (count + (mark != last), mark)  # settings are printed again and again, and never change
        many = self._seen[names][0] >= (LEAST_ROWS if told else LEAST_UNTOLD)
        self.plausible = self.plausible or many
        self.recognised = self.recognised or (many and any(map(_of_rl, metrics)))
        yield Row(step, metrics, line)

    def _block(self, text: str, told: re.Match[str] | None, line: int) -> Iterator[Row]:
        """Take a line that is no row of its own; the row of the block that it ends.

        In a log whose rows are lines nothing else is one.
        """
        if self._lines:
            return
        pair = lone_pair(text)
        if pair is None:
            begins = told is not None and not pairs_of(text)
            if begins or _RULE.fullmatch(text):
                yield from self._closed()
            if told is not None and begins:
                self._told = (told, _EPOCH.search(text))
            return
        name, value = pair
        step = _whole(value) if name.lower() in STEP_NAMES else None
        in_table = step is not None and self._told is None and in_table_row(text)
        if name in self._open or (step is not None and not in_table):
            yield from self._closed()
        if step is not None:
            self._told = (step, None)
        elif name not in self._united and not is_step(name):
            self._open[name] = value
            self._line = line

    def _closed(self) -> Iterator[Row]:
        """The row of the open block, if that tells its step and something of learning."""
        metrics, told = self._open, self._told
        self._open, self._told = {}, None
        if told is not None and any(map(_tells, metrics)):
            yield from self._row(metrics, *told, self._line)

    def notes(self) -> tuple[str, ...]:
        """Source of the steps."""
        return ("no line says its step: they are numbered 1, 2, 3...",) if self._counted else ()

    def _step(self, found: re.Match[str] | None, epoch: re.Match[str] | None) -> int:
        if found is None:
            self._counted += 1
            return self._counted
        step = min(int(found["n"]), LARGEST_STEP - 1)
        total = int(found["total"] or 0)
        if epoch is None:
            return step
        now = int(epoch["n"])
        if now > self._epoch and step <= self._within:  # counted anew in each epoch
            self._before += max(total, self._within)
        elif now < self._epoch or step <= self._within:  # another start
            self._before = 0
        self._epoch, self._within = now, step
        return min(self._before + step, LARGEST_STEP - 1)


def _whole(value: float) -> re.Match[str] | None:
    """A step that stands as the value of a name; None if it is none."""
    return _WHOLE.fullmatch(f"{value:.0f}") if value.is_integer() else None


def _tells(name: str) -> bool:
    """True if the name is that of a metric, and not of a setting."""
    reading = resolve(name)
    return reading is not None and reading.metric.name not in _SETTINGS


def _of_rl(name: str) -> bool:
    reading = resolve(name)
    return reading is not None and reading.metric.name not in _SETTINGS and reading.metric.family in _SAYING


class LoopConsole(LineImporter):
    """Console output of a loop of one's own."""

    name: ClassVar[str] = "loop-console"
    expects: ClassVar[str] = "lines 'step: N, name: value, name: value'"
    anywhere: ClassVar[bool] = True
    marks: ClassVar[tuple[bytes, ...]] = (b":", b"=", b"|")
    weight: ClassVar[float] = 0.3
    parser: ClassVar[type[LineParser]] = LoopConsoleParser

    def sniff(self, head: bytes, path: Path) -> Verdict:
        """Sure of lines with a metric of reinforcement learning; hardly of others: warm-ups print a loss, too."""
        sure = super().sniff(head, path)
        if sure.confidence > 0 or not head:
            return sure
        parser, segments = LoopConsoleParser(str(path)), Segments()
        for segment in segments.feed(head) + segments.finish():
            list(parser.feed(segment))
        return Verdict(0.1, "found lines with a loss") if parser.plausible else sure
