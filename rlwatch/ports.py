"""Protocols between the layers of rlwatch: each states what a layer expects of the one below.

:mod:`rlwatch.run` connects the implementations; all other modules know only these protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from rlwatch.records import (
    JSON,
    Acknowledgement,
    Alert,
    AuditEntry,
    ClosedStep,
    Command,
    CommandStatus,
    CompletionBatch,
    Event,
    Finding,
    ForecastAnswer,
    ForecastRecord,
    Ledger,
    OutboxMessage,
    PackedMetrics,
    Purge,
    RunEdit,
    RunInfo,
    RunState,
    Silence,
    SpikeBatch,
    StepRecord,
)

if TYPE_CHECKING:
    import numpy as np

Item = StepRecord | SpikeBatch | CompletionBatch | Event
"""Everything that the training process may queue for its store."""
Storable = Item | Finding | ForecastRecord

History = Callable[[int, int], Iterable["StepRecord | Event"]]
"""``history(attempt, before_step)``: rows and events below ``before_step`` that ``attempt`` continues
after a resume.
"""


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one metric of one run, in the order in which the rows arrived (all arrays have the same length N).

    Parameters
    ----------
    name
        Name of the metric.
    steps
        int64, the optimizer steps.
    values
        float64, NaN and infinities as measured.
    attempts
        int64, the process of the run (1, 2, ...; a resume is a new one) that logged the row.
    seqs
        int64, the position of the row in the run's stream of rows and events.

    Other series may share all arrays but ``values``; shared arrays are read-only.
    """

    name: str
    steps: np.ndarray
    values: np.ndarray
    attempts: np.ndarray
    seqs: np.ndarray


@dataclass(frozen=True, slots=True)
class Delivery:
    """Outcome of one attempt to send a message to a notification channel.

    Parameters
    ----------
    ok
        Whether the message was sent.
    reason
        Reason for a failure.
    retryable
        Whether another attempt may succeed.
    retry_after_s
        Seconds that the receiver asked to wait, if it did.
    """

    ok: bool
    reason: str = ""
    retryable: bool = True
    retry_after_s: float | None = None


class Sink(Protocol):
    """Destination of the rows and events that a run records. Its methods may raise: the writer thread
    counts the error.
    """

    def write(self, batch: Sequence[Item]) -> None:
        """Take a batch of rows, events and token data, in order of arrival; rows and events carry
        their number ``seq``.
        """
        ...

    def tick(self) -> None:
        """Do periodic work (polling, heartbeats, retries); called many times a second, between batches."""
        ...

    def close(self) -> None:
        """Write what is buffered and release resources. Called once."""
        ...


class PendingRecord(Protocol):
    """Measurements of one step by one rank, made on the training thread and read later on another thread."""

    @property
    def step(self) -> int:
        """The trainer's global optimizer step."""
        ...

    def ready(self) -> bool:
        """Return whether the measurements can be read without waiting for a device (their copy from the GPU is
        complete).
        """
        ...

    def encode(self) -> bytes:
        """Return the measurements as bytes to be sent to rank 0, where :meth:`merged` decodes them."""
        ...

    def merged(self, others: Mapping[int, bytes]) -> tuple[Mapping[str, float], Sequence[SpikeBatch]]:
        """Return the metrics and the extreme tokens of the whole step: those of this rank and of the ``others``
        together.

        ``others``: rank -> the bytes that :meth:`encode` returned there.
        """
        ...


