"""The seams of the house: what each floor expects of the one below, as protocols.

Wiring happens once, in :mod:`rlwatch.run`; everything else knows only these.
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
"""Anything the trainer side may enqueue."""
Storable = Item | Finding | ForecastRecord

History = Callable[[int, int], Iterable["StepRecord | Event"]]
"""``history(attempt, before_step)``: what the branch that ``attempt`` continues holds below ``before_step``."""


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
    """Outcome of one try to deliver: ``ok``, or why not and whether to try again.

    ``retry_after_s``: how long the receiver asked us to stay away, if it did.
    """

    ok: bool
    reason: str = ""
    retryable: bool = True
    retry_after_s: float | None = None


class Sink(Protocol):
    """Destination of the recorder's batches. May raise: the writer thread counts and goes on."""

    def write(self, batch: Sequence[Item]) -> None:
        """Take a batch, in order of arrival; records carry their ``seq``."""
        ...

    def tick(self) -> None:
        """Called between batches, many times a second: poll, heartbeat, retry."""
        ...

    def close(self) -> None:
        """Flush and let go. Called once."""
        ...


class PendingRecord(Protocol):
    """Measurements of one step by one rank; made on the training thread and opened on another."""

    @property
    def step(self) -> int:
        """The trainer's global step."""
        ...

    def ready(self) -> bool:
        """True if it can be read without waiting for a device."""
        ...

    def encode(self) -> bytes:
        """For rank 0, where :meth:`merged` of its own parcel takes it."""
        ...

    def merged(self, others: Mapping[int, bytes]) -> tuple[Mapping[str, float], Sequence[SpikeBatch]]:
        """The metrics and extreme tokens of the whole step: of this rank and of ``others`` (rank -> its parcel)."""
        ...


class Meeting(Protocol):
    """A meeting point of the ranks of one run: a few words under names, of which nobody waits for any.

    May raise ``RLWatchError`` where it can no longer be asked. Used from several threads.
    """

    def put(self, name: str, text: str) -> None:
        """Leave ``text`` for the other ranks."""
        ...

    def get(self, name: str) -> str | None:
        """The text that was left; None if none was yet."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Knowledge of the judge of a run once it had taken the item ``seq`` of ``attempt``.

    ``step`` is the highest it had seen of this attempt: an attempt that begins above it continues from here.
    ``made_by`` names the program, whose like alone can read ``body``.
    """

    seq: int
    attempt: int
    step: int
    made_by: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress that a write makes: the numbers of the ``journaled`` items that are stored from now on, up to which
    ``seq`` the run is ``judged``, and what its judge knew.
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
    """Items that were logged and are not yet stored, kept against the death of the process.

    A method that appends may be called from any thread and returns the item's number, or 0 if it is not kept.
    """

    @property
    def filled(self) -> float:
        """Share of the room for it that is taken; from 1 on nothing but events is kept."""
        ...

    @property
    def cramped(self) -> bool:
        """True where its disk had no room for the last item."""
        ...

    @property
    def refusals(self) -> int:
        """Number of items that its disk had no room for."""
        ...

    @property
    def limit(self) -> str:
        """Words for what room there is."""
        ...

    def keep(self, step: int, metrics: dict[str, Any]) -> KeptRow | None:
        """The quick way for a row like the last ones; None where it was not kept, and is to go the long way."""
        ...

    def append_record(self, step: int, ts: float, metrics: Mapping[str, float], *, whole: bool = True) -> int:
        """Keep one record of plain numbers; ``whole``: whether these are all of its metrics."""
        ...

    def append(self, item: SpikeBatch | CompletionBatch | Event) -> int:
        """Keep anything else. Raises what encoding it raises."""
        ...

    def note_end(self, state: RunState, reason: str, now: float) -> None:
        """Keep how the run was ended: that holds if this process is gone before :meth:`RunWriter.finish` was called."""
        ...

    def note_lost(self, event: Event) -> None:
        """Keep the event that tells of rows that were lost, where the store cannot take it."""
        ...

    def make_room(self) -> None:
        """Give up the room on the disk that was reserved for the end."""
        ...

    def tend(self) -> None:
        """Get ready for more, often; by the thread that writes."""
        ...

    def give_up(self, kind: type[SpikeBatch | CompletionBatch]) -> list[tuple[int, Item]] | None:
        """Remove some of the oldest items of a kind; which of them are not stored, by number. None: it has none."""
        ...

    def missing(self, taken: Container[int] = (), limit: int | None = None) -> list[tuple[int, Item]]:
        """The first ``limit`` that are kept, whole, not stored and not ``taken``: number and item."""
        ...


