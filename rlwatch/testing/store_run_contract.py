"""Contract of a store for the life of a run: opening, resuming, locking, finishing, and the history an attempt
continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlwatch.errors import RunLockedError, RunNotFoundError, StoreError
from rlwatch.ports import Item, Storable, Store
from rlwatch.records import (
    Alert,
    AlertState,
    Command,
    Event,
    ForecastRecord,
    OutboxMessage,
    RunInfo,
    RunState,
    Severity,
    StepRecord,
)
from rlwatch.store.url import open_store

_numbers = count()


class StoreHooks:
    """Fixtures of the store contract; override ``store`` so that it returns a new, empty store for each test."""

    @pytest.fixture
    def store(self) -> Store:
        """Return a new, empty store."""
        raise NotImplementedError("a store contract needs a fixture `store`")

    def reopen(self, store: Store) -> Store:
        """Return an object for the same store, opened anew as another process would open it."""
        return open_store(store.url)


def new_run() -> str:
    """Return a run id that is new in this process, because all examples of one Hypothesis test share a store."""
    return f"run{next(_numbers)}"


def fill(store: Store, items: Sequence[Storable] = (), run_id: str = "run", *, finish: bool = False) -> RunInfo:
    """Write ``items`` in one attempt (process) of the run ``run_id``; return the description of the run that its writer
    has at the end.

    ``finish``: whether to end the run as finished.
    """
    writer = store.open_run(RunInfo(run_id))
    writer.write(items)
    if finish:
        writer.finish(RunState.FINISHED, "", 2.0)
    writer.close()
    return writer.run


def steps(*numbers: int, attempt: int = 1, name: str = "kl") -> list[StepRecord]:
    """Return a record for each step number, with one metric whose value is a tenth of the number."""
    return [StepRecord(number, {name: number / 10}, ts=float(number), attempt=attempt) for number in numbers]


def command(command_id: str = "c1", run_id: str = "run", *, expires_at: float = 0.0, key: str = "") -> Command:
    """Return a queued command for tests. ``expires_at``: Unix seconds, 0 for never. ``key``: its idempotency key."""
    return Command(command_id, run_id, "reset-reference", expires_at=expires_at, idempotency_key=key)


def alert(alert_id: str = "a1", run_id: str = "run", *, state: AlertState = AlertState.FIRING) -> Alert:
    """Return an alert for tests about step 7 of the run ``run_id``, in the given ``state``."""
    return Alert(alert_id, run_id, "rule", "entropy_collapse", Severity.CRITICAL, state, 5, 7, "entropy is collapsing")


def message(message_id: str = "m1", run_id: str = "run", *, channel: str = "hook", due: float = 0.0) -> OutboxMessage:
    """Return an outgoing message for tests that waits to be sent; ``due``: Unix seconds from which it is to be sent."""
    return OutboxMessage(message_id, run_id, "a1", channel, {"text": "entropy"}, next_attempt_at=due)


# Contract: opening, resuming, locking, finishing and listing runs.

_READS: list[Callable[[Store], object]] = [
    lambda store: store.run("absent"),
    lambda store: store.records("absent"),
    lambda store: store.branch("absent", 2, 5),
    lambda store: store.metric_names("absent"),
    lambda store: store.steps("absent"),
    lambda store: store.series("absent", ["kl"]),
    lambda store: store.spans("absent"),
    lambda store: store.moments("absent"),
    lambda store: store.last_values("absent"),
    lambda store: store.spikes("absent"),
    lambda store: store.top_spikes("absent"),
    lambda store: store.findings("absent"),
    lambda store: store.events("absent"),
]
_BAD_IDS = ["", ".", "..", "-rf", "-", ".hidden", "a/b", "../up", "a b", "run\n", "é", "a" * 121, "<script>"]


class RunContract(StoreHooks):
    """Tests of a run's life in a store: creation, listing, locking, heartbeats, end and further attempts."""

    def test_a_new_store_is_empty(self, store: Store) -> None:
        """Check that a new store has no runs, alerts or messages, and that reading creates nothing."""
        assert (store.runs(), dict(store.unreadable()), store.alerts(), store.outbox()) == ([], {}, [], [])

    def test_a_run_comes_back_as_it_was_opened(self, store: Store) -> None:
        """Check that every field of a run that the caller sets comes back."""
        opened = RunInfo(
            "qwen-0.5b_seed3",
            project="math <script>alert(1)</script>",
            name="näme ☃ " + "x" * 200,
            source="trl/grpo",
            created_at=123.5,
            config={"lr": 1e-6, "nested": {"layers": [1, 2]}, "none": None},
            tags=("a", "b"),
            host="node7",
            pid=42,
        )

        store.open_run(opened).close()
        run = self.reopen(store).run(opened.run_id)

        assert replace(run, heartbeat_at=None) == opened
        assert run.heartbeat_at is not None

    def test_a_run_without_a_creation_time_gets_one(self, store: Store) -> None:
        """Check that a run gets a creation time, by which runs are listed."""
        assert fill(store).created_at > 0

    @pytest.mark.parametrize("read", _READS)
    def test_reading_an_unknown_run_is_an_error(self, store: Store, read: Callable[[Store], object]) -> None:
        """Check that reading an unknown run raises ``RunNotFoundError`` with its name, in empty and filled stores."""
        with pytest.raises(RunNotFoundError, match="absent"):
            read(store)
        fill(store)
        with pytest.raises(RunNotFoundError, match="absent"):
            read(store)

    @pytest.mark.parametrize("run_id", _BAD_IDS)
    def test_an_id_that_is_no_name_is_refused(self, store: Store, run_id: str) -> None:
        """Check that writing under an invalid run id reports the rules for ids, and reading reports an unknown run."""
        with pytest.raises(StoreError, match="letters, digits"):
            store.open_run(RunInfo(run_id))
        with pytest.raises(RunNotFoundError):
            store.run(run_id)
        assert store.runs() == []

    def test_runs_are_listed_newest_first(self, store: Store) -> None:
        """Check that all runs are listed, by creation time, newest first."""
        for run_id, created_at in (("b", 2.0), ("c", 3.0), ("a", 1.0)):
            store.open_run(RunInfo(run_id, created_at=created_at)).close()

        assert [run.run_id for run in self.reopen(store).runs()] == ["c", "b", "a"]

    def test_last_step_and_time_are_those_of_the_newest_record(self, store: Store) -> None:
        """Check that a run's last step and time are those of the last record that arrived, not the highest; events do
        not count.
        """
        assert (fill(store).last_step, store.run("run").last_ts) == (None, None)

        fill(store, [*steps(8, 9, 3), Event("note", step=50)])

        assert (store.run("run").last_step, store.run("run").last_ts) == (3, 3.0)
        assert store.runs()[0].last_step == 3

    def test_heartbeats_show(self, store: Store) -> None:
        """Check that readers see the newest heartbeat."""
        writer = store.open_run(RunInfo("run"))
        writer.heartbeat(77.0)
        writer.heartbeat(78.5)

        assert self.reopen(store).run("run").heartbeat_at == 78.5
        writer.close()

    def test_heartbeats_show_the_stage_that_the_next_attempt_does_not_have(self, store: Store) -> None:
        """Check that readers see the stage (sampling, update...) of the newest heartbeat; it is empty if that heartbeat
        has none, or a new attempt has begun.
        """
        writer = store.open_run(RunInfo("run"))
        seen = []
        for beat in ((77.0, "sampling", 70.0), (78.5, "reward", 78.0), (79.0,), (80.0, "update", 79.5)):
            writer.heartbeat(*beat)
            run = self.reopen(store).run("run")
            seen.append((run.heartbeat_at, run.stage, run.stage_since))
        writer.close()
        store.open_run(RunInfo("run")).close()
        run = self.reopen(store).run("run")

        assert seen == [(77.0, "sampling", 70.0), (78.5, "reward", 78.0), (79.0, "", None), (80.0, "update", 79.5)]
        assert (run.attempt, run.stage, run.stage_since) == (2, "", None)

    @pytest.mark.parametrize("state", [RunState.FINISHED, RunState.CRASHED])
    def test_finish_records_how_it_ended(self, store: Store, state: RunState) -> None:
        """Check that state, reason and time of the end are stored, and that the writer's own run has them."""
        writer = store.open_run(RunInfo("run"))
        writer.write(steps(1, 2))
        writer.finish(state, "out of memory <b>", 99.0)
        writer.close()

        run = self.reopen(store).run("run")
        assert (run.state, run.state_reason, run.heartbeat_at) == (state, "out of memory <b>", 99.0)
        assert writer.run.state is state
        assert len(store.records("run")) == 2

    def test_a_run_closed_without_finish_stays_running(self, store: Store) -> None:
        """Check that a run closed without an end stays ``running``; readers decide whether it is stale."""
        fill(store, steps(1))

        assert self.reopen(store).run("run").state is RunState.RUNNING

    def test_after_finish_only_close_is_left(self, store: Store) -> None:
        """Check that writing after the end raises, and that closing may be repeated."""
        writer = store.open_run(RunInfo("run"))
        writer.finish(RunState.FINISHED, "", 1.0)
        with pytest.raises(StoreError, match="finished"):
            writer.write(steps(1))
        writer.close()
        writer.close()
        with pytest.raises(StoreError, match="run"):
            writer.write(steps(1))

        assert store.records("run") == []

    def test_a_second_writer_is_refused_until_the_first_closes(self, store: Store) -> None:
        """Check that a second writer is refused before it changes anything, until the first closes."""
        writer = store.open_run(RunInfo("run", name="first"))
        other = self.reopen(store)
        for place in (store, other):
            with pytest.raises(RunLockedError, match="run"):
                place.open_run(RunInfo("run", name="second"))
        writer.write(steps(1))
        assert (other.run("run").name, other.run("run").attempt) == ("first", 1)

        writer.close()
        second = other.open_run(RunInfo("run"))
        assert second.run.attempt == 2
        second.close()

    def test_writers_of_different_runs_do_not_meet(self, store: Store) -> None:
        """Check that different runs can be written at once: the lock is the run's, not the store's."""
        first, second = store.open_run(RunInfo("one")), store.open_run(RunInfo("two"))
        first.write(steps(1))
        second.write(steps(1, 2))
        first.close()
        second.close()

        assert (len(store.records("one")), len(store.records("two"))) == (1, 2)

    def test_opening_again_begins_the_next_attempt(self, store: Store) -> None:
        """Check that opening a run again begins its next attempt.

        Numbers continue, the state is running again, the creation time stays, and a newer description replaces the old.
        """
        first = store.open_run(
            RunInfo("run", project="p", name="n", source="trl", created_at=5.0, config={"lr": 1}, tags=("t",), pid=1)
        )
        first.write([*steps(1, 2), Event("note")])
        first.finish(RunState.CRASHED, "oom", 9.0)
        first.close()

        second = self.reopen(store).open_run(
            RunInfo("run", project="q", created_at=50.0, config={"lr": 2}, host="h", pid=2)
        )
        assert (second.run.attempt, second.last_seq) == (2, 3)
        second.write(steps(2, attempt=2))
        second.close()

        run = store.run("run")
        assert (run.attempt, run.state, run.state_reason) == (2, RunState.RUNNING, "")
        assert (run.project, run.created_at, run.name, run.source, run.tags) == ("p", 5.0, "n", "trl", ("t",))
        assert (run.config, run.host, run.pid) == ({"lr": 2}, "h", 2)
        assert [(record.seq, record.attempt) for record in store.records("run")] == [(1, 1), (2, 1), (4, 2)]

    def test_the_configuration_of_each_attempt_is_kept(self, store: Store) -> None:
        """Check that each attempt keeps its own configuration, also an empty one."""
        for config in ({"lr": 1e-6, "nested": {"beta": 0.1}}, {}, {"lr": 2e-6}):
            store.open_run(RunInfo("run", config=config)).close()

        assert store.configs("run") == {1: {"lr": 1e-6, "nested": {"beta": 0.1}}, 2: {}, 3: {"lr": 2e-6}}
        with pytest.raises(RunNotFoundError):
            store.configs("unknown")

    def test_attempts_in_the_records_count_too(self, store: Store) -> None:
        """Check that a new attempt's number exceeds those in imported records, which may have restarts of their own."""
        fill(store, [*steps(1), *steps(1, attempt=4)])

        assert fill(store).attempt == 5

    def test_closing_the_store_is_idempotent_and_keeps_the_runs(self, store: Store) -> None:
        """Check that closing a store may be repeated and removes no runs."""
        fill(store, steps(1))
        store.close()
        store.close()

        assert len(self.reopen(store).records("run")) == 1


