"""Judging a run's rows: live (:mod:`rlwatch.recorder.judge`), and where a dead process left some unjudged.

Both read the same way: what is not judged yet comes from the store, in order of ``seq``; a live judge that keeps up is
handed the rows instead. How far it came, and now and then all it knows (:mod:`rlwatch.monitor.checkpoint`), is stored
with the run, so that whoever looks next, the next attempt or ``rlwatch watch``, goes on there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from rlwatch.alerts.dispatch import Dispatcher
from rlwatch.alerts.rules import Policy
from rlwatch.monitor import checkpoint
from rlwatch.monitor.engine import Monitor, Outcome
from rlwatch.monitor.sink import MonitorSink
from rlwatch.ports import Checkpoint, History, Progress, Storable, Store
from rlwatch.records import Event, StepRecord
from rlwatch.seam import described

logger = logging.getLogger("rlwatch")
AT_ONCE = 64
"""Rows between two looks at whether to stop."""
CHECKPOINT_S, CHECKPOINT_ROWS, CHECKPOINT_SHARE = 60.0, 500, 0.01
"""A checkpoint is made after so many seconds or rows, and takes at most this share of the judge's time."""


def past_of(store: Store, run_id: str, monitor: Callable[[], Monitor]) -> History:
    """What an attempt continues: the newest checkpoint that fits, given to the monitor just reset, and later rows."""

    def history(attempt: int, before_step: int) -> Iterator[StepRecord | Event]:
        after = 0
        by = checkpoint.made_by(monitor())
        if by:
            bounds = store.branch_bounds(run_id, attempt, before_step)
            kept = store.checkpoint(run_id, by, lambda _, of, step: step < bounds.get(of, -1))
            if kept is not None and checkpoint.opened(kept, monitor()):
                after = kept.seq
        yield from store.branch(run_id, attempt, before_step, after_seq=after)

    return history


def judge_rest(
    store: Store, run_id: str, policy: Policy, dispatcher: Dispatcher, announce: Callable[[Outcome], None] | None = None
) -> bool:
    """Judge what a dead process left stored and not judged, and tell it, once; whether there was anything.

    Nothing is done where somebody writes the run. Its lock is held only to write, so that a new attempt need not wait:
    one that begins meanwhile judges for itself.
    """
    done, last = store.judged(run_id)
    if done >= last or not _is_left(store, run_id):
        return False
    run, found = store.run(run_id), list[Storable]()
    monitor = Monitor(
        run_id=run_id, source=run.source, rules=policy.rules, history=past_of(store, run_id, lambda: monitor)
    )
    sink = MonitorSink(monitor, run, store, dispatcher=dispatcher, keep=found.extend, announce=announce, amends=True)
    sink.holding = True
    judging = Judging(monitor, sink, store, run_id, judged=lambda *_: None)
    judging.begin(last)
    while judging.stored():
        pass
    judging.close()
    writer = store.amend_run(run_id)
    if writer is None:
        return False
    with closing(writer):
        writer.write(found)
        sink.release()
        if not sink.settled:
            return False  # the next look judges, and finds, the same again
        writer.write([], Progress(judged=judging.seq))
    return True


def _is_left(store: Store, run_id: str) -> bool:
    """Whether nobody writes the run, and we could."""
    writer = store.amend_run(run_id)
    if writer is not None:
        writer.close()
    return writer is not None


class Judging:
    """A sink, and how far it came in the rows of its run.

    Parameters
    ----------
    judged
        Called with the ``seq`` up to which everything is judged and written, and perhaps a checkpoint.
    """

    def __init__(
        self,
        monitor: Monitor,
        sink: MonitorSink,
        store: Store,
        run_id: str,
        *,
        judged: Callable[[int, Checkpoint | None], None],
    ) -> None:
        self.seq = 0
        """Of the last item taken."""
        self._monitor, self._sink, self._store, self._run_id = monitor, sink, store, run_id
        self._judged = judged
        self._attempt = 0
        self._said = -1
        self._highest = -1
        self._by: str | None = None
        self._kept_at, self._kept_seq, self._cost_s = time.monotonic(), 0, 0.0

    def begin(self, up_to: int) -> None:
        """Go where judging ended: to ``up_to``, the run's last ``seq``, or to what an earlier process left unjudged."""
        done, last = self._store.judged(self._run_id)
        self.seq = self._kept_seq = up_to
        if done >= min(last, up_to):
            return
        first = self._store.stream(self._run_id, after_seq=done, limit=1)
        if not first:
            return
        of = self._attempt = first[0].attempt
        self.seq = self._store.first_seq(self._run_id, of) - 1
        by = checkpoint.made_by(self._monitor)
        kept = (
            self._store.checkpoint(self._run_id, by, lambda seq, attempt, _: seq <= done and attempt == of)
            if by
            else None
        )
        if kept is not None and checkpoint.opened(kept, self._monitor):
            self.seq, self._highest = kept.seq, kept.step
        self._kept_seq = self.seq

    def stored(self) -> bool:
        """Judge the next rows of the store; whether there were any."""
        rows = self._store.stream(self._run_id, after_seq=self.seq, limit=AT_ONCE)
        if rows:
            self.take(rows)
        return bool(rows)

    def take(self, rows: Sequence[StepRecord | Event]) -> None:
        """Judge these. Raises ``Interrupted``."""
        for attempt in dict.fromkeys(row.attempt for row in rows):
            if self._attempt not in (0, attempt):
                self._sink.end_attempt()
                self._highest = -1
            self._attempt = attempt
            of_it = [row for row in rows if row.attempt == attempt]
            self._highest = max([self._highest, *(row.step for row in of_it if row.step is not None)])
            try:
                self._sink.write(of_it)
            finally:
                self.seq = max(self.seq, self._sink.seq)
        self.note()

    def tick(self) -> None:
        """What time alone makes due, and what could not be written before."""
        self._sink.tick()
        self.note()

    def note(self) -> None:
        """Say how far it came, if all that was found is written."""
        if not self._sink.settled:
            return
        since = self._monitor.open_since
        upto = self.seq if since is None else since - 1
        kept = self._checkpoint()
        if kept is not None or upto != self._said:
            self._said = upto
            self._judged(upto, kept)

    def close(self) -> None:
        """Judge the last step, too: nothing more comes."""
        self._sink.close()
        if self._sink.settled:
            self._judged(self.seq, None)

    def _checkpoint(self) -> Checkpoint | None:
        now, rows = time.monotonic(), self.seq - self._kept_seq
        since = now - self._kept_at
        due = rows > 0 and (since >= CHECKPOINT_S or rows >= CHECKPOINT_ROWS)
        if not due or since < self._cost_s / CHECKPOINT_SHARE or self._monitor.waits:
            return None
        if self._by is None:
            self._by = checkpoint.made_by(self._monitor)
        self._kept_at, self._kept_seq = now, self.seq
        if not self._by:
            return None
        try:
            kept = checkpoint.sealed(self._monitor, self._by, seq=self.seq, attempt=self._attempt, step=self._highest)
        except Exception as error:  # noqa: BLE001  (a shortcut that is not to be had: a resume relives instead)
            self._by = ""
            logger.debug("what the judge knows cannot be kept: %s", described(error))
            return None
        self._cost_s = time.monotonic() - now
        return kept
