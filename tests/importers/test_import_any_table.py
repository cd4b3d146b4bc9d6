"""What a loop wrote as JSON lines, as a table or in a notebook is what is read of it, whatever stands around it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from consoles import merged
from hypothesis import HealthCheck, given, settings
from tables import Written, json_lines, notebooks, tables

from rlwatch.importers import LogTail, read_log
from rlwatch.testing.importer_contract import comparable

CALLED = {"Training Loss": "loss"}
BESIDE = ("eval/", "Unnamed")


def said(rows: dict[tuple[int, int], dict[str, float]]) -> str:
    """Rows as text, in which NaN equals NaN."""
    return repr(sorted((at, sorted(metrics.items())) for at, metrics in rows.items() if metrics))


def reads_as_written(written: Written) -> None:
    """Whole, and in two pieces where it can be followed."""
    with TemporaryDirectory() as place:
        log = Path(place) / written.name
        log.write_bytes(written.data)
        [run] = read_log(log)
        found = {
            at: {
                CALLED.get(name, name): value for name, value in metrics.items() if name and not name.startswith(BESIDE)
            }
            for at, metrics in merged(run.records).items()
        }
        if written.name.endswith(".ipynb"):
            found = {at: {name: value for name, value in row.items() if name != "epoch"} for at, row in found.items()}
        assert said(found) == said({(attempt, step): row for attempt, step, row in written.rows}), written.said
        if written.name.endswith(".ipynb"):
            return
        log.write_bytes(written.data[: len(written.data) // 2])
        tail = LogTail(log)
        followed = tail.poll()
        log.write_bytes(written.data)
        assert comparable(followed + tail.poll() + tail.close()) == comparable(run.records), written.said


ANY = {"JSON lines": json_lines, "tables": tables, "notebooks": notebooks}


@pytest.mark.parametrize("kind", ANY)
def test_what_a_file_says_is_what_is_read(kind):
    """Nothing is added, dropped or moved."""
    holds(kind, 60)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ANY)
def test_what_any_file_says_is_what_is_read(kind):
    """The same of many."""
    holds(kind, 2000)


def holds(kind: str, files: int) -> None:
    """Try it on so many."""
    settings(max_examples=files, deadline=None, suppress_health_check=list(HealthCheck))(
        given(ANY[kind]())(reads_as_written)
    )()