class Meeting(Protocol):
    """Shared storage in which the ranks of a run leave short texts under names; no rank waits for another.

    Used from several threads. Methods may raise ``RLWatchError`` where the storage cannot be reached.
    """

    def put(self, name: str, text: str) -> None:
        """Store ``text`` under ``name`` for the other ranks."""
        ...

    def get(self, name: str) -> str | None:
        """Return the text that a rank stored under ``name``; None if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Saved state of the program that searches a run for failures (its detectors, forecaster and alert rules).

    From it the search can continue without reading the run from its beginning.

    Parameters
    ----------
    seq, attempt
        Position of the last row that had been examined, and the process of the run that logged it.
    step
        Highest step of this attempt examined by then. An attempt that begins above it continues from this state.
    made_by
        Name and version of the program; only the same one can read ``body``.
    body
        The state as bytes.
    """

    seq: int
    attempt: int
    step: int
    made_by: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress that is stored together with a batch of a run's items.

    Parameters
    ----------
    journaled
        Numbers of the items in the journal (the file that keeps items until they are stored) that this write stores.
    judged
        Position ``seq`` up to which the run has been searched for failures; None: unchanged.
    checkpoint
        State of that search; None: unchanged.
    """

    journaled: Sequence[int] = ()
    judged: int | None = None
    checkpoint: Checkpoint | None = None


class RowShape(Protocol):
    """Decoder for packed rows that all have the same metric names in the same order."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the metrics, in the order of their values in a packed row."""
        ...

    def opened(self, frame: bytes) -> tuple[int, int, float, PackedMetrics]:
        """Decode the packed row ``frame``: its number in the journal, step, time (Unix seconds) and metrics."""
        ...


KeptRow = tuple[bytes, RowShape]
"""A row of numbers as bytes in a journal, with the shape that decodes it later."""


class Journal(Protocol):
    """File that keeps logged items of a run until the store has them, in case the process dies before that.

    Any thread may call the methods that append. They return the number of the item in the journal, or 0 if it was not
    kept.
    """

    @property
    def filled(self) -> float:
        """Used share of the journal's space; from 1 on only events are kept."""
        ...

    @property
    def cramped(self) -> bool:
        """Return whether the disk had no space for the last item."""
        ...

    @property
    def refusals(self) -> int:
        """Number of items that were not kept because the disk had no space."""
        ...

    @property
    def limit(self) -> str:
        """Description of the journal's space, for messages."""
        ...

    def keep(self, step: int, metrics: dict[str, Any]) -> KeptRow | None:
        """Append a row to the journal quickly, if its metric names equal those of the last row; return it in packed
        form.

        Returns None if the row was not kept: then call :meth:`append_record`.
        """
        ...

    def append_record(self, step: int, ts: float, metrics: Mapping[str, float], *, whole: bool = True) -> int:
        """Keep one row of numbers: metric name -> value at ``step``, logged at ``ts`` (Unix seconds). Return its
        number, or 0.

        ``whole``: whether these are all metrics of the row.
        """
        ...

    def append(self, item: SpikeBatch | CompletionBatch | Event) -> int:
        """Keep an event, or a batch of tokens or completions; return its number, or 0. Raises what encoding the item
        raises.
        """
        ...

    def note_end(self, state: RunState, reason: str, now: float) -> None:
        """Keep how the run ended (``state`` and ``reason``, at ``now`` in Unix seconds).

        It is used if this process is gone before :meth:`RunWriter.finish` is called.
        """
        ...

    def note_lost(self, event: Event) -> None:
        """Keep the event that reports lost rows, where the store cannot take it."""
        ...

    def make_room(self) -> None:
        """Release the disk space that was reserved for the last entries of the run."""
        ...

    def on_disk(self) -> bool:
        """Wait until the disk has all kept items; return False if it reports an error: items it had not written are
        lost.
        """
        ...

    def tend(self) -> None:
        """Prepare space in the journal for more items; the writer thread calls it often."""
        ...

    def give_up(self, kind: type[SpikeBatch | CompletionBatch]) -> list[tuple[int, Item]] | None:
        """Remove some of the oldest batches of ``kind`` to free space; return those that are not stored, with their
        numbers.

        Returns None if the journal has no batch of this kind.
        """
        ...

    def missing(self, taken: Container[int] = (), limit: int | None = None) -> list[tuple[int, Item]]:
        """Return the first ``limit`` kept items that are undamaged and not yet stored, as pairs of number and item.

        ``taken``: numbers of items to leave out. ``limit`` None: all.
        """
        ...


