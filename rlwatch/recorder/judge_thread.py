"""The judge's thread, which searches stored rows for failures; the thread that stores never waits for it."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from rlwatch.error_boundary import described, passing, sheltered
from rlwatch.ports import Item
from rlwatch.records import CompletionBatch, Event, PackedMetrics, SpikeBatch, StepRecord

INBOX = 2_000
"""Largest number of rows that wait in memory for the judge; it reads further ones from the store later."""
AT_ONCE = 64
"""Number of rows that are judged at once."""
BLOCK, FEWEST, WAIT_S = 8, 4, 0.5
"""Number of rows that are judged together, which is several times cheaper, where at least ``FEWEST`` rows come while
the first of them waits ``WAIT_S`` seconds. Rows of a slower run are judged as they come.
"""
WORK_S, REST = 0.02, 1.0
"""After so many seconds of continuous work the judge rests as long: it catches up without occupying the machine."""
NAP_S = 0.05
"""Largest number of seconds for which it continues to rest once the run is ending."""
MOST_FAILURES = 20
"""Number of failures after which the end of the run does not wait for the judge any more, and it tries less often."""
SELDOM_S = 0.5


class Interrupted(Exception):  # noqa: N818  (not an error: a stop was requested)
    """Judging was stopped in the middle; the next process that opens the run judges the rest."""


class RowJudge(Protocol):
    """Interface of the part that judges rows with detectors and alert rules; :mod:`rlwatch.monitor.judge` implements
    it.
    """

    seq: int
    """Position ``seq`` of the last row taken."""

    @property
    def settled(self) -> bool:
        """True once all that was found is stored."""
        ...

    @property
    def calm(self) -> bool:
        """True while no finding holds that is more than a remark, so that rows may wait for others."""
        ...

    def begin(self, up_to: int) -> None:
        """Set the position from which to judge: ``up_to``, or the first row that an earlier process left unjudged."""
        ...

    def stored(self) -> bool:
        """Judge the next rows of the store; return whether there were any."""
        ...

    def take(self, rows: Sequence[StepRecord | Event]) -> None:
        """Judge a batch of rows and events. Raises ``Interrupted`` if the judge is asked to stop."""
        ...

    def tick(self) -> None:
        """Do the work that is due by time alone, such as repeating messages."""
        ...

    def close(self) -> None:
        """Judge the last step, because no further row will come."""
        ...


def _urgent(row: StepRecord | Event) -> bool:
    """Return True for events, and for rows with a value that is not finite."""
    return isinstance(row, Event) or not all(map(math.isfinite, row.metrics.values()))


def _read(row: StepRecord | Event) -> StepRecord | Event:
    """Return the row with its metrics as a dictionary, because each of them is read many times."""
    if isinstance(row, StepRecord) and isinstance(row.metrics, PackedMetrics):
        return replace(row, metrics=row.metrics.plain())
    return row


class JudgeThread:
    """Daemon thread that judges the rows which the writer thread has stored; the writer thread never waits for it.

    Parameters
    ----------
    last_seq
        Last position ``seq`` of the run when this attempt (process) began.
    failed
        Called with a description of each error; no exception ends the thread.
    """

    def __init__(self, last_seq: int, failed: Callable[[str], None]) -> None:
        self.ended = False
        self._last_seq = last_seq
        self._failed = failed
        self._inbox: deque[StepRecord | Event] = deque()
        self._begun = False
        self._failures = 0
        self._behind = True
        self._handed = last_seq
        self._ending = self._abandoned = self._hurrying = self._asked = self._fast = False
        self._came, self._waits_since, self._looked = -math.inf, 0.0, last_seq
        """Time at which the newest rows came, and the oldest that wait; ``seq`` of the last that need not hurry."""
        self._worked_since = 0.0
        self._wake = threading.Event()
        self._judging: RowJudge | None = None
        self._make: Callable[[], RowJudge]
        self._thread = threading.Thread(target=self._loop, name="rlwatch-judge", daemon=True)
        self.cpu_seconds = 0.0

    def start(self, make: Callable[[], RowJudge]) -> None:
        """Start the thread. ``make`` creates the judge on this thread, because loading its code takes longer than a
        start.
        """
        self._make = make
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of rows that wait in memory to be judged; at most :data:`INBOX`."""
        return len(self._inbox)

    @property
    def done(self) -> bool:
        """True once all rows that were passed to this thread are judged and the results written."""
        if not self._thread.is_alive() or self._idle:
            return True
        return not self._inbox and not self._behind and self._judging is not None and self._judging.seq >= self._handed

    @property
    def _idle(self) -> bool:
        """True while a new run has no row yet, so that no judge is needed."""
        return self._judging is None and not (self._last_seq or self._handed or self._inbox)

    def take(self, batch: Sequence[Item]) -> None:
        """Take rows and events that were stored; called on the writer thread."""
        rows = [item for item in batch if not isinstance(item, SpikeBatch | CompletionBatch)]
        if not rows:
            return
        now = time.monotonic()
        self._fast, self._came = now - self._came <= len(rows) * WAIT_S / FEWEST, now
        if not self._inbox:
            self._waits_since = now
        self._handed = rows[-1].seq
        if len(self._inbox) + len(rows) > INBOX:
            self._behind = True
            self._inbox.clear()
        else:
            self._inbox.extend(rows)
        self._wake.set()

    def hurry(self) -> None:
        """Judge without the rests that limit the use of the processor, because the run is ending. Takes no lock."""
        self._hurrying = True

    def ask(self) -> None:
        """Judge the rows that wait without waiting for others, because the result is waited for."""
        self._asked = True
        self._wake.set()

    def end(self) -> None:
        """Judge the remaining rows without rests, then end the thread. Returns at once."""
        self._ending = self._hurrying = True
        self._wake.set()

    def abandon(self) -> None:
        """Stop as soon as possible; the next process that opens the run judges the remaining rows."""
        self._abandoned = self._ending = self._hurrying = True
        self._wake.set()

    def enough(self) -> bool:
        """Return True if the judge is to stop; to limit its use of the processor, sleep first if it has worked long.

        The judge calls it between rows, on its thread.
        """
        worked = time.monotonic() - self._worked_since
        if worked > WORK_S:
            left = REST * worked
            while left > 0.0 and not self._hurrying:
                time.sleep(min(left, NAP_S))
                left -= NAP_S
            self._worked_since = time.monotonic()
        return self._abandoned

    def _loop(self) -> None:
        try:
            while not self._abandoned:
                self._worked_since = time.monotonic()
                if self._turn():
                    break
        except Interrupted:
            pass
        finally:
            self.ended = True

    def _turn(self) -> bool:
        """Judge the available rows, or wait for more; return True if there will be no more."""
        ending = self._ending
        worked, over = sheltered(self._judged, partial(self._not_judged, ending=ending), passing=Interrupted)
        if over is not None:
            return over
        judging = self._judging
        if judging is None:
            self._wake.wait(0.5)
            self._wake.clear()
            return False
        self.cpu_seconds = time.thread_time()
        if worked:
            return False
        if ending and ((self.done and judging.settled) or self._hopeless(judging)):
            sheltered(judging.close, self._last_failed, passing=Interrupted)
            return True
        left = max(self._waits_since + WAIT_S - time.monotonic(), 0.0) if self._inbox else WAIT_S
        self._wake.wait(0.01 if ending else left)
        self._wake.clear()
        return False

    def _judged(self) -> tuple[bool, bool | None]:
        """Judge; return True if there was something to judge. Raises what any detector or store does.

        The judge of a new run, whose code takes time and memory, is made when the first row has come.
        """
        if self._idle and not self._ending:
            return False, None
        judging = self._judging = self._judging or self._make()
        if not self._begun:
            judging.begin(self._last_seq)
            self._begun = True
        worked = self._work(judging)
        if not worked:
            judging.tick()
        return worked, None

    def _not_judged(self, error: BaseException, *, ending: bool) -> tuple[bool, bool | None]:
        """Report the error. The second value is None if judging may go on, else True if it is over."""
        self._failed(f"rlwatch could not judge: {described(error)}")
        self._failures += 1
        time.sleep(0.05 if self._failures <= MOST_FAILURES or ending else SELDOM_S)
        stuck = self._judging is None or (ending and self._failures > MOST_FAILURES)
        return False, self._cannot(error) if stuck else None

    def _last_failed(self, error: BaseException) -> None:
        self._failed(f"rlwatch could not judge the last step: {described(error)}")

    def _cannot(self, error: BaseException) -> bool:
        """Return True if the next process has to judge instead; False if a file was only missing for a moment."""
        if self._judging is None and passing(error) and self._failures <= MOST_FAILURES:
            time.sleep(0.5)
            return False
        return True

    def _work(self, judging: RowJudge) -> bool:
        """Judge the next rows; return whether there were any."""
        if self._behind:
            more, self._behind = True, False  # before the look: the other thread may set it again during it
            try:
                more = judging.stored()
            finally:
                self._behind = self._behind or more
            if more:
                return True
        if self._gathers(judging):
            return False
        rows: list[StepRecord | Event] = []
        while self._inbox and len(rows) < AT_ONCE:
            row = self._inbox.popleft()
            if row.seq > judging.seq:
                rows.append(_read(row))
        if rows and rows[0].seq > judging.seq + 1 and judging.stored():  # a gap: some were too many to be handed over
            self._inbox.extendleft(reversed(rows))
            return True
        self._asked = self._asked and bool(self._inbox)
        if rows:
            try:
                judging.take(rows)
            finally:  # one that cannot be judged takes none of those after it along
                if judging.seq >= rows[0].seq:
                    self._inbox.extendleft(row for row in reversed(rows) if row.seq > judging.seq)
        return bool(rows)

    def _gathers(self, judging: RowJudge) -> bool:
        """Return True while the rows in memory wait for others, with which they are judged at lower cost."""
        waiting = tuple(self._inbox)
        if not self._fast or not waiting or len(waiting) >= BLOCK or self._hurrying or self._asked or not judging.calm:
            return False
        if time.monotonic() >= self._waits_since + WAIT_S:
            return False
        if any(_urgent(row) for row in waiting if row.seq > self._looked):
            return False
        self._looked = waiting[-1].seq
        return True

    def _hopeless(self, judging: RowJudge) -> bool:
        """Return True if rows that were passed to this thread are available neither here nor from the store."""
        return not self._inbox and not self._behind and judging.seq < self._handed
