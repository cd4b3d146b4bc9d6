"""Every example runs, and leaves the run it promises."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlwatch.store.url import open_store

EXAMPLES = Path(__file__).parent.parent / "examples"
ARGUMENTS = {
    "layer_clip.py": ["--steps", "30"],
    "own_loop.py": ["--steps", "30", "--reset-at", "10"],
    "scalars.py": ["--steps", "60"],
    "tee_wandb.py": ["--steps", "60"],
    "transformers_trainer.py": ["--steps", "5"],
    "trl_grpo.py": ["--steps", "3"],
    "trl_peft.py": ["--steps", "4"],
}


def test_every_example_is_run_here():
    """A new example without arguments fails this test, not its first reader."""
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(ARGUMENTS)


@pytest.mark.torch
@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_example_runs_and_records(name, tmp_path):
    """As its first lines say."""
    command = [sys.executable, str(EXAMPLES / name), "--store", str(tmp_path / "runs"), *ARGUMENTS[name]]

    out = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path)

    assert out.returncode == 0, out.stderr[-2000:]
    (run,) = open_store(str(tmp_path / "runs")).runs()
    assert run.run_id in out.stdout
    assert run.last_step is not None
    assert run.last_step >= int(ARGUMENTS[name][1]) - 1


@pytest.mark.torch
def test_the_own_loop_is_reset_by_another_process_while_it_runs(tmp_path):
    """KL to the reference is 0 at the step after the one the answer names."""
    command = [sys.executable, str(EXAMPLES / "own_loop.py"), "--store", str(tmp_path), *ARGUMENTS["own_loop.py"]]

    out = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True, cwd=tmp_path)
    store = open_store(str(tmp_path))
    (run,) = store.runs()
    (event,) = [event for event in store.events(run.run_id) if event.kind == "reference_reset"]
    series = store.series(run.run_id, ["policy/kl_ref_k3"])["policy/kl_ref_k3"]
    kl = dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))

    assert f"reset-reference done at step {event.step}" in out.stdout
    assert kl[event.step] > 1e-4
    assert event.step == run.last_step or kl[event.step + 1] < 1e-6


@pytest.mark.torch
def test_what_the_mirrored_training_collapsed_of_is_told_to_wandb(tmp_path):
    """The example promises an alert."""
    command = [sys.executable, str(EXAMPLES / "tee_wandb.py"), "--store", str(tmp_path), *ARGUMENTS["tee_wandb.py"]]

    subprocess.run(command, capture_output=True, text=True, timeout=600, check=True, cwd=tmp_path)
    store = open_store(str(tmp_path))
    (run,) = store.runs()

    assert (run.project, run.name) == ("examples", "collapse")
    assert "entropy_collapse" in {alert.kind for alert in store.alerts(run.run_id) if alert.state == "firing"}
