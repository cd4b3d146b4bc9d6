"""Interfaces between layers: what each layer expects of the one below, as protocols.

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
"""Everything that the trainer side may enqueue."""
Storable = Item | Finding | ForecastRecord

History = Callable[[int, int], Iterable["StepRecord | Event"]]
"""``history(attempt, before_step)``: rows below ``before_step`` of the branch that ``attempt`` continues."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one run, in order of arrival (all arrays of equal length N).

    ``steps`` int64, ``values`` float64 (nan and inf as measured), ``attempts`` int64, ``seqs`` int64. All but the
    values may be shared with other series, and are read-only then.
    """

    name: str
    steps: np.ndarray
    values: np.ndarray
    attempts: np.ndarray
    seqs: np.ndarray


@dataclass(frozen=True, slots=True)
class Delivery:
    """Outcome of one delivery: ``ok``, or the reason and whether to retry.

    ``retry_after_s``: seconds that the receiver asked to wait, if it did.
    """

    ok: bool
    reason: str = ""
    retryable: bool = True
    retry_after_s: float | None = None


class Sink(Protocol):
    """Destination of the recorder's batches. May raise: the writer thread counts the error and continues."""

    def write(self, batch: Sequence[Item]) -> None:
        """Take a batch, in order of arrival; records carry their ``seq``."""
        ...

    def tick(self) -> None:
        """Called between batches, many times a second: poll, heartbeat, retry."""
        ...

    def close(self) -> None:
        """Flush and release resources. Called once."""
        ...


class PendingRecord(Protocol):
    """Measurements of one step by one rank; made on the training thread and opened on another."""

    @property
    def step(self) -> int:
        """The trainer's global step."""
        ...

    def ready(self) -> bool:
        """Return whether it can be read without waiting for a device."""
        ...

    def encode(self) -> bytes:
        """Return the bytes for rank 0, whose own record's :meth:`merged` takes them."""
        ...

    def merged(self, others: Mapping[int, bytes]) -> tuple[Mapping[str, float], Sequence[SpikeBatch]]:
        """Return metrics and extreme tokens of the whole step, of this rank and of ``others`` (rank -> its record)."""
        ...


class Meeting(Protocol):
    """A place where the ranks of one run leave short texts under names; no rank waits for another.

    May raise ``RLWatchError`` where it is no longer reachable. Used from several threads.
    """

    def put(self, name: str, text: str) -> None:
        """Leave ``text`` for the other ranks."""
        ...

    def get(self, name: str) -> str | None:
        """Return the text that was left; None without one."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """State of a run's judge after the item ``seq`` of ``attempt``.

    ``step`` is the highest step it had seen of this attempt: an attempt that begins above it continues from here.
    ``made_by`` names the program; only the same program can read ``body``.
    """

    seq: int
    attempt: int
    step: int
    made_by: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress made by a write: the numbers of the ``journaled`` items that are now stored, the ``seq`` up to which the
    run is ``judged``, and the state of its judge.
    """

    journaled: Sequence[int] = ()
    judged: int | None = None
    checkpoint: Checkpoint | None = None


class RowShape(Protocol):
    """Packing of rows of the same names."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the metrics."""
        ...

    def opened(self, frame: bytes) -> tuple[int, int, float, PackedMetrics]:
        """Number in the journal, step, time (Unix seconds) and metrics of a row."""
        ...


KeptRow = tuple[bytes, RowShape]
"""A row of plain numbers as a journal keeps it, which may be opened later."""


