"""``rlwatch.init``: make a recording run from the caller's settings.

:mod:`~rlwatch.run.identity` chooses which run this is, and :class:`Assembly` makes it: intake, writer thread, judge,
sinks, delivery.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlwatch.alerts.rules import Rule
from rlwatch.clock import Clock, SystemClock
from rlwatch.control.mailbox import Mailbox
from rlwatch.errors import ConfigError, StoreError
from rlwatch.ports import Detector, RunWriter, Store
from rlwatch.recorder.intake import BoundedQueue, Intake
from rlwatch.recorder.judge_thread import JudgeThread
from rlwatch.recorder.losses import Counters
from rlwatch.recorder.writer import StoreSink, Writer
from rlwatch.records import FORECAST_SWITCH, GROUP_TAG, JSON, ORIGIN, RunInfo, RunState
from rlwatch.redaction import MAX_TEXT, recordable, redacted, tags_of
from rlwatch.run.alerting import Alerting, alerting_for
from rlwatch.run.engines import VARIABLE, Engines, addresses
from rlwatch.run.identity import (
    RUN_ID_VARIABLE,
    choose_run_id,
    new_run_id,
    origin,
    remember_run_id,
    remembered_run_id,
)
from rlwatch.run.machine import Read, machine_thread, wanted
from rlwatch.run.run import Run, RunEngine, watch_over
from rlwatch.run.stages import StallSink, StallWatch
from rlwatch.store.url import open_store

if TYPE_CHECKING:
    from rlwatch.alerts.outbox import DeliveryThread
    from rlwatch.monitor.judge import SinkProgress


CONTROL_TIMEOUT_S = 0.0
"""Seconds to wait for another process's lock on the control file: the trainer never waits."""


