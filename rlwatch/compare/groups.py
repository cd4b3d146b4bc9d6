"""Form groups of runs (seeds of one configuration) by a tag, a setting or the name, and compare two groups."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlwatch.compare.alignment import READ_AT_ONCE, Axis, ComparedRun, Side, judged_metrics
from rlwatch.compare.configs import ConfigOption, config_diff
from rlwatch.compare.noise import ALPHA, Answer, SeedComparison, compare_seeds, corrected
from rlwatch.errors import ConfigError
from rlwatch.records import GROUP_TAG, ORIGIN, RunInfo
from rlwatch.wording import nearest, number, plural

MOST_LISTED = 5
EARLY = 0.8
"""Share of the longest run's length below which another run of the group counts as ending early."""
_SEED = re.compile(r"(?:[-_ ./](?:seed|s)[-_ =]?)?\d+$")
_OF_A_SEED = re.compile(r"(?:^|[._])(?:seed|data_seed|run_name|output_dir|logging_dir)$")


def group_of(run: RunInfo) -> str:
    """Return the name of a run's group: its tag ``group:NAME``, else its setting ``group``, else its name without the
    seed.

    >>> group_of(RunInfo("r1", name="math-7b-s3")), group_of(RunInfo("r2", name="x-1", tags=("group:A",)))
    ('math-7b', 'A')
    """
    for tag in run.tags:
        if tag.startswith(GROUP_TAG) and tag != GROUP_TAG:
            return tag.removeprefix(GROUP_TAG)
    given = run.config.get("group")
    if isinstance(given, str) and given:
        return given
    name = run.name or run.run_id
    return _SEED.sub("", name).rstrip("-_ ./") or name


def runs_of_group(runs: Sequence[RunInfo], name: str) -> list[RunInfo]:
    """Return the runs of a group in the order of ``runs``, without deleted ones.

    Parameters
    ----------
    runs
        All runs of the store.
    name
        Name of the group, or ``PROJECT/NAME``.

    Raises
    ------
    ConfigError
        If the group has no run or only one, or if groups of several projects have this name.
    """
    members: dict[str, list[RunInfo]] = {}
    for run in runs:
        if not run.curation.deleted:
            members.setdefault(group_of(run), []).append(run)
    project, _, rest = name.partition("/")
    found = members.get(name, []) or [run for run in members.get(rest, []) if run.project == project]
    projects = list(dict.fromkeys(run.project for run in found))
    if len(projects) > 1:
        offered = ", ".join(f"{one}/{name}" for one in projects[:MOST_LISTED])
        raise ConfigError(f"group {name!r} is in {len(projects)} projects; give one of {offered}")
    if len(found) > 1:
        return found
    if found:
        raise ConfigError(f"group {name!r} has one run, {found[0].run_id}; a group of seeds needs two")
    several = [group for group, of in members.items() if len(of) > 1]
    close = nearest(name, several, MOST_LISTED, 0.5) or several[:MOST_LISTED]
    hint = f"there are {', '.join(close)}" if close else "no group of this store has two runs"
    raise ConfigError(f"no group {name!r}; {hint}; rlwatch.init(group=...) or a tag {GROUP_TAG}NAME makes one")


@dataclass(frozen=True, slots=True)
class SeedGroup:
    """Runs with one configuration and different seeds, under a name."""

    name: str
    runs: tuple[ComparedRun, ...]

    @property
    def mixed(self) -> list[ConfigOption]:
        """Settings in which the runs of the group differ, other than seeds and output paths."""
        return [
            setting
            for setting in config_diff([run.config for run in self.runs])
            if not _OF_A_SEED.search(setting.name) and not setting.name.startswith((f"{ORIGIN}.", "group"))
        ]


