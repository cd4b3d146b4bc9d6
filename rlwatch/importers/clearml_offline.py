"""Reading of offline sessions of ClearML: ``metrics.jsonl`` in ``~/.clearml/cache/offline/offline-ID/``.

Each line is a list of events, each with one scalar. A scalar has a title (``metric``) and a series (``variant``), which
are one name ``title/series``, or one word if they are equal. By default ClearML writes NaN and the infinities as 0
(``Logger.set_reporting_nan_value`` changes it) and warns of that on the console only; a note repeats the warning.
Settings are in ``task.json`` in the same directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from rlwatch.importers.base import ImportedRow, LineImporter, LineParser, step_of, value_of
from rlwatch.importers.json_logs import load_document
from rlwatch.importers.lines import TextLine, parsed, shown
from rlwatch.importers.scalar_rows import ScalarRows
from rlwatch.records import JSON

_SCALAR = "training_stats_scalar"
_SETTINGS = "task.json"


class ClearMlParser(LineParser):
    """Parser of ClearML's events, each of which holds one scalar and its step."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._rows = ScalarRows()

    def feed(self, segment: TextLine) -> Iterator[ImportedRow]:
        """Yield the rows that are complete after the events in the line ``segment``."""
        if not segment.text.startswith("[{"):
            return
        try:
            events: Any = parsed(segment.text)
        except ValueError as error:
            self.skips.add(str(error), segment.line)
            return
        for event in events:
            if isinstance(event, dict) and event.get("type") == _SCALAR:
                self.recognised = True
                yield from self._scalar(event, segment.line)

    def _scalar(self, event: dict[str, Any], line: int) -> Iterator[ImportedRow]:
        name, value = _name(str(event.get("metric", "")), str(event.get("variant", ""))), value_of(event.get("value"))
        try:
            step = step_of(event.get("iter"))
        except ValueError:
            self.skips.add(f"{shown(name)}: a value of the whole run, not of a step", line)
            return
        if value is None:
            self.skips.add(f"{shown(name)} is not a number", line)
            return
        moment = value_of(event.get("timestamp", 0.0)) or 0.0
        yield from self._rows.add(step, name, value, ts=moment / 1000, line=line)

    def finish(self) -> Iterator[ImportedRow]:
        """Yield the row of the last step."""
        yield from self._rows.finish()

    def config(self) -> Mapping[str, JSON]:
        """Return the hyperparameters of the task, from the file ``task.json`` next to the metrics."""
        file = Path(self.path).with_name(_SETTINGS)
        found: Any = load_document(file) if file.is_file() else {}
        sections = found.get("hyperparams", {}) if isinstance(found, dict) else {}
        return {name: one.get("value") for section in sections.values() for name, one in section.items()}

    def notes(self) -> tuple[str, ...]:
        """Return a note that warns the user that ClearML replaces NaN by 0."""
        return ("ClearML writes NaN and infinities as 0: a value that was not finite is not seen here",)


def _name(title: str, series: str) -> str:
    """Return the name of a scalar from its title and series.

    >>> _name("train", "reward"), _name("kl", "kl")
    ('train/reward', 'kl')
    """
    return title if series == title else f"{title}/{series}"


class ClearMlOffline(LineImporter):
    """Importer of the metrics of an offline session of ClearML."""

    name: ClassVar[str] = "clearml"
    expects: ClassVar[str] = "metrics.jsonl of an offline session of ClearML"
    weight: ClassVar[float] = 0.97
    marks: ClassVar[tuple[bytes, ...]] = (b'"training_stats_scalar"',)
    parser: ClassVar[type[LineParser]] = ClearMlParser