def init(
    *,
    project: str = "default",
    name: str | None = None,
    run_id: str | None = None,
    resume: str = "auto",
    store: str | os.PathLike[str] | Store | None = None,
    config: object = None,
    source: str = "",
    tags: Sequence[str] | str | None = (),
    group: str | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    config_file: str | os.PathLike[str] | None = None,
    webhook_url: str | None = None,
    rules: Sequence[Rule] | None = None,
    detectors: Callable[[], Sequence[Detector]] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    queue_size: int = 10_000,
    sigterm: bool = True,
    system: bool | None = None,
    engines: str | Sequence[str] | None = None,
    forecast: bool | None = None,
) -> Run:
    """Begin recording a run, or continue one.

    Parameters
    ----------
    project, name, tags, config
        Description of the run for people. ``config``: a dict, a namespace, a dataclass, OmegaConf; secrets in any of
        them are redacted (:mod:`rlwatch.redaction`).
    group
        Seeds of one configuration share it: ``rlwatch diff --group A --group B`` compares two. Kept as the tag
        ``group:NAME``, which ``rlwatch edit`` can change.
    run_id, resume, output_dir
        Which run this is: ``run_id``, else ``RLWATCH_RUN_ID``, else the one remembered in ``output_dir/rlwatch.json``,
        else a new one. ``resume="never"`` always makes a new one, ``"must"`` never does. A resume is a new *attempt* of
        its run. With ``"auto"`` a remembered run is continued only if training was resumed: if its first step is later
        than the run's first, or the trainer reports it; else a new run begins.
    store
        A directory, ``sqlite:///directory``, ``memory://name`` or an open store; ``RLWATCH_STORE`` or
        ``./rlwatch-runs`` if not given.
    source
        The trainer, e.g. ``"trl/grpo"``, ``"verl"``: how ambiguous metric names (``kl``) are read.
    config_file, webhook_url, rules
        Alerting: ``rlwatch.toml``; a webhook (or ``RLWATCH_WEBHOOK_URL``); rules that replace all others.
    detectors
        Returns new detectors; the default set if None.
    rank, world_size
        Rank of this process and number of ranks (default: ``RANK``, ``WORLD_SIZE``). Ranks other than 0 record nothing
        until they are linked to rank 0 (:func:`rlwatch.run.ranks.join`), and then send it their measurements.
    queue_size
        Largest number of records that may wait; further ones are dropped and counted.
    sigterm
        Whether to finish the run on SIGTERM, where no other handler is installed.
    system
        Whether to measure the machine (:mod:`rlwatch.run.machine`), every 15 s in a thread of its own; None: unless
        ``RLWATCH_SYSTEM`` is ``0`` or ``off``.
    engines
        Addresses of the metrics of rollout engines (:mod:`rlwatch.run.engines`), as ``http://HOST:8000/metrics``, read
        by rank 0 at the same interval; by default ``RLWATCH_ENGINES``, comma-separated.
    forecast
        Whether to forecast the run; None: the setting of ``rlwatch.toml``, else True. With few detectors, forecasting
        is most of the cost of judging.

    Raises
    ------
    ConfigError
        For a setting that is wrong, or an extra that is missing.
    RunLockedError
        If another live process writes this run.
    StoreError
        If the store cannot be opened or written.
    """
    rank = _from_environment("RANK", 0) if rank is None else rank
    world_size = _from_environment("WORLD_SIZE", 1) if world_size is None else world_size
    asked = RunInfo(run_id=run_id or "", project=project or "default", name=name or "", source=source)
    machine = MachineSettings(system, engines, {} if output_dir is None else {"checkpoints": output_dir})
    if rank != 0:
        return _inert(asked, rank, world_size, machine)
    ask = machine.engines_reader()
    place = opened(store)
    alerting = alerting_for(config_file=config_file, webhook_url=webhook_url, rules=rules, store=place).with_forecast(
        forecast
    )
    assembly = Assembly(place, alerting, detectors, queue_size, world_size)
    chosen = choose_run_id(run_id, output_dir, project, resume)
    kept = _with_group(tags, group)
    info = _of_this_process(replace(asked, run_id=chosen), config=config, tags=kept, forecast=alerting.policy.forecast)
    earlier = None if run_id or resume != "auto" else _earlier(place, chosen, output_dir)
    run = _begun(Opening(assembly, info, output_dir), earlier)
    watch_over(run, sigterm=sigterm)
    root = getattr(place, "root", None)
    run.where = str(root) if root else ""
    machine.measure(run, ask, root)
    return run


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """Settings of additional measurements: of the machine and of rollout engines.

    ``system``: whether to measure the machine; None: by ``RLWATCH_SYSTEM``. ``engines``: addresses of rollout engines;
    None: by ``RLWATCH_ENGINES``. ``places``: directories whose disks are measured, by name.
    """

    system: bool | None
    engines: str | Sequence[str] | None
    places: Mapping[str, str | os.PathLike[str]]

    def engines_reader(self) -> Read | None:
        """Return a function that reads the metrics of rollout engines; None without engines.

        Raises ``ConfigError`` for a wrong address.
        """
        asked = addresses(os.environ.get(VARIABLE, "") if self.engines is None else self.engines)
        return Engines(asked).read if asked else None

    def measure(self, run: Run, ask: Read | None, root: Path | None) -> None:
        """Begin to measure for ``run``, if anything is to be measured.

        ``ask``: function that reads the engines, or None. ``root``: directory of the store, or None.
        """
        if wanted(self.system) or ask is not None:
            at = {**self.places, "store": root} if root else self.places
            run.measure(machine_thread(0, at, engines=ask, system=wanted(self.system)))


def _inert(asked: RunInfo, rank: int, world_size: int, machine: MachineSettings) -> Run:
    """Return the run of a rank other than 0, which records nothing until it is connected to rank 0."""
    inert = Run(asked, Counters(), rank=rank, world_size=world_size)
    if wanted(machine.system) and world_size > 1:
        inert.measure(machine_thread(rank, machine.places))
    return inert


def _begun(opening: Opening, earlier: RunInfo | None) -> Run:
    """Return the run, recording; one that may continue ``earlier`` waits for its first step."""
    if earlier is None:
        return opening.begin(opening.info)
    assembly, info = opening.assembly, opening.info
    run = Run(replace(info, attempt=earlier.attempt + 1), assembly.counters, world_size=assembly.world_size)
    run.await_training(partial(opening.decide, run, _first_step(assembly.store, info.run_id)))
    return run


