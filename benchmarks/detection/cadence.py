"""The same runs with a row every so many steps, as trainers log them, and whether the same is told in time of them."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import ceil

from detection import record
from detection.methods import Judge
from detection.record import Recorded
from detection.runs import Labelled
from detection.score import AFTER_ROWS, AFTER_STEPS, LEVELS, Level, Rate, Run, Told, share

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
    for row in run.records:
        windows.setdefault((row.attempt, ceil(row.step / every) * every), []).append(row)
    last = max((row.step for row in run.records), default=0)
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
    for row in rows:
        for name, value in row.metrics.items():
            by_step.setdefault(name, {})[row.step] = value
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


def judged_every_way(
    name: str, labelled: Sequence[Labelled], judges: Mapping[str, Judge], every: Sequence[int], *, jobs: int
) -> Iterator[tuple[str, Recorded]]:
    """What is told of the set ``name`` in each way of logging it but its own, by the title of that way."""
    for how, steps, sparse in every_way(labelled, every):
        title = f"{name}, every {steps} ({how})"
        yield title, replace(record.record(sparse, judges, {}, jobs=jobs, title=title), every=steps, how=how)


# Kind by kind: the contract.


@dataclass(frozen=True)
class Kept:
    """Of the findings of one kind at one level, over runs that are sparser than they were.

    ``told``: runs that were told of as they were logged; ``same``: of these, told of within ten steps or two rows of
    where it was. ``quiet``: healthy runs that were not told of; ``newly``: of these, told of now.
    """

    told: int
    same: int
    quiet: int
    newly: int

    def __add__(self, other: Kept) -> Kept:
        return Kept(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def whole(self) -> bool:
        """Whether every run is told the same in time."""
        return self.same == self.told and not self.newly

    def worse_than(self, owed: Kept) -> bool:
        """Whether more is lost, or more healthy runs are told of, than what is known to be."""
        return self.told - self.same > owed.told - owed.same or self.newly > owed.newly


Ledger = dict[str, dict[str, dict[int, Kept]]]
"""By set of runs, ``kind.level`` and steps between rows: what is kept there, means and last values together."""


def by_kind(dense: Recorded, sparse: Recorded, method: str) -> dict[str, Kept]:
    """What is kept of each kind of finding, before alert rules wait."""
    found: dict[str, Kept] = {}
    before, after = dense.told[method], sparse.told[method]
    for kind in sorted({alarm.kind for told in (*before, *after) for alarm in told.findings}):
        for level in ("critical", "any"):
            fates = agreement(
                dense.runs, [_of_kind(told, kind) for told in before], [_of_kind(told, kind) for told in after],
                sparse.every, LEVELS[level],
            )  # fmt: skip
            healthy = [i for i, run in enumerate(dense.runs) if run.severity == "healthy"]
            calm = agreement(
                [dense.runs[i] for i in healthy], [_of_kind(before[i], kind) for i in healthy],
                [_of_kind(after[i], kind) for i in healthy], sparse.every, LEVELS[level],
            ).quiet  # fmt: skip
            found[f"{kind}.{level}"] = Kept(fates.same.total, fates.same.count, calm.total, calm.total - calm.count)
    return found


def _of_kind(told: Told, kind: str) -> Told:
    return Told(tuple(alarm for alarm in told.findings if alarm.kind == kind))


def ledger(recorded: Mapping[str, Recorded], method: str) -> Ledger:
    """What is kept, of every set that was judged in other ways of logging it too."""
    kept: Ledger = {}
    for name, dense in recorded.items():
        for sparse in () if dense.every else sparser(recorded, name):
            for what, of in by_kind(dense, sparse, method).items():
                every = kept.setdefault(name, {}).setdefault(what, {})
                every[sparse.every] = every.get(sparse.every, Kept(0, 0, 0, 0)) + of
    return kept


def sparser(recorded: Mapping[str, Recorded], name: str) -> list[Recorded]:
    """The set in the other ways of logging it."""
    return [told for title, told in recorded.items() if told.every and title.startswith(f"{name}, every ")]


def owed(kept: Ledger) -> str:
    """TOML of what is not kept, as told, same, quiet and newly by steps; what is not in it is kept whole."""
    lines = []
    for name, kinds in kept.items():
        lines.append(f"\n[{name}]")
        for what, by_steps in kinds.items():
            short = ", ".join(f"{every} = {list(astuple(of))}" for every, of in by_steps.items() if not of.whole)
            lines += [f'"{what}" = {{ {short} }}'] if short else []
    return "\n".join(lines).lstrip() + "\n"


def read_owed(text: str) -> Ledger:
    """Of such a TOML."""
    return {
        name: {what: {int(every): Kept(*of) for every, of in by_steps.items()} for what, by_steps in kinds.items()}
        for name, kinds in tomllib.loads(text).items()
    }


def broken(kept: Ledger, debts: Ledger) -> list[str]:
    """A line for each set, kind and cadence that keeps less than the contract, or than what is owed already."""
    return [
        f"{name}, {what}, every {every} steps: {of.same} of {of.told} in time, {of.newly} of {of.quiet} sound newly"
        for name, kinds in kept.items()
        for what, by_steps in kinds.items()
        for every, of in by_steps.items()
        if of.worse_than(debts.get(name, {}).get(what, {}).get(every, Kept(0, 0, 0, 0)))
    ]
