"""Running a scenario on several ranks, with an end no rank can put off."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import rlwatch

HERE = Path(__file__).parent
LIMIT_S = 600
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1"}


def free_port():
    """For the process group that accelerate makes; free until somebody else takes it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def several(scenario, ranks, folder):
    """What each rank returned (None for one that died), rank 0 first. Everything is killed after ten minutes."""
    (returned,) = each_of((scenario, ranks, folder))
    return returned


def each_of(*scenarios):
    """The same of scenarios, ranks and folders, one after the other in one go."""
    for _, _, folder in scenarios:
        folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, str(HERE / "launch.py"), *(str(word) for scenario in scenarios for word in scenario)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, **ENVIRONMENT, "MASTER_PORT": str(free_port())},
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        raise AssertionError(f"the ranks did not end within {LIMIT_S} s:\n{said[-4000:]}") from None
    return [_returned(ranks, folder, said) for _, ranks, folder in scenarios]


def _returned(ranks, folder, said):
    (folder / "said.txt").write_text(said)
    errors = [path.read_text() for path in sorted(folder.glob("rank*.error"))]
    assert not errors, "\n".join([*errors, said[-4000:]])
    found = [folder / f"rank{rank}.json" for rank in range(ranks)]
    return [json.loads(path.read_text()) if path.exists() else None for path in found]


def recorded(store, run_id):
    """Step -> its metrics, of a run in the directory ``store``."""
    steps = {}
    for record in rlwatch.open_store(store).records(run_id):
        steps.setdefault(record.step, {}).update(record.metrics)
    return steps
