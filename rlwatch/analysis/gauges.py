"""Runs of a store as gauges: for Prometheus in its text format, for OpenTelemetry as they are.

A gauge is a quantity of rlwatch's own names, a sample of it is a run's last value. What a trainer calls it does not
matter here, and names that nothing knows are left out: there are some hundred gauges, and not one for each layer.

https://prometheus.io/docs/instrumenting/exposition_formats
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlwatch.analysis.rows import describe
from rlwatch.metrics import BY_NAME
from rlwatch.ports import Store
from rlwatch.records import Severity

Labels = Mapping[str, str]
TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of :func:`exposition`."""
_URGENCY = {Severity.INFO.value: 0, Severity.WARNING.value: 1, Severity.CRITICAL.value: 2}
_NO_NAME = re.compile(r"[^a-zA-Z0-9_]")
_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
LONGEST_LABEL = 200


@dataclass(frozen=True, slots=True)
class Gauge:
    """A quantity: ``name`` with dots, its meaning and unit, and its values, each with the labels of its run."""

    name: str
    meaning: str
    unit: str = ""
    samples: list[tuple[Labels, float]] = field(default_factory=list)


def gauges(store: Store, now: float, *, quiet_for_s: float = math.inf) -> list[Gauge]:
    """Gauges of the runs of ``store`` that gave a sign within ``quiet_for_s`` seconds before ``now``, by name."""
    found: dict[str, Gauge] = {}
    for run in store.runs():
        row = describe(store, run, now)
        if row["age_s"] is None or row["age_s"] > quiet_for_s or row["archived"]:
            continue
        labels = {name: _cut(row[name]) for name in ("project", "run_id")} | {"run": _cut(row["name"] or row["run_id"])}
        for gauge, more, value in _of_run(row):
            found.setdefault(gauge.name, gauge).samples.append(({**labels, **more}, value))
    return [found[name] for name in sorted(found)]


def _of_run(row: Mapping[str, Any]) -> Iterator[tuple[Gauge, Labels, float]]:
    """Yield each gauge for which a run has a value, with labels of that gauge alone, and the value."""
    labels = {"source": row["source"], "status": row["status"], "verdict": row["verdict"]["name"]}
    urgency = _URGENCY.get(row["verdict"]["urgency"] or "", 0)
    yield Gauge("rlwatch.run.info", "always 1: trainer, status and verdict of a run are its labels"), labels, 1.0
    yield Gauge("rlwatch.run.urgency", "of the verdict; 0: none, 1: a warning, 2: critical"), {}, float(urgency)
    yield Gauge("rlwatch.run.silence", "time since the last sign of the run", "s"), {}, row["age_s"]
    if row["last_step"] is not None:
        yield Gauge("rlwatch.run.step", "last step"), {}, float(row["last_step"])
    broken = sum(not math.isfinite(value) for value in row["last_values"].values())
    yield Gauge("rlwatch.run.nonfinite", "metrics whose last value is NaN or infinite"), {}, float(broken)
    for name, value in row["last_values"].items():
        metric = BY_NAME.get(name)
        if metric is not None:
            yield Gauge(f"rlwatch.{name.replace('/', '.')}", metric.meaning, metric.unit), {}, value


def exposition(given: Sequence[Gauge]) -> str:
    r"""Gauges in the text format of Prometheus.

    >>> print(exposition([Gauge("rlwatch.reward.mean", "mean reward", samples=[({"run": 'a"b'}, math.nan)])]), end="")
    # HELP rlwatch_reward_mean mean reward
    # TYPE rlwatch_reward_mean gauge
    rlwatch_reward_mean{run="a\"b"} NaN
    """
    lines = []
    for gauge in given:
        name = _NO_NAME.sub("_", gauge.name) + ("_seconds" if gauge.unit == "s" else "")
        meaning = gauge.meaning + (f" ({gauge.unit})" if gauge.unit not in ("", "s") else "")
        lines += [f"# HELP {name} {meaning.translate(_ESCAPED)}", f"# TYPE {name} gauge"]
        for labels, value in gauge.samples:
            pairs = ",".join(f'{label}="{text.translate(_ESCAPED)}"' for label, text in labels.items())
            lines.append(f"{name}{{{pairs}}} {_number(value)}")
    return "".join(f"{line}\n" for line in lines)


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(float(value)) if math.isfinite(value) else "+Inf" if value > 0 else "-Inf"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "…"
