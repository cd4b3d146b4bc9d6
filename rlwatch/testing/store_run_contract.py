"""Contract: opening, resuming, locking, finishing and listing runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rlwatch.errors import RunLockedError, RunNotFoundError, StoreError
from rlwatch.ports import Store
from rlwatch.records import Event, RunInfo, RunState
from rlwatch.testing.store_hooks import StoreHooks, fill, steps

_READS: list[Callable[[Store], object]] = [
    lambda store: store.run("absent"),
    lambda store: store.records("absent"),
    lambda store: store.branch("absent", 2, 5),
    lambda store: store.metric_names("absent"),
    lambda store: store.series("absent", ["kl"]),
    lambda store: store.last_values("absent"),
    lambda store: store.spikes("absent"),
    lambda store: store.top_spikes("absent"),
    lambda store: store.findings("absent"),
    lambda store: store.events("absent"),
]
_BAD_IDS = ["", ".", "..", ".hidden", "a/b", "../up", "a b", "run\n", "é", "a" * 121, "<script>"]


class RunContract(StoreHooks):
    """A run's life."""

    def test_a_new_store_is_empty(self, store: Store) -> None:
        """No runs, nothing unreadable, no alerts, no messages; asking creates nothing."""
        assert (store.runs(), dict(store.unreadable()), store.alerts(), store.outbox()) == ([], {}, [], [])

    def test_a_run_comes_back_as_it_was_opened(self, store: Store) -> None:
        """Every field that is the caller's to say."""
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
        """So that listing newest first means something."""
        assert fill(store).created_at > 0

    @pytest.mark.parametrize("read", _READS)
    def test_reading_an_unknown_run_says_so(self, store: Store, read: Callable[[Store], object]) -> None:
        """``RunNotFoundError`` with the name asked for, in a store with runs as in an empty one."""
        with pytest.raises(RunNotFoundError, match="absent"):
            read(store)
        fill(store)
        with pytest.raises(RunNotFoundError, match="absent"):
            read(store)

    @pytest.mark.parametrize("run_id", _BAD_IDS)
    def test_an_id_that_is_no_name_is_refused(self, store: Store, run_id: str) -> None:
        """For writing with what an id may be, for reading as a run that cannot exist."""
        with pytest.raises(StoreError, match="letters, digits"):
            store.open_run(RunInfo(run_id))
        with pytest.raises(RunNotFoundError):
            store.run(run_id)
        assert store.runs() == []

    def test_runs_are_listed_newest_first(self, store: Store) -> None:
        """By creation time, all of them."""
        for run_id, created_at in (("b", 2.0), ("c", 3.0), ("a", 1.0)):
            store.open_run(RunInfo(run_id, created_at=created_at)).close()

        assert [run.run_id for run in self.reopen(store).runs()] == ["c", "b", "a"]

    def test_last_step_and_time_are_those_of_the_newest_record(self, store: Store) -> None:
        """Newest by arrival, not the highest step; events do not count."""
        assert (fill(store).last_step, store.run("run").last_ts) == (None, None)

        fill(store, [*steps(8, 9, 3), Event("note", step=50)])

        assert (store.run("run").last_step, store.run("run").last_ts) == (3, 3.0)
        assert store.runs()[0].last_step == 3

    def test_heartbeats_show(self, store: Store) -> None:
        """The newest one."""
        writer = store.open_run(RunInfo("run"))
        writer.heartbeat(77.0)
        writer.heartbeat(78.5)

        assert self.reopen(store).run("run").heartbeat_at == 78.5
        writer.close()

    @pytest.mark.parametrize("state", [RunState.FINISHED, RunState.CRASHED])
    def test_finish_records_how_it_ended(self, store: Store, state: RunState) -> None:
        """State, reason and time; the writer's own view too."""
        writer = store.open_run(RunInfo("run"))
        writer.write(steps(1, 2))
        writer.finish(state, "out of memory <b>", 99.0)
        writer.close()

        run = self.reopen(store).run("run")
        assert (run.state, run.state_reason, run.heartbeat_at) == (state, "out of memory <b>", 99.0)
        assert writer.run.state is state
        assert len(store.records("run")) == 2

    def test_a_run_closed_without_finish_stays_running(self, store: Store) -> None:
        """Whether it is stale is for the reader to judge."""
        fill(store, steps(1))

        assert self.reopen(store).run("run").state is RunState.RUNNING

    def test_after_finish_only_close_is_left(self, store: Store) -> None:
        """Writing says so; closing may be repeated."""
        writer = store.open_run(RunInfo("run"))
        writer.finish(RunState.FINISHED, "", 1.0)
        with pytest.raises(StoreError, match="finished"):
            writer.write(steps(1))
        writer.close()
        writer.close()
        with pytest.raises(StoreError, match="run"):
            writer.write(steps(1))

        assert store.records("run") == []

    def test_a_second_writer_is_refused_until_the_first_lets_go(self, store: Store) -> None:
        """Before it changed anything."""
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
        """The lock is the run's, not the store's."""
        first, second = store.open_run(RunInfo("one")), store.open_run(RunInfo("two"))
        first.write(steps(1))
        second.write(steps(1, 2))
        first.close()
        second.close()

        assert (len(store.records("one")), len(store.records("two"))) == (1, 2)

    def test_opening_again_begins_the_next_attempt(self, store: Store) -> None:
        """Numbers go on, the state is running again, birth stays, the newer description wins where it says anything."""
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

    def test_attempts_in_the_records_count_too(self, store: Store) -> None:
        """An imported log may hold restarts; a real resume comes after them."""
        fill(store, [*steps(1), *steps(1, attempt=4)])

        assert fill(store).attempt == 5

    def test_closing_the_store_is_idempotent_and_keeps_the_runs(self, store: Store) -> None:
        """They are the store's, not the handle's."""
        fill(store, steps(1))
        store.close()
        store.close()

        assert len(self.reopen(store).records("run")) == 1
