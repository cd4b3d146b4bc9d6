"""The scorer: any number of tools on one table of runs, by one protocol."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rlwatch.forecast.evaluation.alarms import Alarms
from rlwatch.forecast.evaluation.bootstrap import drawn, interval
from rlwatch.forecast.evaluation.episodes import MOST_OCCUPIED, Episodes, episodes, heard, thresholds_for
from rlwatch.forecast.evaluation.folds import Split, folds_of
from rlwatch.forecast.evaluation.labels import Labels, Outcome
from rlwatch.forecast.evaluation.repositories import by_repository
from rlwatch.forecast.evaluation.results import HEADLINE, Evaluation, Group, Setting, ToolResult
from rlwatch.forecast.evaluation.run_table import Bools, Floats, Ints, RunTable
from rlwatch.forecast.evaluation.scores import ToolScores
from rlwatch.forecast.evaluation.skill import skill
from rlwatch.forecast.evaluation.timeline import AFTER, LEAD, Timeline
from rlwatch.forecast.forecast import HORIZONS

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
        "classes": {outcome.value: int(line.are(outcome).sum()) for outcome in Outcome},
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
