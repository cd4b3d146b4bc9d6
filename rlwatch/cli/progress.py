"""Progress on stderr, for people only: nothing is drawn unless a terminal is there to see it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlwatch.cli.console import errors
from rlwatch.cli.wording import clean
from rlwatch.records import StepRecord

if TYPE_CHECKING:
    from rlwatch.importers import Tail

LARGE = 10_000_000
"""Bytes of a log from which on catching up with it takes long enough to be watched."""
WORTH_SHOWING = 5_000
"""Records of a log from which on the replay takes long enough to be watched."""


def progress_bar(records: Sequence[StepRecord]) -> Iterable[StepRecord]:
    """``records``, with a bar that shows how far the replay is where that makes sense."""
    if len(records) < WORTH_SHOWING or not sys.stderr.isatty():
        return records
    from rich.progress import track

    return track(records, description="replaying", console=errors(), transient=True)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say that ``path`` is being read while it is."""
    if not sys.stderr.isatty():
        yield
        return
    with errors().status(f"reading {clean(str(path))}"):
        yield


@contextmanager
def backlog(tail: Tail) -> Iterator[Callable[[], None]]:
    """While a log that was there before the watch is read: gives what to call when a piece of it has been."""
    if not sys.stderr.isatty() or tail.read[1] < LARGE:
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
