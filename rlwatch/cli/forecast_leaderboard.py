"""``rlwatch forecast leaderboard EVALUATION...``: a page of evaluations, each a section."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rlwatch.cli.options import examples
from rlwatch.cli.written import write_text
from rlwatch.errors import ImportFormatError

EPILOG = examples(
    "rlwatch forecast leaderboard run.json recipe.json real.json --out docs/forecast-leaderboard.md",
    "rlwatch forecast leaderboard 'Recipes held out=recipe.json'",
)


def leaderboard(
    evaluations: Annotated[
        list[str],
        typer.Argument(metavar="[TITLE=]FILE...", help="What rlwatch forecast evaluate --format json wrote."),
    ],
    *,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write it here and print nothing.")] = None,
) -> None:
    """Make the leaderboard's page (Markdown) from evaluations, with the commands that made them."""
    from rlwatch.forecast.evaluation.leaderboard import page

    write_text(out, page([_section(each) for each in evaluations]))


def _section(given: str) -> tuple[str, dict[str, Any]]:
    title, equals, path = given.partition("=")
    file = Path(path if equals else given)
    try:
        made = json.loads(file.read_text(encoding="utf-8"))
        return title if equals else "", {"about": made["about"], "tools": made["tools"]}
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError):
        raise ImportFormatError(str(file), "is no evaluation; make one with evaluate --format json") from None
