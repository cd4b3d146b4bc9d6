"""Contract of every importer of training logs; subclass :class:`ImporterContract` to test yours.

::

    class TestMine(ImporterContract):
        format = "mine"
        names = ("loss", "kl")

        def write(self, rows):  # as the trainer itself would
            return b"..."

Needs pytest (the ``dev`` extra).
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from rlwatch.errors import ImportFormatError
from rlwatch.importers import LogTail, read_log, sniff
from rlwatch.importers.registry import named, verdicts
from rlwatch.records import StepRecord

Sample = Sequence[tuple[int, Mapping[str, float]]]
"""Rows of a log: steps, each with its metrics."""

GARBAGE = (
    b"\nTraceback (most recent call last):\n  File \"train.py\", line 3\nRuntimeError: 'step' - \xff\xfe: 1, }{\n",
    b"{'step': \n",
    b"\x00\x00\x00\x00",
)
CUTS = 150
"""Number of positions at which a sample log is cut off."""


def comparable(records: Sequence[StepRecord]) -> list[tuple[int, int, int, str]]:
    """Return records as plain values that can be compared (NaN equals NaN): seq, attempt, step, and metrics as text."""
    return [(record.seq, record.attempt, record.step, repr(dict(record.metrics))) for record in records]


class ImporterContract:
    """Tests that every importer must pass; subclasses set ``format`` and ``names`` and define :meth:`write`."""

    format: ClassVar[str]
    names: ClassVar[tuple[str, str]]
    """Names of two metrics as the source of the log uses them, at least one of them known to rlwatch."""
    filename: ClassVar[str] = "run.log"
    nonfinite: ClassVar[Mapping[str, float]] = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    """The values that the source's notation of NaN, Inf and -Inf is read as."""

    def write(self, rows: Sample) -> bytes:
        """Return the log of a run with these ``rows``, as the source writes it; more rows must make it longer."""
        raise NotImplementedError("write the log as the trainer does")

    def rows(self, count: int, *, first: int = 1) -> list[tuple[int, dict[str, float]]]:
        """Return ``count`` rows as (step, metrics), of consecutive steps from ``first`` on, with values of few
        digits.
        """
        a, b = self.names
        return [(step, {a: step * 0.5, b: 1.25 - step * 0.25}) for step in range(first, first + count)]

    @pytest.fixture
    def log(self, tmp_path: Path) -> Path:
        """Return the path of the log file that a test writes."""
        return tmp_path / self.filename

    def records(self, log: Path, data: bytes) -> list[StepRecord]:
        """Write ``data`` as the log, and return the records that the importer reads from it."""
        log.write_bytes(data)
        [run] = read_log(log)
        return run.records

    def records_unless_refused(self, log: Path, data: bytes) -> list[StepRecord] | None:
        """Return the records of the log ``data``, or None if it was refused with an error that names the log."""
        try:
            return self.records(log, data)
        except ImportFormatError as error:
            message = str(error)
        assert message.startswith(str(log))
        return None

    def test_it_is_recognised_and_by_no_other_more(self, log: Path) -> None:
        """Check that the log's content is recognised by this importer with more confidence than by any other."""
        log.write_bytes(self.write(self.rows(5)))
        given_ = {importer.name: verdict for importer, verdict in verdicts(log.read_bytes(), log)}

        assert sniff(log).name == self.format
        assert all(v.confidence < given_[self.format].confidence for n, v in given_.items() if n != self.format)
        assert all(verdict.reason for verdict in given_.values())

    def test_it_is_not_recognised_in_plain_prose(self, tmp_path: Path) -> None:
        """Check that text that only mentions a step is not recognised as a log."""
        verdict = named(self.format).sniff(b"The next step: read the manual - twice.\n" * 20, tmp_path / "notes.txt")

        assert verdict.confidence == 0.0

    def test_rows_come_back_in_order(self, log: Path) -> None:
        """Check that every row is read once, with the source's names, unchanged values, ``seq`` 1, 2, 3... and attempt
        1.
        """
        rows = self.rows(6)
        expected = [(seq, 1, step, repr(metrics)) for seq, (step, metrics) in enumerate(rows, 1)]

        assert comparable(self._only_names(self.records(log, self.write(rows)))) == expected

    @pytest.mark.parametrize("written", ["nan", "inf", "-inf"])
    def test_what_is_not_finite_follows_the_sources_convention(self, log: Path, written: str) -> None:
        """Check that NaN or infinity, in the way that the source writes it (``written``), is read as that value, never
        as absent or 0.
        """
        name = self.names[0]
        rows = self.rows(4)
        rows[2][1][name] = float(written)
        records = self.records(log, self.write(rows))
        values = [record.metrics[name] for record in records if name in record.metrics]

        assert len(values) == len(rows)
        assert repr(values[2]) == repr(self.nonfinite[written])
        assert all(math.isfinite(value) for value in values[:2] + values[3:])

    def test_what_was_not_measured_is_absent(self, log: Path) -> None:
        """Check that a metric that a row lacks is absent from its record, neither 0 nor NaN."""
        rows = self.rows(4)
        del rows[1][1][self.names[0]]
        records = self.records(log, self.write(rows))

        assert [self.names[0] in record.metrics for record in records] == [True, False, True, True]

    def test_the_beginning_of_a_log_gives_the_beginning_of_its_records(self, log: Path) -> None:
        """Check that a log cut off anywhere gives a clear error or the same records, the last perhaps with fewer
        metrics.
        """
        whole = self.write(self.rows(6))
        expected = self.records(log, whole)
        for cut in range(0, len(whole), max(1, len(whole) // CUTS)):
            records = self.records_unless_refused(log, whole[:cut])
            if records:
                last, same = records[-1], expected[len(records) - 1]

                assert comparable(records[:-1]) == comparable(expected[: len(records) - 1])
                assert last.step == same.step
                assert set(last.metrics) <= set(same.metrics)

    @pytest.mark.parametrize("garbage", GARBAGE)
    def test_garbage_after_the_end_changes_nothing_or_is_a_clear_error(self, log: Path, garbage: bytes) -> None:
        """Check that garbage after the log, such as the output of a crash, changes no record or gives a clear error."""
        whole = self.write(self.rows(5))
        expected = comparable(self.records(log, whole))
        records = self.records_unless_refused(log, whole + garbage)

        assert records is None or comparable(records) == expected

    def test_a_rewind_begins_the_next_attempt(self, log: Path) -> None:
        """Check that a step that is logged again, as by a resumed trainer, begins the next attempt."""
        records = self.records(log, self.write(self.rows(5) + self.rows(4, first=3)))

        assert [(record.attempt, record.step) for record in records] == [
            *((1, step) for step in range(1, 6)),
            *((2, step) for step in range(3, 7)),
        ]
        assert [record.seq for record in records] == list(range(1, 10))

    def test_a_gzipped_log_reads_the_same(self, log: Path) -> None:
        """Check that a gzipped log, recognised by its bytes, gives the same records."""
        whole = self.write(self.rows(5))
        expected = comparable(self.records(log, whole))

        assert comparable(self.records(log, gzip.compress(whole))) == expected

    def test_following_the_log_gives_the_same_records(self, log: Path) -> None:
        """Check that polling a growing log and closing it gives the same records as reading the finished log once."""
        rows = self.rows(6)
        log.write_bytes(b"")
        tail = LogTail(log)
        records = tail.poll()
        for count in range(1, len(rows) + 1):
            log.write_bytes(self.write(rows[:count]))
            records += tail.poll()
        records += tail.close()

        assert comparable(records) == comparable(self.records(log, self.write(rows)))
        assert tail.format == self.format

    def _only_names(self, records: Sequence[StepRecord]) -> list[StepRecord]:
        """Return the records without metrics that the source adds (an epoch, for example)."""
        return [
            StepRecord(r.step, {n: r.metrics[n] for n in self.names if n in r.metrics}, attempt=r.attempt, seq=r.seq)
            for r in records
        ]
