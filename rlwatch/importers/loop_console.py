"""Reading of the console output of custom loops: ``Epoch:[1/1](20/500), Reward: 0.4, KL_ref: 0.01`` or ``step=20
loss=0.5``.

Each loop has its own format, so the form of a row is learnt from the log (:mod:`~rlwatch.importers.loop_kinds`). A line
may be a row if it holds pairs of a name and a number, and its step: before ``/`` in brackets, or after a word (step,
iteration, update, batch). If a line also holds an epoch, steps continue across epochs. Lines without a step need two
pairs, one of them a metric that rlwatch knows, and are numbered. Pairs are found in text, between bars (``step 3 |
reward 0.5``), and in printed dicts, also nested ones. Metrics of a line that names an evaluation are called
``eval/...``. If several ranks print, only the rank that printed the first row is read.

A step may also be a **block**: a line with the step, then one pair on each line, or a table ``| reward | 0.5 |`` with a
row for the step. A block ends where the next begins. Only lines that recur in the same form belong to a block.

This format is tried last: output of a known trainer is read by that trainer's own importer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar

from rlwatch.importers.base import OTHER_RANK, FormatMatch, ImportedRow, LineImporter, LineParser
from rlwatch.importers.lines import LARGEST_STEP, Segments, TextLine, without_prefix
from rlwatch.importers.loop_kinds import BELOW, NO_ROW, Kinds, Offer
from rlwatch.importers.loop_pairs import NUMBERS, STEP_NAMES, LineReader, ParsedLine, is_step
from rlwatch.importers.single_records import of_a_step
from rlwatch.metrics import Family, resolve

_RL_FAMILIES = frozenset({Family.REWARD, Family.EXPLORATION, Family.TRUST_REGION, Family.CRITIC, Family.MISMATCH})
"""Families of metrics that only reinforcement learning prints."""
_SETTINGS = frozenset({"optim/lr", "policy/kl_coef", "policy/vocab_size", "time/step", "tokens/total", "val/score"})
_RULE = re.compile(r"\s*[-=+|┌┬┐├┼┤└┴┘─━═]{3,}\s*")
_WORD = re.compile(r"[A-Za-z]{2,}")
LONGEST = 4000
"""Largest number of characters in a line of metrics; longer lines are generated text."""
MOST_WORDS = 4
"""Largest number of words in a line that begins a block."""
EVAL = "eval/"
_BLOCK = "block "
_OF_BLOCK = frozenset({_BLOCK})
"""Placeholder for the names in a block, because it is known only later which of its lines belong to it."""
SAME_START = 16
"""Number of characters in which lines of one logger are alike except for their numbers."""


class LoopConsoleParser(LineParser):
    """Parser of the console output of a custom loop.

    Parameters
    ----------
    path
        The log, for error messages.
    mapped
        Names in the log that the user mapped to metrics.
    """

    def __init__(self, path: str, mapped: frozenset[str] = frozenset()) -> None:
        super().__init__(path)
        self._mapped = mapped
        self._reader = LineReader()
        self._kinds = Kinds(self.skips, self._of_use)
        self._epochs = _Epochs()
        self._block: _Block | None = None
        self._blocks = _Blocks()
        self._rank = -1
        self._row_line = 0
        self._row_step: int | None = None
        self._start = ""
        self._plain: set[str] = set()
        """Forms of lines that are training rows even if they contain a word for an evaluation."""
        self._row_names: frozenset[str] = frozenset()
        self._row_start = ""
        self._left: set[str] = set()

    @property
    def plausible(self) -> bool:
        """Return True once several lines of one form have held rising steps, so that they were accepted as rows."""
        return self._kinds.known

    def feed(self, segment: TextLine) -> Iterator[ImportedRow]:
        """Yield the rows that are complete after the line ``segment``: its own row, or that of the block that it
        ends.
        """
        text = segment.text
        if len(text) > LONGEST:
            return
        text = without_prefix(text)
        line = self._reader.read(text)
        self._start = text[:SAME_START]
        if line is None:
            if self._block is not None and _RULE.fullmatch(text):
                yield from self._closed()
            return
        if line.lone and (line.step is None or line.lone.lower() in STEP_NAMES):
            yield from self._of_block(line, segment.line)
        elif line.metrics:
            yield from self._of_line(line, segment.line)
        elif line.step is not None and line.written:
            yield from self._head(line)

    def finish(self) -> Iterator[ImportedRow]:
        """Yield the row of the open block, and the rows that were held back."""
        yield from self._closed()
        yield from self._noted(self._kinds.finish())

    def notes(self) -> tuple[str, ...]:
        """Return a note for the user if rows had to be numbered because no line holds its step."""
        return ("no line holds its step: rows are numbered 1, 2, 3...",) if self._kinds.counted else ()

    def _of_line(self, line: ParsedLine, number: int) -> Iterator[ImportedRow]:
        """Yield the rows that a line settles, which may be a row or continue one."""
        if line.step is None:
            yield from self._without_step(line, number)
            return
        if self._block is not None and not self._blocks.head:
            yield from self._closed()
        if line.rank >= 0:
            self._rank = line.rank if self._rank < 0 else self._rank
        if line.rank >= 0 and self._rank != line.rank:
            self.skips.add(OTHER_RANK, number)
        else:
            yield from self._offered(line, number)

    def _without_step(self, line: ParsedLine, number: int) -> Iterator[ImportedRow]:
        """Yield the rows that a line without a step settles."""
        names = frozenset(line.metrics)
        has_step = self._kinds.known and self._kinds.step >= 0 and not self._kinds.counted
        if self._block is not None and self._blocks.head:
            self._into(self._block, line, number)
        elif has_step or (self._block is None and self._is_below(line, names, number)):
            yield from self._going_on(line, names, number)
        elif len(names) < 2:
            return
        elif self._block is not None and not self._kinds.known:
            self._into(self._block, line, number)
        else:
            yield from self._offered(line, number)

    @staticmethod
    def _into(block: _Block, line: ParsedLine, number: int) -> None:
        """Take all pairs of a line into the open block."""
        for name, value in line.metrics.items():
            block.take(name, value, line.before + name, number)

    def _offered(self, line: ParsedLine, number: int) -> Iterator[ImportedRow]:
        names = frozenset(line.metrics)
        metrics: Mapping[str, float] = line.metrics
        held_out = line.evaluation and self._kinds.known and line.form not in self._plain
        if held_out:
            metrics = {EVAL + name: value for name, value in metrics.items()}
            names = frozenset(metrics)
        step = None if line.step is None else self._epochs.step(line.step, line.total, line.epoch)
        mark = tuple(metrics.values()) if step is None else None
        before = self._kinds.given
        yield from self._noted(self._kinds.take(Offer(line.form, names, lambda: metrics, step, number, mark)))
        if self._kinds.given > before and not held_out:
            self._plain.add(line.form)
        if self._kinds.given > before or not self._kinds.known:
            self._row_line, self._row_names, self._row_start = number, names, self._start
            self._row_step = step
            self._leave(line.left, number)

    def _going_on(self, line: ParsedLine, names: frozenset[str], number: int) -> Iterator[ImportedRow]:
        """Offer a line with other names, below a row, as the rest of that row."""
        if not self._is_below(line, names, number):
            if len(names) > 1 and any(map(self._counts, names)):
                self.skips.add(NO_ROW, number)
            return
        self._row_line, self._row_names = number, self._row_names | names
        metrics = line.metrics
        mark = tuple(metrics.values())
        yield from self._kinds.take(Offer(BELOW, names, lambda: metrics, self._row_step, number, mark))

    def _is_below(self, line: ParsedLine, names: frozenset[str], number: int) -> bool:
        """True if a line may continue the row above it: it has other names, and is indented or of the same logger."""
        if number != self._row_line + 1 or self._row_step is None or not names.isdisjoint(self._row_names):
            return False
        indented = line.bare and self._start[:1].isspace() and not self._row_start[:1].isspace()
        return indented or (bool(line.before) and _same_start(self._row_start, self._start))

    def _head(self, line: ParsedLine) -> Iterator[ImportedRow]:
        """Begin a block with a line that holds a step and nothing else, unless single lines are rows here."""
        if self._blocks.head not in ("", line.written) or (self._kinds.known and not self._blocks.head):
            return
        if len(_WORD.findall(line.written)) > MOST_WORDS:
            return
        yield from self._closed()
        self._block = _Block(line.written, line)

    def _of_block(self, line: ParsedLine, number: int) -> Iterator[ImportedRow]:
        """Take a pair that is alone in its line as a part of the open block, or as its step."""
        name = line.lone
        below = self._block is None and name in line.metrics and self._is_below(line, frozenset(line.metrics), number)
        if below or (self._kinds.known and not self._blocks.head):
            if below:
                yield from self._going_on(line, frozenset(line.metrics), number)
            return
        block = self._block
        if name.lower() in STEP_NAMES and line.step is not None:
            if name.lower() == "epoch" and block is not None and block.line is not None:
                return
            if block is None or block.line is not None or not line.table:
                yield from self._closed()
                block = self._block = _Block(line.written)
            block.line, block.head = line, line.written
            return
        if name not in line.metrics or is_step(name):
            return
        if block is None:
            block = self._block = _Block("")
        if not block.take(name, line.metrics[name], line.written, number) and block.line is None:
            yield from self._closed()
            self._block = _Block("")
            self._block.take(name, line.metrics[name], line.written, number)

    def _closed(self) -> Iterator[ImportedRow]:
        """Yield the row of the open block if it holds a step and a known metric."""
        block, self._block = self._block, None
        if block is None or block.line is None or not block.values or block.line.step is None:
            return
        names = self._blocks.names(block)
        if not any(map(self._counts, names)):
            return
        line = block.line
        step = self._epochs.step(line.step or 0, line.total, line.epoch)
        offer = Offer(_BLOCK + block.head, _OF_BLOCK, partial(self._blocks.metrics, block), step, block.number)
        known = self._kinds.known
        yield from self._noted(self._kinds.take(offer))
        if self._kinds.known and not known:
            self._blocks.head = block.head

    def _noted(self, rows: Iterator[ImportedRow]) -> Iterator[ImportedRow]:
        for row in rows:
            self.recognised = self.recognised or (self._kinds.known and any(map(self._of_rl, row.metrics)))
            yield row

    def _of_use(self, names: frozenset[str], has_step: bool) -> bool:
        """Return True if lines with these names may be rows.

        Without a step they need a name that only a training has.
        """
        if names == _OF_BLOCK:
            return True
        of_step = has_step or any(map(of_a_step, names)) or not names.isdisjoint(self._mapped)
        return of_step and any(map(self._counts, names))

    def _counts(self, name: str) -> bool:
        """Return True if the name is that of a metric, not of a setting."""
        return name in self._mapped or _is_metric(name)

    def _of_rl(self, name: str) -> bool:
        """Return True for the name of a metric that only reinforcement learning has, or that the user mapped."""
        if name in self._mapped:
            return True
        reading = resolve(name)
        return _is_metric(name) and reading is not None and reading.metric.family in _RL_FAMILIES

    def _leave(self, names: tuple[str, ...], number: int) -> None:
        """Count each name that was left out of the rows once."""
        for name in names:
            if name not in self._left:
                self._left.add(name)
                self.skips.add(f"{name!r} ({'a spread' if name.endswith('±') else 'its number has a unit'})", number)


def _same_start(one: str, other: str) -> bool:
    """Return True if two lines begin with the same logger prefix, apart from numbers."""
    return "0".join(NUMBERS.split(one)[::2])[:8] == "0".join(NUMBERS.split(other)[::2])[:8]


class _Epochs:
    """Turns steps that restart at each epoch into steps of the run."""

    def __init__(self) -> None:
        self._epoch = self._within = self._before = 0

    def step(self, step: int, total: int, epoch: int | None) -> int:
        """Return the step of the run for ``step`` of ``total`` in ``epoch``."""
        if epoch is None:
            return min(step, LARGEST_STEP - 1)
        if epoch > self._epoch and step <= self._within:  # counted anew in each epoch
            self._before += max(total, self._within)
        elif epoch < self._epoch or step <= self._within:  # another start
            self._before = 0
        self._epoch, self._within = epoch, step
        return min(self._before + step, LARGEST_STEP - 1)


class _Block:
    """The lines of one step that is printed as a block."""

    def __init__(self, head: str, line: ParsedLine | None = None) -> None:
        self.head = head
        self.line = line
        """The line that holds the step."""
        self.values: dict[tuple[str, str], float] = {}
        self.number = 0

    def take(self, name: str, value: float, written: str, number: int) -> bool:
        """Take a pair; return False if the block already holds it in the same form."""
        if (name, written) in self.values:
            return False
        self.values[name, written] = value
        self.number = number
        return True


class _Blocks:
    """Form of the lines of blocks in this console: their indentation, and the text around a name.

    A line counts if its form is that of lines whose numbers change and that occur in most blocks.
    """

    def __init__(self) -> None:
        self.head = ""
        """The line that begins a block, without its numbers; empty until it is known."""
        self._first: dict[tuple[str, str], float] = {}
        self._change: set[str] = set()
        self._blocks_with: Counter[str] = Counter()

    def names(self, block: _Block) -> frozenset[str]:
        """Return the names in a block, and learn the forms of its lines."""
        self._blocks_with.update({_style(key) for key in block.values})
        for key, value in block.values.items():
            if self._first.setdefault(key, value) != value:
                self._change.add(_style(key))
        return frozenset(self.metrics(block) if self.head else (name for name, _ in block.values))

    def metrics(self, block: _Block) -> dict[str, float]:
        """Return the metrics in a block."""
        often = max((self._blocks_with[style] for style in self._change), default=0)
        found: dict[str, float] = {}
        for key, value in block.values.items():
            style = _style(key)
            if not self._change or (style in self._change and 2 * self._blocks_with[style] > often):
                found.setdefault(key[0], value)
        return found


def _style(key: tuple[str, str]) -> str:
    """Return the text around the name of a pair."""
    name, written = key
    before, _, after = written.partition(name)
    return f"{before}#{' '.join(after.split())}"


def _is_metric(name: str) -> bool:
    """Return True if the name is that of a known metric, not of a setting."""
    reading = resolve(name)
    return reading is not None and reading.metric.name not in _SETTINGS


class LoopConsole(LineImporter):
    """Importer of the console output of a custom loop.

    Parameters
    ----------
    mapped
        Names in the log that the user mapped to metrics; a console may have no other known ones.
    """

    def __init__(self, mapped: frozenset[str] = frozenset()) -> None:
        self._mapped = mapped

    def reading(self, path: str) -> LoopConsoleParser:
        """Return a new parser of the log at ``path``."""
        return LoopConsoleParser(path, self._mapped)

    name: ClassVar[str] = "loop-console"
    expects: ClassVar[str] = "lines 'step: N, name: value, name: value'"
    anywhere: ClassVar[bool] = True
    weight: ClassVar[float] = 0.3
    parser: ClassVar[type[LineParser]] = LoopConsoleParser

    def sniff(self, head: bytes, path: Path) -> FormatMatch:
        """Return a high confidence for lines with an RL metric, a low one for other rows, because warm-ups print a
        loss, too.

        ``head`` is a piece of the log at ``path``.
        """
        parser, segments = self.reading(str(path)), Segments()
        for segment in segments.feed(head) + segments.finish():
            list(parser.feed(segment))
            if parser.recognised:
                return FormatMatch(self.weight, f"found {self.expects}")
        if parser.plausible:
            return FormatMatch(0.1, "found lines with a loss")
        return FormatMatch(0.0, f"no {self.expects}")
