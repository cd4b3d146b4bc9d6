"""Where text goes: rich consoles that stay plain, wide and uncoloured when nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlwatch.cli.strict_json import dumps
from rlwatch.cli.wording import clean

PIPE_WIDTH = 2000
"""Columns of a table that goes into a file or a pipe: so wide that no cell is cut or wrapped."""

Cell = str | tuple[str, str]
"""What a table holds: a text, or a text and its style."""


def _console(stream: IO[str]) -> Console:
    # Built per call: the streams may be replaced (tests, pagers), and colour depends on them.
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(file=stream, width=width, markup=False, emoji=False, highlight=False)


def output() -> Console:
    """The console on stdout."""
    return _console(sys.stdout)


def errors() -> Console:
    """The console on stderr."""
    return _console(sys.stderr)


def say(text: str = "", style: str = "") -> None:
    """One line on stdout; never cut, control characters made visible."""
    output().print(clean(text), style=style or None, soft_wrap=True)


def print_json(value: object) -> None:
    """``value`` as strict JSON, alone on stdout."""
    sys.stdout.write(dumps(value) + "\n")


def print_table(headers: Sequence[str], rows: Iterable[Sequence[Cell]], *, title: str = "") -> None:
    """A table without lines; a header that starts with ``>`` is aligned to the right."""
    table = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for header in headers:
        right = header.startswith(">")
        table.add_column(header.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(cell) for cell in row))
    console = output()
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())


def _cell(cell: Cell) -> Text:
    text, style = cell if isinstance(cell, tuple) else (cell, "")
    return Text(clean(text), style=style)