class Journal(Protocol):
    """Items that were logged and are not yet stored, kept in case the process dies.

    Any thread may call the methods that append; they return the item's number, or 0 if it is not kept.
    """

    @property
    def filled(self) -> float:
        """Return the share of its space that is used; from 1 on only events are kept."""
        ...

    @property
    def cramped(self) -> bool:
        """Return whether its disk had no space for the last item."""
        ...

    @property
    def refusals(self) -> int:
        """Return the number of items for which its disk had no space."""
        ...

    @property
    def limit(self) -> str:
        """Return a description of its space."""
        ...

    def keep(self, step: int, metrics: dict[str, Any]) -> KeptRow | None:
        """Keep a row like the last ones quickly; return None where it was not kept and needs :meth:`append_record`."""
        ...

    def append_record(self, step: int, ts: float, metrics: Mapping[str, float], *, whole: bool = True) -> int:
        """Keep one record of plain numbers; ``whole``: whether these are all of its metrics."""
        ...

    def append(self, item: SpikeBatch | CompletionBatch | Event) -> int:
        """Keep anything else. Raises what encoding it raises."""
        ...

    def note_end(self, state: RunState, reason: str, now: float) -> None:
        """Keep how the run ended, in case this process is gone before :meth:`RunWriter.finish` is called."""
        ...

    def note_lost(self, event: Event) -> None:
        """Keep the event that reports lost rows, where the store cannot take it."""
        ...

    def make_room(self) -> None:
        """Release the disk space that was reserved for the end of the run."""
        ...

    def on_disk(self) -> bool:
        """Wait until the disk has what is kept. False where it refuses: what it had not written by then is lost."""
        ...

    def tend(self) -> None:
        """Prepare for more items; called often by the thread that writes."""
        ...

    def give_up(self, kind: type[SpikeBatch | CompletionBatch]) -> list[tuple[int, Item]] | None:
        """Remove some of the oldest items of a kind; return those that are not stored, by number. None: it has none."""
        ...

    def missing(self, taken: Container[int] = (), limit: int | None = None) -> list[tuple[int, Item]]:
        """Return the first ``limit`` kept items that are whole, not stored and not ``taken``: number and item."""
        ...


class RunWriter(Protocol):
    """The one writer of a run. Used from one thread at a time."""

    run: RunInfo
    last_seq: int
    journal: Journal | None
    """Journal of what is still to be written; None where a dead process leaves nothing anyway."""

    def write(self, items: Sequence[Storable], progress: Progress | None = None) -> None:
        """Store all of ``items`` and the ``progress`` or none, durably against the death of this process.

        Raises ``StoreFullError`` on a full disk, ``UnstorableError`` naming an item that cannot be stored as
        it is, and ``StoreError`` otherwise.
        """
        ...

    def heartbeat(self, now: float, stage: str = "", since: float | None = None) -> None:
        """Report that the writer lives, the ``stage`` of its process, and ``since`` when (Unix seconds)."""
        ...

    def finish(self, state: RunState, reason: str, now: float) -> None:
        """Record the run's end and leave its files readable anywhere without a writer."""
        ...

    def close(self) -> None:
        """Release the lock; idempotent; without ``finish`` the run stays ``running``."""
        ...


