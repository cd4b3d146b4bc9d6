"""Public logs beside the repository (../shared): each is read, or refused for the reason of expected_refusals.toml.

Skipped, and said so, where a folder is absent.
"""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from rlwatch.errors import ImportFormatError
from rlwatch.importers import read_log

SHARED = Path(__file__).resolve().parents[3] / "shared"
EXPECTED = [
    (pattern, refused["says"])
    for refused in tomllib.loads((Path(__file__).parent / "expected_refusals.toml").read_text())["refused"]
    for pattern in refused["files"]
]


def outcome(path: Path) -> str:
    """Words of the refusal; empty if the file was read."""
    try:
        runs = read_log(path)
    except ImportFormatError as error:
        return error.problem
    assert all(run.records for run in runs)
    return ""


@pytest.mark.parametrize("folder", ["wild", "real_runs", "real_runs_2"])
def test_every_public_log_is_read_or_refused_for_the_reason_that_is_expected_when_present(folder):
    """No line of the list is out of date, either."""
    home = SHARED / folder
    if not home.is_dir():
        pytest.skip(f"the public logs are not here: {home} does not exist")
    expected = {pattern: says for pattern, says in EXPECTED if pattern.startswith(f"{folder}/")}
    wrong, used, read = [], set(), 0
    for path in sorted(path for path in home.rglob("*") if path.is_file()):
        name, problem = path.relative_to(SHARED).as_posix(), outcome(path)
        patterns = [pattern for pattern in expected if fnmatch(name, pattern)]
        used.update(patterns)
        read += not problem
        says = expected[patterns[0]] if patterns else "read"
        if not (re.search(says, problem) if patterns else not problem):
            wrong.append((name, f"expected: {says}", problem[:100] or "read"))

    assert wrong == []
    assert set(expected) - used == set()
    assert read > 50