class RunWriter(Protocol):
    """The one writer of a run in its store. Used from one thread at a time."""

    run: RunInfo
    last_seq: int
    journal: Journal | None
    """File that keeps items until they are stored; None for a store that does not outlive the process."""

    def write(self, items: Sequence[Storable], progress: Progress | None = None) -> None:
        """Store all of ``items`` and the ``progress``, or nothing; what is stored survives the death of this process.

        Raises ``StoreFullError`` on a full disk, ``UnstorableError`` with an item that cannot be stored as it is, and
        ``StoreError`` otherwise.
        """
        ...

    def heartbeat(self, now: float, stage: str = "", since: float | None = None) -> None:
        """Record that the writer is alive at ``now``, the ``stage`` of its process, and when the stage began (Unix
        seconds).
        """
        ...

    def finish(self, state: RunState, reason: str, now: float) -> None:
        """Record the end of the run at ``now`` (Unix seconds), and leave its files readable anywhere
        without a writer.
        """
        ...

    def close(self) -> None:
        """Release the lock on the run; idempotent. Without :meth:`finish` the run remains ``running``."""
        ...


class RunReader(Protocol):
    """Read access to the runs in a store. Reading never blocks or changes a writer; every result is a snapshot."""

    def runs(self, *, deleted: bool = False) -> list[RunInfo]:
        """Return all readable runs, newest first; with ``deleted`` only those that a user deleted.

        Runs that cannot be read are in :meth:`unreadable`.
        """
        ...

    def at_once(self, run_id: str) -> AbstractContextManager[None]:
        """Return a context in which this thread reads one snapshot of the run, where that is faster;
        it must only read.
        """
        ...

    def unreadable(self) -> Mapping[str, str]:
        """Return run id (or directory name) -> reason, for every run that cannot be read."""
        ...

    def run(self, run_id: str) -> RunInfo:
        """Return the run with this id. Raises ``RunNotFoundError``."""
        ...

    def configs(self, run_id: str) -> Mapping[int, Mapping[str, JSON]]:
        """Return attempt (process of the run: 1, 2, ...) -> its configuration at the start; ``{}`` without one."""
        ...

    def records(
        self, run_id: str, *, after_seq: int = 0, limit: int | None = None, last: int | None = None
    ) -> list[StepRecord]:
        """Return the rows of a run in the order ``seq`` in which they were stored, of all attempts.

        Parameters
        ----------
        run_id
            Id of the run.
        after_seq
            Only rows stored after this position.
        limit
            Largest number of rows, from the first on.
        last
            Only this many newest rows.
        """
        ...

    def branch(
        self, run_id: str, attempt: int, before_step: int, *, after_seq: int = 0
    ) -> Iterator[StepRecord | Event]:
        """Yield the rows and events of earlier attempts that ``attempt``, which starts at ``before_step``, continues.

        After a resume from a checkpoint, rows of the earlier process beyond the checkpoint are not part of the run's
        history. Of attempt k the result has the steps below the first step of attempt k+1, and so on back. It is in
        order of ``seq``, and only above ``after_seq``. It is one snapshot, read in portions: close the iterator if you
        do not read it to its end.
        """
        ...

    def stream(self, run_id: str, *, after_seq: int, limit: int) -> list[StepRecord | Event]:
        """Return the next ``limit`` rows and events stored after the position ``after_seq``, in order."""
        ...

    def judged(self, run_id: str) -> tuple[int, int]:
        """Return two positions ``seq`` of a run: up to which it was searched for failures, and the last one.

        Up to the first one all findings, forecasts and alerts are stored.
        """
        ...

    def first_seq(self, run_id: str, attempt: int) -> int:
        """Return the first position ``seq`` that rows of ``attempt`` may have."""
        ...

    def checkpoint(
        self, run_id: str, made_by: str, fits: Callable[[int, int, int], bool] = lambda *_: True
    ) -> Checkpoint | None:
        """Return the newest saved state of the failure search that the program ``made_by`` wrote; None without one.

        ``fits(seq, attempt, step)`` selects the acceptable ones by position, attempt and step.
        """
        ...

    def branch_bounds(self, run_id: str, attempt: int, before_step: int) -> Mapping[int, int]:
        """Return earlier attempt -> the step below which its rows belong to the history of ``attempt``.

        :meth:`branch` returns these rows. ``before_step``: the first step of ``attempt``.
        """
        ...

    def steps(self, run_id: str) -> dict[int, list[int]]:
        """Return attempt -> the steps of its rows, ascending; attempts without rows are left out."""
        ...

    def metric_names(self, run_id: str) -> list[str]:
        """Return the sorted names of all metrics ever recorded for the run."""
        ...

    def spans(self, run_id: str) -> Mapping[int, tuple[int, int]]:
        """Return attempt -> the lowest and the highest step of its rows; attempts without rows are left out."""
        ...

    def series(
        self,
        run_id: str,
        names: Sequence[str],
        *,
        after_seq: int = 0,
        steps: tuple[int, int] | None = None,
        points: int | None = None,
    ) -> dict[str, Series]:
        """Return metric name -> its series over all attempts of a run; the series of an unknown name is empty.

        Metrics with the same rows may share ``steps``, ``attempts`` and ``seqs``, which are read-only.

        Parameters
        ----------
        run_id
            Id of the run.
        names
            Names of the metrics.
        after_seq
            Only rows stored after this position.
        steps
            Only rows from the first to the second step, inclusive.
        points
            Width of a chart in points: longer series are thinned to about as many rows. Every remaining row was
            measured. Each stretch of rows that makes up a point keeps its smallest and largest finite value and its
            first NaN, +Inf and -Inf, separately for rows that a later attempt replaced. The newest rows and short
            series are not thinned. None: all rows.
        """
        ...

    def moments(self, run_id: str) -> Series:
        """Return the times (Unix seconds) of all rows of a run as a series, in order of ``seq``; NaN where a row has
        none.
        """
        ...

    def last_values(self, run_id: str) -> dict[str, tuple[int, float]]:
        """Return metric name -> (step, value) of the last row that has the metric."""
        ...

    def spikes(
        self, run_id: str, *, last: int | None = None, reason: str | None = None, step: int | None = None
    ) -> list[SpikeBatch]:
        """Return the recorded batches of extreme or responsible tokens of a run, by step.

        Batches whose reason is in :data:`rlwatch.records.APART` are returned only if ``reason`` asks for them.

        Parameters
        ----------
        run_id
            Id of the run.
        last
            Only this many newest batches.
        reason
            Only batches recorded for this reason, such as :data:`rlwatch.records.CULPRITS`.
        step
            Only batches of this step.
        """
        ...

    def top_spikes(self, run_id: str, *, limit: int = 50) -> list[Mapping[str, JSON]]:
        """Return the ``limit`` worst recorded tokens of a run, the worst first, as column -> value.

        The columns are those of the batches, and ``step``, ``attempt`` and ``rank``. Whole responses (reason
        :data:`rlwatch.records.RESPONSES`) are left out: other batches have their worst tokens already.
        """
        ...

    def completions(self, run_id: str, *, last: int | None = None) -> list[CompletionBatch]:
        """Return the recorded completions of a run in batches by step; with ``last``, only that many newest batches."""
        ...

    def findings(self, run_id: str) -> list[Finding]:
        """Return the findings (detected problems) of a run in order of ``seq``: those that began or became worse."""
        ...

    def recoveries(self, run_id: str) -> list[Finding]:
        """Return the recoveries of a run in order of ``seq``: findings (detected problems) that eased or ended."""
        ...

    def forecasts(self, run_id: str, *, last: int | None = None) -> list[ForecastRecord]:
        """Return the forecasts of a run in order of ``seq``, or only the ``last`` newest ones.

        :meth:`series` has their numbers as metrics.
        """
        ...

    def events(self, run_id: str, *, after_seq: int = 0) -> list[Event]:
        """Return the events of a run (resumes, exceptions, notes ...) after the position ``after_seq``, in order."""
        ...


