"""Printing to a terminal, a pipe or a script: lines, tables, JSON, errors and progress bars.

Output to a pipe or file is plain, uncoloured and never cut.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from rlwatch import codec
from rlwatch.columns import Column, Format, text_of
from rlwatch.errors import RLWatchError
from rlwatch.records import JSON, AlertState, CommandStatus, OutboxStatus, Severity, StepRecord
from rlwatch.wording import for_terminal

if TYPE_CHECKING:
    from rlwatch.importers import Tail


SEVERITY_STYLES: Mapping[Severity, str] = {
    Severity.INFO: "dim",
    Severity.WARNING: "yellow",
    Severity.CRITICAL: "bold red",
}
STATUS_STYLES: Mapping[str, str] = {
    "running": "green",
    "stale": "yellow",
    "dead": "bold red",
    "paused": "yellow",
    "finished": "dim",
    "unfinished": "yellow",
    "crashed": "bold red",
    AlertState.FIRING.value: "bold red",
    AlertState.PENDING.value: "yellow",
    AlertState.RESOLVED.value: "green",
    CommandStatus.QUEUED.value: "yellow",
    CommandStatus.CLAIMED.value: "yellow",
    CommandStatus.DONE.value: "green",
    CommandStatus.REJECTED.value: "bold red",
    CommandStatus.EXPIRED.value: "red",
    CommandStatus.FAILED.value: "bold red",
    CommandStatus.CANCELLING.value: "yellow",
    CommandStatus.CANCELLED.value: "dim",
    OutboxStatus.SENT.value: "green",
    OutboxStatus.DEAD.value: "bold red",
}
PIPE_WIDTH = 2000
"""Width, in columns, of a table written to a file or pipe, where no cell is cut or wrapped."""

Cell = str | tuple[str, str]
"""A table cell: a text, or a text and its Rich style."""


def _console(stream: IO[str]) -> Console:
    # Built per call: the streams may be replaced (tests, pagers), and colour depends on them.
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(file=stream, width=width, markup=False, emoji=False, highlight=False)


def output() -> Console:
    """Return the Rich console for standard output."""
    return _console(sys.stdout)


def errors() -> Console:
    """Return the Rich console for standard error."""
    return _console(sys.stderr)


def print_text(text: str = "", style: str = "") -> None:
    """Print ``text`` as one uncut line on stdout, in the Rich ``style``, with control characters made visible."""
    output().print(for_terminal(text), style=style or None, soft_wrap=True)


def warn(text: str) -> None:
    """Print ``text`` as one yellow line on stderr, with control characters made visible."""
    errors().print(for_terminal(text), style="yellow", soft_wrap=True)


def print_remark(text: str, style: str = "") -> None:
    """Print ``text`` as one line on stderr in the Rich ``style``, for remarks that a script reading stdout should not
    get.

    Control characters are made visible.
    """
    errors().print(for_terminal(text), style=style or None, soft_wrap=True)


def print_json(value: object) -> None:
    """Print ``value`` on stdout as indented JSON without NaN or infinities."""
    sys.stdout.write(dumps(value) + "\n")


def print_table(headers: Sequence[str], rows: Iterable[Sequence[Cell]], *, title: str = "") -> None:
    """Print ``rows`` as a table without border lines, under ``headers`` and ``title``.

    A column whose header starts with ``>`` is aligned to the right.
    """
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


def cell_of(column: Column, value: object) -> Cell:
    """Return ``value`` formatted for ``column``, with the colour for a severity or status."""
    styles: Mapping[Format, Mapping[Any, str]] = {Format.SEVERITY: SEVERITY_STYLES, Format.STATUS: STATUS_STYLES}
    return (text_of(column, value), styles.get(column.format, {}).get(value, "") if isinstance(value, str) else "")


def _cell(cell: Cell) -> Text:
    text, style = cell if isinstance(cell, tuple) else (cell, "")
    return Text(for_terminal(text), style=style)


# Records as JSON that every parser accepts.
#
# JSON has no NaN and no infinities: they are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
# Values that were not measured are absent, or ``null`` where a field is required.


def plain(value: object) -> JSON:
    """Return ``value`` converted to dict, list, str, int, finite float, bool and None only, ready for JSON.

    >>> plain({"kl": float("inf"), "steps": (1, 2)})
    {'kl': 'Infinity', 'steps': [1, 2]}
    """
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, codec.Wide):
        return plain(codec.encoded(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return _from_elsewhere(value)


def _number(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return float(value)


def _from_elsewhere(value: object) -> JSON:
    """Convert numpy values through ``tolist``, other collections to lists, and all else to ``str``."""
    tolist = getattr(value, "tolist", None)
    if tolist is not None:
        return plain(tolist())
    if isinstance(value, set | frozenset):
        return [plain(item) for item in sorted(value, key=str)]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value)


def dumps(value: object) -> str:
    """Return ``value`` as indented JSON, without NaN or infinities and in ASCII, which every terminal can print."""
    return json.dumps(plain(value), allow_nan=False, indent=2)


# A table of as many columns as the terminal has room for: the most important ones, each whole.

GAP = 2
"""Blank columns between two cells of a table."""


def columns_that_fit(
    headers: Sequence[str], rows: Sequence[Sequence[str]], importance: Sequence[str], width: int
) -> list[int]:
    """Return the indices of the table columns that fit into ``width`` characters, in ascending order.

    ``importance`` lists column names, most important first; if a column is too wide, narrower and less important ones
    take its place. At least one column is returned at any width.
    """
    names = [header.removeprefix(">") for header in headers]
    widest = [max(map(cell_len, (name, *(for_terminal(row[i]) for row in rows)))) for i, name in enumerate(names)]
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
    """Print a table without the columns that are too wide for the terminal; a pipe or file gets all columns.

    ``importance`` lists the column names that are kept longest first.
    """
    chosen = columns_that_fit(headers, rows, importance, output().width + GAP)
    print_table([headers[i] for i in chosen], [[row[i] for i in chosen] for row in rows], title=title)


# Progress on stderr, only on a terminal.

LARGE = 10_000_000
"""Size of a log, in bytes, from which a progress bar is drawn while it is read."""
WORTH_SHOWING = 5_000
"""Number of records from which a progress bar is drawn during a replay."""


def progress_bar(
    records: Sequence[StepRecord], *, worth: int = WORTH_SHOWING, what: str = "replaying"
) -> Iterable[StepRecord]:
    """Yield ``records``, drawing a progress bar labelled ``what`` on a terminal if there are at least ``worth`` of
    them.
    """
    if len(records) < worth or not sys.stderr.isatty():
        return records
    from rich.progress import track

    return track(records, description=what, console=errors(), transient=True)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Show the status line ``reading PATH`` on a terminal while the block runs."""
    if not sys.stderr.isatty():
        yield
        return
    with errors().status(f"reading {for_terminal(str(path))}"):
        yield


