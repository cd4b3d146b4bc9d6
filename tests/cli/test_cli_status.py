"""How a run is, in one word."""

from __future__ import annotations

import pytest

from rlwatch.analysis.rows import status
from rlwatch.control.liveness import LivenessSigns, Pace, Pause, last_sign
from rlwatch.records import RunInfo, RunState


def test_a_running_run_is_stale_or_paused_where_its_signs_say_so() -> None:
    """The writer's word, doubted."""
    run = RunInfo("r", created_at=1000.0, heartbeat_at=5000.0, last_ts=4000.0)

    assert last_sign(run) == 5000.0
    assert last_sign(RunInfo("r")) is None
    assert [status(run), status(run, LivenessSigns(Pace())), status(run, LivenessSigns(Pace(), silent_s=700.0))] == [
        "running",
        "running",
        "stale",
    ]
    assert status(run, LivenessSigns(Pace(), Pause(5, "ann", "", 6000.0))) == "paused"


@pytest.mark.parametrize("state", [RunState.FINISHED, RunState.CRASHED])
def test_an_ended_run_is_what_its_writer_said(state: RunState) -> None:
    """However long ago."""
    assert status(RunInfo("r", state=state, heartbeat_at=1.0), LivenessSigns(Pace(), silent_s=1e9)) == state.value
