"""Remove old bulk data of runs, kind by kind: details that explain single steps, not the history of the run.

Metrics, events, findings, forecasts, alerts, commands and users' notes are never removed by age. An archived run can be
deleted as a whole; ``rlwatch purge`` then removes it unless it is restored.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from rlwatch.clock import Clock, SystemClock
from rlwatch.control.liveness import last_sign, reports
from rlwatch.curation.editing import edit_run
from rlwatch.errors import ConfigError, RunLockedError
from rlwatch.ports import Bulk, Pruning, Store
from rlwatch.records import AuditEntry, RunInfo
from rlwatch.wording import duration

ARCHIVED = "archived"
KINDS = (*(kind.value for kind in Bulk), ARCHIVED)
"""Kinds of data that can be removed: bulk of every run, and archived runs as a whole."""
SHORTEST_S = 3600.0


@dataclass(frozen=True, slots=True)
class Pruned:
    """Part of a run that was removed, or would be.

    ``n`` batches (or runs) with ``bytes`` bytes in all; ``left`` is the reason why nothing was removed.
    """

    run_id: str
    kind: str
    n: int = 0
    bytes: int = 0
    left: str = ""


def prune(
    store: Store,
    ages: Mapping[str, float],
    *,
    by: str,
    runs: Collection[str] = (),
    dry_run: bool = False,
    clock: Clock | None = None,
) -> Iterator[Pruned]:
    """Remove old data, and yield each part of a run with something to remove.

    In a store that is a directory a live run is skipped, as only its trainer writes it; on PostgreSQL its old bulk is
    removed, too. Each removal is recorded in the audit.

    Parameters
    ----------
    store
        The store.
    ages
        Kind of data -> age in seconds above which it is removed, at least 3600.
    by
        Name of the user who removes.
    runs
        Ids of the runs; empty for all.
    dry_run
        True to yield what would be removed, and remove nothing.
    clock
        Source of the time; the system's by default.

    Raises
    ------
    ConfigError
        For an unknown kind, an age below an hour, an empty ``by``, or a store that cannot remove parts of runs.
    StoreError
        If a run cannot be read or changed.
    """
    wrong = next((kind for kind in ages if kind not in KINDS), None)
    if wrong is not None:
        raise ConfigError(f"there is no kind {wrong!r} to remove; the kinds are {', '.join(KINDS)}")
    short = next((kind for kind, age in ages.items() if not age >= SHORTEST_S), None)
    if short is not None:
        raise ConfigError(f"{short}: kept for an hour at least, got {ages[short]:g} s")
    if not by.strip():
        raise ConfigError(f"a removal needs a name, got {by!r}; give yours with --by")
    if not callable(getattr(store, "prune", None)):
        raise ConfigError("this store cannot remove parts of runs: it is no directory and not on PostgreSQL")
    now = (clock or SystemClock()).now()
    for run in store.runs():
        if not runs or run.run_id in runs:
            yield from _of_run(store, run, ages, by, now, dry_run=dry_run)


def _of_run(
    store: Store, run: RunInfo, ages: Mapping[str, float], by: str, now: float, *, dry_run: bool
) -> Iterator[Pruned]:
    seen = last_sign(run) or run.created_at
    if ARCHIVED in ages and run.curation.archived and now - seen >= ages[ARCHIVED] and not reports(run, now):
        if not dry_run:
            edit_run(store, run.run_id, by=by, deleted=True)
        yield Pruned(run.run_id, ARCHIVED, 1)
        return
    for bulk in Bulk:
        if bulk.value not in ages:
            continue
        try:
            n, size = cast("Pruning", store).prune(
                run.run_id, bulk, now - ages[bulk.value], undated=seen, dry_run=dry_run
            )
        except RunLockedError:
            yield Pruned(run.run_id, bulk.value, left="it is being written: once it has ended")
            continue
        if not n:
            continue
        if not dry_run:
            text = f"removed {n} {bulk.value} older than {duration(ages[bulk.value])}"
            store.put_entry(AuditEntry(secrets.token_hex(8), now, by, "prune", text, run.run_id))
        yield Pruned(run.run_id, bulk.value, n, size)
