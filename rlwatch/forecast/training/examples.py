"""Rows of labelled runs as examples: features, and how far the onset was."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from rlwatch.forecast.evaluation.labels import Label, Labels
from rlwatch.forecast.evaluation.run_table import RunTable
from rlwatch.forecast.features import FEATURES, FeatureStream
from rlwatch.forecast.history import WARM_UNTIL
from rlwatch.forecast.limits import nearest
from rlwatch.forecast.model import signal_of
from rlwatch.forecast.training.noise import noisy

Floats = npt.NDArray[np.float64]
Row = tuple[int, Mapping[str, float]]


@dataclass(frozen=True)
class Examples:
    """Examples of many runs.

    ``x``: features (n, features), float32, NaN where not measured; ``run``: place of the run in the table; ``step``;
    ``ahead``: steps to the onset (inf where the run has none, <= 0 from the onset on); ``left``: steps to the end of
    the run; ``static``: share of the way to the nearest limit; ``kind``: type of the run's onset, or "".
    """

    x: npt.NDArray[np.float32]
    run: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    ahead: Floats
    left: Floats
    static: Floats
    kind: npt.NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.step)

    def only(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> Examples:
        """Some of the rows."""
        columns = ("x", "run", "step", "ahead", "left", "static", "kind")
        return Examples(**{name: getattr(self, name)[rows] for name in columns})

    def at_risk(self) -> Examples:
        """The rows before the onset."""
        return self.only(self.ahead > 0)

    def moved(self, places: Sequence[int]) -> Examples:
        """The same with the places the runs have in a larger table."""
        return replace(self, run=np.asarray(places, dtype=np.int64)[self.run])

    def without(self, signals: Iterable[str]) -> Examples:
        """As if the runs did not log these signals."""
        lost = set(signals)
        x = self.x.copy()
        x[:, [signal_of(feature) in lost for feature in FEATURES]] = math.nan
        return replace(self, x=x)


def joined(parts: Sequence[Examples]) -> Examples:
    """All rows of several."""
    columns = ("x", "run", "step", "ahead", "left", "static", "kind")
    return Examples(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in columns})


def examples(
    table: RunTable,
    labels: Labels,
    *,
    every: int = 1,
    noise: int | None = None,
    jobs: int = 1,
    done: Callable[[], None] | None = None,
) -> Examples:
    """Examples of every run of a table, through the same code that sees a live run.

    Parameters
    ----------
    table, labels
        The runs, and when each of them failed.
    every
        As if the trainer had logged means over so many steps.
    noise
        As if each step had been a small batch; the seed of the noise.
    jobs
        Processes.
    done
        Called after each run, for a progress bar.

    Raises
    ------
    ConfigError
        If a run of the table has no label.
    """
    from joblib import Parallel, delayed

    known = labels.of(table)
    seeds = [None if noise is None else noise + i for i in range(len(table.runs))]
    work = (delayed(_of_run)(i, list(table.stream(i)), known[i], every, seed) for i, seed in enumerate(seeds))
    parts = []
    for part in Parallel(n_jobs=jobs, return_as="generator")(work):
        parts.append(part)
        if done is not None:
            done()
    return joined(parts)


def _of_run(place: int, rows: list[Row], label: Label, every: int, seed: int | None) -> Examples:
    stream, found = FeatureStream(), []
    rows = rows if seed is None else noisy(rows, seed)
    rows = coarse(rows, every) if every > 1 else rows
    for step, metrics in rows:
        features = stream.update(step, metrics)
        if features is not None and step >= rows[0][0] + WARM_UNTIL:
            close = nearest(features.reaches)
            found.append((step, features.values, close.share if close else 0.0))
    steps = np.array([step for step, _, _ in found], dtype=np.int64)
    onset = math.inf if label.onset is None else float(label.onset)
    return Examples(
        x=np.array([values for _, values, _ in found], dtype=np.float32).reshape(len(found), len(FEATURES)),
        run=np.full(len(found), place, dtype=np.int64),
        step=steps,
        ahead=np.asarray(onset - steps, dtype=float),
        left=rows[-1][0] - steps.astype(float) if rows else np.zeros(0),
        static=np.array([share for _, _, share in found], dtype=float),
        kind=np.full(len(found), label.type, dtype="U8"),
    )


def coarse(rows: Sequence[Row], every: int) -> list[Row]:
    """Means over ``every`` steps, as a trainer logs that does not log each of them; NaN where one was NaN."""
    found: list[Row] = []
    for _, group in groupby(rows, key=lambda row: row[0] // every):
        part = list(group)
        names = dict.fromkeys(name for _, metrics in part for name in metrics)
        means = {name: _mean([metrics[name] for _, metrics in part if name in metrics]) for name in names}
        found.append((part[-1][0], means))
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
