"""What the installed transformers really writes, on a terminal and into a file, reads back with its steps."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path

import pytest
from hf_console_script import EVAL_EVERY, EVERY, TOTAL
from preloaded import Program

from rlwatch.importers import read_log

pytestmark = pytest.mark.torch
SCRIPT = Path(__file__).parent / "hf_console_script.py"


@pytest.mark.parametrize("buffered", [True, False])
def test_a_log_and_a_state_of_the_installed_transformers(tmp_path, buffered):
    """stdout and stderr in one file: unbuffered, or rows in batches of 8 KiB long after their steps."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    environment |= {} if buffered else {"PYTHONUNBUFFERED": "1"}
    state_file = tmp_path / "trainer_state.json"
    with (tmp_path / "train.log").open("wb") as out:
        program = Program(None, state_file, script=SCRIPT, stdout=out, stderr=subprocess.STDOUT, env=environment)
        assert program.wait() == 0
    [run] = read_log(tmp_path / "train.log")
    [state] = read_log(tmp_path / "trainer_state.json")
    trained = [record for record in run.records if "loss" in record.metrics]
    evaluated = [record for record in run.records if "eval_loss" in record.metrics]

    assert [r.step for r in trained] == [r.metrics["loss"] for r in trained] == list(range(EVERY, TOTAL + 1, EVERY))
    assert [r.step for r in evaluated] == [r.metrics["eval_loss"] for r in evaluated]
    assert len(evaluated) == TOTAL // EVAL_EVERY
    assert [r.step for r in trained if math.isnan(r.metrics["grad_norm"])] == [20]
    assert [r.step for r in trained if math.isnan(r.metrics["entropy"])] == [30]
    assert [repr(sorted(r.metrics.items())) for r in state.records] == [
        repr(sorted(r.metrics.items())) for r in trained
    ]
    assert [r.step for r in state.records] == [r.step for r in trained]
