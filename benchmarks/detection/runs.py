"""Labelled runs: their records as they were logged, and when it began to go wrong.

Our own recorded logs (``sample_logs`` with ``expected.toml``), any long CSV (``run_id,step,metric,value``) with an
index that has ``run_id``, ``repo``, ``severity``, ``onset_step`` and ``note``, and a folder of logs as their owners
left them.
"""

from __future__ import annotations

import csv
import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from detection.score import Run

from rlwatch.errors import ImportFormatError
from rlwatch.forecast.labels import RunOutcome, read_labels
from rlwatch.forecast.tables import read_runs
from rlwatch.importers.base import ImportedRun
from rlwatch.importers.registry import read_log
from rlwatch.metrics import canonicalise
from rlwatch.records import StepRecord

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SHARED = ROOT.parent / "shared"
"""Public runs that are not part of this repository."""
CORPUS = "corpus"
"""The sample of the corpus of forecasts."""
DOUBT = "DOUBT"
"""In the note of a label that whoever gave it calls contestable."""
BROKEN = "alexchilton+CAS_NLP_MODULE4_GRPO/lara/4070/output5/wordle-grpo-rtx4070/logs"
"""The one directory of ``wild`` that is not healthy by its README: 23 trainings, several of them broken."""
PARTS = "rewards/"
"""Begins the names of the parts of the reward in TRL's logs, of which some peers ask."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)$")
_LEAST_ROWS = 10


@dataclass(frozen=True)
class Labelled:
    """A run as it is judged, and its records; ``source`` is the trainer."""

    run: Run
    records: list[StepRecord]
    source: str = ""

    @cached_property
    def rows(self) -> list[tuple[int, dict[str, float]]]:
        """(step, canonical metrics and the parts of the reward), records of a step merged."""
        merged: dict[int, dict[str, float]] = {}
        for record in self.records:
            row = merged.setdefault(record.step, {})
            row.update({name: value for name, value in record.metrics.items() if name.startswith(PARTS)})
            row.update(canonicalise(record.metrics, self.source)[0])
        return sorted(merged.items())


def named(name: str) -> list[Labelled]:
    """Of our recorded logs (``samples``), the sample of the corpus, or a set of public runs.

    Raises:
        FileNotFoundError: the set is not on this machine.
    """
    if name == "samples":
        return sample_logs(ROOT / "sample_logs")
    if name == CORPUS:
        forecasts = HERE.parent / "forecast"
        return corpus(forecasts / "sample" / "sample.parquet", forecasts / "corpus-labels.csv")
    if not (SHARED / name).is_dir():
        raise FileNotFoundError(f"there is no {SHARED / name}")
    if name == "wild":
        found, refused = wild(SHARED / name)
        print(f"wild: {len(refused)} units hold no run of ten rows that is read")
        return found
    return long_csv(SHARED / name / "runs.csv.gz", SHARED / name / "index.csv")


def labelled(
    imported: ImportedRun, severity: str, onset: float | None = None, *, project: str, name: str = "", note: str = ""
) -> Labelled:
    """A run that was read, with its label."""
    steps = tuple(sorted({record.step for record in imported.records}))
    run = Run(name or imported.name, project, severity, onset, steps, DOUBT in note)
    return Labelled(run, list(imported.records), imported.source)


def long_csv(runs: Path, index: Path) -> list[Labelled]:
    """Of a long CSV with its index."""
    with index.open(newline="") as file:
        labels = {row["run_id"]: row for row in csv.DictReader(file)}
    return [_indexed(run, labels[run.name]) for run in read_log(runs) if run.name in labels]


def _indexed(run: ImportedRun, label: dict[str, str]) -> Labelled:
    onset = float(label["onset_step"]) if label.get("onset_step") else None
    project = label.get("repo") or run.name
    return labelled(run, label["severity"], onset, project=project, note=label.get("note") or "")


def sample_logs(folder: Path) -> list[Labelled]:
    """Our own: the onset is the last step at which ``expected.toml`` lets the first critical finding date it."""
    expected = tomllib.loads((folder / "expected.toml").read_text())
    return list(_samples(folder, expected["log"]))


def _samples(folder: Path, logs: list[dict[str, object]]) -> Iterator[Labelled]:
    for log in logs:
        finds = [find for find in log.get("find", ()) if find["severity"] == "critical"]
        (run,) = read_log(folder / str(log["file"]))
        first = min(finds, key=lambda find: find["found_by"], default=None)
        onset = None if first is None else float(first["onset"][1])
        severity = "transient" if log.get("find") else "healthy"
        if first is not None:
            severity = "dead" if first["kind"] == "no_signal" else "instability"
        yield labelled(run, severity, onset, project=str(log["file"]), name=str(log["file"]))


def wild(folder: Path) -> tuple[list[Labelled], dict[str, str]]:
    """The runs of a folder of logs with its ``provenance.json``, healthy but for one directory; and what is refused.

    Of the checkpoints of one training the last is taken. Runs of fewer than ten rows are left out, as refused.
    """
    listed = json.loads((folder / "provenance.json").read_text())
    paths = [f"{entry['repo'].replace('/', '+')}/{entry['path']}" for entry in listed]
    found, refused = list[Labelled](), dict[str, str]()
    for path in _units(paths):
        try:
            imported = read_log(folder / path)
        except ImportFormatError as error:
            refused[path] = str(error).removeprefix(str(folder)).strip()
            continue
        for run in imported:
            name = path if len(imported) == 1 else f"{path}#{run.name}"
            severity = "unlabelled" if path.startswith(BROKEN) else "healthy"
            one = labelled(run, severity, project=path.split("/")[0].replace("+", "/", 1), name=name)
            if len(one.run.steps) >= _LEAST_ROWS:
                found.append(one)
            else:
                refused[name] = f"{len(one.run.steps)} rows"
    return found, refused


def corpus(table: Path, labels: Path) -> list[Labelled]:
    """Of a table of the corpus of forecasts, with its labels; recipes are its projects."""
    runs, known = read_runs(table), read_labels(labels)
    found = []
    for i, label in enumerate(known.of(runs)):
        severity = (
            "healthy" if label.outcome is RunOutcome.CLEAN else "unlabelled" if label.onset is None else "instability"
        )
        records = [StepRecord(step, metrics) for step, metrics in runs.stream(i)]
        run = Run(label.run, runs.recipes[i], severity, label.onset, tuple(record.step for record in records))
        found.append(Labelled(run, records))
    return found


def synthetic(lines: Iterable[str]) -> list[Labelled]:
    """Of ``peer_rlprobe.py synth``: what goes wrong is in the name; sound ones are healthy."""
    found = []
    for line in lines:
        made = json.loads(line)
        records = [StepRecord(step, metrics) for step, metrics in made["rows"]]
        severity = "healthy" if made["onset"] is None else "instability"
        steps = tuple(record.step for record in records)
        found.append(Labelled(Run(made["name"], "rlprobe synth", severity, made["onset"], steps), records))
    return found


def _units(paths: list[str]) -> list[str]:
    """What holds a log: directories of event files once, of the states of one training the last."""
    units: dict[str, tuple[int, str]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        checkpoint = _CHECKPOINT.search(folder)
        if "tfevents" in name:
            units[folder] = (0, folder)
        elif checkpoint:
            key = folder[: checkpoint.start()] + name
            units[key] = max(units.get(key, (-1, "")), (int(checkpoint[1]), path))
        elif name.endswith((".json", ".jsonl", ".log", ".out", ".txt", ".csv", ".wandb")) and not name.startswith(
            ("wandb-metadata", "wandb-summary")
        ):
            units[path] = (0, path)
    return sorted(unit for _, unit in units.values())
