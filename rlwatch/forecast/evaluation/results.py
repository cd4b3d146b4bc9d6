"""What an evaluation says: one result a tool, and what it was judged on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rlwatch.forecast.evaluation.alarms import Point, share
from rlwatch.forecast.evaluation.bootstrap import Interval
from rlwatch.forecast.evaluation.repositories import Repository
from rlwatch.forecast.evaluation.skill import Skill

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
        """What it is compared by: as it is, else transferred, else pooled."""
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
