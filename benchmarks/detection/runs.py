"""Labelled runs: rows of canonical metrics, and when it began to go wrong.

Two sources, both read the same way: our own recorded logs (``sample_logs`` with ``expected.toml``) and any long CSV
(``run_id,step,metric,value``) with an index that has ``run_id``, ``severity`` and ``onset_step``.
"""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlwatch.importers.base import ImportedRun
from rlwatch.importers.registry import read_log
from rlwatch.metrics import canonicalise
from rlwatch.records import StepRecord

EVENTS = ("instability", "dead")
"""Severities that somebody should have been woken for."""


@dataclass(frozen=True)
class Labelled:
    """``onset``: first step of the trouble, None in a run without; ``severity`` as in the index.

    ``by``: the step by which a person who watches the chart would be sure, where that was written down.
    """

    name: str
    severity: str
    onset: float | None
    records: list[StepRecord]
    source: str = ""
    by: float | None = None

    @property
    def event(self) -> bool:
        """Whether it is to be found."""
        return self.severity in EVENTS and self.onset is not None

    @property
    def rows(self) -> list[tuple[int, dict[str, float]]]:
        """(step, canonical metrics), records of a step merged."""
        merged: dict[int, dict[str, float]] = {}
        for record in self.records:
            merged.setdefault(record.step, {}).update(canonicalise(record.metrics, self.source)[0])
        return sorted(merged.items())


def long_csv(runs: Path, index: Path) -> list[Labelled]:
    """Of a long CSV with its index."""
    with index.open(newline="") as file:
        labels = {row["run_id"]: row for row in csv.DictReader(file)}
    return [_labelled(run, labels[run.name]) for run in read_log(runs) if run.name in labels]


def _labelled(run: ImportedRun, label: dict[str, str]) -> Labelled:
    onset = float(label["onset_step"]) if label.get("onset_step") else None
    return Labelled(run.name, label["severity"], onset, list(run.records), run.source)


def sample_logs(folder: Path) -> list[Labelled]:
    """Our own: onset and ``by`` are those of the critical finding that ``expected.toml`` expects first."""
    expected = tomllib.loads((folder / "expected.toml").read_text())
    return list(_samples(folder, expected["log"]))


def _samples(folder: Path, logs: list[dict[str, object]]) -> Iterator[Labelled]:
    for log in logs:
        finds = [find for find in log.get("find", ()) if find["severity"] == "critical"]
        (run,) = read_log(folder / str(log["file"]))
        first = min(finds, key=lambda find: find["found_by"], default=None)
        severity = "healthy" if not log.get("find") else "instability" if finds else "transient"
        onset, by = (None, None) if first is None else (float(first["onset"][1]), float(first["found_by"]))
        yield Labelled(str(log["file"]), severity, onset, list(run.records), run.source, by)