class RunWriter(Protocol):
    """The one writer of a run. Used from one thread at a time."""

    run: RunInfo
    last_seq: int
    journal: Journal | None
    """Where what is to be written may be kept until it is; None where a dead process leaves nothing anyway."""

    def write(self, items: Sequence[Storable], progress: Progress | None = None) -> None:
        """Store all of ``items`` and the ``progress`` or none, durably against the death of this process.

        Raises ``StoreFullError`` on a full disk, ``UnstorableError`` naming an item that cannot be stored as
        it is, and ``StoreError`` otherwise.
        """
        ...

    def heartbeat(self, now: float, stage: str = "", since: float | None = None) -> None:
        """Say that the writer lives, and which ``stage`` its process is in, ``since`` when (Unix seconds)."""
        ...

    def finish(self, state: RunState, reason: str, now: float) -> None:
        """Record the run's end and leave its files openable read-only anywhere."""
        ...

    def close(self) -> None:
        """Release the lock; idempotent; without ``finish`` the run stays ``running``."""
        ...


class RunReader(Protocol):
    """Reading runs: never blocks or changes a writer; every answer is a snapshot."""

    def runs(self, *, deleted: bool = False) -> list[RunInfo]:
        """All readable runs, newest first, or those that are ``deleted``. Unreadable ones: :meth:`unreadable`."""
        ...

    def at_once(self, run_id: str) -> AbstractContextManager[None]:
        """Answer what this thread asks of the run meanwhile from one snapshot where that is cheaper; only ask."""
        ...

    def unreadable(self) -> Mapping[str, str]:
        """Run id (or directory name) -> why it cannot be read."""
        ...

    def run(self, run_id: str) -> RunInfo:
        """One run. Raises ``RunNotFoundError``."""
        ...

    def configs(self, run_id: str) -> Mapping[int, Mapping[str, JSON]]:
        """Attempt -> the configuration that it was started with, ``{}`` where it was given none."""
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
        """The next ``limit`` records and events above ``after_seq``, in order of ``seq``."""
        ...

    def judged(self, run_id: str) -> tuple[int, int]:
        """Up to which ``seq`` the run's findings, forecasts and alerts are written, and its last ``seq``."""
        ...

    def first_seq(self, run_id: str, attempt: int) -> int:
        """The first ``seq`` that ``attempt`` may have written."""
        ...

    def checkpoint(
        self, run_id: str, made_by: str, fits: Callable[[int, int, int], bool] = lambda *_: True
    ) -> Checkpoint | None:
        """The newest checkpoint ``made_by`` that program of which ``fits(seq, attempt, step)``, if there is one."""
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
        """Series of ``names`` (absent names give empty series), all attempts, whole unless something is said.

        ``after_seq``: only rows above it, what is new. ``steps``: only rows from the one to the other, both included.
        ``points``: thinned for a chart of so many places. Every row that is left was measured; of each stretch of rows,
        some of which make up a place, the smallest and the largest finite value are left and the first NaN, +Inf and
        -Inf, apart for rows that a later attempt replaced; the newest rows are all left. What is short is not thinned.

        Metrics with the same rows may share ``steps``, ``attempts`` and ``seqs``, which cannot be written to.
        """
        ...

    def moments(self, run_id: str) -> Series:
        """Unix seconds of every record in order of ``seq``, all attempts; NaN where a record has none."""
        ...

    def last_values(self, run_id: str) -> dict[str, tuple[int, float]]:
        """Metric name -> (step, value) as last recorded."""
        ...

    def spikes(
        self, run_id: str, *, last: int | None = None, reason: str | None = None, step: int | None = None
    ) -> list[SpikeBatch]:
        """Spike batches by step, or the ``last`` newest; of one ``reason`` or one ``step`` only, where it is said.

        Those of :data:`rlwatch.records.APART` only where their reason is said.
        """
        ...

    def top_spikes(self, run_id: str, *, limit: int = 50) -> list[Mapping[str, JSON]]:
        """The worst rows of all spike batches, worst first: their columns, ``step``, ``attempt`` and ``rank``.

        Not of whole responses (reason :data:`rlwatch.records.RESPONSES`): their worst tokens are culprits already.
        """
        ...

    def completions(self, run_id: str, *, last: int | None = None) -> list[CompletionBatch]:
        """Recorded completions by step, or the ``last`` newest batches."""
        ...

    def findings(self, run_id: str) -> list[Finding]:
        """Published findings in order of ``seq``: those that began or became worse."""
        ...

    def recoveries(self, run_id: str) -> list[Finding]:
        """In order of ``seq``: of the findings, that they eased or are over."""
        ...

    def forecasts(self, run_id: str, *, last: int | None = None) -> list[ForecastRecord]:
        """Forecasts in order of ``seq``, or the ``last`` newest; :meth:`series` has its numbers, too."""
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
        """``claimed`` or ``cancelling`` -> an answer: ``done``, ``rejected``, ``failed``, ``expired`` or ``cancelled``.

        Settling twice keeps the first answer.
        """

    def cancel(self, run_id: str, command_id: str, now: float, *, result: str) -> Command:
        """``queued`` -> ``cancelled``; ``claimed`` -> ``cancelling``, which whoever claimed it answers.

        Decided in one transaction against :meth:`claim` and :meth:`settle`. What was answered before stays so.
        """


