"""Skill of a forecaster by kind of log, beside a clock and a straight line, each run weighing the same.

The clock knows how many steps a run is old, the line how soon a straight line meets a limit. Both are given the chance
that runs of other projects had at that age, or so near a limit: the best that either can say. Intervals are 95 % of
bootstrap draws over projects, as runs of one project are little more than one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
HORIZONS = (20, 50, 100)
DRAWS, SEED = 400, 7
RANKS = 256
"""Bins of equal count by which scores are ranked."""
BINS = 8
"""Bins of a clock, and of a line, that are given a chance each."""
FARTHEST = 1e6
"""Where the score of a line is cut off: a limit may be infinitely far beyond."""
DIAGRAM = 10
"""Bins of a reliability diagram and of the calibration error."""


@dataclass(frozen=True)
class Rows:
    """Rows of runs before their failure. ``p``: chances (n, 3); ``ahead``: steps to the failure, infinite where the run
    has none; ``left``: steps that were watched after the row.
    """

    run: Ints
    project: Ints
    p: Floats
    clock: Floats
    line: Floats
    ahead: Floats
    left: Floats

    def within(self, horizon: int) -> tuple[Rows, Bools]:
        """Rows of which it is known whether a failure came within so many steps, and whether one did."""
        fails = self.ahead <= horizon
        known = fails | (np.where(np.isinf(self.ahead), self.left, self.ahead) >= horizon)
        return Rows(*(getattr(self, name)[known] for name in self.__dataclass_fields__)), fails[known]


def skill(rows: Rows, horizon: int) -> dict[str, Any] | None:
    """Of the chances at one horizon; None where no run fails, or all do."""
    known, fails = rows.within(horizon)
    if not fails.any() or fails.all():
        return None
    p = known.p[:, HORIZONS.index(horizon)]
    weight = 1.0 / np.bincount(known.run)[known.run]
    tools = {"clock": known.clock, "line": np.clip(known.line, -FARTHEST, FARTHEST)}
    others = {name: chance_elsewhere(score, fails, weight, known.project) for name, score in tools.items()}
    draws = _draws(known.project, known.run)
    ranked = {name: _ranked(score, fails, weight, known.run) for name, score in {"": p, **tools}.items()}
    wrong = {name: _by_run(weight * (each - fails) ** 2, known.run) for name, each in {"": p, **others}.items()}
    found: dict[str, Any] = {
        "runs": len(np.unique(known.run)),
        "failures": len(np.unique(known.run[fails])),
        "rows": len(fails),
        "came": round(float(np.average(fails, weights=weight)), 4),
        "auroc": round(float(_auroc(ranked[""], draws[:1])[0]), 3),
        "calibration_error": round(calibration_error(p, fails), 3),
    }
    for name in tools:
        found[f"auroc_{name}"] = round(float(_auroc(ranked[name], draws[:1])[0]), 3)
        found[f"auroc_over_{name}"] = _gain(_auroc(ranked[""], draws) - _auroc(ranked[name], draws))
        found[f"brier_over_{name}"] = _gain(1.0 - _total(wrong[""], draws) / _total(wrong[name], draws))
    return found


def chance_elsewhere(score: Floats, fails: Bools, weight: Floats, project: Ints) -> Floats:
    """Share of rows with such a score that failed in other projects, with a run's weight of what they all did."""
    edges = np.unique(np.quantile(score, np.linspace(0, 1, BINS + 1)[1:-1]))
    place, count = np.searchsorted(edges, score, side="right"), len(edges) + 1
    hits, whole = (np.bincount(place, weights=each, minlength=count) for each in (weight * fails, weight))
    found = np.empty(len(score))
    for one in np.unique(project):
        mine = project == one
        own_hits, own = (
            np.bincount(place[mine], weights=each[mine], minlength=count) for each in (weight * fails, weight)
        )
        left = (whole - own).sum()
        base = (hits - own_hits).sum() / left if left else 0.0
        found[mine] = ((hits - own_hits + base) / (whole - own + 1.0))[place[mine]]
    return found


def calibration_error(p: Floats, fails: Bools) -> float:
    """Expected calibration error in ten bins of equal width: each chance that was said counts once."""
    place = np.minimum((p * DIAGRAM).astype(np.int64), DIAGRAM - 1)
    return float(np.abs(np.bincount(place, weights=p - fails)).sum() / len(p))


