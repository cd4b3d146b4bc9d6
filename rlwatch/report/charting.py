"""Which metrics a post-mortem draws: those its findings speak of first, then the vital ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rlwatch.metrics import BY_NAME, resolve
from rlwatch.ports import Series
from rlwatch.records import Finding
from rlwatch.report.curves import curve
from rlwatch.report.facts import Chart

MOST = 9
"""Charts drawn."""
VITAL = (
    "reward/mean",
    "policy/entropy",
    "policy/kl_ref",
    "policy/kl_ref_k3",
    "optim/grad_norm",
    "mismatch/k3",
    "mismatch/logp_absdiff",
    "len/mean",
    "len/clipped",
    "ratio/clipfrac",
    "reward/zero_std_frac",
    "optim/lr",
)


def wanted(names: Sequence[str], source: str, findings: Sequence[Finding]) -> list[str]:
    """Source names of the metrics to draw: one for each canonical name, the closest reading of it."""
    best: dict[str, str] = {}
    for name in sorted(names, key=lambda name: _distance(name, source)):
        reading = resolve(name, source)
        best.setdefault(reading.metric.name if reading is not None else name, name)
    spoken = [
        finding.metric for finding in sorted(findings, key=lambda f: (-f.severity.rank, f.onset_step)) if finding.metric
    ]
    vital = [name for name in VITAL if name in best]
    order = dict.fromkeys([*vital[:1], *(name for name in spoken if name in best), *vital])
    return [best[name] for name in list(order)[:MOST]]


def charts(
    series: Mapping[str, Series], source: str, findings: Iterable[Finding], starts: Mapping[int, int]
) -> tuple[Chart, ...]:
    """The lines of the wanted metrics, in the order given."""
    levels = {f.metric: f.baseline for f in findings if f.metric and f.baseline is not None}
    drawn = []
    for name, one in series.items():
        reading = resolve(name, source)
        canonical = reading.metric.name if reading is not None else name
        unit = BY_NAME[canonical].unit if canonical in BY_NAME else ""
        known_as = "" if name == canonical else name
        drawn.append(Chart(canonical, unit, known_as, curve(one, starts), levels.get(canonical)))
    return tuple(chart for chart in drawn if chart.curve)


def attempt_starts(series: Iterable[Series]) -> dict[int, int]:
    """First step of every attempt, over all ``series``."""
    starts: dict[int, int] = {}
    for one in series:
        for attempt in sorted(set(one.attempts.tolist())):
            first = int(one.steps[one.attempts == attempt].min())
            starts[attempt] = min(first, starts.get(attempt, first))
    return starts


def _distance(name: str, source: str) -> tuple[int, str]:
    reading = resolve(name, source)
    return (reading.closeness if reading is not None else 9, name)
