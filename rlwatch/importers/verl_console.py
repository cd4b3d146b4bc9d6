"""Reading of verl's console output: ``step:12 - actor/entropy:0.31 - actor/grad_norm:np.float64(0.6) - ...``.

Under Ray each line comes after a coloured ``(TaskRunner pid=123)``, between progress bars, and may be joined to one.
numpy 2 prints ``np.float64(...)``. Non-finite values are printed as ``nan``, ``inf``, ``-inf``, and are read as such.
Lines wrapped by a terminal or a document (`` - ``, or the middle of a name, at the start of the next line) are joined.
The second part becomes a further row of the same step, so that no line waits for the next one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from rlwatch.importers.base import NUMBER, ImportedRow, LineImporter, LineParser, step_of
from rlwatch.importers.console import bars
from rlwatch.importers.lines import LONGEST_NAME, TextLine, shown, without_prefix

_STEP = re.compile(r"(?<![\w/@.-])step:(\S{1,40}) -(?= |$)")
_PAIR = re.compile(rf"(.+?):(?:[A-Za-z_][\w.]*\(\s*)?({NUMBER})\s*(?:,[^()]*)?\)?(?=$|[\s(\[])")
_BETWEEN = " - "
_WITHIN = 2 * LONGEST_NAME
"""Number of characters within which a pair must end, because the search for its end tries each colon."""


def pair_of(piece: str) -> tuple[str, float] | None:
    """Return name and value if ``piece`` is the text ``name:value``; None if the value is no number.

    Output after the number is dropped.
    """
    piece = piece.strip()
    match = _PAIR.match(piece[:_WITHIN])
    if match and match.end() == _WITHIN < len(piece):
        return None
    return (match.group(1), float(match.group(2))) if match else None


class VerlConsoleParser(LineParser):
    """Parser of verl's console output, which keeps the step of the current line, so that a wrapped line can be
    continued.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._step: int | None = None
        self._tail = ""  # the last piece as printed: its end may come on the next line
        self._line = 0

    def feed(self, segment: TextLine) -> list[ImportedRow]:
        """Return a row for every ``step:N -`` in the line ``segment``, or the row in the continuation of the last
        one.
        """
        if self._step is None and "step:" not in segment.text:
            return []
        text = without_prefix(segment.text)
        starts = list(_STEP.finditer(text))
        if not starts:
            return list(self._continuation(text, segment.line))
        ends = [match.start() for match in starts[1:]] + [len(text)]
        rows: list[ImportedRow] = []
        for match, end in zip(starts, ends, strict=True):
            rows += self._begin(match.group(1), text[match.end() : end], segment.line)
        return rows

    def finish(self) -> list[ImportedRow]:
        """Count a name that is cut off at the end; return no row, because none is held back."""
        self._close()
        return []

    def _begin(self, step: str, body: str, line: int) -> Iterator[ImportedRow]:
        self._close()
        try:
            self._step = step_of(step)
        except ValueError as error:
            self.skips.add(str(error), line)
            return
        yield from self._rows(_pieces(body), line)

    def _rows(self, pieces: list[str], line: int) -> Iterator[ImportedRow]:
        """Yield a row of the pieces that are pairs; an incomplete last piece waits for its end."""
        metrics: dict[str, float] = {}
        for index, piece in enumerate(pieces):
            pair = pair_of(piece)
            if pair is not None:
                metrics[pair[0]] = pair[1]
            elif piece and index < len(pieces) - 1:
                self.skips.add(f"{shown(piece.partition(':')[0].strip())} is not a number", line)
        self._tail, self._line = pieces[-1], line
        if metrics and self._step is not None:
            self.recognised = True
            yield ImportedRow(self._step, metrics, line)

    def _continuation(self, text: str, line: int) -> Iterator[ImportedRow]:
        if self._step is None or next(bars(text), None) is not None:
            return
        pieces = _pieces(text)
        dashed = text.lstrip().startswith("- ") or not self._tail
        if not dashed:
            pieces[0] = self._tail + pieces[0]
        if _continues(pieces, dashed=dashed, open_end=pair_of(self._tail) is None):
            self._tail = ""
            yield from self._rows(pieces, line)
        else:
            self._close()

    def _close(self) -> None:
        if self._step is not None and self._tail and pair_of(self._tail) is None:
            self.skips.add(f"{shown(self._tail.partition(':')[0].strip())} is cut off or not a number", self._line)
        self._step, self._tail = None, ""


def _pieces(body: str) -> list[str]:
    """Return the ``name:value`` pieces of (a part of) a line; the last is empty if the line ended in a dash."""
    body = body.rstrip()
    body = body.lstrip().removeprefix("- ") if body.lstrip().startswith("- ") else body.removeprefix(" ")
    return body.removesuffix(" -").split(_BETWEEN) + ([""] if body.endswith(" -") or body == "-" else [])


def _continues(pieces: list[str], *, dashed: bool, open_end: bool) -> bool:
    """Return True if a line is the rest of a wrapped one: all its pieces but the last must be pairs.

    Without a dash at the break either the break must complete a pair, or another pair must follow: a bare number
    printed by other code must not lengthen the last value.
    """
    firm = [pair_of(piece) is not None for piece in pieces if piece]
    if not firm or not all(firm[:-1]):
        return False
    return firm[0] and (dashed or open_end or sum(firm) > 1)


class VerlConsole(LineImporter):
    """Importer of the console output of a verl trainer."""

    name: ClassVar[str] = "verl-console"
    expects: ClassVar[str] = "line 'step:N - name:value - ...'"
    source: ClassVar[str] = "verl"
    anywhere: ClassVar[bool] = True
    marks: ClassVar[tuple[bytes, ...]] = (b"step:",)
    parser: ClassVar[type[LineParser]] = VerlConsoleParser
