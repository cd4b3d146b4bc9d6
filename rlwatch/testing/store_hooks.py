"""What every part of the store contract stands on: the fixture, the hook, and things to store."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest

from rlwatch.ports import Storable, Store
from rlwatch.records import Alert, AlertState, Command, OutboxMessage, RunInfo, RunState, Severity, StepRecord
from rlwatch.store.url import open_store

_numbers = count()


class StoreHooks:
    """Give the fixture ``store``: an empty store, new for each test."""

    @pytest.fixture
    def store(self) -> Store:
        """An empty store."""
        raise NotImplementedError("a store contract needs a fixture `store`")

    def reopen(self, store: Store) -> Store:
        """The same store as another process would see it."""
        return open_store(store.url)


def new_run() -> str:
    """A run id not given before in this process: examples of one property share a store."""
    return f"run{next(_numbers)}"


def fill(store: Store, items: Sequence[Storable] = (), run_id: str = "run", *, finish: bool = False) -> RunInfo:
    """One attempt of ``run_id`` that writes ``items``; returns the run as its writer had it."""
    writer = store.open_run(RunInfo(run_id))
    writer.write(items)
    if finish:
        writer.finish(RunState.FINISHED, "", 2.0)
    writer.close()
    return writer.run


def steps(*numbers: int, attempt: int = 1, name: str = "kl") -> list[StepRecord]:
    """A record a number, whose one metric is a tenth of it."""
    return [StepRecord(number, {name: number / 10}, ts=float(number), attempt=attempt) for number in numbers]


def command(command_id: str = "c1", run_id: str = "run", *, expires_at: float = 0.0, key: str = "") -> Command:
    """A queued command."""
    return Command(command_id, run_id, "reset-reference", expires_at=expires_at, idempotency_key=key)


def alert(alert_id: str = "a1", run_id: str = "run", *, state: AlertState = AlertState.FIRING) -> Alert:
    """An alert on step 7."""
    return Alert(alert_id, run_id, "rule", "entropy_collapse", Severity.CRITICAL, state, 5, 7, "entropy is collapsing")


def message(message_id: str = "m1", run_id: str = "run", *, channel: str = "hook", due: float = 0.0) -> OutboxMessage:
    """A pending message."""
    return OutboxMessage(message_id, run_id, "a1", channel, {"text": "entropy"}, next_attempt_at=due)
