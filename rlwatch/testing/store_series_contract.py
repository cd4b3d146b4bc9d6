"""Contract of a store for long runs: every way of reading (rows, columns, new rows, ranges, thinned) returns what was
written.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator

import numpy as np

from rlwatch.ports import Series, Storable, Store
from rlwatch.records import Event, ForecastRecord, RunInfo, StepRecord
from rlwatch.testing.store_run_contract import StoreHooks, fill, steps

_ATTEMPTS = {1: range(6000), 2: range(5000, 9000), 3: range(8500, 12000)}
"""Each attempt restarts at an earlier step; there are enough rows that a store may keep older ones in another form."""
_NAMES = ("policy/kl", "optim/lr", "eval/acc", "forecast/p50")


def _value(rng: random.Random) -> float:
    odd = rng.random()
    if odd < 0.002:
        return rng.choice((math.nan, math.inf, -math.inf, 1e6, -1e6))
    return rng.gauss(0.0, 1.0)


def _items(attempt: int, rng: random.Random, seq: int) -> Iterator[Storable]:
    """Yield two metrics at each step, an evaluation at each tenth, an event at each 50th, a forecast at each second."""
    for step in _ATTEMPTS[attempt]:
        seq += 1
        yield StepRecord(step, {"policy/kl": _value(rng), "optim/lr": 1e-6}, float(seq), attempt, step % 2, seq)
        if step % 2:
            yield ForecastRecord(step, {"forecast/p50": _value(rng)}, {}, float(seq), attempt, seq)
        if step % 10 == 0:
            seq += 1
            yield StepRecord(step, {"eval/acc": _value(rng)}, math.nan if step % 70 else 1.0, attempt, 0, seq)
        if step % 50 == 0:
            seq += 1
            yield Event("note", step, {"n": step}, float(seq), attempt, seq)


def long_run(store: Store) -> list[Storable]:
    """Write a run of three attempts, in batches of random sizes, and return all of its items."""
    rng = random.Random(0)
    written: list[Storable] = []
    for attempt in _ATTEMPTS:
        writer = store.open_run(RunInfo("run"))
        items = list(_items(attempt, rng, writer.last_seq))
        written += items
        while items:
            size = rng.choice((1, 30, 400, 1500))
            writer.write(items[:size])
            del items[:size]
        writer.close()
    return written


def _rows(written: Iterable[Storable], name: str) -> list[tuple[int, int, int, float]]:
    """Return seq, step, attempt and value of each item that has ``name``."""
    kept = (item for item in written if isinstance(item, StepRecord | ForecastRecord) and name in item.metrics)
    return [(item.seq, item.step, item.attempt, item.metrics[name]) for item in kept]


def _read_rows(series: Series) -> list[tuple[int, int, int, float]]:
    columns = (series.seqs, series.steps, series.attempts, series.values)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _text(rows: object) -> str:
    return repr(rows)  # NaN equals itself as text


class SeriesContract(StoreHooks):
    """Tests that long runs, which a store may compress or rearrange, are read as they were written."""

    def test_a_long_run_is_read_as_it_was_written(self, store: Store) -> None:
        """Check records from any number on, with a limit, and the newest; series; steps; and times of a long run."""
        written = long_run(store)
        records = [item for item in written if isinstance(item, StepRecord)]
        again = self.reopen(store)

        assert _text(again.records("run")) == _text(records)
        for after in (0, 1, 3000, 9000, records[-1].seq - 3, records[-1].seq):
            newer = [record for record in records if record.seq > after]
            assert _text(again.records("run", after_seq=after, limit=300)) == _text(newer[:300])
            assert _text(again.records("run", after_seq=after, last=5000)) == _text(newer[-5000:])
        assert _text(again.records("run", last=7)) == _text(records[-7:])
        for name, series in again.series("run", _NAMES).items():
            assert _text(_read_rows(series)) == _text(_rows(written, name))
        assert again.steps("run") == {attempt: list(steps) for attempt, steps in _ATTEMPTS.items()}
        moments = again.moments("run")
        assert _text(moments.values.tolist()) == _text([record.ts for record in records])
        assert moments.seqs.tolist() == [record.seq for record in records]
        assert again.last_values("run")["policy/kl"] == (11999, records[-1].metrics["policy/kl"])
        assert again.run("run").last_step == 11999

    def test_the_history_of_a_long_run_is_that_of_its_branch(self, store: Store) -> None:
        """Check that records and events that an attempt continues come together and in order, from any number on."""
        written = long_run(store)
        below = {1: 5000, 2: 8500, 3: 11000}
        kept = [
            item
            for item in written
            if isinstance(item, StepRecord | Event) and (item.step or 0) < below[item.attempt] and item.seq > 2000
        ]

        assert store.branch_bounds("run", 4, 11000) == below
        assert _text(list(store.branch("run", 4, 11000, after_seq=2000))) == _text(kept)
        followed = store.stream("run", after_seq=2000, limit=900)
        assert [item.seq for item in followed] == list(range(2001, 2901))

    def test_what_is_new_is_above_a_seq(self, store: Store) -> None:
        """Check that queries with ``after_seq`` return each newer row exactly once, including rows written later, and
        nothing if there is no newer row.
        """
        written = long_run(store)
        for after in (0, 2500, 13000, 10**9):
            for name, series in store.series("run", _NAMES, after_seq=after).items():
                assert _text(_read_rows(series)) == _text([row for row in _rows(written, name) if row[0] > after])
        last = store.judged("run")[1]
        fill(store, steps(12000, attempt=4, name="policy/kl"))

        new = store.series("run", ["policy/kl", "optim/lr"], after_seq=last)
        assert (new["policy/kl"].steps.tolist(), new["optim/lr"].steps.tolist()) == ([12000], [])

    def test_a_range_of_steps_has_both_its_ends(self, store: Store) -> None:
        """Check that a range of steps includes both its ends, for rows of all attempts."""
        written = long_run(store)
        for low, high in ((0, 11999), (4990, 5010), (8499, 8501), (700, 700), (20000, 30000), (5, 4)):
            for name, series in store.series("run", _NAMES, steps=(low, high)).items():
                wanted = [row for row in _rows(written, name) if low <= row[1] <= high]
                assert _text(_read_rows(series)) == _text(wanted)

    def test_a_thinned_series_keeps_outliers(self, store: Store) -> None:
        """Check that a thinned series keeps extremes and non-finite values, for current and for replaced rows.

        It must hold only measured rows, in order.
        """
        written = long_run(store)
        bounds = {1: 5000, 2: 8500, 3: math.inf}
        for window in (None, (0, 20000), (4000, 8700), (5990, 6010), (9000, 11000)):
            found = store.series("run", ("optim/lr", *_NAMES), steps=window, points=20)
            for name in _NAMES:
                low, high = window or (0, 20000)
                rows = [row for row in _rows(written, name) if low <= row[1] <= high]
                left = _read_rows(found[name])
                assert [row[0] for row in left] == sorted({row[0] for row in left})
                assert {*map(_text, left)} <= {*map(_text, rows)}
                for counts in (True, False):
                    whole, thin = (
                        np.array([v for _, step, attempt, v in some if (step < bounds[attempt]) == counts])
                        for some in (rows, left)
                    )
                    assert _outliers(thin) == _outliers(whole)

    def test_a_thinned_series_is_short(self, store: Store) -> None:
        """Check that a long series is thinned, a short one stays whole, and the newest row is always kept."""
        written = long_run(store)
        thin = store.series("run", ["policy/kl", "eval/acc"], points=20)
        short = store.series("run", ["policy/kl"], steps=(11990, 11999), points=20)["policy/kl"]

        assert len(thin["policy/kl"].steps) < len(_rows(written, "policy/kl")) / 5
        assert short.steps.tolist() == list(range(11990, 12000))
        assert thin["policy/kl"].seqs[-1] == _rows(written, "policy/kl")[-1][0]

    def test_the_span_of_an_attempt_is_from_its_lowest_step_to_its_highest(self, store: Store) -> None:
        """Check the lowest and highest step of attempts whose steps are not in order; an attempt without records has
        none.
        """
        fill(store, [StepRecord(10, {"kl": 1.0}), StepRecord(5, {"kl": 1.0}), StepRecord(7, {})])
        fill(store, [Event("note", attempt=2)])
        fill(store, steps(3, attempt=3))
        assert store.spans("run") == {1: (5, 10), 3: (3, 3)}

    def test_the_spans_of_a_long_run_are_those_of_its_steps(self, store: Store) -> None:
        """Check the lowest and highest step of each attempt of a long run."""
        long_run(store)
        assert store.spans("run") == {attempt: (steps[0], steps[-1]) for attempt, steps in _ATTEMPTS.items()}


def _outliers(values: np.ndarray) -> object:
    finite = values[np.isfinite(values)]
    odd = tuple(bool(hit.any()) for hit in (np.isnan(values), values == np.inf, values == -np.inf))
    return odd, (float(finite.min()), float(finite.max())) if len(finite) else None
