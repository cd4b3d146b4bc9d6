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


def test_every_detector_has_its_section_and_its_picture():
    """A kind that is new: ``python benchmarks/detector_pictures.py``."""
    page = (ROOT / "docs" / "detectors.md").read_text(encoding="utf-8")
    shown = re.findall(r"^### .*: `(\w+)`$", page, re.MULTILINE)
    pictures = re.findall(r"\(pictures/detectors/(\w+)\.svg\)", page)
    known = [kind.name for kind in kinds().values() if kind.detector]

    assert sorted(shown) == sorted(known)
    assert sorted(pictures) == sorted(path.stem for path in (ROOT / "docs" / "pictures" / "detectors").glob("*.svg"))
    assert len(set(known) - set(pictures)) <= 2  # tests of two detectors have no run that can be drawn