@dataclass(frozen=True, slots=True)
class GroupComparison:
    """Result of comparing two groups of seeds, metric by metric.

    Attributes
    ----------
    metrics
        Result of each metric by canonical name. Metrics that differ come first, by step, and among them those whose
        corrected p is significant.
    p_of_all
        p-value of each metric, corrected for the number of metrics.
    left_out
        Metrics without a place at which every run has a finite value.
    early
        Last place of each run that ends before :data:`EARLY` of the longest; later rows are not compared.
    """

    left: SeedGroup
    right: SeedGroup
    axis: Axis
    metrics: Mapping[str, SeedComparison]
    p_of_all: Mapping[str, float]
    left_out: tuple[str, ...] = ()
    early: Mapping[str, float] = field(default_factory=dict)

    @property
    def too_few(self) -> bool:
        """True if no metric could have been found to differ, with so few seeds."""
        return all(one.answer is Answer.TOO_FEW for one in self.metrics.values())

    @property
    def differing(self) -> list[str]:
        """Metrics in which the groups differ, in the order of ``metrics``."""
        return [name for name, one in self.metrics.items() if one.answer is Answer.DIFFERS]

    @property
    def answer(self) -> str:
        """Result of the comparison in one or two sentences."""
        sizes = len(self.left.runs), len(self.right.runs)
        count, any_one = plural(len(self.metrics), "metric"), next(iter(self.metrics.values()))
        if self.too_few:
            each, alone = any_one.needed
            fewer = self.left.name if sizes[0] <= sizes[1] else self.right.name
            more = "" if alone is None or sizes[0] == sizes[1] else f", or {alone} in {fewer} alone"
            return (
                f"Too few seeds: with {sizes[0]} against {sizes[1]}, p cannot be below "
                f"{number(any_one.smallest_p, 2)}; {each} in each group are needed{more}."
            )
        differing = self.differing
        if not differing:
            return f"None of {count} differs by more than seeds do (p > {ALPHA})."
        first = differing[0]
        one = self.metrics[first]
        since = "" if one.since is None else f" from {self.axis.place(one.since)}"
        sure = sum(self.p_of_all[name] <= ALPHA for name in differing)
        return (
            f"{len(differing)} of {count} {'differs' if len(differing) == 1 else 'differ'}, first {first}{since} "
            f"(p = {number(one.p, 2)}). By chance about {number(ALPHA * len(self.metrics), 2)} would; "
            f"{sure} still {'does' if sure == 1 else 'do'} with p corrected for all metrics."
        )


def compare_groups(left: SeedGroup, right: SeedGroup, axis: Axis = Axis.STEP) -> GroupComparison:
    """Compare two groups of seeds along ``axis``, in every metric that all their runs have.

    Raises
    ------
    ConfigError
        If both are one group, a group has fewer than two runs, no metric or no step is common to all runs, or a run
        did not record what ``axis`` needs.
    """
    if left.name == right.name:
        raise ConfigError(f"two groups are needed, got {left.name!r} twice")
    for group in (left, right):
        if len(group.runs) < 2:
            raise ConfigError(f"group {group.name!r} has {plural(len(group.runs), 'run')}; a group of seeds needs two")
    runs = [*left.runs, *right.runs]
    own = [set(judged_metrics(run)) for run in runs]
    names = sorted(set.intersection(*own))
    if not names:
        raise ConfigError(f"no metric is common to all runs of {left.name} and {right.name}")
    sides = [Side.of(run, axis) for run in runs]
    lacking = [side.subject.name for side in sides if side.ruler is None]
    if lacking:
        raise ConfigError(f"{' and '.join(lacking)} did not record {axis.value}")
    found: dict[str, SeedComparison] = {}
    ends = dict.fromkeys(range(len(runs)), 0.0)
    for some in (names[i : i + READ_AT_ONCE] for i in range(0, len(names), READ_AT_ONCE)):
        rows = [side.rows(some) for side in sides]
        for name in some:
            series = [one[name] for one in rows]
            ends = {i: max([ends[i], *one.x[-1:].tolist()]) for i, one in enumerate(series)}
            found[name] = compare_seeds(series[: len(left.runs)], series[len(left.runs) :])
    comparable = {name: one for name, one in found.items() if len(one.places)}
    if not comparable:
        raise ConfigError(f"no {axis.value} is common to all runs of {left.name} and {right.name}")
    together = dict(zip(comparable, corrected(list(comparable.values())), strict=True))

    def place(name: str) -> tuple[bool, bool, float, float, str]:
        one = comparable[name]
        return one.since is None, together[name] > ALPHA, one.since or 0.0, one.p, name

    ordered = sorted(comparable, key=place)
    return GroupComparison(
        left,
        right,
        axis,
        {name: comparable[name] for name in ordered},
        {name: together[name] for name in ordered},
        tuple(name for name in names if name not in comparable),
        {runs[i].name: end for i, end in ends.items() if end < EARLY * max(ends.values())},
    )
