"""Twenty runs at a step a second beside people who look, with all that may happen to the server: nothing is lost."""

import subprocess
import sys
from pathlib import Path

import pytest

LOAD = Path(__file__).parents[2] / "benchmarks" / "team_load.py"


@pytest.mark.thorough
def test_a_fleet_loses_nothing_whatever_happens_to_its_server(tmp_path: Path):
    """Killed amid a COPY, stopped, all connections cut, its disk full (as root): each row and token record once."""
    size = ["--runs", "20", "--readers", "2", "--seconds", "60", "--burst-every", "4", "--disk-mb", "700"]
    done = subprocess.run(
        [sys.executable, str(LOAD), *size, "--faults"], capture_output=True, text=True, check=False, cwd=tmp_path
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert '"lost": 0, "doubled": 0, "wrong": 0' in done.stdout
    assert "killed amid" in done.stdout
