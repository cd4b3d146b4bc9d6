"""A run on a wandb server, polled through wandb's public API; needs wandb, and a key of its user.

``scan_history`` gives every row exactly (``history`` would sample). wandb has no way to be told of new rows, so it is
asked now and then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from rlwatch.clock import Clock, SystemClock
from rlwatch.errors import ImportFormatError
from rlwatch.importers.assemble import RunAssembly
from rlwatch.importers.position import Position
from rlwatch.importers.reading import Skipped, Skips
from rlwatch.importers.source import source_of
from rlwatch.importers.values import step_of
from rlwatch.importers.wandb_steps import OWN, WandbSteps
from rlwatch.records import StepRecord

T = TypeVar("T")

ASK_S = 30.0
"""Seconds between two questions to the server."""
_ADDRESS = re.compile(r"(?:wandb://|https?://[^/]+/)([^/\s]+)/([^/\s]+)/(?:runs/)?([^/?#\s]+)/?(?:[?#].*)?")


def wandb_run(address: str) -> str | None:
    """``entity/project/run`` of an address of wandb; None if it is none.

    >>> wandb_run("https://wandb.ai/me/math-rl/runs/1jfgog54?nw=x"), wandb_run("wandb://me/math-rl/1jfgog54")
    ('me/math-rl/1jfgog54', 'me/math-rl/1jfgog54')
    """
    match = _ADDRESS.fullmatch(address)
    return "/".join(match.groups()) if match else None


class WandbTail:
    """The records of a run on a server as they come; used as :class:`~rlwatch.importers.LogTail` is.

    Parameters
    ----------
    run
        ``entity/project/run``.
    api
        Gives a ``wandb.Api``; that of the installed wandb by default.

    Raises ``ImportFormatError`` if wandb is not installed or knows no key. What the network does is in ``problem``.
    """

    def __init__(self, run: str, *, api: Callable[[], Any] | None = None, clock: Clock | None = None) -> None:
        self.run, self.name = run, run.rpartition("/")[2]
        self.format = "wandb-api"
        self.behind = self.turned = False
        self.problem = ""
        self.modified = 0.0
        self._clock = clock or SystemClock()
        self._skips = Skips()
        self._steps = WandbSteps(self._skips)
        self._assembly = RunAssembly(run)
        self._next = self._count = 0
        self._ask_at = 0.0
        self._rows: Iterator[Mapping[str, object]] | None = None
        self._api = (api or _public_api)()

    @property
    def source(self) -> str:
        """The trainer, as far as the metrics tell."""
        return source_of(self._assembly.names)

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """What could not be used."""
        return self._skips.listed()

    @property
    def position(self) -> Position | None:
        """None: every row is asked for again, and the store knows those it has."""
        return None

    @property
    def read(self) -> tuple[int, int]:
        """Nothing is known of how much there is."""
        return 0, 0

    def poll(self, most: int | None = None) -> list[StepRecord]:
        """The records of rows that came since; asks the server at most every 30 s."""
        records: list[StepRecord] = []
        if self._rows is None and self._clock.monotonic() < self._ask_at:
            return records
        self.problem = ""
        try:
            _answered(partial(self._read_into, records, most))
        except _UnansweredError as why:
            self._rows = None
            self.problem = f"wandb cannot be asked for {self.run}: {why}"
        self.behind = self._rows is not None
        self._ask_at = self._clock.monotonic() + ASK_S
        return records

    def close(self) -> list[StepRecord]:
        """Nothing is ever held back."""
        return []

    def release(self) -> None:
        """Nothing is ever held."""

    def _read_into(self, records: list[StepRecord], most: int | None) -> None:
        self._rows = self._rows or self._asked()
        for items in self._rows:
            records += self._records(items)
            if most is not None and len(records) >= most:
                return
        self._rows = None

    def _asked(self) -> Iterator[Mapping[str, object]]:
        rows: Iterable[Mapping[str, object]] = self._api.run(self.run).scan_history(min_step=self._next)
        return iter(rows)

    def _records(self, items: Mapping[str, object]) -> list[StepRecord]:
        self._count += 1
        if items.get(OWN) is not None:
            self._next = max(self._next, step_of(items[OWN]) + 1)
        row = self._steps.row({name: value for name, value in items.items() if _scalar(value)}, self._count)
        return [] if row is None else [self._assembly.record(row, self._skips)]


def _scalar(value: object) -> bool:
    return not isinstance(value, dict | list)


def _public_api() -> Any:
    try:
        import wandb
    except ImportError:
        raise ImportFormatError("wandb", "a run on a server needs wandb: pip install wandb") from None
    try:
        return _answered(partial(wandb.Api, timeout=20))
    except _UnansweredError as why:
        problem = f"wandb does not let us in ({why}); set WANDB_API_KEY or `wandb login`"
        raise ImportFormatError("wandb", problem) from None


class _UnansweredError(Exception):
    """Why wandb did not answer, in one line."""


def _answered(question: Callable[[], T]) -> T:
    """The seam to wandb: its errors and those of its network libraries share no base, and change by its version.

    Raises ``_UnansweredError``.
    """
    try:
        return question()
    except Exception as error:  # noqa: BLE001
        raise _UnansweredError(" ".join(str(error).split())[:200]) from None
