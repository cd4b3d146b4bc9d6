"""Forecasts of runs that the forecaster has not seen: scores of every row, fold by fold, for the scorer to judge.

Trees, calibration and thresholds of a fold come from the other folds; nothing of a fold's runs is used for its scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rlwatch.forecast import thresholds, training
from rlwatch.forecast.examples import Examples, Floats, folds_of
from rlwatch.forecast.features import FEATURES
from rlwatch.forecast.forecaster import BUDGET
from rlwatch.forecast.labels import Labels
from rlwatch.forecast.model import signal_of
from rlwatch.forecast.tables import RunTable, write_file
from rlwatch.forecast.training import (
    EVERYTHING,
    PROFILES,
    RISING,
    Learn,
    Prepared,
    TreeSettings,
    chances,
    grow,
    intervals,
    out_of_fold,
    platt_line,
)

Ints = npt.NDArray[np.int64]
TAILS = frozenset(
    {
        *("entropy_pos", "entropy_neg", "entropy_p10", "entropy_p90", "logp_min", "logp_positive", "displaced"),
        *("negative_push", "kl_ref_tail", "ratio_max", "mismatch_tail", "mismatch_prob"),
        *("mismatch_weights", "mismatch_sequences", "mismatch_cut", "advantage"),
    }
)
"""Signals that averaged scalars of a trainer do not hold: tails, signs, shares cut off."""


@dataclass(frozen=True)
class Tool:
    """Scores of the rows of the examples; ``p``: chances within the horizons (n, 3), where there are any."""

    name: str
    score: Floats
    p: Floats | None = None


def tools_of(
    table: RunTable,
    labels: Labels,
    parts: Prepared,
    split: str,
    how: TreeSettings,
    jobs: int = 1,
    progress: Callable[[str], None] = print,
) -> list[Tool]:
    """The forecaster, each of its layers, and the forecaster on poorer logs."""
    fold, fine = folds_of(table, split), parts.fine
    held = out_of_fold(
        parts.scored, parts.coarse, fold, how, jobs=jobs, progress=lambda what: progress(f"{split}: {what}")
    )
    held = {name: logits[: len(fine)] for name, logits in held.items()}
    harmless = thresholds.healthy(fine, thresholds.sound_until(table, labels))
    static = thresholds.smoothed(fine, fine.static)
    found = []
    for name, logits in held.items():
        p = calibrated(fine, fold, logits, held["taps"])
        model = thresholds.smoothed(fine, p[:, 1])
        risk = _risk(fine, fold, harmless, model, static)
        found.append(Tool("rlwatch" if name == "taps" else f"rlwatch on {name}", risk, p))
        if name == "taps":
            found += [Tool("rlwatch, model alone", model, p), Tool("rlwatch, limits alone", static)]
    return found


def ablations(
    table: RunTable,
    parts: Prepared,
    split: str,
    how: TreeSettings,
    jobs: int = 1,
    progress: Callable[[str], None] = print,
) -> list[Tool]:
    """The model alone in other forms: one of its halves, trees that may only rise, fewer signals."""
    fold = folds_of(table, split)
    found = []
    for name, (columns, form, learn) in _forms(how).items():
        progress(f"{split}: {name}")
        fine = parts.fine
        poorer = (_without(parts.scored, columns), _without(parts.coarse, columns))
        held = out_of_fold(*poorer, fold, form, profiles=["taps"], learn=learn, jobs=jobs)["taps"][: len(fine)]
        p = calibrated(fine, fold, held, held)
        found.append(Tool(f"model, {name}", thresholds.smoothed(fine, p[:, 1]), p))
    return found


def _forms(how: TreeSettings) -> dict[str, tuple[npt.NDArray[np.bool_], TreeSettings, Learn]]:
    """Name -> columns that are left out, how trees are grown, what learns."""
    signals = np.array([signal_of(feature) for feature in FEATURES])
    everything = np.zeros(len(FEATURES), dtype=bool)
    engine = np.isin(signals, sorted(EVERYTHING - PROFILES["taps without engine"]))
    return {
        "trees alone": (everything, how, grow),
        "line alone": (everything, how, training.fit_lines),
        "monotone trees": (everything, replace(how, rising=RISING), training.learn_blend),
        "no tails of our taps": (np.isin(signals, sorted(TAILS)), how, training.learn_blend),
        "no engine": (engine, how, training.learn_blend),
    }


def _without(part: Examples, columns: npt.NDArray[np.bool_]) -> Examples:
    x = part.x.copy()
    x[:, columns] = np.nan
    return Examples(x, part.run, part.step, part.ahead, part.left, part.static, part.kind)


def calibrated(fine: Examples, fold: Ints, logits: Floats, like: Floats) -> Floats:
    """Chances; each fold by lines fitted to the log-odds ``like`` of the others."""
    found = np.full(logits.shape, np.nan)
    for number in np.unique(fold):
        mine = fold[fine.run] == number
        lines = []
        for i, (rows, hit) in enumerate(intervals(fine)):
            others = ~mine[rows]
            lines.append(platt_line(like[rows[others], i], hit[others]))
        found[mine] = chances(logits[mine], lines)
    return found


def _risk(fine: Examples, fold: Ints, harmless: npt.NDArray[np.bool_], model: Floats, static: Floats) -> Floats:
    """Risk: how far beyond the nearer of the two thresholds; each fold by the thresholds of the others."""
    found = np.full(len(fine), np.nan)
    for number in np.unique(fold):
        mine = fold[fine.run] == number
        rows = np.flatnonzero(harmless & ~mine)
        part = fine.only(rows)
        (limits,) = thresholds.jointly(part, model[rows], static[rows], [float(BUDGET)])
        found[mine] = np.maximum(model[mine] / limits[0], static[mine] / limits[1])
    return found


def write_tools(folder: Path, split: str, table: RunTable, fine: Examples, tools: Sequence[Tool]) -> list[Path]:
    """One file a tool, ``run, step, score`` and its chances, in ``folder/split``."""
    place = folder / split
    place.mkdir(parents=True, exist_ok=True)
    runs = [table.runs[i] for i in fine.run]
    paths = []
    for tool in tools:
        columns: Mapping[str, Sequence[object]] = {
            "run": runs,
            "step": fine.step.tolist(),
            "score": tool.score.tolist(),
        }
        if tool.p is not None:
            columns = {**columns, **{f"p{h}": tool.p[:, i].tolist() for i, h in enumerate((20, 50, 100))}}
        paths.append(write_file(place / f"{tool.name}.parquet", columns))
    return paths
