"""Putting a recording run together: queue, judges, sinks, writer thread, delivery."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlwatch.clock import Clock, SystemClock
from rlwatch.control.mailbox import Mailbox
from rlwatch.errors import ConfigError
from rlwatch.ports import Detector, RunWriter, Store
from rlwatch.recorder.counters import Counters
from rlwatch.recorder.judge import JudgeThread
from rlwatch.recorder.queue import BoundedQueue, Intake
from rlwatch.recorder.store_sink import StoreSink
from rlwatch.recorder.writer import Writer
from rlwatch.records import RunState
from rlwatch.redaction import redacted
from rlwatch.run.alerting import Alerting
from rlwatch.run.run import Engine, Run

if TYPE_CHECKING:
    from rlwatch.alerts.outbox import DeliveryThread
    from rlwatch.monitor.judge import Judging


@dataclass(frozen=True, slots=True)
class Assembly:
    """What a recording run is made of, once its settings are read.

    Raises ``ConfigError`` for a ``queue_size`` under 1.

    Parameters
    ----------
    store, alerting
        Where it is recorded, and how it alerts.
    detectors
        Makes the detectors; the default set if None.
    queue_size
        Records that may wait for the writer thread.
    world_size
        Ranks of the training.
    """

    store: Store
    alerting: Alerting
    detectors: Callable[[], Sequence[Detector]] | None
    queue_size: int
    world_size: int
    counters: Counters = field(default_factory=Counters)
    clock: Clock = field(default_factory=SystemClock)

    def __post_init__(self) -> None:
        if self.queue_size < 1:
            raise ConfigError(f"queue_size must be >= 1, got {self.queue_size!r}")

    def run(self, run_writer: RunWriter) -> Run:
        """The run that ``run_writer`` writes, begun. Raises what ``detectors`` raises, before anything is started."""
        info = run_writer.run
        intake = Intake(BoundedQueue(self.queue_size), run_writer.journal, self.counters)
        mailbox = Mailbox(self.store, info.run_id, self.clock, world_size=self.world_size)
        run = Run(info, self.counters, world_size=self.world_size)
        delivery = self.alerting.start(self.store, lambda _error: self.counters.add("errors"))
        storing = StoreSink(run_writer, self.counters, self.clock)
        judge = JudgeThread(run_writer.last_seq, lambda problem: self.counters.warn("errors", problem))
        writer = Writer(
            intake,
            [storing, mailbox],
            self.counters,
            judge=judge,
            attempt=info.attempt,
            last_seq=run_writer.last_seq,
        )
        if self.detectors is not None:
            self.detectors()  # what is wrong with them is said now; the judge makes its own
        run.attach(Engine(intake, writer, mailbox, self._ending(run_writer), delivery))
        writer.start()
        judge.start(lambda: self._judging(run, writer, judge, delivery))
        return run

    def _judging(self, run: Run, writer: Writer, judge: JudgeThread, delivery: DeliveryThread | None) -> Judging:
        """What is found is stored, put down as alerts and told to ``run``. On the judge's thread: it loads a lot."""
        from rlwatch.monitor.engine import Monitor
        from rlwatch.monitor.judge import Judging, past_of
        from rlwatch.monitor.sink import MonitorSink

        self._tell_listeners(run)
        monitor = Monitor(
            run_id=run.info.run_id,
            source=run.info.source,
            detectors=self.detectors,
            rules=self.alerting.rules,
            history=past_of(self.store, run.info.run_id, lambda: monitor),
        )
        sink = MonitorSink(
            monitor,
            run.info,
            self.store,
            dispatcher=self.alerting.dispatcher(self.store, clock=self.clock),
            keep=writer.keep,
            publish=run.publish_health,
            announce=run.announce,
            wake=delivery.wake if delivery is not None else None,
            enough=judge.enough,
        )
        return Judging(monitor, sink, self.store, run.info.run_id, judged=writer.judged)

    def _tell_listeners(self, run: Run) -> None:
        from rlwatch.run.own_log import OwnLog

        run.listen(OwnLog(self.alerting.policy, run.info, self.store.silences))
        if self.alerting.actions:
            from rlwatch.run.acting import Acting

            run.listen(Acting(self.alerting.actions, self.store, run.info.run_id, run.event))

    def _ending(self, run_writer: RunWriter) -> Callable[[RunState, str], None]:
        def finish(state: RunState, reason: str) -> None:
            """On the writer thread. The run's lock goes whatever cannot be written any more."""
            try:
                run_writer.finish(state, redacted(reason), self.clock.now())
            finally:
                run_writer.close()

        return finish
