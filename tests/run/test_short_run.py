"""What a short run does not load, because it needs none of it."""

import json
import subprocess
import sys

CODE = """
import json, random, sys
import rlwatch

with rlwatch.init(store=sys.argv[1], source="trl") as run:
    for step in range(60):
        run.log({"reward": random.random(), "kl": 0.01, "entropy": 1.0, "grad_norm": 0.5}, step)
    assert run.flush(60.0)
print(json.dumps({"modules": sorted(sys.modules), "judged": "rlwatch.forecast.forecaster" in sys.modules}))
"""
UNNEEDED = {"psutil", "pynvml", "numpy.ma", "importlib.metadata", "importlib.resources", "torch", "pandas"}
"""Together they took half as long as loading the judge."""


def test_a_short_run_loads_no_drivers_and_reads_no_metadata_of_packages(tmp_path):
    """Its rows are judged nevertheless."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    found = json.loads(done.stdout.splitlines()[-1])

    assert found["judged"]
    assert UNNEEDED.isdisjoint(found["modules"])
