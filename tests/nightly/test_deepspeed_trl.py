"""Localisation in the real TRL trainer under DeepSpeed, on two processes; collected by ``make nightly`` only."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "blame_where.py"


@pytest.mark.parametrize("stage", ["ZeRO-1", "ZeRO-2"])
def test_a_token_planted_on_the_other_rank_is_named_and_training_the_same(stage):
    """In float32 and bfloat16: rank, row and position, verdict and cause, and every bit of the weights."""
    command = [sys.executable, str(BENCHMARK), "--zero", "--only", stage]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False)
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| TRL")]

    assert done.returncode == 0, done.stderr
    assert len(rows) == 2, done.stdout + done.stderr
    for row in rows:
        assert row[1:3] == ["right", "the same"], row
