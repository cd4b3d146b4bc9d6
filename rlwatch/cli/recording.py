"""A growing log on its way into a store, judged row by row: what a trainer's own process would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from rlwatch.alerts.desk import Desk
from rlwatch.alerts.notices import Notice
from rlwatch.alerts.policy import Policy
from rlwatch.clock import Clock, SystemClock
from rlwatch.layers import DerivedLayers
from rlwatch.monitor.engine import Monitor, Outcome
from rlwatch.monitor.judge import Judging, past_of
from rlwatch.monitor.sink import MonitorSink
from rlwatch.ports import Checkpoint, Progress, RunWriter, Store
from rlwatch.records import RunInfo, RunState, StepRecord

HEARTBEAT_S = 5.0


class Recording:
    """One run of a log, written to ``store`` and judged by ``policy``.

    Records carry their place in the log as ``seq``. Those the store has from an earlier watch of the same
    log are passed over; that watch and this one are two attempts of the run, as are two starts of a trainer
    in one log.

    Parameters
    ----------
    policy, dashboard_url
        What it is judged by, and what messages link to.
    console
        Whether messages are written for the channel ``console``, too.
    on_outcome
        Told what was found, in order.

    Raises
    ------
    RunLockedError
        If somebody writes this run already.
    """

    def __init__(
        self,
        store: Store,
        info: RunInfo,
        *,
        policy: Policy | None = None,
        dashboard_url: str = "",
        on_outcome: Callable[[Outcome], None],
        clock: Clock | None = None,
        console: bool = False,
    ) -> None:
        self.records = 0
        self._store = store
        self._info = info
        self._policy = policy or Policy()
        self._desk = Desk(
            store, self._policy, dashboard_url=dashboard_url, clock=clock or SystemClock(), console=console
        )
        self._tell = on_outcome
        self._clock = clock or SystemClock()
        self._log_attempt: int | None = None
        self._beat_due = 0.0
        self._begin()

    @property
    def run(self) -> RunInfo:
        """The run as the store began it."""
        return self._writer.run

    @property
    def kept(self) -> tuple[tuple[Notice, str], ...]:
        """What was due when somebody last looked, but kept back, and why."""
        return self._desk.kept.kept

    def take(self, records: Sequence[StepRecord]) -> None:
        """Store and judge the next records of the log."""
        fresh = [record for record in records if record.seq > self._writer.last_seq]
        for attempt, group in groupby(fresh, key=lambda record: record.attempt):
            if self._log_attempt not in (None, attempt):
                self._let_go()
                self._begin()
            self._log_attempt = attempt
            derived = self._layers.added(group)
            batch = [replace(record, attempt=self._writer.run.attempt) for record in derived]
            self._writer.write(batch)
            self._judging.take(batch)
            self.records += len(batch)

    def tick(self) -> None:
        """Say that somebody still watches; store what a busy store refused."""
        self._judging.tick()
        if self._clock.monotonic() >= self._beat_due:
            self._beat_due = self._clock.monotonic() + HEARTBEAT_S
            self._writer.heartbeat(self._clock.now())

    def finish(self, reason: str) -> None:
        """Judge the last step and end the run."""
        self._judging.close()
        self._writer.finish(RunState.FINISHED, reason, self._clock.now())
        self._writer.close()

    def _begin(self) -> None:
        self._writer: RunWriter = self._store.open_run(self._info)
        self._layers = DerivedLayers()
        run = self._writer.run
        monitor = Monitor(
            run_id=run.run_id,
            source=run.source,
            rules=self._policy.rules,
            history=past_of(self._store, run.run_id, lambda: monitor),
        )
        self._sink = MonitorSink(
            monitor,
            run,
            self._store,
            desk=self._desk,
            keep=self._writer.write,
            announce=self._tell,
            clock=self._clock,
        )
        self._judging = Judging(monitor, self._sink, self._store, run.run_id, judged=self._judged)
        self._judging.begin(self._writer.last_seq)
        while self._judging.stored():  # what an earlier watch stored and did not judge
            pass

    def _judged(self, seq: int, kept: Checkpoint | None) -> None:
        self._writer.write([], Progress(judged=seq, checkpoint=kept))

    def _let_go(self) -> None:
        self._judging.close()
        self._writer.close()
