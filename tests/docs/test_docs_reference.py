"""The reference pages are what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from detector_pictures import of_kind, reworded, words

from rlwatch.catalogue import kinds

ROOT = Path(__file__).parents[2]


def test_the_reference_is_up_to_date():
    """A command, key or variable that is new, gone or means something else: ``make docs-reference``."""
    made = subprocess.run(
        [sys.executable, "docs/reference.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert made.returncode == 0, made.stdout + made.stderr


DETECTORS = (ROOT / "docs" / "detectors.md").read_text(encoding="utf-8")


def test_the_page_of_detectors_has_a_section_of_each_kind_and_no_other():
    """A kind that is new or gone, or its picture: ``python benchmarks/detector_pictures.py``, which takes minutes."""
    shown = re.findall(r"^### .*: `(\w+)`$", DETECTORS, re.MULTILINE)
    pictures = re.findall(r"\(pictures/detectors/(\w+)\.svg\)", DETECTORS)

    assert sorted(shown) == sorted(kind.name for kind in kinds().values() if kind.detector)
    assert sorted(shown) == sorted(of_kind())
    assert sorted(pictures) == sorted(path.stem for path in (ROOT / "docs" / "pictures" / "detectors").glob("*.svg"))


def test_the_page_of_detectors_says_what_the_code_says():
    """A title, description, source or limit that has changed: ``python benchmarks/detector_pictures.py --words``."""
    stale = [name for name, detector in of_kind().items() if words(kinds()[name], detector) not in DETECTORS]

    assert stale == []
    assert reworded(DETECTORS) == DETECTORS