class CommandStore(Protocol):
    """Commands of users to live runs, stored as rows.

    Methods may raise ``StoreBusyError`` (try again) and ``ControlUnavailableError``.
    """

    def submit(self, command: Command) -> Command:
        """Store the command and return it; if the run already has one with the same idempotency key, return that one
        instead.
        """

    def commands(self, run_id: str, status: CommandStatus | None = None) -> list[Command]:
        """Return the commands of a run, oldest first; with ``status``, only those with this status."""

    def claim(self, run_id: str, now: float) -> list[Command]:
        """Claim all queued commands of a run for its training process and return them; those past their expiry time are
        expired.

        ``now``: Unix seconds. Claimed commands have the status ``claimed``.
        """

    def settle(
        self, run_id: str, command_id: str, status: CommandStatus, now: float, *, step: int | None, result: str
    ) -> Command:
        """Set the final status of a ``claimed`` or ``cancelling`` command and return the command.

        A command that is settled twice keeps its first result.

        Parameters
        ----------
        run_id, command_id
            Ids of the run and of the command.
        status
            ``done``, ``rejected``, ``failed``, ``expired`` or ``cancelled``.
        now
            Unix seconds.
        step
            Optimizer step at which the command was executed, if it was.
        result
            Report or reason, as text.
        """

    def cancel(self, run_id: str, command_id: str, now: float, *, result: str) -> Command:
        """Cancel a command: ``queued`` becomes ``cancelled``; ``claimed`` becomes ``cancelling``, which its process
        settles.

        One transaction, exclusive of :meth:`claim` and :meth:`settle`. A settled command remains as it is. ``now``:
        Unix seconds; ``result``: the reason.
        """


