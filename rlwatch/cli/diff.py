"""``rlwatch diff A B``: find the metric of two runs that diverged first, with evidence, and compare their settings.

With ``--group A --group B``: find the metrics in which two groups of runs with different seeds differ by more than
seeds do, and the step from which they do.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.cli.console import print_json, print_table, print_text, reading
from rlwatch.cli.options import (
    FormatOption,
    MapOption,
    OutputFormat,
    ReadAsOption,
    StoreOption,
    TrainerOption,
    examples,
    naming_of,
    no_log_either,
    opened,
)
from rlwatch.errors import ConfigError, ImportFormatError
from rlwatch.records import JSON
from rlwatch.wording import cell, number, one_line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rlwatch.compare import Axis, Band, ComparedRun, Comparison, ConfigOption, GroupComparison, SeedGroup
    from rlwatch.importers.naming import Naming

EPILOG = examples(
    "rlwatch diff math-7b-s3 math-7b-s1",
    "rlwatch diff crashed.log sound.log --by tokens",
    "rlwatch diff seeds.csv --format json | jq '.comparisons[].partings[0]'",
    "rlwatch diff --group math-7b --group math-7b-low-kl",
    "rlwatch diff --group 'runs/a-*.jsonl' --group 'runs/b-*.jsonl'",
)
LONGEST_VALUE = 60
SHOWN = 12
"""Most metric names that are printed in one line."""


def diff(
    subjects: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN|LOG...",
            help="Runs of the store (id, name, or the beginning of either), or logs as for rlwatch scan; a log of "
            "several runs stands for all of them. The first is compared with each of the others.",
        ),
    ] = None,
    *,
    groups: Annotated[
        list[str] | None,
        typer.Option(
            "--group",
            metavar="NAME|LOGS",
            help="Group of seeds, given twice: runs of the store by rlwatch.init(group=), a tag group:NAME, or their "
            "name without the seed; or logs, by a pattern as 'a-*.jsonl'.",
        ),
    ] = None,
    by: Annotated[str, typer.Option("--by", metavar="step|tokens|time", help="Align rows by this axis.")] = "step",
    store: StoreOption = None,
    read_as: ReadAsOption = None,
    source: TrainerOption = "",
    mapped: MapOption = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Find the first metric and step at which a run diverged from others, with evidence, and compare their settings.

    Noise is the distance between the runs before. With --group twice, noise is how seeds of one configuration differ,
    by a permutation test. Exit code 0: no divergence, 1: a metric diverged, 2: the runs cannot be compared, or the
    seeds are too few.
    """
    from rlwatch.compare import compare, config_diff

    axis = _axis(by)
    if groups:
        if subjects or len(groups) != 2:
            got = f"{len(groups)} of them and {len(subjects or ())} runs"
            raise ConfigError(f"--group is given twice, and no runs besides, got {got}")
        diff_groups([_group(name, store, read_as, source, naming_of(mapped)) for name in groups], axis, output)
        return
    if not subjects:
        raise ConfigError("name two runs or logs, or two groups with --group NAME --group NAME")
    runs = _subjects(subjects, store, read_as, source, naming_of(mapped))
    if len(runs) < 2:
        raise ConfigError(f"two runs are needed, got {len(runs)}: {', '.join(subjects)}")
    first, *others = _with_unique_names(runs)
    comparisons = [compare(first, other, axis) for other in others]
    problems = [one.problem for one in comparisons if one.problem]
    if problems:
        raise ConfigError("; ".join(dict.fromkeys(problems)) + "; try another --by")
    names = [first.name, *(other.name for other in others)]
    _print(names, comparisons, config_diff([one.config for one in (first, *others)]), output)
    if any(one.partings for one in comparisons):
        raise typer.Exit(1)


def _print(
    names: list[str], comparisons: list[Comparison], differing: list[ConfigOption], output: OutputFormat
) -> None:
    if output is OutputFormat.JSON:
        print_json(document(names, comparisons, differing))
    else:
        for comparison in comparisons:
            print_comparison(comparison)
        print_settings(names, differing)


def _axis(by: str) -> Axis:
    from rlwatch.compare import Axis

    offered = [axis.value for axis in Axis if axis is not Axis.CRASH]
    if by not in offered:
        raise ConfigError(f"--by is one of {', '.join(offered)}, not {by!r}")
    return Axis(by)


def _subjects(
    given: list[str], store: str | None, read_as: str | None, source: str, naming: Naming
) -> list[ComparedRun]:
    """Return the named runs; the store is opened only if a name is not a file."""
    stored = [name for name in given if not Path(name).is_file()]
    if len(stored) == len(given) == 1:
        raise ConfigError(f"two runs are needed, got one: {stored[0]}")
    logs = {name: _of_log(Path(name), read_as, source, naming) for name in given if name not in stored}
    return [run for name in given for run in (logs[name] if name in logs else [_of_store(name, store)])]


