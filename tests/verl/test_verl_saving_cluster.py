"""Roll-back, undo and hold for real but the GPUs: verl's trainer, two Ray workers, FSDP2, the rollout engine's weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlwatch.records import CommandStatus
from rlwatch.store.url import open_store

TRAIN = Path(__file__).parents[2] / "examples" / "verl_grpo" / "cpu" / "train.py"
COMMANDS = ["2:rollback:to=0", "3:undo", "4:hold:batches=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run's store, and the metrics of each step."""
    folder = tmp_path_factory.mktemp("saving")
    command = [sys.executable, str(TRAIN), "--workers", "2", "--steps", "6", "--store", "runs", "--work", "work"]
    command += [part for text in COMMANDS for part in ("--command", text)]
    command += ["+trainer.rlwatch.snapshots={every:1,share:1.0}"]
    environment = {**os.environ, "RLWATCH_STATE_DIR": str(folder / "state")}
    out = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert out.returncode == 0, out.stdout[-3000:] + out.stderr[-3000:]
    store = open_store(str(folder / "runs"))
    (info,) = store.runs()
    steps = {}
    for record in store.records(info.run_id):
        steps.setdefault(record.step, {}).update(record.metrics)
    return store, info.run_id, steps


def test_every_command_is_done_by_both_workers(run):
    """At the end of the step in which it was asked; the hold ends by itself."""
    store, run_id, steps = run
    answers = [(one.kind, one.status, one.finished_step) for one in store.commands(run_id)]
    told = [event.body for event in store.events(run_id) if event.kind == "command"]

    assert answers == [
        ("rollback", CommandStatus.DONE, 2),
        ("undo", CommandStatus.DONE, 3),
        ("hold", CommandStatus.DONE, 4),
    ]
    assert [body["command"] for body in told] == ["rollback", "undo", "hold", "hold"]
    assert (told[0]["report"]["ranks"], told[0]["report"]["to_step"]) == (2, 0)
    assert told[-1]["report"]["summary"].startswith("updates go on after 1 held batch")
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]


def test_the_rollout_engine_samples_with_the_weights_that_were_put_back(run):
    """In the step after it the trainer's own log-probs are the engine's, as in every step."""
    _, _, steps = run

    assert all(abs(step["mismatch/kl"]) < 1e-5 for step in steps.values())


def test_no_error_was_swallowed(run):
    """Neither on the driver nor in a worker."""
    assert not [step for step in run[2].values() if step.get("rlwatch/errors") or step.get("rlwatch/dropped")]
