"""Reading of trainers' console output: a step on one line (Megatron, OpenRLHF, ROLL, slime), or on a block of lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from rlwatch.importers.base import NUMBER, ImportedRow, LineImporter, LineParser, metrics_of, number, step_of
from rlwatch.importers.console import dict_rows
from rlwatch.importers.lines import LONGEST_NAME, TextLine, without_prefix

# Megatron's console line: ``iteration 7/ 2174 | learning rate: 1.0E-06 | loss: 1.2E-01 | grad norm: 0.016 |``.
#
# Megatron-LM and the trainers built on it (ms-swift, MindSpeed, NeMo before 2) print it. ``nan`` and ``inf`` are read
# as such; a value with a unit (``3d 18h``) is no metric. For an iteration whose update was skipped Megatron prints no
# losses.


_MEGATRON_LINE = re.compile(r"(?:^|[\s\]])iteration {1,20}(?P<n>\d{1,15})/ {0,20}\d{1,15} \|")


class MegatronConsoleParser(LineParser):
    """Parser of Megatron's console lines, each of which holds its step and metrics."""

    def feed(self, segment: TextLine) -> Iterator[ImportedRow]:
        """Yield the row in the line ``segment``, if there is one."""
        text = without_prefix(segment.text)
        match = _MEGATRON_LINE.search(text)
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
    """Importer of the console output of Megatron-LM and trainers built on it."""

    name: ClassVar[str] = "megatron-console"
    expects: ClassVar[str] = "line 'iteration N/ M | name: value | ...'"
    anywhere: ClassVar[bool] = True
    marks: ClassVar[tuple[bytes, ...]] = (b"iteration ",)
    parser: ClassVar[type[LineParser]] = MegatronConsoleParser


# OpenRLHF's console line: ``Global step 12: {'policy_loss': 0.01, 'kl': 0.2, ...}``.
#
# Printed by every OpenRLHF trainer, under Ray after ``(PPOTrainer pid=123)`` and a logging prefix. Values are a
# Python dict's: ``nan`` and ``inf`` are read as such, ``None`` as NaN.


_OPENRLHF_LINE = re.compile(r"Global step (\S+): *(?=\{)")


class OpenRlhfConsoleParser(LineParser):
    """Parser of OpenRLHF's console lines, each of which holds its step and a dict of metrics."""

    def feed(self, segment: TextLine) -> Iterator[ImportedRow]:
        """Yield the row in the line ``segment``, if there is one."""
        match = _OPENRLHF_LINE.search(segment.text)
        if match is None:
            return
        try:
            step = step_of(match.group(1))
        except ValueError as error:
            self.skips.add(str(error), segment.line)
            return
        for row in dict_rows(segment.text[match.end() :])[:1]:
            self.recognised = True
            if row.cut:
                self.skips.add("the last value of a row that is cut off", segment.line)
            yield ImportedRow(step, metrics_of(row.items, self.skips, segment.line), segment.line)


class OpenRlhfConsole(LineImporter):
    """Importer of the console output of OpenRLHF."""

    name: ClassVar[str] = "openrlhf-console"
    expects: ClassVar[str] = "line 'Global step N: {...}'"
    source: ClassVar[str] = "openrlhf"
    anywhere: ClassVar[bool] = True
    marks: ClassVar[tuple[bytes, ...]] = (b"Global step ",)
    parser: ClassVar[type[LineParser]] = OpenRlhfConsoleParser


# ROLL's console: a JSON object of metrics, then a line with its step, ``pipeline step 3 finished``.
#
# The object is printed every ``logging_steps`` only. Python's ``json`` writes ``NaN`` and ``Infinity``; ``null`` is
# NaN.


_STEP = re.compile(r"pipeline step (\d{1,15}) finished")
_METRICS = re.compile(r"\{\"[\w@.-]+/[^\"]{1,200}\": (?:-?\d|NaN|-?Infinity|null)")