def _of_log(log: Path, read_as: str | None, source: str, naming: Naming) -> list[ComparedRun]:
    from rlwatch.compare import subject_of_records
    from rlwatch.importers import read_log

    with reading(log):
        runs = read_log(log, format=read_as, naming=naming)
    if not runs:
        raise ImportFormatError(str(log), "holds no run")
    return [subject_of_records(run.name or log.name, source or run.source, run.records, run.config) for run in runs]


def _of_store(name: str, url: str | None) -> ComparedRun:
    """Read a run of the store completely, since the store is closed before the comparison."""
    from rlwatch.analysis.lookup import find_run
    from rlwatch.compare import held

    with opened(url) as store, no_log_either(name):
        return held(store, find_run(store, name))


def _group(name: str, url: str | None, read_as: str | None, source: str, naming: Naming) -> SeedGroup:
    """Return the group of runs of this name in the store, or of the logs that match it as a pattern."""
    from rlwatch.compare import SeedGroup, held, runs_of_group

    here = Path(Path(name).anchor)
    pattern = str(Path(name).relative_to(here))
    try:
        logs = [log for log in sorted(here.glob(pattern)) if log.is_file()] if pattern != "." else []
    except (ValueError, OSError):  # not a valid file pattern: a group name can be anything
        logs = []
    if logs:
        return SeedGroup(
            name, tuple(_with_unique_names([run for log in logs for run in _of_log(log, read_as, source, naming)]))
        )
    with opened(url) as store:
        return SeedGroup(
            name, tuple(_with_unique_names([held(store, run) for run in runs_of_group(store.runs(), name)]))
        )


def diff_groups(groups: list[SeedGroup], axis: Axis, output: OutputFormat) -> None:
    """Compare two groups of runs with different seeds and print the result.

    ``groups`` has exactly two groups; ``axis`` is what they are aligned by. Raises ``typer.Exit`` with code 1 if they
    differ, or 2 if there are too few runs for an answer.
    """
    from rlwatch.compare import compare_groups

    found = compare_groups(groups[0], groups[1], axis)
    if output is OutputFormat.JSON:
        print_json(group_document(found))
    else:
        print_groups(found)
    if found.too_few:
        raise typer.Exit(2)
    if found.differing:
        raise typer.Exit(1)


def _with_unique_names(runs: list[ComparedRun]) -> list[ComparedRun]:
    """Number runs that have the same name."""
    from dataclasses import replace

    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.name} ({names[:place].count(run.name) + 1})") if names.count(run.name) > 1 else run
        for place, run in enumerate(runs)
    ]


def document(names: list[str], comparisons: list[Comparison], differing: list[ConfigOption]) -> dict[str, JSON]:
    """Return comparisons of runs as plain values for JSON.

    ``names`` are the runs, ``differing`` the settings that differ; ``values`` of a setting lacks the runs that do not
    have it.
    """
    from rlwatch.compare import Absent

    return {
        "runs": names,
        "by": comparisons[0].axis.value,
        "comparisons": [
            {
                "left": one.left,
                "right": one.right,
                "first": None if one.first is None else one.first.metric,
                "partings": [
                    {
                        "metric": parted.metric,
                        "at": parted.at,
                        "together": parted.together,
                        "until": parted.until,
                        "left": parted.left,
                        "right": parted.right,
                        "times": parted.times,
                        "from_start": parted.apart_from_start,
                        "evidence": parted.text(one.axis.place),
                    }
                    for parted in one.partings
                ],
                "compared": one.compared,
                "too_short": one.short,
                "only_left": one.only_left,
                "only_right": one.only_right,
                "differs_from": one.differs_from,
                "end": one.end,
            }
            for one in comparisons
        ],
        "config": [
            {
                "name": setting.name,
                "values": {
                    name: value
                    for name, value in zip(names, setting.values, strict=True)
                    if not isinstance(value, Absent)
                },
            }
            for setting in differing
        ],
    }


