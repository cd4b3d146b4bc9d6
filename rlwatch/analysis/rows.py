"""Rows of plain values about the runs of a store, for DataFrames and for the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING

from rlwatch import codec
from rlwatch.columns import LEFT_OUT_OF_RUNS
from rlwatch.metrics import LAYER_PREFIX, canonicalise, read_as, unit_of
from rlwatch.ports import Store
from rlwatch.records import JSON, RunInfo, RunState

if TYPE_CHECKING:
    from rlwatch.control.liveness import LivenessSigns

Row = dict[str, JSON]

KEY_METRICS = {
    "reward": ("reward/mean",),
    "entropy": ("policy/entropy",),
    "KL": ("policy/kl_ref", "policy/kl_ref_k3"),
    "grad norm": ("optim/grad_norm",),
}
"""Column -> canonical metrics, of which the first measured one is used: the main signs of a run's health."""


def describe(store: Store, run: RunInfo, now: float) -> dict[str, JSON]:
    """Return a run as a row: identity, status, verdict and the last value of each canonical metric.

    ``now``: Unix seconds, for the age of the run and its liveness.
    """
    last = {name: value for name, (_, value) in store.last_values(run.run_id).items()}
    from rlwatch.control.liveness import last_sign, sign_of
    from rlwatch.view import stored_verdict

    seen = last_sign(run)
    how = status(run, sign_of(store, run, now) if run.state is RunState.RUNNING else None)
    row = {
        "run_id": run.run_id,
        "project": run.project,
        "name": run.name,
        "source": run.source,
        "status": how,
        "verdict": stored_verdict(store, run, gone=how == "dead").to_dict(),
        "state": run.state,
        "tags": list(run.tags),
        "notes": run.curation.notes,
        "archived": run.curation.archived,
        "deleted_at": run.curation.deleted_at,
        "deleted_by": run.curation.deleted_by,
        "attempt": run.attempt,
        "last_step": run.last_step,
        "created_at": run.created_at,
        "age_s": None if seen is None else max(0.0, now - seen),
        "last_values": canonicalise(last, run.source)[0],
    }
    fields = codec.encoded(run.curation) | codec.encoded(run)
    return row | {name: value for name, value in fields.items() if name not in row and name not in LEFT_OUT_OF_RUNS}


def key_values(last: Mapping[str, float]) -> dict[str, float | None]:
    """Return each column of :data:`KEY_METRICS` (reward, entropy ...) -> last value; None if it was not measured.

    ``last``: canonical metric -> last value.
    """
    return {column: next((last[name] for name in names if name in last), None) for column, names in KEY_METRICS.items()}


def status(run: RunInfo, sign: LivenessSigns | None = None) -> str:
    """Return the status of a run in a word: ``running``, ``paused``, ``stale``, ``dead``, or its final state.

    Stale: no step came. Dead: its process gives no sign of life. The state that the writer stored counts, unless the
    run has been silent. ``sign``: its signs of life; None: not known.
    """
    if run.state is not RunState.RUNNING or sign is None:
        return run.state.value
    if sign.pause is not None:
        return "paused"
    if sign.dead_since is not None:
        return "dead"
    return "running" if sign.silent_s is None else "stale"


HETEROGENEITY = "layers/heterogeneity"


def layer_row(store: Store, run: RunInfo) -> dict[str, JSON] | None:
    """Return how different the gradients of a run's layers are: last value, median and maximum over its steps.

    The row also has the layer with the largest gradient norm in the last step, and its share. None if it was never
    measured. The value is 1 - the mean correlation of the layers' gradient norms.
    """
    last = store.last_values(run.run_id)
    if HETEROGENEITY not in last:
        return None
    series = store.series(run.run_id, [HETEROGENEITY])[HETEROGENEITY]
    pairs = zip(series.steps.tolist(), series.values.tolist(), strict=True)
    known = [(value, int(step)) for step, value in pairs if math.isfinite(value)]
    if not known:
        return None
    largest, largest_step = max(known, key=lambda one: one[0])
    norms = {name: v for name, (_, v) in last.items() if name.startswith(LAYER_PREFIX) and math.isfinite(v)}
    return {
        "heterogeneity": known[-1][0],
        "step": known[-1][1],
        "median": median([value for value, _ in known]),
        "largest": largest,
        "largest_step": largest_step,
        "heaviest": max(norms, key=lambda name: norms[name], default="").removeprefix(LAYER_PREFIX),
        "max_share": last.get("layers/max_share", (0, math.nan))[1],
    }


def last_metrics(store: Store, run: RunInfo) -> list[dict[str, JSON]]:
    """Return a row for each recorded metric of a run: name, canonical name, unit, last step and last value."""
    rows = []
    for name, (at, value) in sorted(store.last_values(run.run_id).items()):
        canonical = read_as(name, run.source)
        rows.append({"metric": name, "canonical": canonical, "unit": unit_of(canonical), "step": at, "value": value})
    return rows
