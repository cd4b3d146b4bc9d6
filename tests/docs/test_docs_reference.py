"""The reference pages are what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_reference_is_up_to_date():
    """A command, key or variable that is new, gone or means something else: ``make docs-reference``."""
    made = subprocess.run(
        [sys.executable, "docs/reference.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert made.returncode == 0, made.stdout + made.stderr
