"""The scorer: any number of tools on one table of runs, by one protocol."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from forecast.scoring.alarms import (
    AFTER,
    AFTER_ROWS,
    BEFORE,
    LEAD,
    MOST_OCCUPIED,
    Alarms,
    Episodes,
    Point,
    Timeline,
    at_least,
    episodes,
    expected,
    heard,
    share,
    thresholds_for,
)
from forecast.scoring.skill import Skill, ToolScores, skill

from rlwatch.forecast.examples import Split, folds_of
from rlwatch.forecast.forecast import HORIZONS
from rlwatch.forecast.labels import Labels, RunOutcome
from rlwatch.forecast.tables import Bools, Floats, Ints, RunTable

INTERVAL = (5, 95)
"""Percentiles: 90 % of the draws."""
Interval = tuple[float, float]


def drawn(runs: int, draws: int, seed: int) -> Ints:
    """Number of times that each run is drawn, of shape (draws, runs): as many as there are, with replacement."""
    chances = np.full(runs, 1.0 / max(runs, 1))
    return np.random.default_rng(seed).multinomial(runs, chances, size=draws).astype(np.int64)


def interval(draws: Ints, part: Floats, whole: Floats, scale: float = 1.0) -> Interval | None:
    """Of ``scale * sum(part) / sum(whole)``, each with one entry a run; None where no draw has a whole."""
    parts, wholes = draws @ part, draws @ whole
    usable = wholes > 0
    if not usable.any():
        return None
    low, high = np.percentile(scale * parts[usable] / wholes[usable], INTERVAL)
    return float(low), float(high)


# What alarms found in runs of others, repository by repository.
#
# Runs of one repository share code, model and data: five of them that fail alike are little more than one.

ONCE = "each once"
"""The name under which all repositories stand, each counted as one."""
Names = npt.NDArray[np.str_]


@dataclass(frozen=True)
class Hits:
    """``found`` failures had an alarm in a window.

    ``placebo``: how many a tool would have hit that alarms in them as it does in clean runs over the same steps, each
    repository's clean runs weighing the same; ``p``: chance of as many hits or more then.
    """

    found: int
    placebo: float
    p: float


@dataclass(frozen=True)
class Repository:
    """Of ``failures``, early ones too: with an alarm ``by_onset`` (from 100 steps before), and ``late``, by 10 steps or
    10 logged rows after it.

    Of an early failure both count from the start of monitoring. ``clean_alarmed`` of ``clean`` runs had any alarm.
    Under :data:`ONCE` all these count repositories: found is one in half or more of its failures, alarmed one in half
    or more of its clean runs.
    """

    failures: int
    by_onset: Hits
    late: Hits
    clean: int
    clean_alarmed: int


@dataclass(frozen=True)
class _Case:
    """One repository: of each window whether its failures were found and the chance of each; its clean runs' alarms."""

    windows: tuple[tuple[Bools, Floats], tuple[Bools, Floats]]
    alarmed: Bools

    @property
    def failures(self) -> int:
        return len(self.windows[0][0])

    def counted(self) -> Repository:
        by_onset, late = (_hits(found, chances) for found, chances in self.windows)
        return Repository(self.failures, by_onset, late, len(self.alarmed), int(self.alarmed.sum()))


def by_repository(alarms: Alarms) -> dict[str, Repository]:
    """Of each repository that a label names, and last of all of them, each once; nothing where none is named."""
    line = alarms.timeline
    names: Names = np.array([label.repository for label in line.labels], dtype=np.str_)
    known = sorted(set(names.tolist()) - {""})
    if not known:
        return {}
    failures = np.sort(np.concatenate([line.events, line.early]))
    first, onset = line.window(failures, -BEFORE, 0)
    onset = np.maximum(onset, line.start)
    late = np.maximum(onset + AFTER, line.rows_after(failures, onset, AFTER_ROWS))
    windows = [(alarms.within(failures, first, last), _chances(alarms, names, first, last)) for last in (onset, late)]
    alarmed = alarms.ever(line.clean)
    cases = {}
    for name in known:
        mine = names[failures] == name
        by_onset, after = ((found[mine], chances[mine]) for found, chances in windows)
        cases[name] = _Case((by_onset, after), alarmed[names[line.clean] == name])
    return {name: case.counted() for name, case in cases.items()} | {ONCE: _once(list(cases.values()))}


