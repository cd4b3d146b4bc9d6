"""Megatron's console line: ``iteration 7/ 2174 | learning rate: 1.0E-06 | loss: 1.2E-01 | grad norm: 0.016 |``.

Megatron-LM and the trainers built on it (ms-swift, MindSpeed, NeMo before 2) print it. ``nan`` and ``inf`` are read as
such; a value with a unit (``3d 18h``) is no metric. For an iteration whose update was skipped Megatron prints no
losses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from rlwatch.importers.base import ImportedRow, LineImporter, LineParser, number, step_of
from rlwatch.importers.lines import LONGEST_NAME, TextLine, without_prefix

_LINE = re.compile(r"(?:^|[\s\]])iteration {1,20}(?P<n>\d{1,15})/ {0,20}\d{1,15} \|")


class MegatronConsoleParser(LineParser):
    """Parser of lines that each hold their step."""

    def feed(self, segment: TextLine) -> Iterator[ImportedRow]:
        """The row of one line."""
        text = without_prefix(segment.text)
        match = _LINE.search(text)
        if match is None:
            return
        metrics: dict[str, float] = {}
        for part in text[match.end() :].split("|"):
            name, colon, written = part.rpartition(":")
            value = number(written) if colon else None
            if value is not None and 0 < len(name.strip()) <= LONGEST_NAME:
                metrics[name.strip()] = value
        if metrics:
            self.recognised = True
            yield ImportedRow(step_of(match["n"]), metrics, segment.line)


class MegatronConsole(LineImporter):
    """Console output of Megatron-LM."""

    name: ClassVar[str] = "megatron-console"
    expects: ClassVar[str] = "line 'iteration N/ M | name: value | ...'"
    anywhere: ClassVar[bool] = True
    marks: ClassVar[tuple[bytes, ...]] = (b"iteration ",)
    parser: ClassVar[type[LineParser]] = MegatronConsoleParser
