"""The runs of a store as gauges for monitoring systems: in Prometheus' text format, or as values for OpenTelemetry.

A gauge is a quantity with a name of rlwatch, whatever trainers call it; a sample of the gauge is the last value of one
run. Metrics that rlwatch does not know are left out: there are some hundred gauges, and not one for each layer.

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
"""HTTP content type of the text that :func:`exposition` returns."""
_URGENCY = {Severity.INFO.value: 0, Severity.WARNING.value: 1, Severity.CRITICAL.value: 2}
_NO_NAME = re.compile(r"[^a-zA-Z0-9_]")
_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
LONGEST_LABEL = 200


@dataclass(frozen=True, slots=True)
class Gauge:
    """One quantity for a monitoring system, with its last value in each run.

    Parameters
    ----------
    name
        Name with dots, such as ``rlwatch.reward.mean``.
    meaning, unit
        Description and unit.
    samples
        Pairs of the labels of a run (name -> text) and its value.
    """

    name: str
    meaning: str
    unit: str = ""
    samples: list[tuple[Labels, float]] = field(default_factory=list)


def gauges(store: Store, now: float, *, quiet_for_s: float = math.inf) -> list[Gauge]:
    """Return the gauges of all live or recent runs of ``store``, sorted by name.

    ``now``: Unix seconds. ``quiet_for_s``: runs without a row or heartbeat for so many seconds are left out. Archived
    runs are left out, too.
    """
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
    """Yield each gauge for which a run has a value, with the labels of that gauge alone, and the value."""
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
    r"""Return ``given`` gauges as text in the format of Prometheus.

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
