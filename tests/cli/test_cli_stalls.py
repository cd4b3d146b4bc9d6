"""``rlwatch show`` of a run that hangs: the stage, since when, and the stack of each rank."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from cli_helpers import Invoke

import rlwatch
from rlwatch.records import STALL_OVER, STALLED, Event, RunInfo, RunState, StepRecord


def stalled(rank: int, what: str, since: float, place: str) -> Event:
    says = f"rank {rank} is in stage reward, {what}; at {place}"
    stack = ["train (loop.py:3)", place]
    body = {"rank": rank, "stage": "reward", "since": since, "what": what, "says": says}
    threads = [{"name": "MainThread", "stack": stack}, {"name": "loader", "stack": ["fetch (data.py:7)"]}]
    return Event(STALLED, 3, {**body, "threads": threads}, time.time(), seq=4 + rank)


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Rank 0 waits for rank 1, which began to hang later."""
    now = time.time()
    opened = rlwatch.open_store(str(tmp_path))
    writer = opened.open_run(RunInfo("run", created_at=now - 900.0))
    writer.write([StepRecord(step, {"loss": 0.5}, now - 620.0 + step, seq=step) for step in (1, 2, 3)])
    writer.write([stalled(0, "waiting", now - 610.0, "all_gather (torch/distributed/distributed_c10d.py:3)")])
    writer.write([stalled(1, "starved", now - 600.0, "judge_that_never_answers (judge.py:31)")])
    writer.heartbeat(now, "reward", now - 605.0)
    writer.close()
    return str(tmp_path)


def test_it_prints_the_cause_first_and_the_stacks(invoke: Invoke, store: str) -> None:
    """Also the stage that the last heartbeat said."""
    shown = invoke("show", "run", "--store", store).output

    assert "in stage reward for 10" in shown
    assert shown.index("judge_that_never_answers (judge.py:31)") < shown.index("all_gather (torch/distributed")
    assert shown.count("stalled ") == 2


def test_scripts_get_every_stack(invoke: Invoke, store: str) -> None:
    """Of all threads, as JSON."""
    found = json.loads(invoke("show", "run", "--store", store, "--format", "json").output)

    assert (found["stage"], [stall["rank"] for stall in found["stalls"]]) == ("reward", [1, 0])
    assert found["stalls"][0]["threads"][1]["stack"] == ["fetch (data.py:7)"]


@pytest.mark.parametrize("how", ["goes on", "ends", "is over"])
def test_a_stall_that_is_over_is_not_shown(invoke: Invoke, store: str, how: str) -> None:
    """After a row, the end of the run, or the word of each rank."""
    writer = rlwatch.open_store(store).amend_run("run")
    assert writer is not None
    if how == "goes on":
        writer.write([StepRecord(4, {"loss": 0.5}, time.time() + 1.0, seq=6)])
    elif how == "ends":
        writer.finish(RunState.CRASHED, "killed by SIGTERM", time.time())
    else:
        writer.write([Event(STALL_OVER, 3, {"rank": rank}, time.time(), seq=6 + rank) for rank in (0, 1)])
    writer.close()

    assert "judge_that_never_answers" not in invoke("show", "run", "--store", store).output
