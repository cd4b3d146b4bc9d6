"""The same runs with a row every so many steps, as trainers log them, and whether the same is told in time of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from detection.runs import Labelled
from detection.score import AFTER_ROWS, AFTER_STEPS, Level, Rate, Run, Told, share

from rlwatch.records import StepRecord

ENOUGH_ROWS = 10
"""With fewer rows up to a failure nobody can be asked to tell it."""
HOW: dict[str, Callable[[list[float]], float]] = {"mean": statistics.fmean, "last": lambda values: values[-1]}
"""Mean over the window (of a value that is NaN in one of its rows: NaN), or the last value in it."""


def resampled(run: Labelled, every: int, how: str) -> Labelled:
    """The run with a row at each multiple of ``every`` steps, of the rows since the one before.

    A window that the run does not complete is not logged. A run whose own rows are as far apart stays what it is.
    """
    if every <= run.run.spacing:
        return run
    windows: dict[tuple[int, int], list[StepRecord]] = {}
    for record in run.records:
        windows.setdefault((record.attempt, ceil(record.step / every) * every), []).append(record)
    last = max((record.step for record in run.records), default=0)
    records = [
        replace(rows[-1], step=step, metrics=_joined(rows, HOW[how]))
        for (_, step), rows in windows.items()
        if step <= last
    ]
    steps = tuple(sorted({record.step for record in records}))
    return Labelled(replace(run.run, steps=steps), records, run.source)


def drawn_apart(run: Labelled, times: int) -> Labelled:
    """The same rows, ``times`` as many steps apart: small batches as sparse as trainers log them, and not averaged.

    An alarm is in time two rows after the onset then, where it had ten. Of runs that log every step or second one.
    """
    records = [replace(record, step=record.step * times) for record in run.records]
    onset = None if run.run.onset is None else run.run.onset * times
    steps = tuple(step * times for step in run.run.steps)
    return Labelled(replace(run.run, onset=onset, steps=steps), records, run.source)


def _joined(rows: Sequence[StepRecord], how: Callable[[list[float]], float]) -> dict[str, float]:
    """Each metric of the rows of a window; of several records of one step the last value counts."""
    by_step: dict[str, dict[int, float]] = {}
    for record in rows:
        for name, value in record.metrics.items():
            by_step.setdefault(name, {})[record.step] = value
    return {name: how(list(values.values())) for name, values in by_step.items()}


@dataclass(frozen=True)
class Agreement:
    """Of the runs that are sparser than they were: what became of their first alarm.

    ``same``: of those alarmed as they were logged, within 10 steps or two rows of where it was; ``able``: of these the
    runs that still have ten rows by then. ``quiet``: of the others, not alarmed either. ``later``, ``earlier``,
    ``lost``, ``new``: how many are neither.
    """

    same: Rate
    able: Rate
    quiet: Rate
    later: int
    earlier: int
    lost: int
    new: int


def agreement(
    runs: Sequence[Run], dense: Sequence[Told], sparse: Sequence[Told], every: int, level: Level
) -> Agreement:
    """Compare what was told of ``runs`` (as they were logged) with what was told of a row every ``every`` steps."""
    within = max(AFTER_STEPS, AFTER_ROWS * every)
    fates = []
    for run, a, b in zip(runs, dense, sparse, strict=True):
        was = _first(a, level)
        if run.spacing < every:
            able = was is not None and (was + within) // every - run.steps[0] // every >= ENOUGH_ROWS
            fates.append((run.project, _fate(was, _first(b, level), within), was is not None, able))
    return Agreement(
        same=_same([(project, fate) for project, fate, alarmed, _ in fates if alarmed]),
        able=_same([(project, fate) for project, fate, _, able in fates if able]),
        quiet=_same([(project, fate) for project, fate, alarmed, _ in fates if not alarmed]),
        **{name: sum(fate == name for _, fate, *_ in fates) for name in ("later", "earlier", "lost", "new")},
    )


def _same(fates: Sequence[tuple[str, str]]) -> Rate:
    return share([project for project, _ in fates], [fate == "same" for _, fate in fates])


def _first(told: Told, level: Level) -> int | None:
    return min((alarm.step for alarm in told.alarms if level(alarm)), default=None)


def _fate(dense: int | None, sparse: int | None, within: int) -> str:
    if dense is None or sparse is None:
        return "same" if dense is sparse else "lost" if sparse is None else "new"
    if abs(sparse - dense) <= within:
        return "same"
    return "later" if sparse > dense else "earlier"


def every_way(labelled: Sequence[Labelled], every: Sequence[int]) -> Iterator[tuple[str, int, list[Labelled]]]:
    """(how, every, runs) of each way of logging them but their own."""
    for steps in every:
        for how in HOW if steps > 1 else ():
            yield how, steps, [resampled(run, steps, how) for run in labelled]
