r"""Reading of any text by a regular expression that the user gives.

Its named groups are ``step``, and ``name`` and ``value`` of a metric, which may match several times in a line. Any
other group is a metric of that name. Lines of the same step are one row. Without a group ``step`` each line with a
metric is a row, numbered 1, 2, 3...

>>> lines = pattern_console(r"it (?P<step>\d+) R (?P<reward>\S+)").reading("train.log")
>>> [*lines.feed(TextLine(1, "it 7 R nan")), *lines.finish()]
[ImportedRow(step=7, metrics={'reward': nan}, line=1, run='', ts=0.0, starts=False)]
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from rlwatch.errors import ImportFormatError
from rlwatch.importers.base import FormatMatch, ImportedRow, LineParser, StreamImporter, number, step_of
from rlwatch.importers.lines import TextLine, shown, without_prefix

PREFIX = "pattern:"
"""Prefix of a format name that is followed by a pattern: ``pattern:it (?P<step>...``."""
STEP, NAME, VALUE = "step", "name", "value"
LONGEST = 4000
"""Largest number of characters in a line, because the time of a pattern may grow faster than the line."""


class PatternParser(LineParser):
    """Parser that yields rows (metrics of one step) from the lines in which ``pattern`` is found."""

    def __init__(self, path: str, pattern: re.Pattern[str]) -> None:
        super().__init__(path)
        self._pattern = pattern
        self._numbered = STEP not in pattern.groupindex
        self._step: int | None = None
        self._line = 0
        self._metrics: dict[str, float] = {}
        self._rows = 0

    def feed(self, segment: TextLine) -> Iterator[ImportedRow]:
        """Yield the row that was held back if the line ``segment`` begins another."""
        if len(segment.text) > LONGEST:
            self.skips.add(f"a line of more than {LONGEST:,} characters", segment.line)
            return
        for found in self._pattern.finditer(without_prefix(segment.text)):
            yield from self._take(found.groupdict(), segment.line)
        if self._numbered:
            yield from self.finish()

    def finish(self) -> Iterator[ImportedRow]:
        """Yield the row that was held back until the end of the log."""
        if self._metrics:
            self._rows += 1
            step = self._rows if self._numbered else self._step
            if step is not None:
                yield ImportedRow(step, self._metrics, self._line)
            self._metrics = {}

    def notes(self) -> tuple[str, ...]:
        """Return a note for the user if rows are numbered because the pattern has no group for the step."""
        return ("the pattern has no group 'step': rows are numbered 1, 2, 3...",) if self._numbered else ()

    def _take(self, groups: dict[str, str | None], line: int) -> Iterator[ImportedRow]:
        if (matched := groups.pop(STEP, None)) is not None:
            try:
                step = step_of(matched)
            except ValueError as error:
                self.skips.add(str(error), line)
                return
            if step != self._step:
                yield from self.finish()
                self._step = step
        if NAME in groups:
            groups = {str(groups.pop(NAME)): groups.pop(VALUE), **groups}
        metrics = {name: value for name, text in groups.items() if (value := self._value(name, text, line)) is not None}
        if metrics and self._step is None and not self._numbered:
            self.skips.add("a value before the first step", line)
            return
        if not metrics.keys().isdisjoint(self._metrics):
            yield from self.finish()
        self._line = line
        self._metrics.update(metrics)
        self.recognised = self.recognised or bool(metrics)

    def _value(self, name: str, text: str | None, line: int) -> float | None:
        """Return the number of a group; None if it did not match, or is not a number, which is counted."""
        value = None if text is None else number(text)
        if value is None and text is not None:
            self.skips.add(f"{shown(name)} is not a number", line)
        return value


class PatternConsole(StreamImporter):
    """Importer of any text by the regular expression ``pattern``; never recognised by content."""

    name: ClassVar[str] = "pattern"
    expects: ClassVar[str] = "lines in which the pattern finds a number"
    source: ClassVar[str] = ""
    anywhere: ClassVar[bool] = True
    table: ClassVar[bool] = False

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern

    def sniff(self, head: bytes, path: Path) -> FormatMatch:  # noqa: ARG002
        """Return a confidence of 0, because this format is chosen by ``--pattern`` only."""
        return FormatMatch(0.0, "chosen by --pattern only")

    def reading(self, path: str) -> PatternParser:
        """Return a new parser of the log at ``path``."""
        return PatternParser(path, self._pattern)


def pattern_console(pattern: str) -> PatternConsole:
    """Return the importer for the regular expression ``pattern``.

    Raises ``ImportFormatError`` if it is invalid or has no group for a metric.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ImportFormatError("--pattern", f"is not a regular expression ({error}); got {shown(pattern)}") from None
    groups = compiled.groupindex.keys() - {STEP}
    if not groups:
        problem = (
            "names no metric: give the groups (?P<name>...) and (?P<value>...), or one group for each metric, such as "
            f"(?P<reward>...), and (?P<step>...); got {shown(pattern)}"
        )
        raise ImportFormatError("--pattern", problem)
    if len(groups & {NAME, VALUE}) == 1:
        missing = VALUE if NAME in groups else NAME
        problem = f"has no group (?P<{missing}>...), although (?P<{NAME}>...) and (?P<{VALUE}>...) go together"
        raise ImportFormatError("--pattern", f"{problem}; got {shown(pattern)}")
    return PatternConsole(compiled)
