"""Remove what is older than it need be, kind by kind: bulk that explains a day in the life of a run, not its history.

Metrics, events, findings, forecasts, alerts, commands and what people said are never removed by age; a run that
somebody archived can be deleted as a whole, and is removed by ``rlwatch purge`` when nobody restored it.
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
"""Kinds of what can be removed: bulk of every run, and archived runs as a whole."""
SHORTEST_S = 3600.0


@dataclass(frozen=True, slots=True)
class Pruned:
    """Part of a run that was removed, or would be. ``n`` batches (or runs) of ``bytes``; ``left``: why nothing was."""

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
    """Remove what is older than ``ages`` (kind -> seconds) say, of ``runs`` or of all; what has something to remove.

    A live run of a directory is left alone, as its trainer alone writes it; on PostgreSQL its older bulk goes, too.
    Each removal is kept in the audit, under ``by``.

    Raises
    ------
    ConfigError
        For an unknown kind, an age below an hour, nobody to name, or a store that cannot do it.
    StoreError
        Where a run cannot be read or changed.
    """
    wrong = next((kind for kind in ages if kind not in KINDS), None)
    if wrong is not None:
        raise ConfigError(f"there is no kind {wrong!r} to remove; the kinds are {', '.join(KINDS)}")
    short = next((kind for kind, age in ages.items() if not age >= SHORTEST_S), None)
    if short is not None:
        raise ConfigError(f"{short}: kept for an hour at least, got {ages[short]:g} s")
    if not by.strip():
        raise ConfigError(f"a removal needs a name, got {by!r}; say who you are with --by")
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
            said = f"removed {n} {bulk.value} older than {duration(ages[bulk.value])}"
            store.put_entry(AuditEntry(secrets.token_hex(8), now, by, "prune", said, run.run_id))
        yield Pruned(run.run_id, bulk.value, n, size)
