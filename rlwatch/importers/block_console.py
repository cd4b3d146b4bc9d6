"""Reading of consoles that print a step as a block of lines: a head with the step, then a name and a value a line, or a
table.

* NeMo-RL: ``===== Step 3/100 =====``, then ``  • Loss: 0.0123`` below ``Training Results:``. Metrics below ``Validation
  Results:`` come from held-out data and are called ``eval/...``.
* torchforge: ``=== [logger] - METRICS STEP 3 ===``, then ``  name: value`` up to a line of ``=``.
* AReaL: ``Train step 3/1000 done.``, then a table ``│ name │ value │ name │ value │``.
* Stable-Baselines3: a table ``| rollout/ |  |``, ``|    ep_rew_mean | 0.5 |`` between two rules, with a row for the
  step (``iterations``, else ``total_timesteps``).

A value with a unit (``12.31s``, ``80 %``) is not read. A block ends where the next begins, at its rule, or with the
log. ``nan`` and ``inf`` are values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from rlwatch.importers.base import NUMBER, ImportedRow, LineImporter, LineParser, number, step_of
from rlwatch.importers.lines import LONGEST_NAME, TextLine, without_prefix

_HEAD = re.compile(
    r"METRICS STEP (\d{1,15}) ===|^\s*={3,} Step (\d{1,15})/\d{1,15} ={3,}|Train step (\d{1,15})/\d{1,15} done"
)
_PAIR = re.compile(rf"\s{{2,}}(?:• )?(?P<name>[A-Za-z_][\w/.@ ()-]{{0,{LONGEST_NAME}}}): (?P<value>{NUMBER})\s*")
_RESULTS = re.compile(r"\b(?P<of>Training|Validation) Results:")
_RULE = re.compile(r"\s*(?:={10,}|-{10,}|\+?[-+]{10,}|╘[═╧]+╛)\s*")
_OWN_STEPS = ("time/iterations", "time/total_timesteps")
LONGEST = 4000
"""Largest number of characters in a line of a block; longer lines are generated text."""


class BlockConsoleParser(LineParser):
    """Parser of a console in which every block of lines holds the metrics of one step."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._step: int | None = None
        self._metrics: dict[str, float] = {}
        self._line = 0
        self._section = ""

    def feed(self, segment: TextLine) -> Iterator[ImportedRow]:
        """Yield the row of the block that the line ``segment`` ends."""
        if len(segment.text) > LONGEST:
            return
        text = without_prefix(segment.text)
        head = _HEAD.search(text)
        if head is not None:
            yield from self.finish()
            self._step, self._line = step_of(next(filter(None, head.groups()))), segment.line
        elif _RULE.fullmatch(text):
            if self._metrics:
                yield from self.finish()
        elif (results := _RESULTS.search(text)) is not None:
            self._section = "eval/" if results["of"] == "Validation" else ""
        elif "|" in text or "│" in text:
            self._cells(re.split(r"[|│]", text)[1:-1], segment.line)
        elif self._step is not None and (pair := _PAIR.fullmatch(text)) is not None:
            self._take(self._section + pair["name"], float(pair["value"]))

    def finish(self) -> Iterator[ImportedRow]:
        """Yield the row of the open block, if it holds a metric."""
        metrics, self._metrics, self._section = self._metrics, {}, ""
        step, self._step = self._step, None
        own = next((metrics[name] for name in _OWN_STEPS if name in metrics), None)
        if own is not None:
            try:
                step = step_of(own)
            except ValueError as error:
                self.skips.add(str(error), self._line)
                return
        if step is not None and metrics:
            yield ImportedRow(step, metrics, self._line)

    def _cells(self, cells: list[str], line: int) -> None:
        """Take names and values from neighbouring cells."""
        if len(cells) == 2 and not cells[1].strip() and cells[0].strip().endswith("/"):
            self._section, self._line = cells[0].strip(), line
            return
        for name, text in zip(cells[::2], cells[1::2], strict=False):
            value = number(text)
            if name.strip() and value is not None:
                self._take((self._section if name.startswith("  ") else "") + name.strip(), value)

    def _take(self, name: str, value: float) -> None:
        if len(name) <= LONGEST_NAME:
            self._metrics[name] = value
            self.recognised = self.recognised or self._step is not None or name in _OWN_STEPS


class BlockConsole(LineImporter):
    """Importer of the console output of NeMo-RL, torchforge, AReaL or Stable-Baselines3."""

    name: ClassVar[str] = "block-console"
    expects: ClassVar[str] = "block of a step: '=== Step 3/100 ===' (NeMo-RL), 'METRICS STEP 3' (torchforge), a table"
    anywhere: ClassVar[bool] = True
    marks: ClassVar[tuple[bytes, ...]] = (b" Step ", b"METRICS STEP ", b"Train step ", b"total_timesteps")
    weight: ClassVar[float] = 0.75
    parser: ClassVar[type[LineParser]] = BlockConsoleParser