def _chances(alarms: Alarms, names: Names, first: Ints, last: Ints) -> Floats:
    """Of each window, the share of clean runs with an alarm in it: the mean over repositories that reach it."""
    clean = alarms.timeline.clean
    reached = alarms.timeline.table.last[clean][None, :] >= first[:, None]
    alarmed = alarms.within(np.broadcast_to(clean, reached.shape), first[:, None], last[:, None]) & reached
    shares, there = np.zeros(len(first)), np.zeros(len(first))
    for name in np.unique(names[clean]):
        mine = names[clean] == name
        shares += expected(alarmed[:, mine], reached[:, mine])
        there += reached[:, mine].any(axis=1)
    return shares / np.maximum(there, 1)


def _once(cases: Sequence[_Case]) -> Repository:
    """Each repository as one failure, as likely to be found by chance as its failures are on average."""
    failing = [case for case in cases if case.failures]
    by_onset, late = (
        _hits(
            np.array([case.windows[i][0].mean() >= 0.5 for case in failing], dtype=bool),
            np.array([case.windows[i][1].mean() for case in failing], dtype=np.float64),
        )
        for i in (0, 1)
    )
    sound = [bool(case.alarmed.mean() >= 0.5) for case in cases if len(case.alarmed)]
    return Repository(len(failing), by_onset, late, len(sound), sum(sound))


def _hits(found: Bools, chances: Floats) -> Hits:
    count = int(found.sum())
    return Hits(count, float(chances.sum()), at_least(count, chances.tolist()))


# What an evaluation says: one result a tool, and what it was judged on.

HEADLINE = 1.0
"""False alarm episodes per 1000 healthy steps at which tools are compared."""


@dataclass(frozen=True)
class Setting:
    """A tool at a budget: what it found, 90 % intervals of recall and of false alarms per 1000 steps.

    ``met``: whether what it realised is within the budget, and not most of the time (as it is: within the headline's).
    """

    point: Point
    recall_interval: Interval | None
    per_1000_interval: Interval | None
    met: bool = True

    def to_dict(self) -> dict[str, Any]:
        """With the rates."""
        told = {"recall_interval": self.recall_interval, "per_1000_interval": self.per_1000_interval, "met": self.met}
        return self.point.to_dict() | told


@dataclass(frozen=True)
class Group:
    """Runs of one family, recipe or type of failure: events forecast and detected, clean runs that alarmed."""

    runs: int = 0
    events: int = 0
    forecast: int = 0
    detected: int = 0
    clean: int = 0
    clean_alarmed: int = 0

    @property
    def recall(self) -> float | None:
        """Share of events forecast."""
        return share(self.forecast, self.events)