@dataclass(frozen=True, slots=True)
class Opening:
    """Everything needed to open a run once its id is decided.

    ``assembly``: makes the run. ``info``: description of the run that was chosen. ``output_dir``: checkpoint directory
    that keeps the id, or None.
    """

    assembly: Assembly
    info: RunInfo
    output_dir: str | os.PathLike[str] | None

    def begin(self, info: RunInfo, into: Run | None = None) -> Run:
        """Open the run ``info`` in the store and begin to record; return the run. ``into``: a run object that waited
        for it.
        """
        with ExitStack() as undo:  # release what was opened if the run cannot begin, so that it can be tried again
            writer = undo.enter_context(closing(self.assembly.store.open_run(info)))
            if self.output_dir is not None:
                remember_run_id(writer.run.run_id, self.output_dir)
            run = self.assembly.run(writer, into)
            undo.pop_all()
        return run

    def decide(self, run: Run, first_step: int, resumed: bool | None, step: int | None) -> None:
        """Begin the next attempt of an earlier run if training was resumed, else a new run.

        Parameters
        ----------
        run
            The run object that waited for this decision.
        first_step
            First step of the earlier run.
        resumed
            Whether training was resumed; None: it was if ``step`` is later than ``first_step``.
        step
            First step of this training; None: not known.
        """
        goes_on = resumed if resumed is not None else step is not None and step > first_step
        self.begin(self.info if goes_on else replace(self.info, run_id=new_run_id(self.info.project)), run)


def _earlier(place: Store, chosen: str, output_dir: str | os.PathLike[str] | None) -> RunInfo | None:
    """Return the run recorded in ``output_dir`` if it is undecided whether this training continues it.

    None if that is decided: another id was given, no run of this id has rows, or a live process writes it.
    """
    if output_dir is None or os.environ.get(RUN_ID_VARIABLE) or chosen != remembered_run_id(output_dir):
        return None
    try:
        found = place.run(chosen)
    except StoreError:
        return None  # the error is raised when the store is opened
    if found.last_step is None:
        return None
    if found.state is RunState.RUNNING:
        writer = place.amend_run(chosen)
        if writer is None:
            return None
        writer.close()
    return found


def _first_step(place: Store, run_id: str) -> int:
    return min(min(steps) for steps in place.steps(run_id).values() if steps)