class RunReader(Protocol):
    """Reading runs: never blocks or changes a writer; every result is a snapshot."""

    def runs(self, *, deleted: bool = False) -> list[RunInfo]:
        """Return all readable runs, newest first, or the ``deleted`` ones. Others are in :meth:`unreadable`."""
        ...

    def at_once(self, run_id: str) -> AbstractContextManager[None]:
        """Read from one snapshot in this thread meanwhile, where that is cheaper; the block must only read."""
        ...

    def unreadable(self) -> Mapping[str, str]:
        """Run id (or directory name) -> why it cannot be read."""
        ...

    def run(self, run_id: str) -> RunInfo:
        """Return one run. Raises ``RunNotFoundError``."""
        ...

    def configs(self, run_id: str) -> Mapping[int, Mapping[str, JSON]]:
        """Return attempt -> configuration at its start, ``{}`` without one."""
        ...

    def records(
        self, run_id: str, *, after_seq: int = 0, limit: int | None = None, last: int | None = None
    ) -> list[StepRecord]:
        """Records with ``seq > after_seq`` in order of ``seq``, all attempts; of these the ``last`` newest if given."""
        ...

    def branch(
        self, run_id: str, attempt: int, before_step: int, *, after_seq: int = 0
    ) -> Iterator[StepRecord | Event]:
        """Records and events of earlier attempts that ``attempt``, starting at ``before_step``, continues.

        Of attempt k those below the first step of attempt k+1, and so on back; in order of ``seq``, and only those
        above ``after_seq``. One snapshot, read bit by bit: close what is not read to its end.
        """
        ...

    def stream(self, run_id: str, *, after_seq: int, limit: int) -> list[StepRecord | Event]:
        """Return the next ``limit`` records and events above ``after_seq``, in order of ``seq``."""
        ...

    def judged(self, run_id: str) -> tuple[int, int]:
        """Return the ``seq`` up to which findings, forecasts and alerts are written, and the run's last ``seq``."""
        ...

    def first_seq(self, run_id: str, attempt: int) -> int:
        """Return the first ``seq`` that ``attempt`` may have written."""
        ...

    def checkpoint(
        self, run_id: str, made_by: str, fits: Callable[[int, int, int], bool] = lambda *_: True
    ) -> Checkpoint | None:
        """Return the newest checkpoint ``made_by`` that program with ``fits(seq, attempt, step)``; None without one."""
        ...

    def branch_bounds(self, run_id: str, attempt: int, before_step: int) -> Mapping[int, int]:
        """Earlier attempt -> the step below which :meth:`branch` has its records."""
        ...

    def steps(self, run_id: str) -> dict[int, list[int]]:
        """Attempt -> the steps it has records of, ascending; attempts without records are left out."""
        ...

    def metric_names(self, run_id: str) -> list[str]:
        """Every metric name ever recorded for the run, sorted."""
        ...

    def spans(self, run_id: str) -> Mapping[int, tuple[int, int]]:
        """Attempt -> the lowest and the highest step it has records of; attempts without records are left out."""
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
        """Return the series of ``names`` over all attempts, unless limited; unknown names have empty series.

        ``after_seq``: only newer rows. ``steps``: only rows between the two steps, inclusive. ``points``: thinned for a
        chart of that width. Every remaining row was measured. Each stretch of rows, several of which make up a point of
        the chart, keeps its smallest and largest finite value and its first NaN, +Inf and -Inf, separately for rows
        that a later attempt replaced. The newest rows and short series are not thinned.

        Metrics with the same rows may share ``steps``, ``attempts`` and ``seqs``, which are read-only.
        """
        ...

    def moments(self, run_id: str) -> Series:
        """Return the Unix seconds of every record in order of ``seq``, all attempts; NaN where a record has none."""
        ...

    def last_values(self, run_id: str) -> dict[str, tuple[int, float]]:
        """Return metric name -> (step, value) as last recorded."""
        ...

    def spikes(
        self, run_id: str, *, last: int | None = None, reason: str | None = None, step: int | None = None
    ) -> list[SpikeBatch]:
        """Return spike batches by step, or the ``last`` newest; of one ``reason`` or ``step`` if given.

        Batches in :data:`rlwatch.records.APART` are returned only for their own reason.
        """
        ...

    def top_spikes(self, run_id: str, *, limit: int = 50) -> list[Mapping[str, JSON]]:
        """Return the worst rows of all spike batches, worst first: their columns, ``step``, ``attempt`` and ``rank``.

        Whole responses (reason :data:`rlwatch.records.RESPONSES`) are left out: their worst tokens are culprits
        already.
        """
        ...

    def completions(self, run_id: str, *, last: int | None = None) -> list[CompletionBatch]:
        """Recorded completions by step, or the ``last`` newest batches."""
        ...

    def findings(self, run_id: str) -> list[Finding]:
        """Return the published findings in order of ``seq``: those that began or became worse."""
        ...

    def recoveries(self, run_id: str) -> list[Finding]:
        """Return the recoveries in order of ``seq``: findings that eased or ended."""
        ...

    def forecasts(self, run_id: str, *, last: int | None = None) -> list[ForecastRecord]:
        """Return the forecasts in order of ``seq``, or the ``last`` newest; :meth:`series` has their numbers."""
        ...

    def events(self, run_id: str, *, after_seq: int = 0) -> list[Event]:
        """Events in order of ``seq``."""
        ...