@dataclass(frozen=True)
class ToolResult:
    """One tool. Settings by budget (episodes per 1000 steps); of a tool without a dial only ``as_is``.

    ``transferred``: thresholds from the other folds; ``pooled``: from the scored runs themselves, so flattering;
    ``strict``: transferred (pooled without folds), where alarms in ambiguous and faulty runs are
    false too. ``repositories``: of runs of others, by name.
    """

    name: str
    note: str
    transferred: Mapping[float, Setting]
    pooled: Mapping[float, Setting]
    strict: Mapping[float, Setting]
    as_is: Setting | None
    skill: tuple[Skill, ...]
    groups: Mapping[str, Mapping[str, Group]]
    repositories: Mapping[str, Repository] = field(default_factory=dict)

    @property
    def headline(self) -> Setting:
        """Setting that it is compared by: as it is, else transferred, else pooled."""
        if self.as_is is not None:
            return self.as_is
        return (self.transferred or self.pooled)[HEADLINE]

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers."""
        budgets = {
            kind: {f"{budget:g}": setting.to_dict() for budget, setting in getattr(self, kind).items()}
            for kind in ("transferred", "pooled", "strict")
        }
        return {
            "name": self.name,
            "note": self.note,
            "headline": self.headline.to_dict(),
            "as_is": None if self.as_is is None else self.as_is.to_dict(),
            **budgets,
            "skill": {str(each.horizon): asdict(each) for each in self.skill},
            "groups": {
                by: {name: asdict(group) | {"recall": group.recall} for name, group in found.items()}
                for by, found in self.groups.items()
            },
            "repositories": {name: asdict(each) for name, each in self.repositories.items()},
        }


@dataclass(frozen=True)
class Evaluation:
    """All tools on one table; ``about``: runs, steps, labels, split, seed... it was made of."""

    about: Mapping[str, Any]
    tools: tuple[ToolResult, ...]

    def __getitem__(self, name: str) -> ToolResult:
        """The result of one tool."""
        return next(tool for tool in self.tools if tool.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers."""
        return {"about": dict(self.about), "tools": [tool.to_dict() for tool in self.tools]}


BUDGETS = (0.5, HEADLINE, 2.0)
"""False alarm episodes per 1000 healthy steps."""
DRAWS = 300
Progress = Callable[[Sequence[ToolScores]], Iterable[ToolScores]]
"""Wraps the tools, to show how far the evaluation is."""


