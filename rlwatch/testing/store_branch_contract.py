"""Contract: the history a resumed attempt continues."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlwatch.ports import Item, Store
from rlwatch.records import Event, StepRecord
from rlwatch.testing.store_hooks import StoreHooks, fill, new_run, steps

_spans = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=5)


def _told(store: Store, attempt: int, before_step: int, run_id: str = "run") -> list[tuple[int, int | str | None]]:
    """(attempt, step) of records and (attempt, kind) of events, in order."""
    return [
        (item.attempt, item.step if isinstance(item, StepRecord) else item.kind)
        for item in store.branch(run_id, attempt, before_step)
    ]


class BranchContract(StoreHooks):
    """Of each earlier attempt, what lies below where the next one took over."""

    def test_a_first_attempt_continues_nothing(self, store: Store) -> None:
        """Whatever it has written itself."""
        fill(store, steps(0, 1, 2))

        assert list(store.branch("run", 1, 2)) == []

    def test_a_resumed_attempt_continues_what_lies_below_its_start(self, store: Store) -> None:
        """Steps past the checkpoint belong to the abandoned branch."""
        fill(store, [*steps(1, 2, 3, 4, 5), *steps(4, 5, attempt=2)])

        assert list(store.branch("run", 2, 4)) == store.records("run", limit=3)

    def test_each_attempt_is_cut_where_the_next_began(self, store: Store) -> None:
        """Back to the first; an attempt that wrote nothing (3) is passed over."""
        fill(store, [*steps(1, 2, 3, 4), *steps(3, 4, 5, 6, attempt=2), *steps(5, 6, 7, attempt=4)])

        assert _told(store, 5, 7) == [(1, 1), (1, 2), (2, 3), (2, 4), (4, 5), (4, 6)]
        assert _told(store, 4, 5) == [(1, 1), (1, 2), (2, 3), (2, 4)]

    def test_going_back_further_than_the_last_start_skips_that_attempt(self, store: Store) -> None:
        """From checkpoint 2 nothing of an attempt begun at 5 is left, and of the first only what is below 2."""
        fill(store, [*steps(1, 2, 3, 4, 5, 6), *steps(5, 6, attempt=2)])

        assert _told(store, 3, 2) == [(1, 1)]

    def test_events_belong_if_they_came_before_the_cut(self, store: Store) -> None:
        """By number, and by step where they have one."""
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

        assert _told(store, 3, 3) == [
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
        """Whatever the restarts: below its bound, strictly rising, and in order of arrival."""
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
