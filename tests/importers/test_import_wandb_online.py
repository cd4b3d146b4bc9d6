"""A run on a wandb server, with the server's part played here: nothing goes over a network."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rlwatch.clock import ManualClock
from rlwatch.errors import ImportFormatError
from rlwatch.importers.naming import naming_of
from rlwatch.importers.wandb_runs import ASK_S, WandbTail, wandb_run


class Server:
    """Holds rows; is asked as ``wandb.Api`` is."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.asked: list[tuple[str, int]] = []
        self.down = False

    def run(self, path: str) -> Any:
        return SimpleNamespace(scan_history=lambda min_step: self._scan(path, min_step))

    def _scan(self, path: str, min_step: int) -> Any:
        self.asked.append((path, min_step))
        for row in self.rows:
            if self.down:
                raise ConnectionError("no route\nto host")
            if row["_step"] >= min_step:
                yield row

    def add(self, *steps: int) -> None:
        for step in steps:
            self.rows.append({"_step": len(self.rows), "train/global_step": step, "train/loss": 0.5, "_timestamp": 5.0})


class BreaksAfter(list[dict[str, Any]]):
    """Rows of which ``n`` come, and then an error."""

    def __init__(self, n: int, rows: list[dict[str, Any]], error: BaseException | None = None) -> None:
        super().__init__(rows)
        self.n, self.error = n, error or ConnectionResetError("reset by peer")

    def __iter__(self) -> Any:
        yield from self[: self.n]
        raise self.error


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def tail(server: Server, clock: ManualClock) -> WandbTail:
    return WandbTail("me/math/x1", api=lambda: server, clock=clock)


def test_each_row_is_given_once_and_the_server_asked_now_and_then(
    tail: WandbTail, server: Server, clock: ManualClock
) -> None:
    """From the row after the last."""
    server.add(10, 20)
    first, at_once = tail.poll(), tail.poll()
    server.add(30)
    clock.advance(ASK_S)
    second = tail.poll()

    assert [(r.seq, r.step, r.ts) for r in first] == [(1, 10, 5.0), (2, 20, 5.0)]
    assert (at_once, [(r.seq, r.step) for r in second]) == ([], [(3, 30)])
    assert server.asked == [("me/math/x1", 0), ("me/math/x1", 2)]
    assert (tail.name, tail.position, tail.close()) == ("x1", None, [])


def test_a_backlog_comes_in_lots(tail: WandbTail, server: Server) -> None:
    """Of one answer."""
    server.add(*range(1, 8))
    lots = [tail.poll(3)]
    while tail.behind:
        lots.append(tail.poll(3))

    assert [record.step for lot in lots for record in lot] == list(range(1, 8))
    assert max(map(len, lots)) == 3
    assert len(server.asked) == 1


def test_what_the_network_does_is_said_and_tried_again(tail: WandbTail, server: Server, clock: ManualClock) -> None:
    """In one line; no row is lost or doubled."""
    server.add(1, 2)
    server.down = True
    assert tail.poll() == []
    assert tail.problem == "wandb does not answer for me/math/x1: no route to host"
    server.down = False
    clock.advance(ASK_S)

    assert [record.step for record in tail.poll()] == [1, 2]
    assert tail.problem == ""


def test_rows_before_a_break_are_kept(tail: WandbTail, server: Server, clock: ManualClock) -> None:
    """The connection ends amid the rows: those that came are given, the others are asked for later."""
    server.add(1, 2, 3)
    whole = server.rows
    server.rows = BreaksAfter(2, whole)

    assert [record.step for record in tail.poll()] == [1, 2]
    assert (tail.problem, tail.behind) == ("wandb does not answer for me/math/x1: reset by peer", False)
    server.rows = whole
    assert tail.poll() == []  # not at once
    clock.advance(ASK_S)
    assert tail.poll()[-1].step == 3
    assert tail.problem == ""


def test_an_interrupt_is_no_answer_of_the_server(tail: WandbTail, server: Server) -> None:
    """Ctrl-C ends the watching."""
    server.rows = BreaksAfter(0, [], KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        tail.poll()


def test_values_of_the_api_are_numbers_again(tail: WandbTail, server: Server) -> None:
    """The API gives NaN and the infinities as strings, and media as mappings."""
    server.rows.append({"_step": 0, "loss": "NaN", "kl": "Infinity", "text": "hi", "h": {"_type": "histogram"}})
    (record,) = tail.poll()

    assert math.isnan(record.metrics["loss"])
    assert record.metrics["kl"] == math.inf
    assert set(record.metrics) == {"loss", "kl"}


@pytest.mark.parametrize("address", ["train.log", "sqlite:///a/b/c", "memory://x", "me/math/x1", "wandb://me/x1"])
def test_what_is_no_address_of_a_run_is_none(address: str) -> None:
    """Paths, stores, half an address."""
    assert wandb_run(address) is None


def test_without_wandb_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """And without a key what to do."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportFormatError, match="pip install wandb"):
        WandbTail("me/math/x1")

    def closed(**_options: object) -> None:
        raise PermissionError("no API key")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Api=closed))  # type: ignore[arg-type]
    with pytest.raises(ImportFormatError, match=r"no API key.*WANDB_API_KEY"):
        WandbTail("me/math/x1")


def test_names_are_read_as_they_are_mapped(server: Server, clock: ManualClock) -> None:
    """As those of a file are."""
    server.add(10, 20)
    tail = WandbTail("me/math/x1", api=lambda: server, clock=clock, naming=naming_of(["reward=train/loss"]))

    assert [record.metrics["reward/mean"] for record in [*tail.poll(), *tail.close()]] == [0.5, 0.5]
