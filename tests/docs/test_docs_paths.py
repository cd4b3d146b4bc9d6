"""docs/architecture.md says how many modules one opens to follow one thing, as it is measured."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import PAGE, PATHS, written

BUSY = 2
"""Modules that a path has more or less by what waits at the moment, more on a machine under load: a command met 60 to
63 in five measurements.
"""
ROOT = Path(__file__).parents[2]


def figures(text):
    """Of the table's last column, by the path."""
    rows = re.findall(r"^\| (an? [^|]+?) \| \d+ \| (\d+) \|$", text, re.MULTILINE)
    return {path: int(count) for path, count in rows}


def test_the_page_says_how_many_modules_each_path_is_measured_to_have():
    """Shorter or longer than it says: ``python benchmarks/paths.py --page``; ``--list`` names the modules."""
    measured = subprocess.run(
        [sys.executable, "benchmarks/paths.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    counts = {path: int(count) for path, count in re.findall(r"^(an? .+?) +(\d+) modules$", measured, re.MULTILINE)}

    assert list(counts) == list(PATHS)
    said = figures(PAGE.read_text(encoding="utf-8"))
    assert said.keys() == counts.keys()
    assert {path: counts[path] - said[path] for path in counts if abs(counts[path] - said[path]) > BUSY} == {}


def test_the_command_writes_what_it_measures_and_refuses_a_page_without_a_row():
    """Nothing else of the page is changed."""
    text = PAGE.read_text(encoding="utf-8")
    old = figures(text)
    new = written(text, {path: 1000 + count for path, count in old.items()})

    assert figures(new) == {path: 1000 + count for path, count in old.items()}
    assert written(new, old) == text
    with pytest.raises(SystemExit, match="0 rows of 'a dream'"):
        written(text, {"a dream": 1})