def diagram(rows: Rows, horizon: int = 50) -> list[dict[str, float]]:
    """Of each bin of chances: mean of what was said, share that came, rows and runs."""
    known, fails = rows.within(horizon)
    p = known.p[:, HORIZONS.index(horizon)]
    found = []
    for low, high in pairwise(np.linspace(0, 1, DIAGRAM + 1)):
        inside = (p >= low) & ((p < high) | (high == 1.0))
        if inside.any():
            said, came = float(p[inside].mean()), float(fails[inside].mean())
            runs = len(np.unique(known.run[inside]))
            found.append({"said": round(said, 3), "came": round(came, 3), "rows": int(inside.sum()), "runs": runs})
    return found


def _by_run(values: Floats, run: Ints) -> Floats:
    return np.bincount(run, weights=values)


def _draws(project: Ints, run: Ints) -> Floats:
    """How often each run counts (draws, runs): all once first, then projects drawn with replacement."""
    number = np.unique(project, return_inverse=True)[1]
    whose = np.zeros(int(run.max()) + 1, dtype=np.int64)
    whose[run] = number
    there = np.bincount(run) > 0
    projects = int(number.max()) + 1
    draw = np.random.default_rng(SEED)
    drawn = draw.multinomial(projects, np.full(projects, 1.0 / projects), size=DRAWS)
    return np.concatenate((np.ones((1, len(whose))), drawn[:, whose])) * there


def _ranked(score: Floats, fails: Bools, weight: Floats, run: Ints) -> tuple[Floats, Floats]:
    """Weight of failing rows and of others by run and rank of the score, each (runs, ranks)."""
    edges = np.unique(np.quantile(score, np.linspace(0, 1, RANKS)))
    place, ranks = np.searchsorted(edges, score, side="right"), len(edges) + 1
    runs = int(run.max()) + 1
    cell = run * ranks + place
    hits, misses = (
        np.asarray(np.bincount(cell, weights=weight * each, minlength=runs * ranks), dtype=np.float64)
        for each in (fails, ~fails)
    )
    return hits.reshape(runs, ranks), misses.reshape(runs, ranks)


def _auroc(ranked: tuple[Floats, Floats], draws: Floats) -> Floats:
    """In each draw; NaN where all rows are alike."""
    hits, misses = (draws @ each for each in ranked)
    below = np.cumsum(misses, axis=1) - misses
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((hits * (below + misses / 2.0)).sum(1) / (hits.sum(1) * misses.sum(1)))


def _total(by_run: Floats, draws: Floats) -> Floats:
    return np.asarray(draws @ by_run)


def _gain(values: Floats) -> list[float]:
    """The difference, and the ends of its interval."""
    low, high = np.quantile(values[1:][np.isfinite(values[1:])], (0.025, 0.975))
    return [round(float(each), 3) for each in (values[0], low, high)]


# The reliability diagrams as a picture.

WIDTH, HEIGHT, GAP = 200, 200, 56
LINE, SOFT = "#3b82f6", "#8a8a8a"
"""Read on white and on dark grey alike."""


def picture(diagrams: Sequence[tuple[str, Sequence[dict[str, float]]]], text: Callable[[str], str]) -> str:
    """An SVG: of each named diagram what was said (across) against what came (up); the area of a point is its rows."""
    wide = GAP + len(diagrams) * (WIDTH + GAP)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {HEIGHT + 84}" font-family="sans-serif">']
    for i, (name, bins) in enumerate(diagrams):
        parts += _axes(GAP + i * (WIDTH + GAP), text(name))
        most = max((each["rows"] for each in bins), default=1)
        for each in bins:
            x = GAP + i * (WIDTH + GAP) + WIDTH * each["said"]
            y, r = 30 + HEIGHT * (1.0 - each["came"]), 2.5 + 7.0 * (each["rows"] / most) ** 0.5
            title = f"said {each['said']:.2f}, came {each['came']:.2f}: {each['rows']} rows of {each['runs']} runs"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}" fill="{LINE}"><title>{title}</title></circle>')
    return "\n".join((*parts, "</svg>", ""))


def _axes(left: int, name: str) -> list[str]:
    ends = [(left, 30 + HEIGHT), (left + WIDTH, 30)]
    (x0, y0), (x1, y1) = ends
    return [
        f'<text x="{left}" y="18" font-size="14" fill="{SOFT}">{name}</text>',
        f'<rect x="{x0}" y="{y1}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="{SOFT}"/>',
        f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" stroke="{SOFT}" stroke-dasharray="4 4"/>',
        *(
            f'<text x="{x0 + WIDTH * at - 6}" y="{y0 + 18}" font-size="12" fill="{SOFT}">{at:g}</text>'
            f'<text x="{x0 - 26}" y="{y0 - HEIGHT * at + 4}" font-size="12" fill="{SOFT}">{at:g}</text>'
            for at in (0.0, 0.5, 1.0)
        ),
        f'<text x="{x0 + 50}" y="{y0 + 38}" font-size="12" fill="{SOFT}">chance said</text>',
    ]
