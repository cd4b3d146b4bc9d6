"""Copy runs from one store to another with the methods that every store has, and compare the two afterwards.

A partial copy is continued. Rows are copied from the last number on, batches and findings by their count, everything
else by id. Checkpoints of the analysis are not copied; the next process that analyses the run makes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from hashlib import sha256
from itertools import pairwise
from operator import attrgetter
from struct import pack
from typing import Any

from rlwatch.errors import RunLockedError, RunNotFoundError, StoreError
from rlwatch.ports import Progress, RunWriter, Storable, Store
from rlwatch.records import (
    APART,
    DISTRIBUTIONS,
    STAGES,
    CompletionBatch,
    Event,
    RunInfo,
    RunState,
    SpikeBatch,
    StepRecord,
)

AT_ONCE = 1000
"""Rows of one write."""
_FAR = 1 << 62
_MADE_ANEW = ("heartbeat_at", "curation", "stage", "stage_since")
"""Fields of a run in which a copy may differ: a resume changes the heartbeat and the stage; edits are compared
separately.
"""


@dataclass(frozen=True, slots=True)
class Copied:
    """Result of copying one run to another store.

    ``written``: number of rows that this call wrote. ``counts``: number of items in the copy by kind (rows, findings,
    alerts...). ``digest``: SHA-256 of the contents of the copy. ``differs``: the kinds in which copy and source are not
    equal; empty if the copy is exact.
    """

    run_id: str
    written: int
    counts: Mapping[str, int]
    digest: str
    differs: Sequence[str]


def copy_run(source: Store, target: Store, run_id: str, seen: Callable[[int], None] = lambda _: None) -> Copied:
    """Copy a run from the store ``source`` to the store ``target`` and compare the two.

    A call may be repeated, and it continues a partial copy. ``seen`` is called with the number (``seq``) of the last
    row that was written so far. The source may be written meanwhile: later rows are left for the next call.

    Raises ``StoreError`` if the target has another run of this id, or one that is ahead of the source, and
    ``RunLockedError`` while a process writes the run in the target.
    """
    whole = _Trail(source, run_id)
    written = _stream(whole, target, seen)
    _copy_annotations(source, target, run_id)
    return _compared(source, target, run_id, written)


def copy_shared(source: Store, target: Store) -> None:
    """Copy the data that belong to no run from ``source`` to ``target``: silences, and audit entries that concern no
    run.
    """
    for silence in source.silences():
        target.put_silence(silence)
    for entry in source.audit():
        if not entry.run_id:
            target.put_entry(entry)


class _Trail:
    """The rows of a run in the source store, prepared to be written again to the target attempt by attempt."""

    def __init__(self, store: Store, run_id: str) -> None:
        shown = store.run(run_id)
        curation = shown.curation
        own = (
            shown
            if curation.edited_at is None
            else replace(shown, name=curation.logged_name, tags=curation.logged_tags)
        )
        self.store, self.run = store, own
        self.configs = dict(sorted(store.configs(run_id).items())) or {own.attempt: own.config}
        self.judged, self.last_seq = store.judged(run_id)

    def legs(self) -> Iterator[tuple[int, RunInfo, int]]:
        """Iterate over the run's attempts: number, the run as that attempt began it, and the attempt's last row
        number.
        """
        starts = [*((a, self.store.first_seq(self.run.run_id, a)) for a in self.configs), (0, self.last_seq + 1)]
        for (attempt, _), (_, after) in pairwise(starts):
            config = self.configs[attempt]
            yield attempt, replace(self.run, attempt=attempt, config=config, state=RunState.RUNNING), after - 1

    def items(self, after: int, upto: int) -> Iterator[list[StepRecord | Event]]:
        """Iterate over the rows with numbers above ``after`` up to ``upto``, in pages."""
        while after < upto:
            page = self.store.stream(self.run.run_id, after_seq=after, limit=AT_ONCE)
            page = [item for item in page if item.seq <= upto]
            if not page:
                return
            yield page
            after = page[-1].seq


def _stream(trail: _Trail, target: Store, seen: Callable[[int], None]) -> int:
    """Write the rows, findings, forecasts and batches that the target lacks; return the number of rows written."""
    run_id, written = trail.run.run_id, 0
    had, known = _known(trail, target)
    writer: RunWriter | None = None
    try:
        for attempt, run, upto in trail.legs():
            if attempt > known:
                if writer is not None:
                    writer.close()
                writer = target.open_run(run)
                if writer.run.attempt != attempt:
                    raise StoreError(f"attempt {attempt} of {run_id!r} would be {writer.run.attempt} in the copy")
            elif attempt == known:
                writer = _amending(target, run_id)
            for page in trail.items(had, upto):
                assert writer is not None  # noqa: S101  (an attempt that is there has all that came before it)
                writer.write(page)
                written, had = written + len(page), page[-1].seq
                seen(had)
        if writer is not None:
            _rest(trail, target, writer)
    finally:
        if writer is not None:
            writer.close()
    return written


def _known(trail: _Trail, target: Store) -> tuple[int, int]:
    """Return the last number and attempt of the copy; 0 if there is no copy."""
    run_id = trail.run.run_id
    try:
        there = target.run(run_id)
    except RunNotFoundError:
        return 0, 0
    if (there.project, there.created_at) != (trail.run.project, trail.run.created_at):
        raise StoreError(f"{target.url} has another run {run_id!r}, of project {there.project!r}: it is left alone")
    last = target.judged(run_id)[1]
    if last > trail.last_seq or there.attempt > trail.run.attempt:
        raise StoreError(f"run {run_id!r} went on in {target.url}: it is ahead of the one to be copied")
    return last, there.attempt


def _amending(target: Store, run_id: str) -> RunWriter:
    writer = target.amend_run(run_id)
    if writer is None:
        raise RunLockedError(f"run {run_id!r} is being written in {target.url}, or may not be written from here")
    return writer


def _rest(trail: _Trail, target: Store, writer: RunWriter) -> None:
    """Copy missing findings, forecasts, tokens and completions, the judged position, and the end of the run."""
    source, run_id = trail.store, trail.run.run_id
    had = target.forecasts(run_id, last=1)
    items: list[Storable] = [each for each in source.forecasts(run_id) if each.seq > (had[-1].seq if had else 0)]
    items += source.findings(run_id)[len(target.findings(run_id)) :]
    items += source.recoveries(run_id)[len(target.recoveries(run_id)) :]
    for reason in (None, *APART):
        items += _batches(source.spikes(run_id, reason=reason))[len(target.spikes(run_id, reason=reason)) :]
    items += _batches(source.completions(run_id))[len(target.completions(run_id)) :]
    for at in range(0, len(items), AT_ONCE):
        writer.write(items[at : at + AT_ONCE])
    if trail.judged:
        writer.write([], Progress(judged=trail.judged))
    run = trail.run
    if run.state is RunState.RUNNING:
        writer.heartbeat(run.heartbeat_at or 0.0, run.stage, run.stage_since)
    else:
        writer.finish(run.state, run.state_reason, run.heartbeat_at or 0.0)


def _batches(found: Sequence[SpikeBatch] | Sequence[CompletionBatch]) -> list[Storable]:
    """Return batches in the order in which they were logged, as far as they record it."""
    return sorted(found, key=lambda batch: (batch.attempt, batch.step))


def _copy_annotations(source: Store, target: Store, run_id: str) -> None:
    """Copy commands with their answers, alerts, messages, and people's annotations."""
    for command in source.commands(run_id):
        target.submit(command)
    target.put_alerts(source.alerts(run_id)[::-1], source.outbox(run_id))
    for acknowledgement in source.acknowledgements(run_id):
        target.acknowledge(acknowledgement)
    for answer in source.forecast_answers(run_id):
        target.answer_forecast(answer)
    for entry in source.audit(run_id):
        target.put_entry(entry)
    for edit in source.edits(run_id)[len(target.edits(run_id)) :]:
        target.edit(edit)