class CommandStore(Protocol):
    """Commands as rows. May raise ``StoreBusyError`` (try again) and ``ControlUnavailableError``."""

    def submit(self, command: Command) -> Command:
        """Insert, or return the command that already has this idempotency key on this run."""

    def commands(self, run_id: str, status: CommandStatus | None = None) -> list[Command]:
        """Commands of a run, oldest first."""

    def claim(self, run_id: str, now: float) -> list[Command]:
        """Expire overdue queued commands, then turn the rest ``queued`` -> ``claimed`` and return them."""

    def settle(
        self, run_id: str, command_id: str, status: CommandStatus, now: float, *, step: int | None, result: str
    ) -> Command:
        """Settle a ``claimed`` or ``cancelling`` command: ``done``, ``rejected``, ``failed``, ``expired``,
        ``cancelled``.

        A command that is settled twice keeps the first result.
        """

    def cancel(self, run_id: str, command_id: str, now: float, *, result: str) -> Command:
        """Cancel: ``queued`` -> ``cancelled``; ``claimed`` -> ``cancelling``, which the claiming process settles.

        One transaction, exclusive of :meth:`claim` and :meth:`settle`. A settled command stays as it is.
        """


Composer = Callable[[Ledger], Sequence[OutboxMessage]]
"""Returns the messages to write, given the ledger."""


class AlertStore(Protocol):
    """Alerts, the outbox, acknowledgements and silences. May raise ``StoreBusyError``."""

    def put_alerts(self, alerts: Sequence[Alert], messages: Sequence[OutboxMessage]) -> None:
        """Insert or update alerts by id and insert messages whose id is new, in one transaction."""

    def publish(self, run_id: str, alerts: Sequence[Alert], compose: Composer) -> list[OutboxMessage]:
        """Insert or update alerts of the run, then insert the messages of ``compose(ledger)``, in one transaction.

        Returns the messages whose id was new. The transaction excludes other writers of the run's alerts and messages,
        so that two processes cannot both publish the same.
        """

    def ledger(self, run_id: str) -> Ledger:
        """The run's alerts, messages and acknowledgements at one moment, each newest last."""

    def alerts(self, run_id: str | None = None) -> list[Alert]:
        """Alerts (of one run, or of all), newest first."""

    def acknowledge(self, acknowledgement: Acknowledgement) -> Acknowledgement:
        """Store it; an earlier one of the alert stays (and is returned) unless this one has a higher severity."""

    def acknowledgements(self, run_id: str | None = None) -> list[Acknowledgement]:
        """Of one run, or of all."""

    def put_silence(self, silence: Silence) -> None:
        """Insert or replace by id. Silences belong to the store, not to a run."""

    def silences(self) -> list[Silence]:
        """All silences, those that are over too, oldest first."""

    def put_entry(self, entry: AuditEntry) -> None:
        """Add an entry to the audit; an entry with a known id is ignored."""

    def audit(self, run_id: str | None = None) -> list[AuditEntry]:
        """Return the audit entries (about one run, or all), oldest first."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Hold a lock over all processes, for publishing alerts of several runs in one message."""

    def lease_messages(
        self, now: float, *, lease_s: float, limit: int = 10, channels: Sequence[str] | None = None
    ) -> list[OutboxMessage]:
        """Lease due pending messages without a lease until ``now + lease_s``, oldest first, over all runs.

        ``channels``: only messages of these channels (None: all), so that a process leaves those without a notifier to
        others.
        """

    def settle_message(self, message: OutboxMessage) -> None:
        """Write back status, attempts, next_attempt_at, last_error; drops the lease."""

    def retry_message(self, message: OutboxMessage) -> None:
        """Make an unsent message due now, and pending if it was given up; it counts as tried."""

    def outbox(self, run_id: str | None = None) -> list[OutboxMessage]:
        """All messages, oldest first."""


class Bulk(StrEnum):
    """Bulk data of a run that explain a step, and may be removed when they are old."""

    TOKENS = "tokens"
    COMPLETIONS = "completions"


class Pruning(Protocol):
    """A store that can remove parts of runs; not every store can."""

    def prune(self, run_id: str, bulk: Bulk, before: float, *, undated: float, dry_run: bool) -> tuple[int, int]:
        """Remove batches from before ``before`` (Unix seconds; those without a time count as ``undated``).

        Returns their number and their bytes; with ``dry_run`` that is all. Raises ``RunLockedError`` where the writer
        of a live run alone may change it.
        """


