"""The page of all findings keeps up with the detectors."""

import re
from pathlib import Path

from rlwatch.detectors.registry import REGISTRY
from rlwatch.diagnosis import advice

PAGE = (Path(__file__).parents[2] / "docs" / "findings.md").read_text()


def test_every_kind_stands_on_the_page_with_its_title():
    """As the playbook calls it; a new kind is to be added to docs/findings.md."""
    rows = dict(re.findall(r"^\| `(\w+)` \| \*\*(.+?)\.\*\* ", PAGE, re.MULTILINE))
    kinds = {kind for detector in REGISTRY for kind in detector.kinds} | {"crash_forecast", "run_silent", "run_crashed"}

    assert rows.keys() == kinds
    assert rows == {kind: advice(kind).title for kind in kinds}