# Contract: the history a resumed attempt continues.

_spans = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=5)


def _items_of(store: Store, attempt: int, before_step: int, run_id: str = "run") -> list[tuple[int, int | str | None]]:
    """Return (attempt, step) of records and (attempt, kind) of events, in order."""
    return [
        (item.attempt, item.step if isinstance(item, StepRecord) else item.kind)
        for item in store.branch(run_id, attempt, before_step)
    ]


class BranchContract(StoreHooks):
    """Tests of the history that an attempt continues: each earlier attempt up to the first step of the next one."""

    def test_a_first_attempt_continues_nothing(self, store: Store) -> None:
        """Check that a first attempt has no earlier history, even after it has written rows."""
        fill(store, steps(0, 1, 2))

        assert list(store.branch("run", 1, 2)) == []

    def test_a_resumed_attempt_continues_what_lies_below_its_start(self, store: Store) -> None:
        """Check that a resumed attempt continues the rows below its first step; rows beyond the checkpoint are
        abandoned.
        """
        fill(store, [*steps(1, 2, 3, 4, 5), *steps(4, 5, attempt=2)])

        assert list(store.branch("run", 2, 4)) == store.records("run", limit=3)

    def test_each_attempt_is_cut_where_the_next_began(self, store: Store) -> None:
        """Check that each attempt counts up to the start of the next, back to the first; an empty attempt is
        skipped.
        """
        fill(store, [*steps(1, 2, 3, 4), *steps(3, 4, 5, 6, attempt=2), *steps(5, 6, 7, attempt=4)])

        assert _items_of(store, 5, 7) == [(1, 1), (1, 2), (2, 3), (2, 4), (4, 5), (4, 6)]
        assert _items_of(store, 4, 5) == [(1, 1), (1, 2), (2, 3), (2, 4)]

    def test_going_back_further_than_the_last_start_skips_that_attempt(self, store: Store) -> None:
        """Check that a resume from step 2 skips an attempt that began at 5, and keeps only rows below 2 of the
        first.
        """
        fill(store, [*steps(1, 2, 3, 4, 5, 6), *steps(5, 6, attempt=2)])

        assert _items_of(store, 3, 2) == [(1, 1)]

    def test_events_belong_if_they_came_before_the_cut(self, store: Store) -> None:
        """Check that an event belongs to the history by its sequence number, and by its step if it has one."""
        items: list[Item] = [
            Event("begun"),
            *steps(1),
            Event("reset", step=1),
            *steps(2),
            Event("early word of 3", step=3),
            Event("between"),
            *steps(3),
            Event("after the cut"),
            Event("late word of 1", step=1),
            Event("other attempt", attempt=2),
            Event("own", attempt=3),
        ]
        fill(store, items)

        assert _items_of(store, 3, 3) == [
            (1, "begun"),
            (1, 1),
            (1, "reset"),
            (1, 2),
            (1, "between"),
            (2, "other attempt"),
        ]

    @settings(
        max_examples=30,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(spans=_spans, before_step=st.integers(0, 20))
    def test_a_branch_is_one_line_of_steps(self, store: Store, spans: list[tuple[int, int]], before_step: int) -> None:
        """Check that for any restarts the steps of the history rise strictly, below the bound, in order of arrival."""
        run_id = new_run()
        written = [
            record
            for attempt, (start, length) in enumerate(spans, start=1)
            for record in steps(*range(start, start + length), attempt=attempt)
        ]
        fill(store, written, run_id)

        branch = list(store.branch(run_id, len(spans) + 1, before_step))

        line = [record.step for record in branch if isinstance(record, StepRecord)]
        assert line == sorted(set(line))
        assert all(step < before_step for step in line)
        assert [item.seq for item in branch] == sorted(item.seq for item in branch)
        newest = [record.step for record in branch if record.attempt == len(spans)]
        start, length = spans[-1]
        assert newest == [step for step in range(start, start + length) if step < before_step]


# Contract: forecasts are stored apart from measurements, once each, and are never returned as measurements.


def forecast(step: int, p50: float, seq: int, attempt: int = 1) -> ForecastRecord:
    """Return a forecast for tests, made when the record number ``seq`` of ``step`` was stored; ``p50``: its median."""
    body = {"alarm": p50 > 0.5, "limit": "reward", "why": [["mismatch/k3", 0.5]]}
    return ForecastRecord(step, {"forecast/p50": p50}, body, ts=1.5, attempt=attempt, seq=seq)


class ForecastContract(StoreHooks):
    """Tests that a store keeps forecasts and distinguishes them from measurements."""

    def test_forecasts_come_back_whole_and_in_order(self, store: Store) -> None:
        """Check that all forecasts, or the newest, come back in order, also one without a number."""
        absent = ForecastRecord(3, {}, {"absent": "needs 40 steps; at 3"}, seq=3)
        written = [forecast(1, 0.1, 1), forecast(2, 0.7, 2), absent]
        fill(store, [*steps(1, 2, 3), *written])

        assert self.reopen(store).forecasts("run") == written
        assert store.forecasts("run", last=2) == written[1:]

    def test_forecasts_are_series_of_the_run(self, store: Store) -> None:
        """Check that values of forecasts are read as series, like measured metrics, with the step and sequence number
        of the row at which each was made.
        """
        fill(store, [StepRecord(7, {"kl": 1.0}), StepRecord(9, {"kl": 2.0}), forecast(7, 0.1, 1), forecast(9, 0.7, 2)])

        series = store.series("run", ["forecast/p50", "kl"])
        forecasts, measured = series["forecast/p50"], series["kl"]
        assert (forecasts.steps.tolist(), forecasts.values.tolist(), forecasts.seqs.tolist()) == (
            [7, 9],
            [0.1, 0.7],
            [1, 2],
        )
        assert measured.values.tolist() == [1.0, 2.0]
        assert store.metric_names("run") == ["forecast/p50", "kl"]
        assert store.last_values("run") == {"forecast/p50": (9, 0.7), "kl": (9, 2.0)}

    def test_forecasts_are_no_records(self, store: Store) -> None:
        """Check that forecasts take no sequence number and are not part of a replay, which has measurements only."""
        fill(store, [*steps(1), forecast(1, 0.7, 1), *steps(2)])

        assert [(record.step, record.seq) for record in store.records("run")] == [(1, 1), (2, 2)]
        assert list(store.branch("run", 2, 9)) == store.records("run")
        assert store.run("run").last_step == 2

    def test_a_forecast_is_kept_once(self, store: Store) -> None:
        """Check that only the first forecast for a record is kept, although a resumed run repeats its forecasts."""
        fill(store, [*steps(1), forecast(1, 0.7, 1)])
        fill(store, [forecast(1, 0.2, 1), *steps(2), forecast(2, 0.3, 2, attempt=2)])

        assert [(f.step, f.attempt, f.metrics["forecast/p50"]) for f in store.forecasts("run")] == [
            (1, 1, 0.7),
            (2, 2, 0.3),
        ]

    def test_a_forecast_that_cannot_be_stored_takes_nothing_with_it_by_half(self, store: Store) -> None:
        """Check that a batch with a forecast that cannot be stored is not stored at all."""
        fill(store)
        writer = store.open_run(RunInfo("run"))
        with pytest.raises(StoreError, match="forecast/p50"):
            writer.write([*steps(1), ForecastRecord(1, {"forecast/p50": cast("float", "high")}, seq=1)])
        writer.close()

        assert (store.records("run"), store.forecasts("run")) == ([], [])

    def test_a_run_without_forecasts_has_none(self, store: Store) -> None:
        """Check that a run without forecasts has no forecast metrics either."""
        fill(store, steps(1))

        assert store.forecasts("run") == []
        assert len(store.series("run", ["forecast/p50"])["forecast/p50"].steps) == 0
