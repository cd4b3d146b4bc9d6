"""``rlwatch names``: what each metric is, what trainers call it, and how a name of yours is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer

from rlwatch.cli.console import print_json, print_table, say
from rlwatch.cli.options import FormatOption, OutputFormat, TrainerOption, examples
from rlwatch.metrics import BY_NAME, OPEN, TABLE, Family, Metric, Reading, resolve, unjudged
from rlwatch.wording import nearest, one_line

EPILOG = examples(
    "rlwatch names", "rlwatch names --find entropy", "rlwatch names actor/entropy my_kl --source verl || echo 'unknown'"
)
_CLOSENESS = ("the canonical name", "the same quantity", "a proxy")


def names(
    asked: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Metric names from your log to look up.")
    ] = None,
    *,
    find: Annotated[str, typer.Option("--find", metavar="TEXT", help="Search metrics by name or meaning.")] = "",
    source: TrainerOption = "",
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """List the metrics that rlwatch knows, with units and trainer names; or look up how given names are read.

    Exit code 1 if a given name is unknown.
    """
    if asked:
        told = [_told(name, source) for name in asked]
        if output is OutputFormat.JSON:
            print_json(told)
        else:
            print_table(
                ("name", "read as", "how"),
                [[one_line(str(row[part])) for part in ("name", "metric", "how")] for row in told],
            )
        if not all(row["known"] for row in told):
            raise typer.Exit(1)
        return
    chosen = [metric for metric in (*TABLE, *OPEN) if find.lower() in f"{metric.name} {metric.meaning}".lower()]
    if output is OutputFormat.JSON:
        print_json([{**asdict(metric), "family": metric.family.value} for metric in chosen])
    elif not chosen:
        say(f"no metric has {find!r} in its name or meaning; rlwatch names lists all {len(TABLE) + len(OPEN)}")
    else:
        for family in Family:
            _print(family, [metric for metric in chosen if metric.family is family])


def _told(name: str, source: str) -> dict[str, str | bool]:
    """One name, as it is read."""
    found = resolve(name, source)
    if found is not None:
        return {"name": name, "metric": found.metric.name, "how": _how(found), "known": True}
    reason = unjudged(name)
    if reason:
        return {"name": name, "metric": "", "how": f"recognised, not used: {reason}", "known": True}
    every = {*BY_NAME, *(alias.name for metric in TABLE for alias in metric.aliases)}
    near = nearest(name, sorted(every), 2, 0.75)
    hint = f"; close to it: {', '.join(near)}" if near else ""
    return {"name": name, "metric": "", "how": f"unknown, not used{hint}", "known": False}


def _how(reading: Reading) -> str:
    if reading.guess:
        return "guessed from the name"
    said = _CLOSENESS[reading.closeness]
    of = reading.alias.source if reading.alias is not None else ""
    return f"{said}, in runs of {of}" if of else said


def _print(family: Family, metrics: Iterable[Metric]) -> None:
    rows = [(metric.name, f"{metric.unit} {metric.span}".strip(), metric.meaning, metric.called) for metric in metrics]
    if rows:
        print_table(("metric", "unit, range", "meaning", "names in trainers"), rows, title=family.value)
        say()
