"""One log on its way into a store: what there is, then what comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rlwatch.cli.log_run import Log, log_id
from rlwatch.cli.recording import Recording
from rlwatch.cli.watch_position import Positions
from rlwatch.clock import Clock, SystemClock
from rlwatch.importers import LogTail, Position, Tail
from rlwatch.records import StepRecord

MOST = 500
"""Records taken at a time: in between Ctrl-C is heard, and memory does not grow with the log."""
SAVE_S = 30.0
QUIET_S = 30.0
"""Seconds after which the unfinished end of a log is taken to be all there will be of it."""


class LogWatch:
    """Reads a log and has it recorded, bit by bit.

    Parameters
    ----------
    start
        Begins the recording, once the log tells what it is.
    tail
        Where the records come from, if not from the file at the log's path.
    """

    def __init__(
        self,
        log: Log,
        positions: Positions,
        start: Callable[[Tail], Recording],
        *,
        tail: Tail | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.log = log
        self.run_id = log.run_id or log_id(log.path, log.run or "")
        self.recording: Recording | None = None
        self._positions, self._start, self._clock = positions, start, clock or SystemClock()
        position, last_seq = positions.load(self.run_id)
        self.tail: Tail = tail or LogTail(
            log.path, run=log.run, format=log.read_as, position=position, last_seq=last_seq
        )
        self.is_new = position is None and last_seq == 0
        self._saved = position
        self._save_due = 0.0
        self._caught_up = False

    @property
    def records(self) -> int:
        """How many records were new to the store."""
        return self.recording.records if self.recording else 0

    @property
    def behind(self) -> bool:
        """Whether there is more to be read at once."""
        return self.tail.behind

    @property
    def left_out(self) -> str:
        """What of the log could not be used, and how often; empty if all could."""
        return "; ".join(f"{skipped.count:,} x {skipped.reason}" for skipped in self.tail.skipped)

    @property
    def why_nothing(self) -> str:
        """Why no row of the log could be recorded so far."""
        if self.tail.problem:
            return self.tail.problem
        left_out = self.left_out
        return (
            f"holds no metrics of any step, read as {self.tail.format}{f'; left out: {left_out}' if left_out else ''}"
        )

    def look(self) -> int:
        """Take the next records; how many there were."""
        records = self.tail.poll(MOST)
        self._take(_stamped(records, self._clock.now() if self._caught_up else 0.0))
        self._caught_up = self._caught_up or not self.tail.behind
        if self.recording is not None:
            self.recording.tick()
        return len(records)

    def end(self, reason: str, *, whole: bool = False) -> None:
        """End the run. ``whole``: also its unfinished end is taken, even if it may still be written to."""
        if self.recording is None and not whole:
            self.tail.release()
            return
        try:
            if whole or self._quiet():
                self._take(_stamped(self.tail.close(), 0.0))
            self._save(self.tail.position)
        finally:
            self.abandon(reason)

    def abandon(self, reason: str) -> None:
        """End the run without another look at the log."""
        self.tail.release()
        if self.recording is not None:
            self.recording.finish(reason)

    def _take(self, records: Sequence[StepRecord]) -> None:
        if records:
            if not self.tail.turned:
                self._note(self.tail.position)
            self.recording = self.recording or self._start(self.tail)
            self.recording.take(records)
        if records or self._clock.monotonic() >= self._save_due:
            self._note(self.tail.position)

    def _note(self, position: Position | None) -> None:
        """Keep the position: that of a new file at once, others now and then."""
        if position is None or position == self._saved:
            return
        new = self._saved is None or (position.file, position.base) != (self._saved.file, self._saved.base)
        if new or self._clock.monotonic() >= self._save_due:
            self._save(position)

    def _save(self, position: Position | None) -> None:
        if position is not None:
            self._positions.save(self.run_id, position)
            self._saved = position
            self._save_due = self._clock.monotonic() + SAVE_S

    def _quiet(self) -> bool:
        """Whether nobody has written to the log for a while."""
        try:
            return self._clock.now() - self.tail.modified >= QUIET_S
        except OSError:  # it is gone
            return True


def _stamped(records: Sequence[StepRecord], now: float) -> list[StepRecord]:
    """Rows that came while we looked came now; of those that were there before nobody knows when."""
    return [record if record.ts else replace(record, ts=now) for record in records]