Composer = Callable[[Ledger], Sequence[OutboxMessage]]
"""What is to be written, given all that was."""


class AlertStore(Protocol):
    """Alerts, the outbox, acknowledgements and silences. May raise ``StoreBusyError``."""

    def put_alerts(self, alerts: Sequence[Alert], messages: Sequence[OutboxMessage]) -> None:
        """Insert or update alerts by id and insert messages whose id is new, in one transaction."""

    def publish(self, run_id: str, alerts: Sequence[Alert], compose: Composer) -> list[OutboxMessage]:
        """Insert or update alerts of the run, then insert what ``compose`` makes of its ledger, in one transaction.

        Returns the messages whose id was new. Nobody else writes alerts or messages of the run meanwhile, so that
        two who compose cannot both say a thing.
        """

    def ledger(self, run_id: str) -> Ledger:
        """The run's alerts, messages and acknowledgements at one moment, each newest last."""

    def alerts(self, run_id: str | None = None) -> list[Alert]:
        """Alerts (of one run, or of all), newest first."""

    def acknowledge(self, acknowledgement: Acknowledgement) -> Acknowledgement:
        """Keep it; an earlier one of the alert stays (and is returned) unless this one is of a higher severity."""

    def acknowledgements(self, run_id: str | None = None) -> list[Acknowledgement]:
        """Of one run, or of all."""

    def put_silence(self, silence: Silence) -> None:
        """Insert or replace by id. Silences belong to the store, not to a run."""

    def silences(self) -> list[Silence]:
        """All silences, those that are over too, oldest first."""

    def put_entry(self, entry: AuditEntry) -> None:
        """Add to what people did and said; one whose id is known is left as it is."""

    def audit(self, run_id: str | None = None) -> list[AuditEntry]:
        """All that people did and said (about one run, or at all), oldest first."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Held by one caller at a time over all processes: for telling alerts of several runs in one message."""

    def lease_messages(
        self, now: float, *, lease_s: float, limit: int = 10, channels: Sequence[str] | None = None
    ) -> list[OutboxMessage]:
        """Due pending messages nobody holds, oldest first, now held until ``now + lease_s``; over all runs.

        ``channels``: only messages of these (None: of all), so that a process leaves to others what it
        has no address for.
        """

    def settle_message(self, message: OutboxMessage) -> None:
        """Write back status, attempts, next_attempt_at, last_error; drops the lease."""

    def retry_message(self, message: OutboxMessage) -> None:
        """Make a message that is not sent due now, and pending if it was given up; it counts as tried."""

    def outbox(self, run_id: str | None = None) -> list[OutboxMessage]:
        """All messages, oldest first."""