@contextmanager
def backlog(tail: Tail, *, worth: int = LARGE) -> Iterator[Callable[[], None]]:
    """Draw a progress bar on a terminal while the existing part of a log is read from ``tail``.

    Yields a function to call after each piece that was read. No bar is drawn for fewer than ``worth`` bytes.
    """
    if not sys.stderr.isatty() or tail.read[1] < worth:
        yield lambda: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("catching up"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors(), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show() -> None:
            done, size = tail.read
            bar.update(task, completed=done, total=size)

        yield show


# How the command line fails: one line on stderr and an exit code, never a traceback for a known error.

UNREADABLE = 2
"""Exit code for an input, store or request that is wrong."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells count it (128 + SIGINT)."""


def debugging() -> bool:
    """Return whether the environment requests tracebacks with ``RLWATCH_DEBUG=1``."""
    return os.environ.get("RLWATCH_DEBUG", "").lower() not in {"", "0", "false", "no"}


def complain(error: BaseException | str) -> None:
    """Print ``error: ...`` for ``error`` in red on stderr, as one line."""
    text = " ".join(for_terminal(str(error)).split()) or type(error).__name__
    errors().print(f"error: {text}", style="red", soft_wrap=True)


class FailingInOneLine(TyperGroup):
    """A command group that prints known errors as one line and exits with code 2.

    Known errors are :class:`RLWatchError` and ``OSError``; any other error is a bug and keeps its traceback. A closed
    pipe is left to typer, which exits silently.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command; turn a known error into one line and exit code 2, and Ctrl-C into exit code 130."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            raise
        except (RLWatchError, OSError) as error:
            if debugging():
                raise
            complain(error)
            raise typer.Exit(UNREADABLE) from error