def evaluate(
    table: RunTable,
    labels: Labels,
    tools: Sequence[ToolScores],
    *,
    split: Split | str = Split.RUN,
    folds: int = 5,
    draws: int = DRAWS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Evaluation:
    """Judge ``tools`` on ``table``.

    Parameters
    ----------
    table, labels
        Rows of runs, and one label for each run.
    tools
        What each tool said, aligned to the rows.
    split, folds
        How runs are dealt into folds for picking thresholds (:func:`folds_of`); ``none``: only pooled thresholds.
        A tool that was fitted must have been fitted on the same folds: scores come from outside, so nothing checks it.
    draws, seed
        Bootstrap draws over runs, for 90 % intervals.
    progress
        Wraps ``tools``.

    Raises
    ------
    ConfigError
        If a run has no label.
    """
    split = Split(split)
    fold = folds_of(table, split, folds) if split is not Split.NONE else None
    field = Field(Timeline.of(table, labels), fold, drawn(len(table.runs), draws, seed))
    results = tuple(field.judge(tool) for tool in (tools if progress is None else progress(tools)))
    made = {"split": split.value, "folds": 0 if fold is None else folds, "draws": draws, "seed": seed}
    return Evaluation(_about(field.line, labels) | made, results)


def _about(line: Timeline, labels: Labels) -> dict[str, Any]:
    healthy, strict = line.healthy(), line.healthy(strict=True)
    return {
        "runs": len(line.labels),
        "rows": len(line.table),
        "recipes": len(set(line.table.recipes) - {""}),
        "families": len(set(line.table.families) - {""}),
        "classes": {outcome.value: int(line.are(outcome).sum()) for outcome in RunOutcome},
        "types": dict(Counter(line.labels[i].type for i in line.events).most_common()),
        "healthy_steps": float(line.weight[healthy].sum()),
        "healthy_rows": int(healthy.sum()),
        "strict_steps": float(line.weight[strict].sum()),
        "labels": labels.version,
    }


@dataclass(frozen=True)
class Field:
    """Runs, labels and folds, on which tools are judged one after the other."""

    line: Timeline
    fold: Ints | None
    draws: Ints

    @cached_property
    def _healthy(self) -> dict[bool, Bools]:
        return {strict: self.line.healthy(strict=strict) for strict in (False, True)}

    def judge(self, tool: ToolScores) -> ToolResult:
        """One tool."""
        false = {strict: episodes(self.line, tool.score, rows) for strict, rows in self._healthy.items()}
        skills = tuple(skill(self.line, tool, horizon, self.draws) for horizon in HORIZONS)
        if tool.alarms_only:
            whole = Alarms(self.line, false[False], heard(tool.score), np.ones(len(self.line.labels)))
            return ToolResult(
                tool.name,
                tool.note,
                {},
                {},
                {},
                self._setting(whole, HEADLINE),
                skills,
                self._groups(whole),
                by_repository(whole),
            )
        pooled = self._at_budgets(tool, false[False], None)
        strict = self._at_budgets(tool, false[True], self.fold)
        transferred = {} if self.fold is None else self._at_budgets(tool, false[False], self.fold)
        headline = (transferred or pooled)[HEADLINE]
        return ToolResult(
            tool.name,
            tool.note,
            self._settings(transferred),
            self._settings(pooled),
            self._settings(strict),
            None,
            skills,
            self._groups(headline),
            by_repository(headline),
        )

    def _settings(self, found: Mapping[float, Alarms]) -> dict[float, Setting]:
        return {budget: self._setting(alarms, budget) for budget, alarms in found.items()}

    def _at_budgets(self, tool: ToolScores, found: Episodes, fold: Ints | None) -> dict[float, Alarms]:
        """Alarms at thresholds that keep to each budget: of each fold, from all other folds; without folds, of all."""
        score = heard(tool.score)
        runs = len(self.line.labels)
        thresholds = np.full((len(BUDGETS), runs), np.nan)
        for each in [None] if fold is None else np.unique(fold):
            others = np.ones(runs, dtype=bool) if each is None else fold != each
            rows = self.line.monitored & others[self.line.table.run_of]
            mine = others if each is None else ~others
            thresholds[:, mine] = np.array(thresholds_for(found, others, score[rows], BUDGETS))[:, None]
        return {b: Alarms(self.line, found, score, at) for b, at in zip(BUDGETS, thresholds, strict=True)}

    def _setting(self, alarms: Alarms, budget: float) -> Setting:
        point = alarms.point()
        runs = len(self.line.labels)
        events, hits = np.zeros(runs), np.zeros(runs)
        events[self.line.events], hits[self.line.events] = 1.0, alarms.hits(-LEAD)
        begun = alarms.found.begun(alarms.threshold).astype(np.float64)
        steps = np.bincount(alarms.found.place, weights=alarms.found.weight, minlength=runs).astype(np.float64)
        met = (point.per_1000 or 0.0) <= budget and (point.occupancy or 0.0) <= MOST_OCCUPIED
        recall = interval(self.draws, hits, events)
        return Setting(point, recall, interval(self.draws, begun, steps, 1000.0), met)

    def _groups(self, alarms: Alarms) -> dict[str, dict[str, Group]]:
        table, line = self.line.table, self.line
        types = tuple(label.type for label in line.labels)
        flags = _flags(alarms)
        named = {"time to warn": line.warning, "family": table.families, "recipe": table.recipes, "type": types}
        return {by: _grouped(names, flags) for by, names in named.items()}


def _flags(alarms: Alarms) -> dict[str, Floats]:
    """Of each run, 1 where it counts as that."""
    line = alarms.timeline
    flags = {name: np.zeros(len(line.labels)) for name in ("events", "forecast", "detected", "clean", "clean_alarmed")}
    flags["events"][line.events] = 1
    flags["forecast"][line.events] = alarms.hits(-LEAD)
    flags["detected"][line.events] = alarms.hits(AFTER)
    flags["clean"][line.clean] = 1
    flags["clean_alarmed"][line.clean] = alarms.ever(line.clean)
    return flags


def _grouped(names: Sequence[str], flags: dict[str, Floats]) -> dict[str, Group]:
    groups = {}
    for name in sorted(set(names) - {""}):
        mine = np.array([each == name for each in names])
        groups[name] = Group(int(mine.sum()), **{what: int(flag[mine].sum()) for what, flag in flags.items()})
    return groups
