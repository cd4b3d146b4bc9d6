"""Check a stored run: read all of its data through each read path of its store, and report what does not agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rlwatch.errors import StoreError
from rlwatch.ports import Store
from rlwatch.records import DISTRIBUTIONS, STAGES, StepRecord

PAGE, NAMES = 5000, 25
"""Rows of the stream, and metrics, that are read at once."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of :func:`check_run`: what was read of one run, and the problems that were found.

    ``rows``: number of records and events that were read. ``values``: number of metric values in them. ``problems``:
    one sentence for each problem; empty if the run is sound.
    """

    run_id: str
    rows: int = 0
    values: int = 0
    problems: Sequence[str] = ()


@dataclass(slots=True)
class _Sum:
    """Number of float64 values and the exclusive or of their bits, which ignores order and changes with any single
    bit.
    """

    values: int = 0
    bits: int = 0

    def add(self, values: NDArray[np.float64]) -> None:
        self.values += len(values)
        self.bits ^= int(np.bitwise_xor.reduce(np.ascontiguousarray(values).view(np.uint64), initial=np.uint64(0)))


@dataclass(slots=True)
class _Stream:
    """Sums of each metric over the rows of a run, collected while the rows are read in order."""

    rows: int = 0
    sums: dict[str, _Sum] = field(default_factory=lambda: defaultdict(_Sum))

    def read(self, store: Store, run_id: str) -> list[str]:
        """Read all rows of the run; return one sentence for each break in the order of their numbers."""
        last, found = 0, list[str]()
        while page := store.stream(run_id, after_seq=last, limit=PAGE):
            seqs = [item.seq for item in page]
            if seqs != sorted(set(seqs)) or seqs[0] <= last:
                found.append(f"rows after number {last} are not in order, or there twice")
            self._add([item.metrics for item in page if isinstance(item, StepRecord)])
            self.rows, last = self.rows + len(page), seqs[-1]
        return found

    def _add(self, rows: Iterable[Mapping[str, float]]) -> None:
        values: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            for name, value in row.items():
                values[name].append(value)
        for name, column in values.items():
            self.sums[name].add(np.array(column, dtype=np.float64))


def check_run(store: Store, run_id: str) -> Checked:
    """Read back all data of the run ``run_id`` and return what was read and every problem that was found.

    All kinds of data are read: rows, series, localised tokens, completions, findings, forecasts, alerts, commands and
    people's edits. A store keeps series in addition to the rows they were made of, as blocks or chunks: the two must
    hold the same bits. A store in a directory also has SQLite check the run's files. If a process writes the run
    meanwhile, later rows are not compared. Problems of the run are returned and never raised.
    """
    problems = list(_damage(store, run_id))
    stream = _Stream()
    wrong = _tried(lambda: stream.read(store, run_id), "rows cannot be read")
    problems += wrong or _series_that_differ(store, run_id, stream.sums)
    others: dict[str, Callable[[], object]] = {
        "settings": lambda: (store.run(run_id), store.configs(run_id)),
        "localised tokens": lambda: (store.spikes(run_id), store.top_spikes(run_id)),
        "token distributions": lambda: store.spikes(run_id, reason=DISTRIBUTIONS),
        "stages": lambda: store.spikes(run_id, reason=STAGES),
        "completions": lambda: store.completions(run_id),
        "findings": lambda: (store.findings(run_id), store.recoveries(run_id), store.judged(run_id)),
        "forecasts": lambda: (store.forecasts(run_id), store.forecast_answers(run_id)),
        "alerts": lambda: (store.alerts(run_id), store.acknowledgements(run_id), store.outbox(run_id)),
        "commands": lambda: store.commands(run_id),
        "what people said": lambda: (store.edits(run_id), store.audit(run_id)),
    }
    for what, read in others.items():
        problems += _tried(partial(_nothing_wrong, read), f"{what} cannot be read")
    return Checked(run_id, stream.rows, sum(one.values for one in stream.sums.values()), tuple(problems))


def _nothing_wrong(read: Callable[[], object]) -> Sequence[str]:
    read()
    return ()


def _series_that_differ(store: Store, run_id: str, expected: Mapping[str, _Sum]) -> Iterable[str]:
    logged = sorted(expected)
    for names in (logged[at : at + NAMES] for at in range(0, len(logged), NAMES)):
        found: dict[str, _Sum] = {}
        yield from _tried(
            partial(_nothing_wrong, partial(_add_series, store, run_id, names, found)),
            f"series of {names[0]} to {names[-1]} cannot be read",
        )
        for name, sums in found.items():
            if sums.values < expected[name].values:  # more: logged meanwhile
                yield f"the series of {name} has {sums.values} values, its rows {expected[name].values}"
            elif sums.values == expected[name].values and sums.bits != expected[name].bits:
                yield f"the series of {name} has other values than its rows"


def _add_series(store: Store, run_id: str, names: Sequence[str], found: dict[str, _Sum]) -> None:
    for name, series in store.series(run_id, names).items():
        found[name] = _Sum()
        found[name].add(series.values)


def _damage(store: Store, run_id: str) -> Iterable[str]:
    """Return the damage that the store's engine finds in the run's files, if it can check them."""
    look: Callable[[str], Sequence[str]] | None = getattr(store, "damage", None)
    return _tried(lambda: look(run_id) if look else (), "files cannot be looked through")


def _tried(read: Callable[[], Sequence[str]], what: str) -> Sequence[str]:
    """Return the problems that ``read`` reports, or the error with which it failed."""
    try:
        return read()
    except StoreError as error:
        return [f"{what}: {error}"]
