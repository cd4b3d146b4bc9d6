"""What became of a run, and when rlwatch said so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from real_model.plan import CAUSES, Fault

from rlwatch.records import Severity, StepRecord
from rlwatch.scanner import scan

LOUD = ("warning", "critical")
BEFORE, MEAN = 10, 5
"""Steps whose share of right answers is the level before the fault, and over which later ones are averaged."""
LOST = 0.5
"""A run has failed where that share is below half its level before."""


@dataclass(frozen=True)
class Scored:
    """Steps are counted from the fault (0: the step it came with); None: never."""

    name: str
    fault: Fault
    task: str
    device: str
    begins: int
    level: float
    """Share of right answers before the fault; of a healthy run at its end."""
    start: float
    end: float
    failed: int | None
    warned: int | None
    critical: int | None
    forecast: int | None
    """The first forecast that is an alarm."""
    false_alarms: tuple[str, ...]
    """Kinds of alarms of a healthy run, or from before the fault."""
    kinds: tuple[str, ...]
    headline: str
    cause: str
    onset: int | None
    right_cause: bool | None
    tokens: str


def scored(result: Mapping[str, Any]) -> Scored:
    """Of a run's result file."""
    run, size = result["run"], result["size"]
    fault, begins = Fault(run["fault"]), size["begins"]
    right = {int(step): share for step, share in result["right"].items()}
    faulty = fault is not Fault.NONE
    level = mean(right, begins - BEFORE, begins) if faulty else mean(right, max(right) - BEFORE + 1, max(right) + 1)
    loud = [one for one in result["findings"] if one["severity"] in LOUD and one["stage"] in ("began", "worsened")]
    after = [one for one in loud if faulty and one["step"] >= begins]
    early = [one for one in loud if not faulty or one["step"] < begins]
    forecasts = [one["step"] for one in result["forecasts"] if one["alarm"] and faulty and one["step"] >= begins]
    cause = result["cause"]
    return Scored(
        name=name_of(run),
        fault=fault,
        task=run["task"],
        device=result["device"],
        begins=begins,
        level=level,
        start=mean(right, 1, 1 + MEAN),
        end=mean(right, max(right) - MEAN + 1, max(right) + 1),
        failed=since(failure(right, begins, level) if faulty else None, begins),
        warned=since(first(after), begins),
        critical=since(first([one for one in after if one["severity"] == "critical"]), begins),
        forecast=since(min(forecasts, default=None), begins),
        false_alarms=tuple(dict.fromkeys(one["kind"] for one in early)),
        kinds=tuple(dict.fromkeys(one["kind"] for one in after)),
        headline=result["headline"],
        cause="" if cause is None else f"{cause['title']} ({cause['sure']})",
        onset=None if cause is None else since(cause["onset_step"], begins),
        right_cause=None if cause is None or not faulty else bool({cause["knob"], cause["kind"]} & set(CAUSES[fault])),
        tokens=tokens(result),
    )


@dataclass(frozen=True)
class Replayed:
    """What is said today of a stored series; steps of the first alarm and of the first critical one."""

    headline: str
    warned: int | None
    critical: int | None


def replayed(stored: Path) -> dict[str, Replayed]:
    """Run -> what :func:`rlwatch.scan` says of its series in the file of all."""
    rows: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
    for row in pq.read_table(stored).to_pylist():
        run, step = row.pop("run"), row.pop("step")
        rows[run][step] = {name: value for name, value in row.items() if value is not None}
    found = {}
    for name, steps in rows.items():
        report = scan([StepRecord(step, steps[step]) for step in sorted(steps)], source="trl/grpo")
        loud = [one for one in report.findings if one.severity is not Severity.INFO and not one.stage.better]
        critical = [one.step for one in loud if one.severity is Severity.CRITICAL]
        warned = min((one.step for one in loud), default=None)
        found[name] = Replayed(report.view.headline, warned, min(critical, default=None))
    return found


def name_of(run: Mapping[str, Any]) -> str:
    return f"{run['fault']}, {run['task']}{', engine' if run['engine'] else ''}, seed {run['seed']}"


def mean(right: Mapping[int, float], begin: int, end: int) -> float:
    """Over the steps that were measured, 0 if none was."""
    found = [right[step] for step in range(begin, end) if step in right]
    return sum(found) / len(found) if found else 0.0


def failure(right: Mapping[int, float], begins: int, level: float) -> int | None:
    """First step of the fault's from which on the next ones are, on average, right less than half as often."""
    last = max(right) - MEAN + 1
    return next((s for s in range(begins, last + 1) if mean(right, s, s + MEAN) < LOST * level), None)


def first(findings: Sequence[Mapping[str, Any]]) -> int | None:
    return min((int(one["step"]) for one in findings), default=None)


def since(step: int | None, begins: int) -> int | None:
    return None if step is None else step - begins


def tokens(result: Mapping[str, Any]) -> str:
    """Whether the tokens that were blamed are those that were planted."""
    planted = {(step, row, position) for step, row, position in result["planted"]}
    blamed = {batch["step"]: batch["columns"] for batch in result["culprits"]}
    if not planted:
        return f"{len(blamed)} steps localised" if blamed else ""
    steps = sorted({step for step, _, _ in planted})
    hit = [
        step
        for step in steps
        if step in blamed
        and any(
            (step, int(row), int(position)) in planted
            for row, position in zip(blamed[step]["sequence"], blamed[step]["position"], strict=True)
        )
    ]
    return f"planted at {len(steps)} steps, named at {len(hit)}"
