"""A table of as many columns as the terminal has room for: the most important ones, each whole."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from rlwatch.cli.console import output, print_table
from rlwatch.cli.wording import clean

GAP = 2
"""Blank columns that a table without lines leaves between two cells."""


def columns_that_fit(
    headers: Sequence[str], rows: Sequence[Sequence[str]], importance: Sequence[str], width: int
) -> list[int]:
    """Which columns to show in ``width`` characters, in their order; ``importance`` names them, most important first.

    One is always shown, however narrow it is; a column that does not fit makes room for less important, narrower ones.
    """
    names = [header.removeprefix(">") for header in headers]
    widest = [max(map(cell_len, (name, *(clean(row[i]) for row in rows)))) for i, name in enumerate(names)]
    chosen: list[int] = []
    left = width
    for name in (*importance, *(name for name in names if name not in importance)):
        i = names.index(name) if name in names else None
        if i is not None and (not chosen or widest[i] + GAP <= left):
            chosen.append(i)
            left -= widest[i] + GAP
    return sorted(chosen)


def print_fitting(
    headers: Sequence[str], rows: Sequence[Sequence[str]], importance: Sequence[str], *, title: str = ""
) -> None:
    """The table, without the columns that have no room; a pipe or file has room for all."""
    chosen = columns_that_fit(headers, rows, importance, output().width + GAP)
    print_table([headers[i] for i in chosen], [[row[i] for i in chosen] for row in rows], title=title)
