"""Lines of loops of one's own: ``Epoch:[1/1](20/500), Reward: 0.4, KL_ref: 0.01`` and ``step=20 loss=0.5 entropy=1.2``.

No trainer writes them, so a line is one of metrics by what is in it: at least two pairs of a name and a number, one of
which names a metric that rlwatch knows and that is no mere setting. The step is what stands before ``/`` in brackets or
behind a word for it (step, iteration, update, batch); where an epoch is told besides, steps go on across epochs. Lines
without a step are numbered. This format is the last that is tried: what a trainer prints is read as the trainer's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from rlwatch.importers.base import NUMBER, LineImporter, LineParser, Row, Verdict
from rlwatch.importers.lines import LARGEST_STEP, LONGEST_NAME, Segment, Segments, without_prefix
from rlwatch.metrics import Family, resolve

_NAME = r"(?<![\w'\"/.])(?P<name>[A-Za-z_][\w/.@-]*(?: [A-Za-z_][\w/.@-]*){0,3})\s?[:=]\s{0,3}"
_PAIR = re.compile(rf"{_NAME}(?P<value>{NUMBER})(?=$|[\s,;|)\]}}])")
_WITH_UNIT = re.compile(rf"{_NAME}{NUMBER}(?![eE][-+]?\d)[A-Za-z%]")
_OF = re.compile(r"\((?P<n>\d{1,12})\s*/\s*(?P<total>\d{1,12})\)")
_STEP = re.compile(
    r"(?<![A-Za-z])(?:global[_ ]?step|steps?|iter(?:ation)?|update|batch|episode)s?[\s:=#\[(]{1,3}"
    r"(?P<n>\d{1,12})(?![\d.]*[A-Za-z%])(?:\s*/\s*(?P<total>\d{1,12}))?",
    re.IGNORECASE,
)
_EPOCH = re.compile(r"(?<![A-Za-z])epoch[\s:=#\[(]{0,3}(?P<n>\d{1,9})(?![\d.]*[eE.]\d)", re.IGNORECASE)
_STEP_NAMES = frozenset(
    {"step", "steps", "global_step", "global step", "iter", "iteration", "update", "batch", "epoch", "episode"}
)
_SAYING = frozenset({Family.REWARD, Family.EXPLORATION, Family.TRUST_REGION, Family.CRITIC, Family.MISMATCH})
"""Families of metrics that only a reinforcement learner prints."""
_SETTINGS = frozenset({"optim/lr", "policy/kl_coef", "policy/vocab_size", "time/step", "tokens/total", "val/score"})
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
        self._seen: dict[frozenset[str], tuple[int, tuple[float, ...] | None]] = {}
        """Names of a kind of line -> how often it came with something new, and with what last."""

    def feed(self, segment: Segment) -> Iterator[Row]:
        """The row of a line."""
        if len(segment.text) > LONGEST or ("=" not in segment.text and ":" not in segment.text):
            return
        text = without_prefix(segment.text)
        if (united := _WITH_UNIT.search(text)) is not None:
            self._united.add(united["name"])
        metrics = {name: value for name, value in pairs_of(text).items() if name not in self._united}
        told = _OF.search(text) or _STEP.search(text)
        few = len(metrics) < LEAST_PAIRS and not (told and self._names.issuperset(metrics))
        if not metrics or few or not any(map(_tells, metrics)):
            return
        self._names.update(metrics)
        names = frozenset(metrics)
        step = self._step(told, _EPOCH.search(text))
        count, last = self._seen.get(names, (0, None))
        mark = (step if told else 0, *metrics.values())
        self._seen[names] = (count + (mark != last), mark)  # settings are printed again and again, and never change
        many = self._seen[names][0] >= (LEAST_ROWS if told else LEAST_UNTOLD)
        self.plausible = self.plausible or many
        self.recognised = self.recognised or (many and any(map(_of_rl, metrics)))
        yield Row(step, metrics, segment.line)

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


def pairs_of(text: str) -> dict[str, float]:
    """The names and numbers of a line, without its step.

    >>> pairs_of("Epoch:[1/1](2/500), Reward: 0.30, Avg Len: 176, epoch_time: 9.0min")
    {'Reward': 0.3, 'Avg Len': 176.0}
    >>> pairs_of("[run] step=3 loss=-0.5 entropy=nan")
    {'loss': -0.5, 'entropy': nan}
    """
    found = {
        match["name"]: float(match["value"]) for match in _PAIR.finditer(text) if len(match["name"]) <= LONGEST_NAME
    }
    return {name: value for name, value in found.items() if name.lower() not in _STEP_NAMES}


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
    marks: ClassVar[tuple[bytes, ...]] = (b":", b"=")
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
