"""Progress on stderr, for people only: nothing is drawn unless a terminal is there to see it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlwatch.cli.console import errors
from rlwatch.cli.wording import clean
from rlwatch.records import StepRecord

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
