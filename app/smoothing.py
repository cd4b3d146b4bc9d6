"""Smoothing of a metric, and the positions of a run's steps on an axis of time or tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import streamlit as st

from rlwatch.compare.alignment import Axis, ComparedRun, counts, names_of, ruler
from rlwatch.ports import Series
from rlwatch.records import RunInfo

from . import queries
from .board import StepAxis, by_step, usual_range
from .queries import BUCKETS, Version
from .thinning import Floats, ThinnedCurve, thin

OFF = "off"
EMA = "EMA"
SMOOTHS = (OFF, "EMA 0.6", "EMA 0.9", "EMA 0.99", "mean of 10", "mean of 50", "mean of 200")
"""Smoothing choices: exponential moving averages by the weight of the past, and means of the last rows."""

FAINT = 1e-6
"""Total weight below which no smoothed value is drawn."""

HOUR_S, MILLION = 3600.0, 1e6


def smooth(values: Floats, how: str) -> Floats:
    """Return ``values`` (N,) smoothed, ignoring values that are not finite; NaN where no finite value is near.

    ``how`` is one of :data:`SMOOTHS`. The exponential moving average is debiased, as in wandb and TensorBoard.
    """
    finite = np.isfinite(values)
    kind, _, size = how.rpartition(" ")

    def summed(rows: Floats) -> Floats:
        return decayed(rows, float(size)) if kind == EMA else np.convolve(rows, np.ones(int(size)))[: len(rows)]

    sums, shares = summed(np.where(finite, values, 0.0)), summed(finite.astype(np.float64))
    smoothed: Floats = np.divide(sums, shares, out=np.full(len(values), np.nan), where=shares > FAINT)
    return smoothed


def decayed(rows: Floats, past: float) -> Floats:
    """Return exponentially decayed cumulative sums of ``rows`` (N,), with weight ``past`` per step back.

    Blocks are summed in parallel, then each adds the carry of the blocks before it. Unlike differences of running sums,
    an outlier costs no precision of the rows after it.
    """
    width = math.isqrt(max(len(rows), 1)) + 1
    sums = np.zeros((width, width))
    sums.ravel()[: len(rows)] = rows
    for column in range(1, width):
        sums[:, column] += past * sums[:, column - 1]
    fading = past ** np.arange(1, width + 1)
    for row in range(1, width):
        sums[row] += sums[row - 1, -1] * fading
    return sums.ravel()[: len(rows)]


def smoothed(values: Floats, how: str, *, clip: bool) -> Floats:
    """Return ``values`` (N,) smoothed by :func:`smooth` as ``how`` names; ``clip``: leave out outliers first."""
    if clip:
        low, high = usual_range(values)
        values = np.where((values < low) | (values > high), np.nan, values)
    return smooth(values, how) if len(values) else values


def smooth_curve(
    one: Series, starts: Mapping[int, int], window: tuple[int, int], how: str, *, clip: bool = False
) -> ThinnedCurve:
    """Return a smoothed metric as a curve over the steps of ``window``, from the rows that no later attempt replaced.

    Parameters
    ----------
    one
        The metric.
    starts
        First step of each attempt.
    window
        First and last step of the curve; smoothing uses earlier rows too.
    how
        One of :data:`SMOOTHS`.
    clip
        Leave out outliers first.
    """
    kept = counts(one, starts)
    order = np.argsort(one.steps[kept], kind="stable")
    steps, values = one.steps[kept][order], smoothed(one.values[kept][order], how, clip=clip)
    inside = (steps >= window[0]) & (steps <= window[1])
    curve = thin(steps[inside], values[inside], BUCKETS)
    return ThinnedCurve(curve.steps, curve.values, np.zeros(len(curve), dtype=np.bool_))


# Positions of steps.


def place_of(run: RunInfo, kind: str) -> StepAxis | None:
    """Return the axis of a run of the given kind (step, time or tokens), or None if the run does not
    log what it needs.
    """
    if kind == "step":
        outline = queries.outline(run)
        return by_step(outline.first, outline.last)
    return _place(queries.store_url(), queries.version(run), kind)


@st.cache_data(show_spinner=False, max_entries=20)
def _place(url: str, version: Version, kind: str) -> StepAxis | None:  # noqa: ARG001  (url and version are the key)
    source = queries.store()
    run = source.run(version[0])
    subject = ComparedRun(
        name=run.run_id,
        source=run.source,
        names=names_of(source.metric_names(run.run_id), run.source),
        read=lambda names: source.series(run.run_id, names),
        moments=lambda: source.moments(run.run_id),
    )
    outline = queries.outline(run)
    axis, unit = (Axis.TIME, HOUR_S) if kind == "time" else (Axis.TOKENS, MILLION)
    found = ruler(subject, axis, outline.last, outline.starts)
    if found is None:
        return None
    # Positions must increase, so that each belongs to one step.
    places = found.places / unit
    grown, first = np.unique(places, return_index=True)
    return StepAxis(kind, found.steps[first], grown) if len(grown) > 1 else None


MOST_KNOTS, NEAR = 400, 2e-4
"""Most knots of an axis sent to a browser, and the largest error between two of them as a share of its length."""


def knots(axis: StepAxis) -> tuple[list[int], list[float]]:
    """Return knots (steps and positions) of a piecewise linear approximation of an axis; a pause keeps both of its
    ends.
    """
    if axis.steps is None or axis.places is None:
        return [], []
    steps, places = np.asarray(axis.steps, dtype=np.float64), axis.places
    chosen = np.array([0, len(steps) - 1])
    limit = NEAR * float(places[-1] - places[0])
    while len(chosen) < MOST_KNOTS:
        away = np.abs(np.interp(steps, steps[chosen], places[chosen]) - places)
        worst = np.maximum.reduceat(away, chosen[:-1])
        at = np.array([
            first + int(np.argmax(away[first:last]))
            for first, last, far in zip(chosen[:-1], chosen[1:], worst, strict=True) if far > limit
        ], dtype=np.int64)  # fmt: skip
        if not len(at):
            break
        chosen = np.unique(np.concatenate((chosen, at)))
    return [int(step) for step in steps[chosen].tolist()], [float(f"{place:.8g}") for place in places[chosen].tolist()]