def _compared(source: Store, target: Store, run_id: str, written: int) -> Copied:
    upto = target.judged(run_id)[1]
    ours, theirs = contents(source, run_id, upto), contents(target, run_id, upto)
    differs = [kind for kind in ours if ours[kind] != theirs[kind]]
    digest = sha256(repr(sorted(theirs.items())).encode()).hexdigest()
    return Copied(run_id, written, {kind: count for kind, (count, _) in theirs.items()}, digest, differs)


def contents(store: Store, run_id: str, upto: int = _FAR) -> dict[str, tuple[int, str]]:
    """Return kind of item -> (number of items, SHA-256 of the items) for all that ``store`` holds of the run.

    The digests do not depend on the kind of store, so that two copies of a run can be compared. Rows with numbers above
    ``upto`` are left out.
    """
    run = store.run(run_id)
    shown = tuple(getattr(run, field.name) for field in fields(run) if field.name not in _MADE_ANEW)
    kinds: dict[str, Iterable[object]] = {
        "run": [shown, store.configs(run_id)],
        "rows": _rows(store, run_id, upto),
        "findings": [*store.findings(run_id), *store.recoveries(run_id)],
        "forecasts": store.forecasts(run_id),
        "spikes": store.spikes(run_id),
        "distributions": store.spikes(run_id, reason=DISTRIBUTIONS),
        "stages": store.spikes(run_id, reason=STAGES),
        "completions": store.completions(run_id),
        "commands": store.commands(run_id),
        "alerts": _by(store.alerts(run_id), "alert_id"),
        "messages": _by(store.outbox(run_id), "message_id"),
        "acknowledgements": _by(store.acknowledgements(run_id), "alert_id"),
        "answers": store.forecast_answers(run_id),
        "edits": store.edits(run_id),
        "audit": _by(store.audit(run_id), "entry_id"),
    }
    return {kind: _digested(things) for kind, things in kinds.items()}


def _by(things: Sequence[object], name: str) -> Sequence[object]:
    return sorted(things, key=attrgetter(name))


def _rows(store: Store, run_id: str, upto: int) -> Iterator[object]:
    after = 0
    while page := store.stream(run_id, after_seq=after, limit=AT_ONCE):
        yield from (item for item in page if item.seq <= upto)
        after = page[-1].seq
        if after >= upto:
            return


def _digested(things: Iterable[object]) -> tuple[int, str]:
    count, total = 0, sha256()
    for thing in things:
        count += 1
        total.update(_bytes(thing))
    return count, total.hexdigest()


def _bytes(value: Any) -> bytes:
    """Return bytes that are equal for equal values, bit by bit for numbers: all NaN are equal, and -0.0 is not 0.0."""
    if isinstance(value, Enum):
        return _bytes(value.value)
    if isinstance(value, float):
        return b"f" + pack("<d", value)
    if hasattr(value, "tobytes"):
        return b"a%s%s" % (str(value.dtype).encode(), value.tobytes())
    if is_dataclass(value):
        return b"o" + b"".join(_bytes(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, Mapping):
        return b"{" + b"".join(_bytes(key) + _bytes(each) for key, each in value.items()) + b"}"
    if isinstance(value, tuple | list):
        return b"[" + b"".join(map(_bytes, value)) + b"]"
    return b"s" + repr(value).encode() + b"\0"