def _short(text: object) -> str:
    return redacted(str(text), most=MAX_TEXT // 4)


def _of_this_process(info: RunInfo, *, config: object, tags: object, forecast: bool) -> RunInfo:
    kept: dict[str, JSON] = origin() if forecast else {**origin(), FORECAST_SWITCH: False}
    return replace(
        info,
        project=_short(info.project),
        name=_short(info.name),
        created_at=time.time(),
        config={ORIGIN: kept, **recordable(config)},
        tags=tags_of(tags),
        host=socket.gethostname(),
        pid=os.getpid(),
    )


def _with_group(tags: object, group: str | None) -> tuple[str, ...]:
    """Return the tags, with that of the group. Raises ``ConfigError`` for a group without a name."""
    if group is None:
        return tags_of(tags)
    if not isinstance(group, str) or not group.strip():
        raise ConfigError(f"group must be a text, as in group='math-7b', got {group!r}")
    return (*tags_of(tags), GROUP_TAG + group.strip())


def opened(store: str | os.PathLike[str] | Store | None) -> Store:
    """Open the store that :func:`init` would write to and return it. Raises ``StoreError`` if it cannot be opened."""
    if store is None or isinstance(store, str | os.PathLike):
        return open_store(store, control_timeout_s=CONTROL_TIMEOUT_S)
    return store


def _from_environment(variable: str, default: int) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else default


@dataclass(frozen=True, slots=True)
class Assembly:
    """Makes a recording run from its settings: the queue, the threads and their connections.

    Parameters
    ----------
    store, alerting
        Store in which it is recorded, and its alerting.
    detectors
        Makes the detectors; the default set if None.
    queue_size
        Largest number of records that wait for the writer thread.
    world_size
        Number of ranks of the training.
    counters, clock
        Counters of the run, and the clock.

    Raises
    ------
    ConfigError
        For a ``queue_size`` under 1, for ``detectors`` that is no function or makes no detectors, and for an unknown
        role in ``[map]``. Errors of ``detectors`` pass.
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
        if self.detectors is not None:  # their errors are raised now; the judge makes its own detectors
            from rlwatch.detectors.registry import made_by

            made_by(self.detectors)
        self._renaming()

    def run(self, run_writer: RunWriter, into: Run | None = None) -> Run:
        """Begin and return the run that ``run_writer`` writes; ``into``: a run object that waited for it."""
        info = run_writer.run
        intake = Intake(BoundedQueue(self.queue_size), run_writer.journal, self.counters)
        news = self.store.news("commands", info.run_id)
        mailbox = Mailbox(self.store, info.run_id, self.clock, world_size=self.world_size, news=news)
        run = into or Run(info, self.counters, world_size=self.world_size)
        run.info = info
        delivery = self.alerting.start(self.store, lambda _error: self.counters.add("errors"))
        storing = StoreSink(run_writer, self.counters, self.clock, stage=run.stages.now)
        judge = JudgeThread(run_writer.last_seq, lambda problem: self.counters.warn("errors", problem))
        writer = Writer(
            intake,
            [storing, mailbox, StallSink(StallWatch(run.stages, 0, run.tell_stall))],
            self.counters,
            judge=judge,
            attempt=info.attempt,
            last_seq=run_writer.last_seq,
            other_metrics=run.machine_found,
        )
        note_end = self._noting(run_writer)
        ending = self._ending(run_writer)
        run.attach(RunEngine(intake, writer, mailbox, ending, delivery, note_end=note_end, renamed=self._renaming()))
        run.rescue = self.alerting.rescue
        writer.start()
        judge.start(lambda: self._judging(run, writer, judge, delivery))
        return run

    def _renaming(self) -> Callable[[Mapping[str, Any]], Mapping[str, Any]] | None:
        """Return a function that renames metrics by ``[map]``. Raises ``ConfigError`` for an unknown role."""
        if not self.alerting.map:
            return None
        from rlwatch.importers.naming import naming_of  # with every importer: most runs need none

        return naming_of(configured=self.alerting.map).renamed

    def _judging(self, run: Run, writer: Writer, judge: JudgeThread, delivery: DeliveryThread | None) -> SinkProgress:
        """Make the judging of the run: monitor, sink, listeners. Called on the judge's thread: the imports are slow."""
        from rlwatch.monitor.engine import Monitor
        from rlwatch.monitor.forecasting import forecaster_for
        from rlwatch.monitor.judge import MonitorSink, SinkProgress, past_of

        self._add_listeners(run)
        monitor = Monitor(
            run_id=run.info.run_id,
            source=run.info.source,
            detectors=self.detectors,
            rules=self.alerting.rules,
            forecaster=forecaster_for(wanted=self.alerting.policy.forecast),
            history=past_of(self.store, run.info.run_id, lambda: monitor),
            explains=run.rescue is not None,  # it sets settings back that the diagnosis names
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
        return SinkProgress(monitor, sink, self.store, run.info.run_id, judged=writer.judged)

    def _add_listeners(self, run: Run) -> None:
        from rlwatch.run.alerting import OwnLog

        run.listen(OwnLog(self.alerting.policy, run.info, self.store.silences))
        if self.alerting.actions:
            from rlwatch.run.alerting import Acting

            run.listen(Acting(self.alerting.actions, self.store, run.info.run_id, run.event))

    def _noting(self, run_writer: RunWriter) -> Callable[[RunState, str], None]:
        def note(state: RunState, reason: str) -> None:
            """Store the end of the run, on the thread that ends it, which waits for a slow store only so long."""
            if run_writer.journal is not None:
                run_writer.journal.note_end(state, redacted(reason), self.clock.now())

        return note

    def _ending(self, run_writer: RunWriter) -> Callable[[RunState, str], None]:
        def finish(state: RunState, reason: str) -> None:
            """Finish on the writer thread; the run's lock is released even if the end cannot be written."""
            try:
                run_writer.finish(state, redacted(reason), self.clock.now())
            finally:
                run_writer.close()

        return finish
