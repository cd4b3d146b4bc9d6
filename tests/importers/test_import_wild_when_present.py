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
from rlwatch.metrics import known, like_rewards

SHARED = Path(__file__).resolve().parents[3] / "shared"
EXPECTED = [
    (pattern, refused["says"])
    for refused in tomllib.loads((Path(__file__).parent / "expected_refusals.toml").read_text())["refused"]
    for pattern in refused["files"]
]


def outcome(path: Path) -> tuple[str, list[str]]:
    """Words of the refusal, empty if the file was read; and names that sound like a reward where none was read."""
    try:
        runs = read_log(path)
    except ImportFormatError as error:
        return error.problem, []
    assert all(run.records for run in runs)
    unread = []
    for run in runs:
        names = {name for record in run.records for name in record.metrics}
        unread += [] if "reward/mean" in known(names, run.source) else like_rewards(names)
    return "", unread


LEAST_READ = {"wild": 50, "real_runs": 50, "real_runs_2": 50, "real_runs_3": 15}
MOST_UNREAD = 0.03
"""Share of the files in which a reward may stand and not be read."""


@pytest.mark.parametrize(
    "folder", ["wild", "real_runs", pytest.param("real_runs_2", marks=pytest.mark.thorough), "real_runs_3"]
)
def test_every_public_log_is_read_or_refused_for_the_reason_that_is_expected_when_present(folder):
    """No line of the list is out of date, either."""
    home = SHARED / folder
    if not home.is_dir():
        pytest.skip(f"the public logs are not here: {home} does not exist")
    expected = {pattern: says for pattern, says in EXPECTED if pattern.startswith(f"{folder}/")}
    wrong, used, read, rewards = [], set(), 0, []
    for path in sorted(path for path in home.rglob("*") if path.is_file()):
        name = path.relative_to(SHARED).as_posix()
        problem, unread = outcome(path)
        rewards += [(name, unread)] if unread else []
        patterns = [pattern for pattern in expected if fnmatch(name, pattern)]
        used.update(patterns)
        read += not problem
        says = expected[patterns[0]] if patterns else "read"
        if not (re.search(says, problem) if patterns else not problem):
            wrong.append((name, f"expected: {says}", problem[:100] or "read"))

    assert wrong == []
    assert set(expected) - used == set()
    assert read >= LEAST_READ[folder]
    assert len(rewards) <= MOST_UNREAD * read, rewards