def group_document(found: GroupComparison) -> dict[str, JSON]:
    """Return the comparison of two groups of runs as plain values for JSON.

    The curves of each band are lists along ``places`` (steps or tokens), with null where there is no value.
    """
    sides = ("left", found.left), ("right", found.right)
    return {
        "groups": {
            side: {
                "name": group.name,
                "runs": [run.name for run in group.runs],
                "settings_that_differ": [setting.name for setting in group.mixed],
            }
            for side, group in sides
        },
        "by": found.axis.value,
        "answer": found.answer,
        "metrics": [
            {
                "metric": name,
                "answer": one.answer.value,
                "p": one.p,
                "p_of_all": found.p_of_all[name],
                "smallest_p": one.smallest_p,
                "since": one.since,
                "until": one.until,
                "statistic": finite_or_none(one.statistic),
                "exact": one.exact,
                "not_finite": one.not_finite,
                "seeds_needed": {"each": one.needed[0], "in_smaller": one.needed[1]},
                "places": one.places.tolist(),
                "bands": {
                    side: {
                        "median": _listed(band.median),
                        "low": _listed(band.low),
                        "high": _listed(band.high),
                        "mean": _listed(band.mean),
                        "std": _listed(band.std),
                        "seeds": band.seeds.tolist(),
                    }
                    for side, band in zip(("left", "right"), one.bands, strict=True)
                },
            }
            for name, one in found.metrics.items()
        ],
        "left_out": list(found.left_out),
        "ends_early": dict(found.early),
    }


def finite_or_none(value: float) -> float | None:
    """Return ``value``, or None for NaN and infinities, which JSON lacks."""
    from math import isfinite

    return value if isfinite(value) else None


def _listed(values: NDArray[np.float64]) -> list[float | None]:
    return [finite_or_none(value) for value in values.tolist()]


def print_groups(found: GroupComparison) -> None:
    """Print the comparison of two groups: the answer, each metric with its bands at the last step, and the caveats."""
    left, right = found.left, found.right
    print_text(f"{left.name} ({len(left.runs)} runs) vs {right.name} ({len(right.runs)} runs)", style="bold")
    print_text(f"  {found.answer}", style="bold red" if found.differing else "")
    end = max(one.places[-1] for one in found.metrics.values())
    rows = [
        (
            name,
            one.answer.value,
            "" if one.since is None else found.axis.place(one.since),
            "" if one.until is None else found.axis.place(one.until),
            number(one.p, 2),
            number(found.p_of_all[name], 2),
            *(_at_the_end(band) for band in one.bands),
        )
        for name, one in found.metrics.items()
    ]
    columns = "metric", "answer", "from", "until", ">p", ">p of all", f">{left.name}", f">{right.name}"
    print_table(columns, rows)
    print_text(f"last columns: median (least to largest) of the seeds, up to {found.axis.place(end)}", style="dim")
    for group in (left, right):
        if group.mixed:
            names = ", ".join(setting.name for setting in group.mixed[:SHOWN])
            print_text(f"runs of {group.name} are not of one configuration: {names} differ", style="yellow")
    if found.early:
        which = ", ".join(f"{name} at {found.axis.place(end)}" for name, end in found.early.items())
        print_text(f"ends early, and no row after it is compared: {which}", style="yellow")
    broken = [name for name, one in found.metrics.items() if one.not_finite]
    for what, some in (("not finite in some rows, left out there", broken), ("no step in common", found.left_out)):
        if some:
            more = len(some) - SHOWN
            print_text(f"{what}: {', '.join(some[:SHOWN])}" + (f" and {more} more" if more > 0 else ""), style="dim")


def _at_the_end(band: Band) -> str:
    """Return median and range of the seeds at the last place with values."""
    at = int(band.seeds.nonzero()[0][-1])
    return f"{number(band.median[at])} ({number(band.low[at])} to {number(band.high[at])})"


def print_comparison(one: Comparison) -> None:
    """Print the comparison of two runs: the answer, each metric that diverged, and the metrics that
    were not compared.
    """
    print_text(f"{one.left} vs {one.right}", style="bold")
    print_text(f"  {one.answer}", style="bold red" if one.first is not None else "")
    rows = [
        (
            parted.metric,
            "from the start" if parted.apart_from_start else one.axis.place(parted.at),
            "" if parted.until is None else one.axis.place(parted.until),
            number(parted.left),
            number(parted.right),
            number(parted.times, 2),
        )
        for parted in one.partings
    ]
    if rows:
        print_table(("metric", "diverged at", "until", f">{one.left}", f">{one.right}", ">x noise"), rows)
    for what, names in (
        (f"only in {one.left}", one.only_left),
        (f"only in {one.right}", one.only_right),
        ("too few rows to compare", one.short),
    ):
        if names:
            more = len(names) - SHOWN
            print_text(f"{what}: {', '.join(names[:SHOWN])}" + (f" and {more} more" if more > 0 else ""), style="dim")
    print_text()


def print_settings(names: list[str], differing: list[ConfigOption]) -> None:
    """Print a table of the settings in which the runs called ``names`` differ."""
    from rlwatch.compare import Absent

    if not differing:
        print_text("no differences in the recorded settings", style="dim")
        return
    print_table(
        ("setting", *names),
        [
            (
                setting.name,
                *(
                    "-" if isinstance(v, Absent) else one_line("null" if v is None else cell(v), LONGEST_VALUE)
                    for v in setting.values
                ),
            )
            for setting in differing
        ],
        title="Settings that differ",
    )