Composer = Callable[[Ledger], Sequence[OutboxMessage]]
"""Function that returns the messages to write, given the alerts, messages and acknowledgements that exist."""


class AlertStore(Protocol):
    """Storage of alerts, outgoing messages (the outbox), acknowledgements and silences. Methods may raise
    ``StoreBusyError``.
    """

    def put_alerts(self, alerts: Sequence[Alert], messages: Sequence[OutboxMessage]) -> None:
        """Insert or update alerts by id, and insert those messages whose id is new, in one transaction."""

    def publish(self, run_id: str, alerts: Sequence[Alert], compose: Composer) -> list[OutboxMessage]:
        """Insert or update alerts of a run, then insert the messages that ``compose(ledger)`` returns, in one
        transaction.

        Returns the messages whose id was new. ``ledger`` holds the run's alerts, messages and acknowledgements. The
        transaction excludes other writers of them, so that two processes cannot both publish the same message.
        """

    def ledger(self, run_id: str) -> Ledger:
        """Return the alerts, messages and acknowledgements of a run at one moment, each list oldest first."""

    def alerts(self, run_id: str | None = None) -> list[Alert]:
        """Return the alerts of one run, or of all runs, newest first."""

    def acknowledge(self, acknowledgement: Acknowledgement) -> Acknowledgement:
        """Store the acknowledgement of an alert and return the valid one.

        An earlier acknowledgement of the alert remains, and is returned, unless the new one covers a higher severity.
        """

    def acknowledgements(self, run_id: str | None = None) -> list[Acknowledgement]:
        """Return the acknowledgements of alerts of one run, or of all runs."""

    def put_silence(self, silence: Silence) -> None:
        """Store a silence (a period without notifications), or replace the one with its id. It belongs to the store,
        not to a run.
        """

    def silences(self) -> list[Silence]:
        """Return all silences (periods without notifications), oldest first, with those that are over."""

    def put_entry(self, entry: AuditEntry) -> None:
        """Add an entry to the audit log of user actions; an entry with a known id is ignored."""

    def audit(self, run_id: str | None = None) -> list[AuditEntry]:
        """Return the entries of the audit log of user actions (about one run, or all), oldest first."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Return a context that holds a lock across all processes, for publishing alerts of several runs in one
        message.
        """

    def lease_messages(
        self, now: float, *, lease_s: float, limit: int = 10, channels: Sequence[str] | None = None
    ) -> list[OutboxMessage]:
        """Lease up to ``limit`` unsent messages that are due, so that no other process sends them, and return them,
        oldest first.

        A lease ends at ``now + lease_s`` (Unix seconds). Messages of all runs are considered.

        Parameters
        ----------
        now
            Unix seconds.
        lease_s
            Duration of a lease, seconds.
        limit
            Largest number of messages.
        channels
            Only messages of these channels, so that a process leaves those that it cannot send to others; None: all.
        """

    def settle_message(self, message: OutboxMessage) -> None:
        """Store the outcome of sending a message: its status, attempts, next_attempt_at and
        last_error; end its lease.
        """

    def retry_message(self, message: OutboxMessage) -> None:
        """Make an unsent message due now, and pending again if it was given up.

        It counts as tried at least once, so that it is sent however old it is.
        """

    def outbox(self, run_id: str | None = None) -> list[OutboxMessage]:
        """Return all outgoing messages of one run, or of all runs, oldest first."""


