"""One of each thing that a package can add to rlwatch. ``docs/stability.md`` says what each door asks for."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from rlwatch.analysis.runs import StoredRun
from rlwatch.control.commands import Number
from rlwatch.detectors.base import BaseDetector, finite
from rlwatch.errors import ConfigError
from rlwatch.forecast import Forecast
from rlwatch.importers.base import ImportedRow, LineImporter, LineParser, metrics_of, step_of
from rlwatch.importers.lines import TextLine
from rlwatch.ports import Delivery, Store
from rlwatch.records import JSON, ClosedStep, Command, Event, Finding, OutboxMessage, Severity
from rlwatch.store.url import open_store

LONG = 2000.0
"""Tokens of a response, on average, that this team pays for."""


class LongAnswers(BaseDetector):
    """Responses beyond a budget that is this team's own."""

    name: ClassVar[str] = "long_answers"
    family: ClassVar[str] = "Rollouts"
    kinds: ClassVar[tuple[str, ...]] = ("long_answers",)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("len/mean",),)
    reads: ClassVar[tuple[str, ...]] = ("len/mean",)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge one step by itself."""
        tokens = finite(step, "len/mean") or 0.0
        found = Finding(self.name, self.name, Severity.WARNING, step.step, step.step, f"{tokens:g} tokens a response")
        return [found] if tokens > LONG else []


_LINE = re.compile(r"\[toy\] (\d+)((?: [\w/]+=\S+)+)")


class ToyParser(LineParser):
    """``[toy] 12 grad_norm=0.5 reward=nan``."""

    def feed(self, segment: TextLine) -> Iterator[ImportedRow]:
        """The row of one line."""
        match = _LINE.fullmatch(segment.text)
        if match is not None:
            self.recognised = True
            items = dict(pair.split("=", 1) for pair in match.group(2).split())
            yield ImportedRow(step_of(match.group(1)), metrics_of(items, self.skips, segment.line), segment.line)


class ToyConsole(LineImporter):
    """Console output of a toy trainer."""

    name: ClassVar[str] = "toy-console"
    expects: ClassVar[str] = "line '[toy] N name=value ...'"
    source: ClassVar[str] = "toy"
    anywhere: ClassVar[bool] = True
    marks: ClassVar[tuple[bytes, ...]] = (b"[toy] ",)
    parser: ClassVar[type[LineParser]] = ToyParser


class FileNotifier:
    """Appends each message to a file: ``[notify.file] options = {path = "/var/log/alerts.jsonl"}``."""

    def __init__(self, *, name: str, path: str) -> None:
        self.name, self._path = name, Path(path)

    def deliver(self, message: OutboxMessage) -> Delivery:
        """Append it."""
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"id": message.message_id, **message.payload}) + "\n")
        except OSError as error:
            return Delivery(ok=False, reason=str(error))
        return Delivery(ok=True, reason="written")


def scratch(url: str, **options: Any) -> Store:
    """``scratch://name``: a directory among the machine's temporary ones."""
    return open_store(Path(tempfile.gettempdir()) / f"rlwatch-{urlsplit(url).netloc or 'scratch'}", **options)


class SetTemperature:
    """``rlwatch command RUN set-temperature --set value=0.8``: asks the generation of this process to be cooler."""

    kind: ClassVar[str] = "set-temperature"
    meaning: ClassVar[str] = "the sampling temperature"
    args: ClassVar[Mapping[str, Number]] = {"value": Number("the new temperature", high=2.0)}
    generation: ClassVar[dict[str, float]] = {}
    """Your loop puts here what it samples with; rlwatch calls the handler in its process, at a safe boundary."""

    def check(self, command: Command) -> None:  # noqa: ARG002
        """Refuse where nobody samples here."""
        if "temperature" not in self.generation:
            raise ConfigError("this process samples nothing: put its settings into SetTemperature.generation")

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Set it."""
        before = self.generation["temperature"]
        self.generation["temperature"] = float(command.args["value"])
        return {"before": before, "after": self.generation["temperature"]}


def lengths(run: StoredRun) -> str | None:
    """A chart of the lengths, on the run's page; nothing where the run logs none."""
    return run.plot("len/mean").html if "len/mean" in run.view().metrics else None


class Never:
    """A forecaster that is never worried: ``RLWATCH_FORECASTER=never``."""

    def update(self, step: ClosedStep) -> Forecast:
        """No chance at all."""
        return Forecast(step.step, p20=0.0, p50=0.0, p100=0.0, risk=0.0)

    def notice(self, event: Event) -> None:
        """Nothing to learn."""
