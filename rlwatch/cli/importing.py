"""A log's run as a finished run of the store."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rlwatch.errors import ConfigError, RunNotFoundError
from rlwatch.layers import DerivedLayers
from rlwatch.ports import RunReader, Store
from rlwatch.records import Finding, ForecastRecord, RunInfo, RunState, StepRecord

if TYPE_CHECKING:
    from rlwatch.importers import ImportedRun


def holds(store: RunReader, run_id: str) -> bool:
    """Whether the store has a run of this id. Raises ``StoreError`` for one it cannot read."""
    try:
        store.run(run_id)
    except RunNotFoundError:
        return False
    return True


def require_new(store: RunReader, run_ids: Sequence[str]) -> None:
    """Raises ``ConfigError`` unless each of ``run_ids`` is new to the store and to the others."""
    for index, run_id in enumerate(run_ids):
        if holds(store, run_id):
            raise ConfigError(
                f"run {run_id!r} exists in this store and is left as it is; choose another id with --run-id"
            )
        if run_id in run_ids[:index]:
            raise ConfigError(f"two runs of this log would be called {run_id!r}; import them singly: --run, --run-id")


def info_of(imported: ImportedRun, run_id: str, *, project: str, name: str, source: str, now: float) -> RunInfo:
    """Who the imported run is; times are the log's own where it has any."""
    first = next((record.ts for record in imported.records if record.ts), now)
    return RunInfo(
        run_id=run_id,
        project=project,
        name=name or imported.name or run_id,
        source=source or imported.source,
        created_at=first,
        tags=("imported",),
    )


def import_run(
    store: Store,
    info: RunInfo,
    records: list[StepRecord],
    judged: Sequence[Finding | ForecastRecord],
    now: float,
) -> None:
    """Write the run, attempt by attempt, and finish it. Nobody is alerted: what a log tells is over."""
    last = max((record.ts for record in records), default=0.0) or now
    groups = [(attempt, list(group)) for attempt, group in groupby(records, key=lambda record: record.attempt)]
    for number, (attempt, group) in enumerate(groups, 1):
        writer = store.open_run(info)
        try:
            writer.write([*DerivedLayers().added(group), *(item for item in judged if item.attempt == attempt)])
            if number == len(groups):
                writer.finish(RunState.FINISHED, "imported from a log", last)
        finally:
            writer.close()