class Bulk(StrEnum):
    """Kinds of bulky data that explain a step of a run, and that may be removed when they are old."""

    TOKENS = "tokens"
    COMPLETIONS = "completions"


class Pruning(Protocol):
    """A store that can remove parts of runs; not every store can."""

    def prune(self, run_id: str, bulk: Bulk, before: float, *, undated: float, dry_run: bool) -> tuple[int, int]:
        """Remove a run's batches of one kind of bulky data that are older than ``before``; return their number and
        total bytes.

        Raises ``RunLockedError`` where only the writer of a live run may change it.

        Parameters
        ----------
        run_id
            Id of the run.
        bulk
            Kind of data.
        before
            Unix seconds.
        undated
            Time (Unix seconds) that batches without a time are taken to have.
        dry_run
            Count only; remove nothing.
        """


class CurationStore(Protocol):
    """Users' edits of runs, stored separately from what trainers wrote. Methods may raise ``StoreBusyError``."""

    def edit(self, edit: RunEdit) -> RunInfo:
        """Store a user's edit of a run, also while the run is being written; return the run with all edits applied."""

    def edits(self, run_id: str) -> list[RunEdit]:
        """Return all edits of the run by users, oldest first."""

    def purge(self, run_id: str, *, by: str, now: float) -> Purge:
        """Remove all data of a deleted run for good, by user ``by`` at ``now`` (Unix seconds); return a record of the
        removal.

        Raises ``StoreError`` unless the run is deleted, and ``RunLockedError`` while the run has a writer.
        """

    def purges(self) -> list[Purge]:
        """Return records of the runs whose data were removed for good, oldest first."""


class AnswerStore(Protocol):
    """Users' answers to the question whether a forecast was right. Methods may raise ``StoreBusyError``."""

    def answer_forecast(self, answer: ForecastAnswer) -> None:
        """Store a user's answer on a forecast; it replaces an earlier answer for the same attempt and step."""

    def forecast_answers(self, run_id: str | None = None) -> list[ForecastAnswer]:
        """Return users' answers on forecasts of one run, or of all readable runs, by attempt and step."""


