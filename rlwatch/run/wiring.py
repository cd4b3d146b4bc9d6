"""Where a run is put together: the one place that knows every part."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlwatch.alerts.rules import Rule
from rlwatch.clock import Clock, SystemClock
from rlwatch.control.mailbox import Mailbox
from rlwatch.monitor.engine import Monitor
from rlwatch.monitor.sink import MonitorSink
from rlwatch.ports import Detector, RunWriter, Sink, Store
from rlwatch.recorder.counters import Counters
from rlwatch.recorder.queue import BoundedQueue
from rlwatch.recorder.store_sink import StoreSink
from rlwatch.recorder.writer import Queued, Writer
from rlwatch.records import RunInfo, RunState
from rlwatch.run.acting import Acting
from rlwatch.run.alerting import Alerting, alerting_for
from rlwatch.run.config import recordable
from rlwatch.run.identity import choose_run_id, remember_run_id
from rlwatch.run.lifecycle import watch_over
from rlwatch.run.own_log import OwnLog
from rlwatch.run.run import Engine, Run
from rlwatch.store.url import open_store

CONTROL_TIMEOUT_S = 0.0
"""The trainer never waits for somebody else's lock on the control file."""


def init(
    *,
    project: str = "default",
    name: str | None = None,
    run_id: str | None = None,
    resume: str = "auto",
    store: str | os.PathLike[str] | Store | None = None,
    config: Mapping[str, Any] | None = None,
    source: str = "",
    tags: Sequence[str] = (),
    output_dir: str | os.PathLike[str] | None = None,
    config_file: str | os.PathLike[str] | None = None,
    webhook_url: str | None = None,
    rules: Sequence[Rule] | None = None,
    detectors: Callable[[], Sequence[Detector]] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    queue_size: int = 10_000,
    sigterm: bool = True,
) -> Run:
    """Begin recording a run, or continue one.

    Parameters
    ----------
    project, name, tags, config
        What people will know the run by; secrets in ``config`` are blacked out.
    run_id, resume, output_dir
        Which run this is: ``run_id``, else ``RLWATCH_RUN_ID``, else the one remembered in
        ``output_dir/rlwatch.json``, else a new one. ``resume="never"`` always makes a new one, ``"must"``
        never does. Each process start is a new *attempt* of its run.
    store
        A directory, ``sqlite:///directory``, ``memory://name`` or an open store; ``RLWATCH_STORE`` or
        ``./rlwatch-runs`` if not given.
    source
        The trainer, e.g. ``"trl/grpo"``, ``"verl"``: how ambiguous metric names (``kl``) are read.
    config_file, webhook_url, rules
        Alerting: ``rlwatch.toml``; a webhook (or ``RLWATCH_WEBHOOK_URL``); rules that replace all others.
    detectors
        Makes the detectors; the default set if None.
    rank, world_size
        Of this process (default: ``RANK``, ``WORLD_SIZE``). Ranks other than 0 are inert until they are linked to
        rank 0 (:func:`rlwatch.run.joining.join`), and then send it what they measure.
    queue_size
        Records that may wait; beyond it they are dropped and counted.
    sigterm
        Whether to finish the run on SIGTERM, where no other handler is installed.

    Raises
    ------
    ConfigError
        For a setting that is wrong, or an extra that is missing.
    RunLockedError
        If another live process writes this run.
    StoreError
        If the store cannot be opened or written.
    """
    counters = Counters()
    rank = _from_environment("RANK", 0) if rank is None else rank
    world_size = _from_environment("WORLD_SIZE", 1) if world_size is None else world_size
    if rank != 0:
        info = RunInfo(run_id=run_id or "", project=project, name=name or "", source=source)
        return Run(info, counters, rank=rank, world_size=world_size)
    place = opened(store)
    alerting = alerting_for(config_file=config_file, webhook_url=webhook_url, rules=rules, store=place)
    info = RunInfo(
        run_id=choose_run_id(run_id, output_dir, project, resume),
        project=project,
        name=name or "",
        source=source,
        created_at=time.time(),
        config=recordable(config or {}),
        tags=tuple(tags),
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    writer = place.open_run(info)
    if output_dir is not None:
        remember_run_id(writer.run.run_id, output_dir)
    run = _assemble(
        writer,
        place,
        counters,
        alerting=alerting,
        detectors=detectors,
        queue_size=queue_size,
        world_size=world_size,
    )
    watch_over(run, sigterm=sigterm)
    return run


def opened(store: str | os.PathLike[str] | Store | None) -> Store:
    """The store that :func:`init` would write to. Raises ``StoreError`` if it cannot be opened."""
    if store is None or isinstance(store, str | os.PathLike):
        return open_store(store, control_timeout_s=CONTROL_TIMEOUT_S)
    return store


def _assemble(
    run_writer: RunWriter,
    store: Store,
    counters: Counters,
    *,
    alerting: Alerting,
    detectors: Callable[[], Sequence[Detector]] | None,
    queue_size: int,
    world_size: int,
) -> Run:
    clock: Clock = SystemClock()
    info = run_writer.run
    queue: BoundedQueue[Queued] = BoundedQueue(queue_size)
    mailbox = Mailbox(store, info.run_id, clock, world_size=world_size)
    monitor = Monitor(
        run_id=info.run_id,
        source=info.source,
        detectors=detectors,
        rules=alerting.rules,
        history=lambda attempt, before: store.branch(info.run_id, attempt, before),
    )
    run = Run(info, counters, world_size=world_size)
    delivery = alerting.start(store)
    monitor_sink = MonitorSink(
        monitor,
        run_writer,
        store,
        desk=alerting.desk(store, clock=clock),
        publish=run.publish_health,
        announce=run.announce,
        wake=delivery.wake if delivery is not None else None,
    )
    sinks: list[Sink] = [StoreSink(run_writer, counters, clock), monitor_sink, mailbox]
    writer = Writer(queue, sinks, counters, attempt=info.attempt, last_seq=run_writer.last_seq)

    def finish(state: RunState, reason: str) -> None:
        run_writer.finish(state, reason, clock.now())
        run_writer.close()

    run.listen(OwnLog(alerting.policy, info, store.silences))
    if alerting.actions:
        run.listen(Acting(alerting.actions, store, info.run_id, run.event))
    run.attach(Engine(queue, writer, mailbox, finish, delivery))
    writer.start()
    return run


def _from_environment(variable: str, default: int) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdigit() else default
