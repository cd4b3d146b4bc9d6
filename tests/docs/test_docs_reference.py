"""The reference pages are what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from rlwatch.catalogue import kinds

ROOT = Path(__file__).parents[2]


def test_the_reference_is_up_to_date():
    """A command, key or variable that is new, gone or means something else: ``make docs-reference``."""
    made = subprocess.run(
        [sys.executable, "docs/reference.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert made.returncode == 0, made.stdout + made.stderr


def test_the_page_of_detectors_is_of_kinds_that_there_are():
    """A kind that is gone, or whose picture is: ``python benchmarks/detector_pictures.py``, which takes minutes."""
    page = (ROOT / "docs" / "detectors.md").read_text(encoding="utf-8")
    shown = re.findall(r"^### .*: `(\w+)`$", page, re.MULTILINE)
    pictures = re.findall(r"\(pictures/detectors/(\w+)\.svg\)", page)

    assert len(shown) > 50
    assert set(shown) <= {kind.name for kind in kinds().values() if kind.detector}
    assert sorted(pictures) == sorted(path.stem for path in (ROOT / "docs" / "pictures" / "detectors").glob("*.svg"))