Topic = Literal["commands", "alerts", "pages"]
"""Subjects of notifications from a store to its readers.

``commands``: commands sent or cancelled. ``alerts``: alerts, findings, messages and acknowledgements. ``pages``:
anything that a page of the dashboard shows, including rows.
"""


class News(Protocol):
    """Notifications that a store was written to. One may come twice or not at all, so readers must still poll."""

    @property
    def deaf(self) -> bool:
        """Return whether notifications currently cannot arrive, so that the reader has to poll."""

    def heard(self, timeout_s: float = 0.0) -> frozenset[str]:
        """Wait up to ``timeout_s`` seconds for the next notification; return the ids of the runs it concerns, ``""``
        for all runs.

        Returns an empty set if none came. Never raises.
        """

    def arrived(self, timeout_s: float = 0.0) -> bool:
        """Wait up to ``timeout_s`` seconds for the next notification; return whether one came. Never raises."""

    def close(self) -> None:
        """Release the connection; idempotent."""


class Store(RunReader, CommandStore, AlertStore, CurationStore, AnswerStore, Protocol):
    """A store of runs: reads and writes of runs, commands, alerts, users' edits and answers.

    :mod:`rlwatch.store` describes the contract. ``url``: address of the store.
    """

    url: str

    def news(self, topic: Topic, run_id: str | None = None) -> News | None:
        """Subscribe to notifications on a topic, of one run or all, from now on; None where the store
        cannot send any.
        """

    def open_run(self, run: RunInfo) -> RunWriter:
        """Create the run, or begin its next attempt if it exists; return its writer.

        Raises ``RunLockedError`` if another writer of the run is alive.
        """

    def amend_run(self, run_id: str) -> RunWriter | None:
        """Return a writer for a run whose process is gone, to complete its data without beginning a new attempt.

        None if the run has another writer, or cannot be written from this machine.
        """

    def close(self) -> None:
        """Release connections; idempotent."""


class Detector(Protocol):
    """Interface of a detector: it watches the metrics of a run for one failure.

    A detector is causal: at a step it uses only data up to that step.

    Attributes
    ----------
    name, family
        Unique name, and the family to which it belongs.
    kinds
        Kinds of findings that it can return.
    requires
        Alternatives: tuples of canonical metrics. The detector can run if all metrics of one tuple were ever seen.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    requires: ClassVar[tuple[tuple[str, ...], ...]]
    """Alternatives: the detector can run if all canonical metrics of any one tuple were ever seen.

    A name that ends in a slash is a prefix (``grad_layer/``): any metric with it is enough.
    """

    def update(self, step: ClosedStep) -> list[Finding]:
        """Take the next closed step (its rows merged); return the findings whose condition holds now, usually none."""

    def arrival(self, step: ClosedStep) -> list[Finding]:
        """Examine a row when it arrives, before its step closes; return findings about non-finite values only.

        The result of :meth:`update` for the closed step does not depend on this call.
        """

    def notice(self, event: Event) -> None:
        """Take an event of the run, such as ``reference_reset``; the detector may restart a baseline."""


class Notifier(Protocol):
    """Interface of a notification channel, such as a webhook. ``name``: the channel's name in the configuration.

    A channel that can send only from some processes also has a method ``present() -> bool``.
    """

    name: str

    def deliver(self, message: OutboxMessage) -> Delivery:
        """Try once to send the message, within the channel's own timeout, and return the outcome.

        Never raises for failures of the network.
        """


class CommandHandler(Protocol):
    """Interface of the code that executes one kind of command inside the trainer.

    It runs on every rank, between optimizer steps or at another point where that is safe. ``kind``: the kind of
    command.
    """

    kind: str

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` with the reason if the command cannot or must not be executed; change nothing.

        Every rank checks before any rank acts, so that either all ranks execute the command or none.
        """

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Execute the command and return its report as JSON values; raise ``RLWatchError`` with the reason to reject
        it.
        """
