"""Running a scenario on several ranks, with an end no rank can put off."""

import json
import os
import signal
import socket
import subprocess
import threading
from functools import cache
from pathlib import Path

from preloaded import Program

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


@cache
def _launcher():
    """One for all tests of this process, with what trains imported; it ends with its input."""
    return Program(
        script=HERE / "launch.py", stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **ENVIRONMENT}
    )


def each_of(*scenarios):
    """The same of scenarios, ranks and folders, one after the other in one go."""
    for _, _, folder in scenarios:
        folder.mkdir(parents=True, exist_ok=True)
    said = scenarios[0][2] / "all.txt"
    wanted = {
        "scenarios": [[scenario, ranks, str(folder)] for scenario, ranks, folder in scenarios],
        "said": str(said),
        "environment": {**os.environ, **ENVIRONMENT, "MASTER_PORT": str(free_port())},
    }
    launcher = _launcher()
    print(json.dumps(wanted), file=launcher.stdin, flush=True)
    started = launcher.stdout.readline()
    assert started, "what starts the ranks has ended: see its error above"
    end = threading.Timer(LIMIT_S, lambda: os.killpg(int(started), signal.SIGKILL))
    end.start()
    launcher.stdout.readline()
    in_time = end.is_alive()
    end.cancel()
    words = said.read_text()
    assert in_time, f"the ranks did not end within {LIMIT_S} s:\n{words[-4000:]}"
    return [_returned(ranks, folder, words) for _, ranks, folder in scenarios]


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
