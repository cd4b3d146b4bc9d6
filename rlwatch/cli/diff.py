"""``rlwatch diff A B``: which metric of two runs diverged first, by which evidence, and where their settings differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.cli.console import print_json, print_table, reading, say
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
    from rlwatch.compare import Axis, ComparedRun, Comparison, Setting
    from rlwatch.importers.naming import Naming

EPILOG = examples(
    "rlwatch diff math-7b-s3 math-7b-s1",
    "rlwatch diff crashed.log sound.log --by tokens",
    "rlwatch diff seeds.csv --format json | jq '.comparisons[].partings[0]'",
)
LONGEST_VALUE = 60
SHOWN = 12
"""Names in a line."""


def diff(
    subjects: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|LOG...",
            help="Runs of the store (id, name, or the beginning of either), or logs as for rlwatch scan; a log of "
            "several runs stands for all of them. The first is compared with each of the others.",
        ),
    ],
    *,
    by: Annotated[str, typer.Option("--by", metavar="step|tokens|time", help="Align rows by this axis.")] = "step",
    store: StoreOption = None,
    read_as: ReadAsOption = None,
    source: TrainerOption = "",
    mapped: MapOption = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Find the first metric and step at which a run diverged from others, with evidence, and compare their settings.

    Noise is the distance between the runs before. Exit code 0: no divergence, 1: a metric diverged, 2: the runs
    cannot be compared.
    """
    from rlwatch.compare import compare, config_diff

    axis = _axis(by)
    runs = _subjects(subjects, store, read_as, source, naming_of(mapped))
    if len(runs) < 2:
        raise ConfigError(f"two runs are needed, got {len(runs)}: {', '.join(subjects)}")
    first, *others = _told_apart(runs)
    comparisons = [compare(first, other, axis) for other in others]
    problems = [one.problem for one in comparisons if one.problem]
    if problems:
        raise ConfigError("; ".join(dict.fromkeys(problems)) + "; try another --by")
    names = [first.name, *(other.name for other in others)]
    differing = config_diff([one.config for one in (first, *others)])
    if output is OutputFormat.JSON:
        print_json(document(names, comparisons, differing))
    else:
        for comparison in comparisons:
            print_comparison(comparison)
        print_settings(names, differing)
    if any(one.partings for one in comparisons):
        raise typer.Exit(1)


def _axis(by: str) -> Axis:
    from rlwatch.compare import Axis

    offered = [axis.value for axis in Axis if axis is not Axis.CRASH]
    if by not in offered:
        raise ConfigError(f"--by is one of {', '.join(offered)}, not {by!r}")
    return Axis(by)


def _subjects(
    given: list[str], store: str | None, read_as: str | None, source: str, naming: Naming
) -> list[ComparedRun]:
    """Every run that was named; the store is opened only where a name is no file."""
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
    """A run of the store, read whole: the store is closed when it is compared."""
    from rlwatch.analysis.lookup import find_run
    from rlwatch.compare import held

    with opened(url) as store, no_log_either(name):
        return held(store, find_run(store, name))


def _told_apart(runs: list[ComparedRun]) -> list[ComparedRun]:
    """Runs of one name are numbered."""
    from dataclasses import replace

    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.name} ({names[:place].count(run.name) + 1})") if names.count(run.name) > 1 else run
        for place, run in enumerate(runs)
    ]


def document(names: list[str], comparisons: list[Comparison], differing: list[Setting]) -> dict[str, JSON]:
    """All of it as plain values; a setting that a run was not given is absent from ``values``."""
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


def print_comparison(one: Comparison) -> None:
    """The answer first, then every metric that diverged, then what could not be compared."""
    say(f"{one.left} vs {one.right}", style="bold")
    say(f"  {one.answer}", style="bold red" if one.first is not None else "")
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
            say(f"{what}: {', '.join(names[:SHOWN])}" + (f" and {more} more" if more > 0 else ""), style="dim")
    say()


def print_settings(names: list[str], differing: list[Setting]) -> None:
    """The settings in which the runs differ."""
    from rlwatch.compare import Absent

    if not differing:
        say("no differences in the recorded settings", style="dim")
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
