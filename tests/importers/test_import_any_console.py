"""What a loop wrote on its console is what is read of it, whatever stands around it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from consoles import Console, consoles, merged
from hypothesis import HealthCheck, given, settings

from rlwatch.importers import LogTail, read_log
from rlwatch.testing.importer_contract import comparable


def reads_as_written(console: Console) -> None:
    """Whole, and in two pieces."""
    with TemporaryDirectory() as place:
        log = Path(place) / "run.log"
        log.write_text(console.text)
        [run] = read_log(log)
        found = {
            at: {name: value for name, value in metrics.items() if not name.startswith("eval/")}
            for at, metrics in merged(run.records).items()
        }
        written = {(attempt, step): metrics for attempt, step, metrics in console.rows}
        assert repr(sorted((at, sorted(m.items())) for at, m in found.items() if m)) == repr(
            sorted((at, sorted(metrics.items())) for at, metrics in written.items())
        ), console.said
        data = console.text.encode()
        log.write_bytes(data[: len(data) // 2])
        tail = LogTail(log)
        followed = tail.poll()
        log.write_bytes(data)
        followed += tail.poll() + tail.close()
        assert comparable(followed) == comparable(run.records)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(consoles())
def test_what_a_console_says_is_what_is_read(console):
    """Nothing is added, dropped or moved."""
    reads_as_written(console)


@pytest.mark.thorough
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(consoles())
def test_what_any_console_says_is_what_is_read(console):
    """The same of many."""
    reads_as_written(console)