class RollConsoleParser(LineParser):
    """Parser of ROLL's console output, which holds metrics back until the line with their step."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._held: tuple[dict[str, float], int] | None = None

    def feed(self, segment: TextLine) -> Iterator[ImportedRow]:
        """Yield the row of the metrics that were held back if the line ``segment`` holds their step."""
        step = _STEP.search(segment.text)
        if step is not None and self._held is not None:
            (metrics, line), self._held = self._held, None
            self.recognised = True
            yield ImportedRow(step_of(step[1]), metrics, line)
            return
        found = _METRICS.search(segment.text)
        rows = [] if found is None else dict_rows(segment.text[found.start() :])[:1]
        if rows and not rows[0].cut:
            self._held = metrics_of(rows[0].items, self.skips, segment.line), segment.line


class RollConsole(LineImporter):
    """Importer of the console output of ROLL."""

    name: ClassVar[str] = "roll-console"
    expects: ClassVar[str] = "JSON of metrics, then 'pipeline step N finished'"
    source: ClassVar[str] = "roll"
    anywhere: ClassVar[bool] = True
    marks: ClassVar[tuple[bytes, ...]] = (b"pipeline step ",)
    parser: ClassVar[type[LineParser]] = RollConsoleParser


# slime's console lines: ``rollout 3: {'rollout/raw_reward': 0.5, ...}``, ``step 3: {'train/loss': 0.01, ...}``.
#
# Printed under Ray and Python's logging. A rollout and an update have a number each, which are the same where every
# rollout is trained on in one update; both are read as the step. Values are a Python dict's: ``nan`` and ``inf`` are
# read as such, ``None`` as NaN.


_SLIME_LINE = re.compile(r"(?:^|[\s-])(?:rollout|step|perf|eval) (\d{1,15}): *(?=\{['\"](?:rollout|train|perf|eval)/)")
_COUNTERS = frozenset({"rollout/step", "train/step", "eval/step"})


class SlimeConsoleParser(LineParser):
    """Parser of slime's console lines, each of which holds its step and a dict of metrics."""

    def feed(self, segment: TextLine) -> Iterator[ImportedRow]:
        """Yield the row in the line ``segment``, if there is one."""
        match = _SLIME_LINE.search(segment.text)
        if match is None:
            return
        for row in dict_rows(segment.text[match.end() :])[:1]:
            self.recognised = True
            if row.cut:
                self.skips.add("the last value of a row that is cut off", segment.line)
            items = {name: value for name, value in row.items.items() if name not in _COUNTERS}
            yield ImportedRow(step_of(match.group(1)), metrics_of(items, self.skips, segment.line), segment.line)

    def notes(self) -> tuple[str, ...]:
        """Return a note for the user that rollouts and updates of the same number are read as one step."""
        return ("a rollout and an update of the same number are read as one step",) if self.recognised else ()


class SlimeConsole(LineImporter):
    """Importer of the console output of slime."""

    name: ClassVar[str] = "slime-console"
    expects: ClassVar[str] = "line 'rollout N: {...}' or 'step N: {...}'"
    source: ClassVar[str] = "slime"
    anywhere: ClassVar[bool] = True
    marks: ClassVar[tuple[bytes, ...]] = (b"rollout ", b"step ")
    parser: ClassVar[type[LineParser]] = SlimeConsoleParser


# Reading of consoles that print a step as a block of lines: a head with the step, then a name and a value a line, or a
# table.
#
# * NeMo-RL: ``===== Step 3/100 =====``, then ``  • Loss: 0.0123`` below ``Training Results:``. Metrics below
#   ``Validation
#   Results:`` come from held-out data and are called ``eval/...``.
# * torchforge: ``=== [logger] - METRICS STEP 3 ===``, then ``  name: value`` up to a line of ``=``.
# * AReaL: ``Train step 3/1000 done.``, then a table ``│ name │ value │ name │ value │``.
# * Stable-Baselines3: a table ``| rollout/ |  |``, ``|    ep_rew_mean | 0.5 |`` between two rules, with a row for the
#   step (``iterations``, else ``total_timesteps``).
#
# A value with a unit (``12.31s``, ``80 %``) is not read. A block ends where the next begins, at its rule, or with the
# log. ``nan`` and ``inf`` are values.

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
