"""Putting a recording run together: queue, judges, sinks, writer thread, delivery."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlwatch.clock import Clock, SystemClock
from rlwatch.control.mailbox import Mailbox
from rlwatch.errors import ConfigError
from rlwatch.monitor.engine import Monitor
from rlwatch.monitor.sink import MonitorSink
from rlwatch.ports import Detector, RunWriter, Sink, Store
from rlwatch.recorder.counters import Counters
from rlwatch.recorder.queue import BoundedQueue
from rlwatch.recorder.store_sink import StoreSink
from rlwatch.recorder.writer import Queued, Writer
from rlwatch.records import RunInfo, RunState
from rlwatch.run.acting import Acting
from rlwatch.run.alerting import Alerting
from rlwatch.run.own_log import OwnLog
from rlwatch.run.run import Engine, Run

if TYPE_CHECKING:
    from rlwatch.alerts.delivery import DeliveryThread


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
        monitor = self._monitor(info)
        queue: BoundedQueue[Queued] = BoundedQueue(self.queue_size)
        mailbox = Mailbox(self.store, info.run_id, self.clock, world_size=self.world_size)
        run = Run(info, self.counters, world_size=self.world_size)
        delivery = self.alerting.start(self.store)
        judging = self._judging(run, monitor, run_writer, delivery)
        sinks: list[Sink] = [StoreSink(run_writer, self.counters, self.clock), judging, mailbox]
        writer = Writer(queue, sinks, self.counters, attempt=info.attempt, last_seq=run_writer.last_seq)
        self._tell_listeners(run)
        run.attach(Engine(queue, writer, mailbox, self._ending(run_writer), delivery))
        writer.start()
        return run

    def _monitor(self, info: RunInfo) -> Monitor:
        return Monitor(
            run_id=info.run_id,
            source=info.source,
            detectors=self.detectors,
            rules=self.alerting.rules,
            history=lambda attempt, before: self.store.branch(info.run_id, attempt, before),
        )

    def _judging(
        self, run: Run, monitor: Monitor, run_writer: RunWriter, delivery: DeliveryThread | None
    ) -> MonitorSink:
        """What is found is stored, put down as alerts and told to ``run``."""
        return MonitorSink(
            monitor,
            run_writer,
            self.store,
            desk=self.alerting.desk(self.store, clock=self.clock),
            publish=run.publish_health,
            announce=run.announce,
            wake=delivery.wake if delivery is not None else None,
        )

    def _tell_listeners(self, run: Run) -> None:
        run.listen(OwnLog(self.alerting.policy, run.info, self.store.silences))
        if self.alerting.actions:
            run.listen(Acting(self.alerting.actions, self.store, run.info.run_id, run.event))

    def _ending(self, run_writer: RunWriter) -> Callable[[RunState, str], None]:
        def finish(state: RunState, reason: str) -> None:
            run_writer.finish(state, reason, self.clock.now())
            run_writer.close()

        return finish