class CurationStore(Protocol):
    """User edits of runs, stored separately from what trainers wrote. May raise ``StoreBusyError``."""

    def edit(self, edit: RunEdit) -> RunInfo:
        """Store the edit, also while the run is written; return the run as it is shown from now on."""

    def edits(self, run_id: str) -> list[RunEdit]:
        """All edits of the run, oldest first."""

    def purge(self, run_id: str, *, by: str, now: float) -> Purge:
        """Remove a deleted run's data for good. Raises ``StoreError`` unless it is deleted, and ``RunLockedError``
        while it has a writer.
        """

    def purges(self) -> list[Purge]:
        """Runs that were purged, oldest first."""


class AnswerStore(Protocol):
    """Users' answers to forecasts. May raise ``StoreBusyError``."""

    def answer_forecast(self, answer: ForecastAnswer) -> None:
        """Store the answer; it replaces an earlier one about the same attempt and step."""

    def forecast_answers(self, run_id: str | None = None) -> list[ForecastAnswer]:
        """Of one run, or of all that can be read, by attempt and step."""


Topic = Literal["commands", "alerts", "pages"]
"""Subjects of notifications: commands sent or cancelled; alerts, findings, messages and acknowledgements; and anything
that a page shows, including rows.
"""


class News(Protocol):
    """Notification that something was written: it may come twice or not at all, so polling stays necessary."""

    @property
    def deaf(self) -> bool:
        """Return whether it currently receives nothing, so that its reader has to poll."""

    def heard(self, timeout_s: float = 0.0) -> frozenset[str]:
        """Wait up to ``timeout_s`` for the next one; return the runs concerned, ``""`` for all. Never raises."""

    def arrived(self, timeout_s: float = 0.0) -> bool:
        """Wait up to ``timeout_s`` for the next one; return whether there was one. Never raises."""

    def close(self) -> None:
        """Release resources; idempotent."""


class Store(RunReader, CommandStore, AlertStore, CurationStore, AnswerStore, Protocol):
    """A store of runs. :mod:`rlwatch.store` describes the contract."""

    url: str

    def news(self, topic: Topic, run_id: str | None = None) -> News | None:
        """Return notifications of a topic, of one run or all, from now on; None where a store cannot push any."""

    def open_run(self, run: RunInfo) -> RunWriter:
        """Create the run, or begin its next attempt. Raises ``RunLockedError`` if another writer lives."""

    def amend_run(self, run_id: str) -> RunWriter | None:
        """Return a writer for a run whose process is gone, to complete its data without a new attempt.

        None if the run has another writer, or cannot be written from here.
        """

    def close(self) -> None:
        """Release connections; idempotent."""


class Detector(Protocol):
    """Watches for one failure. Causal: at a step it uses only data up to that step."""

    name: ClassVar[str]
    family: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    requires: ClassVar[tuple[tuple[str, ...], ...]]
    """Alternatives: it can run if all canonical metrics of any one tuple were ever seen.

    A name that ends in a slash is an open family (``grad_layer/``): any of its metrics will do.
    """

    def update(self, step: ClosedStep) -> list[Finding]:
        """Take the next closed step; return the findings whose condition holds now (usually none)."""

    def arrival(self, step: ClosedStep) -> list[Finding]:
        """Judge a record when it arrives, before its step closes (non-finite values only).

        The result of :meth:`update` for the closed step does not depend on it.
        """

    def notice(self, event: Event) -> None:
        """Process an event (``reference_reset``...), which may restart a baseline."""


class Notifier(Protocol):
    """A notification channel. One that can deliver from some processes only also has ``present() -> bool``."""

    name: str

    def deliver(self, message: OutboxMessage) -> Delivery:
        """Try once, within the notifier's own timeout; never raise for failures of the network."""


class CommandHandler(Protocol):
    """Executes one kind of command inside the trainer, at a boundary where that is safe, on every rank."""

    kind: str

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` with the reason if it cannot or must not be done; changes nothing.

        Every rank checks before any rank acts, so that all do it or none.
        """

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Do it and return what to report; raise ``RLWatchError`` with the reason to reject."""
