"""``rlwatch export trace``: the stages of a run in Chrome's trace event format."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_helpers import Invoke

import rlwatch
from rlwatch.export import trace_of
from rlwatch.records import STAGES, STALLED, Event, RunInfo, SpikeBatch, StepRecord

BEGAN = 1_795_949_361.25


def spans(step: int, *rows: tuple[str, float, float], rank: int = 0) -> SpikeBatch:
    """Stage, seconds since the beginning, seconds."""
    columns: dict[str, Any] = {
        "stage": [stage for stage, _, _ in rows],
        "begin": np.array([BEGAN + begin for _, begin, _ in rows]),
        "seconds": np.array([seconds for _, _, seconds in rows]),
    }
    return SpikeBatch(step, columns, STAGES, rank=rank)


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Two steps of two ranks; on rank 1 samples are drawn while the update runs, and it stalls."""
    opened = rlwatch.open_store(str(tmp_path / "store"))
    writer = opened.open_run(RunInfo("run", name="math-7b"))
    writer.write(
        [
            StepRecord(1, {"loss": 0.5}, seq=1),
            spans(1, ("sampling", 0.0, 1.25), ("reward", 1.25, 0.5), ("sampling", 1.75, 0.1), ("update", 1.85, 2.0)),
            spans(1, ("sampling", 0.5, 2.0), ("update", 1.0, 2.0), rank=1),
            spans(2, ("sampling", 4.0, 1.0), ("update", 5.0, 1.0)),
            Event(STALLED, 2, {"rank": 1, "stage": "update", "says": "wedged"}, BEGAN + 9.0, seq=2),
        ]
    )
    writer.close()
    return str(tmp_path / "store")


def events(trace: Any, phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def check_format(trace: Any) -> None:
    """The rules of the Trace Event Format that a viewer relies on."""
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert event["ph"] in {"X", "i", "M"}
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        if event["ph"] != "M":
            assert type(event["ts"]) is int
            assert event["ts"] >= 0
            assert isinstance(event["cat"], str)
        if event["ph"] == "X":
            assert type(event["dur"]) is int
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] in {"g", "p", "t"}
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "process_sort_index", "thread_name"}
            assert set(event["args"]) <= {"name", "sort_index"}
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events(trace, "X"):
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():  # of one track none may overlap the next, unless it lies within it
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(slices)))
    named = {(event["pid"], event["tid"]) for event in events(trace, "M") if event["name"] == "thread_name"}
    assert named == set(tracks)


def test_a_trace_has_a_process_for_each_rank_and_microseconds(store: str) -> None:
    """Slices of stages and steps; what overlaps lies on tracks of its own."""
    opened = rlwatch.open_store(store)
    trace: Any = trace_of(opened, opened.run("run"))
    slices = {(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events(trace, "X")}

    check_format(trace)
    assert slices == {
        (0, 0, "step 1", 0, 3_850_000),
        (0, 1, "sampling", 0, 1_250_000),
        (0, 1, "reward", 1_250_000, 500_000),
        (0, 1, "sampling", 1_750_000, 100_000),
        (0, 1, "update", 1_850_000, 2_000_000),
        (0, 0, "step 2", 4_000_000, 2_000_000),
        (0, 1, "sampling", 4_000_000, 1_000_000),
        (0, 1, "update", 5_000_000, 1_000_000),
        (1, 0, "step 1", 500_000, 2_500_000),
        (1, 1, "sampling", 500_000, 2_000_000),
        (1, 2, "update", 1_000_000, 2_000_000),
    }
    [stall] = events(trace, "i")
    assert (stall["pid"], stall["ts"], stall["args"]["stage"]) == (1, 9_000_000, "update")
    assert trace["otherData"] == {"run": "run", "name": "math-7b", "began": BEGAN}


def test_the_command_writes_json_and_overwrites_only_if_it_is_told_to(
    invoke: Invoke, store: str, tmp_path: Path
) -> None:
    """As the other exports."""
    file = tmp_path / "trace.json"
    first = invoke("export", "trace", "run", "-o", str(file), "--store", store)
    again = invoke("export", "trace", "run", "-o", str(file), "--store", store)
    forced = invoke("export", "trace", "run", "-o", str(file), "--store", store, "--force")

    assert (first.exit_code, again.exit_code, forced.exit_code) == (0, 2, 0)
    assert "11 slices written" in first.output
    check_format(json.loads(file.read_text()))


def test_a_real_run_and_one_without_stages_can_be_exported(invoke: Invoke, tmp_path: Path) -> None:
    """The second has an empty timeline, and the command says how to get one."""
    place = str(tmp_path / "real")
    with rlwatch.init(store=place, run_id="real", system=False) as run:
        for step in range(1, 4):
            with run.stage("sampling"), run.stage("reward"):
                pass
            run.log({"loss": 0.5}, step=step)
    with rlwatch.init(store=place, run_id="bare", system=False) as run:
        run.log({"loss": 0.5}, step=1)
    full = invoke("export", "trace", "real", "-o", str(tmp_path / "a.json"), "--store", place)
    empty = invoke("export", "trace", "bare", "-o", str(tmp_path / "b.json"), "--store", place)

    assert (full.exit_code, empty.exit_code) == (0, 0)
    trace = json.loads((tmp_path / "a.json").read_text())
    check_format(trace)
    assert {event["name"] for event in events(trace, "X")} == {"step 1", "step 2", "step 3", "sampling", "reward"}
    assert "no stages recorded" in empty.output
    assert json.loads((tmp_path / "b.json").read_text())["traceEvents"] == []
