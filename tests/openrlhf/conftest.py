"""OpenRLHF on a CPU, as in examples/openrlhf_ppo/cpu; runs where ``constraints-openrlhf.txt`` is installed (``make openrlhf``)."""

import sys
from pathlib import Path

CPU = Path(__file__).parents[2] / "examples" / "openrlhf_ppo" / "cpu"
sys.path.insert(0, str(CPU))

import os  # noqa: E402

from run import ENVIRONMENT  # noqa: E402

os.environ.update(ENVIRONMENT)