class Bulk(StrEnum):
    """Bulk of a run that explains a step, and may be removed when it is old."""

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
    """People's words about runs, beside what trainers wrote. May raise ``StoreBusyError``."""

    def edit(self, edit: RunEdit) -> RunInfo:
        """Keep the edit, whoever writes the run meanwhile; returns the run as it is shown from now on."""

    def edits(self, run_id: str) -> list[RunEdit]:
        """All edits of the run, oldest first."""

    def purge(self, run_id: str, *, by: str, now: float) -> Purge:
        """Remove a deleted run's data for good. Raises ``StoreError`` unless it is deleted, and
        ``RunLockedError`` while somebody writes it.
        """

    def purges(self) -> list[Purge]:
        """Runs that were purged, oldest first."""


class AnswerStore(Protocol):
    """Answers of people to forecasts. May raise ``StoreBusyError``."""

    def answer_forecast(self, answer: ForecastAnswer) -> None:
        """Keep it, in place of an earlier one about the same attempt and step."""

    def forecast_answers(self, run_id: str | None = None) -> list[ForecastAnswer]:
        """Of one run, or of all that can be read, by attempt and step."""


Topic = Literal["commands", "alerts", "pages"]
"""What there can be news of: commands sent or cancelled; alerts, findings, messages and acknowledgements; whatever a
page shows, rows too.
"""


class News(Protocol):
    """Hint that something was written: it may come twice, and may be missed, so that polling stays necessary."""

    @property
    def deaf(self) -> bool:
        """True while nothing can be heard: what was missed by then has to be looked for."""

    def heard(self, timeout_s: float = 0.0) -> frozenset[str]:
        """Wait for the next, at most so long; the runs it is about, ``""`` for all. Never raises."""

    def arrived(self, timeout_s: float = 0.0) -> bool:
        """Wait for the next, at most so long; True if there was one. Never raises."""

    def close(self) -> None:
        """Let go of what it holds; idempotent."""


class Store(RunReader, CommandStore, AlertStore, CurationStore, AnswerStore, Protocol):
    """A place for runs. The contract in prose is in :mod:`rlwatch.store`."""

    url: str

    def news(self, topic: Topic, run_id: str | None = None) -> News | None:
        """News of a topic, of one run or of all, from now on; None where a store cannot push any."""

    def open_run(self, run: RunInfo) -> RunWriter:
        """Create the run, or begin its next attempt. Raises ``RunLockedError`` if another writer lives."""

    def amend_run(self, run_id: str) -> RunWriter | None:
        """The writer of a run whose process is gone, to complete what that left undone: no attempt is begun.

        None if somebody writes the run, or it cannot be written from here.
        """

    def close(self) -> None:
        """Let go of connections; idempotent."""


class Detector(Protocol):
    """Watches one failure. Causal: at a step it uses only what it has been given up to that step."""

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
        """Judge a record the moment it arrives, before its step closes (non-finite values only).

        Does not change what :meth:`update` will say of the closed step.
        """

    def notice(self, event: Event) -> None:
        """Learn of an event (``reference_reset``...), perhaps restarting a baseline."""


class Notifier(Protocol):
    """One channel to the outside. One that can deliver from some processes only also has ``present() -> bool``."""

    name: str

    def deliver(self, message: OutboxMessage) -> Delivery:
        """Try once, within the notifier's own timeout; never raises for what the network does."""


class CommandHandler(Protocol):
    """Executes one kind of command inside the trainer, at a boundary where that is safe, on every rank."""

    kind: str

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` with the reason if it cannot or must not be done; changes nothing.

        Every rank checks before any rank acts, so that all do it or none.
        """

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Do it and return what to report; raise ``RLWatchError`` with the reason to reject."""
